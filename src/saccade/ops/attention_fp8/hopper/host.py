"""fp8 attention by the Hopper kernel, as the operator starts it: rows of 16 bits are quantised, and
values transposed, by the kernels in `triton/quantise.py`.

Calls of equal shapes, strides, dtypes and options are prepared once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu import tensor_view
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.pipeline import Box, descriptor, width_of
from saccade.gpu.kernel_args import rules
from saccade.gpu.language import gluon
from saccade.gpu.launcher import Launch
from saccade.gpu.planning import Planner, TileLists
from saccade.gpu.signature import fixed
from saccade.gpu.tensor_view import first_slot, packed_program
from saccade.modifiers.normal_form import is_causal
from saccade.ops.attention.hopper.configs import ROWS, heads_at_once
from saccade.ops.attention.triton.call_spec import multiprocessors
from saccade.ops.attention_fp8.hopper import configs
from saccade.ops.attention_fp8.hopper.forward import Fp8ForwardMeta, attention_fp8_forward
from saccade.ops.attention_fp8.triton.host import Fp8Call, Fp8Forward
from saccade.ops.attention_fp8.triton.numbers import BLOCK
from saccade.runtime.fp8_spec import BLOCK_ROWS, Fp8Inputs, Quantisation
from saccade.runtime.spec import KernelConfig, Variant


class Fp8TileOrder(NamedTuple):
    """In which order tiles of query rows are taken (see `tile_scheduler.TileOrder`), and where the
    blocks of a sequence's values are."""

    origin: Any
    counter: Any
    total: int
    slots: int
    heads_at_once: int
    nonfinite: Any
    first_block: Any  # from a batch entry or sequence
    blocks: int  # of a head


@gluon.jit
def dense_first_block(batch, data):
    """The first block of a batch entry's values, within a head."""
    return batch * 0


@gluon.jit
def packed_first_block(batch, data):
    """The first block of a sequence's values, within a head."""
    return first_slot(data, batch, BLOCK)


def forward(
    inputs: Fp8Inputs, variant: Variant, config: KernelConfig, quantisation: Quantisation
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_fp8`."""
    return prepared(inputs, variant, config, quantisation)(inputs, variant)


def prepared(
    inputs: Fp8Inputs, variant: Variant, config: KernelConfig, quantisation: Quantisation
) -> Fp8Forward:
    """The forward pass of calls of the same kind."""
    return Fp8Forward(config, quantisation, HopperFp8Call)


class HopperFp8Call(Fp8Call):
    """Calls of the same shapes, strides and options, prepared."""

    as_operand = True

    def _prepare(self, inputs: Fp8Inputs, variant: Variant, config: KernelConfig) -> None:
        problem = configs.problem_of(inputs, variant, is_causal(variant.mask))
        self.schedule = chosen = configs.choose(problem)
        sizes = chosen.query_tile, chosen.kv_tile
        self.planner = Planner(inputs, variant, self.geometry, sizes, over_keys=True)  # type: ignore[arg-type]
        queries, count = self.geometry.queries, multiprocessors(inputs.query)
        heads = heads_at_once(
            problem.masked, queries.heads * queries.sequences, queries.slots(sizes[0]), count,
            self.group, (problem.head_width + problem.value_width) * self.geometry.lengths()[1],
        )  # fmt: skip
        self.order = tile_scheduler.order_of(queries, sizes[0], heads)
        self.programs = min(self.order[0], count)
        constants = {
            "HEADS_PER_KV_HEAD": self.group,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "CONSUMERS": chosen.consumers,
            "STAGES": chosen.stages,
            "QUERY_STAGES": chosen.query_stages,
            "CONSUMER_REGISTERS": chosen.consumer_registers,
            "PRODUCER_REGISTERS": chosen.producer_registers,
            "MAX_OF": chosen.max_of,
            "SKIP_MASKED_TILE": chosen.skip_masked_tile,
        }
        options = {"num_warps": 4, "num_stages": chosen.stages, "launch_pdl": True}
        self.launch = Launch(attention_fp8_forward, constants, options, meta=Fp8ForwardMeta)

    def _attend(
        self, numbers: Fp8Inputs, variant: Variant,
        beside: tuple[Tensor, Tensor, Tensor | None], plan: TileLists, tensors: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        counter = tile_scheduler.counter_of(numbers.query.device)
        call = numbers, variant, beside, plan, counter
        self.launch(self.programs, self.device, (*tensors, counter), lambda: self._arguments(*call))

    def _arguments(
        self, numbers: Fp8Inputs, variant: Variant,
        beside: tuple[Tensor, Tensor, Tensor | None], plan: TileLists, counter: Tensor,
    ) -> tuple[Any, ...]:  # fmt: skip
        output, lse, shift = beside
        (queries, keys), chosen, packed = self.geometry, self.schedule, self.packed
        offsets_q, offsets_k = numbers[7:]
        head_width, value_width = width_of(self.head_dim), width_of(self.value_dim)
        of_rows = Box.of(numbers.query, packed, ROWS, head_width)
        of_keys = Box.of(numbers.key, packed, chosen.kv_tile, head_width)
        blocks = numbers.value.shape[2]
        tiles = numbers.value.flatten(1, 2)  # [batch, heads · blocks, value_dim, BLOCK_ROWS]
        of_values = Box.of(tiles, False, value_width, chosen.kv_tile)
        of_output = Box.of(output, packed, ROWS, value_width // chosen.output_parts)
        return (
            descriptor(numbers.query, of_rows),
            descriptor(numbers.key, of_keys),
            descriptor(numbers.value, of_values),
            descriptor(output, of_output),
            self._rows(numbers.query, queries, offsets_q, packed_program),
            self._rows(numbers.key, keys, offsets_k, packed_program),
            self._tiles(numbers.value, offsets_k),
            self._rows(output, queries, offsets_q, packed_program),
            self._numbers(lse, offsets_q, packed_program),
            self._scales(numbers, shift, packed_program),
            tile_scheduler.with_gluon_search(rules(numbers, variant, plan.argument())),  # type: ignore[arg-type]
            numbers.sinks,
            Fp8TileOrder(
                tensor_view.packed_origin if packed else tensor_view.dense_origin,
                counter,
                *self.order,
                counter,
                packed_first_block if packed else dense_first_block,
                fixed(blocks),
            ),
        )


assert BLOCK.value == BLOCK_ROWS
