"""Linear attention by Triton kernels: the body that the operators run on GPUs.

    causal:      one scan; if programs are few, segments of the length side by side, each from the
                 state that the ones before it left (two phases)
    not causal:  the states of all keys first, which then every row reads

The backward pass is three scans (chunk_scan.py) and saves nothing but a
number for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.gpu import recording
from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch
from saccade.gpu.recording import RecordedPass, layouts_of
from saccade.ops.attention.triton.call_spec import remembered, with_unit_channels
from saccade.ops.linear_attention.feature_scaling import (
    ends_of,
    hidden_keys,
    padding_of,
    sequence_of,
)
from saccade.ops.linear_attention.triton.chunk_state import NUMBERS, linear_chain
from saccade.ops.linear_attention.triton.normalizer import (
    count,
    counts_first,
    upstream_of,
)
from saccade.ops.linear_attention.triton.passes import (
    LinearBackwardInputs,
    LinearCallSpec,
    Passes,
    State,
    signature,
)
from saccade.ops.linear_attention.triton.recurrent_step import start_step
from saccade.runtime.spec import (
    LEAST_DECAY,
    LEAST_DECAY_OF_FLOAT32,
    KernelConfig,
    LinearGradients,
    LinearInputs,
    LinearResults,
    LinearVariant,
    empty_linear_gradients,
    empty_linear_results,
    precision,
)

_call_specs: dict[Any, LinearCallSpec] = {}
_backwards: dict[Any, RecordedPass] = {}


def prepared(inputs: LinearInputs, config: KernelConfig) -> Callable[..., tuple[Tensor, ...]]:
    """The forward pass of calls like one with these inputs."""
    return recording.prepared(forward, inputs, config)


def forward(inputs: LinearInputs, variant: LinearVariant, config: KernelConfig) -> LinearResults:
    """Output, normaliser and last state; see `saccade.linear_attention`."""
    passes = passes_of(inputs, variant, config, forward=True)
    results = empty_linear_results(inputs, variant)
    totals = None if variant.normalize == "none" else results.normaliser
    before, after = initial_of(passes), (results.kv, results.key_sum)
    segments = passes.segments(passes.spec.heads, passes.spec.value_dim)
    if passes.spec.query_len == 0:  # the last state alone, which needs no scan
        key_states(passes, before, segments, after)
        return results
    if segments > 1 or not variant.causal:
        before, _ = key_states(passes, before, segments, after)
        after, segments = None, segments if variant.causal else 1
    mapped = None
    if counted := counts_first(passes):
        mapped = count(passes, results.normaliser, before, after, segments)
        after = None if after is None else (after[0], torch.empty_like(after[1]))
    passes.scan(
        "output", results.output, (before, after), segments, totals=totals, counted=counted,
        mapped=mapped,
    )  # fmt: skip
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

    def run() -> LinearGradients:
        passes = passes_of(inputs, variant, config)
        upstream = upstream_of(passes, output, normaliser, grad_output)
        return gradients_by(passes, upstream, ending_of(passes, grad_kv, grad_key_sum))

    given = output, normaliser, grad_output, grad_kv, grad_key_sum
    return recorded_gradients(_backwards, inputs, given, (variant, config), run)


def recorded_gradients(
    memory: dict[Any, RecordedPass], inputs: LinearInputs, given: tuple[Tensor | None, ...],
    like: tuple[Any, ...], run: Callable[[], LinearGradients],
) -> LinearGradients:  # fmt: skip
    """What `run` gives for inputs and what was given with them, done again where it was recorded.

    like: what else tells such passes apart.
    """
    if inputs.decay is not None or inputs.initial_kv is not None:
        return run()  # which sums by PyTorch
    query, tensors = inputs.query, (*inputs, *given)
    key = (*layouts_of(tensors), query.device, *like, precision(query.dtype))
    done = remembered(memory, key, lambda: RecordedPass(query))
    of_query, of_key, of_value = done(there_are(tensors), lambda: run()[:3])
    return LinearGradients(of_query, of_key, of_value, None, None, None)


def gradients_by(
    passes: Passes, upstream: LinearBackwardInputs, ending: State | None
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
    query_dots, key_dots = (None, None) if inputs.decay is None else _memory_for_dots(passes)

    segments = passes.gradient_segments(keys=False)
    before = initial_of(passes)
    starts, last = before, None
    if segments > 1 or not variant.causal or (key_dots is not None and ending is not None):
        starts, last = key_states(passes, before, segments)
        starts = starts if segments > 1 or not variant.causal else before
    if spec.query_len:
        passes.grad_query(upstream, of_query, query_dots, starts, segments)

    first = None
    if inputs.initial_kv is not None:
        matrix, vector = ending or _zeros(passes)
        first = torch.empty_like(matrix), torch.empty_like(vector)
    segments = passes.gradient_segments(keys=True)
    if segments == 1 and variant.causal:
        ends, after = ending, first
    else:
        (ends, first), after = _query_states(passes, upstream, ending, segments), None
    passes.grad_key_value(upstream, (of_key, of_value), key_dots, ends, after, segments)

    for into, found in zip(gradients[:3], (of_query, of_key, of_value), strict=True):
        if into is not found:
            into.copy_(found.unflatten(1, (into.shape[1], -1)).sum(2))
    if inputs.initial_kv is not None and first is not None:
        for into, found in zip(gradients[4:], first, strict=True):
            assert into is not None
            into.copy_(found)
    if key_dots is None:
        return gradients
    flow = _flow(ending, last) if variant.causal else _flow(first, before)
    return gradients._replace(decay=decay_gradient(inputs, variant, query_dots, key_dots, flow))


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
    spec = remembered(_call_specs, key, lambda: LinearCallSpec.of(inputs, variant, config, forward))
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
    """The gradients of the last state, from which the backward scans start."""
    if grad_kv is None and grad_key_sum is None:
        return None
    matrix, vector = _zeros(passes)
    matrix = matrix if grad_kv is None else grad_kv.float().contiguous()
    return matrix, vector if grad_key_sum is None else grad_key_sum.float().contiguous()


def key_states(
    passes: Passes, before: State | None, segments: int, into: State | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The states that segments start from (not causal: the last one), and the last ones.

    into: where to write the last ones; contiguous.
    """
    parts = passes.collect(None, segments)
    starts, last = chained(passes, parts, before, segments, False, into)
    return (starts if passes.spec.variant.causal else last), last


def _query_states(
    passes: Passes, upstream: LinearBackwardInputs, ending: State | None, segments: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The gradients of the states after segments, and those of the first states."""
    if passes.spec.query_len:
        parts = passes.collect(upstream, segments)
    else:  # whose states nothing is added to
        matrix, vector = passes.empty_states(segments)
        parts = matrix.zero_(), vector.zero_()
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


def _memory_for_dots(passes: Passes) -> tuple[Tensor | None, Tensor]:
    """Memory for features · their gradients of queries (causal calls) and of keys.

    One number for each row, tile of channels and head.
    """
    spec, tiles = passes.spec, passes.tiles(passes.spec.head_dim)

    def memory(heads: int, length: int) -> Tensor:
        shape = (heads, length) if spec.packed else (spec.sequences, heads, length)
        return passes.inputs.query.new_zeros(shape, dtype=torch.float32)

    of_queries = memory(spec.heads * tiles, spec.query_len) if spec.variant.causal else None
    return of_queries, memory(spec.state_heads * tiles, spec.kv_len)


def chained(
    passes: Passes, parts: State, before: State | None, segments: int, backwards: bool,
    into: State | None = None,
) -> tuple[State, State]:  # fmt: skip
    """For each segment the sum of all segments before it, faded; and that of all.

    The starts take the place of the parts. into: where to write the sums of all; contiguous.
    """
    whole = whole_decays(passes.summed_decay, passes.inputs, passes.spec, segments)
    decays = None if whole is None else whole.contiguous()
    matrices, vectors = into or (torch.empty_like(part[:, :, 0]) for part in parts)
    for part, last, first in zip(parts, (matrices, vectors), before or (None, None), strict=True):
        _chain(passes, part, first, last, decays, backwards)
    return parts, (matrices, vectors)


def _chain(
    passes: Passes, parts: Tensor, before: Tensor | None, last: Tensor, decays: Tensor | None,
    backwards: bool,
) -> None:  # fmt: skip
    """Write what a segment after all others would start from; parts become starts."""
    spec = passes.spec
    segments, size = parts.shape[2], parts.shape[3:].numel()

    def make() -> Launch:
        constants = {
            "SIZE": size, "SEGMENTS": segments, "NUMBERS": NUMBERS, "BACKWARDS": backwards,
        }  # fmt: skip
        return Launch(linear_chain, constants, {"num_warps": 4, "num_stages": 1})

    def arguments() -> tuple[Any, ...]:
        return parts, before, last, decays

    key = "chain", size, segments, backwards, before is None
    launch = remembered(spec.launches, key, make)
    programs = parts.shape[:2].numel() * -(-size // NUMBERS)
    launch(programs, spec.device, there_are((parts, before, last, decays)), arguments)


# ---- decay -------------------------------------------------------------------------------------
# Sums of its logarithms before the kernels run, and its gradient after them.
#
# With R the gradient of a state and S the state, that of decay_n is ⟨R_n, e^{decay_n} S_{n−1}⟩: all
# that keys before n give to rows at n and after it. Where every row sees all keys this is what keys
# before n give at all, so it is a sum from the start of key · grad_key, with the normaliser too.
#
# Else it is what rows at n and after it take from the state, less what keys at n and after it give,
# plus what reaches the last state: a sum from the end of query · grad_query − key · grad_key. These
# are numbers of float32, whose rounding errors add up: where a strong decay lets little flow over a
# key, the difference is as far off as 6e-8 times the root of the sum of their squares.


def summed_decay_of(inputs: LinearInputs) -> Tensor | None:
    """Σ decay over all keys before each key row, and over all: float64, with one entry more.

    [batch, state_heads, kv_len + 1], without batch where it is the same; [state_heads, tokens + 1]
    if packed. Differences are what counts, so sequences need not start at 0.
    """
    decay, kv_len = inputs.decay, inputs.key.shape[0 if inputs.packed else 2]
    if decay is None or kv_len == 0:
        return None
    # Kernels take differences of these sums within chunks, most of them in float32.
    wide = inputs.query.dtype == torch.float64
    rows = decay.double().clamp(min=LEAST_DECAY if wide else LEAST_DECAY_OF_FLOAT32)
    if decay.dim() == 1:
        rows = rows.unsqueeze(-1).expand(-1, kv_len)
    elif inputs.packed:
        rows = rows.transpose(0, 1)
    if inputs.key_lengths is not None:
        rows = rows.masked_fill(hidden_keys(inputs.key_lengths, kv_len), 0)
    summed_decay = rows.new_zeros(*rows.shape[:-1], kv_len + 1)
    torch.cumsum(rows, -1, out=summed_decay[..., 1:])
    return summed_decay


def whole_decays(
    summed_decay: Tensor | None, inputs: LinearInputs, spec: LinearCallSpec, segments: int
) -> Tensor | None:
    """How much each segment leaves of the state before it: [sequences, state_heads, segments]."""
    if summed_decay is None:
        return None
    if inputs.cu_seqlens_k is not None:  # one segment
        at_edges = summed_decay[:, ends_of(inputs.cu_seqlens_k, summed_decay.shape[-1] - 1)]
        return (at_edges[:, 1:] - at_edges[:, :-1]).exp().float().transpose(0, 1).unsqueeze(-1)
    shift = spec.kv_len - spec.query_len if spec.bottom_right else 0
    chunks = -(-spec.positions // spec.config.chunk)
    length = -(-chunks // segments) * spec.config.chunk
    edges = torch.arange(segments + 1, device=summed_decay.device) * length + min(shift, 0)
    at_edges = summed_decay[..., edges.clamp(0, spec.kv_len)]
    whole = (at_edges[..., 1:] - at_edges[..., :-1]).exp().float()
    return whole.expand(spec.sequences, spec.state_heads, segments)


def decay_gradient(
    inputs: LinearInputs,
    variant: LinearVariant,
    of_queries: Tensor | None,
    of_keys: Tensor,
    flow: Tensor | None,
) -> Tensor:
    """The gradient of decay, in its shape and dtype.

    of_queries (causal), of_keys: features · their gradients, [batch, heads · tiles, rows]
    ([heads · tiles, tokens] if packed).
    flow: [sequences, state_heads]: what comes from the first state (causal: reaches the last one).
    """
    assert inputs.decay is not None
    heads = inputs.state_heads
    dots = _by_state_head(of_keys.double(), heads)
    if of_queries is not None:
        queries = _by_state_head(of_queries.double(), heads)
        positions, seeing = _positions(inputs, variant)
        at_keys = torch.zeros_like(dots)
        if dots.shape[-1] and queries.shape[-1]:
            at_keys.index_add_(-1, positions, queries.masked_fill(~seeing, 0))
        dots = at_keys - dots
    if inputs.cu_seqlens_k is not None:
        return _packed(inputs, dots, flow, variant.causal)
    summed = _sum_along(dots, variant.causal)
    if flow is not None:
        summed = summed + flow.unsqueeze(-1)
    if inputs.key_lengths is not None:
        summed = summed.masked_fill(hidden_keys(inputs.key_lengths, summed.shape[-1]), 0)
    if inputs.decay.dim() == 1:
        summed = summed.sum((0, 2))
    return summed.to(inputs.decay.dtype)


def _sum_along(numbers: Tensor, from_end: bool) -> Tensor:
    """For each key the sum from it to the end, or over those before it."""
    if from_end:
        return numbers.flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(numbers, (1, 0))[..., :-1].cumsum(-1)


def _by_state_head(dots: Tensor, heads: int) -> Tensor:
    """Sums over tiles of channels, and over output heads that share a state."""
    if heads == 0:
        return dots
    return dots.unflatten(-2, (heads, -1)).sum(-2)


def _packed(inputs: LinearInputs, dots: Tensor, flow: Tensor | None, from_end: bool) -> Tensor:
    """Sums along all tokens, as sums along each sequence."""
    assert inputs.cu_seqlens_k is not None and inputs.decay is not None
    tokens = dots.shape[-1]
    ends = ends_of(inputs.cu_seqlens_k, tokens)
    sequence = sequence_of(tokens, ends)

    def along(numbers: Tensor) -> Tensor:
        summed = _sum_along(torch.nn.functional.pad(numbers, (0, 1)), from_end)
        edges = ends[1:] if from_end else ends[:-1]
        return summed[:, :-1] - summed[:, edges][:, sequence]

    nonfinite = ~dots.isfinite()  # NaN stays in its sequence
    summed = along(dots.masked_fill(nonfinite, 0))
    summed = summed.masked_fill(along(nonfinite.double()) > 0, torch.nan)
    if flow is not None:
        summed = summed + flow.transpose(0, 1)[:, sequence]
    summed = summed.masked_fill(padding_of(tokens, ends), 0)
    if inputs.decay.dim() == 1:
        return summed.sum(1).to(inputs.decay.dtype)
    return summed.transpose(0, 1).to(inputs.decay.dtype)


def _positions(inputs: LinearInputs, variant: LinearVariant) -> tuple[Tensor, Tensor]:
    """For each query row of a causal call the last key row that it sees, and whether it has one."""
    query, key = inputs.query, inputs.key
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        query_len, kv_len = query.shape[2], key.shape[2]
        row = torch.arange(query_len, device=query.device)
        shift = kv_len - query_len if variant.align == "bottom_right" else 0
        return (row + shift).clamp(0, max(kv_len - 1, 0)), row + shift >= 0
    ends_q = ends_of(inputs.cu_seqlens_q, query.shape[0])
    ends_k = ends_of(inputs.cu_seqlens_k, key.shape[0])
    sequence = sequence_of(query.shape[0], ends_q)
    row = torch.arange(query.shape[0], device=query.device) - ends_q[sequence]
    query_len = (ends_q[1:] - ends_q[:-1])[sequence]
    kv_len = (ends_k[1:] - ends_k[:-1])[sequence]
    shift = kv_len - query_len if variant.align == "bottom_right" else 0 * row
    position = row + shift
    seeing = (position >= 0) & (kv_len > 0) & (row < query_len)
    position = torch.minimum(position, kv_len - 1).clamp(min=0) + ends_k[sequence]
    return position.clamp(max=max(key.shape[0] - 1, 0)), seeing
