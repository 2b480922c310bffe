"""Memory: fresh tensors that hold NaN, so that whatever was not written shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.utils.deterministic as fresh_memory


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN (integers: the largest number) inside the block.

    PyTorch does it itself in its deterministic mode, also for memory that its own kernels take.
    """
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = fresh_memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    fresh_memory.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)
        fresh_memory.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
