"""The gated delta rule, segments: the state before each part of a long sequence, all at once.

A scan takes the chunks of a sequence one after the other, so few long sequences leave a GPU idle.
What a chunk makes of the state S before it is linear in S, so a segment of chunks makes

    S ← M S + N

N is what the segment makes of zeros, and M what it makes of the columns of the identity, if nothing
is wanted of its keys (values are 0): the same scan, with head_dim columns more. Segments know
nothing of one another, so all N and M are made side by side; then a product for each segment, in
turn, gives the state before the next one (`delta_join_segments`), and the scans proper start from
these, side by side again. Backwards, the gradient of the state goes R ← Mᵀ R + N', with the same M,
and N' what `delta_reverse_scan` makes of a gradient of 0 behind its segment.

Twice to three times the work of one scan, in a fraction of its steps: configs.py tells when.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.features import narrow
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import first_slot, num_rows, wide
from saccade.ops.delta_rule.triton.chunk_rows import (
    chunk_slot,
    left_of_state,
    load_across,
    load_channels,
    state_pointers,
)
from saccade.ops.delta_rule.triton.chunk_scan import (
    columns_of,
    segment_of,
    state_behind,
    updates_of,
)


class JoinMeta(NamedTuple):
    """What is known of states between segments when their kernel is compiled."""

    HEADS: int  # value heads
    HEAD_DIM: int
    HEAD_WIDTH: int
    VALUE_DIM: int
    VALUE_TILE: int
    TILES: int
    SEGMENT: int
    PACKED: bool
    REVERSE: bool
    JOINED: str  # how exact products of states are


class SegmentsMeta(NamedTuple):
    """What is known of M and N when their kernel is compiled; see `ScanMeta`."""

    GROUP: int
    HEADS: int
    HEAD_DIM: int
    HEAD_WIDTH: int
    VALUE_DIM: int
    VALUE_TILE: int  # of M too
    TILES: int  # of N
    MOVE_TILES: int
    CHUNK: int
    SEGMENT: int
    BY_CHANNEL: bool
    PACKED: bool
    PRECISION: str
    NAN_SAFE: bool
    ENDS: str  # "first", "last", "both" or "none": which of these segments' M are asked for


@triton.jit
def delta_segments(
    key, kept, value, meeting, lasts, beta, inverse, moved, alone, META: tl.constexpr
):
    """One program: N of a segment of one head for a tile of channels of values, or M for a tile of
    columns of the identity.

    moved, alone: memory for M [head_dim, head_dim] and N of each segment and head. Where nobody
    asks for them, something else is written.
    """
    program = tl.program_id(0)
    tiles: tl.constexpr = META.TILES + META.MOVE_TILES
    batch, head, first, num_chunks, number, is_first, is_last = segment_of(
        inverse, program // tiles, META
    )
    tile = program % tiles
    moves = tile >= META.TILES
    idle = is_last & (moves == 0)
    if META.ENDS == "first" or META.ENDS == "none":
        idle = idle | is_last
    if META.ENDS == "last" or META.ENDS == "none":
        idle = idle | (is_first & moves)
    num_chunks = tl.where(idle, 0, num_chunks)
    channels, values = columns_of(tl.where(moves, tile - META.TILES, tile), META)
    on_diagonal = (channels[None, :] == values[:, None]) & moves
    state = tl.where(on_diagonal, 1.0, 0.0)
    length = num_rows(inverse, batch)
    pairs = tl.arange(0, META.CHUNK)
    element: tl.constexpr = value.ptr.dtype.element_ty
    for chunk in range(first, first + num_chunks):
        start = chunk * META.CHUNK
        exist = start + pairs < length
        slot = wide(chunk_slot(inverse, batch, chunk, META.CHUNK, META.PACKED))
        left = left_of_state(lasts, slot * META.HEADS + head, channels, META)
        beta_rows = load_across(beta, batch, head, start, exist)
        narrowed, unit = narrow(state, element, 1)
        wanted = load_channels(
            value, batch, head, start, exist & (moves == 0), values, META.VALUE_DIM, True
        )
        written, keys = updates_of(
            narrowed, unit, wanted, key, meeting, beta_rows, inverse, batch, head, start, exist,
            channels, META,
        )  # fmt: skip
        state = state_behind(
            state, written, element, keys, kept, meeting, left, batch, head, start, exist, channels,
            META,
        )  # fmt: skip
    pointers, exists = state_pointers(alone, number, channels, values, META, True)
    tl.store(pointers, state, mask=exists & (moves == 0))
    pointers, exists = move_pointers(moved, number, channels, values, META.HEAD_DIM, True)
    tl.store(pointers, state, mask=exists & moves)


@triton.jit
def move_pointers(
    memory, number, rows, columns, DIM: tl.constexpr, TRANSPOSED: tl.constexpr = False
):
    """Addresses of rows × columns of what moves a state [head_dim, head_dim], or turned over, and
    which exist."""
    first = memory + wide(number) * (DIM * DIM)
    if TRANSPOSED:
        place = rows[None, :] * DIM + columns[:, None]
        exists = (rows < DIM)[None, :] & (columns < DIM)[:, None]
    else:
        place = rows[:, None] * DIM + columns[None, :]
        exists = (rows < DIM)[:, None] & (columns < DIM)[None, :]
    return first + place, exists


@triton.jit
def delta_join_segments(rows, moved, alone, outer, between, META: tl.constexpr):
    """One program: the states before all segments of one sequence and head, for a tile of channels
    of values; REVERSE: the gradients of those behind them.

    rows: a View. outer: memory of float32 initial states, or gradients of last ones; or None.
    between: memory for a state of each segment and head.
    """
    program = tl.program_id(0)
    number = program // META.TILES
    batch, head = number // META.HEADS, number % META.HEADS
    channels, values = columns_of(program % META.TILES, META)
    state = tl.zeros([META.HEAD_WIDTH, META.VALUE_TILE], tl.float32)
    if outer is not None:
        pointers, exists = state_pointers(outer, number, channels, values, META)
        state += tl.load(pointers, mask=exists, other=0.0)
    num_segments = tl.maximum(tl.cdiv(num_rows(rows, batch), META.SEGMENT), 1)
    slot = first_slot(rows.data, batch, META.SEGMENT) if META.PACKED else batch * num_segments
    for index in range(0, num_segments):
        segment = num_segments - 1 - index if META.REVERSE else index
        here = (slot + segment) * META.HEADS + head
        pointers, exists = state_pointers(between, here, channels, values, META)
        tl.store(pointers, state, mask=exists)
        if META.REVERSE:
            at, there = move_pointers(moved, here, channels, channels, META.HEAD_DIM)
            moves = tl.trans(tl.load(at, mask=there, other=0.0))
        else:
            at, there = move_pointers(moved, here, channels, channels, META.HEAD_DIM)
            moves = tl.load(at, mask=there, other=0.0)
        state = tl.dot(moves, state, input_precision=META.JOINED)
        pointers, exists = state_pointers(alone, here, channels, values, META)
        state += tl.load(pointers, mask=exists, other=0.0)
