"""Guarded: memory that nobody may leave, for tensors that kernels are given and that they make.

Between closed pages (on the CPU) whoever reads or writes beside a tensor is killed by the system.
Between canaries (on a GPU) whoever writes there is found out afterwards, and what is read there is
NaN. A tensor that lies alone in its own memory is for `compute-sanitizer`, which sees both.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

CANARY, MARGIN = 0xFF, 1 << 16  # a byte of NaN in every floating-point dtype; bytes beside a tensor
CLOSED = 1 << 28  # bytes of closed pages on either side
MAKERS = ("empty", "empty_strided", "empty_like", "zeros", "zeros_like")
METHODS = ("new_empty", "new_zeros", "new_full")

Hold = Callable[[Tensor], Tensor]  # a copy of a tensor, where it can be guarded


class Alone:
    """Tensors in memory of their own."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, with its strides."""
        found = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return found.copy_(tensor)

    def check(self) -> None:
        """Nothing can be seen from here."""


class Canaries:
    """Tensors in the middle of memory that holds canaries."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor between canaries, with its strides."""
        size = tensor.untyped_storage().nbytes()
        held = _full(size + 2 * MARGIN, tensor.device)
        self.kept.append(held)
        inner = held[MARGIN : MARGIN + size].view(tensor.dtype)
        found = inner.as_strided(tensor.shape, tensor.stride())
        return found.copy_(tensor)

    def check(self) -> None:
        """All canaries are as they were."""
        for held in self.kept:
            beside = torch.cat((held[:MARGIN], held[-MARGIN:]))
            assert bool((beside == CANARY).all()), "something was written beside a tensor"
        self.kept.clear()


def _full(size: int, device: torch.device) -> Tensor:
    return torch.full((size,), CANARY, dtype=torch.uint8, device=device)


class ClosedPages:
    """Tensors that end where a closed page begins, or begin where one ends, by turns."""

    def __init__(self) -> None:
        self.at_end = False
        self.system: Any = ctypes.CDLL(None, use_errno=True)
        self.system.mmap.restype = ctypes.c_void_p
        self.system.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.c_long,
        ]  # fmt: skip
        self.system.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.taken: list[tuple[int, int]] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor beside closed pages, with its strides."""
        size = tensor.untyped_storage().nbytes()
        if size == 0:
            return tensor
        opened = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = opened + 2 * CLOSED
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # and no swap is set aside for it
        start = self.system.mmap(None, whole, 0, flags, -1, 0)
        assert start is not None and start != ctypes.c_void_p(-1).value, "no memory to reserve"
        self.taken.append((start, whole))
        assert not self.system.mprotect(start + CLOSED, opened, mmap.PROT_READ | mmap.PROT_WRITE)
        self.at_end = not self.at_end
        first = start + CLOSED + (opened - size if self.at_end else 0)
        numbers = (ctypes.c_uint8 * size).from_address(first)
        found = torch.frombuffer(numbers, dtype=tensor.dtype)
        return found.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def check(self) -> None:
        """Whoever left a tensor has been killed. The memory is given back: no tensor may be used
        any more."""
        for start, whole in self.taken:
            self.system.munmap(start, whole)
        self.taken.clear()


@contextlib.contextmanager
def all_that_is_made(hold: Hold) -> Iterator[None]:
    """Tensors that are made inside lie where `hold` puts them; those made empty hold NaN."""
    inside = False

    def held(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            nonlocal inside
            found = make(*arguments, **options)
            if inside or found.device.type == "meta" or found.layout != torch.strided:
                return found
            inside = True
            try:
                return hold(found)
            finally:
                inside = False

        return made

    with contextlib.ExitStack() as stack:
        for owner, names in ((torch, MAKERS), (Tensor, METHODS)):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, held(getattr(owner, name))))
        yield
