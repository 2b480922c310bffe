"""Recording: what a pass takes of memory and starts on the GPU, noted once and then done again.

A pass is Python code that allocates memory, works out parameters and starts kernels. In calls that
are alike in all but addresses it comes to the same each time: so much memory, these kernels, and
which address goes where. The first ones go step by step, as there may be no more of them; so does
the fourth, which is noted meanwhile; later ones allocate the results and one block for all that is
needed in between, write the addresses into the kernels' parameters, and start them.

Calls that differ in lengths too differ in numbers: those that kernels are handed, how many programs
there are, how large memory is. A pass that says these beforehand (`Lengths`) need not be noted for
each length: what was noted of one of them (`Pattern`) serves the others from their first call on.

A recording is of what launches and PyTorch's dispatcher see, so a pass need not know of it. One
that does anything else than to allocate memory (as it is, or zeros), to look at it otherwise
(views) and to launch is not recorded: it goes step by step each time. So do calls on another device
than the current one, those whose addresses are not aligned, those with one tensor for two where the
recorded one had two or the other way round, and all while a profiler looks on.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import launcher
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Maps, Start, Template, are_small, key_at
from saccade.gpu.pass_recorder import (
    COUNTER,
    MemoryLayout,
    Place,
    Recorder,
    Results,
    Source,
    layout_of,
)
from saccade.gpu.signature import ALIGNMENT

RECORDS = True  # turned off where every launch is to be seen
STEP_BY_STEP = 3  # calls before one is recorded, which takes longer than any other
PIECE = 512  # bytes: pieces of a block begin at multiples of it, as PyTorch's own do

# What PyTorch's compiled graphs allocate by, on the current device: 1.1 us for the 1.8 of
# torch.empty_strided.
EMPTY_STRIDED: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # pyright: ignore[reportAttributeAccessIssue]

profiled = torch._C._autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]


class Lengths(NamedTuple):
    """All that lengths decide of a pass."""

    numbers: tuple[int, ...]  # that each of its kernels is handed (`Launch.of`)
    programs: tuple[int, ...]  # of each kernel, in the order in which they are started
    memory: Sequence[MemoryLayout]  # that it allocates, in this order


class PassFamily:
    """Passes that differ in lengths alone: they start the same kernels."""

    def __init__(self) -> None:
        self.calls_left = STEP_BY_STEP  # of any length, before one is recorded
        self.pattern: Pattern | None = None  # of one that was


class RecordedPass:
    """A pass of calls that are alike in all but the addresses of their tensors."""

    def __init__(
        self, query: Tensor, family: PassFamily | None = None, lengths: Lengths | None = None
    ) -> None:
        """query: a tensor on the GPU of such calls. family, lengths: of a pass that says them."""
        self.device = query.device
        self.index = launcher.current_device(query)  # None for Triton's interpreter
        self.family, self.lengths = family or PassFamily(), lengths
        self.again: Callable[[Sequence[Tensor]], Results | None] = _not_recorded
        self.calls_left = STEP_BY_STEP
        self._derive()

    def __call__(self, tensors: Sequence[Tensor], run: Callable[[], Results]) -> Results:
        """What `run` gives: by running it, or by doing what it did.

        tensors: all whose addresses it hands to kernels, but for its own memory and counters.
        """
        results = self.again(tensors)
        if results is None and self._derive():  # another length was recorded meanwhile
            results = self.again(tensors)
        if results is not None:
            return results
        if not self._is_time() or self.index is None or not _may_be_recorded(self.index):
            self.calls_left -= self.calls_left > 0
            self.family.calls_left -= self.family.calls_left > 0
            return run()
        self.calls_left = self.family.calls_left = -1  # it is tried once
        recorder = Recorder(tensors, self.device, self.index)
        results = recorder.watch(run)
        pattern = Pattern.of(recorder, results)
        if pattern is not None:
            self.again = pattern.recording()
            if self.lengths is not None and pattern.serves(self.lengths):
                self.family.pattern = pattern
        return results

    def _is_time(self) -> bool:
        """Whether it is to be recorded now: the first of its family, or one by itself."""
        return self.calls_left == 0 or (self.family.calls_left == 0 and self.calls_left > 0)

    def _derive(self) -> bool:
        """Take what was recorded of another length, if there is any; whether it is new."""
        pattern = self.family.pattern
        if pattern is None or self.lengths is None or self.again is not _not_recorded:
            return False
        self.again = pattern.at(self.lengths) or _not_recorded
        return self.again is not _not_recorded


def _not_recorded(tensors: Sequence[Tensor]) -> None:
    """The results of a pass that there is no recording of."""
    return None


def _may_be_recorded(index: int) -> bool:
    return (
        RECORDS
        and torch._C._cuda_getDevice() == index
        and not torch._C._cuda_isCurrentStreamCapturing()  # whose counters differ from call to call
    )


class Again(NamedTuple):
    """A kernel of a pass."""

    start: Start
    programs: int
    pointers: list[tuple[int, int]]  # as a Start has them, but of the addresses of the whole pass
    maps: list[Maps]


class Recording:
    """What a pass does, to be done again for tensors that lie as those before."""

    def __init__(
        self, device: torch.device, index: int, same: Sequence[tuple[int, int]],
        results: Sequence[Callable[[], Tensor]], blocks: Sequence[Callable[[], Tensor]],
        counted: bool, places: Sequence[tuple[int, int]], starts: Sequence[Again],
    ):  # fmt: skip
        """same: which tensors are at one address. places: addresses that are so many bytes behind
        another one (number of address, bytes); addresses are those of tensors, results, blocks and
        the counter, then these."""
        self.device, self.index, self.same = device, index, same
        self.results, self.blocks, self.counted = results, blocks, counted
        self.places, self.starts = places, starts

    def __call__(self, tensors: Sequence[Tensor]) -> Results | None:
        """The results for other tensors; None, and nothing is started, if these do not fit."""
        addresses, bits = [tensor.data_ptr() for tensor in tensors], 0
        for address in addresses:
            bits |= address
        if bits % ALIGNMENT or torch._C._cuda_getDevice() != self.index:
            return None
        if profiled() or not RECORDS:
            return None
        if len(set(addresses)) != len(addresses) - len(self.same):
            return None
        for first, number in self.same:
            if addresses[first] != addresses[number]:
                return None
        results = tuple([make() for make in self.results])
        addresses += [result.data_ptr() for result in results]
        # Blocks live until all is started; then the stream keeps its order.
        blocks = [make() for make in self.blocks]
        addresses += [block.data_ptr() for block in blocks]
        if self.counted:
            addresses.append(tile_scheduler.counter_of(self.device).data_ptr())
        if self.places:
            addresses += [addresses[number] + offset for number, offset in self.places]
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        for start, programs, pointers, maps in self.starts:
            start.at(programs, stream, addresses, pointers, maps)
        return results


class Pattern:
    """What a pass does but for numbers: which kernels it starts, with which address where.

    Addresses have numbers: those of tensors and results, of blocks, of the counter if there is one,
    and of places behind others.
    """

    def __init__(
        self, recorder: Recorder, results: list[MemoryLayout], numbers: dict[int, int]
    ) -> None:
        """results: their layouts. numbers: of those that have memory, by allocation."""
        self.device, self.index, self.same = recorder.device, recorder.index, recorder.same
        self.noted, self.results = recorder.noted, results
        self.memory = list(map(layout_of, recorder.allocations))
        self.bytes = [memory.untyped_storage().nbytes() for memory in recorder.allocations]
        self.of_results = list(numbers)  # allocations, in the order of results
        sources = dict.fromkeys(source for each in self.noted for source in each.sources)
        places = [source for source in sources if isinstance(source, Place)]
        self.counted = COUNTER in sources
        self.blocks: list[tuple[bool, list[int]]] = []  # whether of zeros, and what lies in it
        bases, first = dict(numbers), recorder.num_tensors + len(results)
        for zeroed in (False, True):
            pieces = [
                number
                for number in dict.fromkeys(place.allocation for place in places)
                if number not in numbers and (number in recorder.zeroed) is zeroed
            ]
            if pieces:
                bases |= dict.fromkeys(pieces, first + len(self.blocks))
                self.blocks.append((zeroed, pieces))
        of_source: dict[Source | None, int | None] = {None: None}
        of_source[COUNTER] = first + len(self.blocks)
        first += len(self.blocks) + self.counted
        begins = {pieces[0] for _, pieces in self.blocks} | numbers.keys()
        self.places: list[tuple[int, Place]] = []  # that lie behind another address
        for place in places:
            if place.offset == 0 and place.allocation in begins:
                of_source[place] = bases[place.allocation]
            else:
                of_source[place] = first + len(self.places)
                self.places.append((bases[place.allocation], place))
        of_source |= {number: number for number in range(recorder.num_tensors)}
        self.kernels = [
            PlacedKernel([of_source[source] for source in each.sources]) for each in self.noted
        ]
        templates = [each.start.template for each in self.noted]
        self.families = there_are([template.family for template in templates])
        self.templates: dict[tuple[int, ...], list[Template]] = {}  # by what they look at
        self.compiled_in, self.classed = list[int](), list[int]()  # of all families
        self.looked_through: list[Any] = [None] * len(self.families)  # what they have found

    @staticmethod
    def of(recorder: Recorder, results: Results) -> Pattern | None:
        """What was noted of a pass; None where it cannot be done again.

        results: what the pass gave.
        """
        numbers: dict[int, int] = {}  # of results, by allocation
        for number, result in enumerate(results, recorder.num_tensors):
            if result.numel() == 0:  # it has no address
                continue
            place = recorder.source(result.data_ptr())
            if not isinstance(place, Place) or not _fills_memory(result):
                return None
            if place.allocation in numbers or place.allocation in recorder.zeroed:
                return None
            numbers[place.allocation] = number
        return None if recorder.refused else Pattern(recorder, [*map(layout_of, results)], numbers)

    def recording(self) -> Recording:
        """The recording of the calls that it was noted of."""
        starts = [
            placed.again(start, programs)
            for placed, (start, programs, _) in zip(self.kernels, self.noted, strict=True)
        ]
        return self._recording(self.results, self.bytes, starts)

    def serves(self, lengths: Lengths) -> bool:
        """Whether lengths are those of the calls that it was noted of, and say all of it: then it
        serves other ones."""
        programs = tuple([each.programs for each in self.noted])
        if programs != lengths.programs or len(self.families) != len(programs):
            return False
        for start, _, _ in self.noted:
            if start.template.filled(lengths.numbers) != start.values:
                return False
        if list(lengths.memory) != self.memory:
            return False
        laid = [self.memory[number] for number in self.of_results]
        inside = any(place.offset for _, place in self.places)
        return laid == self.results and not inside and self.bytes == list(map(_bytes, self.memory))

    def at(self, lengths: Lengths) -> Recording | None:
        """The recording of calls of other lengths; None where some kernel was not started yet for
        such lengths, or there is nothing to do."""
        numbers, sizes = lengths.numbers, [*map(_bytes, lengths.memory)]
        if 0 in sizes or 0 in lengths.programs or not are_small(numbers):
            return None
        templates = self._templates(numbers)
        if templates is None:
            return None
        starts = [
            placed.again(Start(template, numbers), programs)
            for placed, template, programs in zip(
                self.kernels, templates, lengths.programs, strict=True
            )
        ]
        return self._recording([lengths.memory[n] for n in self.of_results], sizes, starts)

    def _templates(self, numbers: tuple[int, ...]) -> list[Template] | None:
        """What each kernel's parameters are made by for such numbers."""
        families, found = self.families, [family.found for family in self.families]
        if not all(map(operator.is_, found, self.looked_through)):
            self.looked_through, self.templates = found, {}
            self.compiled_in = sorted({n for family in families for n in family.compiled_in})
            self.classed = sorted({n for family in families for n in family.classed})
        key = key_at(numbers, self.compiled_in, self.classed)
        templates = self.templates.get(key)
        if templates is None:
            known = [family.find(numbers) for family in families]
            templates = [template for template in known if template is not None]
            if len(templates) < len(known):
                return None
            self.templates[key] = templates
        return templates

    def _recording(
        self, results: Sequence[MemoryLayout], sizes: Sequence[int], starts: list[Again]
    ) -> Recording:
        """sizes: bytes of each allocation."""
        begins: dict[int, int] = {}  # of allocations in their blocks
        blocks: list[Callable[[], Tensor]] = []
        for zeroed, pieces in self.blocks:
            size = 0
            for number in pieces:
                begins[number] = size
                size += -(-sizes[number] // PIECE) * PIECE
            if zeroed:
                blocks.append(partial(torch.zeros, size, dtype=torch.uint8, device=self.device))
            else:
                blocks.append(memory_of((size,), (1,), torch.uint8, self.device))
        places = [
            (base, begins.get(place.allocation, 0) + place.offset) for base, place in self.places
        ]
        makers = [memory_of(*layout, self.device) for layout in results]
        return Recording(
            self.device, self.index, self.same, makers, blocks, self.counted, places, starts
        )


class PlacedKernel:
    """A kernel of a pattern: where in the pass its addresses are."""

    def __init__(self, numbers: Sequence[int | None]) -> None:
        """numbers: those in the pass of the launch's addresses; None: of no parameter."""
        self.numbers = numbers
        self.placed: dict[Template, tuple[list[tuple[int, int]], list[int]]] = {}

    def again(self, start: Start, programs: int) -> Again:
        """The kernel by a start of it."""
        template = start.template
        found = self.placed.get(template)
        if found is None:
            pointers = [(self._number(number), word) for number, word in template.pointers]
            found = pointers, [self._number(moved.number) for moved in template.maps]
            self.placed[template] = found
        pointers, moved = found
        maps = [
            (number, byte, known)
            for number, (_, byte, known) in zip(moved, start.maps, strict=True)
        ]
        return Again(start, programs, pointers, maps)

    def _number(self, number: int) -> int:
        found = self.numbers[number]
        assert found is not None, "an address that no parameter was noted to have"
        return found


def _bytes(layout: MemoryLayout) -> int:
    """Bytes of memory that its entries fill."""
    return math.prod(layout.shape) * layout.dtype.itemsize


def _fills_memory(tensor: Tensor) -> bool:
    """Whether memory for its shape and strides is all the memory that it lies in."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    whole = extent * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor.storage_offset() == 0 and whole


def prepared(
    forward: Callable[[Any, Any, Any], Sequence[Tensor]], inputs: Any, config: Any
) -> Callable[[Any, Any], Results]:
    """A forward pass of (inputs, variant, config) for calls like one that has these inputs; its
    other arguments stay the same, and the variant holds no tensor."""
    done, brought = RecordedPass(inputs.query), tensors_in(inputs)
    return lambda inputs, variant: done(
        brought(inputs), lambda: tuple(forward(inputs, variant, config))
    )


def layouts_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """What tells tensors apart but for their addresses."""
    return [
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in tensors
    ]


def tensors_in(inputs: tuple[Tensor | None, ...]) -> Callable[[Any], tuple[Tensor, ...]]:
    """What picks the tensors of inputs that have those that these have; at least two."""
    return operator.itemgetter(*[n for n, tensor in enumerate(inputs) if tensor is not None])


def memory_of(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """What gives memory of such a layout each time, on a device that is the current one."""
    if device.type == "cuda" and EMPTY_STRIDED is not None:
        return partial(EMPTY_STRIDED, shape, strides, dtype)
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
