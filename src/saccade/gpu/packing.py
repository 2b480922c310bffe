"""Packing: sequences back to back, where they begin and end, and the padding behind the last one.

A View's data for packed rows: offsets, sequences, heads, tokens. Nobody has looked at the offsets:
reading them would make the host wait. So what stands there is moved to between 0 and the number of
tokens where it is loaded, and a sequence that would end before it begins has no rows. Then no
offset leads out of a tensor, and offsets that descend only make results that mean nothing.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import wide


@triton.jit
def offset(data, sequence):
    """The token that a sequence begins with, whatever stands in memory."""
    return tl.minimum(tl.maximum(tl.load(data[0] + sequence), 0), data[3])


@triton.jit
def packed(batch, strides, STEP: tl.constexpr, data):
    """The first row's place (in elements), and how many rows there are."""
    first = offset(data, batch)
    return wide(first) * STEP, tl.maximum(offset(data, batch + 1) - first, 0)


@triton.jit
def packed_origin(batch, data):
    """As `dense_origin`; all sequences together are one batch entry."""
    return batch * 0, offset(data, batch)


@triton.jit
def first_slot(data, sequence, TILE: tl.constexpr):
    """The slot of a sequence's first tile; see `packed_program`."""
    return offset(data, sequence) // TILE + sequence


WAYS = tl.constexpr(8)  # parts that a search tells apart in a step: their loads wait together


@triton.jit
def packed_program(program, data, TILE: tl.constexpr):
    """Sequence, head, tile and slot. Sequence b owns the slots from offsets[b] // TILE + b on.

    That is at least one slot for each of its tiles, and no length need be known on the host. A
    slot past the end of its sequence gets a tile past its end, hence no rows. So does a slot past
    the end of all of them, which the last sequence owns.
    """
    sequences = data[1]
    slots = data[3] // TILE + sequences
    slot = slots - 1 - program % slots
    low, size = slot * 0, slot * 0 + sequences  # the sequence lies in low … low + size - 1
    while size > 1:
        size = tl.cdiv(size, WAYS)
        begun = slot * 0  # parts beside the first that begin at this slot or before it
        for way in tl.static_range(1, WAYS):
            position = tl.minimum(
                low + way * size, sequences
            )  # whose slots would begin past the end
            begun += (first_slot(data, position, TILE) <= slot).to(tl.int32)
        low += begun * size
    low = tl.minimum(low, sequences - 1)
    return low, program // slots, tl.maximum(slot - first_slot(data, low, TILE), 0), slot


LANES = tl.constexpr(32)  # parts that a search tells apart in a step: one for a thread of a warp


@triton.jit
def packed_program_by_heads(program, data, TILE: tl.constexpr):
    """As `packed_program`, with all heads of a slot one after the other: as rows of several heads
    lie side by side in memory, programs that run together read all of it.

    Not for Gluon, whose ranges have layouts.
    """
    sequences, heads = data[1], data[2]
    slots = data[3] // TILE + sequences
    slot = slots - 1 - program // heads
    low, size = slot * 0, slot * 0 + sequences
    while size > 1:
        size = tl.cdiv(size, LANES)
        positions = tl.minimum(low + tl.arange(0, LANES) * size, sequences)
        begun = (first_slot(data, positions, TILE) <= slot).to(tl.int32)
        low += tl.maximum(tl.sum(begun, 0) - 1, 0) * size  # the first part has always begun
    low = tl.minimum(low, sequences - 1)
    return low, program % heads, tl.maximum(slot - first_slot(data, low, TILE), 0), slot


@triton.jit
def ascend(data, lanes):
    """Whether no sequence ends before it begins, looked at by as many lanes as there are.

    Else slots are not each one sequence's: what waits for another one's turn would wait for ever.
    """
    sequences, wrong = data[1], lanes * 0
    for first in range(0, sequences, lanes.shape[0]):
        here = tl.minimum(first + lanes, sequences - 1)
        wrong = wrong | (offset(data, here + 1) < offset(data, here)).to(tl.int32)
    return tl.max(wrong, 0) == 0


# ---- padding: tokens behind the last offset, which no program works on --------------------------

MOST_FILLING = tl.constexpr(1 << 16)  # programs


@triton.jit
def fill_padding(view, number, rows, channels, DIM: tl.constexpr):
    """Write a number to all rows behind the last sequence: each program of the grid takes some.
    Mostly there are none, which costs a load that waits beside those of lengths.

    rows: a column of numbers from 0 on, of so many rows at a time; channels: a row of them.
    """
    tokens = view.data[3]
    begin, program = offset(view.data, view.data[1]), tl.program_id(0)
    begin = tl.where(program < MOST_FILLING, begin + program * rows.shape[0], tokens)
    step = tl.minimum(tl.num_programs(0), MOST_FILLING) * rows.shape[0]
    filling = ((rows + channels) * 0 + number).to(view.ptr.dtype.element_ty)
    for first in range(begin, tokens, step):
        for head in range(0, view.data[2]):
            position = view.ptr + (wide(head) * view.strides[1] + wide(first) * view.step)
            for channel in tl.static_range(0, DIM, channels.shape[1]):
                exist = (first + rows < tokens) & (channel + channels < DIM)
                pointers = position + (wide(rows) * view.step + (channel + channels))
                tl.store(pointers, filling, mask=exist)
