"""Modes of PyTorch that a caller is in, of which an engine's work must know nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
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
        inference, casts = torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()
        if not inference and not casts:
            return work(*arguments, **options)
        with contextlib.ExitStack() as modes:
            if inference:
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.no_grad())
            accelerator = torch.accelerator.current_accelerator()
            for kind in {"cpu", accelerator.type if accelerator else "cpu"}:
                modes.enter_context(torch.autocast(kind, enabled=False))
            return work(*arguments, **options)

    return done
