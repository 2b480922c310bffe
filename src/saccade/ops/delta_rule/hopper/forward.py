"""The gated delta rule forward on Hopper: one kernel, chunk by chunk, the state in registers.

A program has one sequence and value head. One warp loads rows by TMA, and two find what they are
multiplied by (load.py). Four solve the systems of chunks ahead of the scans, as these need nothing
of the state (solve.py). Two groups of four warps scan, 64 channels of values each: they hold the
state turned over, [values, channels], so that what one product makes is the next one's left
operand, in registers (`saccade.ops.delta_rule.triton.chunk_scan` has the equations).
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.hopper.pipeline import (
    as_operand,
    mbarrier,
    store,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.language import gl, gluon
from saccade.gpu.tensor_view import row_pointers, wide
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.delta_rule.hopper.load import measure, produce
from saccade.ops.delta_rule.hopper.rings import (
    ASKED,
    ASKING,
    BLOCK,
    HALF,
    KEPT,
    LEFT,
    ROWS,
    WIDTH,
    make_delta_rings,
    place_of,
)
from saccade.ops.delta_rule.hopper.solve import solve
from saccade.ops.delta_rule.triton.chunk_rows import chunk_slot


class DeltaForwardMeta(NamedTuple):
    """What is known of the call, and how the kernel runs, when it is compiled."""

    GROUP: int  # value heads of a key head
    HEADS: int
    HEAD_DIM: int
    VALUE_DIM: int
    PACKED: bool
    NORMALIZE: bool
    KEEPS: bool  # what a backward pass needs
    STAGES: int  # of rows
    SOLVED: int  # stages of what is solved
    SCAN_REGISTERS: int
    SOLVE_REGISTERS: int
    LOAD_REGISTERS: int


class Squares(NamedTuple):
    """Numbers of each row, as many as a chunk has rows."""

    inverse: Any  # View
    weights: Any


class KeptDescriptors(NamedTuple):
    """What a backward pass needs, as TMA writes it."""

    inverse: Any
    weights: Any
    states: Any  # halves of them, turned over


@gluon.jit(do_not_specialize=["scale"])
def delta_forward(
    query_desc, key_desc, value_desc, output_desc, output, beta, decay, before, after, squares,
    meeting, factors, lasts, kept, scale, META: gl.constexpr,
):  # fmt: skip
    """One program: the output of one sequence and head, and its last state.

    output: a View of what output_desc describes; beta: a View of numbers. decay: a Decay, or None.
    before, after: memory of float32 states, or None.
    What a backward pass needs is written where META.KEEPS, and updates in place of outputs. Squares
    and Meeting; Factors of rows of key heads; lasts: memory of what each chunk and head leaves of a
    state, None without decay; kept: KeptDescriptors.
    """
    if META.PACKED:
        fill_padding_of(output, META.VALUE_DIM)
    rings = make_delta_rings(key_desc.dtype, META.STAGES, META.SOLVED, META.KEEPS)
    gl.warp_specialize(
        [
            (scan, (
                output_desc, output, beta, before, after, kept, rings, META.HEADS, META.HEAD_DIM,
                META.VALUE_DIM, META.PACKED, META.KEEPS, 0,
            )),
            (scan, (
                output_desc, output, beta, before, after, kept, rings, META.HEADS, META.HEAD_DIM,
                META.VALUE_DIM, META.PACKED, META.KEEPS, 1,
            )),
            (solve, (beta, squares, kept, rings, META.HEADS, META.PACKED, META.KEEPS)),
            (measure, (
                beta, decay, scale, meeting, factors, lasts, rings, META.GROUP, META.HEADS,
                META.PACKED, META.NORMALIZE, META.KEEPS,
            )),
            (produce, (
                query_desc, key_desc, value_desc, beta, rings, META.GROUP, META.HEADS, META.PACKED
            )),
        ],
        [4, 4, 2, 1],
        [META.SCAN_REGISTERS, META.SOLVE_REGISTERS, META.LOAD_REGISTERS, META.LOAD_REGISTERS],
    )  # fmt: skip


@gluon.jit
def fill_padding_of(output, DIM: gl.constexpr):
    """Clear rows behind the last sequence; each program some."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    output.pad(output, 0.0, rows, channels, DIM)


# ---- scanning -----------------------------------------------------------------------------------


@gluon.jit
def scan(
    output_desc, output, beta, before, after, kept, rings,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, PACKED: gl.constexpr,
    KEEPS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute 64 channels of the output, chunk by chunk."""
    batch, head, length, entry, first = place_of(beta, HEADS, PACKED)
    at = state_at(batch, head, HEADS, HEAD_DIM, VALUE_DIM, WHICH, 0)
    one = load_half(before, at)
    at = state_at(batch, head, HEADS, HEAD_DIM, VALUE_DIM, WHICH, 1)
    two = load_half(before, at)
    chunks = (length + ROWS - 1) // ROWS
    for chunk in range(0, chunks):
        place = chunk_slot(beta, batch, chunk, ROWS, PACKED), head
        one, two, found = fold_chunk(one, two, kept, place, rings, chunk, not KEEPS, WHICH)
        memory = rings.values.tile_of(chunk, WHICH)
        memory.permute((1, 0)).store(found.to(gl.bfloat16))
        into = entry
        if PACKED:  # rows past the end are another sequence's: such a chunk goes nowhere
            into = gl.where(chunk * ROWS + ROWS > length, 1, entry)
        coordinates = [into, head, first + chunk * ROWS, WHICH * BLOCK]
        store(output_desc, coordinates, memory.reshape(output_desc.block_type.shape))
    wait_for_stores()
    if PACKED:  # noqa: SIM102 (a constexpr first)
        if length % ROWS > 0:
            memory = rings.values.tile_of(chunks - 1, WHICH)
            store_last(output, memory, batch, head, length, VALUE_DIM, WHICH)
    if after is not None:
        position, inside = state_at(batch, head, HEADS, HEAD_DIM, VALUE_DIM, WHICH, 0)
        gl.store(after + position, one, mask=inside)
        position, inside = state_at(batch, head, HEADS, HEAD_DIM, VALUE_DIM, WHICH, 1)
        gl.store(after + position, two, mask=inside)


@gluon.jit
def fold_chunk(
    one, two, kept, place, rings, chunk, ASKS: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """The state behind a chunk, in halves of the channels of keys; turned over the output of its
    rows, or their updates, unless it ASKS. Then the state before it is kept in its place."""
    SQUARE: gl.constexpr = mma_layout(ROWS)
    nothing = gl.zeros([BLOCK, ROWS], gl.float32, SQUARE)
    if not ASKS:
        wait_for_stores(1)  # the second half of the state before; updates may be on their way
        keep_half(kept.states, rings, place, one, WHICH, 0)
    rings.solved.wait(chunk)  # and with it keys and values, where a sequence ends, are cleared
    rings.keys.wait(chunk)
    rings.queries.wait(chunk)
    rings.values.wait(chunk)
    rings.numbers.wait(chunk)
    said, found = ask(one, rings, chunk, nothing, nothing, ASKS, 0)
    wait_for_stores()
    last = rings.keys.empty.index(rings.keys.stage(gl.maximum(chunk - 1, 0)))
    mbarrier.arrive(last, count=1, pred=chunk > 0)  # and with it queries and values
    if not ASKS:
        keep_half(kept.states, rings, place, two, WHICH, 1)
    # Half of the state at a time as an operand: registers are few.
    said, found = settled(said, found, ASKS)
    said, found = ask(two, rings, chunk, said, found, ASKS, 1)
    left = rings.down(chunk, LEFT, SQUARE)
    one, two = one * left, two * left
    said, found = settled(said, found, ASKS)
    wanted = rings.values.tile_of(chunk, WHICH).permute((1, 0)).load(SQUARE).to(gl.float32)
    asked = rings.across(chunk, ASKED, SQUARE)
    errors = as_operand(wanted - said * asked, gl.bfloat16, SQUARE)
    solved = rings.solved.at(chunk)
    update = warpgroup_mma(errors, solved.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if ASKS:
        found = found * rings.across(chunk, ASKING, SQUARE)
    kept = rings.across(chunk, KEPT, SQUARE)
    update = warpgroup_mma_wait(0, deps=[update])
    come = as_operand(update * kept, gl.bfloat16, SQUARE)
    keys = rings.keys.at(chunk)
    one = warpgroup_mma(come, keys.slice(0, HALF, dim=1), one, is_async=True)
    two = warpgroup_mma(come, keys.slice(HALF, HALF, dim=1), two, is_async=True)
    if ASKS:
        told = as_operand(update, gl.bfloat16, SQUARE)
        weights = rings.weights_of(chunk)
        found = warpgroup_mma(told, weights.permute((1, 0)), found, is_async=True)
        one, two, found = warpgroup_mma_wait(0, deps=[one, two, found])
    else:
        one, two = warpgroup_mma_wait(0, deps=[one, two])
        found = update
    rings.solved.release(chunk)
    return one, two, found


@gluon.jit
def ask(state, rings, chunk, said, found, ASKS: gl.constexpr, WHICH: gl.constexpr):
    """Start to add what half of a state says of keys, and what queries find there if it ASKS."""
    narrowed = as_operand(state, gl.bfloat16, mma_layout(ROWS))
    keys = rings.keys.at(chunk).slice(WHICH * HALF, HALF, dim=1).permute((1, 0))
    queries = rings.queries.at(chunk).slice(WHICH * HALF, HALF, dim=1).permute((1, 0))
    said = warpgroup_mma(narrowed, keys, said, use_acc=WHICH > 0, is_async=True)
    if ASKS:
        found = warpgroup_mma(narrowed, queries, found, use_acc=WHICH > 0, is_async=True)
    return said, found


@gluon.jit
def settled(said, found, ASKS: gl.constexpr):
    """Both once they are there; only the first unless it ASKS."""
    if ASKS:
        said, found = warpgroup_mma_wait(0, deps=[said, found])
    else:
        said = warpgroup_mma_wait(0, deps=[said])
    return said, found


@gluon.jit
def store_last(
    output, memory, batch, head, length, VALUE_DIM: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """Write the rows of a chunk that a sequence ends in, and none behind them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = length // ROWS * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    channel = WHICH * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (row < length) & (channel < VALUE_DIM)
    gl.store(row_pointers(output, batch, head, row, channel), memory.load(LAYOUT), mask=inside)


@gluon.jit
def state_at(
    batch, head, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    WHICH: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Where half of a state lies in memory, in elements, as a scan holds it, and what of it
    exists."""
    LAYOUT: gl.constexpr = mma_layout(HALF)
    value = WHICH * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
    channel = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    number = wide(batch * HEADS + head) * (HEAD_DIM * VALUE_DIM)
    inside = (channel < HEAD_DIM) & (value < VALUE_DIM)
    return number + (channel * VALUE_DIM + value), inside


@gluon.jit
def load_half(before, at):
    """Half of a state in memory; zeros where there is none."""
    state = gl.zeros([BLOCK, HALF], gl.float32, mma_layout(HALF))
    if before is not None:
        state = gl.load(before + at[0], mask=at[1], other=0.0)
    return state


@gluon.jit
def keep_half(states_desc, rings, place, state, WHICH: gl.constexpr, PART: gl.constexpr):
    """Start to write half of the state before a chunk as products take it, turned over. The scan
    has waited until the half before it is read."""
    memory = rings.kept.index(WHICH)
    memory.store(state.to(gl.bfloat16))
    coordinates = [place[0], place[1], WHICH * BLOCK, PART * HALF]
    store(states_desc, coordinates, memory.reshape(states_desc.block_type.shape))
