"""The gated delta rule, scans over chunks: the state in registers, forwards, and its gradient back.

A program holds all channels of keys × a tile of those of values, for one sequence and value head:
columns of a state know nothing of one another. With T, P and G of chunk_system.py, the state S
before a chunk, R its gradient behind it, and e^G etc. as factors of rows:

    forwards    update = T (beta ∘ (value − (e^G ∘ key) S))
                output = scale · (e^G ∘ query) S + P update
                S ← e^{G_last} S + (e^{G_last − G} ∘ key)ᵀ update
    backwards   solved = Tᵀ (Pᵀ grad_output + (e^{G_last − G} ∘ key) R)
                R ← e^{G_last} R + scale · (e^G ∘ query)ᵀ grad_output − (e^G ∘ key)ᵀ (beta ∘ solved)

`solved` is the gradient of beta ∘ error. The forward pass keeps nothing but its output. The
backward pass scans forwards again, and keeps the updates and the state before each chunk; then
backwards, and keeps `solved` and R. What is made of these is in gradients.py.

Source: Yang et al. 2024 and 2025; here without the products W and U, of which no gradient is needed
then.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.features import load_number, narrow
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import num_rows, pad_rows, wide
from saccade.ops.delta_rule.triton.chunk_rows import (
    chunk_slot,
    left_of_state,
    load_channels,
    load_faded,
    state_pointers,
    store_channels,
)


class ScanMeta(NamedTuple):
    """What is known of a scan when it is compiled: heads, channels, tiles."""

    GROUP: int  # value heads of a key head
    HEADS: int  # value heads
    HEAD_DIM: int
    HEAD_WIDTH: int
    VALUE_DIM: int
    VALUE_TILE: int
    TILES: int
    CHUNK: int
    BY_CHANNEL: bool
    PACKED: bool
    PRECISION: str


@triton.jit
def program_of(META: tl.constexpr):
    """A program's sequence and head, its channels of keys and of values; the state's number."""
    program = tl.program_id(0)
    tile, number = program % META.TILES, program // META.TILES
    channels = tl.arange(0, META.HEAD_WIDTH)
    values = tile * META.VALUE_TILE + tl.arange(0, META.VALUE_TILE)
    return number // META.HEADS, number % META.HEADS, channels, values, number


@triton.jit
def load_state(memory, number, channels, values, META: tl.constexpr):
    """A state in memory, or zeros where there is none."""
    state = tl.zeros([META.HEAD_WIDTH, META.VALUE_TILE], tl.float32)
    if memory is not None:
        pointers, exists = state_pointers(memory, number, channels, values, META)
        state += tl.load(pointers, mask=exists, other=0.0)
    return state


@triton.jit
def delta_forward_scan(
    query, key, kept, value, factors, beta, decay, inverse, weights, output, updates, states,
    before, after, scale, META: tl.constexpr,
):  # fmt: skip
    """One program: the output of one head, for a tile of channels of values; the last state.

    query, key, kept: Views of rows that ask the state, and of keys that are written to it: the same
    keys, unless they fade by channel. output: a View, or None where updates (a View) and states
    (memory of one for each chunk and head) are wanted instead; then there is no query. before,
    after: memory of float32 states, or None.
    """
    batch, head, channels, values, number = program_of(META)
    if output is not None:
        pad_rows(output, 0.0, META.VALUE_DIM, META.VALUE_TILE)
    state = load_state(before, number, channels, values, META)
    length = num_rows(inverse, batch)
    pairs = tl.arange(0, META.CHUNK)
    element: tl.constexpr = value.ptr.dtype.element_ty
    for chunk in range(0, tl.cdiv(length, META.CHUNK)):
        start = chunk * META.CHUNK
        exist = start + pairs < length
        if states is not None:
            slot = wide(chunk_slot(inverse, batch, chunk, META.CHUNK, META.PACKED))
            number_here = slot * META.HEADS + head
            pointers, exists = state_pointers(states, number_here, channels, values, META)
            tl.store(pointers, state.to(states.dtype.element_ty), mask=exists)
        narrowed, unit = narrow(state, element, 0)
        beta_rows = load_number(beta, batch, head, start + pairs, exist).to(tl.float32)[:, None]
        solve = load_channels(inverse, batch, head, start, exist, pairs, META.CHUNK, False)
        wanted = load_channels(value, batch, head, start, exist, values, META.VALUE_DIM, False)
        keys, factor = load_faded(
            key, factors.key, decay, batch, head, start, length, exist, channels, META, False, False
        )
        said = tl.dot(keys, narrowed, input_precision=META.PRECISION) * (unit * factor)
        errors = (beta_rows * (wanted.to(tl.float32) - said)).to(element)
        written = tl.dot(solve, errors, input_precision=META.PRECISION)
        if updates is not None:
            store_channels(updates, batch, head, start, exist, values, written, META.VALUE_DIM)
        if output is not None:
            asked, of_rows = load_faded(
                query, factors.query, decay, batch, head, start, length, exist, channels, META,
                False, False,
            )  # fmt: skip
            found = tl.dot(asked, narrowed, input_precision=META.PRECISION)
            found = found * (unit * (of_rows * scale))
            seen = load_channels(weights, batch, head, start, exist, pairs, META.CHUNK, False)
            found += tl.dot(seen, written.to(element), input_precision=META.PRECISION)
            store_channels(output, batch, head, start, exist, values, found, META.VALUE_DIM)
        turned, factor = load_faded(
            kept, factors.key, decay, batch, head, start, length, exist, channels, META, True, True
        )
        state = state * left_of_state(decay, batch, head, start, length, channels, META)
        come = (written * factor).to(element)
        state += tl.dot(turned, come, input_precision=META.PRECISION)
    if after is not None:
        pointers, exists = state_pointers(after, number, channels, values, META)
        tl.store(pointers, state, mask=exists)


@triton.jit
def delta_reverse_scan(
    query, key, kept, grad_output, factors, beta, decay, inverse, weights, solved, grad_states,
    ending, first, scale, META: tl.constexpr,
):  # fmt: skip
    """One program: `solved` and the gradients of states, for a tile of channels of values.

    solved: a View. grad_states: memory for the gradient of the state behind each chunk and head.
    ending, first: memory of float32 gradients of the last state and of the initial one, or None.
    """
    batch, head, channels, values, number = program_of(META)
    gradient = load_state(ending, number, channels, values, META)
    length = num_rows(inverse, batch)
    pairs = tl.arange(0, META.CHUNK)
    element: tl.constexpr = grad_output.ptr.dtype.element_ty
    num_chunks = tl.cdiv(length, META.CHUNK)
    for index in range(0, num_chunks):
        chunk = num_chunks - 1 - index
        start = chunk * META.CHUNK
        exist = start + pairs < length
        slot = wide(chunk_slot(inverse, batch, chunk, META.CHUNK, META.PACKED))
        pointers, exists = state_pointers(
            grad_states, slot * META.HEADS + head, channels, values, META
        )
        tl.store(pointers, gradient.to(grad_states.dtype.element_ty), mask=exists)
        narrowed, unit = narrow(gradient, element, 0)
        keys, factor = load_faded(
            kept, factors.key, decay, batch, head, start, length, exist, channels, META, True, False
        )
        toward = tl.dot(keys, narrowed, input_precision=META.PRECISION) * (unit * factor)
        grads = load_channels(grad_output, batch, head, start, exist, values, META.VALUE_DIM, False)
        seen = load_channels(weights, batch, head, start, exist, pairs, META.CHUNK, True)
        toward += tl.dot(seen, grads, input_precision=META.PRECISION)
        solve = load_channels(inverse, batch, head, start, exist, pairs, META.CHUNK, True)
        found = tl.dot(solve, toward.to(element), input_precision=META.PRECISION)
        store_channels(solved, batch, head, start, exist, values, found, META.VALUE_DIM)
        beta_rows = load_number(beta, batch, head, start + pairs, exist).to(tl.float32)[:, None]
        asked, of_rows = load_faded(
            query, factors.query, decay, batch, head, start, length, exist, channels, META, False,
            True,
        )  # fmt: skip
        turned, factor = load_faded(
            key, factors.key, decay, batch, head, start, length, exist, channels, META, False, True
        )
        gradient = gradient * left_of_state(decay, batch, head, start, length, channels, META)
        come = (grads.to(tl.float32) * (of_rows * scale)).to(element)
        gradient += tl.dot(asked, come, input_precision=META.PRECISION)
        gone = (found * (beta_rows * factor)).to(element)
        gradient -= tl.dot(turned, gone, input_precision=META.PRECISION)
    if first is not None:
        pointers, exists = state_pointers(first, number, channels, values, META)
        tl.store(pointers, gradient, mask=exists)
