"""Linear attention on Hopper: which heads, channels and rows a program works on, and its states.

A program has two *blocks* of 64 channels of values, one for each of its consumers. BLOCKS says how
many blocks of keys' channels a head has:

    1   two heads of up to 64 channels, one for each consumer
    2   one head of up to 128 channels of keys, and 128 channels of its values (a tile)

Queries and keys are numbered by position, as in `saccade.ops.linear_attention.triton.chunk_state`.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu.hopper.pipeline import Box, descriptor
from saccade.gpu.language import gl, gluon
from saccade.gpu.tensor_view import wide
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.attention.hopper.softmax import ROWS
from saccade.ops.linear_attention.triton.passes import SHORTEST_SEGMENT, LinearCallSpec

BLOCK_CHANNELS = 64  # that a product has at once; a chunk has as many rows


# ---- kinds ---------------------------------------------------------------------------------------
# Kinds of rows, of numbers beside them, and of sweeps.

# What a stage holds two tiles of: the first two where queries are collected, the first four for
# gradients of keys and values, all for those of queries.
QUERIES, GRADS = gl.constexpr(0), gl.constexpr(1)  # of the output
KEYS, VALUES, OUTPUTS = gl.constexpr(2), gl.constexpr(3), gl.constexpr(4)
# Kinds of numbers beside them: 64 each.
SUM = gl.constexpr(0)  # of features, over the chunks that were visited before
MINUS_DELTA, FACTOR = gl.constexpr(1), gl.constexpr(2)  # of each query
ACROSS, LINE = gl.constexpr(3), gl.constexpr(4)  # of each key, and channel: see features.py

ONES = gl.constexpr(5)  # of each query: the factor of what was taken from its features


@gluon.constexpr_function
def is_balanced(feature_map, normalize):
    """Whether gradients of queries may be found from features of keys less 1."""
    return feature_map == "elu+1" and normalize == "sum"


BLOCK = gl.constexpr(BLOCK_CHANNELS)


class LinearSizes(NamedTuple):
    """The sizes of a call."""

    query_len: int
    kv_len: int
    heads: int  # of the output, or of the state where nothing else is wanted
    batches: int


class Kept(NamedTuple):
    """Numbers in memory beside the rows."""

    normaliser: Any  # float32 [batch, heads, query_len]: sums of scores; None: not wanted
    lengths: Any  # int64 [batch]: how many keys are there; None: all
    nonfinite: Any  # int32 [batch, heads, SEGMENTS, blocks of values]: whether NaN or inf got in


@gluon.jit
def head_of(
    sizes, WHICH: gl.constexpr, BLOCKS: gl.constexpr, TILES: gl.constexpr, SEGMENTS: gl.constexpr
):  # fmt: skip
    """Batch entry and head of a consumer. The last program may have a head too many: then the
    batch entry is past the end, where TMA finds zeros and writes nothing."""
    head_index = gl.program_id(0) // (SEGMENTS * TILES)
    if BLOCKS == 1:
        head_index = 2 * head_index + WHICH
    heads = sizes.heads
    return head_index // heads, head_index % heads


@gluon.jit
def tile_of_values(TILES: gl.constexpr, SEGMENTS: gl.constexpr):
    """Which 128 channels of values a program has."""
    tile = gl.program_id(0) * 0
    if TILES > 1:
        tile = gl.program_id(0) // SEGMENTS % TILES
    return tile


@gluon.jit
def channel_of(
    WHICH: gl.constexpr, BLOCKS: gl.constexpr, TILES: gl.constexpr, SEGMENTS: gl.constexpr
):  # fmt: skip
    """The first channel of values of a consumer."""
    channel = tile_of_values(TILES, SEGMENTS) * (2 * BLOCK)
    if BLOCKS == 2:
        channel += WHICH * BLOCK
    return channel


@gluon.jit
def chunks_of(
    sizes, SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, KEYS: gl.constexpr = False
):  # fmt: skip
    """The first position of this program's segment, how many chunks it has, and the first query's.

    Chunks begin where the first row of the result does, which is a query's, or one of KEYS, or a
    multiple of 64 before: what TMA writes to must not begin before a tensor. A segment without any
    has one past the end.
    """
    query_len, kv_len = sizes.query_len, sizes.kv_len
    shift = 0 * kv_len
    if BOTTOM_RIGHT:
        shift = kv_len - query_len
    if KEYS:
        first = 0 - (gl.maximum(-shift, 0) + ROWS - 1) // ROWS * ROWS
    else:
        first = shift - (gl.maximum(shift, 0) + ROWS - 1) // ROWS * ROWS
    positions = gl.maximum(query_len + shift, kv_len) - first
    chunks = (positions + ROWS - 1) // ROWS
    of_segment = (chunks + SEGMENTS - 1) // SEGMENTS
    done = gl.program_id(0) % SEGMENTS * of_segment
    return first + done * ROWS, gl.maximum(gl.minimum(chunks - done, of_segment), 1), shift


@gluon.jit
def keys_there(kept, sizes, batch):
    """How many keys of a batch entry are there to be seen."""
    count = sizes.kv_len
    if kept.lengths is not None:
        last = sizes.batches - 1
        found = gl.load(kept.lengths + gl.minimum(batch, last))
        count = gl.minimum(count, found.to(gl.int32))
    return count


# ---- states in memory --------------------------------------------------------------------------


@gluon.jit
def state_number(
    sizes, batch, head, GROUP: gl.constexpr, SEGMENTS: gl.constexpr
):  # fmt: skip
    """Which state in memory a head's segment starts from."""
    of_head = batch * (sizes.heads // GROUP) + head // GROUP
    return wide(of_head) * SEGMENTS + gl.program_id(0) % SEGMENTS


@gluon.jit
def sums_at(
    number, exists, block, channel, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Where 64 channels of keys times 64 of values are, in elements, and what of them exists; if
    TRANSPOSED, the block is one of values, and the channels are those of keys."""
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    keys = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
    values = channel + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))[None, :]
    if TRANSPOSED:
        keys, values = values, keys
    inside = (keys < HEAD_DIM) & (values < VALUE_DIM) & exists
    return number * (HEAD_DIM * VALUE_DIM) + (keys * VALUE_DIM + values), inside


@gluon.jit
def start_sums(
    before, number, exists, channel, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    BLOCKS: gl.constexpr, TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """Sums to add to: of nothing, or those that lie in memory."""
    sums = ()
    for block in gl.static_range(BLOCKS):
        if before is None:
            part = gl.zeros([BLOCK, BLOCK], gl.float32, mma_layout(BLOCK))
        else:
            position, inside = sums_at(
                number, exists, block, channel, HEAD_DIM, VALUE_DIM, TRANSPOSED
            )  # fmt: skip
            part = gl.load(before.matrix + position, mask=inside, other=0.0)
        sums = sums + (part,)  # noqa: RUF005
    return sums


@gluon.jit
def keep_sums(
    after, sums, number, writes, channel, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """Write sums, if they are this partition's to write."""
    for block in gl.static_range(len(sums)):
        position, inside = sums_at(number, writes, block, channel, HEAD_DIM, VALUE_DIM, TRANSPOSED)
        gl.store(after.matrix + position, sums[block], mask=inside)


@gluon.jit
def holds_nonfinite(tile):
    """Whether a tile holds NaN or inf anywhere, as one truth for the whole consumer."""
    return gl.max((gl.sum(tile * 0.0, 1) != 0.0).to(gl.int32), 0) > 0


@gluon.jit
def keep_nonfinite(
    nonfinite, sums, sizes, batch, head, exists, BLOCKS: gl.constexpr, TILES: gl.constexpr,
    SEGMENTS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Say whether NaN or inf got into the sums: rows before it may have it too (0 · NaN is NaN)."""
    found = holds_nonfinite(sums[0])
    for block in gl.static_range(1, len(sums)):
        found = found | holds_nonfinite(sums[block])
    segment = (batch * sizes.heads + head) * SEGMENTS + gl.program_id(0) % SEGMENTS
    if BLOCKS == 2:
        segment = segment * (2 * TILES) + 2 * tile_of_values(TILES, SEGMENTS) + WHICH
    gl.store(nonfinite + segment, found.to(gl.int32), mask=exists)


# ---- splitting a call --------------------------------------------------------------------------


WIDE = 4  # blocks of keys' channels that scan_d256.py has, however many exist


class HeadSplit(NamedTuple):
    """How a call is split into programs; see program.py, and scan_d256.py for WIDE."""

    blocks: int
    tiles: int  # of 128 channels of values
    segments: int

    @staticmethod
    def of(spec: LinearCallSpec) -> HeadSplit:
        """The split of a call. One program runs on a multiprocessor; few of them are cut along
        the length."""
        whole = HeadSplit.whole(spec)
        return whole if unlike_triton(spec, False) else whole.cut(spec)

    @staticmethod
    def whole(spec: LinearCallSpec) -> HeadSplit:
        """The split of a call with nothing cut along the length."""
        blocks = 1 if max(spec.head_dim, spec.value_dim) <= BLOCK_CHANNELS else 2
        blocks = WIDE if spec.head_dim > 2 * BLOCK_CHANNELS else blocks
        tiles = 1 if blocks == 1 else -(-spec.value_dim // (2 * BLOCK_CHANNELS))
        return HeadSplit(blocks, tiles, 1)

    def cut(self, spec: LinearCallSpec) -> HeadSplit:
        """This split, in as many segments as keep the GPU busy."""
        wanted = spec.multiprocessors // max(self.programs(spec, spec.heads), 1)
        return self._replace(segments=max(min(wanted, spec.positions // SHORTEST_SEGMENT), 1))

    def programs(self, spec: LinearCallSpec, heads: int) -> int:
        """How many programs so many heads take."""
        head_indices = spec.sequences * heads
        head_indices = -(-head_indices // 2) if self.blocks == 1 else head_indices
        return head_indices * self.tiles * self.segments

    def constants(self, spec: LinearCallSpec) -> dict[str, Any]:
        """What every kernel of a call is compiled for."""
        return {
            "HEAD_DIM": spec.head_dim,
            "VALUE_DIM": spec.value_dim,
            "BLOCKS": self.blocks,
            "TILES": self.tiles,
            "SEGMENTS": self.segments,
            "BOTTOM_RIGHT": spec.bottom_right,
            "FEATURE_MAP": spec.variant.feature_map,
        }

    @property
    def parts(self) -> int:
        """Blocks of values' channels in a head."""
        return 1 if self.blocks == 1 else 2 * self.tiles


def unlike_triton(spec: LinearCallSpec, keys: bool) -> bool:
    """Whether chunks that begin where the queries do, or keys, are not those of Triton kernels,
    which begin with the first row of either side."""
    shift = spec.kv_len - spec.query_len if spec.bottom_right else 0
    return (-shift if keys else shift) > 0 and shift % BLOCK_CHANNELS > 0


def moved(tensors: tuple[Tensor, ...]) -> Iterator[Any]:
    """Tensors as TMA moves them, a block at a time."""
    for tensor in tensors:
        yield descriptor(tensor, Box.of(tensor, False, BLOCK_CHANNELS, BLOCK_CHANNELS))


def sizes(spec: LinearCallSpec, heads: int) -> LinearSizes:
    """The sizes of a call, for programs of so many heads."""
    return LinearSizes(spec.query_len, spec.kv_len, heads, spec.sequences)
