"""The gated delta rule on Hopper, gradients of rows: shared memory, and which chunk is whose turn.

Each ring has one stage, which is refilled as soon as both consumers are done with it: rings are
many, so that a chunk's first tiles are on their way while its predecessor's last ones are in use.
"""

# Triton's language has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

# Without `from __future__ import annotations`: aggregates read theirs as types.

from saccade.gpu.hopper.pipeline import Ring, in_stages, make_ring_in, settle
from saccade.gpu.language import aggregate, gl, gluon
from saccade.gpu.tensor_view import num_rows, packed_origin
from saccade.ops.delta_rule.hopper.rings import BLOCK, ROWS, WIDTH

# Tiles of 64 channels; the other half of the channels comes next.
GRADS, UPDATES, SOLVED = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4)
STATE, GRAD_STATE = gl.constexpr(0), gl.constexpr(2)
KEYS, QUERIES = gl.constexpr(0), gl.constexpr(2)

# Of pairs, each of the two squares: as rows that ask take them, and as rows that are written do.
SCORES, PAIRS = gl.constexpr(0), gl.constexpr(2)
ASKED_FOR, WRITTEN = gl.constexpr(0), gl.constexpr(1)

# Numbers of each row. G are sums of decay, in powers of 2.
BETA = gl.constexpr(0)
HIGH = gl.constexpr(1)  # G in two parts
LOW = gl.constexpr(2)
OF_KEYS = gl.constexpr(3)  # 1 / length
OF_QUERIES = gl.constexpr(4)
SINCE = gl.constexpr(5)  # 2^G
UNTIL = gl.constexpr(6)  # 2^(G_last − G)
LEFT = gl.constexpr(7)  # 2^G_last, as often as there are rows
OF_COLUMNS = gl.constexpr(8)  # by which scores' columns are multiplied; next come those of pairs
OF_ROWS = gl.constexpr(10)  # likewise their rows, as those that are written take them
NUMBERS = gl.constexpr(12)

OF_BETA, CROSSING, ENDED, SUMS = (gl.constexpr(each) for each in range(4))  # of each row


@aggregate
class GradientRings:
    """All that the roles of a program share."""

    rows: Ring  # gradients of outputs, updates and `solved`
    values: Ring  # whose gradients take their place
    states: Ring
    keys: Ring  # and queries; gradients of keys take the place of keys
    pairs: Ring  # from each consumer to both
    alone: gl.shared_memory_descriptor  # with pairs: gradients of pairs of a row with itself
    results: gl.shared_memory_descriptor  # gradients of queries, a tile of each consumer
    numbers: Ring  # NUMBERS of each row
    sums: Ring  # SUMS of each row from each consumer

    @gluon.constexpr_function
    def __init__(self, rows, values, states, keys, pairs, alone, results, numbers, sums):
        self.rows = rows
        self.values = values
        self.states = states
        self.keys = keys
        self.pairs = pairs
        self.alone = alone
        self.results = results
        self.numbers = numbers
        self.sums = sums

    @gluon.jit
    def down(self, turn, which, SQUARE: gl.constexpr):
        """Numbers of the rows of a chunk, a column."""
        return self.numbers.tile_of(turn, which).load(gl.SliceLayout(1, SQUARE))[:, None]

    @gluon.jit
    def across(self, turn, which, SQUARE: gl.constexpr):
        """Numbers of the rows of a chunk, a row."""
        return self.numbers.tile_of(turn, which).load(gl.SliceLayout(0, SQUARE))[None, :]


@gluon.jit
def make_gradient_rings(dtype: gl.constexpr):
    """Shared memory of a program."""
    TILE: gl.constexpr = [ROWS, BLOCK]
    OF_STATE: gl.constexpr = [WIDTH, BLOCK]
    OF_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, dtype)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(OF_STATE, dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = make_ring_in(dtype, in_stages(6, TILE), OF_TILE, 1, 2, 1)
    values = make_ring_in(dtype, in_stages(2, TILE), OF_TILE, 1, 2, 1)
    states = make_ring_in(dtype, in_stages(4, OF_STATE), LAYOUT, 1, 2, 1)
    keys = make_ring_in(dtype, in_stages(4, TILE), OF_TILE, 1, 2, 1)
    pairs = make_ring_in(dtype, in_stages(4, TILE), OF_TILE, 1, 2, 2)
    alone = gl.allocate_shared_memory(gl.float32, [ROWS], PLAIN)
    results = gl.allocate_shared_memory(dtype, in_stages(2, TILE), OF_TILE)
    numbers = make_ring_in(gl.float32, [2 * NUMBERS, ROWS], PLAIN, 2, 2, 1)
    sums = make_ring_in(gl.float32, [4 * SUMS, ROWS], PLAIN, 2, 1, 2)
    settle()
    return GradientRings(rows, values, states, keys, pairs, alone, results, numbers, sums)


@gluon.jit
def chunk_at(view, number):
    """Which chunk has a number: sequence, head, first row, and how many rows the sequence has."""
    batch, head, chunk, _ = view.find(number, view.data, ROWS)
    return batch, head, chunk * ROWS, num_rows(view, batch)


@gluon.jit
def origin_of(view, at, PACKED: gl.constexpr):
    """Where a chunk begins for TMA: batch entry and row."""
    entry, row = at[0], at[2]
    if PACKED:
        entry, first = packed_origin(at[0], view.data)
        row += first
    return entry, row
