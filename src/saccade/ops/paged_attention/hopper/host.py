"""Attention over pages with Hopper kernels: the body that the operator runs on capability 9.0.

Decoding reads each key once and does little with it: the Triton kernels for sequences of few
query rows read as fast as the memory gives. Sequences of many rows, chunks of prompts, have a
kernel of their own, where enough tiles of query rows are there to keep all multiprocessors busy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.gpu import packing, tensor_view
from saccade.gpu.compose import mask_functions
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.descriptors import SMALLEST_WIDTH, Box, descriptor, width_of
from saccade.gpu.kernel_args import mask_argument, score_argument
from saccade.gpu.launcher import Launch
from saccade.gpu.rules import Rules
from saccade.gpu.signature import ALIGNMENT
from saccade.ops.attention.hopper import configs
from saccade.ops.attention.hopper.configs import HopperPagedProblem
from saccade.ops.paged_attention.hopper.prefill import PrefillMeta, attention_pages_forward
from saccade.ops.paged_attention.triton import host as triton_host
from saccade.ops.paged_attention.triton.call_spec import PagedCallSpec
from saccade.ops.paged_attention.triton.host import PassLaunches
from saccade.ops.paged_attention.triton.passes import Pass
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, empty_rows

ROWS_OF_TILE = 2 * configs.ROWS


class HopperChunkLaunch:
    """The kernel of a pass over the sequences of many query rows."""

    def __init__(self, spec: PagedCallSpec, of: Pass, inputs: PagedInputs, variant: Variant):
        self.spec, self.device = spec, inputs.query.device
        self.otherwise = PassLaunches(spec, of, self.device)
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
            origin = packing.packed_origin if self.spec.queries.packed else tensor_view.dense_origin
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
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_paged`."""
    return prepared(inputs, variant, config, batch_invariant)(inputs, variant)
