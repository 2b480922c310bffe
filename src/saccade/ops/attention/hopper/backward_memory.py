"""Backward memory: what the kernels of one backward pass are given, and what they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.ops.attention.hopper.preprocess import PARTS
from saccade.ops.attention.triton.call_spec import memory_like


class BackwardInputs(NamedTuple):
    """What a pass is given beside the inputs."""

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None


class BackwardMemory(NamedTuple):
    """What is written in one pass."""

    of_query: Tensor
    of_key: Tensor
    of_value: Tensor
    starts: Tensor  # what sums start at, by slot
    lse_log2: Tensor | None  # with row_dot: for Triton kernels, if some come after
    row_dot: Tensor | None
    dq_accumulate: Tensor | None  # of the gradients of queries, float32, by slot
    flag: Tensor | None  # whether hidden rows may have made nonfinite something
    semaphores: Tensor | None  # by part


class Makers(NamedTuple):
    """What makes each of BackwardMemory; None for what is not needed."""

    of_query: Callable[[], Tensor]
    of_key: Callable[[], Tensor]
    of_value: Callable[[], Tensor]
    starts: Callable[[], Tensor]
    lse_log2: Callable[[], Tensor] | None
    row_dot: Callable[[], Tensor] | None
    dq_accumulate: Callable[[], Tensor] | None
    flag: Callable[[], Tensor] | None
    semaphores: Callable[[], Tensor] | None

    @staticmethod
    def of(
        gradients: Sequence[Tensor],
        lse: Tensor,
        slots: int,
        slot: tuple[int, int],
        *,
        by_triton: bool,
        dq_accumulate: bool,
        flag: bool,
        semaphores: bool,
    ) -> Makers:
        """What a kind of pass needs. slot: rows and channels of one. by_triton: whether by_triton
        kernels come after."""
        tile, width = slot
        of_query, of_key, of_value = map(memory_like, gradients)
        statistics = memory_like(lse) if by_triton else None
        return Makers(
            of_query,
            of_key,
            of_value,
            _numbers(lse, torch.float32, slots, 2 * tile),
            statistics,
            statistics,
            _numbers(lse, torch.float32, slots * tile, width) if dq_accumulate else None,
            _numbers(lse, torch.int32) if flag else None,
            _numbers(lse, torch.int32, slots * PARTS.value) if semaphores else None,
        )

    def __call__(self) -> BackwardMemory:
        """BackwardMemory for one pass."""
        return BackwardMemory(*[None if make is None else make() for make in self])  # type: ignore[arg-type]


def _numbers(beside: Tensor, dtype: torch.dtype, *shape: int) -> Callable[[], Tensor]:
    """What makes a contiguous tensor on another one's device."""
    strides = torch.empty(shape, device="meta").stride()
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=beside.device)
