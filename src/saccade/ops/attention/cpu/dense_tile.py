"""Dense tile: one rectangle of pairs in plain PyTorch, for every mask, score and dropout.

Query heads that share a kv head are packed into rows, so that one product serves the group. Sums
are float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.modifiers import evaluate
from saccade.modifiers.derivative import Taken, change_backward, change_with_slopes
from saccade.modifiers.evaluate import hide_, index_range
from saccade.modifiers.expression import Coordinates
from saccade.ops.attention.cpu.block_mask import Remembered
from saccade.runtime import dropout
from saccade.runtime.spec import Variant, accumulate_dtype

MOST_DRAWN = 2**25  # pairs, of one byte each, whose draws are remembered


class PairBlock(NamedTuple):
    """Where a rectangle lies: ranges of batch entries, query heads, query rows and key rows."""

    batch: tuple[int, int]
    heads: tuple[int, int]
    query_rows: tuple[int, int]
    kv_rows: tuple[int, int]
    shift: int

    def coordinates(self) -> Coordinates:
        """Index tensors for every pair of the rectangle."""
        ranges = (self.batch, self.heads, self.query_rows, self.kv_rows)
        batch, head, query_row, kv_row = (index_range(*r, dim) for dim, r in enumerate(ranges))
        return Coordinates(batch, head, query_row, kv_row, self.shift)


class Draws(NamedTuple):
    """What dropout draws by.

    Attributes:
        numbers: the table of `runtime/dropout.py`; None: rows are called what they are here.
        first, step: where rows of queries, and of keys, begin in memory, and how many lie from one
            batch entry to the next.
        first_batch: the number of the first batch entry here.
    """

    seed: Tensor
    numbers: Tensor | None = None
    first: tuple[int, int] = (0, 0)
    step: tuple[int, int] = (0, 0)
    first_batch: int = 0

    def kept(self, pair_block: PairBlock, dropout_p: float) -> Tensor:
        """The pairs of a rectangle that are kept; the backward pass finds what the forward pass
        drew."""
        seed, numbers = int(self.seed), self.numbers

        def draw() -> Tensor:
            at = pair_block.coordinates()
            if numbers is None:
                return dropout.kept_range(
                    seed, at.batch, at.head, at.query_row, pair_block.kv_rows, dropout_p
                )
            pairs = (at.batch, at.head, at.query_row, at.kv_row)
            places = (
                first + (at.batch - self.first_batch) * step + rows
                for first, step, rows in zip(self.first, self.step, pairs[2:], strict=True)
            )
            return dropout.kept_rows(
                seed, *dropout.in_whole(numbers, pairs, *places), dropout_p=dropout_p
            )

        key = seed, *self[2:], pair_block, dropout_p
        return _drawn.get(key, () if numbers is None else (numbers,), draw)


_drawn: Remembered[Tensor] = Remembered(MOST_DRAWN, Tensor.numel)


class Attended(NamedTuple):
    """Attention of rows to some keys, with what merges it with that to others.

    That is not the lse alone: where all scores of a row are large, as a mask of -1e9 that is added
    makes them, rounding the lse takes the log of the sum from it, and with it how many keys there
    were.

    Attributes:
        output: [batch, heads, rows, value_dim].
        row_max: [batch, heads, rows], the largest score; -inf where nothing is seen.
        row_sum: [batch, heads, rows], Σ exp(score - row_max); 1 where nothing is seen. None: 1
            everywhere, as the lse alone is known, which is row_max then.
    """

    output: Tensor
    row_max: Tensor
    row_sum: Tensor | None

    @staticmethod
    def by_lse(output: Tensor, lse: Tensor) -> Attended:
        """What is known by its lse alone."""
        return Attended(output, lse, None)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp; -inf where nothing is seen."""
        return self.row_max if self.row_sum is None else self.row_max + self.row_sum.log()

    def sum_above(self, base: Tensor) -> Tensor:
        """Σ exp(score - base) of each row, [batch, heads, rows]."""
        found = (self.row_max - base).exp()
        return found if self.row_sum is None else found.mul_(self.row_sum)

    def merged(self, other: Attended) -> Attended:
        """Attention to the keys of both, which are not the same."""
        row_max = torch.maximum(self.row_max, other.row_max)
        base = row_max.masked_fill(row_max == -torch.inf, 0)
        first, second = self.sum_above(base), other.sum_above(base)
        row_sum = first + second
        row_sum = row_sum.masked_fill(row_sum == 0, 1)
        output = self.output.to(row_sum.dtype) * (first / row_sum).unsqueeze(-1)
        output += other.output.to(row_sum.dtype) * (second / row_sum).unsqueeze(-1)
        return Attended(output, row_max, row_sum)

    def with_sinks(self, sinks: Tensor) -> Attended:
        """Attention whose sums each head's sink joins."""
        sink = sinks.to(self.row_max.dtype).view(1, -1, 1)
        row_max = torch.maximum(self.row_max, sink)
        base = row_max.masked_fill(row_max == -torch.inf, 0)
        of_keys = self.sum_above(base)
        row_sum = of_keys + (sink - base).exp()
        row_sum = row_sum.masked_fill(row_sum == 0, 1)
        return Attended(self.output * (of_keys / row_sum).unsqueeze(-1), row_max, row_sum)


class _Scored(NamedTuple):
    """A rectangle after its scores are known."""

    changed: Tensor  # [batch, heads, rows, keys], -inf where hidden; may be written over
    visible: Tensor | None
    kept: Tensor | None  # 1 where dropout keeps a weight, which is divided by 1 - dropout_p, else 0
    slopes: Sequence[Tensor] | None  # see change_with_slopes


def _score(
    query: Tensor,
    key: Tensor,
    variant: Variant,
    draws: Draws | None,
    pair_block: PairBlock,
    masked: bool,
    nonfinite: Tensor | None,
    wanted: Collection[int] | None = None,
) -> _Scored:
    """The scores of scaled queries; wanted: in a backward pass, the captured tensors whose
    gradients are asked for."""
    changed = (_packed(query, key) @ key.transpose(-1, -2)).view(*query.shape[:3], key.shape[2])
    at = pair_block.coordinates()
    score, captured, slopes = variant.score, variant.score_captured, None
    if score and wanted is None:
        changed = evaluate.change(score, captured, changed, at, overwrite=True)
    elif score and wanted is not None:
        changed, slopes = change_with_slopes(score, captured, changed, at, wanted)
    if nonfinite is not None:
        changed.masked_fill_(nonfinite, torch.nan)
    seen = evaluate.visible(variant.mask, variant.mask_captured, at) if masked else None
    if seen is not None and not score and nonfinite is None:  # NaN would show, and be seen
        changed.add_(torch.where(seen, 0.0, -torch.inf).to(changed.dtype))
    elif seen is not None:
        hide_(changed, seen)
    kept = None
    if draws is not None:  # bytes become numbers ten times as fast as bools
        kept = draws.kept(pair_block, variant.dropout_p).view(torch.uint8).to(changed.dtype)
    return _Scored(changed, seen, kept, slopes)


def _packed(rows: Tensor, key: Tensor) -> Tensor:
    """Query-side rows [batch, heads, rows, dim] as [batch, kv_heads, group · rows, dim]."""
    batch, heads, num_rows, dim = rows.shape
    kv_heads = key.shape[1]
    return rows.reshape(batch, kv_heads, heads // kv_heads * num_rows, dim)


def forward(
    query: Float[Tensor, "batch query_heads rows dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    variant: Variant,
    draws: Draws | None,
    pair_block: PairBlock,
    masked: bool,
    nan_safe: bool,
) -> Attended:
    """Attention within a rectangle. `nan_safe`: inputs hold NaN or inf, which must stay put."""
    wide = accumulate_dtype(query.dtype)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    query, key, value, nonfinite = _set_nonfinite_apart(query, key, value, nan_safe)
    scaled = query * variant.scale
    scored = _score(scaled, key, variant, draws, pair_block, masked, nonfinite)
    row_max = scored.changed.amax(-1, keepdim=True)
    row_max.masked_fill_(row_max == -torch.inf, 0)
    weights = scored.changed.sub_(row_max).exp_()
    row_sum = weights.sum(-1, keepdim=True)
    empty = row_sum == 0
    row_sum.masked_fill_(empty, 1)
    divisor = row_sum
    if scored.kept is not None:
        weights.mul_(scored.kept)
        divisor = row_sum * (1 - variant.dropout_p)
    output = (_packed(weights, key) @ value).view(*query.shape[:3], value.shape[-1]).div_(divisor)
    row_max.masked_fill_(empty, -torch.inf)
    return Attended(output, row_max.squeeze(-1), row_sum.squeeze(-1))


def largest(
    query: Float[Tensor, "batch query_heads rows dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    variant: Variant,
    pair_block: PairBlock,
    masked: bool,
    nan_safe: bool,
) -> Float[Tensor, "batch query_heads"]:
    """The largest visible score of each head in a rectangle."""
    wide = accumulate_dtype(query.dtype)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    query, key, _, nonfinite = _set_nonfinite_apart(query, key, value, nan_safe)
    scaled = query * variant.scale
    return _score(scaled, key, variant, None, pair_block, masked, nonfinite).changed.amax((2, 3))


class Contributions(NamedTuple):
    """A rectangle's contribution in the gradients; `taken`: of tensors that the score captured."""

    query: Tensor
    key: Tensor
    value: Tensor
    taken: list[Taken]


def backward(
    grad_output: Float[Tensor, "batch query_heads rows value_dim"],
    query: Float[Tensor, "batch query_heads rows dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    lse: Float[Tensor, "batch query_heads rows"],
    row_dot: Float[Tensor, "batch query_heads rows"],
    variant: Variant,
    draws: Draws | None,
    pair_block: PairBlock,
    masked: bool,
    nan_safe: bool,
    wanted: Collection[int] = (),
    row_sum: Float[Tensor, "batch query_heads rows"] | None = None,
) -> Contributions:
    """The contribution of a rectangle of pairs in the gradients.

    Args:
        lse: of the whole rows, finite (0 where a row sees nothing).
        row_dot: Σ grad_output · output of the whole rows, less the gradient of the lse.
        wanted: slots of the score's captured tensors whose gradients are asked for.
        row_sum: Σ exp(score - lse) of the whole rows, where rounding the lse changed it; None: 1.

    Source: FlashAttention-2 (Dao 2023), section 3.1.2, algorithm 2.
    """
    wide = accumulate_dtype(query.dtype)
    grad_output, query = grad_output.to(wide), query.to(wide)
    query, key, value, nonfinite = _set_nonfinite_apart(
        query, key.to(wide), value.to(wide), nan_safe
    )
    scaled = query * variant.scale  # the smaller factor: scores are not passed over for it
    scored = _score(scaled, key, variant, draws, pair_block, masked, nonfinite, wanted)
    weights = scored.changed.sub_(lse.unsqueeze(-1)).exp_()
    if row_sum is not None:
        weights.div_(row_sum.unsqueeze(-1))
    if nan_safe and scored.visible is not None:  # a NaN row must not reach what it does not see
        weights = weights.masked_fill(~scored.visible, 0)
    if scored.kept is not None:
        grad_output = grad_output / (1 - variant.dropout_p)
    grad_output = _packed(grad_output, key)
    grad_weights = (grad_output @ value.transpose(-1, -2)).view_as(weights)
    dropped = weights
    if scored.kept is not None:
        dropped = weights * scored.kept
        grad_weights = grad_weights.mul_(scored.kept)
    grad_value = _packed(dropped, key).transpose(-1, -2) @ grad_output
    grad_scores = grad_weights.sub_(row_dot.unsqueeze(-1)).mul_(weights)
    if nan_safe and scored.visible is not None:
        grad_scores = grad_scores.masked_fill(~scored.visible, 0)
    grad_scores, taken = change_backward(
        variant.score, variant.score_captured, grad_scores, scored.visible, scored.slopes, wanted
    )
    grad_scores = _packed(grad_scores, key)
    grad_query = (grad_scores @ key).view(query.shape).mul_(variant.scale)
    grad_key = grad_scores.transpose(-1, -2) @ _packed(scaled, key)
    return Contributions(grad_query, grad_key, grad_value, taken)


def _set_nonfinite_apart(
    query: Tensor, key: Tensor, value: Tensor, nan_safe: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Zero the rows that hold NaN or inf and say which pairs touch one.

    Such a pair's score becomes NaN and is selected away where it is hidden; a product would carry
    it on, since 0 · NaN is NaN.
    """
    if not nan_safe:
        return query, key, value, None
    cleaned, nonfinite = [], []
    for rows in (query, key, value):
        bad = ~rows.isfinite().all(-1, keepdim=True)
        cleaned.append(rows.masked_fill(bad, 0))
        nonfinite.append(bad)
    group = query.shape[1] // key.shape[1]
    of_keys = (nonfinite[1] | nonfinite[2]).repeat_interleave(group, dim=1).transpose(-1, -2)
    return cleaned[0], cleaned[1], cleaned[2], nonfinite[0] | of_keys
