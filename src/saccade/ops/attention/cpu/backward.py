"""Backward: the rectangles' contributions in the gradients, recomputed from the lse and added up
in the accumulation dtype."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.ops.attention.cpu import dense_tile, flash_tile, segments
from saccade.ops.attention.cpu.dense_tile import PairBlock
from saccade.ops.attention.cpu.flash_tile import PartialTile
from saccade.ops.attention.cpu.segments import DenseProblem
from saccade.runtime.spec import accumulate_dtype


class GradientSum:
    """The gradient of [batch, heads, rows, dim], to which rectangles add their contributions.

    Laid out [batch, rows, heads, dim] in memory, as the results of every implementation are. A
    first contribution that covers everything is taken as it is: one rectangle needs no second copy.
    """

    def __init__(self, like: Tensor):
        self.shape = like.shape
        self.wide = accumulate_dtype(like.dtype)
        self.total: Tensor | None = None

    def add(self, at: tuple[slice, slice, slice], contribution: Tensor) -> None:
        """Add a rectangle's contribution at its slices of [batch, heads, rows]."""
        if self.total is None and contribution.shape == self.shape:
            self.total = contribution
            return
        if self.total is None:
            batch, heads, rows, dim = self.shape
            self.total = torch.zeros(
                batch, rows, heads, dim, dtype=self.wide, device="cpu"
            ).transpose(1, 2)
        elif self.total.dtype != self.wide:
            self.total = self.total.to(self.wide)
        self.total[at] += contribution

    def result(self) -> Tensor:
        """The sum; zeros where nothing was added."""
        if self.total is None:
            return torch.zeros(self.shape, dtype=self.wide, device="cpu")
        return self.total


class Results(NamedTuple):
    """What the forward pass gave, and the gradients that came back for it."""

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None


class DenseGradients(NamedTuple):
    """Gradients of a dense problem; sinks and tables in the accumulation dtype."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    tables: dict[int, Tensor]


class _Rows(NamedTuple):
    """What every rectangle of a row needs to know of the whole row."""

    output: Tensor
    lse: Tensor  # finite: 0 where the row sees nothing
    grad_output: Tensor  # 0 where the row sees nothing
    row_dot: Tensor | None  # Σ grad_output · output, less the gradient of the lse
    plain: bool  # the flash kernel knows nothing of a gradient of the lse

    @staticmethod
    def of(dense: DenseProblem, results: Results, nan_safe: bool) -> _Rows:
        output, lse, grad_output, grad_lse = results
        sees_nothing = lse == -torch.inf
        if bool(sees_nothing.any()):
            grad_output = grad_output.masked_fill(sees_nothing.unsqueeze(-1), 0)
            lse = lse.masked_fill(sees_nothing, 0)
        plain = grad_lse is not None or not dense.fits_flash or nan_safe
        row_dot = None
        if plain or dense.sinks is not None:  # the flash kernel computes its own
            row_dot = (grad_output.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
        if row_dot is not None and grad_lse is not None:
            row_dot = row_dot - grad_lse.masked_fill(sees_nothing, 0)
        return _Rows(output, lse, grad_output, row_dot, plain)


def differentiate(dense: DenseProblem, results: Results, wanted: Sequence[int]) -> DenseGradients:
    """Gradients of a dense problem, with those of the wanted captured tensors of the score."""
    rows = _Rows.of(dense, results, nan_safe=False)
    grad_sinks = None
    if dense.sinks is not None and rows.row_dot is not None:
        sink_weights = (dense.sinks.to(rows.lse.dtype).view(1, -1, 1) - rows.lse).exp()
        sink_weights = sink_weights.masked_fill(results.lse == -torch.inf, 0)
        grad_sinks = -(sink_weights * rows.row_dot).sum((0, 2))
    sums, tables = _empty_sums(dense, wanted)
    if not dense.sees_nothing:
        masked = _visit(dense, rows, sums, tables, nan_safe=False)
        # NaN that was carried to where it is hidden shows in one of the three: a nonfinite key or
        # value in gradients of rows that do not see it, a nonfinite query in those of keys.
        if masked and not all(bool(part.result().sum().isfinite()) for part in sums):
            sums, tables = _empty_sums(dense, wanted)
            _visit(dense, _Rows.of(dense, results, nan_safe=True), sums, tables, nan_safe=True)
    grad_query, grad_key, grad_value = (part.result() for part in sums)
    return DenseGradients(grad_query, grad_key, grad_value, grad_sinks, tables)


def _empty_sums(
    dense: DenseProblem, wanted: Sequence[int]
) -> tuple[list[GradientSum], dict[int, Tensor]]:
    tensors = dense.variant.score_captured.tensors
    tables = {
        index: torch.zeros_like(tensors[index], dtype=accumulate_dtype(tensors[index].dtype))
        for index in wanted
    }
    return [GradientSum(rows) for rows in (dense.query, dense.key, dense.value)], tables


def _visit(
    dense: DenseProblem,
    rows: _Rows,
    sums: list[GradientSum],
    tables: dict[int, Tensor],
    nan_safe: bool,
) -> bool:
    """Add the contributions of every rectangle; say whether any of them needed the mask."""
    form = None if rows.plain else dense.flash_at_once
    if form is not None:
        whole, causal = segments.whole(dense), form == "causal"
        _add(sums, dense, whole, _flash(dense, rows, whole, None, causal))
        return causal
    any_masked = False
    for pair_block, runs in segments.row_tiles(dense):
        for run in runs:
            any_masked |= run.masked
            at = pair_block._replace(kv_rows=(run.start, run.stop))
            _run(dense, rows, at, run.masked, nan_safe, sums, tables)
    return any_masked


def _run(
    dense: DenseProblem,
    rows: _Rows,
    pair_block: PairBlock,
    masked: bool,
    nan_safe: bool,
    sums: list[GradientSum],
    tables: dict[int, Tensor],
) -> None:
    """Add one rectangle's contributions, by the flash kernel where it fits."""
    if rows.plain:
        for batch in segments.row_pieces(pair_block):
            for piece in batch:
                for part in segments.key_pieces(piece):
                    contributions = _plain(dense, rows, part, masked, nan_safe, tables)
                    _add(sums, dense, part, contributions[:3])
                    for taken in contributions.taken:
                        taken.add_to(tables[taken.slot])
        return
    found = flash_tile.partial_at(
        dense.variant, pair_block, masked, dense.sizes.kv_tile, dense.query.dtype
    )
    if found is None:
        return
    pair_block, partial = found
    _add(sums, dense, pair_block, _flash(dense, rows, pair_block, partial, causal=False))


def _flash(
    dense: DenseProblem,
    rows: _Rows,
    pair_block: PairBlock,
    partial: PartialTile | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = segments.slices_of(dense, pair_block)
    return flash_tile.backward(
        rows.grad_output[queries],
        dense.query[queries],
        dense.key[keys],
        dense.value[keys],
        rows.output[queries],
        rows.lse[queries],
        dense.variant.scale,
        partial,
        causal,
    )


def _plain(
    dense: DenseProblem,
    rows: _Rows,
    pair_block: PairBlock,
    masked: bool,
    nan_safe: bool,
    wanted: Collection[int],
) -> dense_tile.Contributions:
    queries, keys = segments.slices_of(dense, pair_block)
    assert rows.row_dot is not None
    return dense_tile.backward(
        rows.grad_output[queries],
        dense.query[queries],
        dense.key[keys],
        dense.value[keys],
        rows.lse[queries],
        rows.row_dot[queries],
        dense.variant,
        dense.seed,
        pair_block,
        masked,
        nan_safe,
        wanted,
    )


def _add(
    sums: list[GradientSum],
    dense: DenseProblem,
    pair_block: PairBlock,
    contributions: Sequence[Tensor],
) -> None:
    """Add contributions of query, key and value to their sums."""
    queries, keys = segments.slices_of(dense, pair_block)
    for total, at, contribution in zip(sums, (queries, keys, keys), contributions, strict=True):
        total.add(at, contribution)
