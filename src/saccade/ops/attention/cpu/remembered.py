"""Remembered: what was made of a mask, kept for the layers and passes that ask for it again.

A model asks for the same plans and partial tiles in every layer, forwards and backwards. What a
mask captured may change in place at any time, with or without PyTorch's knowledge, so tensors are
compared by their contents: equal ones give the same result, whoever wrote them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

# Captured numbers of one mask that are copied and compared: more would cost what they save.
MOST_COMPARED = 2**18


@dataclass(frozen=True)
class _Entry(Generic[Result]):
    tensors: list[Tensor]  # copies
    result: Result
    size: int


class Remembered(Generic[Result]):
    """Results by key and by the contents of tensors; the oldest go first.

    Args:
        most: the sum of sizes up to which results are kept.
        size: of one result.
    """

    def __init__(self, most: int, size: Callable[[Result], int] = lambda result: 1):
        self.most, self.size = most, size
        self.total = 0
        self.entries: OrderedDict[Hashable, _Entry[Result]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], Result]) -> Result:
        """The result that is known, or a new one of `make`, which must depend on nothing else."""
        compared = sum(tensor.numel() for tensor in tensors) <= MOST_COMPARED
        if not compared or any(tensor.is_floating_point() for tensor in tensors):
            return make()  # of real numbers 0.0 and -0.0 are equal
        key = (key, *((tensor.shape, tensor.dtype) for tensor in tensors))
        found = self.entries.get(key)
        if found is not None and all(map(torch.equal, found.tensors, tensors)):
            with self.lock:
                if key in self.entries:
                    self.entries.move_to_end(key)
            return found.result
        with torch.inference_mode(False), torch.no_grad():  # it must serve everywhere
            copies = [tensor.clone() for tensor in tensors]
            result = make()
        self._keep(key, _Entry(copies, result, self.size(result)))
        return result

    def _keep(self, key: Hashable, entry: _Entry[Result]) -> None:
        if entry.size > self.most:
            return
        with self.lock:
            old = self.entries.pop(key, None)
            self.total += entry.size - (0 if old is None else old.size)
            self.entries[key] = entry
            while self.total > self.most:
                self.total -= self.entries.popitem(last=False)[1].size
