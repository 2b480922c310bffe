"""Forward: the rectangles' outputs, merged by their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.ops.attention.cpu import dense_tile, flash_tile, segments, tile_masks
from saccade.ops.attention.cpu.block_mask import Run
from saccade.ops.attention.cpu.dense_tile import PairBlock
from saccade.ops.attention.cpu.segments import DenseProblem
from saccade.runtime.spec import accumulate_dtype


def attend(dense: DenseProblem) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, rows, value_dim] and lse of a dense problem."""
    if dense.sees_nothing:
        output, lse = memory(dense)
        output, lse = output.zero_(), lse.fill_(-torch.inf)
    else:
        output, lse, masked = _visit(dense, nan_safe=False)
        if masked and not bool(output.sum().isfinite()):
            output, lse, _ = _visit(dense, nan_safe=True)
    return add_sinks(output, lse, dense.sinks) if dense.sinks is not None else (output, lse)


def memory(dense: DenseProblem) -> tuple[Tensor, Tensor]:
    """Memory for the output and lse of a dense problem."""
    batch, heads, rows = dense.query.shape[:3]
    wide = accumulate_dtype(dense.query.dtype)
    output = dense.query.new_empty(batch, rows, heads, dense.value.shape[-1], dtype=wide)
    return output.transpose(1, 2), dense.query.new_empty(batch, heads, rows, dtype=wide)


def _visit(dense: DenseProblem, nan_safe: bool) -> tuple[Tensor, Tensor, bool]:
    """Compute every row tile; also say whether any of them needed the mask."""
    form = None if nan_safe else dense.flash_at_once
    if form is not None:
        scale, causal = dense.variant.scale, form == "causal"
        whole = flash_tile.forward(dense.query, dense.key, dense.value, scale, None, causal)
        return *whole, causal
    tiles = list(segments.row_tiles(dense))
    if len(tiles) == 1 and len(tiles[0][1]) == 1:
        pair_block, runs = tiles[0]
        return *_row_tile(dense, pair_block, runs, nan_safe), runs[0].masked
    output, lse = memory(dense)
    for pair_block, runs in tiles:
        at = segments.slices_of(dense, pair_block).queries
        output[at], lse[at] = _row_tile(dense, pair_block, runs, nan_safe)
    return output, lse, any(run.masked for _, runs in tiles for run in runs)


def _row_tile(
    dense: DenseProblem, pair_block: PairBlock, runs: tuple[Run, ...], nan_safe: bool
) -> tuple[Tensor, Tensor]:
    """One tile of query rows against all that it sees."""
    partials = []
    for run in runs:
        partial = rectangle(
            dense, pair_block._replace(kv_rows=(run.start, run.stop)), run.masked, nan_safe
        )
        if partial is not None:
            partials.append(partial)
    return merged(dense, pair_block, partials)


def rectangle(
    dense: DenseProblem, pair_block: PairBlock, masked: bool, nan_safe: bool
) -> tuple[Tensor, Tensor] | None:
    """One rectangle, by the flash kernel where it fits; None if nothing in it is visible."""
    if not dense.fits_flash or nan_safe:
        return _plain(dense, pair_block, masked, nan_safe)
    found = tile_masks.partial_at(
        dense.variant, pair_block, masked, dense.sizes.kv_tile, dense.query.dtype
    )
    if found is None:
        return None
    pair_block, partial = found
    query, key, value = _rows(dense, pair_block)
    return flash_tile.forward(query, key, value, dense.variant.scale, partial, causal=False)


def _rows(dense: DenseProblem, pair_block: PairBlock) -> tuple[Tensor, Tensor, Tensor]:
    at = segments.slices_of(dense, pair_block)
    return dense.query[at.queries], dense.key[at.keys], dense.value[at.keys]


def _plain(
    dense: DenseProblem, pair_block: PairBlock, masked: bool, nan_safe: bool
) -> tuple[Tensor, Tensor]:
    """One rectangle in plain tiles."""

    def piece(rows: PairBlock) -> tuple[Tensor, Tensor]:
        partials = [
            dense_tile.forward(
                *_rows(dense, part), dense.variant, dense.seed, part, masked, nan_safe
            )
            for part in segments.key_pieces(rows)
        ]
        return merged(dense, rows, partials)

    batches = []
    for batch in segments.row_pieces(pair_block):
        outputs, lses = zip(*(piece(rows) for rows in batch), strict=True)
        batches.append((torch.cat(outputs, dim=2), torch.cat(lses, dim=2)))
    outputs, lses = zip(*batches, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def merged(
    dense: DenseProblem, pair_block: PairBlock, partials: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The sum of partial results over disjoint keys; zeros and -inf where there are none."""
    if not partials:
        rows = dense.query[segments.slices_of(dense, pair_block).queries]
        wide = accumulate_dtype(rows.dtype)
        output = rows.new_zeros(*rows.shape[:3], dense.value.shape[-1], dtype=wide)
        return output, rows.new_full(rows.shape[:3], -torch.inf, dtype=wide)
    output, lse = partials[0]
    for next_output, next_lse in partials[1:]:
        total = torch.logaddexp(lse, next_lse)
        shift = total.masked_fill(total == -torch.inf, 0)
        wide = total.dtype
        output = output.to(wide) * (lse - shift).exp().unsqueeze(-1)
        output += next_output.to(wide) * (next_lse - shift).exp().unsqueeze(-1)
        lse = total
    return output, lse


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let each head's sink join the denominators."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    shift = total.masked_fill(total == -torch.inf, 0)
    return output * (lse - shift).exp().unsqueeze(-1), total
