"""Attention over pages, written out: gather every sequence's keys, then attend.

    row j of sequence b lies in page page_table[b, j // page_size], slot j % page_size

Rows behind a sequence's length are hidden, whatever lies there. Source: PagedAttention (Kwon et
al. 2023), section 4.1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.modifiers.expression import Coordinates
from saccade.ops.attention.reference import attend, score_pairs, sequence_and_row
from saccade.runtime.fp8_spec import rounded_weights
from saccade.runtime.spec import Inputs, PagedInputs, Variant, accumulate_dtype, output_dtype


def attention_paged(
    inputs: PagedInputs, variant: Variant, sums: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Output and lse of a call over pages.

    `sums` is the dtype of all arithmetic: float32, or float64 for float64 inputs, where None.
    """
    sums = sums or accumulate_dtype(inputs.query.dtype)
    dense, at, reachable = lay_out(inputs, sums)
    if inputs.fp8:
        output, lse = _attend_fp8(inputs, dense, variant, at, reachable)
    else:
        output, lse = attend(dense, variant, at, reachable)
    output = output.to(output_dtype(inputs.query.dtype))
    if inputs.cu_seqlens_q is None:
        return output, lse
    return unpadded(output, inputs, 0.0), unpadded(lse, inputs, -torch.inf).transpose(0, 1)


def _attend_fp8(
    inputs: PagedInputs, dense: Inputs, variant: Variant, at: Coordinates, reachable: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of e4m3 queries, whose weights are e4m3 numbers too:

        weights = e4m3(2^8 · exp(scores - row_max) · value_scales / largest) / 2^8
        output  = weights · e4m3 values · largest / Σ exp(scores - row_max)

    largest: of the scales of a sequence's values. What visits keys in tiles rounds in units of the
    largest score, and scale, so far.
    """
    scores, visible, value = score_pairs(dense, variant, at, reachable)
    row_max = torch.zeros_like(scores[..., :1])
    if scores.shape[-1]:
        row_max = scores.amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -torch.inf, 0)
    sink = scores.new_full((1, 1, 1, 1), -torch.inf)
    if dense.sinks is not None:
        sink = dense.sinks.view(1, -1, 1, 1)
    weights, top = (scores - row_max).exp(), torch.maximum(row_max, sink)
    row_sum = weights.sum(-1, keepdim=True) * (row_max - top).exp() + (sink - top).exp()
    sees_nothing = row_sum == 0
    row_sum = row_sum.masked_fill(sees_nothing, 1)
    lse = (top + row_sum.log()).masked_fill(sees_nothing, -torch.inf).squeeze(-1)
    numbers, factors, largest = _value_numbers(inputs, value, at)
    weights = rounded_weights(weights * factors.mT).masked_fill(~visible, 0)
    output = (weights @ numbers) * ((row_max - top).exp() / row_sum) * largest
    return output.masked_fill(sees_nothing, 0), lse


def _value_numbers(
    inputs: PagedInputs, value: Tensor, at: Coordinates
) -> tuple[Tensor, Tensor, Tensor]:
    """Values of a call's rows [batch, heads, keys, dim] as e4m3 numbers, their scales over the
    largest of a sequence and head, and this; 0 for rows that hold NaN or are no keys."""
    if inputs.value_scales is None:
        return value, value.new_ones(1, 1, 1, 1), value.new_ones(1, 1, 1, 1)
    group = value.shape[1] // max(inputs.value_scales.shape[1], 1)
    numbers, factors = (
        gathered(rows, None, inputs.page_table, at.kv_row.flatten(), value.dtype)
        for rows in (inputs.value_pages, inputs.value_scales.unsqueeze(-1))
    )
    exist = (at.kv_row < inputs.kv_lens.view(-1, 1, 1, 1)).mT  # [batch, 1, keys, 1]
    finite = exist & numbers.isfinite().all(-1, keepdim=True) & factors.isfinite()
    numbers, factors = (rows.masked_fill(~finite, 0) for rows in (numbers, factors))
    largest = factors.new_zeros(*factors.shape[:2], 1, 1)
    if factors.shape[2]:
        largest = factors.abs().amax(2, keepdim=True)
    factors = factors / largest.masked_fill(largest == 0, 1)
    numbers, factors, largest = (
        rows.repeat_interleave(group, 1) for rows in (numbers, factors, largest)
    )
    return numbers, factors, largest


def unpadded(rows: Tensor, inputs: PagedInputs, of_padding: float) -> Tensor:
    """[batch, heads, longest, …] of a call with packed queries as [tokens, heads, …]."""
    sequence, row, inside = _places(inputs)
    found = rows.new_full((len(inside), rows.shape[1], *rows.shape[3:]), of_padding)
    found[inside] = rows[sequence, :, row]
    return found


def _places(inputs: PagedInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence and row of each packed token that belongs to one, and which tokens those are."""
    assert inputs.cu_seqlens_q is not None
    tokens = inputs.query.shape[0]
    sequence, row = sequence_and_row(tokens, inputs.cu_seqlens_q)
    inside = torch.arange(tokens, device=row.device) < inputs.cu_seqlens_q[-1]
    return sequence[inside], row[inside], inside


def pairs(inputs: PagedInputs, variant: Variant, sums: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores of all pairs (-inf where hidden), and which of them are visible."""
    dense, at, reachable = lay_out(inputs, sums)
    changed, visible, _ = score_pairs(dense, variant, at, reachable)
    return changed, visible


def lay_out(inputs: PagedInputs, sums: torch.dtype) -> tuple[Inputs, Coordinates, Tensor]:
    """The call as a dense one of padded rows, where its pairs lie, and which exist at all."""
    query, query_lens = _padded_queries(inputs)
    kv_lens = inputs.kv_lens.long()
    kv_row = torch.arange(int(kv_lens.max()) if inputs.batch else 0, device=query.device)
    key = gathered(inputs.key_pages, inputs.key_scales, inputs.page_table, kv_row, sums)
    value = gathered(inputs.value_pages, inputs.value_scales, inputs.page_table, kv_row, sums)
    query_row = torch.arange(query.shape[2], device=query.device)
    at = Coordinates(
        batch=torch.arange(inputs.batch, device=query.device).view(-1, 1, 1, 1),
        head=torch.arange(query.shape[1], device=query.device).view(1, -1, 1, 1),
        query_row=query_row.view(1, 1, -1, 1),
        kv_row=kv_row.view(1, 1, 1, -1),
        shift=(kv_lens - query_lens).view(-1, 1, 1, 1),
    )
    of_queries = at.query_row < query_lens.view(-1, 1, 1, 1)
    reachable = of_queries & (at.kv_row < kv_lens.view(-1, 1, 1, 1))
    sinks = None if inputs.sinks is None else inputs.sinks.to(sums)
    query = query.to(sums)
    if inputs.query_scale is not None:
        query = query * inputs.query_scale.to(sums)[:, :, None, None]
    return Inputs(query, key, value, sinks), at, reachable


def gathered(
    pages: Tensor,
    scales: Tensor | None,
    page_table: Int[Tensor, "batch max_pages"],
    kv_row: Int[Tensor, " rows"],
    dtype: torch.dtype,
) -> Float[Tensor, "batch kv_heads rows dim"]:
    """The rows of every sequence, one after the other; rows that have no page are any page's."""
    page_size = pages.shape[2]
    page = page_table.long()[:, kv_row // page_size].clamp(0, max(pages.shape[0] - 1, 0))
    slot = (kv_row % page_size).expand(page.shape)
    rows = pages[page, :, slot].to(dtype)  # [batch, rows, kv_heads, dim]
    if scales is not None:
        rows = rows * scales[page, :, slot].to(dtype).unsqueeze(-1)
    return rows.transpose(1, 2)


def _padded_queries(inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """Queries as [batch, heads, longest, dim], and each sequence's query length."""
    query, offsets = inputs.query, inputs.cu_seqlens_q
    if offsets is None:
        return query, torch.full((inputs.batch,), query.shape[2], device=query.device)
    query_lens = offsets.diff().long()
    longest = int(query_lens.max()) if inputs.batch else 0
    padded = query.new_zeros(inputs.batch, longest, *query.shape[1:])
    sequence, row, inside = _places(inputs)
    padded = padded.index_put((sequence, row), query[inside])
    return padded.transpose(1, 2), query_lens
