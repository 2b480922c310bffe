"""Split KV: which of the keys each program of attention over pages computes.

Work is counted in steps. A *work tile* is one tile of query rows of one key head: a step to set it
up, and one for each tile of keys that it visits. A *group* is some work tiles of equally many
steps: all of a sequence, or all heads of a tile of query rows. Laid end to end, work tiles make a
line, which is cut into equal *payloads*, one for each program; or each work tile is cut at
positions of its own. A program computes its payload split by split, a *split* being what lies in
one work tile.

A split that is a whole work tile is written to the output. Others leave partial results. Where
there are few work tiles, merging programs find each one's by themselves; where there
are many, notes tell them which belong together. Where the line is cut into P payloads there are
at most two partial results a program, however many sequences there are, in memory at position

    P + m: of the work tile that program m began and did not end
    m: of the work tile that program m went on with

Where work tiles are cut on their own, a program has one split, whose position is m.

Nothing here is read by the host. Source: the equal payloads of FlashMLA's and stream-K's schedules
(Osama et al. 2023, section 4), with a sequence's keys in place of a matrix's depth.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.language import gdc_launch_dependents, tl, triton
from saccade.gpu.tensor_view import num_rows, wide
from saccade.gpu.tile_ranges import TILE_RANGE_SIZE, everything, find_tile_range, load_tile_range

PLAN_ROW = tl.constexpr(9)  # numbers in a row of a plan: a tile range, then batch, head and tile
# Numbers in a program's note: partial results of the work tile that it goes on with, group, work
# tile in it.
NOTE_SIZE = tl.constexpr(3)


class SplitSchedule(NamedTuple):
    """How a call's work is shared out."""

    begin: Any  # equal_payloads or fixed_splits: where a program starts
    cut: Any  # split_of_programs or split_of_work_tile: how a work tile was cut
    count: Any  # count_lengths or count_planned: steps and work tiles of groups
    # work_tile_of_lengths or work_tile_of_plan: what a work tile works on, and its tile range
    work_tile: Any
    data: tuple[Any, ...]  # numbers, in the order below; then the plan, if there is one


MOST_AT_ONCE = tl.constexpr(1024)  # groups that a program counts together

GROUPS = tl.constexpr(0)  # how many there are
HEADS = tl.constexpr(1)  # tiles beside each other: key heads, if one tile holds a group's heads
PROGRAMS = tl.constexpr(2)
SPLITS_IN_GRID = tl.constexpr(3)  # programs of a work tile, where work tiles are cut on their own
BEGUN = tl.constexpr(4)  # position of program 0's work tile that was begun and not ended
FEWEST = tl.constexpr(5)  # sequences with more query rows than that are worked on,
MOST = tl.constexpr(6)  # and at most as many as that
PLAN = tl.constexpr(7)


@triton.jit
def is_wanted(schedule, tokens):
    """Whether a sequence of so many query rows is one of those that a launch is for."""
    return (tokens > schedule.data[FEWEST]) & (tokens <= schedule.data[MOST])


# ---- groups: (schedule, query, key, groups) → steps of a work tile, number of work tiles ---------


@triton.jit
def count_lengths(
    schedule, query, key, groups, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    """A group is a sequence, if it is one of those that this launch is for."""
    tokens, kv_len = num_rows(query, groups), num_rows(key, groups)
    work_tiles = tl.cdiv(tokens, TOKENS) * schedule.data[HEADS]
    return tl.cdiv(kv_len, KV_TILE) + 1, tl.where(is_wanted(schedule, tokens), work_tiles, 0)


@triton.jit
def count_planned(
    schedule, query, key, groups, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    """A group is a row of a plan, whose steps stand in front of its rows; 0: no such tile."""
    steps = tl.load(schedule.data[PLAN] + groups)
    return tl.maximum(steps, 1), tl.where(steps > 0, schedule.data[HEADS], 0)


# ---- work tiles: (schedule, query, key, group, index) → batch, head, tile, kv_len, tile range ----


@triton.jit
def work_tile_of_lengths(
    schedule, query, key, group, index, TOKENS: tl.constexpr, KV_TILE: tl.constexpr
):
    """All tiles of a head stand side by side, as they read the same keys."""
    tiles = tl.maximum(tl.cdiv(num_rows(query, group), TOKENS), 1)
    head = index // tiles
    lengths = (num_rows(query, group), num_rows(key, group))
    tile_range = everything(None, group, head, 0, 0, lengths, TOKENS, KV_TILE, True)
    return group, head, index - head * tiles, tile_range


@triton.jit
def work_tile_of_plan(
    schedule, query, key, group, index, TOKENS: tl.constexpr, KV_TILE: tl.constexpr
):
    """What the plan says of its row."""
    row = schedule.data[PLAN] + schedule.data[GROUPS] + wide(group) * PLAN_ROW
    position = row + TILE_RANGE_SIZE
    batch, head, tile = tl.load(position), tl.load(position + 1), tl.load(position + 2)
    tile_range = load_tile_range(row)
    return batch, head + index, tile, tile_range


# ---- programs: → group, work tile in it, steps before and to do, payload; and whether the -------
# ---- program is the first that goes on with a work tile of another one --------------------------


@triton.jit
def count_at_once(
    schedule, query, key, first,
    TOKENS: tl.constexpr, KV_TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Steps of a work tile, and work tiles, of AT_ONCE groups: [AT_ONCE], or one number where
    there is but one group."""
    num_groups = schedule.data[GROUPS]
    if AT_ONCE == 1:
        steps, work_tiles = schedule.count(schedule, query, key, first, TOKENS, KV_TILE)
    else:
        groups = first + tl.arange(0, AT_ONCE)
        steps, work_tiles = schedule.count(
            schedule, query, key, tl.minimum(groups, num_groups - 1), TOKENS, KV_TILE
        )
        work_tiles = tl.where(groups < num_groups, work_tiles, 0)
    return steps, work_tiles


@triton.jit
def steps_of_groups(
    schedule, query, key, first,
    TOKENS: tl.constexpr, KV_TILE: tl.constexpr, AT_ONCE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Steps of AT_ONCE groups."""
    steps, work_tiles = count_at_once(schedule, query, key, first, TOKENS, KV_TILE, AT_ONCE)
    return wide(steps) * work_tiles if LONG else steps * work_tiles


@triton.jit
def parts_of(steps, payload):
    """In how many parts a work tile is cut that begins with a program: rounded up, and down. Each
    part sets itself up, so the first step is not counted."""
    rounded_down = (steps - 1) // payload
    more = rounded_down + (rounded_down * payload < steps - 1).to(tl.int32)
    return tl.maximum(more, 1), tl.maximum(rounded_down, 1)


@triton.jit
def plan_line(
    steps, work_tiles, programs, LEAST: tl.constexpr, LONG: tl.constexpr, FEW: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """How all groups are cut: the line as programs go along it, the payload of each; whether work
    tiles begin with programs, their parts are then rounded up, and what a part has at the most.
    ONE: one group, whose numbers are no vectors."""
    line = wide(steps) * work_tiles if LONG else steps * work_tiles
    total = line if ONE else tl.sum(line, 0)
    payload = tl.maximum(tl.cdiv(total, programs), LEAST)
    aligned, up, largest_part = programs < 0, programs < 0, programs * 0 + 1
    if FEW and not LONG:
        visited = (steps - 1) * work_tiles if ONE else tl.sum((steps - 1) * work_tiles, 0)
        largest_part = tl.maximum(tl.cdiv(visited, programs), LEAST)
        more, fewer = parts_of(steps, largest_part)
        used = more * work_tiles if ONE else tl.sum(more * work_tiles, 0)
        up = used <= programs
        parts = tl.where(up, more, fewer)
        used = parts * work_tiles
        longest = tl.where(work_tiles > 0, tl.cdiv(steps - 1, parts), 0)
        if not ONE:
            longest, used = tl.max(longest, 0), tl.sum(used, 0)
        aligned = (used <= programs) & (longest <= largest_part + largest_part // 16)
        line = tl.where(aligned, parts * work_tiles, line)
    return line, payload, aligned, up, largest_part


@triton.jit
def aligned_parts(steps, up, largest_part):
    """Parts of a work tile that begins with a program, and steps of each beside the first one."""
    more, fewer = parts_of(steps, largest_part)
    parts = tl.where(up, more, fewer)
    return parts, tl.maximum(tl.cdiv(steps - 1, parts), 1)


@triton.jit
def equal_payloads(
    schedule, query, key, program, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """The line of all work tiles, cut into as many equal payloads as there are programs; a payload
    has at least LEAST steps. LONG: the line may have more steps than 32 bits count.

    FEW: no more work tiles than programs. Then each begins with a program of its own, if no payload
    gets longer by more than a sixteenth: a program that goes on to another work tile in the midst
    of a payload waits for memory once more, when others are done. Programs do all
    this before they read any key, so it is kept short: fewer than MOST_AT_ONCE groups are counted
    once, and one needs no search.
    """
    num_groups, programs = schedule.data[GROUPS], schedule.data[PROGRAMS]
    none = wide(program) * 0 if LONG else program * 0
    aligned, up, largest_part = program < 0, program < 0, program * 0 + 1
    if AT_ONCE < MOST_AT_ONCE:
        steps, work_tiles = count_at_once(schedule, query, key, 0, TOKENS, KV_TILE, AT_ONCE)
        line, payload, aligned, up, largest_part = plan_line(
            steps, work_tiles, programs, LEAST, LONG, FEW, AT_ONCE == 1
        )
        start = tl.where(aligned, program, program * payload)
        group, before = program * 0, none
        end = line
        if AT_ONCE > 1:
            reached = tl.cumsum(line, 0)
            end = tl.max(reached, 0)
            ended = reached <= start  # groups that end at or before the start
            group = tl.sum((ended & (tl.arange(0, AT_ONCE) < num_groups)).to(tl.int32), 0)
            before = tl.max(tl.where(ended, reached, 0), 0)
    else:
        total = none
        for first in range(0, num_groups, AT_ONCE):
            line = steps_of_groups(schedule, query, key, first, TOKENS, KV_TILE, AT_ONCE, LONG)
            total += tl.sum(line, 0)
        payload = tl.maximum(tl.cdiv(total, programs), LEAST)
        start, end = program * payload, total
        group, before, reached_before = program * 0, none, none
        for first in range(0, num_groups, AT_ONCE):
            line = steps_of_groups(schedule, query, key, first, TOKENS, KV_TILE, AT_ONCE, LONG)
            reached = reached_before + tl.cumsum(line, 0)
            ended = (reached <= start) & (first + tl.arange(0, AT_ONCE) < num_groups)
            group += tl.sum(ended.to(tl.int32), 0)
            before += tl.sum(tl.where(ended, line, 0), 0)
            reached_before += tl.sum(line, 0)
    group = tl.minimum(group, num_groups - 1)
    if AT_ONCE > 1:
        steps, _ = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
    parts, length = aligned_parts(steps, up, largest_part)
    within = tl.where(start < end, start - before, 0)
    stride = tl.where(aligned, parts, steps)  # from work tile to work tile
    index = (within // stride).to(tl.int32)
    offset = (within - index * stride).to(tl.int32)
    goes_on = tl.where(aligned, offset == 1, (offset > 0) & (offset <= payload))
    first = (offset == 0).to(tl.int32)
    offset = tl.where(aligned, offset * length + 1 - first, offset).to(tl.int32)
    left = tl.where(aligned, tl.minimum(length + first, steps - offset), end - start)
    payload = tl.where(aligned, length, payload)
    budget = tl.where(
        start < end, tl.maximum(tl.where(aligned, left, tl.minimum(payload, left)), 0), 0
    )
    return group, index, offset, budget, payload, goes_on


@triton.jit
def fixed_splits(
    schedule, query, key, program, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Each work tile for itself, cut every LEAST steps, or into SPLITS parts if those are longer:
    where depends on nothing but the work tile."""
    splits, heads = schedule.data[SPLITS_IN_GRID], schedule.data[HEADS]
    work_tile, cut = program // splits, program % splits
    group = work_tile // heads
    steps, work_tiles = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
    payload = tl.maximum(tl.cdiv(steps, SPLITS), LEAST)
    offset = cut * payload
    budget = tl.where(work_tiles > 0, tl.maximum(tl.minimum(payload, steps - offset), 0), 0)
    return group, work_tile % heads, offset, budget, payload, cut == 1


# ---- splits -------------------------------------------------------------------------------------


@triton.jit
def part_of_range(tile_range, offset, end):
    """Full tiles and partial tiles between two steps of a work tile: (first, end) of each.

    The first step of a work tile sets it up; after it come the full tiles, then the partial tiles.
    """
    first, last = tl.maximum(offset - 1, 0), tl.maximum(end - 1, 0)
    full_first, full_end = (
        tl.minimum(first, tile_range.num_full),
        tl.minimum(last, tile_range.num_full),
    )
    return full_first, full_end, first - full_first, last - full_end


@triton.jit
def note_of_program(
    schedule, notes, program, group, index, offset, budget, payload, goes_on, steps
):
    """Tell the merging kernel that a work tile was cut, once: by the program that goes on with it
    first. notes [programs, NOTE_SIZE]."""
    note = notes + program * NOTE_SIZE
    tl.store(note, tl.where(goes_on & (budget > 0), 1 + tl.cdiv(steps - offset, payload), 0))
    tl.store(note + 1, group)
    tl.store(note + 2, index)


# ---- splits --------------------------------------------------------------------------------------
# Into how many parts a work tile of a schedule was cut, and which programs computed them.
#
# What `schedule.begin` answers for a program, these answer for a work tile. A program that merges
# asks before partial results are there, and need not be told by those that compute them.

# ---- work tiles: (schedule, query, key, group, index) → parts (0: not cut), first program ------


@triton.jit
def split_of_programs(
    schedule, query, key, group, index, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """By `equal_payloads` of a line of few work tiles."""
    programs = schedule.data[PROGRAMS]
    all_steps, all_work_tiles = count_at_once(schedule, query, key, 0, TOKENS, KV_TILE, AT_ONCE)
    line, payload, aligned, up, largest_part = plan_line(
        all_steps, all_work_tiles, programs, LEAST, LONG, True, AT_ONCE == 1
    )
    if AT_ONCE == 1:
        steps, work_tiles, before = all_steps, all_work_tiles, line * 0
    else:
        steps, work_tiles = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
        before = tl.sum(tl.where(tl.arange(0, AT_ONCE) < group, line, 0), 0)
    parts, length = aligned_parts(steps, up, largest_part)
    start = before + index * tl.where(aligned, parts, steps)
    first = tl.where(aligned, start, start // payload)
    begun = tl.where(aligned, length + 1, (first + 1) * payload - start)  # by the first program
    payload = tl.where(aligned, length, payload)
    parts = tl.where(begun < steps, 1 + tl.cdiv(steps - begun, payload), 0)
    return tl.where(index < work_tiles, parts, 0).to(tl.int32), first.to(tl.int32)


@triton.jit
def split_of_work_tile(
    schedule, query, key, group, index, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """By `fixed_splits`."""
    splits, heads = schedule.data[SPLITS_IN_GRID], schedule.data[HEADS]
    steps, work_tiles = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
    parts = tl.cdiv(steps, tl.maximum(tl.cdiv(steps, SPLITS), LEAST))
    return tl.where((work_tiles > 0) & (parts > 1), parts, 0), (group * heads + index) * splits


# ---- plan ----------------------------------------------------------------------------------------
# The tile range of each tile of query rows under a mask, and its steps.


@triton.jit(do_not_specialize=["mask"])
def plan_pages(
    rows, key, mask, schedule, plan,
    TOKENS: tl.constexpr, TOKEN_TILE: tl.constexpr, KV_TILE: tl.constexpr,
    GROUP: tl.constexpr, HEADS_IN_TILE: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: one row of the plan (split_kv.py), and its steps in front of all rows.

    rows: the query rows as a View of no memory, whose heads are those that the mask tells apart.
    HEADS: so many query heads share a tile and may see unlike things. CHAINED: the attention kernel
    is to start early, and waits for this one by itself.
    """
    if CHAINED:
        gdc_launch_dependents()
    group = tl.program_id(0)
    batch, head, tile, slot = rows.find(group, rows.data, TOKENS)
    query_len, kv_len = num_rows(rows, batch), num_rows(key, batch)
    start = tile * TOKENS
    exists = (start < query_len) & is_wanted(schedule, query_len)
    kv_len = tl.where(exists, kv_len, 0)
    lengths = (query_len, kv_len)
    if mask.classify is None:
        tile_range = everything(mask, batch, head, slot, start, lengths, TOKEN_TILE, KV_TILE, True)
    else:
        PARTS: tl.constexpr = (GROUP + HEADS_IN_TILE - 1) // HEADS_IN_TILE
        query_head = head // PARTS * GROUP + head % PARTS * HEADS_IN_TILE
        tile_range = find_tile_range(
            mask, batch, query_head, start, lengths, TOKEN_TILE, KV_TILE, True, AT_ONCE, HEADS
        )
    steps = tl.where(exists, 1 + tile_range.num_partial + tile_range.num_full, 0)
    tl.store(plan + group, steps)
    row = plan + schedule.data[GROUPS] + wide(group) * PLAN_ROW
    for number in tl.static_range(TILE_RANGE_SIZE):
        tl.store(row + number, tile_range[number])
    tl.store(row + TILE_RANGE_SIZE, batch)
    tl.store(row + TILE_RANGE_SIZE + 1, head)
    tl.store(row + TILE_RANGE_SIZE + 2, tile)
