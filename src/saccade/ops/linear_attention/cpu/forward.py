"""Forward pass of linear attention on the CPU: chunk by chunk, with one running state."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor

from saccade.ops.linear_attention.cpu.chunk import (
    ChunkState,
    DenseRows,
    Keys,
    lower_,
    nonfinite_rows,
)
from saccade.runtime.spec import LinearVariant

# ---- steps ---------------------------------------------------------------------------------------
# The order in which a call of linear attention visits its query rows and keys.
#
# A query row sees the first so many keys, that is, the state after so many. So queries and keys are
# walked together, in steps of at most a chunk: rows that see no key come first, then keys that no
# row stops at, then rows and keys side by side, each row beside the last key that it sees; last the
# rows that see everything.


class RowStep(NamedTuple):
    """Query rows and key rows that are visited at once.

    With both, they are equally many, and a row sees the keys up to the one beside it. Rows alone
    read the state; keys alone are added to it.
    """

    queries: slice | None
    keys: slice | None


def steps_of(query_len: int, kv_len: int, variant: LinearVariant, chunk: int) -> list[RowStep]:
    """All steps of a call, in the order of the forward pass."""
    if not variant.causal:
        return [
            *(RowStep(None, keys) for keys in _cut(0, kv_len, chunk)),
            *(RowStep(queries, None) for queries in _cut(0, query_len, chunk)),
        ]
    shift = kv_len - query_len if variant.align == "bottom_right" else 0
    first = min(max(-shift, 0), query_len)  # the first row that sees a key
    last = max(min(kv_len - shift, query_len), first)  # the first row that sees no more than it
    beside = range(first, last)
    paired = [
        RowStep(queries, slice(queries.start + shift, queries.stop + shift))
        for queries in _cut(first, last, chunk)
    ]
    before = first + shift if beside else 0
    after = last + shift if beside else 0
    return [
        *(RowStep(queries, None) for queries in _cut(0, first, chunk)),
        *(RowStep(None, keys) for keys in _cut(0, before, chunk)),
        *paired,
        *(RowStep(None, keys) for keys in _cut(after, kv_len, chunk)),
        *(RowStep(queries, None) for queries in _cut(last, query_len, chunk)),
    ]


def _cut(start: int, stop: int, chunk: int) -> list[slice]:
    """A range of rows in chunks."""
    return [slice(at, min(at + chunk, stop)) for at in range(start, stop, chunk)]


class RowSums(NamedTuple):
    """What rows read: weighted sums of values and, where there is a normaliser, of ones."""

    weighted: Tensor  # [batch · state_heads, group · rows, value_dim]
    total: Tensor | None  # [batch · state_heads, group · rows]


def attend(
    dense: DenseRows,
    steps: list[RowStep],
    state: ChunkState,
    output: Tensor,
    normaliser: Tensor | None,
) -> None:
    """Write output [batch, heads, rows, value_dim] and, if wanted, normaliser; change the state."""
    for step in steps:
        keys = None if step.keys is None else dense.beside(step.keys)
        if step.queries is None:
            visit(dense, state, None, keys)
            continue
        sums = visit(dense, state, dense.queries(step.queries), keys)
        if sums.total is not None and normaliser is not None:
            into = normaliser[:, :, step.queries]
            into.copy_(sums.total.view(into.shape))
        write(dense, sums, output[:, :, step.queries])


@overload
def visit(dense: DenseRows, state: ChunkState, query: Tensor, keys: Keys | None) -> RowSums: ...
@overload
def visit(dense: DenseRows, state: ChunkState, query: None, keys: Keys | None) -> None: ...
def visit(
    dense: DenseRows, state: ChunkState, query: Tensor | None, keys: Keys | None
) -> RowSums | None:
    """What rows read of the state and of the keys beside them; those are added to the state."""
    if keys is not None and keys.key.shape[1] == 1:  # a row beside one key sees the state after it
        state.add(keys)
        keys = None
    sums = None
    if query is not None:
        sums = (
            _read(dense, state, query) if keys is None else _read_pairs(dense, state, query, keys)
        )
    if keys is not None:
        state.add(keys)
    return sums


def joined(parts: list[RowSums]) -> RowSums:
    """What rows of some heads after others read, as one."""
    if len(parts) == 1:
        return parts[0]
    totals = [sums.total for sums in parts if sums.total is not None]
    return RowSums(
        torch.cat([sums.weighted for sums in parts]), torch.cat(totals) if totals else None
    )


def write(dense: DenseRows, sums: RowSums, output: Tensor) -> None:
    """Write what rows read, divided by the normaliser, to output [batch, heads, rows, dim]."""
    rows = sums.weighted
    if sums.total is not None:
        divisor, _ = divide_by(dense.variant, sums.total)
        rows = divided(rows, divisor.unsqueeze(-1))
    output.copy_(dense.from_query(rows))


def _read(dense: DenseRows, state: ChunkState, query: Tensor) -> RowSums:
    """From the state alone."""
    weighted = query @ state.kv
    if dense.variant.normalize == "none":
        return RowSums(weighted, None)
    return RowSums(weighted, (query @ state.key_sum.unsqueeze(-1)).squeeze(-1))


def _read_pairs(dense: DenseRows, state: ChunkState, query: Tensor, keys: Keys) -> RowSums:
    """From the state, and from keys beside the rows."""
    key, value, decay_factors = keys
    old = query if decay_factors is None else query * decay_factors.until_row()
    scores = lower_(query @ key.mT, decay_factors, dense.group)
    weighted = (scores @ value).baddbmm_(old, state.kv)
    if not bool(weighted.sum().isfinite()):
        return _nan_safe(dense, state, query, keys)
    if dense.variant.normalize == "none":
        return RowSums(weighted, None)
    total = scores.sum(-1).add_((old @ state.key_sum.unsqueeze(-1)).squeeze(-1))
    return RowSums(weighted, total)


def _nan_safe(dense: DenseRows, state: ChunkState, query: Tensor, keys: Keys) -> RowSums:
    """The same where some number is not finite: it must not reach rows that do not see it.

    A product would carry it there: a hidden score is 0, and 0 · NaN is NaN.
    """
    key, value, decay_factors = keys
    nonfinite = nonfinite_rows(key, value)
    key, value = (rows.masked_fill(nonfinite.unsqueeze(-1), 0) for rows in (key, value))
    scores = lower_(query @ key.mT, decay_factors, dense.group)
    old = query if decay_factors is None else query * decay_factors.until_row()
    sees = (nonfinite.cumsum(-1) > 0).repeat(1, dense.group)
    weighted = (scores @ value + old @ state.kv).masked_fill(sees.unsqueeze(-1), torch.nan)
    if dense.variant.normalize == "none":
        return RowSums(weighted, None)
    total = scores.sum(-1) + (old @ state.key_sum.unsqueeze(-1)).squeeze(-1)
    return RowSums(weighted, total.masked_fill(sees, torch.nan))


def divide_by(variant: LinearVariant, total: Tensor) -> tuple[Tensor, Tensor]:
    """What weighted sums are divided by, and its derivative by the sum of scores."""
    if variant.normalize == "sum":
        return total + variant.eps, torch.ones_like(total)
    size = total.abs() if variant.normalize == "abs" else total
    slope = (size >= variant.eps).to(total.dtype)
    if variant.normalize == "abs":
        slope *= total.sign()
    return size.clamp(min=variant.eps), slope


def divided(rows: Tensor, divisor: Tensor) -> Tensor:
    """rows / divisor, and 0 where the divisor is 0."""
    nothing = divisor == 0
    if bool(nothing.any()):
        return (rows / divisor.masked_fill(nothing, 1)).masked_fill_(nothing, 0)
    return rows / divisor
