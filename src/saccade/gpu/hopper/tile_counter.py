"""Tile counter: where the programs of a kernel take numbers from, 0 before and after each call.

Behind it are flags, 0 too: in the forward pass, one for each consumer.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = 2048  # the counter, and more flags than consumers of all multiprocessors
SPARE = 128  # calls that graphs can hold before they write zeros themselves

_counters: dict[tuple[int, int], Tensor] = {}
_spares: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by device: memory that stays, what is left


def counter_of(device: torch.device) -> Tensor:
    """The counter of calls on a device's current stream.

    Calls on one stream follow each other, so they share one. A call that a graph captures gets its
    own, as it may run beside anything: one that was made before, so that the graph need not write
    zeros ahead of each call, which would take 3 µs and keep it from starting early.
    """
    if torch._C._cuda_isCurrentStreamCapturing():
        _, left = _spares.get(device.index, (None, []))
        return left.pop() if left else torch.zeros(NUMBERS, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(NUMBERS, dtype=torch.int32, device=device)
        if device.index not in _spares:
            memory = torch.zeros(SPARE, NUMBERS, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # graphs run on any stream
            _spares[device.index] = memory, list(memory.unbind(0))
    return found
