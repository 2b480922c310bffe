"""Backend: what vLLM asks of an attention backend, by its abstract classes.

vLLM imports this file once the backend was selected. A layer's cache is one tensor [blocks,
kv_heads, block_size, 2 · head_size], each key with its value behind it; as Views of it are pages
of keys and pages of values, nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

import saccade
from saccade import scores
from saccade.integrations.arguments import LARGEST_PAGE, chained, sliding_window_mask


class Backend(AttentionBackend):
    """The backend's name, its parts and what it serves."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16, torch.bfloat16, torch.float32,
    ]  # fmt: skip
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The name that `--attention-backend` takes."""
        return "SACCADE"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """What a layer holds."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """What makes `Step`."""
        return Builder

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Pages have at most 1024 slots."""
        return block_size is None or block_size <= LARGEST_PAGE

    @classmethod
    def supports_sink(cls) -> bool:
        """It does."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """It does."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """It does."""
        return True


@dataclass
class Step(AttentionMetadata):
    """Metadata of one step of the engine, the same for all layers.

    Attributes:
        num_tokens: rows that count; behind them may lie padding.
        cu_seqlens_q: int32 [requests + 1]. kv_lens: int32 [requests].
        page_table: int32 [requests, blocks].
        causal: whether tokens see those behind them.
    """

    num_tokens: int
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    causal: bool


class Builder(AttentionMetadataBuilder[Step]):
    """Makes a `Step` of what the engine planned. It asks for no CUDA graphs."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        """A step's metadata; nothing is computed and nothing is read by the host."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal: got a tensor, takes one answer for all requests")
        return Step(
            common.num_actual_tokens, common.query_start_loc, common.seq_lens,
            common.block_table_tensor, common.slot_mapping, common.causal,
        )  # fmt: skip


class Impl(AttentionImpl):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: got {attn_type}, takes a decoder's")
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            takes = ", ".join(Backend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"kv_cache_dtype: got {kv_cache_dtype}, takes {takes}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.masks = {
            causal: sliding_window_mask(sliding_window, causal) for causal in (True, False)
        }
        self.softcap = scores.softcap(logits_soft_cap) if logits_soft_cap else None
        self.slopes = None
        if alibi_slopes is not None:
            self.slopes = torch.tensor(alibi_slopes, dtype=torch.float32)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step's tokens to their requests' pages.

        Args:
            query: [tokens, heads, head_size]. key, value: in the cache already.
            kv_cache: [blocks, kv_heads, block_size, 2 · head_size].
            attn_metadata: None while the engine only looks how much memory is needed.
            output: [tokens, heads · head_size] or [tokens, heads, head_size]; written here.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: got a tensor, takes None")
        if attn_metadata is None:
            return output.fill_(0)
        step, count = attn_metadata, attn_metadata.num_tokens
        key_pages, value_pages = kv_cache.split(self.head_size, dim=-1)
        found = saccade.attention_paged(
            query[:count].view(count, self.num_heads, self.head_size),
            key_pages,
            value_pages,
            step.page_table,
            step.kv_lens,
            cu_seqlens_q=step.cu_seqlens_q,
            mask=self.masks[step.causal],
            score=self._score(query.device),
            scale=self.scale,
            sinks=self.sinks,
        )
        output[:count].view(found.shape).copy_(found)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a step's keys and values into their slots."""
        key_pages, value_pages = kv_cache.split(self.head_size, dim=-1)
        count = len(slot_mapping)  # behind it may lie padding
        saccade.write_kv_cache(key[:count], value[:count], key_pages, value_pages, slot_mapping)

    def _score(self, device: torch.device) -> scores.Score | None:
        """The softcap, then ALiBi."""
        if self.slopes is None:
            return self.softcap
        self.slopes = self.slopes.to(device)
        return chained(self.softcap, scores.alibi(self.slopes))
