"""The gated delta rule on Hopper, shared memory: what loads, solves and scans hand to one another.

A stage of rows is a chunk of 64: keys and queries whole, values in two tiles of 64 channels, one
for each scan, and what each row is multiplied by. A stage of what is solved is the inverse of its
system, and its weights.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

# Without `from __future__ import annotations`: aggregates read theirs as types.

from saccade.gpu.hopper.pipeline import Ring, in_stages, make_ring_in, settle
from saccade.gpu.language import aggregate, gl, gluon
from saccade.gpu.tensor_view import num_rows, packed_origin

ROWS = gl.constexpr(64)  # of a chunk
BLOCK = gl.constexpr(64)  # channels of values that a scan has
WIDTH = gl.constexpr(128)  # channels of keys, whether they exist or not
HALF = gl.constexpr(64)  # of them
SCANS = gl.constexpr(2)

# Numbers of each row of a chunk. G are sums of decay, in powers of 2.
BETA = gl.constexpr(0)
HIGH = gl.constexpr(1)  # G in two parts
LOW = gl.constexpr(2)
ACROSS = gl.constexpr(3)  # the second part of G, less the logarithm of 1 / length of the key
PAIRED = gl.constexpr(4)  # −beta / length of the key
SCORED = gl.constexpr(5)  # scale / length of the query
ASKED = gl.constexpr(6)  # 2^G / length of the key (in `chunk_rows.Meeting` times beta)
ASKING = gl.constexpr(7)  # scale · 2^G / length of the query
KEPT = gl.constexpr(8)  # 2^(G_last − G) / length of the key
LEFT = gl.constexpr(9)  # 2^G_last, as often as there are rows
NUMBERS = gl.constexpr(10)


@aggregate
class DeltaRings:
    """All that the roles of a program share. Keys are released with queries, values and numbers.
    Outputs take the place of values."""

    keys: Ring
    queries: Ring
    values: Ring
    numbers: Ring  # NUMBERS of each row
    solved: Ring
    weights: gl.shared_memory_descriptor  # [stages of what is solved, rows, rows]
    parts: gl.shared_memory_descriptor  # four squares that a solver multiplies with
    kept: gl.shared_memory_descriptor  # half of a state of each scan, where they are kept

    @gluon.constexpr_function
    def __init__(self, keys, queries, values, numbers, solved, weights, parts, kept):
        self.keys = keys
        self.queries = queries
        self.values = values
        self.numbers = numbers
        self.solved = solved
        self.weights = weights
        self.parts = parts
        self.kept = kept

    @gluon.jit
    def weights_of(self, chunk):
        """What queries of a chunk weigh."""
        STAGES: gl.constexpr = self.weights.shape[0]
        return self.weights.index(self.solved.stage(chunk) if STAGES > 1 else 0)

    @gluon.jit
    def down(self, chunk, which, SQUARE: gl.constexpr):
        """Numbers of the rows of a chunk, a column."""
        return self.numbers.tile_of(chunk, which).load(gl.SliceLayout(1, SQUARE))[:, None]

    @gluon.jit
    def across(self, chunk, which, SQUARE: gl.constexpr):
        """Numbers of the rows of a chunk, a row."""
        return self.numbers.tile_of(chunk, which).load(gl.SliceLayout(0, SQUARE))[None, :]


@gluon.jit
def make_delta_rings(
    dtype: gl.constexpr, STAGES: gl.constexpr, SOLVED: gl.constexpr, KEEPS: gl.constexpr
):  # fmt: skip
    """Shared memory of a program; so many stages of rows, and of what is solved; and for states, if
    it KEEPS them."""
    WHOLE: gl.constexpr = [ROWS, WIDTH]
    TILE: gl.constexpr = [ROWS, BLOCK]
    OF_WHOLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for(WHOLE, dtype)
    OF_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = make_ring_in(dtype, in_stages(STAGES, WHOLE), OF_WHOLE, STAGES, SCANS + 1, 1)
    queries = make_ring_in(dtype, in_stages(STAGES, WHOLE), OF_WHOLE, STAGES, 0, 1)
    values = make_ring_in(dtype, in_stages(SCANS * STAGES, TILE), OF_TILE, STAGES, 0, 1)
    numbers = make_ring_in(gl.float32, [NUMBERS * STAGES, ROWS], PLAIN, STAGES, 0, 1)
    solved = make_ring_in(dtype, in_stages(SOLVED, TILE), OF_TILE, SOLVED, SCANS, 1)
    # Weights that are kept go to memory, and only their solver has them.
    weights = gl.allocate_shared_memory(dtype, in_stages(1 if KEEPS else SOLVED, TILE), OF_TILE)
    parts = gl.allocate_shared_memory(dtype, in_stages(4, TILE), OF_TILE)
    kept = parts
    if KEEPS:
        kept = gl.allocate_shared_memory(dtype, in_stages(SCANS, TILE), OF_TILE)
    settle()
    return DeltaRings(keys, queries, values, numbers, solved, weights, parts, kept)


@gluon.jit
def place_of(view, HEADS: gl.constexpr, PACKED: gl.constexpr):
    """A program's sequence and head, how many rows it has, and where they begin for TMA: batch
    entry and row."""
    batch, head = gl.program_id(0) // HEADS, gl.program_id(0) % HEADS
    length = num_rows(view, batch)
    entry, row = batch, batch * 0
    if PACKED:
        entry, row = packed_origin(batch, view.data)
    return batch, head, length, entry, row
