"""fp8 attention by Triton kernels, as the operator starts them on GPUs.

Of 16-bit rows: values as e4m3 numbers, and sums of keys → keys and queries as e4m3 numbers →
attention. Where a head, or the tensor, has one scale, all are read for the largest number first.
Of e4m3 rows: values transposed → attention.

Calls of equal shapes, strides, dtypes and options are prepared once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.gpu.kernel_args import (
    Extent,
    Geometry,
    number_strides,
    row_strides,
    rules,
    signature,
    tensors_of,
    there_are,
    view,
)
from saccade.gpu.launcher import Launch, current_device, next_width
from saccade.gpu.planning import Planner, TileLists
from saccade.gpu.recording import RecordedPass
from saccade.gpu.signature import fixed
from saccade.gpu.tensor_view import View, packed_program_by_heads
from saccade.ops.attention.triton import call_spec
from saccade.ops.attention.triton.call_spec import remembered, with_unit_channels
from saccade.ops.attention_fp8.quantise import of_heads, scale_of_largest, transform_size
from saccade.ops.attention_fp8.triton import configs
from saccade.ops.attention_fp8.triton.forward import Scales, attention_fp8_forward
from saccade.ops.attention_fp8.triton.numbers import blocks_view, parts_view, scale_view
from saccade.ops.attention_fp8.triton.quantise import (
    UNIT,
    Blocks,
    fp8_mean_keys,
    fp8_quantise_rows,
    fp8_quantise_values,
)
from saccade.runtime.fp8_spec import (
    BLOCK_ROWS,
    E4M3,
    GIVEN,
    Fp8Inputs,
    Quantisation,
    empty_fp8_results,
    num_slots,
)
from saccade.runtime.spec import KernelConfig, Variant

NARROWEST, WIDEST = 16, 64  # channels of a chunk that is transformed by one product
NARROW = 64  # channels of a block of values that takes half as many warps
SUM_ROWS = 512  # keys that are summed by one program at least
MOST_PARTS = 16  # of a sequence whose keys are summed


def forward(
    inputs: Fp8Inputs, variant: Variant, config: KernelConfig, quantisation: Quantisation
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_fp8`."""
    return prepared(inputs, variant, config, quantisation)(inputs, variant)


_calls: dict[Any, Fp8Call] = {}


def prepared(
    inputs: Fp8Inputs, variant: Variant, config: KernelConfig, quantisation: Quantisation
) -> Fp8Forward:
    """The forward pass of calls of the same kind."""
    return Fp8Forward(config, quantisation, Fp8Call)


class Fp8Forward:
    """The forward pass of calls of the same options.

    Args:
        kind: of calls: those of Triton's kernel, or of Hopper's.
    """

    def __init__(self, config: KernelConfig, quantisation: Quantisation, kind: type[Fp8Call]):
        self.config, self.quantisation, self.kind = config, quantisation, kind

    def __call__(self, inputs: Fp8Inputs, variant: Variant) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        inputs = with_unit_channels(inputs)  # type: ignore[type-var]
        layouts = [None if one is None else (one.shape, one.stride()) for one in inputs]
        options = self.kind, self.config, self.quantisation
        key = signature(inputs, variant), *layouts, *options  # type: ignore[arg-type]
        call = remembered(
            _calls, key, lambda: self.kind(inputs, variant, self.config, self.quantisation)
        )
        return call(inputs, variant)


class Fp8Call:
    """Calls of the same shapes, strides and options, prepared."""

    def __init__(
        self,
        inputs: Fp8Inputs,
        variant: Variant,
        config: KernelConfig,
        quantisation: Quantisation,
    ):
        self.quantisation = quantisation
        self.geometry = Geometry.of(inputs)  # type: ignore[arg-type]
        self.packed = inputs.cu_seqlens_q is not None
        self.device = current_device(inputs.query)
        self.multiprocessors = call_spec.multiprocessors(inputs.query)
        self.of_rows = configs.quantise(
            call_spec.architecture(inputs.query), inputs.query.shape[-1]
        )
        head_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
        self.head_dim, self.value_dim = head_dim, value_dim
        self.head_width = max(next_width(head_dim), configs.SMALLEST)
        self.value_width = max(next_width(value_dim), configs.SMALLEST)
        queries, keys = self.geometry
        self.group = queries.heads // max(keys.heads, 1)
        self.size = transform_size(head_dim) if quantisation.incoherent and head_dim else 0
        self.width = min(max(next_width(head_dim), NARROWEST), WIDEST)
        self.sum_rows = max(SUM_ROWS, next_width(-(-keys.length // MOST_PARTS)))
        self.steps: dict[Any, Launch] = {}
        self._prepare(inputs, variant, config)
        self.recorded = RecordedPass(inputs.query)

    as_operand = False  # whether keys of a tile of values stand as Hopper's operands want them

    def _prepare(self, inputs: Fp8Inputs, variant: Variant, config: KernelConfig) -> None:
        """The kernel that attends, with its tiles."""
        width = max(self.head_width, self.value_width)
        chosen = configs.choose(call_spec.architecture(inputs.query), width, config)
        tiles = chosen.query_tile, chosen.kv_tile
        self.programs = self.geometry.queries.programs(tiles[0])
        self.planner = Planner(inputs, variant, self.geometry, tiles, over_keys=True)  # type: ignore[arg-type]
        constants = {
            "HEADS_PER_KV_HEAD": self.group, "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim, "HEAD_WIDTH": self.head_width,
            "VALUE_WIDTH": self.value_width, "QUERY_TILE": tiles[0], "KV_TILE": tiles[1],
        }  # fmt: skip
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        self.launch = Launch(attention_fp8_forward, constants, options)

    def __call__(self, inputs: Fp8Inputs, variant: Variant) -> tuple[Tensor, Tensor]:
        """Output and lse of such a call."""
        tensors = tensors_of(inputs, variant)  # type: ignore[arg-type]
        output, lse = self.recorded(tensors, lambda: self._run(inputs, variant))
        return output, lse

    def _run(self, inputs: Fp8Inputs, variant: Variant) -> tuple[Tensor, Tensor]:
        output, lse = empty_fp8_results(inputs, self.quantisation.dtype)
        if self.quantisation.mode == GIVEN:
            tiles = self._values(inputs, "none", None, (None, None))
            numbers = inputs._replace(value=tiles)
            shift = None
        else:
            numbers, shift = self._quantised(inputs)
        plan = self.planner(inputs, variant)  # type: ignore[arg-type]
        tensors = (*tensors_of(numbers, variant), output, lse, *there_are([shift]), *plan.tensors)  # type: ignore[arg-type]
        self._attend(numbers, variant, (output, lse, shift), plan, tensors)
        return output, lse

    def _attend(
        self, numbers: Fp8Inputs, variant: Variant,
        beside: tuple[Tensor, Tensor, Tensor | None], plan: TileLists, tensors: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Start the kernel that attends. numbers: e4m3 rows, and values in tiles; beside: output,
        lse and shift."""
        output, lse, shift = beside
        queries, keys = self.geometry
        offsets_q, offsets_k = numbers[7:]
        find = packed_program_by_heads

        def arguments() -> tuple[Any, ...]:
            return (
                self._rows(numbers.query, queries, offsets_q, find),
                self._rows(numbers.key, keys, offsets_k, find),
                self._tiles(numbers.value, offsets_k),
                self._rows(output, queries, offsets_q, find),
                self._numbers(lse, offsets_q, find),
                self._scales(numbers, shift, find),
                rules(numbers, variant, plan.argument()),  # type: ignore[arg-type]
                numbers.sinks,
            )

        self.launch(self.programs, self.device, tensors, arguments)

    def _scales(self, numbers: Fp8Inputs, shift: Tensor | None, find: Any) -> Scales:
        queries, keys = self.geometry
        offsets_q, offsets_k = numbers[7:]
        return Scales(
            scale_view(numbers.query_scale, queries, offsets_q),
            scale_view(numbers.key_scale, keys, offsets_k),
            scale_view(numbers.value_scale, keys, offsets_k),
            None if shift is None else self._numbers(shift, offsets_q, find),
        )

    # ---- 16-bit rows ----------------------------------------------------------------------------

    def _quantised(self, inputs: Fp8Inputs) -> tuple[Fp8Inputs, Tensor | None]:
        """The call with e4m3 rows, values in tiles; and what smoothing took from the scores."""
        keys, sums, mean, shift, matrix = self.geometry.keys, None, None, None, None
        if self.size:
            matrix = inputs.key.new_empty(-(-self.head_dim // self.width), self.width, self.width)
        if self.quantisation.smooth:
            parts = 1 if self.packed else keys.batch, keys.heads, keys.slots(self.sum_rows)
            sums = inputs.key.new_empty(*parts, self.head_dim, dtype=torch.float32)
            mean = sums.new_empty(keys.batch, keys.heads, self.head_dim)
            _, shift = empty_fp8_results(inputs, self.quantisation.dtype)
        changes = matrix, mean, shift
        beside = sums, matrix
        if self.quantisation.mode == "block":
            scales = self._blocks_of(inputs)
            value = self._values(inputs, "own", scales[2], beside)
            self._means(inputs, sums, matrix, mean)
            key = self._quantised_rows(inputs, 1, "own", scales[1], changes)
            query = self._quantised_rows(inputs, 0, "own", scales[0], changes)
        else:  # all rows are looked at first
            largest = [each.zero_() for each in self._blocks_of(inputs)]
            self._values(inputs, "largest", largest[2], beside)
            self._means(inputs, sums, matrix, mean)
            self._quantised_rows(inputs, 1, "largest", largest[1], changes)
            self._quantised_rows(inputs, 0, "largest", largest[0], changes)
            offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.cu_seqlens_k
            units = 1 / UNIT.value, 1 / UNIT.value, 1.0
            of_rows = zip(largest, inputs[:3], offsets, units, strict=True)
            scales = [self._scale(*each) for each in of_rows]
            value = self._values(inputs, "given", scales[2], (None, None))
            key = self._quantised_rows(inputs, 1, "given", scales[1], changes)
            query = self._quantised_rows(inputs, 0, "given", scales[0], changes)
        found = inputs._replace(query=query, key=key, value=value)
        names = "query_scale", "key_scale", "value_scale"
        return found._replace(**dict(zip(names, scales, strict=True))), shift

    def _values(
        self, inputs: Fp8Inputs, scales: str, of_blocks: Tensor | None,
        beside: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:  # fmt: skip
        """Values in tiles [value_dim, BLOCK_ROWS], one for each block of keys of a head. of_blocks:
        scales, or largest numbers. beside: sums of keys and the matrix of the transform, where they
        are to be made as well."""
        sums, matrix = beside
        key, value, keys, offsets = inputs.key, inputs.value, self.geometry.keys, inputs[8]
        tiles = value.new_empty(
            *self._blocks(keys, value).shape, self.value_dim, BLOCK_ROWS, dtype=E4M3
        )
        constants = {
            "VALUE_DIM": self.value_dim, "VALUE_WIDTH": self.value_width,
            **self._transform(), "HEAD_WIDTH": self.head_width,
            "SUM_ROWS": SUM_ROWS if sums is None else self.sum_rows,  # else one more kernel
            "SCALES": scales, "AS_OPERAND": self.as_operand,
        }  # fmt: skip
        programs = (
            keys.programs(BLOCK_ROWS), 0 if sums is None else keys.programs(self.sum_rows),
            0 if matrix is None else matrix.shape[0],
        )  # fmt: skip
        of_keys = None if sums is None else key

        def arguments() -> tuple[Any, ...]:
            return (
                self._rows(value, keys, offsets),
                self._of_blocks(self._tiles(tiles, offsets), of_blocks, keys, offsets),
                None if sums is None else self._rows(key, keys, offsets),
                None if sums is None else parts_view(sums, self.sum_rows, keys, offsets),
                matrix,
                fixed(programs[0]),
                fixed(programs[1]),
            )

        tensors = there_are((value, tiles, of_blocks, of_keys, sums, matrix, offsets))
        options = {"num_warps": 4 if self.value_width <= NARROW else 8}
        self._start(fp8_quantise_values, constants, options, sum(programs), tensors, arguments)
        return tiles

    def _means(
        self, inputs: Fp8Inputs, sums: Tensor | None, matrix: Tensor | None, mean: Tensor | None
    ) -> None:
        """The transformed mean key of each head, from the sums of its keys."""
        if sums is None or mean is None:
            return
        keys, offsets = self.geometry.keys, inputs.cu_seqlens_k

        def arguments() -> tuple[Any, ...]:
            of_sums = parts_view(sums, self.sum_rows, keys, offsets)
            return self._rows(inputs.key, keys, offsets), of_sums, matrix, mean

        constants = {**self._transform(), "SUM_ROWS": self.sum_rows}
        tensors = there_are((inputs.key, sums, matrix, mean, offsets))
        self._start(
            fp8_mean_keys, constants, {"num_warps": 4}, keys.batch * keys.heads, tensors, arguments
        )

    def _quantised_rows(
        self, inputs: Fp8Inputs, side: int, scales: str, of_blocks: Tensor,
        changes: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> Tensor:  # fmt: skip
        """Queries (side 0) or keys as e4m3 numbers; of_blocks: scales, or largest numbers; changes:
        matrix, mean and shift."""
        matrix, mean, shift = changes
        of_rows = self.of_rows
        rows = inputs.key if side else inputs.query
        extent, offsets = self.geometry[side], inputs[7 + side]
        numbers = rows.new_empty(rows.shape, dtype=E4M3)
        shift = shift if side == 0 else None
        constants = {
            "GROUP": self.group if side == 0 else 1, **self._transform(), "SCALES": scales,
            "STAGES": of_rows.stages,
        }  # fmt: skip
        blocks = extent.programs(BLOCK_ROWS)
        at_once = max(-(-blocks // (of_rows.programs * self.multiprocessors)), 1)

        def arguments() -> tuple[Any, ...]:
            return (
                self._rows(rows, extent, offsets),
                self._of_blocks(self._rows(numbers, extent, offsets), of_blocks, extent, offsets),
                matrix,
                mean,
                None if shift is None else self._numbers(shift, offsets),
                fixed(self.geometry.keys.heads),
                fixed(blocks),
                fixed(at_once),
            )

        tensors = there_are((rows, numbers, of_blocks, matrix, mean, shift, offsets))
        programs = -(-blocks // at_once)
        self._start(
            fp8_quantise_rows, constants, of_rows.options, programs, tensors, arguments, side
        )
        return numbers

    def _transform(self) -> dict[str, int]:
        return {"HEAD_DIM": self.head_dim, "WIDTH": self.width, "SIZE": self.size}

    def _blocks_of(self, inputs: Fp8Inputs) -> list[Tensor]:
        """Memory for a number of each block of queries, keys and values."""
        queries, keys = self.geometry
        sides = zip((queries, keys, keys), inputs[:3], strict=True)
        return [self._blocks(extent, rows) for extent, rows in sides]

    def _scale(self, largest: Tensor, rows: Tensor, offsets: Tensor | None, unit: float) -> Tensor:
        """The scale of each head, or of all, from the largest numbers of blocks, in units."""
        if self.quantisation.mode == "tensor":
            found = largest.amax() if largest.numel() else largest.new_zeros(())
        else:
            found = of_heads(largest, rows, offsets)
        return scale_of_largest(found, unit)

    # ---- what is handed to kernels --------------------------------------------------------------

    def _start(
        self, kernel: Any, constants: dict[str, Any], options: dict[str, int], programs: int,
        tensors: Any, arguments: Any, side: int = 0,
    ) -> None:  # fmt: skip
        """Start a kernel that was prepared, or prepare it. side: which tensors it is for, where
        one kernel serves several, whose lengths and strides may differ."""
        key = kernel, side, *constants.items(), len(tensors)
        launch = self.steps.get(key)
        if launch is None:
            options = {**options, "num_stages": 1}
            launch = self.steps[key] = Launch(kernel, constants, options)
        launch(programs, self.device, tensors, arguments)

    def _blocks(self, extent: Extent, rows: Tensor) -> Tensor:
        """Memory for a number of each block, [batch, heads, blocks] or [1, heads, slots]."""
        batch = 1 if self.packed else extent.batch
        blocks = num_slots(extent.length, extent.batch if self.packed else None)
        return rows.new_empty(batch, extent.heads, blocks, dtype=torch.float32)

    def _of_blocks(
        self, numbers: View, of_blocks: Tensor | None, extent: Extent, offsets: Tensor | None
    ) -> Blocks:
        """Where a kernel writes; of_blocks: scales, or largest numbers, which it has one of."""
        found = scale_view(of_blocks, extent, offsets)
        return Blocks(numbers, found, found)

    def _rows(
        self, rows: Tensor, extent: Extent, offsets: Tensor | None,
        find: Any = packed_program_by_heads,
    ) -> View:  # fmt: skip
        return view(rows, row_strides(rows, self.packed), extent, offsets, find)

    def _numbers(
        self, numbers: Tensor, offsets: Tensor | None, find: Any = packed_program_by_heads
    ) -> View:
        strides = number_strides(numbers, self.packed)
        return view(numbers, strides, self.geometry.queries, offsets, find)

    def _tiles(self, tiles: Tensor, offsets: Tensor | None) -> View:
        step = self.value_dim * BLOCK_ROWS
        return blocks_view(tiles, step, tiles.stride()[:2], self.geometry.keys, offsets)  # type: ignore[arg-type]
