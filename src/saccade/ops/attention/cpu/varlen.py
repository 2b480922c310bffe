"""Varlen: a call as dense problems: a batch, or neighbouring sequences of equal length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from saccade.runtime.arguments import OFFSETS


@runtime_checkable
class Sequences(Protocol):
    """What says how a call's sequences lie: `Inputs` and `LinearInputs` do."""

    @property
    def query(self) -> Tensor:
        """[batch, heads, rows, dim], or [tokens, heads, dim]."""
        ...

    @property
    def key(self) -> Tensor:
        """As query, with rows and heads of its own."""
        ...

    @property
    def cu_seqlens_q(self) -> Tensor | None:
        """Offsets of packed queries."""
        ...

    @property
    def cu_seqlens_k(self) -> Tensor | None:
        """Offsets of packed keys."""
        ...


class Part(NamedTuple):
    """Adjacent sequences of one query length and one key length, as views [batch, heads, …]."""

    first_batch: int
    batch: int
    query_tokens: slice | None  # None: the call is dense, and this part is all of it
    kv_tokens: slice | None

    def queries(self, tensor: Tensor) -> Tensor:
        """The part's rows of query, output, or their gradients."""
        return self._rows(tensor, self.query_tokens)

    def keys(self, tensor: Tensor) -> Tensor:
        """The part's rows of key, value, or their gradients."""
        return self._rows(tensor, self.kv_tokens)

    def lse(self, lse: Tensor) -> Tensor:
        """The part's rows of the lse or its gradient, [batch, heads, rows]."""
        if self.query_tokens is None:
            return lse
        rows = lse[:, self.query_tokens]
        return rows.unflatten(1, (self.batch, rows.shape[1] // self.batch)).transpose(0, 1)

    def _rows(self, tensor: Tensor, tokens: slice | None) -> Tensor:
        if tokens is None:
            return tensor
        rows = tensor[tokens]
        return rows.unflatten(0, (self.batch, rows.shape[0] // self.batch)).transpose(1, 2)


def check_ends(name: str, ends: Sequence[int], num_tokens: int) -> None:
    """Refuse offsets that nobody could look at before: they lead out of the tensors."""
    ascend = all(first <= second for first, second in itertools.pairwise([0, *ends, num_tokens]))
    if not ascend or ends[0] != 0:
        raise ValueError(f"{name}: got {ends} for {num_tokens} tokens, takes {OFFSETS}")


def clear_padding(
    offsets: Tensor | None, *rows: Tensor | None, dim: int = 0, number: float = 0.0
) -> None:
    """Write a number to what is behind the last offset, along a dimension, in what is there."""
    if offsets is not None:
        end = int(offsets[-1])
        for tensor in rows:
            if tensor is not None and tensor.dim() > dim:
                tensor.narrow(dim, end, tensor.shape[dim] - end).fill_(number)


def parts_of(inputs: Sequences) -> list[Part]:
    """The dense problems that make up a call, in order."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return [Part(0, inputs.query.shape[0], None, None)]
    query_ends, kv_ends = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    lengths = [
        (query_ends[b + 1] - query_ends[b], kv_ends[b + 1] - kv_ends[b])
        for b in range(len(query_ends) - 1)
    ]
    check_ends("cu_seqlens_q", query_ends, inputs.query.shape[0])
    check_ends("cu_seqlens_k", kv_ends, inputs.key.shape[0])
    parts = []
    first = 0
    for b in range(1, len(lengths) + 1):
        if b < len(lengths) and lengths[b] == lengths[first]:
            continue
        query_tokens = slice(query_ends[first], query_ends[b])
        parts.append(Part(first, b - first, query_tokens, slice(kv_ends[first], kv_ends[b])))
        first = b
    return parts
