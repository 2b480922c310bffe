"""Backends: the ordered list of implementations, and why each can or cannot serve a problem."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from saccade.modifiers.names import consists_of, is_causal
from saccade.runtime.linear_spec import LinearProblem
from saccade.runtime.spec import Problem


class Implementation(NamedTuple):
    """A name, and what it says of problems.

    Attributes:
        unsupported: gives the reason why a problem cannot be served, or None.
        remark: gives what is to be said of a problem that it serves, or None.
        yields: gives the reason why those after it are preferred for a problem that it could serve,
            or None. One that is named does not ask.
    """

    name: str
    unsupported: Callable[[Any], str | None]
    remark: Callable[[Any], str | None] = lambda problem: None
    yields: Callable[[Any], str | None] = lambda problem: None


WIDEST = 256  # channels that Triton kernels hold at once
SMALLEST_WIDTH = 64  # channels that Hopper's kernels compute with at least (descriptors.py)
# Rows: at 64 channels they take 0.93 of the Triton kernels' time forwards
# (benchmarks/results/h200/hopper_forward.txt); fewer were not timed.
SHORTEST_CAUSAL = 512
SHORTEST_PACKED = 192  # rows on average; at 252 it is the faster one, at 128 the slower
MEASURED_MASKS = frozenset({"causal", "window", "key_lengths", "documents", "blocks"})
WIDEST_KEYS = 128  # of linear attention's narrow kernels on Hopper; wide ones pad to 256
SHORTEST_LEAD = 1024  # rows of linear attention; shorter calls are no more than starts and ends


def _triton_unsupported(problem: Problem) -> str | None:
    widest = max(problem.head_dim, problem.value_dim)
    if widest > WIDEST:
        return f"head_dim and value_dim go up to {WIDEST}, not {widest}"
    device = problem.device, problem.device_index
    return _triton_misses(*device, problem.dtype, problem.mask, problem.score)


def _hopper_unsupported(problem: Problem) -> str | None:
    """What keeps a call from TMA and WGMMA, and then what keeps it from Triton kernels."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.head_dim % 8 or problem.value_dim % 8:
        return (
            "head_dim and value_dim must be multiples of 8, "
            f"not {problem.head_dim} and {problem.value_dim}"
        )
    if 0 in (problem.head_dim, problem.value_dim, problem.kv_len, problem.kv_heads):
        return "there is nothing to load"
    if not problem.tma:
        return "strides must be multiples of 8, and that of channels 1"
    if problem.dropout:
        return "it does not drop weights"
    if problem.page_size and problem.page_dtype != problem.dtype:
        return "pages hold eight bits, which no WGMMA multiplies with 16"
    if problem.batch_invariant:
        return "its kernels for chunks depend on how many query rows a batch has"
    if problem.configured:
        return "it has schedules of its own and takes no config"
    misses = _triton_unsupported(problem)
    return misses or _hopper_misses(problem.device, problem.device_index)


def _hopper_remark(problem: Problem) -> str | None:
    from saccade.ops.attention.hopper import configs  # breaks import-direction: it alone knows

    said = configs.left_to_triton(problem), _launch_remark(problem)
    return ", ".join(filter(None, said)) or None


def _launch_remark(problem: Problem | LinearProblem) -> str | None:
    from saccade.gpu import triton_internals

    return triton_internals.remark() if problem.device == "cuda" else None


def _hopper_yields(problem: Problem) -> str | None:
    """What was not measured beside the Triton kernels, or was slower, is theirs.

    Of masks other than causal ones, windows, prefixes, documents and blocks were measured, with 128
    channels: it took 1.00 to 0.67 of their time (benchmarks/results/h200/triton.jsonl).
    """
    width = max(problem.head_dim, problem.value_dim)
    if problem.page_size:
        return None
    if problem.score:
        return "without a name it takes scores as they are, for which its lead is measured"
    if width <= SMALLEST_WIDTH // 2:
        return f"it computes with {SMALLEST_WIDTH} channels at least"
    if problem.packed and problem.query_len < SHORTEST_PACKED * problem.batch:
        return f"packed sequences of fewer than {SHORTEST_PACKED} rows leave its tiles empty"
    causal, narrow = is_causal(problem.mask), width <= SMALLEST_WIDTH
    if causal and narrow and not problem.packed and problem.query_len < SHORTEST_CAUSAL:
        return (
            f"up to {SMALLEST_WIDTH} channels it takes causal calls from {SHORTEST_CAUSAL} rows on"
        )
    if causal or problem.mask == "":
        return None
    if narrow:
        return f"up to {SMALLEST_WIDTH} channels its lead is measured for causal masks and none"
    if not consists_of(problem.mask, MEASURED_MASKS):
        return "its lead is measured for causal masks, windows, lengths, documents and blocks"
    return None


@functools.cache
def _hopper_misses(device: str, index: int | None) -> str | None:
    """What is missing on a device; asked once, and not traced."""
    if device != "cuda" or torch.version.hip is not None:
        return "it takes tensors on an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(index)
    if capability[0] != 9:
        return f"the GPU's capability is {capability}; it takes (9, 0)"
    return None


_hopper_misses._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _linear_triton_unsupported(problem: LinearProblem) -> str | None:
    widest = max(problem.head_dim, problem.value_dim)
    if widest > WIDEST:
        return f"head_dim and value_dim go up to {WIDEST}, not {widest}"
    return _triton_misses(problem.device, None, problem.dtype, "", "")


def _linear_hopper_unsupported(problem: LinearProblem) -> str | None:
    if problem.dtype != torch.bfloat16:  # in float16, sums are narrowed by factors of their own
        return f"it takes bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
    if not problem.causal:
        return "it takes causal calls; others are two products"
    if problem.packed or problem.decay:
        return f"it takes no {'packed sequences' if problem.packed else 'decay'}"
    if problem.head_dim % 8 or problem.value_dim % 8:
        return (
            "head_dim and value_dim must be multiples of 8, "
            f"not {problem.head_dim} and {problem.value_dim}"
        )
    sizes = problem.batch, problem.query_heads, problem.key_heads, problem.value_heads
    if 0 in (*sizes, problem.head_dim, problem.value_dim, problem.query_len, problem.kv_len):
        return "there is nothing to load"
    if not problem.tma:
        return "strides must be multiples of 8, and that of channels 1"
    if problem.configured:
        return "it has a schedule of its own and takes no config"
    misses = _linear_triton_unsupported(problem)
    return misses or _hopper_misses(problem.device, None)


def _linear_hopper_yields(problem: LinearProblem) -> str | None:
    """As `_hopper_yields`; its lead was measured from 8k on (h200/linear.txt)."""
    if max(problem.query_len, problem.kv_len) < SHORTEST_LEAD:
        return f"without a name it takes lengths from {SHORTEST_LEAD} on"
    if problem.value_dim > WIDEST_KEYS >= problem.head_dim:
        return f"values of more than {WIDEST_KEYS} channels were measured with keys of as many"
    return None


def no_kernels(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None."""
    return _triton_misses(device.type, device.index, torch.float32, "", "")


def _triton_misses(*problem: Any) -> str | None:
    """What is missing for a Triton kernel of any size. To a trace the answer is a constant."""
    return _asked_once(*problem)


# Set by hand, as importing what sets it takes seconds; and on a plain function, as PyTorch 2.11
# warns of a cached one.
_triton_misses._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _asked_once(
    device: str, index: int | None, dtype: torch.dtype, mask: str, score: str
) -> str | None:
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
    return None


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
    Implementation("hopper", _hopper_unsupported, _hopper_remark, _hopper_yields),
    Implementation("triton", _triton_unsupported, _launch_remark),
    Implementation("reference", _reference_unsupported),
)
"""In order of preference: the first that gives no reason against itself is taken."""

LINEAR_IMPLEMENTATIONS = (
    Implementation("cpu", _cpu_unsupported),
    Implementation("hopper", _linear_hopper_unsupported, _launch_remark, _linear_hopper_yields),
    Implementation("triton", _linear_triton_unsupported, _launch_remark),
    Implementation("reference", _reference_unsupported),
)
"""The same for linear attention."""

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
        entry = among[candidate]
        reason = entry.unsupported(problem) or (entry.yields(problem) if name is None else None)
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise NotImplementedError("implementation: " + "; ".join(reasons))
