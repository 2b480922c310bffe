"""Counter: where the programs of a kernel take numbers from, 0 before and after each call.

Behind it are flags, 0 too: in the forward pass, one for each consumer.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = 1024  # the counter, and more flags than consumers of all multiprocessors

_counters: dict[tuple[int, int], Tensor] = {}


def counter_of(device: torch.device) -> Tensor:
    """The counter of calls on a device's current stream.

    Calls on one stream follow each other, so they share one. A graph that is captured gets its own,
    as it may run beside anything.
    """
    if torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(NUMBERS, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(NUMBERS, dtype=torch.int32, device=device)
    return found
