"""CallSpec: what calls of equal shapes, strides and dtypes share, worked out once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.gpu import tensor_view
from saccade.gpu.kernel_args import (
    Extent,
    Geometry,
    mask_functions,
    number_strides,
    row_strides,
    view,
)
from saccade.gpu.launcher import Launch, current_device
from saccade.gpu.pass_recorder import MemoryLayout
from saccade.gpu.recording import PassFamily
from saccade.gpu.signature import Number
from saccade.gpu.wide_heads import tile_width, width_of
from saccade.modifiers import intervals
from saccade.modifiers.evaluate import index_range
from saccade.modifiers.expression import Captured, Coordinates
from saccade.modifiers.intervals import Span
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.configs import KernelProblem
from saccade.runtime.max_logit import of_heads
from saccade.runtime.spec import (
    Inputs,
    KernelConfig,
    LinearInputs,
    Results,
    Variant,
    accumulate_dtype,
    empty_all_results,
    empty_gradients,
    heads_inside,
    precision,
)

# ---- how many keys a query row sees, about: where they are few, other tiles are faster -----------

FEW = 1024
CELLS = 64  # along each side, at most: the answer may be rough
SMALLEST_CELL = 64
LENGTH_BITS = 5  # of a length that count here, which is rounded to them


def is_short(mask: str, captured: Captured, query_len: int, kv_len: int) -> bool:
    """Whether rows see at most FEW keys on average, as far as intervals tell.

    A mask that captured tensors is not looked at: what they hold may change from call to call.
    """
    if not mask or captured.tensors or not query_len or not kv_len:
        return False
    if kv_len <= FEW:
        return True
    step = 1 << max(max(query_len, kv_len).bit_length() - LENGTH_BITS, 0)
    shift, rows = kv_len - query_len, -(-query_len // step) * step
    keys = max(rows + shift // step * step, 1)  # so a new length hardly ever asks anew
    return _is_short(mask, tuple(captured.ints), tuple(captured.floats), rows, keys)


@functools.lru_cache(maxsize=4096)
def _is_short(
    mask: str, ints: tuple[int, ...], floats: tuple[float, ...], query_len: int, kv_len: int
) -> bool:
    at = Coordinates(
        batch=index_range(0, 1, 0),
        head=index_range(0, 1, 1),
        query_row=_cells(query_len, 2),
        kv_row=_cells(kv_len, 3),
        shift=kv_len - query_len,
    )
    truth = intervals.classify(mask, Captured((), ints, floats), at)
    return truth.possible.float().mean().item() * kv_len <= FEW


def _cells(length: int, dim: int) -> Span:
    return intervals.rows(0, length, max(SMALLEST_CELL, -(-length // CELLS)), dim)


NOTHING: Mapping[Any, Any] = {}
MOST_PREPARED = 1024  # passes, the oldest of which go first


class Layout(NamedTuple):
    """How a tensor lies in memory, by numbers that know their place among those of a call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def stride(self) -> tuple[int, ...]:
        """Steps from one entry to the next, as a tensor says them."""
        return self.strides


def lengths_of(inputs: Inputs) -> tuple[Any, ...]:
    """What tells calls of one kind apart: their lengths and strides."""
    query, key, value, offsets = *inputs[:3], inputs.cu_seqlens_q
    return (
        query.shape, key.shape, query.stride(), key.stride(), value.stride(),
        None if offsets is None else offsets.shape,
    )  # fmt: skip


def numbers_of(tensors: Sequence[Tensor]) -> list[int]:
    """Shapes and strides of tensors, one after the other."""
    found: list[int] = []
    for tensor in tensors:
        found += tensor.shape
        found += tensor.stride()
    return found


def laid_numbers(memory: Sequence[MemoryLayout]) -> list[int]:
    """Shapes and strides of memory, as `numbers_of` finds those of tensors."""
    found: list[int] = []
    for shape, strides, _ in memory:
        found += shape
        found += strides
    return found


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    if len(shape) == 4 and 0 not in shape:  # at once: each new length asks
        _, heads, rows, channels = shape
        return heads * rows * channels, rows * channels, channels, 1
    found, step = [], 1
    for side in reversed(shape):
        found.append(step)
        step *= side or 1
    return tuple(found[::-1])


def beside_channels(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of [batch, heads, length, dim] that is [batch, length, heads, dim] in memory."""
    batch, heads, length, dim = shape
    of_batch, of_row, of_head, _ = contiguous((batch, length, heads, dim))
    return of_batch, of_head, of_row, 1


class ResultsMemory(NamedTuple):
    """Memory for what a forward pass writes, laid out as `empty_results` has it."""

    output: MemoryLayout
    lse: MemoryLayout
    residual: MemoryLayout | None  # int8, as the output
    largest: MemoryLayout | None  # the largest score of each row, as the lse

    def there_are(self) -> list[MemoryLayout]:
        """All that there are."""
        return [memory for memory in self if memory is not None]

    def placed(self, written: Sequence[Tensor]) -> list[Tensor | None]:
        """The tensors that were made of all that there are, in this order; None for the rest."""
        found = iter(written)
        return [None if memory is None else next(found) for memory in self]

    def results(self, written: Sequence[Tensor], inputs: Inputs) -> Results:
        """The results of a call from what its kernel wrote."""
        if self.largest is None:
            return Results(*written)
        output, lse, residual, largest = self.placed(written)
        assert output is not None and lse is not None
        if largest is not None:
            largest = of_heads(largest, lse, inputs.cu_seqlens_q)
        return Results(output, lse, residual, largest)


def results_memory(inputs: Inputs, variant: Variant) -> ResultsMemory:
    """Memory for the results of a call."""
    query, dim = inputs.query, inputs.value.shape[-1]
    if inputs.cu_seqlens_q is not None:
        tokens, heads, _ = query.shape
        rows: tuple[int, ...] = heads, tokens
        shape: tuple[int, ...] = tokens, heads, dim
        strides = contiguous(shape)
    else:
        batch, heads, length, _ = query.shape
        rows, shape = (batch, heads, length), (batch, heads, length, dim)
        strides = beside_channels(shape) if heads_inside(query) else contiguous(shape)
    of_rows = MemoryLayout(rows, contiguous(rows), accumulate_dtype(query.dtype))
    return ResultsMemory(
        MemoryLayout(shape, strides, query.dtype),
        of_rows,
        MemoryLayout(shape, strides, torch.int8) if variant.residual else None,
        of_rows if variant.max_logit else None,
    )


class CallSpec(NamedTuple):
    """What the kernels of calls like one another share; all but `geometry` and `layouts` is the
    same whatever their lengths."""

    geometry: Geometry
    packed: bool
    device: int | None
    architecture: str
    multiprocessors: int
    constants: dict[str, Any]  # of every kernel
    find: Any  # of Views of packed rows
    launches: dict[Any, Launch]  # of all lengths
    families: dict[Any, PassFamily]  # of backward passes of all lengths, by what they start
    layouts: Mapping[int, Layout] = NOTHING  # of tensors, by id: instead of what they say

    @staticmethod
    def of(inputs: Inputs, find: Any = tensor_view.packed_program_by_heads) -> CallSpec:
        """What a call shares with others, from its tensors; `find` as in `kernel_args.view`."""
        geometry = Geometry.of(inputs)
        head_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
        packed = inputs.cu_seqlens_q is not None
        constants = {
            "HEADS_PER_KV_HEAD": geometry.queries.heads // max(geometry.keys.heads, 1),
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "HEAD_WIDTH": tile_width(head_dim),
            "VALUE_WIDTH": tile_width(value_dim),
            "PRECISION": precision(inputs.query.dtype),
        }
        device = current_device(inputs.query)
        arch, count = architecture(inputs.query), multiprocessors(inputs.query)
        return CallSpec(geometry, packed, device, arch, count, constants, find, {}, {})

    def at(self, inputs: Inputs) -> CallSpec:
        """What a call of other lengths shares."""
        return self._replace(geometry=Geometry.of(inputs))

    def sourced(self, numbers: Sequence[Number], tensors: Sequence[Tensor]) -> CallSpec:
        """A spec whose Views hold numbers of the call that know their places.

        numbers: how many batch entries there are, then what `numbers_of` found of the tensors,
        which are query, key and others.
        """
        found, layouts = iter(numbers[1:]), []
        for tensor in tensors:
            shape, strides = (tuple(itertools.islice(found, tensor.dim())) for _ in range(2))
            layouts.append(Layout(shape, strides, tensor.dtype))
        rows = 0 if self.packed else 2
        queries, keys = (
            Extent(numbers[0], layout.shape[rows], layout.shape[1], self.packed)
            for layout in layouts[:2]
        )
        by_id = dict(zip(map(id, tensors), layouts, strict=True))
        return self._replace(geometry=Geometry(queries, keys), layouts=by_id)

    def problem(self, which: str, call: tuple[Inputs, Variant]) -> KernelProblem:
        """What the config of one of its kernels depends on."""
        width = width_of(self.constants)
        inputs, variant = call
        wide, masked = inputs.query.dtype == torch.float32, variant.mask != ""
        listed = masked and not self.packed and mask_functions(variant.mask).spans_read == 2
        short = is_short(variant.mask, variant.mask_captured, *self.geometry.lengths())
        return KernelProblem(
            self.architecture, which, width, wide, masked, inputs.seed is not None, listed, short,
            self.packed,
        )  # fmt: skip

    def launch(
        self,
        kernel: Any,
        which: str,
        call: tuple[Inputs, Variant],
        requested: KernelConfig | None,
        start: Mapping[str, Any] = NOTHING,
        short: bool | None = None,
        **more: Any,
    ) -> Launch:
        """A kernel with its config, more options for its start, and constants of its own.

        short: what its config is to be chosen for, whatever the mask is; another number in the mask
            then chooses no other one.

        Launches of calls that differ in lengths, and not in what configs look at of them, are one
        family (`Launch.of`).
        """
        problem = self.problem(which, call)
        if short is not None:
            problem = problem._replace(short=short)
        key = kernel, problem, requested, *start.items(), *more.items()
        found = self.launches.get(key)
        if found is None:
            config = configs.choose(problem, requested, configs.tuned())
            sizes = {"QUERY_TILE": config.query_tile, "KV_TILE": config.kv_tile}
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **start}
            found = Launch(kernel, {**self.constants, **sizes, **more}, options)
            self.launches[key] = found
        return found.of(())

    def family(
        self, kernel: Any, constants: dict[str, Any], options: dict[str, int],
        meta: type[tuple[Any, ...]] | None = None,
    ) -> Launch:  # fmt: skip
        """The launches of a kernel with these constants and options; see `Launch`."""
        key = kernel, *constants.items(), *options.items()
        found = self.launches.get(key)
        if found is None:
            found = self.launches[key] = Launch(kernel, constants, options, meta)
        return found

    def layout(self, tensor: Tensor) -> Any:
        """What knows a tensor's shape and strides."""
        return self.layouts.get(id(tensor), tensor)

    def inputs(self, inputs: Inputs) -> tuple[Any, Any, Any]:
        """Views of query, key and value."""
        queries, keys = self.geometry
        return (
            view(inputs.query, self.steps(inputs.query), queries, inputs.cu_seqlens_q, self.find),
            view(inputs.key, self.steps(inputs.key), keys, inputs.cu_seqlens_k, self.find),
            view(inputs.value, self.steps(inputs.value), keys, inputs.cu_seqlens_k, self.find),
        )

    def rows(self, rows: Tensor, inputs: Inputs) -> Any:
        """A View of something that has rows of channels as the queries have."""
        queries, offsets = self.geometry.queries, inputs.cu_seqlens_q
        return view(rows, self.steps(rows), queries, offsets, self.find)

    def steps(self, rows: Tensor) -> tuple[int, int, int]:
        """Strides of batch entry, head and row."""
        return row_strides(self.layout(rows), self.packed)

    def numbers(self, numbers: Tensor, inputs: Inputs) -> Any:
        """A View of something that has one number for each row of the queries."""
        strides = number_strides(self.layout(numbers), self.packed)
        offsets = inputs.cu_seqlens_q
        return view(numbers, strides, self.geometry.queries, offsets, self.find)


def memory_like(tensor: Tensor, device: torch.device | None = None) -> Callable[[], Tensor]:
    """What gives memory like a tensor's each time, without working its layout out again.

    device: where, if not where the tensor is.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    device = device or tensor.device
    return partial(torch.empty_strided, shape, strides, dtype=tensor.dtype, device=device)


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor that lies like another one, and nowhere: kernels are compiled for it, not
    started."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def results_to_come(inputs: Inputs, variant: Variant) -> Results:
    """Results of a call whose forward pass is still to run: without memory."""
    rows = inputs._replace(query=without_memory(inputs.query))
    output, lse, residual, _ = empty_all_results(rows, variant)
    return Results(output, lse, residual if variant.residual else None)


def architecture(tensor: Tensor) -> str:
    """The architecture in `configs.ARCHITECTURES` that a tensor's device counts as."""
    if tensor.device.type == "cpu":  # the interpreter has no device
        return "sm_75"
    return _architecture(tensor.device.index)


@functools.cache
def _architecture(device: int) -> str:
    if torch.version.hip is not None:
        return "gfx942"
    return configs.architecture_of(torch.cuda.get_device_capability(device))


def multiprocessors(tensor: Tensor) -> int:
    """How many programs a tensor's device runs side by side, about."""
    return 1 if tensor.device.type == "cpu" else _multiprocessors(tensor.device.index)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def remembered(memory: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """What a memory holds under a key; if it holds nothing, made now, in place of the oldest."""
    found = memory.get(key)
    if found is None:
        if len(memory) >= MOST_PREPARED:
            memory.pop(next(iter(memory)), None)
        found = memory[key] = make()
    return found


def gradients_to_come(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value: without memory."""
    query, key, value = map(without_memory, inputs[:3])
    return empty_gradients(inputs._replace(query=query, key=key, value=value, sinks=None))[:3]


AnyInputs = TypeVar("AnyInputs", Inputs, LinearInputs)


def with_unit_channels(inputs: AnyInputs) -> AnyInputs:
    """The inputs with channels side by side in memory; copied where they are not."""
    query, key, value = inputs.query, inputs.key, inputs.value
    if query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return inputs
    return inputs._replace(
        **{
            name: tensor if tensor.stride(-1) == 1 else tensor.contiguous()
            for name, tensor in (("query", query), ("key", key), ("value", value))
        }
    )
