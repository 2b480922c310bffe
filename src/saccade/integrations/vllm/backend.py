"""Backend: what vLLM asks of an attention backend, by its abstract classes.

vLLM imports this file once the backend was selected. A layer's cache is one tensor [blocks,
kv_heads, block_size, 2 · head_size], each key with its value behind it; as Views of it are pages
of keys and pages of values, nothing is copied. Where each token of each head has a scale, four
bytes behind a key and behind a value hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.envs
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

import saccade
from saccade import scores
from saccade.integrations.arguments import LARGEST_PAGE, chained, sliding_window_mask

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
# Caches of eight bits: with one scale for all keys of a layer and one for all values, and with one
# for each token of each head.
PER_TENSOR = {"fp8": E4M3, "fp8_e4m3": E4M3}
PER_TOKEN_HEAD = {"fp8_per_token_head": E4M3, "int8_per_token_head": torch.int8}
OF_SCALE = 4  # bytes
LARGEST_HEAD = 512


class Backend(AttentionBackend):
    """The backend's name, its parts and what it serves."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16, torch.bfloat16, torch.float32,
    ]  # fmt: skip
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto", "float16", "bfloat16", *PER_TENSOR, *PER_TOKEN_HEAD,
    ]  # fmt: skip

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
    def supports_head_size(cls, head_size: int) -> bool:
        """Heads have at most 512 channels; scales beside them lie at multiples of four bytes."""
        return head_size <= LARGEST_HEAD and head_size % OF_SCALE == 0

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

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """It does, by `batch_invariant`."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Images whose tokens all see each other are not served: a step's mask is one for all."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Slopes are of distances, not of their roots."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """A layer has one scale, or one for each token of each head."""
        return False


@dataclass
class Step(AttentionMetadata):
    """Metadata of one step of the engine, the same for all layers.

    Attributes:
        num_tokens: rows that count; behind them may lie padding.
        cu_seqlens_q: int32 [requests + 1]. kv_lens: int32 [requests].
        page_table: int32 [requests, blocks].
        causal: whether tokens see those behind them.
        decodes: whether each request has one token; they are then no packed ones, but a batch.
    """

    num_tokens: int
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    causal: bool
    decodes: bool


class Builder(AttentionMetadataBuilder[Step]):
    """Makes a `Step` of what the engine planned.

    Steps in which every request has one token can be CUDA graphs: work is counted from lengths on
    the device, and nothing that such a step reads is chosen by the host.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = getattr(vllm_config, "parallel_config", None)
        ranks = getattr(parallel, "decode_context_parallel_size", 1)
        if ranks > 1:
            raise NotImplementedError(
                f"decode_context_parallel_size: got {ranks}, takes 1: a cache that is split over "
                "ranks is not served"
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        """A step's metadata; nothing is computed and nothing is read by the host."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal: got a tensor, takes one answer for all requests")
        if getattr(common, "mm_req_doc_ranges", None):
            raise NotImplementedError("mm_req_doc_ranges: got some, takes None")
        requests = common.seq_lens.shape[0]
        return Step(
            common.num_actual_tokens, common.query_start_loc, common.seq_lens,
            common.block_table_tensor, common.slot_mapping, common.causal,
            decodes=common.max_query_len == 1 and common.num_actual_tokens == requests,
        )  # fmt: skip


class Impl(AttentionImpl):
    """One layer's attention."""

    # vLLM asks for the lse where ranks share a request's cache, and leaves merging what they found
    # to the layer, which this one does not do.
    can_return_lse_for_decode = False
    supports_quant_query_input = False

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
        self.batch_invariant = bool(vllm.envs.VLLM_BATCH_INVARIANT)
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
            layer: its `_k_scale` and `_v_scale` are those of a cache in fp8.
            kv_cache: [blocks, kv_heads, block_size, 2 · head_size], with scales as it says above.
            attn_metadata: None while the engine only looks how much memory is needed.
            output: [tokens, heads · head_size] or [tokens, heads, head_size]; written here.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: got a tensor, takes None")
        if attn_metadata is None:
            return output.fill_(0)
        step, count = attn_metadata, attn_metadata.num_tokens
        key_pages, value_pages, scales = self._pages(kv_cache)
        if self.kv_cache_dtype in PER_TENSOR:
            shape = key_pages.shape[:3]  # the same one for every slot
            scales = {
                "key_scales": layer._k_scale.expand(shape),
                "value_scales": layer._v_scale.expand(shape),
            }
        rows = query[:count].view(count, self.num_heads, self.head_size)
        found = saccade.attention_paged(
            rows.unsqueeze(2) if step.decodes else rows,
            key_pages,
            value_pages,
            step.page_table,
            step.kv_lens,
            cu_seqlens_q=None if step.decodes else step.cu_seqlens_q,
            mask=self.masks[step.causal],
            score=self._score(query.device),
            scale=self.scale,
            sinks=self.sinks,
            batch_invariant=self.batch_invariant,
            **scales,
        )
        output[:count].view(rows.shape).copy_(found.view(rows.shape))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a step's keys and values into their slots."""
        key_pages, value_pages, scales = self._pages(kv_cache)
        count = len(slot_mapping)  # behind it may lie padding
        key, value = key[:count], value[:count]
        if self.kv_cache_dtype in PER_TENSOR:
            key, value = _in_units(key, layer._k_scale), _in_units(value, layer._v_scale)
        saccade.write_kv_cache(key, value, key_pages, value_pages, slot_mapping, **scales)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Pages of keys and of values, and the scales beside each token, if it has any."""
        if self.kv_cache_dtype in PER_TENSOR:
            kv_cache = kv_cache.view(PER_TENSOR[self.kv_cache_dtype])
        if self.kv_cache_dtype not in PER_TOKEN_HEAD:
            key, value = kv_cache.split(self.head_size, dim=-1)
            return key, value, {}
        numbers = kv_cache.view(PER_TOKEN_HEAD[self.kv_cache_dtype])
        key, of_key, value, of_value = numbers.split([self.head_size, OF_SCALE] * 2, dim=-1)
        scales = {"key_scales": _as_float(of_key), "value_scales": _as_float(of_value)}
        return key, value, scales

    def _score(self, device: torch.device) -> scores.Score | None:
        """The softcap, then ALiBi."""
        if self.slopes is None:
            return self.softcap
        self.slopes = self.slopes.to(device)
        return chained(self.softcap, scores.alibi(self.slopes))


def _in_units(rows: Tensor, scale: Tensor) -> Tensor:
    """Rows in units of a scale, as far as fp8 goes."""
    return (rows.float() / scale).clamp(-LARGEST, LARGEST)


def _as_float(of_slots: Tensor) -> Tensor:
    """Four bytes of each slot as one float32."""
    return of_slots.view(torch.float32).squeeze(-1)
