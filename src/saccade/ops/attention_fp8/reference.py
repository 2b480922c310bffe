"""fp8 attention, written out: what e4m3 operands with scales give, every score in memory.

    query, key, value = e4m3 numbers · scales           (16-bit rows: `quantise.py` makes them)
    scores  = score_change(scale · (query · keyᵀ + shift))      hidden pairs are -inf
    weights = e4m3(2^8 · exp(scores - row_max)) / 2^8
    lse     = log Σ exp(scores)                         (sinks join the sum)
    output  = weights · value / exp(lse - row_max)

Sums are float32, or as asked. Weights are rounded, and the sum that divides them is of exact ones:
rounding errors of weights are as often up as down. `row_max` is that of all keys that a row sees;
what visits keys in tiles rounds by the largest score so far, which is the same where the largest
one comes first. `model.py` has that, and the sums of tensor cores.

Source: Shah et al. 2024 (FlashAttention-3), section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.modifiers import evaluate
from saccade.modifiers.expression import Coordinates
from saccade.ops.attention import reference as exact
from saccade.ops.attention_fp8.quantise import operands, quantised
from saccade.runtime.fp8_spec import Fp8Inputs, Quantisation, rounded_weights
from saccade.runtime.spec import Inputs, Variant


def attention(
    inputs: Fp8Inputs,
    variant: Variant,
    quantisation: Quantisation,
    sums: torch.dtype = torch.float32,
    round_weights: bool = True,
) -> tuple[Tensor, Tensor]:
    """Output and lse of a dense or packed call.

    sums: the dtype of all arithmetic. round_weights: as the operation does; False leaves them
    exact, to tell their errors from those of queries, keys and values.
    """
    found = operands(quantised(inputs, quantisation), variant.scale, sums)
    variant = variant._replace(scale=1.0)  # queries have it
    wide = Inputs(*found[:3], inputs.sinks, None, *inputs[7:])
    dense, at, reachable = exact.lay_out(wide)
    shift = found.shift
    if shift is not None and inputs.cu_seqlens_q is not None:
        shift = shift.unsqueeze(0)
    output, lse = _attend(dense, variant, at, reachable, shift, round_weights)
    output = output.to(quantisation.dtype)
    if inputs.cu_seqlens_q is not None:
        padding = torch.arange(output.shape[2], device=lse.device) >= inputs.cu_seqlens_q[-1]
        output = output.masked_fill(padding.unsqueeze(-1), 0)
        lse = lse.masked_fill(padding, -torch.inf)
        return output.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return output, lse


def _attend(
    dense: Inputs,
    variant: Variant,
    at: Coordinates,
    reachable: Tensor | None,
    shift: Tensor | None,
    round_weights: bool,
) -> tuple[Tensor, Tensor]:
    """The mathematics, for pairs at any coordinates."""
    plain = variant._replace(score="")
    scores, visible, value = exact.score_pairs(dense, plain, at, reachable)
    if shift is not None:
        scores = scores + shift.unsqueeze(-1)
    if variant.score:
        finite = scores.masked_fill(~visible, 0)
        changed = evaluate.change(variant.score, variant.score_captured, finite, at, visible)
        scores = changed.masked_fill(~visible, -torch.inf)
    row_max = _largest(scores)
    weights = (scores - row_max).exp()
    sink = scores.new_full((1, 1, 1, 1), -torch.inf)
    if dense.sinks is not None:
        sink = dense.sinks.to(scores.dtype).view(1, -1, 1, 1)
    top = torch.maximum(row_max, sink)  # a sink may be far above all scores
    row_sum = weights.sum(-1, keepdim=True) * (row_max - top).exp() + (sink - top).exp()
    sees_nothing = ~(visible.any(-1, keepdim=True) | (sink > -torch.inf))
    lse = (top + row_sum.log()).masked_fill(sees_nothing, -torch.inf)
    if round_weights:
        weights = rounded_weights(weights)
    weights = weights.masked_fill(~visible, 0)
    # Divided first: a sum of values may leave float32 whose mean does not.
    output = (weights * ((row_max - top).exp() / row_sum)) @ value
    return output.masked_fill(~visible.any(-1, keepdim=True), 0), lse.squeeze(-1)


def _largest(scores: Tensor) -> Tensor:
    """The largest score of each row; 0 where there is none."""
    if scores.shape[-1] == 0:
        return scores.new_zeros(*scores.shape[:-1], 1)
    found = scores.amax(-1, keepdim=True)
    return found.masked_fill(found == -torch.inf, 0)
