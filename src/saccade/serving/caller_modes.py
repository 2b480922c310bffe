"""Modes of PyTorch that a caller is in: an engine's work must know nothing of them, and leaves
them as they were, also where it is interrupted."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from typing_extensions import ParamSpec

P = ParamSpec("P")
R = TypeVar("R")


def without_callers_modes(work: Callable[P, R]) -> Callable[P, R]:
    """A function that does its work alike in every caller's modes.

    Any thread that waits takes steps, for all requests, and pages are found again by later ones:
    so numbers must not follow from the autocast that a thread happens to be in. Tensors that an
    engine keeps are written to inside of inference mode and outside, so they are never made by it.
    """

    @functools.wraps(work)
    def done(*arguments: P.args, **options: P.kwargs) -> R:
        casts = torch._C._is_any_autocast_enabled()
        cast = _without_autocast() if casts else contextlib.nullcontext()
        with torch.inference_mode(False), torch.no_grad(), cast:
            try:
                return work(*arguments, **options)
            except BaseException as error:
                _leave_inference_mode(error)
                raise

    return done


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Compute in the tensors' own dtypes, of the CPU's and the accelerator's.

    `torch.autocast` counts how deep it is: an interrupt inside of it would leave the count, and
    then what it keeps of weights would outlive the caller's own block.
    """
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", accelerator.type if accelerator else "cpu"}
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    try:
        for kind in enabled:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        for kind in enabled:
            torch.set_autocast_enabled(kind, True)


def _leave_inference_mode(error: BaseException) -> None:
    """Leave modes that an interrupt (Ctrl-C) kept PyTorch from leaving itself.

    It may come inside of `torch.inference_mode`'s own `__enter__` or `__exit__`. Then what enters
    the mode lives as long as the error does, and when that goes brings back the mode from before,
    which may be inference mode again: a notebook's next training would fail. Cleared here, it does
    so inside of the block that has the caller's modes to bring back.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "torch.autograd.grad_mode":
            frame.clear()
