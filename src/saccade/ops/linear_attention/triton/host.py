"""Linear attention by Triton kernels: the body that the operators run on GPUs.

    causal:      one sweep; if programs are few, segments of the length side by side, each from the
                 state that the ones before it left (two phases)
    not causal:  the states of all keys first, which then every row reads

The backward pass is three sweeps of the same kernel (chunk_scan.py) and saves nothing but a
number for each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.gpu.launcher import Launch, next_width
from saccade.ops.attention.triton.call_spec import remembered, with_unit_channels
from saccade.ops.linear_attention.triton.call_spec import LinearCallSpec, signature
from saccade.ops.linear_attention.triton.chain import chained
from saccade.ops.linear_attention.triton.decay import decay_gradient, summed_decay_of, whole_decays
from saccade.ops.linear_attention.triton.normalizer import count, counts_first, linear_row_dot
from saccade.ops.linear_attention.triton.passes import Passes
from saccade.ops.linear_attention.triton.positions import LinearBackwardInputs, State
from saccade.ops.linear_attention.triton.recurrent_step import start_step
from saccade.runtime.spec import (
    KernelConfig,
    LinearGradients,
    LinearInputs,
    LinearResults,
    LinearVariant,
    empty_linear_gradients,
    empty_linear_results,
)

ROW_DOT_TILE = 64

_kinds: dict[Any, LinearCallSpec] = {}


def forward(inputs: LinearInputs, variant: LinearVariant, config: KernelConfig) -> LinearResults:
    """Output, normaliser and last state; see `saccade.linear_attention`."""
    passes = passes_of(inputs, variant, config, forward=True)
    results = empty_linear_results(inputs, variant)
    totals = None if variant.normalize == "none" else results.normaliser
    before, after = initial_of(passes), (results.kv, results.key_sum)
    segments = passes.segments(passes.spec.heads, passes.spec.value_dim)
    if segments > 1 or not variant.causal:
        before, last = key_states(passes, before, segments)
        for into, found in zip(after, last, strict=True):
            into.copy_(found)
        after, segments = None, segments if variant.causal else 1
    mapped = None
    if counted := counts_first(passes):
        mapped = count(passes, results.normaliser, before, after, segments)
        after = None if after is None else (after[0], torch.empty_like(after[1]))
    passes.output(results.output, totals, before, after, segments, counted, mapped=mapped)
    return results


def backward(
    inputs: LinearInputs,
    variant: LinearVariant,
    config: KernelConfig,
    output: Tensor,
    normaliser: Tensor,
    grad_output: Tensor,
    grad_kv: Tensor | None,
    grad_key_sum: Tensor | None,
) -> LinearGradients:
    """Gradients of the inputs, the same bits in every run."""
    passes = passes_of(inputs, variant, config)
    given = given_of(passes, output, normaliser, grad_output)
    return gradients_by(passes, given, ending_of(passes, grad_kv, grad_key_sum))


def gradients_by(
    passes: Passes, given: LinearBackwardInputs, ending: State | None
) -> LinearGradients:
    """Gradients of the inputs by such passes. ending: those of the last state."""
    spec, inputs, variant = passes.spec, passes.inputs, passes.spec.variant
    gradients = empty_linear_gradients(inputs)
    of_query, of_key, of_value = (
        into if into.shape[1] == count else _wide_like(into, count)
        for into, count in zip(
            gradients[:3], (spec.heads, spec.state_heads, spec.state_heads), strict=True
        )
    )
    dots = _Dots(passes) if inputs.decay is not None else None

    segments = passes.gradient_segments(keys=False)
    before = initial_of(passes)
    starts, last = before, None
    if segments > 1 or not variant.causal or (dots and ending is not None):
        starts, last = key_states(passes, before, segments)
        starts = starts if segments > 1 or not variant.causal else before
    passes.grad_query(given, of_query, dots and dots.query, starts, segments)

    first = None
    if inputs.initial_kv is not None:
        matrix, vector = ending or _zeros(passes)
        first = torch.empty_like(matrix), torch.empty_like(vector)
    segments = passes.gradient_segments(keys=True)
    if segments == 1 and variant.causal:
        ends, after = ending, first
    else:
        (ends, first), after = _query_states(passes, given, ending, segments), None
    passes.grad_key_value(given, (of_key, of_value), dots and dots.key, ends, after, segments)

    for into, found in zip(gradients[:3], (of_query, of_key, of_value), strict=True):
        if into is not found:
            into.copy_(found.unflatten(1, (into.shape[1], -1)).sum(2))
    if inputs.initial_kv is not None and first is not None:
        for into, found in zip(gradients[4:], first, strict=True):
            assert into is not None
            into.copy_(found)
    if dots is None:
        return gradients
    flow = _flow(ending, last) if variant.causal else _flow(first, before)
    return gradients._replace(decay=decay_gradient(inputs, variant, dots.query, dots.key, flow))


def step(
    kv: Tensor,
    key_sum: Tensor,
    state_index: Tensor | None,
    inputs: LinearInputs,
    variant: LinearVariant,
) -> Tensor:
    """Output of a few new rows; see `saccade.linear_attention_step`.

    States of float32 that lie in order are changed where they lie; others are copied, changed and
    copied back.
    """
    output = empty_linear_results(inputs, variant).output
    passes = passes_of(inputs, variant, KernelConfig())
    pool = kv, key_sum
    if all(sums.dtype == torch.float32 and sums.is_contiguous() for sums in pool):
        start_step(passes._replace(slots=state_index, num_states=len(kv)), output, pool)
        return output
    index = slice(None) if state_index is None else state_index
    picked = kv[index].float().contiguous(), key_sum[index].float().contiguous()
    start_step(passes, output, picked)
    for into, found in zip(pool, picked, strict=True):
        into[index] = found.to(into.dtype)
    return output


# ---- states ------------------------------------------------------------------------------------


def passes_of(
    inputs: LinearInputs, variant: LinearVariant, config: KernelConfig, forward: bool = False
) -> Passes:
    """A call, ready for its passes: for the output alone if `forward`."""
    inputs = with_unit_channels(inputs)
    key = signature(inputs, variant, config), forward
    spec = remembered(_kinds, key, lambda: LinearCallSpec.of(inputs, variant, config, forward))
    return Passes(spec, inputs, summed_decay_of(inputs))


def initial_of(passes: Passes) -> State | None:
    """The state that a call starts from, as kernels read it."""
    kv, key_sum = passes.inputs.initial_kv, passes.inputs.initial_key_sum
    if kv is None or key_sum is None:
        return None
    return kv.float().contiguous(), key_sum.float().contiguous()


def _zeros(passes: Passes) -> tuple[Tensor, Tensor]:
    spec = passes.spec
    shape = (spec.sequences, spec.state_heads, spec.head_dim)
    query = passes.inputs.query
    wide = query.new_zeros(*shape, spec.value_dim, dtype=torch.float32)
    return wide, query.new_zeros(shape, dtype=torch.float32)


def ending_of(
    passes: Passes, grad_kv: Tensor | None, grad_key_sum: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """The gradients of the last state, from which the backward sweeps start."""
    if grad_kv is None and grad_key_sum is None:
        return None
    matrix, vector = _zeros(passes)
    matrix = matrix if grad_kv is None else grad_kv.float().contiguous()
    return matrix, vector if grad_key_sum is None else grad_key_sum.float().contiguous()


def key_states(
    passes: Passes, before: State | None, segments: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The states that segments start from (not causal: the last one), and the last ones."""
    parts = passes.collect(None, segments)
    starts, last = chained(passes, parts, before, segments, False)
    return (starts if passes.spec.variant.causal else last), last


def _query_states(
    passes: Passes, given: LinearBackwardInputs, ending: State | None, segments: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The gradients of the states after segments, and those of the first states."""
    parts = passes.collect(given, segments)
    if passes.spec.variant.causal:
        return chained(passes, parts, ending, segments, True)
    ends = parts[0].squeeze(2), parts[1].squeeze(2)
    if ending is not None:
        ends = ends[0] + ending[0], ends[1] + ending[1]
    whole = whole_decays(passes.summed_decay, passes.inputs, passes.spec, 1)
    if whole is None:
        return ends, ends
    factors = whole[..., 0].unsqueeze(-1)
    return ends, (ends[0] * factors.unsqueeze(-1), ends[1] * factors)


# ---- rows --------------------------------------------------------------------------------------


def given_of(
    passes: Passes, output: Tensor, normaliser: Tensor, grad_output: Tensor
) -> LinearBackwardInputs:
    """The output's gradients, 1 / divisor and −δ."""
    if grad_output.stride(-1) != 1:
        grad_output = grad_output.contiguous()
    spec, inputs = passes.spec, passes.inputs
    rows = (spec.heads, spec.query_len)
    rows = rows if spec.packed else (spec.sequences, *rows)
    if spec.variant.normalize == "none":
        return LinearBackwardInputs(
            grad_output, None, grad_output.new_zeros(rows, dtype=torch.float32)
        )
    factors, minus_delta = (grad_output.new_empty(rows, dtype=torch.float32) for _ in range(2))

    def make() -> Launch:
        constants = {
            "VALUE_DIM": spec.value_dim,
            "VALUE_WIDTH": next_width(spec.value_dim),
            "QUERY_TILE": ROW_DOT_TILE,
            "NORMALIZE": spec.variant.normalize,
        }
        return Launch(linear_row_dot, constants, {"num_warps": 4, "num_stages": 1})

    def arguments() -> tuple[Any, ...]:
        offsets = inputs.cu_seqlens_q
        return (
            *(spec.side(rows, offsets, keys=False) for rows in (output, grad_output)),
            *(
                spec.numbers(numbers, offsets, keys=False)
                for numbers in (normaliser, factors, minus_delta)
            ),
            spec.variant.eps,
        )

    launch = remembered(spec.launches, ("row_dot", output.stride(), grad_output.stride()), make)
    tensors = [output, grad_output, normaliser, factors, minus_delta]
    if inputs.cu_seqlens_q is not None:
        tensors.append(inputs.cu_seqlens_q)
    launch(spec.row_programs(ROW_DOT_TILE), spec.device, tensors, arguments)
    return LinearBackwardInputs(grad_output, factors, minus_delta)


def _wide_like(rows: Tensor, heads: int) -> Tensor:
    """Memory for gradients of so many heads, which will be added up."""
    shape = (rows.shape[0], heads, *rows.shape[2:])
    return rows.new_empty(shape, dtype=torch.float32)


def _flow(gradients: State | None, states: State | None) -> Tensor | None:
    """⟨R, S⟩ of each state, None where there is none or nothing comes back for it."""
    if gradients is None or states is None:
        return None
    matrix = (gradients[0].double() * states[0]).sum((2, 3))
    return matrix + (gradients[1].double() * states[1]).sum(2)


class _Dots:
    """Features · their gradients, for each row that counts, tile of channels and head."""

    def __init__(self, passes: Passes):
        spec = passes.spec
        tiles = passes.tiles(spec.head_dim)
        self.query = None
        if spec.variant.causal:
            self.query = self._memory(passes, spec.heads * tiles, spec.query_len)
        self.key = self._memory(passes, spec.state_heads * tiles, spec.kv_len)

    @staticmethod
    def _memory(passes: Passes, heads: int, length: int) -> Tensor:
        spec = passes.spec
        shape = (heads, length) if spec.packed else (spec.sequences, heads, length)
        return passes.inputs.query.new_zeros(shape, dtype=torch.float32)
