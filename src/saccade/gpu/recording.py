"""Recording: what a pass takes of memory and starts on the GPU, noted once and then done again.

A pass is Python code that allocates memory, works out parameters and starts kernels. In calls that
are alike in all but addresses it comes to the same each time: so much memory, these kernels, and
which address goes where. The first ones go step by step, as there may be no more of them; so does
the fourth, which is noted meanwhile; later ones allocate the results and one block for all that is
needed in between, write the addresses into the kernels' parameters, and start them.

A recording is of what launches and PyTorch's dispatcher see, so a pass need not know of it. One
that does anything else than to allocate memory (as it is, or zeros), to look at it otherwise
(views) and to launch is not recorded: it goes step by step each time. So do calls on another device
than the current one, those whose addresses are not aligned, those with one tensor for two where the
recorded one had two or the other way round, and all while a profiler looks on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.gpu import launcher
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.launcher import AnyStart, Maps, Start
from saccade.gpu.signature import ALIGNMENT

RECORDS = True  # turned off where every launch is to be seen
STEP_BY_STEP = 3  # calls before one is recorded, which takes longer than any other
PIECE = 512  # bytes: pieces of a block begin at multiples of it, as PyTorch's own do

# What PyTorch's compiled graphs allocate by, on the current device: 1.1 us for the 1.8 of
# torch.empty_strided.
EMPTY_STRIDED: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # pyright: ignore[reportAttributeAccessIssue]

aten = torch.ops.aten
ALLOCATES = frozenset(
    {
        aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
        aten.new_empty.default, aten.new_empty_strided.default,
    }
)  # fmt: skip

ZEROES = frozenset({aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default})
VIEWS = frozenset({aten.detach.default, aten.view.default, aten.select.int})  # found sooner so
Results = tuple[Tensor, ...]
profiled = torch._C._autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]


class RecordedPass:
    """A pass of calls that are alike in all but the addresses of their tensors."""

    def __init__(self, query: Tensor) -> None:
        """query: a tensor on the GPU of such calls."""
        self.device = query.device
        self.index = launcher.current_device(query)  # None for Triton's interpreter
        self.again: Callable[[Sequence[Tensor]], Results | None] = _not_recorded
        self.calls_left = STEP_BY_STEP

    def __call__(self, tensors: Sequence[Tensor], run: Callable[[], Results]) -> Results:
        """What `run` gives: by running it, or by doing what it did.

        tensors: all whose addresses it hands to kernels, but for its own memory and counters.
        """
        results = self.again(tensors)
        if results is not None:
            return results
        if self.calls_left or self.index is None or not _may_be_recorded(self.index):
            self.calls_left -= self.calls_left > 0
            return run()
        self.calls_left = -1  # it is tried once
        recorder = Recorder(tensors, self.device)
        results = recorder.watch(run)
        self.again = recorder.recording(results, self.index) or _not_recorded
        return results


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


class Place(NamedTuple):
    """Where an address lies: so many bytes into memory that the pass allocated."""

    allocation: int
    offset: int


COUNTER = -1
Source = int | Place
"""An address: the number of a tensor of the call, COUNTER, or a place in the pass's own memory."""


class Recorder(TorchDispatchMode):
    """Notes what a pass does."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.tensors: dict[int, int] = {}  # the first at each address
        self.same: list[tuple[int, int]] = []
        for number, tensor in enumerate(tensors):
            first = self.tensors.setdefault(tensor.data_ptr(), number)
            if first != number:
                self.same.append((first, number))
        self.num_tensors = len(tensors)
        self.counter = tile_scheduler.counter_of(device).data_ptr()
        self.allocations: list[Tensor] = []  # kept, so that none takes the place of another
        self.zeroed: set[int] = set()  # those that begin as zeros
        self.extents: list[tuple[int, int]] = []  # where their memory begins and ends
        self.sources: dict[int, Source] = {**self.tensors, self.counter: COUNTER}  # that are known
        self.noted: list[tuple[Start, int, list[Source | None]]] = []
        together = 0
        for address in self.tensors:
            together |= address
        self.refused = together % ALIGNMENT != 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Modes are not traced while torch.compile traces, which takes longer than all else; where
        passes are recorded nothing is traced."""
        return False

    def watch(self, run: Callable[[], Results]) -> Results:
        """Run a pass and note what it does."""
        before, launcher.watched.by = launcher.watched.by, self._note
        try:
            with self:
                return run()
        finally:
            launcher.watched.by = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator that the pass calls."""
        found = func(*args, **(kwargs or {}))
        if func in ALLOCATES or func in ZEROES:
            if func in ZEROES:
                self.zeroed.add(len(self.allocations))
            memory = found.untyped_storage()
            begin = memory.data_ptr()
            self.allocations.append(found)
            self.extents.append((begin, begin + memory.nbytes()))
        elif func not in VIEWS and not func.is_view:
            self.refused = True
        return found

    def _note(self, start: AnyStart, programs: int, addresses: Sequence[int]) -> None:
        if not isinstance(start, Start) or not start.template.complete:
            self.refused = True
            return
        template = start.template
        used = {number for number, _ in template.pointers} | {moved[0] for moved in start.maps}
        sources = [
            self._source(address) if number in used else None
            for number, address in enumerate(addresses)
        ]
        self.noted.append((start, programs, sources))

    def _source(self, address: int) -> Source | None:
        found = self.sources.get(address)
        if found is None:
            for number, (begin, end) in enumerate(self.extents):
                if begin <= address < end:
                    found = self.sources[address] = Place(number, address - begin)
                    return found
            self.refused = True
        return found

    def recording(self, results: Results, index: int) -> Recording | None:
        """What was noted; None where it cannot be done again.

        results: what the pass gave.
        """
        numbers: dict[int, int] = {}  # of results, by allocation
        for number, result in enumerate(results, self.num_tensors):
            if result.numel() == 0:  # it has no address
                continue
            place = self._source(result.data_ptr())
            if not isinstance(place, Place) or not _fills_memory(result):
                return None
            if place.allocation in numbers or place.allocation in self.zeroed:
                return None
            numbers[place.allocation] = number
        makers = [
            memory_of(tuple(result.shape), result.stride(), result.dtype, self.device)
            for result in results
        ]
        if self.refused:
            return None
        found = _Layout(self, numbers, self.num_tensors + len(results))
        starts = [found.again(*one) for one in self.noted]
        return Recording(
            self.device, index, self.same, makers, found.blocks, found.counted, found.places,
            starts,
        )  # fmt: skip


class _Layout:
    """Which number each address of a recording has."""

    def __init__(self, recorder: Recorder, results: dict[int, int], first: int) -> None:
        """results: their numbers, by allocation. first: the first number behind them, from which on
        blocks, the counter, if there is one, and places have theirs."""
        sources = dict.fromkeys(source for _, _, each in recorder.noted for source in each)
        places = [source for source in sources if isinstance(source, Place)]
        self.counted, self.blocks = COUNTER in sources, list[Callable[[], Tensor]]()
        begins: dict[int, tuple[int, int]] = {}  # of allocations: their block, and where in it
        for ops in (torch.empty, torch.zeros):
            size = 0
            for number in dict.fromkeys(place.allocation for place in places):
                if number not in results and (number in recorder.zeroed) == (ops is torch.zeros):
                    begins[number] = first + len(self.blocks), size
                    bytes_of = recorder.allocations[number].untyped_storage().nbytes()
                    size += -(-bytes_of // PIECE) * PIECE
            if size and ops is torch.empty:
                self.blocks.append(memory_of((size,), (1,), torch.uint8, recorder.device))
            elif size:
                self.blocks.append(partial(ops, size, dtype=torch.uint8, device=recorder.device))
        self.of_counter = first + len(self.blocks)
        first = self.of_counter + self.counted
        self.numbers: dict[Place, int] = {}
        self.places: list[tuple[int, int]] = []
        for place in places:
            base, offset = results.get(place.allocation), place.offset
            if base is None:
                base, begin = begins[place.allocation]
                offset += begin
            self.numbers[place] = first + len(self.places) if offset else base
            if offset:
                self.places.append((base, offset))

    def again(self, start: Start, programs: int, sources: list[Source | None]) -> Again:
        """A kernel that was noted, by the numbers of the whole pass."""
        numbers = [
            self.numbers[source] if isinstance(source, Place)
            else self.of_counter if source == COUNTER
            else source
            for source in sources
        ]  # fmt: skip

        def number_of(number: int) -> int:
            found = numbers[number]
            assert found is not None, "an address that no parameter was noted to have"
            return found

        pointers = [(number_of(number), word) for number, word in start.template.pointers]
        maps = [(number_of(number), byte, known) for number, byte, known in start.maps]
        return Again(start, programs, pointers, maps)


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
