"""The gated delta rule on the CPU: chunked matrix products, memory linear in the length.

Packed sequences are dense problems on views (`ops/attention/cpu/segments.py`); a problem of many
heads is computed a few heads at a time, so that a block of them stays in the processor's cache.
Products are float32 (float64 for float64) whatever the inputs are: only a block at a time is
widened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.ops.attention.cpu.segments import Segment, clear_padding, parts_of
from saccade.ops.delta_rule.cpu import backward as delta_backward
from saccade.ops.delta_rule.cpu import forward as delta_forward
from saccade.ops.delta_rule.cpu.forward import DenseRows, Span, spans_of
from saccade.runtime.delta_spec import (
    NORM_EPS,
    DeltaGradients,
    DeltaInputs,
    DeltaResults,
    DeltaVariant,
    empty_delta_gradients,
    empty_delta_results,
)
from saccade.runtime.spec import KernelConfig, LinearInputs, accumulate_dtype
from saccade.runtime.validation import computed_without

CHUNK = 64
CHUNKS_AT_ONCE = 32  # of all heads: fewer take longer to start, more leave the cache
TOKENS_AT_ONCE = 8  # of a step: more are a chunk
LARGE_STATE = 2**16  # numbers: copying it out of a pool takes longer than a step of its own


@computed_without
def forward(inputs: DeltaInputs, variant: DeltaVariant, config: KernelConfig) -> DeltaResults:
    """Output and last state; see `saccade.gated_delta_rule`."""
    results = empty_delta_results(inputs)
    clear_padding(inputs.cu_seqlens, results.output)
    for piece in _head_slices(inputs):
        dense, into = piece.dense(inputs, variant), piece.states(results.state)
        state = _start(dense, None if inputs.initial_state is None else piece.initial(inputs))
        output = piece.rows(results.output, piece.value_heads)
        delta_forward.attend(dense, _spans(dense, config), state, output)
        into.copy_(state.view(into.shape))
    return results


@computed_without
def backward(
    inputs: DeltaInputs,
    variant: DeltaVariant,
    config: KernelConfig,
    grad_output: Tensor,
    grad_state: Tensor | None,
) -> DeltaGradients:
    """Gradients of the inputs, the same bits in every run."""
    gradients = empty_delta_gradients(inputs)
    clear_padding(inputs.cu_seqlens, *gradients[:5])
    for piece in _head_slices(inputs):
        dense = piece.dense(inputs, variant)
        initial = _start(dense, None if inputs.initial_state is None else piece.initial(inputs))
        state = _start(dense, None if grad_state is None else piece.states(grad_state))
        grad = piece.rows(grad_output, piece.value_heads)
        leave = delta_backward.Leaving(*piece.tensors(gradients))
        delta_backward.differentiate(dense, _spans(dense, config), initial, grad, state, leave)
        if gradients.initial_state is not None:
            into = piece.states(gradients.initial_state)
            into.copy_(state.view(into.shape))
    return gradients


@computed_without
def step(
    state: Tensor, state_index: Tensor | None, inputs: DeltaInputs, variant: DeltaVariant
) -> Tensor:
    """Output of a few new tokens; see `saccade.gated_delta_rule_step`.

    States in the accumulation dtype are changed where they lie; others, and small ones out of a
    pool, are copied, changed and copied back.
    """
    output = empty_delta_results(inputs).output
    if output.numel() == 0 and inputs.query.numel() == 0:
        return output
    wide = accumulate_dtype(inputs.query.dtype)
    for batch, entries in _selections(state, state_index):
        stored = state[entries]
        sums = stored.to(wide).contiguous()
        rows: list[Any] = [each if each is None else each[batch] for each in inputs[:5]]
        part = DeltaInputs(*rows)
        _advance(part, variant, sums, output[batch])
        if sums is not stored or isinstance(entries, Tensor):
            state[entries] = sums.to(state.dtype)
    return output


def _selections(state: Tensor, state_index: Tensor | None) -> Iterator[tuple[slice, Any]]:
    """Parts of a step's batch, with the entries of the pool that they change."""
    if state_index is None:
        yield slice(None), slice(None)
    elif state.shape[0] == 0 or state[0].numel() < LARGE_STATE:
        yield slice(None), state_index  # an index copies
    else:
        for n, entry in enumerate(state_index.tolist()):
            yield slice(n, n + 1), slice(entry, entry + 1)


def _advance(inputs: DeltaInputs, variant: DeltaVariant, state: Tensor, output: Tensor) -> None:
    """Write the output of a few tokens; change the states [batch, value_heads, …]."""
    for piece in _head_slices(inputs, all_heads=True):
        dense, sums = piece.dense(inputs, variant), state.flatten(0, 1)
        if dense.length > TOKENS_AT_ONCE:
            delta_forward.attend(dense, _spans(dense, KernelConfig()), sums, output)
            continue
        for t in range(dense.length):
            output[:, :, t] = _token(dense, t, sums).view(output[:, :, t].shape)


def _token(dense: DenseRows, t: int, state: Tensor) -> Tensor:
    """The output of one token, [count, value_dim]; the state takes it in.

    What it predicts and what the query reads are one product, before the update: the query's part
    in the update is (query · key) update.
    """
    at = Span(t, t + 1, 1)
    rows = []
    for tensor in (dense.key, dense.query):
        one = dense.chunks(tensor, at).squeeze(0)  # [batch · key_heads, 1, head_dim]
        if dense.variant.normalize_qk:
            one = one * torch.rsqrt(one.square().sum(-1, keepdim=True) + NORM_EPS)
        rows.append(one.repeat_interleave(dense.group, 0))
    key, query = rows[0], rows[1] * dense.variant.scale
    if dense.decay is not None:
        factor = dense.chunks(dense.decay, at).exp().view(dense.count, -1, 1)
        state.mul_(factor)
    read = torch.cat([key, query], 1) @ state
    update = dense.chunks(dense.value, at).squeeze(0) - read[:, :1]
    update.mul_(dense.chunks(dense.beta, at).view(-1, 1, 1))
    state.addcmul_(key.mT, update)
    return read[:, 1:].addcmul(update, (query * key).sum(-1, keepdim=True)).squeeze(1)


def _start(dense: DenseRows, state: Tensor | None) -> Tensor:
    """A copy of states, [count, head_dim, value_dim]; 0 where they are None."""
    shape = (dense.count, dense.head_dim, dense.value_dim)
    if state is None:
        return dense.query.new_zeros(shape, dtype=dense.wide)
    return state.to(dense.wide, copy=True).reshape(shape)


class _HeadSlice(NamedTuple):
    """What is computed at once: a part of the call, some of its heads."""

    part: Segment
    key_heads: slice
    value_heads: slice

    def rows(self, tensor: Tensor, heads: slice) -> Tensor:
        """The slice's rows, [batch, heads, length, …]."""
        if tensor.dim() == 2:  # packed numbers of tokens
            return self.part.queries(tensor.unsqueeze(-1)).squeeze(-1)[:, heads]
        return self.part.queries(tensor)[:, heads]

    def states(self, tensor: Tensor) -> Tensor:
        """The slice's states."""
        first = self.part.first_batch
        return tensor[first : first + self.part.batch, self.value_heads]

    def initial(self, inputs: DeltaInputs) -> Tensor:
        """The slice's states before the first token."""
        assert inputs.initial_state is not None
        return self.states(inputs.initial_state)

    def tensors(self, inputs: DeltaInputs | DeltaGradients) -> tuple[Any, ...]:
        """Query, key, value, beta and decay (or None), or their gradients."""
        heads = (self.key_heads, self.key_heads, *[self.value_heads] * 3)
        pairs = zip(inputs[:5], heads, strict=True)
        return tuple([each if each is None else self.rows(each, cut) for each, cut in pairs])

    def dense(self, inputs: DeltaInputs, variant: DeltaVariant) -> DenseRows:
        """The slice as a dense problem, on views."""
        return DenseRows(*self.tensors(inputs), variant=variant)


def _head_slices(inputs: DeltaInputs, all_heads: bool = False) -> Iterator[_HeadSlice]:
    """The slices of a call, none of them without batch entries or heads."""
    key_heads, value_heads = inputs.key_heads, inputs.value_heads
    if key_heads == 0 or value_heads == 0:
        return
    group, offsets = value_heads // key_heads, inputs.cu_seqlens
    rows = LinearInputs(*inputs[:3], cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    for part in parts_of(rows):
        if part.batch == 0:
            continue
        at_once = max(CHUNKS_AT_ONCE // (part.batch * group), 1)
        for start in range(0, key_heads, key_heads if all_heads else at_once):
            stop = key_heads if all_heads else min(start + at_once, key_heads)
            yield _HeadSlice(part, slice(start, stop), slice(start * group, stop * group))


def _spans(dense: DenseRows, config: KernelConfig) -> list[Span]:
    """The chunks of a call: powers of two, not much longer than the sequence."""
    chunk = min(_power_of_two(config.kv_tile or CHUNK), _power_of_two(dense.length))
    return spans_of(dense.length, chunk, max(CHUNKS_AT_ONCE // dense.count, 1))


def _power_of_two(number: int) -> int:
    """The least one that is no less."""
    return 1 << max(number - 1, 0).bit_length()
