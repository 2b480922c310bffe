"""Gradients on Hopper that add up over programs, and what goes before and after.

A backward pass is three kernels. `attention_backward_begin` gives each query row what the others
read, `attention_backward` (backward.py) adds, `attention_backward_end` makes gradients of the sums.
They share a scratch in memory, cut into slots of as many query rows of one head as `backward` takes
at once. No two sequences share a slot, so rows past an end do no harm.

In `backward`, each consumer multiplies half of a tile's partial sum, its *part*, and TMA adds it to
memory in float32. Without semaphores, parts are added as they come. With semaphores they are added
in the order of keys, from the last ones to the first, which gives equal bits each time:

    a part's semaphore   twice the number of the tile of keys that adds next, plus 1 while nothing
                         was added
    begin                sets it to the last tile of keys that may see the part's tile of queries
    add                  waits for it; the first one writes
    the next add         waits until the sum is in memory, and sets it to the tile of keys before

So the tiles of keys that add to a tile of queries must follow each other without a hole. Both sides
find them by the same classes of the mask; `modifiers/normal_form.py` says for which masks they do.

Programs that stand at the last keys that a tile of queries sees come first in the order of numbers,
and take a number only when they can begin, so a program waits only for programs that run. They
visit tiles of queries from the first to the last, and so behind each other: no wait is long.

Gradients of keys and values are sums over the query heads of a kv head, which one program visits
one after the other. Where that leaves multiprocessors without work, query heads are split over
several programs (`configs.backward_splits`): each writes its sums in float32, and
`attention_backward_add_splits` adds them in their order, which gives equal bits each time.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.hopper.pipeline import (
    add,
    count_at,
    here,
    store,
    wait_for_stores,
    wait_for_sums,
    warpgroup_mma,
)
from saccade.gpu.hopper.tile_scheduler import is_partial, tile_of
from saccade.gpu.language import gl, gluon, tl, triton
from saccade.gpu.tensor_view import (
    any_nonfinite,
    ascend,
    first_slot,
    load_numbers,
    num_rows,
    pad_rows,
    row_pointers,
    store_numbers,
)
from saccade.gpu.tile_ranges import first_and_end, is_partial_tile
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.attention.hopper.softmax import ROWS, as_matrix
from saccade.ops.attention.triton.backward_common import lse_of_weights, statistics_of

PARTS = tl.constexpr(2)  # of a slot's partial sum of the gradients of queries: one of each consumer
PART_ROWS = tl.constexpr(64)
NEVER = gl.constexpr(1 << 30)  # a tile of keys behind all others


class BackwardScratch(NamedTuple):
    """Where the kernels of one backward pass leave things for each other."""

    slot: Any  # dense_slot or packed_slot
    # of the gradients of queries: float32 in memory, by slot; None: there are none
    dq_accumulate: Any
    # int32 in memory: whether hidden rows may have made nonfinite something; None: they cannot
    flag: Any
    semaphores: Any = None  # int32 in memory, by part; None: parts are added in any order
    splits: Any = None  # programs that the query heads of a kv head are split over; None: one


@triton.jit
def dense_slot(batch, head, data, TILE: tl.constexpr):
    """The slot of a head's first tile of query rows."""
    return (batch * data[1] + head) * tl.cdiv(data[0], TILE)


@triton.jit
def packed_slot(batch, head, data, TILE: tl.constexpr):
    """The first slot of a head of a packed sequence; see `tensor_view.packed_program`."""
    slots = data[3] // TILE + data[1]
    return head * slots + first_slot(data, batch, TILE)


@triton.constexpr_function
def starts_of(changed):
    """How many numbers of each row lie in front of a slot: two, or three and one that fills up."""
    return 4 if changed else 2


@triton.jit
def first_semaphore(
    mask, batch, head, tile, lengths, QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr
):  # fmt: skip
    """What a semaphore begins with: the last tile of keys of which a tile of queries may see
    something, as `dq_accumulate.py` writes it down. lengths: of queries and keys."""
    tile_range = mask.tile_range(
        mask, batch, head, tile, tile * QUERY_TILE, lengths, QUERY_TILE, KV_TILE, True
    )  # fmt: skip
    _, end = first_and_end(tile_range)
    return (end - 1) * 2 + 1


@triton.jit
def from_the_end():
    """The program's number, counted from the last one: the backward kernel goes from the first head
    to the last, so what begins there was written last and lies in the L2, and the other way round.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit(do_not_specialize=["mask"])
def attention_backward_begin(
    output, residual, grad_output, logsumexp, grad_lse, row_lse, row_dot, lse_residual,  # Views
    key, mask, scratch, starts, factor,  # key and mask are None unless there are semaphores
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    """One program: one slot. Beside the two row statistics, for kernels that may have to repeat
    the work, it writes what sums of scores and of grad_weights start at: -lse · factor, -row_dot;
    and of scores that the caller changes, -lse_residual, which other ones do not have.

    A row that saw nothing starts at -inf, which makes all its weights 0. Shares of the gradients
    of queries are added to zeros, unless there are semaphores. Some of the Views may be None.
    """
    batch, head, tile, _ = output.find(from_the_end(), output.data, QUERY_TILE)
    slot = scratch.slot(batch, head, output.data, QUERY_TILE) + tile
    query_len = num_rows(output, batch)
    positions = tl.arange(0, QUERY_TILE)
    rows = tile * QUERY_TILE + positions
    lse, dot, saw_nothing = statistics_of(
        output, residual, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
        VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    if row_lse is not None:
        of_weights = lse_of_weights(lse, saw_nothing, lse_residual is not None)
        store_numbers(row_lse, batch, head, rows, query_len, of_weights)
        store_numbers(row_dot, batch, head, rows, query_len, dot)
    start = starts + slot * (starts_of(lse_residual is not None) * QUERY_TILE)
    tl.store(start + positions, tl.where(saw_nothing, float("-inf"), -lse * factor))
    tl.store(start + QUERY_TILE + positions, -dot)
    if lse_residual is not None:
        lost = load_numbers(lse_residual, batch, head, rows, query_len, 0.0)
        tl.store(start + 2 * QUERY_TILE + positions, -lost)
    if scratch.dq_accumulate is not None and scratch.semaphores is None:
        partial_dq = scratch.dq_accumulate + slot.to(tl.int64) * (QUERY_TILE * HEAD_WIDTH)
        numbers = tl.arange(0, QUERY_TILE * HEAD_WIDTH)
        tl.store(partial_dq + numbers, tl.zeros([QUERY_TILE * HEAD_WIDTH], tl.float32))
    if scratch.flag is not None:
        tl.store(scratch.flag, 0)
    if scratch.semaphores is not None:
        lengths = query_len, num_rows(key, batch)
        semaphore = first_semaphore(mask, batch, head, tile, lengths, QUERY_TILE, KV_TILE)
        parts = slot * PARTS + tl.arange(0, PARTS)
        tl.store(scratch.semaphores + parts, tl.zeros([PARTS], tl.int32) + semaphore)


# ---- adding, in `attention_backward` -------------------------------------------------------------


@gluon.jit
def multiply_grad_scores(rings, iteration, WHICH: gl.constexpr):
    """Start this consumer's half of grad_scores · keys: half of the rows, or of the channels."""
    rings.grad_scores.wait(iteration)
    grad_scores = rings.grad_scores.at(iteration)
    keys = as_matrix(rings.keys.memory.index(here(iteration - iteration)))
    if grad_scores.shape[1] > ROWS:
        grad_scores = grad_scores.slice(WHICH * ROWS, ROWS, dim=1)
        right = keys
    else:
        HALF: gl.constexpr = keys.shape[1] // 2
        right = keys.slice(WHICH * HALF, HALF, dim=1)
    WIDTH: gl.constexpr = right.shape[1]
    nothing = gl.zeros([ROWS, WIDTH], gl.float32, mma_layout(WIDTH))
    return warpgroup_mma(grad_scores.permute((1, 0)), right, nothing, use_acc=False, is_async=True)


@gluon.jit
def add_partial_dq(
    dq_desc, rings, rules, scratch, at, tile_range, index, partial_dq, semaphore, added, WHICH:
    gl.constexpr
):  # fmt: skip
    """Start to add a partial sum of the gradients of queries to memory, in key order if
    there are semaphores.

    In the order of registers, 16 bytes of each thread side by side, so that no two threads want
    the same bank of shared memory; `attention_backward_end` undoes that order.

    semaphore: as it was some time ago. added: the part that was added to before, whose semaphore is
    still to be set; the result is the one of this time.
    """
    memory = rings.dq_accumulate[WHICH]
    numbers = gl.reshape(partial_dq, [4, 2, 8, partial_dq.shape[1] // 8, 4, 2])
    numbers = gl.permute(numbers, [3, 0, 2, 4, 1, 5])
    if scratch.semaphores is None:
        wait_for_stores()
    else:
        advance_semaphore(rings, scratch, at[2], added)
    memory.store(gl.reshape(numbers, memory.shape))
    part = part_of(rules, scratch, at, tile_range, index, WHICH)
    if scratch.semaphores is None:
        add(dq_desc, [part * memory.shape[0], 0], memory)
    else:
        # A tile range of no tiles visits one and has nothing to add: it waits for nothing.
        first, end = first_and_end(tile_range)
        wanted = gl.where(first == end, NEVER, key_tile(rings, at[2]))
        while semaphore >> 1 > wanted:
            semaphore = count_at(scratch.semaphores + part)
        added = gl.where(semaphore >> 1 == wanted, part, -1)
        if semaphore >> 1 == wanted:
            if semaphore & 1 == 1:
                store(dq_desc, [part * memory.shape[0], 0], memory)
            else:
                add(dq_desc, [part * memory.shape[0], 0], memory)
    return added


@gluon.jit
def part_of(rules, scratch, at, tile_range, index, WHICH: gl.constexpr):
    """The part of the scratch that this consumer's partial sum of a tile of queries is added to."""
    return (at[5] + query_tile_of(rules, scratch, tile_range, index)) * 2 + WHICH


@gluon.jit
def query_tile_of(rules, scratch, tile_range, index):
    """The tile of queries that is visited as number `index`: in their order if there are
    semaphores."""
    if scratch.semaphores is None:
        tile = tile_of(rules, tile_range, index)
    else:
        first, end = first_and_end(tile_range)
        tile = gl.where(first == end, 0, first + index)  # see `tile_of`
    return tile


@gluon.jit
def may_hide(scratch, tile_range, index, tile):
    """Whether pairs of the tile that is visited as number `index` may be hidden."""
    if scratch.semaphores is None:
        partial = is_partial(tile_range, index)
    else:
        partial = is_partial_tile(tile_range, tile)
    return partial


@gluon.jit
def may_wait(query, key):
    """Whether programs may wait for each other: the tiles of a sequence do, and packed sequences
    share no tile if their offsets ascend. One warp finds it out."""
    sound = gl.program_id(0) >= 0
    if len(query.data) > 2:  # packed
        lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        sound = ascend(query.data, lanes) & ascend(key.data, lanes)
    return sound


@gluon.jit
def key_tile(rings, key_row):
    """The tile of keys that holds a row."""
    KV_TILE: gl.constexpr = rings.keys.memory.shape[3]
    return key_row // KV_TILE


@gluon.jit
def read_semaphore(rules, scratch, at, tile_range, index, WHICH: gl.constexpr):
    """Ask which tile of keys adds next to a tile of queries; long before it matters, as this takes
    long."""
    if scratch.semaphores is None:
        semaphore = 0
    else:
        semaphore = count_at(
            scratch.semaphores + part_of(rules, scratch, at, tile_range, index, WHICH)
        )
    return semaphore


@gluon.jit
def advance_semaphore(rings, scratch, key_row, added):
    """Say that what was added last is in memory; nothing is left to be said then."""
    wait_for_sums()
    if added >= 0:
        following = key_tile(rings, key_row) - 1
        gl.atomic_xchg(scratch.semaphores + added, following * 2, sem="relaxed")
    return -1


# ---- the sums as gradients -----------------------------------------------------------------------


@triton.jit
def attention_backward_end(
    grad_query, scratch, scale,
    HEAD_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr, QUERY_TILE: tl.constexpr,
    NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """One program: one slot. Sums of partial sums become gradients of queries."""
    WIDTH: tl.constexpr = QUERY_TILE * HEAD_WIDTH // (PARTS * PART_ROWS)  # of a part
    batch, head, tile, _ = grad_query.find(from_the_end(), grad_query.data, QUERY_TILE)
    slot = scratch.slot(batch, head, grad_query.data, QUERY_TILE) + tile
    query_len = num_rows(grad_query, batch)
    pad_rows(grad_query, 0.0, HEAD_DIM, HEAD_WIDTH)
    for part in tl.static_range(PARTS):
        numbers = tl.arange(0, PART_ROWS * WIDTH)
        position = (slot.to(tl.int64) * PARTS + part) * (PART_ROWS * WIDTH)
        if scratch.semaphores is None:
            partial_dq = tl.load(scratch.dq_accumulate + (position + numbers))
        else:  # the first part was written; where none was, memory holds anything
            written = tl.load(scratch.semaphores + slot * PARTS + part) & 1 == 0
            partial_dq = tl.load(
                scratch.dq_accumulate + (position + numbers), mask=written, other=0.0
            )
        # As registers lay: eight channels, warp, row, two of them, row + 8, channel.
        partial_dq = tl.reshape(partial_dq, [WIDTH // 8, 4, 8, 4, 2, 2])
        partial_dq = tl.reshape(tl.permute(partial_dq, [1, 4, 2, 0, 3, 5]), [PART_ROWS, WIDTH])
        if NAN_SAFE and any_nonfinite(partial_dq):
            tl.store(scratch.flag, 1)
        rows = tile * QUERY_TILE + tl.arange(0, PART_ROWS)
        channels = tl.arange(0, WIDTH)
        if QUERY_TILE > PART_ROWS:
            rows += part * PART_ROWS
        else:
            channels += part * WIDTH
        pointers = row_pointers(grad_query, batch, head, rows[:, None], channels[None, :])
        exists = (rows < query_len)[:, None] & (channels < HEAD_DIM)[None, :]
        tl.store(pointers, (partial_dq * scale).to(grad_query.ptr.dtype.element_ty), mask=exists)


# ---- gradients of keys and values whose query heads are split over programs ----------------------


@triton.jit
def attention_backward_add_splits(
    of_key, of_value, grad_key, grad_value, splits,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of rows of one kv head. of_key and of_value have a head for each part."""
    batch, head, tile, _ = grad_key.find(tl.program_id(0), grad_key.data, KV_TILE)
    length = num_rows(grad_key, batch)
    if tile * KV_TILE < length:  # packed sequences have slots without rows
        rows = tile * KV_TILE + tl.arange(0, KV_TILE)
        at = batch, head, rows, length
        sum_of_splits(of_key, grad_key, splits, at, HEAD_DIM, HEAD_WIDTH)
        sum_of_splits(of_value, grad_value, splits, at, VALUE_DIM, VALUE_WIDTH)
    pad_rows(grad_key, 0.0, HEAD_DIM, HEAD_WIDTH)
    pad_rows(grad_value, 0.0, VALUE_DIM, VALUE_WIDTH)


@triton.jit
def sum_of_splits(parts, gradient, splits, at, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Add the parts of these rows of a kv head, first to last, and write the gradient."""
    batch, head, rows, length = at
    rows, channels = rows[:, None], tl.arange(0, WIDTH)[None, :]
    exists = (rows < length) & (channels < DIM)
    total = tl.zeros([rows.shape[0], WIDTH], tl.float32)
    for part in range(0, splits):
        pointers = row_pointers(parts, batch, head * splits + part, rows, channels)
        total += tl.load(pointers, mask=exists, other=0.0)
    pointers = row_pointers(gradient, batch, head, rows, channels)
    tl.store(pointers, total.to(gradient.ptr.dtype.element_ty), mask=exists)
