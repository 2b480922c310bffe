"""Exact attention, written out: every score in memory, every rule of the contract in one place.

    scores  = score_change(scale · query · keyᵀ)          hidden pairs are -inf
    lse     = log Σ exp(scores)   (sinks join the sum)
    output  = dropout(exp(scores - lse)) · value

Gradients are PyTorch's own. Source: Vaswani et al. 2017, section 3.2.1; the log-sum-exp as in
FlashAttention-2 (Dao 2023), section 3.1.1.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from saccade.modifiers import evaluate
from saccade.modifiers.expression import Coordinates
from saccade.runtime import dropout
from saccade.runtime.max_logit import of_heads
from saccade.runtime.spec import Inputs, Variant, accumulate_dtype


def attention(
    inputs: Inputs, variant: Variant, sums: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Output and lse of a dense or packed call.

    `sums` is the dtype of all arithmetic: float32, or float64 for float64 inputs, where None.
    """
    sums = sums or accumulate_dtype(inputs.query.dtype)
    dense, at, reachable = lay_out(inputs)
    dense = dense._replace(**{name: getattr(dense, name).to(sums) for name in dense._fields[:3]})
    output, lse = attend(dense, variant, at, reachable)
    output = output.to(inputs.query.dtype)
    if inputs.cu_seqlens_q is not None:
        padding = torch.arange(output.shape[2], device=lse.device) >= inputs.cu_seqlens_q[-1]
        output = output.masked_fill(padding.unsqueeze(-1), 0)  # so are gradients there
        lse = lse.masked_fill(padding, -torch.inf)  # a sink joins rows of sequences only
        return output.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return output, lse


def max_logit(inputs: Inputs, variant: Variant, lse: Tensor) -> Tensor:
    """The largest visible score of each head, [batch, heads], by sequence if packed.

    -inf where nothing is visible; NaN where a row has the lse NaN.
    """
    with torch.no_grad():
        dense, at, reachable = lay_out(inputs)
        dense = dense._replace(
            **{name: getattr(dense, name).to(lse.dtype) for name in dense._fields[:3]}
        )
        rows = _largest(score_pairs(dense, variant, at, reachable)[0]).squeeze(-1)
        rows = rows.squeeze(0) if inputs.cu_seqlens_q is not None else rows
        return of_heads(rows, lse, inputs.cu_seqlens_q)


def lay_out(inputs: Inputs) -> tuple[Inputs, Coordinates, Tensor | None]:
    """Inputs as [batch, heads, rows, dim], where their pairs lie, and which can meet at all."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return _lay_out_dense(inputs)
    return _lay_out_packed(inputs, inputs.cu_seqlens_q, inputs.cu_seqlens_k)


def _lay_out_dense(inputs: Inputs) -> tuple[Inputs, Coordinates, Tensor | None]:
    batch, query_heads, query_len = inputs.query.shape[:3]
    kv_len, device = inputs.key.shape[2], inputs.query.device
    rows = evaluate.index_range
    at = Coordinates(
        batch=rows(0, batch, 0, device),
        head=rows(0, query_heads, 1, device),
        query_row=rows(0, query_len, 2, device),
        kv_row=rows(0, kv_len, 3, device),
        shift=kv_len - query_len,
    )
    return inputs, at, None


def _lay_out_packed(
    inputs: Inputs, cu_seqlens_q: Int32[Tensor, " offsets"], cu_seqlens_k: Int32[Tensor, " offsets"]
) -> tuple[Inputs, Coordinates, Tensor | None]:
    """One long dense problem whose tokens see only their own sequence, and padding nothing."""
    query, key, value = inputs.query, inputs.key, inputs.value
    sequence_q, row_q = sequence_and_row(query.shape[0], cu_seqlens_q)
    sequence_k, row_k = sequence_and_row(key.shape[0], cu_seqlens_k)
    lengths_q, lengths_k = cu_seqlens_q.diff().long(), cu_seqlens_k.diff().long()
    shifts = lengths_k - lengths_q
    at = Coordinates(
        batch=sequence_q.view(1, 1, -1, 1),
        head=torch.arange(query.shape[1], device=query.device).view(1, -1, 1, 1),
        query_row=row_q.view(1, 1, -1, 1),
        kv_row=row_k.view(1, 1, 1, -1),
        shift=shifts[sequence_q].view(1, 1, -1, 1),
    )
    same_sequence = sequence_q.view(1, 1, -1, 1) == sequence_k.view(1, 1, 1, -1)
    same_sequence = same_sequence & (row_q < lengths_q[sequence_q]).view(1, 1, -1, 1)
    same_sequence = same_sequence & (row_k < lengths_k[sequence_k]).view(1, 1, 1, -1)
    query, key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    return inputs._replace(query=query, key=key, value=value), at, same_sequence


def sequence_and_row(num_tokens: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """For each token, the sequence that it belongs to and its row there.

    Padding counts on where the last sequence ends.
    """
    cu_seqlens = cu_seqlens.long()
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)
    sequence = sequence.clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    return sequence, token - cu_seqlens[sequence]


def attend(
    inputs: Inputs, variant: Variant, at: Coordinates, reachable: Tensor | None
) -> tuple[Float[Tensor, "batch heads rows dim"], Float[Tensor, "batch heads rows"]]:
    """The mathematics, for pairs at any coordinates; `reachable` hides pairs beside the mask."""
    changed, visible, value = score_pairs(inputs, variant, at, reachable)
    sink = changed.new_full((1, 1, 1, 1), -torch.inf)  # no sink weighs nothing
    if inputs.sinks is not None:
        sink = inputs.sinks.to(changed.dtype).view(1, -1, 1, 1)
    row_max = torch.maximum(_largest(changed), sink).detach()
    row_max = row_max.masked_fill(row_max == -torch.inf, 0)  # avoids -inf - -inf
    weights = (changed - row_max).exp()
    row_sum = weights.sum(-1, keepdim=True) + (sink - row_max).exp()
    sees_nothing = row_sum == 0
    row_sum = row_sum.masked_fill(sees_nothing, 1)
    lse = (row_max + row_sum.log()).masked_fill(sees_nothing, -torch.inf).squeeze(-1)
    weights = (weights / row_sum).masked_fill(~visible, 0)  # in a row of NaN too
    if inputs.seed is not None:
        pair = (at.batch, at.head, at.query_row, at.kv_row)
        if inputs.numbers is not None:  # rows lie here as they lie in memory
            places = (
                evaluate.index_range(0, rows.shape[2], dim, rows.device)
                for dim, rows in ((2, inputs.query), (3, inputs.key))
            )
            pair = dropout.in_whole(inputs.numbers, pair, *places)
        kept = dropout.kept(inputs.seed, *pair, variant.dropout_p)
        weights = (weights / (1 - variant.dropout_p)).masked_fill(~kept, 0)
    return (weights @ value).masked_fill(sees_nothing, 0), lse


def score_pairs(
    inputs: Inputs, variant: Variant, at: Coordinates, reachable: Tensor | None
) -> tuple[
    Float[Tensor, "batch heads rows keys"],
    Bool[Tensor, "#batch #heads #rows #keys"],
    Float[Tensor, "batch heads keys dim"],
]:
    """Scores of all pairs (-inf where hidden), which are visible, a value per query head."""
    query, key, value = inputs[:3]
    heads_per_kv_head = query.shape[1] // max(key.shape[1], 1)
    key, value = (rows.repeat_interleave(heads_per_kv_head, dim=1) for rows in (key, value))
    query, query_nonfinite = _without_nonfinite_rows(query)
    key, key_nonfinite = _without_nonfinite_rows(key)
    value, value_nonfinite = _without_nonfinite_rows(value)
    nonfinite = query_nonfinite | (key_nonfinite | value_nonfinite).transpose(-1, -2)
    visible = evaluate.visible(variant.mask, variant.mask_captured, at)
    if reachable is not None:
        visible = visible & reachable
    raw = query @ key.transpose(-1, -2) * variant.scale  # [batch, query_heads, rows, keys]
    changed = evaluate.change(variant.score, variant.score_captured, raw, at, visible)
    poison = torch.zeros_like(raw).masked_fill(nonfinite, torch.nan)
    changed = changed + poison  # a sum, so that the gradients of these pairs are NaN as well
    changed = changed.masked_fill(~visible, -torch.inf)
    return changed, visible, value


def _without_nonfinite_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the rows that hold NaN or inf, and say which they are: [..., rows, 1].

    A pair with such a row gets the score NaN, which is then selected away where the pair is
    hidden. A product would carry it further: 0 · NaN is NaN.
    """
    nonfinite = ~rows.isfinite().all(-1, keepdim=True)
    return rows.masked_fill(nonfinite, 0), nonfinite


def _largest(changed: Tensor) -> Tensor:
    """The largest score of each row; -inf where there are no keys at all."""
    if changed.shape[-1] == 0:
        return changed.new_full((*changed.shape[:-1], 1), -torch.inf)
    return changed.amax(-1, keepdim=True)
