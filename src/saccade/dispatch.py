"""Dispatch: the ordered list of implementations, and why each can or cannot serve a problem."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from saccade.linear.problem import LinearProblem
from saccade.problem import Problem


class Implementation(NamedTuple):
    """A name, and a function that gives the reason why a problem cannot be served, or None."""

    name: str
    unsupported: Callable[[Any], str | None]


WIDEST = 256  # channels that portable kernels hold at once


def _portable_unsupported(problem: Problem) -> str | None:
    widest = max(problem.head_dim, problem.value_dim)
    if widest > WIDEST:
        return f"head_dim and value_dim go up to {WIDEST}, not {widest}"
    device = problem.device, problem.device_index
    return _portable_misses(*device, problem.dtype, problem.mask, problem.score)


def _linear_portable_unsupported(problem: LinearProblem) -> str | None:
    widest = max(problem.head_dim, problem.value_dim)
    if widest > WIDEST:
        return f"head_dim and value_dim go up to {WIDEST}, not {widest}"
    return _portable_misses(problem.device, None, problem.dtype, "", "")


def no_kernels(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None."""
    return _portable_misses(device.type, device.index, torch.float32, "", "")


@functools.cache
def _portable_misses(
    device: str, index: int | None, dtype: torch.dtype, mask: str, score: str
) -> str | None:
    """What is missing for a portable kernel of any size; asked once, and not traced."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not (device == "cpu" and interpreted):
        return f"tensors lie on {device}; it takes tensors on a GPU"
    if dtype == torch.float64:
        return "it takes float32, bfloat16 and float16, not float64"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if device == "cuda" and not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    if device == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(index)
        if capability < (7, 5):
            return f"the GPU's capability is {capability}; it takes (7, 5) or newer"
    from saccade.kernels.compose import mask_functions, score_functions
    from saccade.kernels.source import CannotCompile

    try:
        if mask:
            mask_functions(mask)
        if score:
            score_functions(score)
    except CannotCompile as error:
        return f"no kernel can be made: {error}"
    return None


_portable_misses._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _cpu_unsupported(problem: Problem | LinearProblem) -> str | None:
    if problem.device != "cpu":
        return f"tensors lie on {problem.device}; it takes CPU tensors"
    return None


def _reference_unsupported(problem: Problem | LinearProblem) -> str | None:
    if problem.configured:
        return "it has no tiles, so it takes no config"
    if isinstance(problem, Problem) and problem.batch_invariant:
        return "its sums run over the batch's longest sequence, so they are not batch-invariant"
    return None


IMPLEMENTATIONS = (
    Implementation("cpu", _cpu_unsupported),
    Implementation("portable", _portable_unsupported),
    Implementation("reference", _reference_unsupported),
)
"""In order of preference: the first that gives no reason against itself is taken."""

LINEAR_IMPLEMENTATIONS = (
    Implementation("cpu", _cpu_unsupported),
    Implementation("reference", _reference_unsupported),
    Implementation("portable", _linear_portable_unsupported),
)
"""The same for linear attention; its kernels come last, to be named, until they ran on a GPU."""

BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
LINEAR_BY_NAME = {implementation.name: implementation for implementation in LINEAR_IMPLEMENTATIONS}
NAMES = tuple(BY_NAME)

ByName = Mapping[str, Implementation]


def reasons_of(
    problem: Problem | LinearProblem, among: ByName | None = None
) -> dict[str, str | None]:
    """For each implementation, in order of preference, why it cannot serve (None: it can)."""
    among = BY_NAME if among is None else among
    return {name: entry.unsupported(problem) for name, entry in among.items()}


def choose(
    problem: Problem | LinearProblem, name: str | None = None, among: ByName | None = None
) -> str:
    """The implementation that serves a problem: of softmax attention, or `among` others.

    Raises:
        ValueError: for a name that is not in the list.
        NotImplementedError: if the named one (or, without a name, every one) cannot serve it.
    """
    among = BY_NAME if among is None else among
    if name is not None and name not in tuple(among):
        raise ValueError(f"implementation: got {name!r}, takes one of {tuple(among)} or None")
    reasons = []
    for candidate in among if name is None else (name,):
        reason = among[candidate].unsupported(problem)
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise NotImplementedError("implementation: " + "; ".join(reasons))
