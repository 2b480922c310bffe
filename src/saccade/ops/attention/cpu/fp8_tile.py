"""Inner tiles of attention whose products are of e4m3 numbers: rows in float32 as numbers and
scales say, weights rounded.

A tile of keys is visited after the other, from the last to the first: weights are rounded in units
of the largest so far, and sinks of attention, which are the first keys, then come last. Nothing
here has the size query_len x kv_len.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.modifiers import evaluate
from saccade.ops.attention.cpu import segments
from saccade.ops.attention.cpu.block_mask import Run
from saccade.ops.attention.cpu.dense_tile import Attended, PairBlock
from saccade.ops.attention.cpu.segments import DenseProblem
from saccade.runtime.fp8_spec import E4M3, WEIGHTS_LOG2


def attend(
    dense: DenseProblem,
    kv_tile: int,
    nonfinite: bool,
    *,
    shift: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, rows, value_dim] and lse of a dense problem.

    nonfinite: whether rows may hold NaN or inf.
    shift: [batch, heads, rows], what is added to the products of each query row.
    value_scales: [batch, kv_heads, keys], at most 1: what weights are multiplied by before they are
        rounded.
    """
    batch, heads, rows = dense.query.shape[:3]
    output = dense.query.new_zeros(batch, heads, rows, dense.value.shape[-1])
    row_max = dense.query.new_full((batch, heads, rows), -torch.inf)
    row_sum = torch.ones_like(row_max)
    if not dense.sees_nothing:
        for tile, runs in segments.row_tiles(dense):
            for pieces in segments.row_pieces(tile):
                for piece in pieces:
                    state = _State.start(dense, piece)
                    for run in reversed(runs):
                        for start in range(_last_tile(run, kv_tile), run.start - 1, -kv_tile):
                            keys = start, min(start + kv_tile, run.stop)
                            at = piece._replace(kv_rows=keys)
                            changes = shift, value_scales
                            state = _fold(dense, at, state, changes, run.masked, nonfinite)
                    where = segments.slices_of(dense, piece).queries
                    output[where], row_max[where], row_sum[where] = state.finished()
    if shift is not None and not dense.variant.score:  # with a score it is in the scores already
        row_max = row_max + dense.variant.scale * shift
    found = Attended(output, row_max, row_sum)
    found = found if dense.sinks is None else found.with_sinks(dense.sinks)
    return found.output, found.lse


def _last_tile(run: Run, kv_tile: int) -> int:
    """The first key of a run's last tile."""
    return run.start + (run.stop - 1 - run.start) // kv_tile * kv_tile


class _State(NamedTuple):
    """The running softmax of a rectangle's rows; sums are in units of 2^-WEIGHTS_LOG2.

    Weighted sums are `unit` times that, so that no sum of values leaves float32 whose mean does
    not.
    """

    row_max: Tensor  # [batch, heads, rows, 1]
    row_sum: Tensor
    weighted_sum: Tensor  # [batch, heads, rows, value_dim]
    unit: float

    @staticmethod
    def start(dense: DenseProblem, piece: PairBlock) -> _State:
        """Nothing seen yet."""
        shape = dense.query[segments.slices_of(dense, piece).queries].shape[:3]
        new = dense.query.new_zeros
        weighted_sum = new(*shape, dense.value.shape[-1])
        unit = 2.0 ** -(WEIGHTS_LOG2 + 1 + dense.value.shape[2].bit_length())
        return _State(new(*shape, 1).fill_(-torch.inf), new(*shape, 1), weighted_sum, unit)

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, largest scores and sums of weights; -inf and 1 where nothing is seen."""
        empty = self.row_sum == 0
        divisor = self.row_sum.masked_fill(empty, 1)
        row_max = self.row_max.masked_fill(empty, -torch.inf)
        row_sum = (divisor / 2.0**WEIGHTS_LOG2).masked_fill(empty, 1)
        output = self.weighted_sum / (divisor * self.unit)
        return output, row_max.squeeze(-1), row_sum.squeeze(-1)


def _fold(
    dense: DenseProblem,
    at: PairBlock,
    state: _State,
    changes: tuple[Tensor | None, Tensor | None],
    masked: bool,
    nonfinite: bool,
) -> _State:
    """Take one tile of keys and values in; changes: shift and value scales."""
    shift, value_scales = changes
    variant, where = dense.variant, segments.slices_of(dense, at)
    query, key, value = dense.query[where.queries], dense.key[where.keys], dense.value[where.keys]
    group = query.shape[1] // key.shape[1]
    bad = None
    if nonfinite:  # 0 · NaN is NaN: such rows leave the products, and their pairs are NaN
        rows = [~tensor.isfinite().all(-1, keepdim=True) for tensor in (query, key, value)]
        query, key, value = (
            tensor.masked_fill(bad_rows, 0)
            for tensor, bad_rows in zip((query, key, value), rows, strict=True)
        )
        bad = rows[0] | (rows[1] | rows[2]).repeat_interleave(group, 1).mT
    packed = (query * variant.scale).unflatten(1, (key.shape[1], group)).flatten(2, 3)
    scores = (packed @ key.mT).view(*query.shape[:3], key.shape[2])
    places = at.coordinates()
    if variant.score:
        if shift is not None:
            scores = scores + variant.scale * shift[where.queries].unsqueeze(-1)
        scores = evaluate.change(variant.score, variant.score_captured, scores, places)
    if bad is not None:
        scores = scores.masked_fill(bad, torch.nan)
    if masked:
        seen = evaluate.visible(variant.mask, variant.mask_captured, places)
        scores = scores.masked_fill(~seen, -torch.inf)
    new_max = torch.maximum(state.row_max, scores.amax(-1, keepdim=True))
    base = new_max.masked_fill(new_max == -torch.inf, 0)
    rescale = (state.row_max - base).exp()
    weights = (scores - base).exp() * 2.0**WEIGHTS_LOG2
    row_sum = state.row_sum * rescale + weights.sum(-1, keepdim=True)
    if value_scales is not None:
        factors = value_scales[:, :, at.kv_rows[0] : at.kv_rows[1]]
        weights = weights * factors.repeat_interleave(group, 1).unsqueeze(2)
    weights = weights.to(E4M3).float().mul_(state.unit)
    weights = weights.unflatten(1, (key.shape[1], group)).flatten(2, 3)
    product = (weights @ value).view_as(state.weighted_sum)
    return _State(new_max, row_sum, state.weighted_sum * rescale + product, state.unit)
