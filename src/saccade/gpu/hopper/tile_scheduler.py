"""Tile scheduler: in which order programs take tiles of query rows, and what they know of them.

A work tile is what the producer tells the consumers about the tile of query rows that comes next.
Numbers are given to programs in order of cost, dearest first, so that the last ones to finish have
little to do (longest processing time first, Graham 1969).
"""

# Triton's language has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import tile_ranges
from saccade.gpu.kernel_args import Extent, Rules
from saccade.gpu.language import gl, gluon
from saccade.gpu.tensor_view import wide
from saccade.gpu.tile_ranges import TileRange

WORK_TILE_SIZE = gl.constexpr(16)


class TileOrder(NamedTuple):
    """How many tiles there are, and in which order they are taken."""

    origin: Any  # dense_origin or packed_origin: coordinates of a sequence's first row
    counter: Any  # int32 in memory, 0 between calls; None: every program knows its tiles ahead
    total: int  # tiles of query rows, of all heads and sequences
    slots: int  # of one head (and sequence)
    heads_at_once: int  # heads whose tiles are taken in turn, so that their keys stay in the L2
    nonfinite: Any = None  # the memory of the counter, if there are flags behind it


def order_of(extent: Extent, tile: int, heads_at_once: int) -> tuple[int, int, int]:
    """Tiles in all, tiles of one head, and heads that take turns, as a TileOrder holds them."""
    heads = max(1, min(heads_at_once, extent.heads * extent.sequences))
    return extent.programs(tile), extent.slots(tile), heads


@gluon.jit
def num_tiles(schedule):
    """How many tiles of query rows there are in all."""
    return schedule.total


@gluon.jit
def next_number(schedule, number):
    """The number that a program takes after another one: the next that nobody has, or its own."""
    if schedule.counter is None:
        following = number + gl.num_programs(0)
    else:
        # Each program takes one number too many; who takes the very last resets the counter.
        taken = gl.atomic_add(schedule.counter, 1, sem="relaxed")
        if taken == num_tiles(schedule) - 1:
            gl.store(schedule.counter, 0)
        following = taken + gl.num_programs(0)
    return following


@gluon.jit
def program_of(schedule, number):
    """The program, as Views count them, behind a number.

    Tiles of `heads_at_once` heads take turns: all last tiles of these heads, then all last but one.
    """
    slots, at_once = schedule.slots, schedule.heads_at_once
    group = number // (slots * at_once)
    rest = number - group * (slots * at_once)
    heads = gl.minimum(num_tiles(schedule) // slots - group * at_once, at_once)
    return (group * at_once + rest % heads) * slots + rest // heads


@gluon.jit
def program_of_keys(schedule, number):
    """The program of a number, of those that stand at tiles of keys: all first tiles of these heads
    come first, as under a causal mask they are seen by most queries."""
    slots = schedule.slots
    program = program_of(schedule, number)
    slot = program % slots
    return program - slot + slots - 1 - slot


@gluon.jit
def tile_of(rules, tile_range, index):
    """The tile of keys that is visited as number `index`: partial tiles come first.

    A tile range of no tiles is taken as one of a single partial tile, so that nobody need tell it
    apart: all of its pairs are hidden.
    """
    partial_index = gl.maximum(
        gl.minimum(index, tile_range.num_partial - 1), 0
    )  # lists have no other places
    partial = rules.mask.tile(rules.mask, tile_range, partial_index, False)
    full = rules.mask.tile(
        rules.mask, tile_range, gl.maximum(index - tile_range.num_partial, 0), True
    )
    tile = gl.where(index < tile_range.num_partial, partial, full).to(gl.int32)
    return gl.where(tile_range.num_partial + tile_range.num_full == 0, 0, tile)


@gluon.jit
def tile_from_last(rules, tile_range, index):
    """The tile of an index, the last partial tile first: `own_partial_tiles` passes over it."""
    return tile_of(
        rules,
        tile_range,
        gl.where(index < tile_range.num_partial, tile_range.num_partial - 1 - index, index),
    )


@gluon.jit
def num_visits(tile_range):
    """How many tiles of keys are visited: at least one, see `tile_of`."""
    return gl.maximum(tile_range.num_partial + tile_range.num_full, 1)


@gluon.jit
def own_partial_tiles(rules, at, tile_range, KV_TILE: gl.constexpr):
    """Of a tile range by `tile_from_last`, where one consumer begins, and from where on nothing is
    hidden from its 64 rows.

    Tiles of keys are half as long as those of query rows: under a causal mask the first partial
    tile may be hidden from all of the upper rows, and the second one from none of the lower.
    """
    batch, query_head, first_row, query_len, kv_len = at
    first_key = tile_from_last(rules, tile_range, 0) * KV_TILE
    possible, _ = rules.mask.classify(
        batch, query_head, first_row, first_row + 63, first_key, first_key + KV_TILE - 1,
        kv_len - query_len, rules.mask.data, 64, KV_TILE,
    )  # fmt: skip
    second_key = tile_from_last(rules, tile_range, 1) * KV_TILE
    _, certain = rules.mask.classify(
        batch, query_head, first_row, first_row + 63, second_key, second_key + KV_TILE - 1,
        kv_len - query_len, rules.mask.data, 64, KV_TILE,
    )  # fmt: skip
    begin = gl.where(possible, 0, gl.minimum(num_visits(tile_range) - 1, 1)).to(gl.int32)
    only_first = certain & (tile_range.num_partial == 2) & (second_key + KV_TILE <= kv_len)
    return begin, num_partial(tile_range) - only_first.to(gl.int32)


@gluon.jit
def is_partial(tile_range, index):
    """Whether pairs of that tile may be hidden."""
    return index < num_partial(tile_range)


@gluon.jit
def num_partial(tile_range):
    """How many of the first tiles of a tile range may hold hidden pairs."""
    return gl.maximum(tile_range.num_partial, 1 - tile_range.num_full)


@gluon.jit
def write_work_tile(position, query_len, kv_len, tile_range):
    """A work tile as numbers, to hand through shared memory. place: batch, head, first row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index = gl.arange(0, WORK_TILE_SIZE, LAYOUT)
    numbers = gl.where(index == 0, position[0], 0)
    numbers = gl.where(index == 1, position[1], numbers)
    numbers = gl.where(index == 2, position[2], numbers)
    numbers = gl.where(index == 3, query_len, numbers)
    numbers = gl.where(index == 4, kv_len, numbers)
    first = wide(tile_range.first)
    numbers = gl.where(index == 5, first.to(gl.int32), numbers)
    numbers = gl.where(index == 6, (first >> 32).to(gl.int32), numbers)
    for entry_number in gl.static_range(1, 6):
        numbers = gl.where(index == 6 + entry_number, tile_range[entry_number], numbers)
    return numbers


@gluon.jit
def read_work_tile(numbers):
    """What was written, by every thread for itself."""
    first = entry(numbers, 6).to(gl.int64) << 32 | (entry(numbers, 5).to(gl.int64) & 0xFFFFFFFF)
    tile_range = TileRange(
        first, entry(numbers, 7), entry(numbers, 8), entry(numbers, 9), entry(numbers, 10),
        entry(numbers, 11),
    )  # fmt: skip
    position = entry(numbers, 0), entry(numbers, 1), entry(numbers, 2)
    return position, entry(numbers, 3), entry(numbers, 4), tile_range


@gluon.jit
def entry(numbers, POSITION: gl.constexpr):
    """One number of a work tile that every thread holds whole."""
    index = gl.arange(0, WORK_TILE_SIZE, numbers.type.layout)
    return gl.sum(gl.where(index == POSITION, numbers, 0), 0)


# ---- the tile range of a mask, by one warp: Gluon wants its layout to be named -------------------


@gluon.jit
def found(
    mask, batch, head, slot, start, lengths,
    TILE: gl.constexpr, OTHER: gl.constexpr, OVER_KEYS: gl.constexpr,
):  # fmt: skip
    """Classify all tiles of the other side, 32 together; see `tile_ranges.find_tile_range`."""
    tiles_of_warp = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    length, other_length = lengths
    low = start + tiles_of_warp * 0
    high = gl.minimum(low + TILE, length) - 1
    count = (other_length + OTHER - 1) // OTHER
    first, end = count, 0
    full_first, full_end = count, count
    for base in range(0, count, 32):
        tiles = base + tiles_of_warp
        exists = tiles < count
        other_low = gl.where(exists, tiles * OTHER, 0)
        other_high = gl.minimum(other_low + OTHER, other_length) - 1
        if OVER_KEYS:
            possible, certain = mask.classify(
                batch, head, low, high, other_low, other_high, other_length - length, mask.data,
                TILE, OTHER,
            )  # fmt: skip
        else:
            possible, certain = mask.classify(
                batch, head, other_low, other_high, low, high, length - other_length, mask.data,
                OTHER, TILE,
            )  # fmt: skip
            certain = certain & (start + TILE <= length)
        possible = possible & exists
        certain = certain & exists & (other_low + OTHER <= other_length)
        first = gl.minimum(first, gl.min(gl.where(possible, tiles, count), 0))
        end = gl.maximum(end, gl.max(gl.where(possible, tiles + 1, 0), 0))
        full_first = gl.minimum(full_first, gl.min(gl.where(certain, tiles, count), 0))
        after = (tiles > full_first) & (certain == 0)
        full_end = gl.minimum(full_end, gl.min(gl.where(after, tiles, count), 0))
    end = gl.maximum(first, end)
    full_first = gl.minimum(full_first, end)
    full_end = gl.maximum(gl.minimum(full_end, end), full_first)
    num_left = full_first - first
    num_partial = num_left + end - full_end
    return TileRange(
        first, num_left, full_end - num_left, num_partial, full_first, full_end - full_first
    )


def with_gluon_search(changes: Rules) -> Rules:
    """The rules, with the tile range that a program finds by itself as Gluon can compile it."""
    mask = changes.mask
    if mask.tile_range is not tile_ranges.found:
        return changes
    return changes._replace(mask=mask._replace(tile_range=found))


# ---- tile counter --------------------------------------------------------------------------------
# Where the programs of a kernel take numbers from, 0 before and after each call.
#
# Behind it are flags, 0 too: in the forward pass, one for each consumer.

NUMBERS = 2048  # the counter, and more flags than consumers of all multiprocessors
SPARE = 128  # calls that graphs can hold before they write zeros themselves

_counters: dict[tuple[int, int], Tensor] = {}
_spares: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by device: memory that stays, what is left


def counter_of(device: torch.device) -> Tensor:
    """The counter of calls on a device's current stream.

    Calls on one stream follow each other, so they share one. A call that a graph captures gets its
    own, as it may run beside anything: one that was made before, so that the graph need not write
    zeros ahead of each call, which would take 3 µs and keep it from starting early.
    """
    if torch._C._cuda_isCurrentStreamCapturing():
        _, left = _spares.get(device.index, (None, []))
        return left.pop() if left else torch.zeros(NUMBERS, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(NUMBERS, dtype=torch.int32, device=device)
        if device.index not in _spares:
            memory = torch.zeros(SPARE, NUMBERS, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # graphs run on any stream
            _spares[device.index] = memory, list(memory.unbind(0))
    return found
