"""Linear attention on the CPU: chunked matrix products, memory linear in the length.

Packed sequences are dense problems on views (`ops/attention/cpu/segments.py`); a problem of many
heads is computed a few heads at a time, so that a chunk of all of them stays in the processor's
cache. Products are float32 (float64 for float64) whatever the inputs are: only a chunk at a time is
widened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.ops.attention.cpu.segments import Segment, clear_padding, parts_of
from saccade.ops.linear_attention.cpu import backward as linear_backward
from saccade.ops.linear_attention.cpu import forward as linear_forward
from saccade.ops.linear_attention.cpu.forward import ChunkState, DenseRows, RowStep, steps_of
from saccade.ops.linear_attention.feature_scaling import hidden_keys
from saccade.runtime.spec import (
    KernelConfig,
    LinearGradients,
    LinearInputs,
    LinearResults,
    LinearVariant,
    accumulate_dtype,
    empty_linear_gradients,
    empty_linear_results,
)
from saccade.runtime.validation import computed_without

CHUNK = 128
HEADS_AT_ONCE = 16
LARGE_STATE = 2**16  # numbers: copying it out of a pool takes longer than a step of its own


@computed_without
def forward(inputs: LinearInputs, variant: LinearVariant, config: KernelConfig) -> LinearResults:
    """Output, normaliser and last state; see `saccade.linear_attention`."""
    results = empty_linear_results(inputs, variant)
    clear_padding(inputs.cu_seqlens_q, results.output)
    clear_padding(inputs.cu_seqlens_q, results.normaliser, dim=1)
    for piece in _head_slices(inputs):
        normaliser = None if variant.normalize == "none" else piece.per_row(results.normaliser)
        dense, output = piece.dense(inputs, variant), piece.queries(results.output)
        state = ChunkState.start(dense, dense.initial or (None, None))
        linear_forward.attend(dense, _steps(dense, config), state, output, normaliser)
        for into, found in ((results.kv, state.kv), (results.key_sum, state.key_sum)):
            into = piece.states(into)
            into.copy_(found.view(into.shape))
    return results


@computed_without
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
    gradients = empty_linear_gradients(inputs)
    clear_padding(inputs.cu_seqlens_q, gradients.query)
    clear_padding(inputs.cu_seqlens_k, gradients.key, gradients.value)
    rounded = output.dtype != accumulate_dtype(output.dtype)
    decay = None
    if inputs.decay is not None:
        shape = (*inputs.key.shape[:1], inputs.state_heads)  # packed: [kv_tokens, state_heads]
        shape = shape if inputs.packed else (*shape, inputs.key.shape[2])
        decay = inputs.decay.new_zeros(shape, dtype=torch.float64)
    for piece in _head_slices(inputs):
        come = linear_backward.Arriving(
            None if rounded else piece.queries(output),
            None if variant.normalize == "none" else piece.per_row(normaliser),
            piece.queries(grad_output),
            None if grad_kv is None else piece.states(grad_kv),
            None if grad_key_sum is None else piece.states(grad_key_sum),
        )
        leave = linear_backward.Leaving(
            piece.queries(gradients.query),
            piece.keys(gradients.key),
            piece.keys(gradients.value),
            None if decay is None else piece.per_key(decay),
        )
        dense = piece.dense(inputs, variant)
        state = linear_backward.differentiate(dense, _steps(dense, config), come, leave)
        for into, found in (
            (gradients.initial_kv, state.kv),
            (gradients.initial_key_sum, state.key_sum),
        ):
            if into is not None:
                part = piece.states(into)
                part.copy_(found.view(part.shape))
    if decay is None or inputs.decay is None:
        return gradients
    return gradients._replace(decay=_decay_gradient(inputs, decay).to(inputs.decay.dtype))


@computed_without
def step(
    kv: Tensor,
    key_sum: Tensor,
    state_index: Tensor | None,
    inputs: LinearInputs,
    variant: LinearVariant,
) -> Tensor:
    """Output of a few new rows; see `saccade.linear_attention_step`.

    States in the accumulation dtype are changed where they lie; others, and small ones out of a
    pool, are copied, changed and copied back.
    """
    output = empty_linear_results(inputs, variant).output
    if inputs.heads == 0 or inputs.num_sequences == 0 or inputs.query.shape[2] == 0:
        return output
    (part,) = parts_of(inputs)
    dense = _HeadSlice(part, slice(None)).dense(inputs, variant)
    tokens = inputs.query.shape[2]
    chunks = [slice(at, min(at + CHUNK, tokens)) for at in range(0, tokens, CHUNK)]
    rows = [(dense.queries(chunk), dense.beside(chunk)) for chunk in chunks]
    found: list[list[linear_forward.RowSums]] = [[] for _ in chunks]
    for heads, state in _states(kv, key_sum, state_index, dense.wide):
        for (query, keys), sums in zip(rows, found, strict=True):
            sums.append(linear_forward.visit(dense, state, query[heads], keys.part(heads)))
    for chunk, sums in zip(chunks, found, strict=True):
        linear_forward.write(dense, linear_forward.joined(sums), output[:, :, chunk])
    return output


def _states(
    kv: Tensor, key_sum: Tensor, state_index: Tensor | None, wide: torch.dtype
) -> Iterator[tuple[slice, ChunkState]]:
    """The states of a step, and which heads they are of, counted through the batch."""
    selections: list[Any] = [slice(None)]
    if state_index is not None and kv[0].numel() < LARGE_STATE:
        selections = [state_index]  # an index copies
    elif state_index is not None:
        selections = [slice(entry, entry + 1) for entry in state_index.tolist()]
    first = 0
    for selection in selections:
        stored = kv[selection], key_sum[selection]
        sums = [each.to(wide).contiguous() for each in stored]
        heads = slice(first, first + sums[0].shape[0] * sums[0].shape[1])
        yield heads, ChunkState(sums[0].flatten(0, 1), sums[1].flatten(0, 1))
        first = heads.stop
        for pool, found, before in zip((kv, key_sum), sums, stored, strict=True):
            if found is not before or isinstance(selection, Tensor):
                pool[selection] = found.to(pool.dtype)


def _decay_gradient(inputs: LinearInputs, decay: Tensor) -> Tensor:
    """The gradient for each key row, or, of a constant decay, for each head; 0 where hidden."""
    if inputs.key_lengths is not None:
        decay = decay.masked_fill(hidden_keys(inputs.key_lengths, inputs.key.shape[2]), 0)
    if inputs.decay is None or inputs.decay.dim() > 1:
        return decay
    return decay.sum(0) if inputs.packed else decay.sum((0, 2))


class _HeadSlice(NamedTuple):
    """What is computed at once: a part of the call, some of its heads."""

    part: Segment
    heads: slice  # of every tensor, if all have equally many; else all of them

    def queries(self, tensor: Tensor) -> Tensor:
        """The slice's rows of queries, output, or their gradients."""
        return self.part.queries(tensor)[:, self.heads]

    def keys(self, tensor: Tensor) -> Tensor:
        """The slice's rows of keys, values, or their gradients."""
        return self.part.keys(tensor)[:, self.heads]

    def per_row(self, tensor: Tensor) -> Tensor:
        """The slice's numbers of each query row, [batch, heads, rows]."""
        return self.part.lse(tensor)[:, self.heads]

    def per_key(self, tensor: Tensor) -> Tensor:
        """The slice's numbers of each key row, [batch, state_heads, keys]."""
        if self.part.kv_tokens is None:
            return tensor[:, self.heads]
        return self.part.keys(tensor.unsqueeze(-1)).squeeze(-1)[:, self.heads]

    def states(self, tensor: Tensor) -> Tensor:
        """The slice's states, [batch, state_heads, …]."""
        first = self.part.first_batch
        return tensor[first : first + self.part.batch, self.heads]

    def dense(self, inputs: LinearInputs, variant: LinearVariant) -> DenseRows:
        """The slice as a dense problem, on views."""
        key = self.keys(inputs.key)
        decay = inputs.decay
        if decay is not None and decay.dim() == 1:
            decay = decay[self.heads].view(1, -1, 1).expand(key.shape[0], -1, key.shape[2])
        elif decay is not None:
            decay = self.per_key(decay)
        initial = None
        if inputs.initial_kv is not None and inputs.initial_key_sum is not None:
            initial = (self.states(inputs.initial_kv), self.states(inputs.initial_key_sum))
        query, value = self.queries(inputs.query), self.keys(inputs.value)
        return DenseRows(query, key, value, decay, inputs.key_lengths, initial, variant)


def _head_slices(inputs: LinearInputs) -> Iterator[_HeadSlice]:
    """The slices of a call, none of them without batch entries or heads."""
    heads = inputs.heads
    for part in parts_of(inputs):
        if part.batch == 0 or heads == 0:
            continue
        alike = all(rows.shape[1] == heads for rows in inputs[:3])
        at_once = max(HEADS_AT_ONCE // part.batch, 1) if alike else heads
        for start in range(0, heads, at_once):
            yield _HeadSlice(part, slice(start, start + at_once) if alike else slice(None))


def _steps(dense: DenseRows, config: KernelConfig) -> list[RowStep]:
    sizes = (dense.query.shape[2], dense.key.shape[2])
    return steps_of(*sizes, dense.variant, config.kv_tile or CHUNK)
