"""Split KV: which share of the keys each program of attention over pages computes.

Work is counted in units. A *work tile* is one tile of query rows of one key head: a unit to set it
up, and one for each tile of keys that it visits. A *group* is some work tiles of equal units: all
of a sequence, or all heads of a tile of query rows. Laid end to end, work tiles make a line, which
programs cut into equal shares; or each work tile is cut at positions of its own. A program computes
its share split by split, a split being what lies in one work tile.

A split that is a whole work tile is written to the output. Others leave partial results. Where
there are few work tiles, merging programs find each one's by themselves; where there
are many, notes tell them which belong together. Where the line is cut into P shares there are at
most two partial results a program, however many sequences there are, in memory at position

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

    begin: Any  # equal_shares or fixed_splits: where a program starts
    cut: Any  # split_of_programs or split_of_work_tile: how a work tile was cut
    count: Any  # count_lengths or count_planned: units and work tiles of groups
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


# ---- groups: (schedule, query, key, groups) → units of a work tile, number of work tiles ---------


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
    """A group is a row of a plan, whose units stand in front of its rows; 0: no such tile."""
    units = tl.load(schedule.data[PLAN] + groups)
    return tl.maximum(units, 1), tl.where(units > 0, schedule.data[HEADS], 0)


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


# ---- programs: → group, work tile in it, units before and to do, share; and whether the ---------
# ---- program is the first that goes on with a work tile of another one --------------------------


@triton.jit
def count_at_once(
    schedule, query, key, first,
    TOKENS: tl.constexpr, KV_TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Units of a work tile, and work tiles, of AT_ONCE groups: [AT_ONCE], or one number where
    there is but one group."""
    num_groups = schedule.data[GROUPS]
    if AT_ONCE == 1:
        units, work_tiles = schedule.count(schedule, query, key, first, TOKENS, KV_TILE)
    else:
        groups = first + tl.arange(0, AT_ONCE)
        units, work_tiles = schedule.count(
            schedule, query, key, tl.minimum(groups, num_groups - 1), TOKENS, KV_TILE
        )
        work_tiles = tl.where(groups < num_groups, work_tiles, 0)
    return units, work_tiles


@triton.jit
def units_of_groups(
    schedule, query, key, first,
    TOKENS: tl.constexpr, KV_TILE: tl.constexpr, AT_ONCE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Units of AT_ONCE groups."""
    units, work_tiles = count_at_once(schedule, query, key, first, TOKENS, KV_TILE, AT_ONCE)
    return wide(units) * work_tiles if LONG else units * work_tiles


@triton.jit
def parts_of(units, share):
    """In how many parts a work tile is cut that begins with a program: rounded up, and down. Each
    part sets itself up, so the first unit is not counted."""
    whole = (units - 1) // share
    more = whole + (whole * share < units - 1).to(tl.int32)
    return tl.maximum(more, 1), tl.maximum(whole, 1)


@triton.jit
def share_out(
    units, work_tiles, programs, LEAST: tl.constexpr, LONG: tl.constexpr, FEW: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """How all groups are shared out: the line as programs step along it, the share of each; whether
    work tiles begin with programs, their parts are then rounded up, and what a part has at the
    most.
    ONE: one group, whose numbers are no vectors."""
    line = wide(units) * work_tiles if LONG else units * work_tiles
    total = line if ONE else tl.sum(line, 0)
    share = tl.maximum(tl.cdiv(total, programs), LEAST)
    own, up, own_most = programs < 0, programs < 0, programs * 0 + 1
    if FEW and not LONG:
        visited = (units - 1) * work_tiles if ONE else tl.sum((units - 1) * work_tiles, 0)
        own_most = tl.maximum(tl.cdiv(visited, programs), LEAST)
        more, fewer = parts_of(units, own_most)
        used = more * work_tiles if ONE else tl.sum(more * work_tiles, 0)
        up = used <= programs
        parts = tl.where(up, more, fewer)
        used = parts * work_tiles
        longest = tl.where(work_tiles > 0, tl.cdiv(units - 1, parts), 0)
        if not ONE:
            longest, used = tl.max(longest, 0), tl.sum(used, 0)
        own = (used <= programs) & (longest <= own_most + own_most // 16)
        line = tl.where(own, parts * work_tiles, line)
    return line, share, own, up, own_most


@triton.jit
def own_parts(units, up, own_most):
    """Parts of a work tile that begins with a program, and units of each beside the first one."""
    more, fewer = parts_of(units, own_most)
    parts = tl.where(up, more, fewer)
    return parts, tl.maximum(tl.cdiv(units - 1, parts), 1)


@triton.jit
def equal_shares(
    schedule, query, key, program, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """The line of all work tiles, cut into as many equal shares as there are programs; a share has
    at least LEAST units. LONG: the line may have more units than 32 bits count.

    FEW: no more work tiles than programs. Then each begins with a program of its own, if no share
    gets longer by more than a sixteenth: a program that goes on to another work tile in the midst
    of a share waits for memory once more, when others are done. Programs do all
    this before they read any key, so it is kept short: fewer than MOST_AT_ONCE groups are counted
    once, and one needs no search.
    """
    num_groups, programs = schedule.data[GROUPS], schedule.data[PROGRAMS]
    none = wide(program) * 0 if LONG else program * 0
    own, up, own_most = program < 0, program < 0, program * 0 + 1
    if AT_ONCE < MOST_AT_ONCE:
        units, work_tiles = count_at_once(schedule, query, key, 0, TOKENS, KV_TILE, AT_ONCE)
        line, share, own, up, own_most = share_out(
            units, work_tiles, programs, LEAST, LONG, FEW, AT_ONCE == 1
        )
        start = tl.where(own, program, program * share)
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
            line = units_of_groups(schedule, query, key, first, TOKENS, KV_TILE, AT_ONCE, LONG)
            total += tl.sum(line, 0)
        share = tl.maximum(tl.cdiv(total, programs), LEAST)
        start, end = program * share, total
        group, before, reached_before = program * 0, none, none
        for first in range(0, num_groups, AT_ONCE):
            line = units_of_groups(schedule, query, key, first, TOKENS, KV_TILE, AT_ONCE, LONG)
            reached = reached_before + tl.cumsum(line, 0)
            ended = (reached <= start) & (first + tl.arange(0, AT_ONCE) < num_groups)
            group += tl.sum(ended.to(tl.int32), 0)
            before += tl.sum(tl.where(ended, line, 0), 0)
            reached_before += tl.sum(line, 0)
    group = tl.minimum(group, num_groups - 1)
    if AT_ONCE > 1:
        units, _ = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
    parts, own_share = own_parts(units, up, own_most)
    within = tl.where(start < end, start - before, 0)
    step = tl.where(own, parts, units)  # from work tile to work tile
    index = (within // step).to(tl.int32)
    offset = (within - index * step).to(tl.int32)
    goes_on = tl.where(own, offset == 1, (offset > 0) & (offset <= share))
    first = (offset == 0).to(tl.int32)
    offset = tl.where(own, offset * own_share + 1 - first, offset).to(tl.int32)
    left = tl.where(own, tl.minimum(own_share + first, units - offset), end - start)
    share = tl.where(own, own_share, share)
    budget = tl.where(start < end, tl.maximum(tl.where(own, left, tl.minimum(share, left)), 0), 0)
    return group, index, offset, budget, share, goes_on


@triton.jit
def fixed_splits(
    schedule, query, key, program, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Each work tile for itself, cut every LEAST units, or into SPLITS parts if those are longer:
    where depends on nothing but the work tile."""
    splits, heads = schedule.data[SPLITS_IN_GRID], schedule.data[HEADS]
    work_tile, cut = program // splits, program % splits
    group = work_tile // heads
    units, work_tiles = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
    share = tl.maximum(tl.cdiv(units, SPLITS), LEAST)
    offset = cut * share
    budget = tl.where(work_tiles > 0, tl.maximum(tl.minimum(share, units - offset), 0), 0)
    return group, work_tile % heads, offset, budget, share, cut == 1


# ---- splits -------------------------------------------------------------------------------------


@triton.jit
def part_of_range(tile_range, offset, end):
    """Full tiles and partial tiles between two units of a work tile: (first, end) of each.

    The first unit of a work tile sets it up; after it come the full tiles, then the partial tiles.
    """
    first, last = tl.maximum(offset - 1, 0), tl.maximum(end - 1, 0)
    full_first, full_end = (
        tl.minimum(first, tile_range.num_full),
        tl.minimum(last, tile_range.num_full),
    )
    return full_first, full_end, first - full_first, last - full_end


@triton.jit
def note_of_program(schedule, notes, program, group, index, offset, budget, share, goes_on, units):
    """Tell the merging kernel that a work tile was cut, once: by the program that goes on with it
    first. notes [programs, NOTE_SIZE]."""
    note = notes + program * NOTE_SIZE
    tl.store(note, tl.where(goes_on & (budget > 0), 1 + tl.cdiv(units - offset, share), 0))
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
    """By `equal_shares` of a line of few work tiles."""
    programs = schedule.data[PROGRAMS]
    all_units, all_work_tiles = count_at_once(schedule, query, key, 0, TOKENS, KV_TILE, AT_ONCE)
    line, share, own, up, own_most = share_out(
        all_units, all_work_tiles, programs, LEAST, LONG, True, AT_ONCE == 1
    )
    if AT_ONCE == 1:
        units, work_tiles, before = all_units, all_work_tiles, line * 0
    else:
        units, work_tiles = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
        before = tl.sum(tl.where(tl.arange(0, AT_ONCE) < group, line, 0), 0)
    parts, own_share = own_parts(units, up, own_most)
    start = before + index * tl.where(own, parts, units)
    first = tl.where(own, start, start // share)
    begun = tl.where(own, own_share + 1, (first + 1) * share - start)  # by the first program
    share = tl.where(own, own_share, share)
    parts = tl.where(begun < units, 1 + tl.cdiv(units - begun, share), 0)
    return tl.where(index < work_tiles, parts, 0).to(tl.int32), first.to(tl.int32)


@triton.jit
def split_of_work_tile(
    schedule, query, key, group, index, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """By `fixed_splits`."""
    splits, heads = schedule.data[SPLITS_IN_GRID], schedule.data[HEADS]
    units, work_tiles = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
    parts = tl.cdiv(units, tl.maximum(tl.cdiv(units, SPLITS), LEAST))
    return tl.where((work_tiles > 0) & (parts > 1), parts, 0), (group * heads + index) * splits


# ---- plan ----------------------------------------------------------------------------------------
# The tile range of each tile of query rows under a mask, in units of work.


@triton.jit(do_not_specialize=["mask"])
def plan_pages(
    rows, key, mask, schedule, plan,
    TOKENS: tl.constexpr, TOKEN_TILE: tl.constexpr, KV_TILE: tl.constexpr,
    GROUP: tl.constexpr, HEADS_IN_TILE: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: one row of the plan (split_kv.py), and its units in front of all rows.

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
    units = tl.where(exists, 1 + tile_range.num_partial + tile_range.num_full, 0)
    tl.store(plan + group, units)
    row = plan + schedule.data[GROUPS] + wide(group) * PLAN_ROW
    for number in tl.static_range(TILE_RANGE_SIZE):
        tl.store(row + number, tile_range[number])
    tl.store(row + TILE_RANGE_SIZE, batch)
    tl.store(row + TILE_RANGE_SIZE + 1, head)
    tl.store(row + TILE_RANGE_SIZE + 2, tile)
