"""Pass recorder: what a pass allocates and starts, seen while it goes step by step.

Launches say what they start, and a `TorchDispatchMode` sees every operator. What comes of it is in
`recording.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.gpu import launcher
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.launcher import AnyStart, Start
from saccade.gpu.signature import ALIGNMENT

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


class MemoryLayout(NamedTuple):
    """Memory that a pass allocates: its shape, strides and dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def on(self, device: torch.device) -> Tensor:
        """Such memory on a device, as it is."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def layout_of(tensor: Tensor) -> MemoryLayout:
    """How a tensor lies."""
    return MemoryLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Place(NamedTuple):
    """Where an address lies: so many bytes into memory that the pass allocated."""

    allocation: int
    offset: int


COUNTER = -1
Source = int | Place
"""An address: the number of a tensor of the call, COUNTER, or a place in the pass's own memory."""


class Noted(NamedTuple):
    """A kernel that a pass started."""

    start: Start
    programs: int
    sources: list[Source | None]  # of the launch's addresses; None: of no parameter


class Recorder(TorchDispatchMode):
    """Notes what a pass does."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, index: int) -> None:
        super().__init__()
        self.device, self.index = device, index
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
        self.noted: list[Noted] = []
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
            self.source(address) if number in used else None
            for number, address in enumerate(addresses)
        ]
        self.noted.append(Noted(start, programs, sources))

    def source(self, address: int) -> Source | None:
        """What an address is of; None, and the pass is refused, where that is not known."""
        found = self.sources.get(address)
        if found is None:
            for number, (begin, end) in enumerate(self.extents):
                if begin <= address < end:
                    found = self.sources[address] = Place(number, address - begin)
                    return found
            self.refused = True
        return found
