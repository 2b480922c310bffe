"""Attention on the CPU: plan, visit the rectangles that are visible, merge.

A plan gives every tile of query rows the runs of keys that it sees. Each run is one rectangle,
computed by PyTorch's flash kernel where nothing changes the scores (`flash_tile.py`), else in plain
tiles (`dense_tile.py`). Partial results merge by their largest scores and sums; gradients add up.
Nothing here has the size query_len x kv_len.

Both inner paths first compute as if all numbers were finite. NaN or inf in a hidden row would
show in the result (0 · NaN is NaN), so a result that is not finite is computed again NaN-safe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.ops.attention.cpu import dense_tile, flash_tile, segments
from saccade.ops.attention.cpu.block_mask import Run
from saccade.ops.attention.cpu.dense_tile import Attended, PairBlock
from saccade.ops.attention.cpu.flash_tile import PartialTile
from saccade.ops.attention.cpu.segments import DenseProblem, Segment, clear_padding, parts_of
from saccade.runtime.rounding import restored, rounded
from saccade.runtime.spec import (
    Gradients,
    Inputs,
    KernelConfig,
    Results,
    Variant,
    accumulate_dtype,
    empty_gradients,
    empty_results,
    heads_inside,
)
from saccade.runtime.validation import computed_without


@computed_without
def forward(inputs: Inputs, variant: Variant, config: KernelConfig) -> Results:
    """All results; see `saccade.attention`."""
    parts = parts_of(inputs)
    wide = _widened(inputs, exact=variant.residual)
    problems = [DenseProblem.of(part, wide, variant, config) for part in parts]
    largest = residual = None
    if variant.max_logit:
        wide_dtype, heads = accumulate_dtype(inputs.query.dtype), inputs.query.shape[1]
        none = inputs.query.new_empty((0, heads), dtype=wide_dtype)
        largest = torch.cat([none, *map(max_logit, problems)])
    if inputs.cu_seqlens_q is None:
        exact, lse = attend(problems[0])
        output = _laid_out(exact, inputs.query, heads_inside(inputs.query))
        if variant.residual:
            residual = torch.empty_like(output, dtype=torch.int8)
            residual.copy_(rounded(exact, output))
        return Results(output, lse.contiguous(), residual, largest)
    output, lse = empty_results(inputs)
    clear_padding(inputs.cu_seqlens_q, output)
    clear_padding(inputs.cu_seqlens_q, lse, dim=1, number=-torch.inf)
    if variant.residual:
        residual = torch.zeros_like(output, dtype=torch.int8)
    for part, dense in zip(parts, problems, strict=True):
        exact, of_part = attend(dense)
        part.queries(output).copy_(exact)
        part.lse(lse).copy_(of_part)
        if residual is not None:
            part.queries(residual).copy_(rounded(exact, part.queries(output)))
    return Results(output, lse, residual, largest)


def prepared(
    inputs: Inputs, variant: Variant, config: KernelConfig
) -> Callable[[Inputs, Variant], Results]:
    """The forward pass for calls like this one; on a CPU nothing is worth preparing."""
    return lambda inputs, variant: forward(inputs, variant, config)


# Units of rounding of an lse that weights are off by at least, where sums are computed beside it:
# 8,192 · eps of float32.
LEAST_ROUNDING = 2.0**-10


def loses_sums(lse: Tensor) -> bool:
    """Whether rounding moved an lse so far that weights, and what merges by it, show it.

    Not by NaN and inf, which are as they are.
    """
    eps = torch.finfo(lse.dtype).eps
    if lse.numel() == 0 or float(lse.abs().max()) * eps < LEAST_ROUNDING:
        return False
    return float(lse.abs().nan_to_num(0, posinf=0).max()) * eps >= LEAST_ROUNDING


# The problem with some of its keys, and which rows they are, for each piece of a run.
Pieces = Callable[[Run], Iterator[tuple[DenseProblem, tuple[int, int]]]]


def attend(dense: DenseProblem, pieces: Pieces | None = None) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, rows, value_dim] and lse of a dense problem.

    pieces: where keys come in pieces, gives those of a run.
    """
    if dense.sees_nothing:
        output, lse = _memory(dense)
        found = Attended.by_lse(output.zero_(), lse.fill_(-torch.inf))
    else:
        found, masked = _compute_tiles(dense, pieces, nan_safe=False)
        again = masked and not bool(found.output.sum().isfinite())
        if dense.fits_flash and (masked or pieces is not None or dense.sinks is not None):
            again = again or loses_sums(found.lse)  # the flash kernel gives no sums to merge by
        if again:
            found, _ = _compute_tiles(dense, pieces, nan_safe=True)
    if dense.sinks is not None:
        found = found.with_sinks(dense.sinks)
    return found.output, found.lse


def _memory(dense: DenseProblem) -> tuple[Tensor, Tensor]:
    """Memory for the output and lse of a dense problem."""
    batch, heads, rows = dense.query.shape[:3]
    wide = accumulate_dtype(dense.query.dtype)
    output = dense.query.new_empty(batch, rows, heads, dense.value.shape[-1], dtype=wide)
    return output.transpose(1, 2), dense.query.new_empty(batch, heads, rows, dtype=wide)


def _compute_tiles(
    dense: DenseProblem, pieces: Pieces | None, nan_safe: bool
) -> tuple[Attended, bool]:
    """Compute every row tile; also say whether any of them needed the mask."""
    form = dense.flash_at_once if pieces is None and not nan_safe else None
    if form is not None:
        scale, causal = dense.variant.scale, form == "causal"
        whole = flash_tile.forward(dense.query, dense.key, dense.value, scale, None, causal)
        return Attended.by_lse(*whole), causal

    def row_tile(pair_block: PairBlock, runs: tuple[Run, ...]) -> Attended:
        """One tile of query rows against all that it sees."""
        partials = []
        for run in runs:
            for there, kv_rows in pieces(run) if pieces else ((dense, (run.start, run.stop)),):
                at = pair_block._replace(kv_rows=kv_rows)
                partials.append(_rectangle(there, at, run.masked, nan_safe))
        return _merged(dense, pair_block, [found for found in partials if found is not None])

    tiles = list(segments.row_tiles(dense))
    masked = any(run.masked for _, runs in tiles for run in runs)
    if len(tiles) == 1:
        return row_tile(*tiles[0]), masked
    output, row_max = _memory(dense)
    row_sum = torch.ones_like(row_max)
    for pair_block, runs in tiles:
        at = segments.slices_of(dense, pair_block).queries
        of_tile = row_tile(pair_block, runs)
        output[at], row_max[at] = of_tile.output, of_tile.row_max
        if of_tile.row_sum is not None:
            row_sum[at] = of_tile.row_sum
    return Attended(output, row_max, row_sum), masked


def _rectangle(
    dense: DenseProblem, pair_block: PairBlock, masked: bool, nan_safe: bool
) -> Attended | None:
    """One rectangle, by the flash kernel where it fits; None if nothing in it is visible."""
    if not dense.fits_flash or nan_safe:
        return _in_dense_tiles(dense, pair_block, masked, nan_safe)
    found = flash_tile.partial_at(
        dense.variant, pair_block, masked, dense.sizes.kv_tile, dense.query.dtype
    )
    if found is None:
        return None
    pair_block, partial = found
    query, key, value = _rows(dense, pair_block)
    scale = dense.variant.scale
    return Attended.by_lse(*flash_tile.forward(query, key, value, scale, partial, causal=False))


def _rows(dense: DenseProblem, pair_block: PairBlock) -> tuple[Tensor, Tensor, Tensor]:
    at = segments.slices_of(dense, pair_block)
    return dense.query[at.queries], dense.key[at.keys], dense.value[at.keys]


def _in_dense_tiles(
    dense: DenseProblem, pair_block: PairBlock, masked: bool, nan_safe: bool
) -> Attended:
    """One rectangle in plain tiles."""

    def piece(rows: PairBlock) -> Attended:
        partials = [
            dense_tile.forward(
                *_rows(dense, part), dense.variant, dense.draws, part, masked, nan_safe
            )
            for part in segments.key_pieces(rows)
        ]
        return _merged(dense, rows, partials)

    batches = []
    for batch in segments.row_pieces(pair_block):
        of_rows = zip(*(piece(rows) for rows in batch), strict=True)
        batches.append([torch.cat(parts, dim=2) for parts in of_rows])  # with sums, as tiles are
    return Attended(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def _merged(dense: DenseProblem, pair_block: PairBlock, partials: list[Attended]) -> Attended:
    """The sum of partial results over disjoint keys; zeros and -inf where there are none."""
    if partials:
        return functools.reduce(Attended.merged, partials)
    rows = dense.query[segments.slices_of(dense, pair_block).queries]
    wide = accumulate_dtype(rows.dtype)
    output = rows.new_zeros(*rows.shape[:3], dense.value.shape[-1], dtype=wide)
    return Attended.by_lse(output, rows.new_full(rows.shape[:3], -torch.inf, dtype=wide))


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let each head's sink join the denominators."""
    found = Attended.by_lse(output, lse).with_sinks(sinks)
    return found.output, found.lse


@computed_without
def backward(
    inputs: Inputs,
    variant: Variant,
    config: KernelConfig,
    saved: Results,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    wanted_tables: Sequence[int],
    deterministic: bool,
) -> Gradients:
    """Gradients of the inputs, and of the wanted tensors that the score captured.

    They are the same from run to run, asked for or not (`deterministic`).
    """
    wide = _widened(inputs, exact=True)
    output = restored(saved.output, saved.residual)

    def of_part(part: Segment) -> DenseGradients:
        dense = DenseProblem.of(part, wide, variant, config)
        results = BackwardInputs(
            part.queries(output).to(dense.query.dtype),
            part.lse(saved.lse),
            part.queries(grad_output).to(dense.query.dtype),
            None if grad_lse is None else part.lse(grad_lse),
        )
        return differentiate(dense, results, wanted_tables)

    parts = parts_of(inputs)
    if inputs.cu_seqlens_q is None:
        found = of_part(parts[0])
        query, key, value = (
            _laid_out(gradient, like, True)
            for gradient, like in zip(found[:3], inputs[:3], strict=True)
        )
        return Gradients(query, key, value, *_shared_sums(inputs, variant, [found], wanted_tables))
    gradients, sums = empty_gradients(inputs), []
    clear_padding(inputs.cu_seqlens_q, gradients.query)
    clear_padding(inputs.cu_seqlens_k, gradients.key, gradients.value)
    for part in parts:
        found = of_part(part)
        part.queries(gradients.query).copy_(found.query)
        part.keys(gradients.key).copy_(found.key)
        part.keys(gradients.value).copy_(found.value)
        sums.append(found)
    sinks, tables = _shared_sums(inputs, variant, sums, wanted_tables)
    return gradients._replace(sinks=sinks, tables=tables)


def _laid_out(rows: Tensor, like: Tensor, heads_are_inside: bool) -> Tensor:
    """A result in the dtype and memory order that the operator promises; no copy if it has them."""
    rows = rows.to(like.dtype)
    if heads_are_inside:
        return rows.transpose(1, 2).contiguous().transpose(1, 2)
    return rows.contiguous()


def max_logit(dense: DenseProblem) -> Tensor:
    """The largest visible score of each head, [batch, heads]; -inf where nothing is visible."""
    batch, heads = dense.query.shape[:2]
    wide = accumulate_dtype(dense.query.dtype)
    largest = dense.query.new_full((batch, heads), -torch.inf, dtype=wide)
    if dense.sees_nothing:
        return largest
    for nan_safe in (False, True):
        for pair_block, runs in segments.row_tiles(dense):
            for run in runs:
                at = pair_block._replace(kv_rows=(run.start, run.stop))
                for batches in segments.row_pieces(at):
                    for rows in batches:
                        for part in segments.key_pieces(rows):
                            found = dense_tile.largest(
                                *_rows(dense, part), dense.variant, part, run.masked, nan_safe
                            )
                            there = segments.slices_of(dense, part).queries[:2]
                            largest[there] = torch.maximum(largest[there], found)
        if not bool(largest.isnan().any()):
            break  # else perhaps because of a hidden row: once more, NaN-safe
        if not nan_safe:
            largest.fill_(-torch.inf)
    return largest


def _widened(inputs: Inputs, exact: bool) -> Inputs:
    """float16 as float32, which is more exact, and spares PyTorch's slow float16 products.

    exact: bfloat16 as well, as PyTorch's kernel would round what a residual is to keep, and because
    of its backward pass, whose bfloat16 products take several times as long on most processors.
    """
    if inputs.query.dtype != torch.float16 and not (exact and inputs.query.dtype.itemsize == 2):
        return inputs
    query, key, value = inputs.query.float(), inputs.key.float(), inputs.value.float()
    return inputs._replace(query=query, key=key, value=value)


def _shared_sums(
    inputs: Inputs,
    variant: Variant,
    parts: Sequence[DenseGradients],
    wanted_tables: Sequence[int],
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """The gradients of what all parts share: sinks and captured tensors."""
    sinks = inputs.sinks
    if sinks is not None:
        sinks = _total(sinks, [part.sinks for part in parts if part.sinks is not None])
    captured = variant.score_captured.tensors
    tables = {
        slot: _total(captured[slot], [part.tables[slot] for part in parts])
        for slot in wanted_tables
    }
    return sinks, tables


def _total(like: Tensor, contributions: Sequence[Tensor]) -> Tensor:
    """The sum of contributions, in the dtype of what it is the gradient of."""
    if not contributions:
        return torch.zeros_like(like)
    return torch.stack(list(contributions)).sum(0).to(like.dtype)


# ---- gradients of a dense problem -------------------------------------------------------------
# The rectangles' contributions, recomputed from the lse and added up in the accumulation dtype.


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


class BackwardInputs(NamedTuple):
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
    row_sum: Tensor | None  # Σ exp(score - lse), where rounding the lse changed it; None: 1
    plain: bool  # the flash kernel knows nothing of the last two, or of a gradient of the lse

    @staticmethod
    def of(dense: DenseProblem, results: BackwardInputs, nan_safe: bool) -> _Rows:
        output, lse, grad_output, grad_lse = results
        sees_nothing = lse == -torch.inf
        if bool(sees_nothing.any()):
            grad_output = grad_output.masked_fill(sees_nothing.unsqueeze(-1), 0)
            lse = lse.masked_fill(sees_nothing, 0)
        row_sum = _lost_sums(dense, lse)
        plain = grad_lse is not None or not dense.fits_flash or nan_safe or row_sum is not None
        row_dot = None
        if plain or dense.sinks is not None:  # the flash kernel computes its own
            row_dot = (grad_output.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
        if row_dot is not None and grad_lse is not None:
            row_dot = row_dot - grad_lse.masked_fill(sees_nothing, 0)
        return _Rows(output, lse, grad_output, row_dot, row_sum, plain)


def _lost_sums(dense: DenseProblem, lse: Tensor) -> Tensor | None:
    """Σ exp(score - lse) of each row, where rounding moved an lse so far that weights show it.

    Scores of -1e9 and n keys have the lse -1e9: its dtype has no room for the log of n, and
    exp(score - lse) would be n times each weight. The sums are computed anew then. Rows whose lse
    is that of more keys than these, as in a ring, keep what they have; so does NaN.
    """
    if dense.sees_nothing or not loses_sums(lse):
        return None
    found, _ = _compute_tiles(dense, None, nan_safe=True)
    if dense.sinks is not None:
        found = found.with_sinks(dense.sinks)
    size = lse.abs().nan_to_num(0, posinf=0)
    of_these = (found.lse - lse).abs() <= 2 * torch.finfo(lse.dtype).eps * size
    row_sum = found.sum_above(lse)
    return row_sum.where(of_these & (found.row_max > -torch.inf), 1)


def differentiate(
    dense: DenseProblem, results: BackwardInputs, wanted: Sequence[int]
) -> DenseGradients:
    """Gradients of a dense problem, with those of the wanted captured tensors of the score."""
    rows = _Rows.of(dense, results, nan_safe=False)
    grad_sinks = None
    if dense.sinks is not None and rows.row_dot is not None:
        sink_weights = (dense.sinks.to(rows.lse.dtype).view(1, -1, 1) - rows.lse).exp()
        if rows.row_sum is not None:
            sink_weights = sink_weights / rows.row_sum
        sink_weights = sink_weights.masked_fill(results.lse == -torch.inf, 0)
        grad_sinks = -(sink_weights * rows.row_dot).sum((0, 2))
    sums, tables = _empty_sums(dense, wanted)
    if not dense.sees_nothing:
        masked = _differentiate_tiles(dense, rows, sums, tables, nan_safe=False)
        # NaN that was carried to where it is hidden shows in one of the three: a nonfinite key or
        # value in gradients of rows that do not see it, a nonfinite query in those of keys.
        if masked and not all(bool(part.result().sum().isfinite()) for part in sums):
            sums, tables = _empty_sums(dense, wanted)
            _differentiate_tiles(
                dense, _Rows.of(dense, results, nan_safe=True), sums, tables, nan_safe=True
            )
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


def _differentiate_tiles(
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
                    contributions = _dense(dense, rows, part, masked, nan_safe, tables)
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


def _dense(
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
        dense.draws,
        pair_block,
        masked,
        nan_safe,
        wanted,
        None if rows.row_sum is None else rows.row_sum[queries],
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
