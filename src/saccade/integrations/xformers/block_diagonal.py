"""Block-diagonal biases: xformers' classes for sequences that lie one behind the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from saccade.integrations.xformers.reach import (
    AttentionBias,
    Causal,
    Reach,
    SlidingWindow,
    written_out,
)
from saccade.integrations.xformers.seqlen_info import SeqLenInfo, listed, moved


@dataclass(eq=False)
class PackedBias(AttentionBias):
    """Queries and keys that are divided into sequences; a query sees keys of its own alone."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: Any

    def reach(self) -> Reach:
        """All rows of the sequence."""
        return None, None

    def to(self, device: Any) -> Self:
        """This bias with its tensors on a device."""
        return moved(self, device)

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The bias written out, to look at it: 0 where a pair is visible, else -inf.

        Args:
            shape: [..., tokens of queries, tokens of keys].
        """
        lengths = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        check_shape(shape, lengths)
        visible = torch.zeros(lengths, dtype=torch.bool)
        intervals = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for (first, end), (first_key, end_key) in intervals:
            part = self._visible(end - first, end_key - first_key)
            visible[first:end, first_key:end_key] = part
        return written_out(visible, shape, dtype, device)


def check_shape(shape: Sequence[int], lengths: tuple[int, int]) -> None:
    """Refuse a shape whose last two sizes are not these."""
    if tuple(shape[-2:]) != lengths:
        raise ValueError(
            f"shape: got {list(shape)}, takes {lengths[0]} and {lengths[1]} at its end"
        )


def query_sequences(q_seqlen: Sequence[int], kv_seqlen: Sequence[int], device: Any) -> SeqLenInfo:
    """The queries' sequences; as many as there are of keys."""
    if len(q_seqlen) != len(kv_seqlen):
        raise ValueError(
            f"kv_seqlen: got {len(kv_seqlen)} lengths, takes {len(q_seqlen)}, as q_seqlen has"
        )
    return SeqLenInfo.from_seqlens(q_seqlen, device=device)


@dataclass(eq=False)
class BlockDiagonalMask(PackedBias):
    """Sequences one behind the other; a query sees all keys of its own sequence.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalMask.from_seqlens([1, 2])
        >>> (bias.materialize((3, 3)) == 0).int().tolist()
        [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    """

    k_seqinfo: SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Iterable[int],
        kv_seqlen: Iterable[int] | None = None,
        *,
        device: Any = None,
    ) -> Self:
        """The mask of sequences of these lengths; of keys as of queries where left out."""
        queries, keys = listed(q_seqlen), listed(kv_seqlen)
        q_seqinfo = query_sequences(queries, queries if keys is None else keys, device)
        if keys is None or list(keys) == list(queries):
            return cls(q_seqinfo, q_seqinfo)
        return cls(q_seqinfo, SeqLenInfo.from_seqlens(keys, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """The mask of tensors [batch, length, ...], and all their rows [1, tokens, ...]."""
        bias, rows, *_ = cls.from_tensor_lists_qkv(tensors, tensors)
        return bias, rows

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """The mask of queries, keys and values in lists, and all rows of each [1, tokens, ...]."""
        if not tensors_q:
            raise ValueError("tensors_q: got an empty list, takes at least one tensor")
        batch_sizes = [len(rows) for rows in tensors_q]
        for name, tensors in (("tensors_k", tensors_k), ("tensors_v", tensors_v)):
            if tensors is not None and [len(rows) for rows in tensors] != batch_sizes:
                sizes = [len(rows) for rows in tensors]
                raise ValueError(f"{name}: got batches of {sizes}, takes tensors_q's {batch_sizes}")
        if tensors_v is not None and _lengths(tensors_v) != _lengths(tensors_k):
            lengths = _lengths(tensors_v)
            raise ValueError(f"tensors_v: got {lengths}, takes tensors_k's {_lengths(tensors_k)}")
        device = tensors_q[0].device
        bias = cls.from_seqlens(_lengths(tensors_q), _lengths(tensors_k), device=device)
        bias._batch_sizes = batch_sizes
        values = None if tensors_v is None else _joined(tensors_v)
        return bias, _joined(tensors_q), _joined(tensors_k), values

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """Rows of queries [1, tokens, ...] by sequence, or as the list had them."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """Rows of keys or values [1, tokens, ...] by sequence, or as the list had them."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Rows [1, tokens, ...] by sequence, where queries and keys have the same sequences."""
        if self.q_seqinfo.seqstart_py != self.k_seqinfo.seqstart_py:
            raise ValueError(
                "split: got queries and keys of different lengths, takes split_queries or split_kv"
            )
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Causal sequences, the first query at the first key."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Causal sequences, the last query at the last key."""
        kind = BlockDiagonalCausalFromBottomRightMask
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Sliding windows, the first query at the first key."""
        kind = BlockDiagonalCausalLocalAttentionMask
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """Sliding windows, the last query at the last key."""
        kind = BlockDiagonalCausalLocalAttentionFromBottomRightMask
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [rows.shape[1] for rows in tensors for _ in range(len(rows))]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([rows.flatten(0, 1) for rows in tensors])[None]


@dataclass(eq=False)
class BlockDiagonalCausalMask(Causal, BlockDiagonalMask):
    """Sequences one behind the other, each causal from its first query and key on.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalMask.from_seqlens([1, 2]).make_causal()
        >>> (bias.materialize((3, 3)) == 0).int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    """

    align: ClassVar[str] = "top_left"


@dataclass(eq=False)
class BlockDiagonalCausalFromBottomRightMask(Causal, BlockDiagonalMask):
    """Sequences one behind the other, each causal, its last query at its last key.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalCausalFromBottomRightMask.from_seqlens([1, 2], [2, 3])
        >>> (bias.materialize((3, 5)) == 0).int().tolist()
        [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    """


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionMask(SlidingWindow, BlockDiagonalCausalMask):
    """Sequences one behind the other, with a sliding window from the first query and key on.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalMask.from_seqlens([1, 3]).make_local_attention(2)
        >>> (bias.materialize((4, 4)) == 0).int().tolist()
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """

    _window_size: int = 0


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(
    SlidingWindow, BlockDiagonalCausalFromBottomRightMask
):
    """Sequences one behind the other, with a sliding window, the last query at the last key.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> whole = attn_bias.BlockDiagonalMask.from_seqlens([1, 3])
        >>> bias = whole.make_local_attention_from_bottomright(2)
        >>> (bias.materialize((4, 4)) == 0).int().tolist()
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """

    _window_size: int = 0
