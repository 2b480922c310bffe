"""Forward pass of linear attention on the CPU: chunk by chunk, with one running state.

Heads of the state lie in one dimension with the batch, so that products are batched ones. Query
heads that share a head of the state lie in the rows: [batch · state_heads, group · rows, dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, overload

import torch
from torch import Tensor

from saccade.runtime.spec import LEAST_DECAY, LinearVariant, accumulate_dtype

# ---- chunks --------------------------------------------------------------------------------------
# Rows of queries and keys, mapped and in the accumulation dtype; the state that they change.


@dataclass
class DenseRows:
    """A dense call, [batch, heads, rows, dim], as the two passes read it."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None  # [batch, state_heads, kv_len]
    lengths: Tensor | None  # [batch], where some are less than kv_len
    initial: tuple[Tensor, Tensor] | None
    variant: LinearVariant

    def __post_init__(self) -> None:
        self.batch = self.query.shape[0]
        self.state_heads = max(self.key.shape[1], self.value.shape[1])
        self.heads = max(self.query.shape[1], self.state_heads)
        self.group = self.heads // self.state_heads
        self.wide = accumulate_dtype(self.query.dtype)
        self.shortest = None if self.lengths is None else int(self.lengths.min())
        query_len, kv_len = self.query.shape[2], self.key.shape[2]
        self.num_blind = query_len if kv_len == 0 else 0  # rows that come before the first key
        if self.variant.causal and self.variant.align == "bottom_right":
            self.num_blind = max(query_len - kv_len, 0)

    # ---- rows there and back ---------------------------------------------------------------

    def queries(self, rows: slice) -> Tensor:
        """Features of query rows, scaled: [batch · state_heads, group · rows, features]."""
        mapped = features(self.variant.feature_map, self.query[:, :, rows].to(self.wide))
        if self.variant.scale != 1.0:
            mapped = mapped * self.variant.scale
        blind = self.blind(rows)
        if blind is not None:
            mapped = mapped.masked_fill(blind, 0)
        return self.by_query(mapped)

    def by_query(self, rows: Tensor) -> Tensor:
        """Rows of any number of heads [batch, heads, rows, dim], by head of the state."""
        rows = repeated(rows, self.heads)
        num_rows = self.group * rows.shape[2]
        return rows.reshape(self.batch * self.state_heads, num_rows, rows.shape[-1])

    def from_query(self, rows: Tensor) -> Tensor:
        """Rows by head of the state again as [batch, heads, rows, dim]."""
        num_rows = rows.shape[1] // self.group
        return rows.view(self.batch, self.heads, num_rows, rows.shape[-1])

    def keys(self, rows: slice) -> Tensor:
        """Features of key rows, 0 where hidden: [batch · state_heads, rows, features]."""
        mapped = features(self.variant.feature_map, self.key[:, :, rows].to(self.wide))
        return self._by_key(mapped, rows)

    def values(self, rows: slice) -> Tensor:
        """Values, 0 where hidden: [batch · state_heads, rows, value_dim]."""
        return self._by_key(self.value[:, :, rows].to(self.wide), rows)

    def _by_key(self, mapped: Tensor, rows: slice) -> Tensor:
        hidden = self.hidden(rows)
        if hidden is not None:
            mapped = mapped.masked_fill(hidden.unsqueeze(-1), 0)
        mapped = repeated(mapped, self.state_heads)
        return mapped.reshape(self.batch * self.state_heads, *mapped.shape[2:])

    def hidden(self, rows: slice) -> Tensor | None:
        """Which of the key rows lie past the end, [batch, 1, rows]; None: none."""
        if self.lengths is None or self.shortest is None or rows.stop <= self.shortest:
            return None
        row = torch.arange(rows.start, rows.stop, device=self.key.device)
        return row >= self.lengths.view(-1, 1, 1)

    def blind(self, rows: slice) -> Tensor | None:
        """Which query rows have nothing to see at all, [batch, 1, rows, 1]; None: none."""
        if self.initial is not None or (rows.start >= self.num_blind and self.shortest != 0):
            return None
        row = torch.arange(rows.start, rows.stop, device=self.query.device)
        row = row.view(-1, 1) < self.num_blind
        if self.lengths is None:
            return row.expand(self.batch, 1, *row.shape)
        return row | (self.lengths == 0).view(-1, 1, 1, 1)

    def beside(self, rows: slice) -> Keys:
        """Key rows as products take them."""
        return Keys(self.keys(rows), self.values(rows), self.decay_factors(rows))

    # ---- decay -----------------------------------------------------------------------------

    def decay_factors(self, rows: slice) -> DecayFactors | None:
        """How the state fades along key rows; None: it does not."""
        if self.decay is None:
            return None
        decay = self.decay[:, :, rows].double().clamp(min=LEAST_DECAY)
        hidden = self.hidden(rows)
        if hidden is not None:
            decay = decay.masked_fill(hidden, 0)
        total = decay.reshape(self.batch * self.state_heads, decay.shape[2]).cumsum(-1)
        return DecayFactors(total, self.wide, self.group)


class Keys(NamedTuple):
    """Key rows of a chunk: their features, their values, and how the state fades along them."""

    key: Tensor  # [batch · state_heads, rows, features]
    value: Tensor  # [batch · state_heads, rows, value_dim]
    decay_factors: DecayFactors | None

    def part(self, heads: slice) -> Keys:
        """What belongs to some of the heads, counted through the batch."""
        return Keys(
            self.key[heads],
            self.value[heads],
            self.decay_factors and self.decay_factors.part(heads),
        )


class DecayFactors:
    """Factors by which the state fades within a chunk.

    Sums of logarithms are float64: a strong decay in front of weak ones must not round them away.
    """

    def __init__(self, summed_decay: Tensor, wide: torch.dtype, group: int):
        self.summed_decay, self.wide, self.group = (
            summed_decay,
            wide,
            group,
        )  # [batch · state_heads, rows]

    def part(self, heads: slice) -> DecayFactors:
        """What belongs to some of the heads, counted through the batch."""
        return DecayFactors(self.summed_decay[heads], self.wide, self.group)

    def whole(self) -> Tensor:
        """By all key rows, [batch · state_heads, 1, 1]."""
        return self.summed_decay[:, -1, None, None].exp().to(self.wide)

    def until_row(self) -> Tensor:
        """From before the first key to each query row, [batch · state_heads, group · rows, 1]."""
        return self.summed_decay.exp().to(self.wide).repeat(1, self.group).unsqueeze(-1)

    def from_key(self) -> Tensor:
        """From each key row to after the last one, [batch · state_heads, rows, 1]."""
        return (self.summed_decay[:, -1:] - self.summed_decay).exp().to(self.wide).unsqueeze(-1)

    def pairs(self) -> Tensor:
        """From each key row to each query row, [batch · state_heads, group · rows, keys]."""
        gap = self.summed_decay.unsqueeze(-1) - self.summed_decay.unsqueeze(-2)
        return gap.clamp_(max=0).to(self.wide).exp_().repeat(1, self.group, 1)  # > 0: hidden


class ChunkState:
    """The running sums, [batch · state_heads, features, …], which chunks read and change."""

    def __init__(self, kv: Tensor, key_sum: Tensor):
        self.kv, self.key_sum = kv, key_sum

    @staticmethod
    def start(dense: DenseRows, initial: tuple[Tensor | None, Tensor | None]) -> ChunkState:
        """The given sums, copied; 0 where they are None."""
        kv, key_sum = initial
        count, channels = dense.batch * dense.state_heads, dense.query.shape[-1]
        zeros = dense.query.new_zeros
        shape = (count, channels, dense.value.shape[-1])
        return ChunkState(
            zeros(shape, dtype=dense.wide)
            if kv is None
            else kv.to(dense.wide, copy=True).reshape(shape),
            zeros(count, channels, dtype=dense.wide)
            if key_sum is None
            else key_sum.to(dense.wide, copy=True).reshape(count, channels),
        )

    def add(self, keys: Keys) -> None:
        """Add a chunk of keys, after all that was there has faded."""
        key, value, decay_factors = keys
        if decay_factors is not None:
            self.decay_factors(decay_factors)
            key = key * decay_factors.from_key()
        if key.shape[1] == 1:  # bound by memory, where a product of one row is slower
            self.kv.addcmul_(key.mT, value)
        else:
            self.kv.baddbmm_(key.mT, value)
        self.key_sum.add_(key.sum(1))

    def decay_factors(self, decay_factors: DecayFactors) -> None:
        """Let all that is there fade by a chunk of keys."""
        whole = decay_factors.whole()
        self.kv.mul_(whole)
        self.key_sum.mul_(whole.squeeze(-1))


def features(name: str, rows: Tensor) -> Tensor:
    """The feature map, channel by channel; see `saccade.ops.linear_attention.reference`."""
    if name == "elu+1":
        return rows.clamp(max=0).exp_().add_(rows.clamp(min=0))
    if name == "relu":
        return rows.relu()
    return rows.exp() if name == "exp" else rows


def through_map(name: str, gradient: Tensor, mapped: Tensor) -> Tensor:
    """The gradient of what the map was given, from that of its features and the features."""
    if name == "elu+1":
        return gradient * mapped.clamp(max=1)
    if name == "relu":
        return gradient.masked_fill(mapped <= 0, 0)
    return gradient * mapped if name == "exp" else gradient


def repeated(rows: Tensor, heads: int) -> Tensor:
    """Each head of [batch, heads, …] as often as one of so many heads shares it."""
    return rows if rows.shape[1] == heads else rows.repeat_interleave(heads // rows.shape[1], 1)


def shared(rows: Tensor, heads: int) -> Tensor:
    """The inverse for gradients: sums over the heads that share one."""
    return rows if rows.shape[1] == heads else rows.unflatten(1, (heads, -1)).sum(2)


def lower_(pairs: Tensor, decay_factors: DecayFactors | None, group: int) -> Tensor:
    """Pairs [count, group · rows, keys], in place: faded, 0 where the key comes after the row."""
    if decay_factors is not None:
        pairs.mul_(decay_factors.pairs())
    pairs.unflatten(1, (group, -1)).tril_()
    return pairs


def nonfinite_rows(*tensors: Tensor) -> Tensor:
    """Which rows of [count, rows, dim] hold NaN or inf in any of the tensors: [count, rows]."""
    nonfinite = [~rows.isfinite().all(-1) for rows in tensors]
    return torch.stack(nonfinite).any(0)


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
    """Sums of a chunk where some number is not finite: it must not reach rows that do not see it.

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
