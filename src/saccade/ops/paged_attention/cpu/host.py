"""Attention over pages on the CPU: one sequence after the other, tile by tile, piece by piece.

Short sequences are computed together (`groups.py`). Any other sequence is a dense problem whose
keys come in pieces: what a tile of query rows visits is planned as in a dense call, each rectangle
is computed by the same inner tiles, and partial results merge by their lse in the order of the
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from saccade.ops.attention.cpu import block_mask, fp8_tile
from saccade.ops.attention.cpu import host as attention_host
from saccade.ops.attention.cpu.block_mask import Run, TileSizes
from saccade.ops.attention.cpu.segments import DenseProblem, check_ends, clear_padding
from saccade.ops.paged_attention.cpu.groups import (
    ChunkGroup,
    Groups,
    PlannedGroup,
    ViewedGroup,
    attend_chunks,
    attend_planned,
    kind_of,
    planned_groups,
)
from saccade.ops.paged_attention.cpu.pages import PageReader, Scratch
from saccade.runtime.fp8_spec import BLOCK_ROWS
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, empty_rows
from saccade.runtime.validation import computed_without


@computed_without
def forward(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_paged`."""
    offsets = inputs.cu_seqlens_q
    ends = None if offsets is None else offsets.tolist()
    if ends is not None:
        check_ends("cu_seqlens_q", ends, inputs.query.shape[0])
    alone = batch_invariant or inputs.fp8
    groups = [] if alone else planned_groups(inputs, variant, ends)
    return _attend(inputs, variant, config, batch_invariant, ends, groups)


def prepared(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> Callable[[PagedInputs, Variant], tuple[Tensor, Tensor]]:
    """`forward` for calls like this one, whose kind is worked out once where sequences have one
    query row each: all layers of a model that are alike then find the plan of a step by it."""
    alone = batch_invariant or inputs.fp8
    if alone or inputs.cu_seqlens_q is not None or inputs.query.shape[2] != 1:
        return lambda inputs, variant: forward(inputs, variant, config, batch_invariant)
    kind = kind_of(inputs, variant, None)

    @computed_without
    def decode(inputs: PagedInputs, variant: Variant) -> tuple[Tensor, Tensor]:
        groups = planned_groups(inputs, variant, None, kind)
        return _attend(inputs, variant, config, batch_invariant, None, groups)

    return decode


def _attend(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool,
    ends: list[int] | None, groups: Groups,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and lse, by a plan of groups; sequences of no group are computed one by one."""
    first = groups[0] if len(groups) == 1 and ends is None else None
    if isinstance(first, (PlannedGroup, ViewedGroup)) and first.rows is None:
        found = attend_planned(inputs, variant, first, inputs.query)
        if found is not None:
            return found[0].to(inputs.query.dtype), found[1]
        groups = []
    output, lse = empty_rows(inputs.query, inputs.value_pages.shape[3], ends is not None)
    if ends is not None:
        clear_padding(inputs.cu_seqlens_q, output)
        clear_padding(inputs.cu_seqlens_q, lse, dim=1, number=-torch.inf)
    dtype, scratch = _product_dtype(inputs), Scratch()
    done = _together(inputs, variant, ends, groups, output, lse)
    if len(done) == inputs.kv_lens.shape[0]:
        return output, lse
    for sequence, kv_len in enumerate(inputs.kv_lens.tolist()):
        if sequence in done:
            continue
        if ends is None:
            at, query = sequence, inputs.query[sequence]
            of_output, of_lse = output[at], lse[at]
        else:
            at = slice(ends[sequence], ends[sequence + 1])
            query = inputs.query[at].transpose(0, 1)
            of_output, of_lse = output[at].transpose(0, 1), lse[:, at]
        if query.shape[:2].numel() == 0:
            continue
        query = query.unsqueeze(0).to(dtype)
        if batch_invariant:
            query = query.contiguous()
        dense = _dense(query, inputs, variant, config, sequence, kv_len)
        pages = PageReader.of(inputs, sequence, kv_len, dtype, batch_invariant, scratch)
        if inputs.fp8:
            found = attend_fp8(dense, inputs, pages, config, sequence)
        else:
            found = attention_host.attend(dense, partial(_pieces, dense, pages))
        of_output.copy_(found[0].squeeze(0))
        of_lse.copy_(found[1].squeeze(0))
    return output, lse


def _together(
    inputs: PagedInputs, variant: Variant, ends: list[int] | None, groups: Groups,
    output: Tensor, lse: Tensor,
) -> set[int]:  # fmt: skip
    """Compute groups of sequences with one query row each; which ones those were."""
    done: set[int] = set()
    for group in groups:
        if isinstance(group, ChunkGroup):
            if attend_chunks(inputs, variant, group, output, lse):
                done.update(group.sequences)
            continue
        rows = group.rows
        query = inputs.query if rows is None else inputs.query.index_select(0, rows)
        found = attend_planned(inputs, variant, group, query)
        if found is None:
            continue
        of_output, of_lse = found
        if ends is not None:
            of_output, of_lse = of_output.squeeze(2), of_lse.squeeze(2).transpose(0, 1)
        _put(output, 0, rows, of_output)
        _put(lse, 0 if ends is None else 1, rows, of_lse)
        done.update(group.sequences)
    return done


def _put(results: Tensor, dim: int, rows: Tensor | None, found: Tensor) -> None:
    """Write some rows of results; None: all of them."""
    if rows is None:
        results.copy_(found)
    else:
        results.index_copy_(dim, rows, found.to(results.dtype))


def _product_dtype(inputs: PagedInputs) -> torch.dtype:
    """What products are computed in: half precision and eight bits are widened.

    Half-precision products are slow on a CPU, and eight bits with a scale do not fit into sixteen.
    """
    if inputs.query.dtype == torch.float16 or (
        inputs.quantised and inputs.query.dtype != torch.float64
    ):
        return torch.float32
    return inputs.query.dtype


def _pieces(
    dense: DenseProblem, pages: PageReader, run: Run
) -> Iterator[tuple[DenseProblem, tuple[int, int]]]:
    """The problem with the keys and values of each piece of a run, and which rows they are."""
    for piece in pages.pieces(run.start, run.stop):
        key, value = pages.rows(piece)
        there = dense._replace(key=key, value=value, first_kv=piece.start)
        yield there, (piece.start, piece.stop)


def attend_fp8(
    dense: DenseProblem, inputs: PagedInputs, pages: PageReader, config: KernelConfig, sequence: int
) -> tuple[Tensor, Tensor]:
    """Output and lse of a sequence of e4m3 queries: weights take the scales of values, and are
    rounded, so that products are of e4m3 numbers."""
    query, kv_len = dense.query, dense.sizes.kv_len
    if inputs.query_scale is not None:
        query = query * inputs.query_scale[sequence].view(1, -1, 1, 1)
    key, value, scales = pages.numbers(kv_len)
    largest = None
    if scales is not None:
        finite = scales.isfinite()
        value = value.masked_fill(~finite.unsqueeze(-1), torch.nan)  # of a hidden row, perhaps
        scales = scales.masked_fill(~finite, 0)
        largest = scales.abs().amax(-1, keepdim=True)
        scales = scales / largest.masked_fill(largest == 0, 1)
    dense = dense._replace(query=query, key=key, value=value)
    nonfinite = not all(bool(rows.isfinite().all()) for rows in dense[:3])
    tile = config.kv_tile or BLOCK_ROWS
    output, lse = fp8_tile.attend(dense, tile, nonfinite, value_scales=scales)
    if largest is not None:
        group = query.shape[1] // largest.shape[1]
        output = output * largest.repeat_interleave(group, 1).unsqueeze(-1)
    return output, lse


def _dense(
    query: Tensor,
    inputs: PagedInputs,
    variant: Variant,
    config: KernelConfig,
    sequence: int,
    kv_len: int,
) -> DenseProblem:
    """One sequence as a dense problem; its keys are put in piece by piece."""
    sizes = TileSizes(
        batch=1,
        heads=query.shape[1],
        query_len=query.shape[2],
        kv_len=kv_len,
        first_batch=sequence,
        query_tile=config.query_tile or block_mask.QUERY_TILE,
        kv_tile=config.kv_tile or block_mask.KV_TILE,
    )
    return DenseProblem(
        query, inputs.key_pages[:1], inputs.value_pages[:1], inputs.sinks, None, variant, sizes
    )
