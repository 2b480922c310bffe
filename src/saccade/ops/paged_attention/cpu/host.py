"""Attention over pages on the CPU: one sequence after the other, tile by tile, piece by piece.

Short ones of which only one row asks are computed together (`decode.py`).

Each sequence is a dense problem whose keys come in pieces (`pages.py`). What a tile of query rows
visits is planned as in a dense call, each rectangle is computed by the same inner tiles, and
partial results merge by their lse in the order of the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from saccade.ops.attention.cpu import block_mask
from saccade.ops.attention.cpu import host as attention_host
from saccade.ops.attention.cpu.block_mask import Run, TileSizes
from saccade.ops.attention.cpu.segments import DenseProblem, check_ends, clear_padding
from saccade.ops.paged_attention.cpu import decode as paged_decode
from saccade.ops.paged_attention.cpu.pages import PageReader, Scratch
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, empty_rows
from saccade.runtime.validation import computed_without


@computed_without
def forward(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_paged`."""
    offsets = inputs.cu_seqlens_q
    output, lse = empty_rows(inputs.query, inputs.value_pages.shape[3], offsets is not None)
    ends = None if offsets is None else offsets.tolist()
    if ends is not None:
        check_ends("cu_seqlens_q", ends, inputs.query.shape[0])
        clear_padding(offsets, output)
        clear_padding(offsets, lse, dim=1, number=-torch.inf)
    dtype, scratch = _product_dtype(inputs), Scratch()
    done = set() if batch_invariant else _together(inputs, variant, ends, output, lse)
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
        found = attention_host.attend(dense, partial(_pieces, dense, pages))
        of_output.copy_(found[0].squeeze(0))
        of_lse.copy_(found[1].squeeze(0))
    return output, lse


def prepared(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> Callable[[PagedInputs, Variant], tuple[Tensor, Tensor]]:
    """`forward` for calls like this one; nothing needs preparing."""
    return lambda inputs, variant: forward(inputs, variant, config, batch_invariant)


def _together(
    inputs: PagedInputs, variant: Variant, ends: list[int] | None, output: Tensor, lse: Tensor
) -> set[int]:
    """Compute short sequences of one query row each together; which ones those were."""
    if ends is None:
        query_lens = [inputs.query.shape[2]] * inputs.query.shape[0]
    else:
        query_lens = [end - start for start, end in itertools.pairwise(ends)]
    done: set[int] = set()
    for group in paged_decode.groups(inputs, variant, query_lens):
        rows = group.sequences if ends is None else [ends[each] for each in group.sequences]
        query = inputs.query[rows]
        found = paged_decode.attend(inputs, variant, group, query if ends else query.squeeze(2))
        if found is None:
            break
        of_output, of_lse = (each.unsqueeze(2) for each in found)
        if inputs.sinks is not None:
            of_output, of_lse = attention_host.add_sinks(of_output, of_lse, inputs.sinks)
        if ends is None:
            output[rows], lse[rows] = of_output.to(output.dtype), of_lse
        else:
            output[rows] = of_output.squeeze(2).to(output.dtype)
            lse[:, rows] = of_lse.squeeze(2).transpose(0, 1)
        done |= set(group.sequences)
    return done


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
