"""Shared memory: the rings of each kernel, which a producer fills and consumers empty.

How a ring is filled and waited for is in gpu/hopper/pipeline.py. Linear attention has its own
(ops/linear_attention/hopper).
"""

# Triton's language has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from saccade.gpu.hopper.pipeline import (
    Ring,
    in_stages,
    make_memory_for,
    make_ring,
    make_ring_for,
    make_ring_of,
    settle,
)
from saccade.gpu.language import aggregate, gl, gluon


@aggregate
class Rings:
    """All that producer and consumers share."""

    work_tiles: Ring
    queries: gl.tuple  # a ring for each consumer
    keys: Ring
    values: Ring
    outputs: gl.tuple  # memory for each consumer

    @gluon.constexpr_function
    def __init__(self, work_tiles, queries, keys, values, outputs):
        self.work_tiles = work_tiles
        self.queries = queries
        self.keys = keys
        self.values = values
        self.outputs = outputs


@gluon.jit
def make_rings(
    query_desc, key_desc, value_desc, output_desc,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory of a program."""
    work_tiles = make_work_tiles(CONSUMERS)
    keys = make_ring_for(key_desc, STAGES, CONSUMERS)
    values = make_ring_for(value_desc, STAGES, CONSUMERS)
    queries, outputs = make_rows(query_desc, output_desc, CONSUMERS, QUERY_STAGES)
    settle()
    return Rings(work_tiles, queries, keys, values, outputs)


@gluon.jit
def make_page_rings(
    query_desc, output_desc, KEYS: gl.constexpr, VALUES: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    """Rings for tiles of keys and values, of such shapes, that come from pages in boxes."""
    work_tiles = make_work_tiles(CONSUMERS)
    keys = make_ring_of(query_desc.dtype, KEYS, STAGES, CONSUMERS)
    values = make_ring_of(query_desc.dtype, VALUES, STAGES, CONSUMERS)
    queries, outputs = make_rows(query_desc, output_desc, CONSUMERS, QUERY_STAGES)
    settle()
    return Rings(work_tiles, queries, keys, values, outputs)


@gluon.jit
def make_work_tiles(CONSUMERS: gl.constexpr):
    """A ring of work tiles, which consumers read and the producer does."""
    WORK_TILES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return make_ring(gl.int32, [1, 16], WORK_TILES, CONSUMERS + 1)


@gluon.jit
def make_rows(query_desc, output_desc, CONSUMERS: gl.constexpr, QUERY_STAGES: gl.constexpr):
    """For each consumer, a ring of queries, and memory for its output."""
    queries, outputs = (), ()
    for _ in gl.static_range(CONSUMERS):
        queries = queries + (make_ring_for(query_desc, QUERY_STAGES, 1),)  # noqa: RUF005
        outputs = outputs + (make_memory_for(output_desc),)  # noqa: RUF005
    return queries, outputs


@aggregate
class BackwardRings:
    """Rings of the backward pass. Gradients of outputs and of scores go with the queries: releasing
    queries releases their gradients of outputs too, and means that the gradients of scores of the
    iteration before were read."""

    work_tiles: Ring
    keys: Ring
    values: Ring
    queries: Ring
    starts: gl.shared_memory_descriptor  # beside the queries: two numbers of each row
    grad_outputs: Ring
    grad_scores: Ring
    dq_accumulate: gl.tuple  # of the gradients of queries: memory for each consumer
    outputs: gl.tuple  # memory for each consumer

    @gluon.constexpr_function
    def __init__(
        self,
        work_tiles,
        keys,
        values,
        queries,
        starts,
        grad_outputs,
        grad_scores,
        dq_accumulate,
        outputs,
    ):
        self.work_tiles = work_tiles
        self.keys = keys
        self.values = values
        self.queries = queries
        self.starts = starts
        self.grad_outputs = grad_outputs
        self.grad_scores = grad_scores
        self.dq_accumulate = dq_accumulate
        self.outputs = outputs


@gluon.jit
def make_backward_rings(
    query_desc, key_desc, value_desc, grad_output_desc, starts_desc, dq_desc, output_desc,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory of a program of the backward pass, whose consumers are two."""
    WORK_TILES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_tiles = make_ring(gl.int32, [2, 16], WORK_TILES, 2)
    keys, values = make_ring_for(key_desc, 1, 2), make_ring_for(value_desc, 1, 2)
    queries = make_ring_for(query_desc, STAGES, 2)
    grad_outputs = make_ring_for(grad_output_desc, STAGES, 0)
    START_SHAPE: gl.constexpr = in_stages(STAGES, starts_desc.block_type.shape)
    START_LAYOUT: gl.constexpr = starts_desc.layout
    starts = gl.allocate_shared_memory(gl.float32, START_SHAPE, START_LAYOUT)
    grad_scores, dq_accumulate = queries, ()
    if dq_desc is not None:
        PAIRS: gl.constexpr = [key_desc.block_type.shape[2], query_desc.block_type.shape[2]]
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(PAIRS, query_desc.dtype)
        grad_scores = make_ring(query_desc.dtype, in_stages(STAGES, PAIRS), LAYOUT, 0, 2)
        dq_accumulate = (make_memory_for(dq_desc), make_memory_for(dq_desc))
    outputs = (keys.memory, keys.memory)  # not used: gradients leave from registers
    if output_desc is not None:
        outputs = (make_memory_for(output_desc), make_memory_for(output_desc))
    settle()
    return BackwardRings(
        work_tiles, keys, values, queries, starts, grad_outputs, grad_scores, dq_accumulate, outputs
    )


@aggregate
class KeyRings:
    """All that the roles of the pass for gradients of wide keys and values share."""

    work_tiles: Ring
    keys: Ring  # read by the first consumer alone
    values: Ring  # by the second one
    queries: Ring
    starts: gl.shared_memory_descriptor  # beside the queries: two numbers of each row
    grad_outputs: Ring
    slopes: Ring  # what grad_weights are multiplied by, from the first consumer to the second
    outputs: gl.tuple  # memory for each consumer

    @gluon.constexpr_function
    def __init__(self, work_tiles, keys, values, queries, starts, grad_outputs, slopes, outputs):
        self.work_tiles = work_tiles
        self.keys = keys
        self.values = values
        self.queries = queries
        self.starts = starts
        self.grad_outputs = grad_outputs
        self.slopes = slopes
        self.outputs = outputs


@gluon.jit
def make_key_rings(
    query_desc, key_desc, value_desc, grad_output_desc, starts_desc,
    grad_key_desc, grad_value_desc, STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory of a program of that pass, whose consumers are two."""
    WORK_TILES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_tiles = make_ring(gl.int32, [2, 16], WORK_TILES, 2)
    keys, values = make_ring_for(key_desc, 1, 1), make_ring_for(value_desc, 1, 1)
    queries = make_ring_for(query_desc, STAGES, 2)
    grad_outputs = make_ring_for(grad_output_desc, STAGES, 2)
    START_SHAPE: gl.constexpr = in_stages(STAGES, starts_desc.block_type.shape)
    START_LAYOUT: gl.constexpr = starts_desc.layout
    starts = gl.allocate_shared_memory(gl.float32, START_SHAPE, START_LAYOUT)
    PAIRS: gl.constexpr = [key_desc.block_type.shape[2], query_desc.block_type.shape[2]]
    slopes = make_ring_of(query_desc.dtype, PAIRS, STAGES, 1)
    if key_desc.block_type.shape == value_desc.block_type.shape:
        outputs = (keys.memory.index(0), values.memory.index(0))
    else:
        outputs = (make_memory_for(grad_value_desc), make_memory_for(grad_key_desc))
    settle()
    return KeyRings(work_tiles, keys, values, queries, starts, grad_outputs, slopes, outputs)


@aggregate
class QueryRings:
    """All that the roles of the pass for gradients of queries share. Gradients of outputs go with
    the queries: a consumer that releases queries releases them too."""

    work_tiles: Ring
    queries: gl.tuple  # a ring for each consumer
    grad_outputs: gl.tuple  # the same
    keys: Ring
    values: Ring

    @gluon.constexpr_function
    def __init__(self, work_tiles, queries, grad_outputs, keys, values):
        self.work_tiles = work_tiles
        self.queries = queries
        self.grad_outputs = grad_outputs
        self.keys = keys
        self.values = values


@gluon.jit
def make_query_rings(
    query_desc, key_desc, value_desc, grad_output_desc, STAGES: gl.constexpr
):  # fmt: skip
    """Shared memory of a program of that pass, whose consumers are two. Keys stay for a step
    longer than values, of which there is one tile."""
    work_tiles = make_work_tiles(2)
    keys, values = make_ring_for(key_desc, STAGES, 2), make_ring_for(value_desc, 1, 2)
    queries, grad_outputs = (), ()
    for _ in gl.static_range(2):
        queries = queries + (make_ring_for(query_desc, 1, 1),)  # noqa: RUF005
        grad_outputs = grad_outputs + (make_ring_for(grad_output_desc, 1, 0),)  # noqa: RUF005
    settle()
    return QueryRings(work_tiles, queries, grad_outputs, keys, values)
