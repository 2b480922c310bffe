"""Backends: one ordered list of (operation, pass, backend), and why each can or cannot serve.

Each pass takes the first backend that gives no reason against itself. A named backend serves every
pass of the call, or the call raises.
"""

from __future__ import annotations

import bisect
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from saccade.modifiers.expression import constant
from saccade.modifiers.normal_form import (
    computes_functions,
    consists_of,
    is_capped,
    is_causal,
    reads_along_rows,
    reads_by_distance,
)
from saccade.runtime.delta_spec import DeltaProblem
from saccade.runtime.spec import LinearProblem, Problem

AnyProblem = Problem | LinearProblem | DeltaProblem


class BackendEntry(NamedTuple):
    """Passes of an operation that a backend has, and for which problems.

    Attributes:
        operation: the folder of the operation below saccade.ops.
        passes: "forward", "backward" or "step", one or several.
        name: what a caller names it by.
        unsupported: the reason why it cannot serve a problem, or None.
        not_preferred: the reason why later backends go first for a problem that it could serve, or
            None. A named backend serves such problems all the same.
        note: what `explain` adds where it serves a problem, or None.
    """

    operation: str
    passes: tuple[str, ...]
    name: str
    unsupported: Callable[[Any], str | None]
    not_preferred: Callable[[Any], str | None] = lambda problem: None
    note: Callable[[Any], str | None] = lambda problem: None


WIDEST = 256  # channels of Hopper's kernels and of linear attention's
WIDEST_HEAD, WIDEST_VALUE = 576, 512  # channels of a head, and of its values, in Triton kernels
WIDEST_AT_ONCE = 128  # channels of which Hopper's backward pass holds all gradients at once
SMALLEST_WIDTH = 64  # channels that Hopper's kernels compute with at least (gpu/hopper)
# Rows of 64 channels under a mask: at 128 and 256 they take 0.70 and 0.75 of the Triton kernels'
# time forwards, up to 512 1.04 to 1.12 backwards (benchmarks/results/h200/hopper_shapes.jsonl).
SHORTEST_MASKED, SHORTEST_CAUSAL = 128, 512
# Rows of packed sequences on average, of at most 64 channels and of more: at 128 rows it takes 0.95
# and 0.71 of the Triton kernels' time forwards, 1.05 and 0.72 backwards.
SHORTEST_PACKED = (192, 128)
# Tokens of such short sequences in all: a backward pass over 8,192 waits for the host, which starts
# more kernels of Hopper's, and takes 1.34 of the Triton kernels' time; over 16,384 0.72.
FEW_TOKENS = 16384
MEASURED_MASKS = frozenset({"causal", "window", "key_lengths", "documents", "blocks"})
WIDEST_KEYS = 128  # of linear attention's narrow kernels on Hopper; wide ones pad to 256
# Of the gated delta rule, each a program's: of 32 it takes 1.22 of the Triton kernels' time, of 64
# 0.83, of 256 0.58; backwards of 64 0.72, of 256 0.65 (benchmarks/results/h200/delta_hopper.txt).
FEWEST_STATES = 64
# Rows of all value heads from which backward passes take it with fewer states, too, which it then
# cuts as Triton kernels do: 0.85 of their time, of 2^18 rows 0.77, of 2^19 0.74; of half as many
# 0.95 to 1.05.
FEWEST_ROWS = 2**17
SHORTEST_LEAD = 1024  # rows of linear attention; shorter calls are no more than starts and ends


def _too_wide(problem: AnyProblem) -> str | None:
    widest = max(problem.head_dim, problem.value_dim)
    return f"head_dim and value_dim go up to {WIDEST}, not {widest}" if widest > WIDEST else None


def _triton_unsupported(problem: Problem) -> str | None:
    head_dim, value_dim = problem.head_dim, problem.value_dim
    if head_dim > WIDEST_HEAD or value_dim > WIDEST_VALUE:
        takes = f"head_dim goes up to {WIDEST_HEAD} and value_dim up to {WIDEST_VALUE}"
        return f"{takes}, not {head_dim} and {value_dim}"
    if problem.dtype == torch.float8_e4m3fn:  # queries over pages
        return _fp8_triton_unsupported(problem)
    at = problem.device, problem.device_index, problem.dtype
    return _triton_device_unsupported(*at) or _tiles_unsupported(problem, backward=False)


def _triton_backward_unsupported(problem: Problem) -> str | None:
    if problem.head_dim > WIDEST_VALUE:  # gradients of keys are a tile of sums as well
        return f"gradients take a head_dim up to {WIDEST_VALUE}, not {problem.head_dim}"
    return _triton_unsupported(problem) or _tiles_unsupported(problem, backward=True)


def _hopper_unsupported(problem: Problem) -> str | None:
    """What TMA and WGMMA cannot serve, then what no Triton kernel can."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(problem.dtype).removeprefix('torch.')}"
    if reason := _too_wide(problem) or _tma_unsupported(problem, problem.kv_len, problem.kv_heads):
        return reason
    if problem.dropout:
        return "it does not drop weights"
    if problem.page_size and problem.page_dtype != problem.dtype:
        return "pages hold eight bits, which no WGMMA multiplies with 16"
    if problem.batch_invariant:
        return "its kernels for chunks depend on how many query rows a batch has"
    if problem.configured:
        return "it has schedules of its own and takes no config"
    return _triton_unsupported(problem) or _hopper_device_unsupported(
        problem.device, problem.device_index
    )


def _tma_unsupported(problem: AnyProblem, *sizes: int) -> str | None:
    """Why TMA cannot load the tensors of a problem; sizes: those that must not be 0 either."""
    head_dim, value_dim = problem.head_dim, problem.value_dim
    if head_dim % 8 or value_dim % 8:
        return f"head_dim and value_dim must be multiples of 8, not {head_dim} and {value_dim}"
    if 0 in (head_dim, value_dim, *sizes):
        return "there is nothing to load"
    if not problem.tma:
        return "strides must be multiples of 8, and that of channels 1"
    return None


def _hopper_backward_unsupported(problem: Problem) -> str | None:
    if reason := _too_wide(problem):
        return reason
    widths = _width(problem.head_dim), _width(problem.value_dim)
    if widths[0] != widths[1] and max(widths) <= WIDEST_AT_ONCE:
        return "gradients of keys and values leave through the same memory"
    if problem.query_len == 0:
        return "there are no queries to load"
    return _hopper_unsupported(problem)


def _hopper_backward_not_preferred(problem: Problem) -> str | None:
    narrow = max(problem.head_dim, problem.value_dim) <= SMALLEST_WIDTH
    short = problem.query_len <= SHORTEST_CAUSAL and not problem.packed
    if narrow and short and is_causal(problem.mask):
        return f"up to {SMALLEST_WIDTH} channels causal calls of {SHORTEST_CAUSAL} rows are slower"
    if problem.packed and problem.query_len < min(SHORTEST_PACKED[0] * problem.batch, FEW_TOKENS):
        return f"fewer than {FEW_TOKENS} tokens of short packed sequences wait for the host"
    return _unmeasured(problem)


LENGTHS = (1, 2, SHORTEST_MASKED, SHORTEST_CAUSAL, SHORTEST_CAUSAL + 1)
"""Of queries, where a dense call becomes another kind."""


def lengths_kind(query_len: int, kv_len: int, sequences: int | None = None) -> tuple[Any, ...]:
    """All that validation and the choice look at of the lengths of softmax attention.

    A call whose other arguments are those of one that was validated, and whose lengths are of the
    same kind, is served by the same backends. Packed calls give tokens, and how many sequences.
    """
    if sequences is None:
        return kv_len == 0, bisect.bisect_right(LENGTHS, query_len)
    short = tuple(query_len < rows * sequences for rows in SHORTEST_PACKED)
    return kv_len == 0, query_len == 0, short, query_len < FEW_TOKENS


def _width(channels: int) -> int:
    """Channels as Hopper's kernels widen them."""
    return next(width for width in (64, 128, 256) if channels <= width)


def _paged_note(problem: Problem) -> str | None:
    note = "rows that wait for memory (decode) by the kernels for pages in Triton"
    return ", ".join(filter(None, (note, _launch_note(problem))))


def _launch_note(problem: AnyProblem) -> str | None:
    from saccade.gpu import machine_code

    return machine_code.remark() if problem.device == "cuda" else None


def _hopper_not_preferred(problem: Problem) -> str | None:
    """Of scores: one that adds a product of rows took 0.86 of Triton's time with 128 channels and
    1.02 with 64, a tanh 1.6, a bias by distance 1.34 (benchmarks/results/h200/flex_ways.txt); above
    128 channels the first took 0.64 and a tanh 0.78 (benchmarks/results/h200/wide.txt)."""
    width = max(problem.head_dim, problem.value_dim)
    if problem.score and width <= SMALLEST_WIDTH:
        return f"up to {SMALLEST_WIDTH} channels it has too few registers for scores that change"
    if problem.score and reads_along_rows(problem.score):
        return "it has too few registers for scores that change by tables"
    if problem.score and width <= WIDEST_AT_ONCE and computes_functions(problem.score):
        return f"up to {WIDEST_AT_ONCE} channels Triton is faster where scores change by functions"
    return _unmeasured(problem)


def _by_tables(score: str, width: int) -> bool:
    """Whether a score reads tensors along rows otherwise than was measured: backwards a bias by
    distance took 0.79 of Triton's time with 128 channels, 1.8 with 64."""
    measured = SMALLEST_WIDTH < width <= WIDEST_AT_ONCE and reads_by_distance(score)
    return reads_along_rows(score) and not measured


def _unmeasured(problem: Problem) -> str | None:
    """Why Triton kernels go first: they were faster, or Hopper's were not measured beside them.

    Of masks other than causal ones, windows, prefixes, documents and blocks were measured with 128
    channels: it took 1.00 to 0.67 of their time (benchmarks/results/h200/triton.jsonl); a dilated
    window and neighbours in a picture, which read nothing along rows, 1.02 to 0.62, with 64 too
    (benchmarks/results/h200/flex_ways.txt), windows and prefixes with 64 0.96 to 0.75. Above 128
    channels all of these, packed rows, changed scores, and values narrower than keys took 0.54 to
    0.78 forwards and 0.39 to 0.52 backwards (benchmarks/results/h200/wide.txt).
    """
    width = max(problem.head_dim, problem.value_dim)
    wide = width > WIDEST_AT_ONCE
    if problem.score and (_by_tables(problem.score, width) or (problem.packed and not wide)):
        return "where scores change its lead is measured for dense rows and no tables along them"
    if width <= SMALLEST_WIDTH // 2:
        return f"it computes with {SMALLEST_WIDTH} channels at least"
    masked, narrow = problem.mask != "", width <= SMALLEST_WIDTH
    shortest = SHORTEST_PACKED[not narrow]
    if problem.packed and problem.query_len < shortest * problem.batch:
        return f"packed sequences of fewer than {shortest} rows leave its tiles empty"
    if masked and narrow and not problem.packed and problem.query_len < SHORTEST_MASKED:
        return f"up to {SMALLEST_WIDTH} channels it takes masks from {SHORTEST_MASKED} rows on"
    if not masked or is_causal(problem.mask):
        return None
    reads = reads_along_rows(problem.mask)
    if narrow and (reads or problem.packed):
        return f"up to {SMALLEST_WIDTH} channels its lead is measured for dense rows and no tables"
    if (reads or problem.packed) and not consists_of(problem.mask, MEASURED_MASKS):
        return "its lead is measured for causal masks, windows, lengths, documents and blocks"
    return None


@constant
def _hopper_device_unsupported(device: str, index: int | None) -> str | None:
    """What Hopper's kernels miss on a device. To a trace the answer is a constant."""
    if device != "cuda" or torch.version.hip is not None:
        return "it takes tensors on an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(index)
    if capability[0] != 9:
        return f"the GPU's capability is {capability}; it takes (9, 0)"
    return None


def _linear_triton_unsupported(problem: LinearProblem) -> str | None:
    return _too_wide(problem) or _triton_device_unsupported(problem.device, None, problem.dtype)


def _delta_triton_unsupported(problem: DeltaProblem) -> str | None:
    return _too_wide(problem) or _triton_device_unsupported(problem.device, None, problem.dtype)


def _delta_hopper_unsupported(problem: DeltaProblem) -> str | None:
    if problem.dtype != torch.bfloat16:  # in float16, states are narrowed by factors of their own
        return f"it takes bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.decay == "channels":
        return "it takes no decay of each channel"
    if max(problem.head_dim, problem.value_dim) > WIDEST_AT_ONCE:
        got = f"{problem.head_dim} and {problem.value_dim}"
        return f"head_dim and value_dim go up to {WIDEST_AT_ONCE}, not {got}"
    sizes = problem.batch, problem.key_heads, problem.value_heads, problem.length
    if reason := _tma_unsupported(problem, *sizes):
        return reason
    if problem.configured:
        return "it has a schedule of its own and takes no config"
    return _delta_triton_unsupported(problem) or _hopper_device_unsupported(problem.device, None)


def _delta_hopper_not_preferred(problem: DeltaProblem) -> str | None:
    if problem.batch * problem.value_heads < FEWEST_STATES:
        return f"fewer than {FEWEST_STATES} states leave multiprocessors idle; sequences are cut"
    return _narrow_delta(problem)


def _delta_hopper_backward_not_preferred(problem: DeltaProblem) -> str | None:
    if problem.tokens * problem.value_heads >= FEWEST_ROWS:
        return _narrow_delta(problem)
    return _delta_hopper_not_preferred(problem)


def _narrow_delta(problem: DeltaProblem) -> str | None:
    if problem.head_dim <= SMALLEST_WIDTH or problem.value_dim <= SMALLEST_WIDTH:
        return f"it computes with {WIDEST_AT_ONCE} channels"
    return None


def _linear_hopper_unsupported(problem: LinearProblem) -> str | None:
    if problem.dtype != torch.bfloat16:  # in float16, sums are narrowed by factors of their own
        return f"it takes bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
    if not problem.causal:
        return "it takes causal calls; others are two products"
    if problem.packed or problem.decay:
        return f"it takes no {'packed sequences' if problem.packed else 'decay'}"
    heads = problem.query_heads, problem.key_heads, problem.value_heads
    sizes = problem.batch, *heads, problem.query_len, problem.kv_len
    if reason := _tma_unsupported(problem, *sizes):
        return reason
    if problem.configured:
        return "it has a schedule of its own and takes no config"
    return _linear_triton_unsupported(problem) or _hopper_device_unsupported(problem.device, None)


def _linear_hopper_not_preferred(problem: LinearProblem) -> str | None:
    """Shorter calls than were measured, and values wider than keys (h200/linear.txt)."""
    if max(problem.query_len, problem.kv_len) < SHORTEST_LEAD:
        return f"without a name it takes lengths from {SHORTEST_LEAD} on"
    if problem.value_dim > WIDEST_KEYS >= problem.head_dim:
        return f"values of more than {WIDEST_KEYS} channels were measured with keys of as many"
    return None


def _fp8_triton_unsupported(problem: Problem) -> str | None:
    if reason := _too_wide(problem):
        return reason
    given = problem.quantize == "given" or problem.dtype == torch.float8_e4m3fn
    dtype = torch.float16 if given else problem.dtype
    at = problem.device, problem.device_index
    return _triton_device_unsupported(*at, dtype) or _fp8_device_unsupported(*at)


def _fp8_hopper_unsupported(problem: Problem) -> str | None:
    """What TMA and WGMMA of e4m3 numbers cannot serve, then what no Triton kernel can."""
    head_dim, value_dim = problem.head_dim, problem.value_dim
    if head_dim % 16 or value_dim % 8:
        takes = "head_dim must be a multiple of 16 and value_dim one of 8"
        return f"{takes}, not {head_dim} and {value_dim}"
    if 0 in (head_dim, value_dim, problem.kv_len, problem.kv_heads):
        return "there is nothing to load"
    if problem.quantize == "given" and not problem.tma:
        return "strides must be multiples of 16, and that of channels 1"
    if problem.configured:
        return "it has schedules of its own and takes no config"
    if problem.score and not is_capped(problem.score):
        return (
            "of changed scores it takes a softcap alone: weights of rows of large scores, such as "
            "those of an added mask of -1e9, would be off by powers of 2"
        )
    return _fp8_triton_unsupported(problem) or _hopper_device_unsupported(
        problem.device, problem.device_index
    )


def _fp8_hopper_not_preferred(problem: Problem) -> str | None:
    """It took 0.64 to 0.73 of the Triton kernel's time with 128 channels, 0.67 with 64 (at 4k), and
    with 256 0.68 to 0.93 of that of 16 bits (benchmarks/results/h200/fp8.txt)."""
    if max(problem.head_dim, problem.value_dim) <= SMALLEST_WIDTH // 2:
        return f"it computes with {SMALLEST_WIDTH} channels at least"
    return None


@constant
def _fp8_device_unsupported(device: str, index: int | None) -> str | None:
    """Why a GPU has no products of e4m3 numbers."""
    if device != "cuda":  # Triton's interpreter
        return None
    if torch.version.hip is not None:
        return "it takes NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 9):
        return f"the GPU's capability is {capability}; (8, 9) and newer multiply fp8 numbers"
    return None


def _fp8_reference_not_preferred(problem: Problem) -> str | None:
    """Where there is no kernel, nothing is gained from rounding to fp8."""
    if problem.device == "cpu":
        return None
    return "without a name it stands in for no kernel: it is slower than attention in 16 bits"


def no_kernels(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None."""
    return _triton_device_unsupported(device.type, device.index, torch.float32)


@constant
def _triton_device_unsupported(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """What Triton kernels of any size miss on a device."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not (device == "cpu" and interpreted):
        return f"tensors lie on {device}; it takes tensors on a GPU"
    if dtype == torch.float64:
        return "it takes float32, bfloat16 and float16, not float64"
    if importlib.util.find_spec("triton") is None and not _has_machine_code(device, index):
        return "Triton is not installed, and no machine code for this GPU comes with Saccade"
    if interpreted and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if device == "cuda" and not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    if device == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(index)
        if capability < (7, 5):
            return f"the GPU's capability is {capability}; it takes (7, 5) or newer"
    return None


def _tiles_unsupported(problem: Problem, backward: bool) -> str | None:
    """Why tiles of wide heads do not fit a GPU; narrow ones fit any."""
    head_dim, value_dim = problem.head_dim, problem.value_dim
    if max(head_dim, value_dim) <= WIDEST:  # the numbers of others may change in torch.compile
        return None
    at = problem.device, problem.device_index, problem.dtype
    return _memory_unsupported(*at, head_dim, value_dim, backward)


@constant
def _memory_unsupported(
    device: str,
    index: int | None,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    backward: bool,
) -> str | None:
    """Why a GPU's shared memory is too small for tiles of so many channels.

    Products without tensor cores, of float32 and of Turing, have all operands in shared memory: 16
    rows of each, float32 by the time that they are multiplied.
    """
    if device != "cuda" or torch.version.hip is not None:
        return None
    found = torch.cuda.get_device_properties(index)
    if dtype != torch.float32 and found.major >= 8:
        return None
    needed = 64 * ((2 * head_dim + 2 * value_dim) if backward else (2 * head_dim + value_dim))
    needed += 2048 if backward else 0  # pairs, and statistics of rows
    held = found.shared_memory_per_block_optin
    if needed <= held:
        return None
    return (
        f"{'gradients of ' if backward else ''}heads of {head_dim} and {value_dim} channels take "
        f"{needed >> 10} KB of shared memory without tensor cores; the GPU has {held >> 10}"
    )


def _has_machine_code(device: str, index: int | None) -> bool:
    """Whether kernels that were compiled ahead may do without Triton."""
    if device != "cuda" or not torch.cuda.is_available():
        return False
    from saccade.gpu import machine_code

    current = torch.cuda.current_device() if index is None else index
    return machine_code.comes_with(machine_code.architecture_of(current))


def _cpu_unsupported(problem: AnyProblem) -> str | None:
    if problem.device != "cpu":
        return f"tensors lie on {problem.device}; it takes CPU tensors"
    return None


def _reference_unsupported(problem: AnyProblem) -> str | None:
    if problem.configured:
        return "it has no tiles, so it takes no config"
    if isinstance(problem, Problem) and problem.batch_invariant:
        return "its sums run over the batch's longest sequence, so they are not batch-invariant"
    return None


ATTENTION, PAGED, LINEAR = "attention", "paged_attention", "linear_attention"
DELTA, FP8 = "delta_rule", "attention_fp8"
BOTH = ("forward", "backward")

BACKENDS = (
    BackendEntry(ATTENTION, BOTH, "cpu", _cpu_unsupported),
    BackendEntry(
        ATTENTION, ("forward",), "hopper",
        _hopper_unsupported, _hopper_not_preferred, _launch_note,
    ),
    BackendEntry(
        ATTENTION, ("backward",), "hopper",
        _hopper_backward_unsupported, _hopper_backward_not_preferred, _launch_note,
    ),
    BackendEntry(ATTENTION, ("forward",), "triton", _triton_unsupported, note=_launch_note),
    BackendEntry(
        ATTENTION, ("backward",), "triton", _triton_backward_unsupported, note=_launch_note
    ),
    BackendEntry(ATTENTION, BOTH, "reference", _reference_unsupported),
    BackendEntry(PAGED, ("forward",), "cpu", _cpu_unsupported),
    BackendEntry(PAGED, ("forward",), "hopper", _hopper_unsupported, note=_paged_note),
    BackendEntry(PAGED, ("forward",), "triton", _triton_unsupported, note=_launch_note),
    BackendEntry(PAGED, ("forward",), "reference", _reference_unsupported),
    BackendEntry(LINEAR, (*BOTH, "step"), "cpu", _cpu_unsupported),
    BackendEntry(
        LINEAR, BOTH, "hopper",
        _linear_hopper_unsupported, _linear_hopper_not_preferred, _launch_note,
    ),
    BackendEntry(LINEAR, (*BOTH, "step"), "triton", _linear_triton_unsupported, note=_launch_note),
    BackendEntry(LINEAR, BOTH, "reference", _reference_unsupported),
    BackendEntry(DELTA, (*BOTH, "step"), "cpu", _cpu_unsupported),
    BackendEntry(
        DELTA, ("forward",), "hopper",
        _delta_hopper_unsupported, _delta_hopper_not_preferred, _launch_note,
    ),
    BackendEntry(
        DELTA, ("backward",), "hopper",
        _delta_hopper_unsupported, _delta_hopper_backward_not_preferred, _launch_note,
    ),
    BackendEntry(DELTA, (*BOTH, "step"), "triton", _delta_triton_unsupported, note=_launch_note),
    BackendEntry(DELTA, BOTH, "reference", _reference_unsupported),
    BackendEntry(FP8, ("forward",), "cpu", _cpu_unsupported),
    BackendEntry(
        FP8, ("forward",), "hopper",
        _fp8_hopper_unsupported, _fp8_hopper_not_preferred, _launch_note,
    ),
    BackendEntry(FP8, ("forward",), "triton", _fp8_triton_unsupported, note=_launch_note),
    BackendEntry(
        FP8, ("forward",), "reference", _reference_unsupported, _fp8_reference_not_preferred
    ),
)  # fmt: skip
"""In order of preference."""

NAMES = ("cpu", "hopper", "triton", "reference")


class Choice(NamedTuple):
    """Which backend serves a pass, and why the others do not.

    Attributes:
        chosen: the backend, or None where there is none.
        reasons: for each backend, in order of preference, why it cannot serve (None: it can).
        not_preferred: for each that can, why without a name later ones go first (None: they do
            not).
        note: what else there is to say of the chosen one, or None.
    """

    chosen: str | None
    reasons: dict[str, str | None]
    not_preferred: dict[str, str | None]
    note: str | None


def candidates(operation: str, of: str = "forward") -> Iterator[BackendEntry]:
    """The backends of a pass, in order of preference."""
    for backend in BACKENDS:
        if backend.operation == operation and of in backend.passes:
            yield backend


def choose(problem: AnyProblem, name: str | None = None, of: str = "forward") -> str:
    """The backend that serves a pass of a problem.

    Raises:
        ValueError: for a name that is not in the list.
        NotImplementedError: if the named one (or, without a name, every one) cannot serve it.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"implementation: got {name!r}, takes one of {NAMES} or None")
    reasons = []
    for backend in candidates(problem.operation, of):
        if name is not None and name != backend.name:
            continue
        reason = backend.unsupported(problem) or (
            backend.not_preferred(problem) if name is None else None
        )
        if reason is None:
            return backend.name
        reasons.append(f"{backend.name}: {reason}")
    if not reasons:
        reasons.append(f"{name}: it has no {of} pass of {problem.operation.replace('_', ' ')}")
    raise NotImplementedError("implementation: " + "; ".join(reasons))


def explained(problem: AnyProblem, name: str | None = None, of: str = "forward") -> Choice:
    """The backend that `choose` takes for a pass, with the reasons for and against each."""
    try:
        chosen = choose(problem, name, of)
    except NotImplementedError:
        chosen = None
    reasons: dict[str, str | None] = {}
    not_preferred: dict[str, str | None] = {}
    note = None
    for backend in candidates(problem.operation, of):
        reasons[backend.name] = backend.unsupported(problem)
        supported = reasons[backend.name] is None
        not_preferred[backend.name] = backend.not_preferred(problem) if supported else None
        if backend.name == chosen:
            note = backend.note(problem)
    return Choice(chosen, reasons, not_preferred, note)


class Chosen(NamedTuple):
    """The backends of a call's passes."""

    forward_by: str
    backward_by: str  # "" where none can
    backward_unsupported: str  # why none can, or ""


def choose_all(problem: AnyProblem, name: str | None = None) -> Chosen:
    """The backends of a call: the forward pass must have one, the backward pass may."""
    forward_by = choose(problem, name)
    if forward_by in ("cpu", "reference"):  # they have every pass of a call that they serve
        return Chosen(forward_by, forward_by, "")
    try:
        return Chosen(forward_by, choose(problem, name, "backward"), "")
    except NotImplementedError as error:
        return Chosen(forward_by, "", str(error))


# ---- modules ----------------------------------------------------------------------------------

_imported: dict[tuple[str, str, str], Any] = {}


def module_of(operation: str, name: str, of: str = "forward") -> Any:
    """The module of a backend's passes of an operation, imported when it is first used.

    It has `forward(inputs, variant, config)` and `backward(…)` (and, over pages and for softmax
    attention, `prepared(inputs, variant, config)`: the forward pass for calls of the same shapes,
    strides, dtypes, device and variant).
    """
    module = _imported.get((operation, name, of))
    if module is None:
        if not name:
            raise NotImplementedError(
                f"implementation: the named one has no {of} pass of this call"
            )
        module = importlib.import_module(f"saccade.ops.{operation}.{name}")
        if hasattr(module, "__path__"):  # a folder
            module = importlib.import_module(f"{module.__name__}.host")
        _imported[operation, name, of] = module
    return module
