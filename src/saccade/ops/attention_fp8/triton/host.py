"""fp8 attention by Triton kernels, as the operator starts them on GPUs.

Of 16-bit rows: sums of keys → means → queries, keys and values as e4m3 numbers → attention. Where a
head, or the tensor, has one scale, queries, keys and values are read for the largest number first.
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
from saccade.ops.attention_fp8.quantise import TINIEST, of_heads, transform_size
from saccade.ops.attention_fp8.triton import configs
from saccade.ops.attention_fp8.triton.forward import Scales, attention_fp8_forward
from saccade.ops.attention_fp8.triton.numbers import blocks_view, scale_view
from saccade.ops.attention_fp8.triton.quantise import (
    fp8_key_means,
    fp8_key_sums,
    fp8_quantise_rows,
    fp8_transform,
    fp8_transpose_values,
)
from saccade.runtime.fp8_spec import (
    BLOCK_ROWS,
    E4M3,
    GIVEN,
    LARGEST_E4M3,
    Fp8Inputs,
    Quantisation,
    empty_fp8_results,
    num_slots,
)
from saccade.runtime.spec import KernelConfig, Variant

NARROWEST = 16  # channels of a chunk that is transformed
CHUNK = 128  # channels at a time where nothing is transformed


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
        head_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
        self.head_dim, self.value_dim = head_dim, value_dim
        self.head_width = max(next_width(head_dim), configs.SMALLEST)
        self.value_width = max(next_width(value_dim), configs.SMALLEST)
        queries, keys = self.geometry
        self.group = queries.heads // max(keys.heads, 1)
        self.size = transform_size(head_dim) if quantisation.incoherent and head_dim else 0
        self.width = max(self.size, NARROWEST) if self.size else min(self.head_width, CHUNK)
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
            tiles = self._values(inputs, "none", None, None)
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
        queries, keys = self.geometry
        offsets_q, offsets_k = inputs[7:]
        matrix, mean, shift = self._matrix(inputs.key), None, None
        if self.quantisation.smooth:
            mean = self._mean(inputs.key, offsets_k, matrix)
            _, shift = empty_fp8_results(inputs, self.quantisation.dtype)
        query, query_scale = self._quantised_rows(
            inputs.query, queries, offsets_q, (matrix, mean, shift)
        )
        key, key_scale = self._quantised_rows(inputs.key, keys, offsets_k, (matrix, mean, None))
        own = self.quantisation.mode == "block"
        scale = self._blocks(keys, inputs.value) if own else None
        if scale is None:
            largest = self._blocks(keys, inputs.value).zero_()
            self._values(inputs, "largest", None, largest)
            scale = self._scale(largest, inputs.value, offsets_k)
        tiles = self._values(inputs, "own" if own else "given", scale, None)
        found = Fp8Inputs(query, key, tiles, query_scale, key_scale, scale, *inputs[6:])
        return found, shift

    def _matrix(self, key: Tensor) -> Tensor | None:
        """The matrix that rows are transformed by, a square for each chunk of channels."""
        if not self.size:
            return None
        chunks = -(-self.head_dim // self.width)
        matrix = key.new_empty(chunks, self.width, self.width)
        constants = {"WIDTH": self.width, "SIZE": self.size}
        self._start(fp8_transform, constants, 4, chunks, (matrix,), lambda: (matrix,))
        return matrix

    def _mean(self, key: Tensor, offsets: Tensor | None, matrix: Tensor | None) -> Tensor:
        """The mean key of each head, transformed, [batch, heads, dim]."""
        keys, dim = self.geometry.keys, self.head_dim
        blocks = self._blocks(keys, key)
        sums = blocks.new_empty(*blocks.shape, dim)
        mean = blocks.new_empty(keys.batch, keys.heads, dim)
        steps = sums.stride()

        def of_sums() -> View:
            return blocks_view(sums, dim, steps[:2], keys, offsets)  # type: ignore[arg-type]

        constants = {"HEAD_DIM": dim, "HEAD_WIDTH": self.head_width}
        self._start(
            fp8_key_sums, constants, 4, keys.programs(BLOCK_ROWS),
            (key, sums, *there_are([offsets])),
            lambda: (self._rows(key, keys, offsets), of_sums()),
        )  # fmt: skip
        constants = {"HEAD_DIM": dim, "WIDTH": self.width, "SIZE": self.size}
        self._start(
            fp8_key_means, constants, 8, keys.batch * keys.heads * -(-dim // self.width),
            (key, sums, mean, *there_are([matrix, offsets])),
            lambda: (self._rows(key, keys, offsets), of_sums(), mean, matrix),
        )  # fmt: skip
        return mean

    def _quantised_rows(
        self, rows: Tensor, extent: Extent, offsets: Tensor | None,
        changes: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Queries or keys as e4m3 numbers, and their scales; changes: matrix, mean, and shift."""
        numbers = rows.new_empty(rows.shape, dtype=E4M3)
        if self.quantisation.mode == "block":
            scale = self._blocks(extent, rows)
            self._start_rows(rows, numbers, scale, None, extent, offsets, changes, "own")
            return numbers, scale
        largest = self._blocks(extent, rows).zero_()
        self._start_rows(rows, None, None, largest, extent, offsets, changes, "largest")
        scale = self._scale(largest, rows, offsets)
        self._start_rows(rows, numbers, scale, None, extent, offsets, changes, "given")
        return numbers, scale

    def _start_rows(
        self, rows: Tensor, numbers: Tensor | None, scale: Tensor | None, largest: Tensor | None,
        extent: Extent, offsets: Tensor | None,
        changes: tuple[Tensor | None, Tensor | None, Tensor | None], scales: str,
    ) -> None:  # fmt: skip
        """Start the kernel for queries (which have a group of heads for each mean) or keys."""
        is_query, (matrix, mean, shift) = extent is self.geometry.queries, changes
        constants = {
            "HEADS_PER_KV_HEAD": self.group if is_query else 1, "HEAD_DIM": self.head_dim,
            "WIDTH": self.width, "SIZE": self.size, "SCALES": scales,
        }  # fmt: skip

        def arguments() -> tuple[Any, ...]:
            return (
                self._rows(rows, extent, offsets),
                None if numbers is None else self._rows(numbers, extent, offsets),
                scale_view(scale, extent, offsets),
                scale_view(largest, extent, offsets),
                matrix,
                mean,
                fixed(self.geometry.keys.heads),
                None if shift is None else self._numbers(shift, offsets),
            )

        tensors = there_are((rows, numbers, scale, largest, matrix, mean, shift, offsets))
        programs = extent.programs(BLOCK_ROWS)
        self._start(fp8_quantise_rows, constants, 8, programs, tensors, arguments)

    def _values(
        self, inputs: Fp8Inputs, scales: str, scale: Tensor | None, largest: Tensor | None
    ) -> Tensor:
        """Values in tiles [value_dim, BLOCK_ROWS], one for each block of keys of a head."""
        value, keys, offsets = inputs.value, self.geometry.keys, inputs.cu_seqlens_k
        shape = self._blocks(keys, value).shape
        tiles = value.new_empty(*shape, self.value_dim, BLOCK_ROWS, dtype=E4M3)
        constants = {
            "VALUE_DIM": self.value_dim, "VALUE_WIDTH": self.value_width, "SCALES": scales,
            "AS_OPERAND": self.as_operand,
        }  # fmt: skip
        self._start(
            fp8_transpose_values, constants, 8 if self.value_width <= CHUNK else 16,
            keys.programs(BLOCK_ROWS),
            there_are((value, tiles, scale, largest, offsets)),
            lambda: (
                self._rows(value, keys, offsets), self._tiles(tiles, offsets),
                scale_view(scale, keys, offsets), scale_view(largest, keys, offsets),
            ),
        )  # fmt: skip
        return tiles

    def _scale(self, largest: Tensor, rows: Tensor, offsets: Tensor | None) -> Tensor:
        """The scale of each head, or of all, from the largest numbers of blocks."""
        if self.quantisation.mode == "tensor":
            found = largest.amax() if largest.numel() else largest.new_zeros(())
        else:
            found = of_heads(largest, rows, offsets)
        return (found / LARGEST_E4M3).clamp_min(TINIEST)

    # ---- what is handed to kernels --------------------------------------------------------------

    def _start(
        self, kernel: Any, constants: dict[str, Any], warps: int, programs: int, tensors: Any,
        arguments: Any,
    ) -> None:  # fmt: skip
        """Start a kernel that was prepared, or prepare it."""
        key = kernel, *constants.items(), len(tensors)
        launch = self.steps.get(key)
        if launch is None:
            options = {"num_warps": warps, "num_stages": 1}
            launch = self.steps[key] = Launch(kernel, constants, options)
        launch(programs, self.device, tensors, arguments)

    def _blocks(self, extent: Extent, rows: Tensor) -> Tensor:
        """Memory for a number of each block, [batch, heads, blocks] or [1, heads, slots]."""
        batch = 1 if self.packed else extent.batch
        blocks = num_slots(extent.length, extent.batch if self.packed else None)
        return rows.new_empty(batch, extent.heads, blocks, dtype=torch.float32)

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
