"""The gated delta rule, scans over chunks: the state in registers, forwards, and its gradient back.

A program holds all channels of keys × a tile of those of values, for one sequence and value head:
columns of a state know nothing of one another. It holds them turned over, [values, channels], and
its rows too: what one product makes is then the left operand of the next, which tensor cores take
from registers; only rows that were loaded stand on the right, in shared memory. With T, P and G of
chunk_system.py, the state S before a chunk, R its gradient behind it, and e^G etc. as factors of
rows:

    forwards    update = T (beta ∘ (value − (e^G ∘ key) S))
                output = scale · (e^G ∘ query) S + P update
                S ← e^{G_last} S + (e^{G_last − G} ∘ key)ᵀ update
    backwards   solved = Tᵀ (Pᵀ grad_output + (e^{G_last − G} ∘ key) R)
                R ← e^{G_last} R + scale · (e^G ∘ query)ᵀ grad_output − (e^G ∘ key)ᵀ (beta ∘ solved)

`solved` is the gradient of beta ∘ error. The forward pass keeps nothing but its output. The
backward pass scans forwards again, and keeps the updates and the state before each chunk; then
backwards, and keeps `solved` and R. What is made of these is in gradients.py.

Few long sequences are cut into segments, which scans take side by side, each from the state before
it. Those states are found first: segments.py.

NaN or inf in a token makes updates of its columns NaN from there on, hence the last state too.
Products carry it to earlier tokens of the chunk, as 0 · NaN is NaN; so where the last state is not
finite, a second start of the forward pass (NAN_SAFE) repeats it with such numbers left out of
products, and put where they belong afterwards. It is a kernel of its own, as registers are few.

Source: Yang et al. 2024 and 2025; here without the products W and U, of which no gradient is needed
then.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.features import narrow
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import any_nonfinite, num_rows, pad_rows, wide
from saccade.ops.delta_rule.triton.chunk_rows import (
    chunk_slot,
    left_of_state,
    load_across,
    load_channels,
    load_factors,
    load_rows_of_state,
    state_pointers,
    store_turned,
    turned_state_pointers,
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
    SEGMENT: int  # rows of a segment; 0: sequences are not cut
    BY_CHANNEL: bool
    PACKED: bool
    PRECISION: str
    NAN_SAFE: bool  # only where the last state is not finite; then that reaches no earlier token


@triton.jit
def segment_of(view, number, META: tl.constexpr):
    """A program's sequence and head; the first chunk and how many; the number of the state before
    them; whether they are the first, and the last of the sequence."""
    if META.SEGMENT == 0:
        batch, head, first = number // META.HEADS, number % META.HEADS, number * 0
        num_chunks = tl.cdiv(num_rows(view, batch), META.CHUNK)
        is_first, is_last = number >= 0, number >= 0
    else:
        batch, head, segment, slot = view.find(number, view.data, META.SEGMENT)
        length = num_rows(view, batch)
        if not META.PACKED:
            slot = batch * tl.cdiv(length, META.SEGMENT) + segment
        each: tl.constexpr = META.SEGMENT // META.CHUNK
        first, number = segment * each, slot * META.HEADS + head
        num_chunks = tl.minimum(tl.maximum(tl.cdiv(length, META.CHUNK) - first, 0), each)
        is_first = segment == 0
        is_last = ((segment + 1) * META.SEGMENT >= length) & (is_first | (num_chunks > 0))
    return batch, head, first, num_chunks, number, is_first, is_last


@triton.jit
def columns_of(tile, META: tl.constexpr):
    """A program's channels of keys, and its tile of those of values."""
    values = tile * META.VALUE_TILE + tl.arange(0, META.VALUE_TILE)
    return tl.arange(0, META.HEAD_WIDTH), values


@triton.jit
def load_state(memory, number, channels, values, META: tl.constexpr):
    """A state in memory as scans hold it, [values, channels]; zeros where there is none."""
    state = tl.zeros([META.VALUE_TILE, META.HEAD_WIDTH], tl.float32)
    if memory is not None:
        pointers, exists = state_pointers(memory, number, channels, values, META, True)
        state += tl.load(pointers, mask=exists, other=0.0)
    return state


# ---- forwards ------------------------------------------------------------------------------------


@triton.jit
def delta_forward_scan(
    query, key, kept, value, meeting, lasts, beta, inverse, weights, output, updates, states,
    before, after, scale, META: tl.constexpr,
):  # fmt: skip
    """One program: the output of one head, for a tile of channels of values; the last state.

    query, key, kept: Views of rows that ask the state, and of keys that are written to it: the same
    keys, unless they fade by channel. output: a View, or None where updates (a View) and states
    (memory of one for each chunk and head) are wanted instead; then there is no query. before,
    after: memory of float32 states, or None.
    """
    program = tl.program_id(0)
    batch, head, first, num_chunks, number, _, is_last = segment_of(
        inverse, program // META.TILES, META
    )
    channels, values = columns_of(program % META.TILES, META)
    if META.NAN_SAFE:
        last = load_state(after, batch * META.HEADS + head, channels, values, META)
        num_chunks = tl.where(any_nonfinite(last), num_chunks, 0)
        is_last = is_last & (num_chunks > 0)
    elif output is not None:
        pad_rows(output, 0.0, META.VALUE_DIM, META.VALUE_TILE)
    state = load_state(before, number, channels, values, META)
    length = num_rows(inverse, batch)
    pairs = tl.arange(0, META.CHUNK)
    element: tl.constexpr = value.ptr.dtype.element_ty
    for chunk in range(first, first + num_chunks):
        start = chunk * META.CHUNK
        exist = start + pairs < length
        slot = wide(chunk_slot(inverse, batch, chunk, META.CHUNK, META.PACKED))
        number_here = slot * META.HEADS + head
        # Numbers are asked for before there is a product to wait for.
        beta_rows = load_across(beta, batch, head, start, exist)
        of_rows = load_factors(meeting.asking, batch, head, start, exist, scale, META)
        if states is not None:
            pointers, exists = turned_state_pointers(states, number_here, channels, values, META)
            tl.store(pointers, state.to(states.dtype.element_ty), mask=exists)
        narrowed, unit = narrow(state, element, 1)
        wanted = load_channels(value, batch, head, start, exist, values, META.VALUE_DIM, True)
        written, keys = updates_of(
            narrowed, unit, wanted, key, meeting, beta_rows, inverse, batch, head, start, exist,
            channels, META,
        )  # fmt: skip
        if updates is not None:
            store_turned(updates, batch, head, start, exist, values, written, META.VALUE_DIM)
        if output is not None:
            asked = load_rows_of_state(query, batch, head, start, exist, channels, META)
            found = tl.dot(narrowed, tl.trans(asked), input_precision=META.PRECISION)
            found = found * (unit * of_rows)
            seen = load_channels(weights, batch, head, start, exist, pairs, META.CHUNK, False)
            told, late = without_nonfinite(written, META.NAN_SAFE)
            found += tl.dot(told.to(element), tl.trans(seen), input_precision=META.PRECISION)
            found = poisoned(found, late, META.NAN_SAFE)
            store_turned(output, batch, head, start, exist, values, found, META.VALUE_DIM)
        left = left_of_state(lasts, number_here, channels, META)
        state = state_behind(
            state, written, element, keys, kept, meeting, left, batch, head, start, exist, channels,
            META,
        )  # fmt: skip
    if after is not None:
        number = batch * META.HEADS + head
        pointers, exists = state_pointers(after, number, channels, values, META, True)
        tl.store(pointers, state, mask=exists & is_last)


@triton.jit
def updates_of(
    narrowed, unit, wanted, key, meeting, beta_rows, inverse, batch, head, start, exist, channels,
    META: tl.constexpr,
):  # fmt: skip
    """The updates of a chunk, beta · error, from the state before it as an operand of products; and
    the keys that asked it."""
    pairs = tl.arange(0, META.CHUNK)
    solve = load_channels(inverse, batch, head, start, exist, pairs, META.CHUNK, False)
    keys = load_rows_of_state(key, batch, head, start, exist, channels, META)
    said = tl.dot(narrowed, tl.trans(keys), input_precision=META.PRECISION)
    factor = load_factors(meeting.asked, batch, head, start, exist, beta_rows, META)
    errors = beta_rows * wanted.to(tl.float32) - said * (unit * factor)
    errors, late = without_nonfinite(errors, META.NAN_SAFE)
    errors = errors.to(narrowed.dtype)
    written = tl.dot(errors, tl.trans(solve), input_precision=META.PRECISION)
    return poisoned(written, late, META.NAN_SAFE), keys


@triton.jit
def state_behind(
    state, written, ELEMENT: tl.constexpr, keys, kept, meeting, left, batch, head, start, exist,
    channels, META: tl.constexpr,
):  # fmt: skip
    """The state behind a chunk. keys: those that asked the state before it, which are those that
    are written, unless they fade by channel."""
    if META.BY_CHANNEL:
        into = load_rows_of_state(kept, batch, head, start, exist, channels, META)
    else:
        into = keys
    factor = load_factors(meeting.kept, batch, head, start, exist, 1.0, META)
    state = state * left
    come = (written * factor).to(ELEMENT)
    state += tl.dot(come, into, input_precision=META.PRECISION)
    return state


@triton.jit
def without_nonfinite(rows, NAN_SAFE: tl.constexpr):
    """Rows of a chunk with 0 in place of NaN and inf, and where a column had some so far; rows as
    they are unless NAN_SAFE."""
    late = 0
    if NAN_SAFE:
        finite = tl.abs(rows) < float("inf")
        late = tl.cumsum(tl.where(finite, 0, 1), 1)
        rows = tl.where(finite, rows, 0.0)
    return rows, late


@triton.jit
def poisoned(rows, late, NAN_SAFE: tl.constexpr):
    """NaN where `late`, if NAN_SAFE."""
    if NAN_SAFE:
        rows = tl.where(late > 0, float("nan"), rows)
    return rows


# ---- backwards -----------------------------------------------------------------------------------


@triton.jit
def delta_reverse_scan(
    query, key, kept, grad_output, meeting, lasts, beta, inverse, weights, solved, grad_states,
    ending, first, scale, META: tl.constexpr,
):  # fmt: skip
    """One program: `solved` and the gradients of states, for a tile of channels of values.

    solved: a View. grad_states: memory for the gradient of the state behind each chunk and head; or
    both None, where only the gradient of the state before all of it is wanted. ending: memory of
    float32 gradients of the state behind all of it, or None; first: of the initial state, or None.
    """
    program = tl.program_id(0)
    batch, head, first_chunk, num_chunks, number, is_first, _ = segment_of(
        inverse, program // META.TILES, META
    )
    channels, values = columns_of(program % META.TILES, META)
    gradient = load_state(ending, number, channels, values, META)
    length = num_rows(inverse, batch)
    pairs = tl.arange(0, META.CHUNK)
    element: tl.constexpr = grad_output.ptr.dtype.element_ty
    for index in range(0, num_chunks):
        chunk = first_chunk + num_chunks - 1 - index
        start = chunk * META.CHUNK
        exist = start + pairs < length
        slot = wide(chunk_slot(inverse, batch, chunk, META.CHUNK, META.PACKED))
        number_here = slot * META.HEADS + head
        left = left_of_state(lasts, number_here, channels, META)
        kept_rows = load_factors(meeting.kept, batch, head, start, exist, 1.0, META)
        of_rows = load_factors(meeting.asking, batch, head, start, exist, scale, META)
        if META.BY_CHANNEL:
            factor = load_across(beta, batch, head, start, exist)
        else:
            factor = load_across(meeting.asked, batch, head, start, exist)
        if grad_states is not None:
            pointers, exists = turned_state_pointers(
                grad_states, number_here, channels, values, META
            )
            tl.store(pointers, gradient.to(grad_states.dtype.element_ty), mask=exists)
        narrowed, unit = narrow(gradient, element, 1)
        into = load_rows_of_state(kept, batch, head, start, exist, channels, META)
        toward = tl.dot(narrowed, tl.trans(into), input_precision=META.PRECISION)
        toward = toward * (unit * kept_rows)
        grads = load_channels(grad_output, batch, head, start, exist, values, META.VALUE_DIM, True)
        seen = load_channels(weights, batch, head, start, exist, pairs, META.CHUNK, False)
        toward += tl.dot(grads, seen, input_precision=META.PRECISION)
        solve = load_channels(inverse, batch, head, start, exist, pairs, META.CHUNK, False)
        found = tl.dot(toward.to(element), solve, input_precision=META.PRECISION)
        if solved is not None:
            store_turned(solved, batch, head, start, exist, values, found, META.VALUE_DIM)
        asked = load_rows_of_state(query, batch, head, start, exist, channels, META)
        if META.BY_CHANNEL:
            keys = load_rows_of_state(key, batch, head, start, exist, channels, META)
        else:
            keys = into
        gradient = gradient * left
        come = (grads.to(tl.float32) * of_rows).to(element)
        gradient += tl.dot(come, asked, input_precision=META.PRECISION)
        gone = (found * factor).to(element)
        gradient -= tl.dot(gone, keys, input_precision=META.PRECISION)
    if first is not None:
        if solved is not None:  # else each segment has one
            number = tl.where(is_first, batch * META.HEADS + head, -1)
        pointers, exists = state_pointers(first, number, channels, values, META, True)
        tl.store(pointers, gradient, mask=exists & (number >= 0))
