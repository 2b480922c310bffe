"""Attention over pages by Hopper kernels, as the operator starts them on capability 9.0.

Decoding reads each key once and does little with it: the Triton kernels for sequences of few
query rows read as fast as the memory gives. Sequences of many rows, chunks of prompts, have a
kernel of their own, where enough tiles of query rows are there to keep all multiprocessors busy.
That kernel is the dense forward kernel, whose producer finds keys in pages: pages change where a
tile of keys comes from, and nothing else (`ops/attention/hopper/forward.py`).
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu import tensor_view
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.pipeline import SMALLEST_WIDTH, Box, descriptor, width_of
from saccade.gpu.hopper.tile_scheduler import num_visits, tile_from_last
from saccade.gpu.kernel_args import (
    Rules,
    changes_scores,
    mask_argument,
    mask_functions,
    score_argument,
)
from saccade.gpu.language import gl, gluon
from saccade.gpu.launcher import Launch
from saccade.gpu.signature import ALIGNMENT
from saccade.gpu.tensor_view import wide
from saccade.ops.attention.hopper import configs
from saccade.ops.attention.hopper.configs import HopperPagedProblem
from saccade.ops.attention.hopper.forward import consume, load_queries, schedule_work, work_tile_of
from saccade.ops.attention.hopper.smem import make_page_rings
from saccade.ops.paged_attention.triton import host as triton_host
from saccade.ops.paged_attention.triton.call_spec import PagedCallSpec, Pass
from saccade.ops.paged_attention.triton.host import PassLaunches
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, empty_rows

ROWS_OF_TILE = 2 * configs.ROWS


class HopperChunkLaunch:
    """The kernel of a pass over the sequences of many query rows."""

    def __init__(self, spec: PagedCallSpec, of: Pass, inputs: PagedInputs, variant: Variant):
        self.device = inputs.query.device
        self.otherwise = PassLaunches(spec, of, self.device, changes_scores(variant))
        self.spec = spec = spec._replace(latent=False)  # TMA brings values by themselves
        problem = problem_of(spec, inputs, variant)
        chosen = configs.choose_paged(problem)
        widths = problem.head_width, problem.value_width
        queries = spec.queries
        output, _ = empty_rows(inputs.query, inputs.value_pages.shape[3], queries.packed)
        slots = min(inputs.page_size, chosen.kv_tile)
        self.boxes = (
            Box.of(inputs.query, queries.packed, configs.ROWS, widths[0]),
            Box.of(inputs.key_pages, False, slots, SMALLEST_WIDTH),
            Box.of(inputs.value_pages, False, slots, SMALLEST_WIDTH),
            Box.of(output, queries.packed, configs.ROWS, widths[1] // chosen.output_parts),
        )
        self.launch = Launch(
            attention_pages_forward,
            {
                "HEADS_PER_KV_HEAD": spec.constants["GROUP"],
                "HEAD_DIM": spec.constants["HEAD_DIM"],
                "VALUE_DIM": spec.constants["VALUE_DIM"],
                "HEAD_WIDTH": widths[0],
                "VALUE_WIDTH": widths[1],
                "KV_TILE": chosen.kv_tile,
                "PAGE_SIZE": inputs.page_size,
                "FEWEST": of.rows[0],
                "CONSUMERS": chosen.consumers,
                "STAGES": chosen.stages,
                "QUERY_STAGES": chosen.query_stages,
                "CONSUMER_REGISTERS": chosen.consumer_registers,
                "PRODUCER_REGISTERS": chosen.producer_registers,
            },
            {"num_warps": 4, "num_stages": chosen.stages},
            meta=PrefillMeta,
        )
        longest = inputs.page_table.shape[1] * inputs.page_size
        heads = configs.heads_at_once(
            True, queries.heads * queries.sequences, queries.slots(ROWS_OF_TILE),
            spec.multiprocessors, spec.constants["GROUP"], 2 * sum(widths) * longest,
        )  # fmt: skip
        self.order = tile_scheduler.order_of(queries, ROWS_OF_TILE, heads)
        self.programs = min(problem.slots, spec.multiprocessors)

    def __call__(
        self, inputs: PagedInputs, variant: Variant, output: Tensor, lse: Tensor,
        tensors: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Compute the rows of the sequences that the pass is for."""
        loaded = inputs.query, inputs.key_pages, inputs.value_pages
        if any(tensor.data_ptr() % ALIGNMENT for tensor in loaded):
            self.otherwise(inputs, variant, output, lse, tensors)
            return
        taken = tile_scheduler.counter_of(self.device)

        def arguments() -> tuple[Any, ...]:
            moved = (*loaded, output)
            changes = mask_argument(variant), score_argument(variant)
            origin = (
                tensor_view.packed_origin if self.spec.queries.packed else tensor_view.dense_origin
            )
            return (
                *(descriptor(t, box) for t, box in zip(moved, self.boxes, strict=True)),
                self.spec.rows(inputs),
                *self.spec.pages(inputs)[:2],
                *self.spec.results(inputs, output, lse),
                tile_scheduler.with_gluon_search(Rules(*changes, None, variant.scale)),
                inputs.sinks,
                tile_scheduler.TileOrder(origin, taken, *self.order, taken),
            )

        self.launch(self.programs, self.spec.device, (*tensors, taken), arguments)


class HopperPagedForward(triton_host.PagedForward):
    """Attention over pages for calls like one another, prepared: each pass by what suits it."""

    def launches(self, spec: PagedCallSpec, of: Pass, inputs: PagedInputs, variant: Variant) -> Any:
        """What starts the kernels of a pass."""
        if of.chunks and configs.pages_unsupported(problem_of(spec, inputs, variant)) is None:
            return HopperChunkLaunch(spec, of, inputs, variant)
        return super().launches(spec, of, inputs, variant)


def problem_of(spec: PagedCallSpec, inputs: PagedInputs, variant: Variant) -> HopperPagedProblem:
    """What decides on the kernel of a pass over sequences of many query rows."""
    dims = inputs.query.shape[-1], inputs.value_pages.shape[3]
    queries, masked = spec.queries, variant.mask != ""
    whole = queries.length // ROWS_OF_TILE * queries.heads
    head_width, value_width = map(width_of, dims)
    return HopperPagedProblem(
        head_width, value_width, inputs.page_size, whole * queries.sequences,
        queries.programs(ROWS_OF_TILE), spec.multiprocessors,
        masked and mask_functions(variant.mask).spans_read > 0,
    )  # fmt: skip


def prepared(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> triton_host.PagedForward:
    """`forward` for calls like this one; call it with inputs like that one."""
    return triton_host.prepared(inputs, variant, config, batch_invariant, HopperPagedForward)


def forward(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> tuple[Tensor, ...]:
    """Output and lse; see `saccade.attention_paged`."""
    return prepared(inputs, variant, config, batch_invariant)(inputs, variant)


# ---- the kernel ---------------------------------------------------------------------------------

NO_PAGE = gl.constexpr(-1)  # outside of any pool, where TMA finds zeros


class PrefillMeta(NamedTuple):
    """How the kernel runs, known when it is compiled."""

    KV_TILE: int
    CONSUMERS: int
    STAGES: int
    QUERY_STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int


@gluon.jit(do_not_specialize=["rules"])
def attention_pages_forward(
    query_desc, key_desc, value_desc, output_desc, query, key, value, output, logsumexp, rules,
    sinks, schedule, HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, HEAD_WIDTH: gl.constexpr, VALUE_WIDTH: gl.constexpr,
    META: gl.constexpr, PAGE_SIZE: gl.constexpr, FEWEST: gl.constexpr,
):  # fmt: skip
    """One program: tiles of 128 rows of one head, one after the other, of all sequences that have
    more than FEWEST query rows."""
    gl.static_assert(META.CONSUMERS == 2)
    rings = make_page_rings(
        query_desc, output_desc, [1, 1, META.KV_TILE, HEAD_WIDTH], [1, 1, META.KV_TILE,
        VALUE_WIDTH], META.CONSUMERS, META.STAGES, META.QUERY_STAGES,
    )  # fmt: skip
    # A tuple that holds functions cannot be given a name.
    gl.warp_specialize(
        [
            (consume, (
                output_desc, query, key, value, output, logsumexp, None, None, rules, sinks,
                schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, PAGE_SIZE, True, "unseen",
                False, 0,
            )),
            (consume, (
                output_desc, query, key, value, output, logsumexp, None, None, rules, sinks,
                schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, PAGE_SIZE, True, "unseen",
                False, 1,
            )),
            (produce_pages, (
                query_desc, key_desc, value_desc, query, key, rules, schedule, rings,
                HEADS_PER_KV_HEAD, PAGE_SIZE,
            )),
            (schedule_work, (
                query, key, output, logsumexp, rules, schedule, rings, VALUE_DIM, FEWEST,
            )),
        ],
        [4, 1, 1],
        [META.CONSUMER_REGISTERS, META.PRODUCER_REGISTERS, META.PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def produce_pages(
    query_desc, key_desc, value_desc, query, key, rules, schedule, rings,
    HEADS_PER_KV_HEAD: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Load tiles as `forward.produce` does; pages are looked up before there is room for one."""
    KV_TILE: gl.constexpr = rings.keys.memory.shape[3]
    tile_iteration, kv_iteration = 0, 0
    position, query_len, kv_len, tile_range = work_tile_of(rings, tile_iteration)
    while query_len > 0:
        batch, query_head, query_start = position
        query_batch, query_row = schedule.origin(batch, query.data)
        kv_head = query_head // HEADS_PER_KV_HEAD
        visits = num_visits(tile_range)
        for index in range(0, visits):
            kv_start = tile_from_last(rules, tile_range, index) * KV_TILE
            pages = pages_of(key, batch, kv_start, kv_len, KV_TILE, PAGE_SIZE)
            slot = kv_start % PAGE_SIZE if PAGE_SIZE > KV_TILE else 0
            rings.keys.acquire(kv_iteration)
            rings.keys.load_boxes(kv_iteration, key_desc, pages, kv_head, slot)
            if index == 0:
                first = query_batch, query_head, query_row + query_start
                load_queries(query_desc, rings, first, tile_iteration, False)
            rings.values.acquire(kv_iteration)
            rings.values.load_boxes(kv_iteration, value_desc, pages, kv_head, slot)
            if index == gl.maximum(visits - 2, 0):
                rings.work_tiles.release(
                    tile_iteration
                )  # now is the time to schedule the next tile
            kv_iteration += 1
        tile_iteration += 1
        position, query_len, kv_len, tile_range = work_tile_of(rings, tile_iteration)


@gluon.jit
def pages_of(key, batch, kv_start, kv_len, KV_TILE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The pages of a tile of keys, which is part of one or consists of several: a tuple."""
    table = key.data[0] + wide(batch) * key.data[1]
    pages = ()
    for first in gl.static_range(0, KV_TILE, min(PAGE_SIZE, KV_TILE)):
        row = kv_start + first
        found = gl.load(table + row // PAGE_SIZE, mask=row < kv_len, other=NO_PAGE)
        pages = pages + (found,)  # noqa: RUF005
    return pages
