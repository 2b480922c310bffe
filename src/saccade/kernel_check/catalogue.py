"""Catalogue: which calls the kernels are compiled for, and what is known of compiled kernels.

Each default config is seen once. All widths meet the plain and the causal case; what else can be
combined does so at width 128.

docs/kernels.json keeps the registers and memory of every kernel by its key. What a kernel takes
follows from its source and the compiler. So a kernel that did not change is not compiled again, but
for one in SAMPLE, which shows whether the file tells the truth; which ones those are changes
whenever any kernel does. A key stands for all that a kernel is made of: Triton's version, the
architecture, the code of the kernel and of all that it calls, the types and constants of its
arguments, its options, and the text of what reads the binary (`machine_code.py`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from triton.language.core import constexpr
from triton.runtime import jit

from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments, Signature
from saccade.gpu.triton_compiler import target_of
from saccade.kernel_check.calls import (
    KERNELS,
    PASSES,
    Call,
    DeltaCall,
    Fp8KernelCall,
    KernelCall,
    LinearCall,
    PagedCall,
    call_of,
)
from saccade.kernel_check.calls.attention import MASKS
from saccade.kernel_check.calls.paged import LONG_CHUNK
from saccade.kernel_check.calls.tensors import SHORT
from saccade.kernel_check.machine_code import Usage
from saccade.ops.attention_fp8.hopper.configs import LONG as LONG_BARE
from saccade.ops.attention_fp8.triton.configs import ARCHITECTURES as FP8_ARCHITECTURES
from saccade.runtime.spec import KernelConfig

NAN_SAFE = ("backward_keys, NaN-safe", "backward_shared, NaN-safe")
ORDERED = ("forward", "backward_keys", "backward_queries")
ALL = (*ORDERED, "backward_shared")
DELTA = (*PASSES["delta"], *PASSES["delta backward"])
LINEAR = ("linear_output", *PASSES["linear backward"])


class Job(NamedTuple):
    """Kernels to compile: some of those that a pass of a call starts."""

    architecture: str
    call: Call
    which: str  # one of calls.PASSES
    kernels: tuple[str, ...]
    config: KernelConfig | None = None  # None: the default of each kernel

    def plain(self) -> list[Any]:
        """The job as JSON holds it."""
        return [*self[:4], None if self.config is None else self.config.numbers()]

    @staticmethod
    def of_plain(plain: Sequence[Any]) -> Job:
        """The inverse of `plain`."""
        architecture, fields, which, kernels, numbers = plain
        config = None if numbers is None else KernelConfig.of_numbers(numbers)
        return Job(architecture, call_of(which, fields), which, tuple(kernels), config)


Entry = tuple[Call, tuple[str, ...]]
"""A call, and the kernels of it that are compiled."""

HOPPER_FORMS = ("hopper_backward", "hopper_backward, ordered", "hopper_backward, in key order")
FEW_KV_HEADS = KernelCall(128, mask="causal", batch=1, heads=8, kv_heads=2)
HOPPER: tuple[Entry, ...] = (
    *(
        (KernelCall(dim, mask=mask), PASSES["hopper"])
        for dim in (64, 128, 256)
        for mask in MASKS[:2]
    ),
    *((KernelCall(64, mask=mask, length=8 * SHORT), PASSES["hopper"]) for mask in MASKS[:2]),
    *(
        (KernelCall(dim, mask=mask, more="residual"), PASSES["hopper"])
        for dim in (64, 128, 256)
        for mask in MASKS[:2]
    ),
    *((KernelCall(dim, mask="causal", more="max_logit"), PASSES["hopper"]) for dim in (128, 256)),
    (KernelCall(96), PASSES["hopper"]),
    (KernelCall(192, mask="causal"), PASSES["hopper"]),
    (KernelCall(192, mask="causal", value_dim=128), PASSES["hopper"]),
    (KernelCall(128, "fp16", "window"), PASSES["hopper"]),
    (KernelCall(128, mask="documents"), PASSES["hopper"]),
    (KernelCall(128, mask="blocks"), PASSES["hopper"]),
    (KernelCall(128, mask="causal", score="softcap"), PASSES["hopper"]),
    *((KernelCall(dim, score="bias"), PASSES["hopper"]) for dim in (64, 128, 256)),
    (KernelCall(128, mask="causal", packed=True), PASSES["hopper"]),
    *(
        (KernelCall(dim, mask="causal", packed=True, offsets_apart=True), PASSES["hopper"])
        for dim in (64, 128)
    ),
    *((KernelCall(dim, mask=mask), HOPPER_FORMS) for dim in (64, 128) for mask in MASKS[:2]),
    (KernelCall(128, "fp16", "window"), (HOPPER_FORMS[0], HOPPER_FORMS[2])),
    (KernelCall(128, mask="documents"), HOPPER_FORMS[:1]),
    (KernelCall(128, mask="blocks"), HOPPER_FORMS[:1]),
    (KernelCall(128, mask="causal", score="softcap"), HOPPER_FORMS[:1]),
    *((KernelCall(dim, score="bias"), HOPPER_FORMS[:1]) for dim in (64, 128)),
    (KernelCall(128, mask="causal", packed=True), PASSES["hopper_shared"]),
    (FEW_KV_HEADS, PASSES["hopper_split"]),
    (FEW_KV_HEADS._replace(head_dim=64), PASSES["hopper_split"][:1]),
    *((KernelCall(256, mask=mask), PASSES["hopper_apart"]) for mask in MASKS[:2]),
    (KernelCall(256, mask="causal", score="softcap"), PASSES["hopper_apart"]),
    (KernelCall(256, score="bias"), PASSES["hopper_apart"]),
    (KernelCall(256, mask="causal", packed=True), PASSES["hopper_apart"]),
    (KernelCall(192, mask="causal", value_dim=128), PASSES["hopper_apart"]),
    *(
        (PagedCall(dim, "bf16", "causal", size, query_len=LONG_CHUNK), ("hopper_pages_forward",))
        for dim, size in ((64, 64), (128, 64), (128, 16), (128, 256), (256, 64))
    ),
    (LinearCall(64), ("hopper_linear_forward", "hopper_linear_backward_keys")),
    (
        LinearCall(128),
        (
            "hopper_linear_forward",
            "hopper_linear_output_nan_safe",
            "hopper_linear_backward_queries",
            "hopper_linear_backward_keys",
            "hopper_linear_grad_key_nan_safe",
        ),
    ),
    (
        LinearCall(128, length=8192, batch=1, heads=2),
        ("hopper_linear_forward", "hopper_linear_collect", "hopper_linear_collect_queries"),
    ),
    (
        LinearCall(256),
        (
            "hopper_linear_wide_output",
            "hopper_linear_wide_grad_query",
            "hopper_linear_wide_grad_key",
            "hopper_linear_wide_grad_value",
        ),
    ),
    (DeltaCall(128), PASSES["hopper_delta"]),
    (DeltaCall(128), PASSES["hopper_delta backward"]),
    *(
        (call, PASSES["hopper_fp8"])
        for call in (
            Fp8KernelCall(64, "fp8", "causal"),
            Fp8KernelCall(64, "fp8", length=LONG_BARE, scaled=False),  # three consumers
            Fp8KernelCall(64, "fp8", "causal", length=LONG_BARE, scaled=False),
            Fp8KernelCall(128, "fp8"),
            Fp8KernelCall(128, "fp8", "causal"),
            Fp8KernelCall(128, "fp8", "window"),
            Fp8KernelCall(256, "fp8", "causal"),
            Fp8KernelCall(128),
            Fp8KernelCall(128, mask="causal", packed=True),
        )
    ),
)


FEW_QUERIES = 20
LATENT = PagedCall(576, kv_heads=1, heads=16, latent=512)
WIDE: tuple[Entry, ...] = (  # of more than 256 channels, for which Turing has no room
    (KernelCall(512), ALL),
    (KernelCall(512, mask="causal"), (*ALL, NAN_SAFE[0])),
    (KernelCall(576, value_dim=512), ("forward",)),
    (KernelCall(576, mask="causal", value_dim=512), ("forward",)),
    (PagedCall(512), ("pages", "merge_partials")),
    (PagedCall(512, mask="causal", query_len=FEW_QUERIES), ("pages",)),
    (PagedCall(512, mask="causal", query_len=LONG_CHUNK), ("pages_forward",)),
    *((LATENT._replace(heads=heads), ("pages",)) for heads in (16, 128)),
    (LATENT._replace(mask="causal", query_len=FEW_QUERIES), ("pages",)),
    (LATENT._replace(mask="causal", query_len=LONG_CHUNK), ("pages_forward",)),
)


def entries(architecture: str) -> list[Entry]:
    """The calls for an architecture. Turing has no products of bf16."""
    half = "fp16" if architecture == "sm_75" else "bf16"
    return [
        *(HOPPER if architecture == "sm_90" else ()),
        (KernelCall(64, half), ALL),
        (KernelCall(64, half, "causal"), (*ALL, *NAN_SAFE)),
        (KernelCall(128, half), (*ALL, "row_statistics")),
        (KernelCall(128, half, "causal"), (*ALL, *NAN_SAFE)),
        (KernelCall(128, half, "documents"), (*ALL, *NAN_SAFE, "find_tile_ranges")),
        (KernelCall(128, half, "blocks"), (*ORDERED, "list_blocks")),
        (KernelCall(128, half, "dense"), ("forward", "classify_pairs", "list_tiles")),
        (KernelCall(128, half, packed=True), (*ORDERED, "row_statistics")),
        (KernelCall(128, half, "causal", packed=True), ORDERED),
        (KernelCall(128, half, "documents", packed=True), ("forward", "find_tile_ranges")),
        (KernelCall(128, half, score="softcap"), ORDERED),
        (KernelCall(128, half, score="bias"), PASSES["bias"]),
        (KernelCall(128, half, dropout_p=0.1), ALL),
        (KernelCall(128, half, dropout_p=0.1, more="grouped"), ORDERED),
        (KernelCall(256, half), ALL),
        (KernelCall(256, half, "causal"), (*ALL, *NAN_SAFE)),
        *(
            (KernelCall(dim, half, "causal", more="residual"), ("forward",))
            for dim in (64, 128, 256)
        ),
        (KernelCall(128, half, "causal", more="max_logit"), ("forward",)),
        *(WIDE if architecture != "sm_75" else ()),
        (KernelCall(64, "fp32"), ORDERED),
        (KernelCall(128, "fp32", "causal"), (*ORDERED, NAN_SAFE[0])),
        *paged_entries(half),
        *linear_entries(half),
        *delta_entries(half),
        *(fp8_entries() if architecture in FP8_ARCHITECTURES else ()),
    ]


def paged_entries(half: str) -> list[Entry]:
    """The calls over pages: short chunks are split, long ones take the dense kernel."""
    chunk, few = LONG_CHUNK, FEW_QUERIES
    return [
        (PagedCall(64, half), ("pages", "merge_partials")),
        (PagedCall(128, half), ("pages", "merge_partials")),
        (PagedCall(128, half, "causal", 16), ("pages", "plan_pages")),
        (PagedCall(128, half, pages="fp8"), ("pages",)),
        (PagedCall(256, half), ("pages", "merge_partials")),
        (PagedCall(64, half, "causal", query_len=few), ("pages",)),
        (PagedCall(128, half, "causal", query_len=few), ("pages", "merge_partials")),
        (PagedCall(128, half, "causal", 16, query_len=few), ("pages",)),
        (PagedCall(128, half, "causal", pages="int8", query_len=chunk), ("pages",)),
        (PagedCall(128, half, "tree", query_len=chunk), ("pages", "plan_pages")),
        (PagedCall(256, half, "causal", query_len=few), ("pages",)),
        *(
            (PagedCall(dim, half, "causal", size, query_len=chunk), ("pages_forward",))
            for dim, size in ((64, 64), (128, 64), (128, 16), (256, 64))
        ),
        (PagedCall(64, "fp32", "causal"), ("pages",)),
        (PagedCall(128, "fp32", "causal", query_len=few), ("pages",)),
        (PagedCall(128, half), ("write_pages",)),
        (PagedCall(128, half, pages="fp8"), ("write_pages",)),
    ]


def linear_entries(half: str) -> list[Entry]:
    """The calls of linear attention."""
    some = ("linear_output", "linear_grad_key")  # they take the most registers
    return [
        (LinearCall(64, half), some),
        (LinearCall(128, half), (*LINEAR, "linear_step")),
        # So few heads that segments run side by side.
        (LinearCall(128, half, length=8192, batch=1, heads=2), ("linear_collect", "linear_chain")),
        (LinearCall(128, half, decay=True), some),
        (LinearCall(128, half, group=4), ("linear_grad_key",)),
        (LinearCall(256, half), (*some, "linear_grad_query", "linear_count")),
        (LinearCall(64, "fp32"), some[:1]),
    ]


def delta_entries(half: str) -> list[Entry]:
    """The calls of the gated delta rule. Without decay its kernels are those of one a head, less
    what multiplies by it."""
    scans = ("delta_forward_scan", "delta_reverse_scan")
    segments, safe = ("delta_segments", "delta_join_segments"), "delta_forward_scan, NaN-safe"
    behind = "delta_clear_behind"
    others = (*segments, safe, behind)
    whole = tuple(kernel for kernel in (*DELTA, "delta_step") if kernel not in others)
    return [
        (DeltaCall(64, half), (*scans, "delta_gradients")),
        (DeltaCall(128, half), (*whole, safe)),
        (DeltaCall(128, half, "none"), scans[:1]),
        (DeltaCall(128, half, "channels"), whole),
        (DeltaCall(128, half, packed=True), ("delta_system", behind)),
        (DeltaCall(128, half, "channels", packed=True), ("delta_system",)),
        (DeltaCall(256, half), (*scans, "delta_gradients")),
        (DeltaCall(256, half, "channels"), ("delta_system", *scans)),
        (DeltaCall(64, "fp32"), ("delta_system", *scans, "delta_gradients")),
        (DeltaCall(128, half, length=65536, batch=1, heads=8, key_heads=2), segments),
    ]


def fp8_entries() -> list[Entry]:
    """The calls of fp8 attention: of e4m3 rows, over pages too, and of rows of 16 bits."""
    forward, few = ("fp8_forward",), FEW_QUERIES
    return [
        *((PagedCall(dim, "fp8"), ("pages",)) for dim in (64, 128, 256)),
        (PagedCall(256, "fp8", "causal", query_len=few), ("pages",)),
        (PagedCall(128, "fp8", "causal", query_len=LONG_CHUNK), ("pages",)),
        (Fp8KernelCall(64, "fp8", "causal"), forward),
        (Fp8KernelCall(128, "fp8", "causal"), (*forward, "fp8_quantise_values")),
        (Fp8KernelCall(256, "fp8", "causal"), forward),
        (Fp8KernelCall(128), PASSES["fp8"]),
        (Fp8KernelCall(128, mask="causal", packed=True), forward),
        (Fp8KernelCall(256), ("fp8_quantise_rows", "fp8_quantise_values")),
    ]


def jobs(
    architectures: tuple[str, ...], kernels: str = "*", head_dim: int | None = None
) -> list[Job]:
    """What to compile for some architectures: kernels whose names a glob fits, of one head_dim."""
    catalogue = [(name, *entry) for name in architectures for entry in entries(name)]
    dims = sorted({call.head_dim for _, call, _ in catalogue})
    if head_dim is not None and head_dim not in dims:
        raise ValueError(f"--head-dim: got {head_dim}, takes {', '.join(map(str, dims))}")
    if not any(fnmatchcase(kernel, kernels) for kernel in KERNELS):
        raise ValueError(f"no kernel is named {kernels!r}; there are {'; '.join(KERNELS)}")
    found = [
        Job(
            name, call, which, tuple(k for k in of_call if k in of_pass and fnmatchcase(k, kernels))
        )
        for name, call, of_call in catalogue
        for which, of_pass in PASSES.items()
        if head_dim in (None, call.head_dim)
    ]
    return [job for job in found if job.kernels]


SAMPLE = 64
READER = Path(__file__).with_name("machine_code.py")

Known = Mapping[str, Sequence[int]]
"""The numbers of a Usage, by key."""


class Compiled(NamedTuple):
    """One compiled kernel, or why there is none."""

    job: Job
    kernel: str
    config: tuple[int, int, int, int]  # tiles (0 where it has none), warps, stages
    seconds: float
    usage: Usage | None
    error: str
    key: str  # of all that the compiler was told: equal for equal binaries


# ---- the file ------------------------------------------------------------------------------------


def read(file: Path, triton: str, must_exist: bool = False) -> dict[str, Sequence[int]]:
    """The entries of a version of Triton; none where there is no file, unless it must exist."""
    if not file.exists():
        if must_exist:
            raise ValueError(f"--known: {file} does not exist, so nothing can be compared with it")
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8")).get(triton, {})
        for entry in entries.values():
            Usage(*entry)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}. Delete it, and write it anew with --known") from None
    return entries


def trusted(known: Known) -> dict[str, Sequence[int]]:
    """The entries whose kernels are not compiled again: all but the sample."""
    everything = hashlib.sha256("".join(sorted(known)).encode()).digest()
    return {
        key: entry
        for key, entry in known.items()
        if int(key[-8:], 16) % SAMPLE != everything[0] % SAMPLE
    }


def write(file: Path, results: Iterable[Compiled], triton: str, others: Known) -> None:
    """Keep what was found; other versions of Triton keep what they have.

    others: entries of this version that stay beside it, where not all kernels were asked for.
    """
    tables = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = {one.key: list(one.usage) for one in results if one.usage is not None}
    tables[triton] = {key: list(entry) for key, entry in others.items()} | found
    lines = [
        f' "{version}": {{\n'
        + ",\n".join(f'  "{key}": {json.dumps(entry)}' for key, entry in sorted(table.items()))
        + "\n }"
        for version, table in sorted(tables.items())
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def unknown(known: Known, results: Sequence[Compiled]) -> int:
    """How many kernels were compiled because the file has no entry for them."""
    return sum(one.key not in known for one in results)


def faults(file: Path, known: Known, results: Sequence[Compiled]) -> list[str]:
    """A line for each kernel whose entry differs from what was compiled."""
    return [
        f"{file}: has {Usage(*known[one.key])} for {one.job.architecture} {one.kernel} "
        f"({one.job.call.name}), which takes {one.usage}"
        for one in results
        if one.key in known and list(known[one.key]) != list(one.usage or ())
    ]


# ---- keys ----------------------------------------------------------------------------------------


def key_of(triton: str, architecture: str, inputs: str) -> str:
    """The key of what a version of Triton compiles from some inputs (`compiler_inputs`)."""
    everything = f"{triton} {architecture} {_reader()} {inputs}"
    return hashlib.sha256(everything.encode()).hexdigest()[:24]


@functools.cache
def _reader() -> str:
    return hashlib.sha256(code_text(READER.read_text(encoding="utf-8")).encode()).hexdigest()


def compiler_inputs(launch: Launch, arguments: Arguments, architecture: str) -> str:
    """All that Triton is told to compile, as text that is the same in every process.

    The code of the kernel and of all that it calls, with the values of their global constants; the
    types of arguments, what is relied on about them, and constants; the options.
    """
    kernel = launch.kernel
    on_amd = target_of(architecture).backend == "hip"
    types, constants, attributes = Signature.of(kernel.arg_names, arguments, on_amd)
    values = {path: _text(value) for path, value in constants.items()}
    options = sorted(launch.options.items())
    return f"{code_of(kernel.jit)} {types} {values} {_hints(attributes)} {options}"


def _hints(attributes: Mapping[tuple[int, ...], list[list[Any]]]) -> str:
    """The hints that Triton gets about arguments; of those that are only multiples of 16, where."""
    others = [(path, hints) for path, hints in sorted(attributes.items()) if len(hints) > 1]
    return f"{sorted(attributes)}{others or ''}"


def _text(value: Any) -> str:
    """A constant as text that is the same in every process."""
    if isinstance(value, constexpr):
        value = value.value
    if isinstance(value, jit.JITCallable):
        return code_of(value)
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    return repr(value)


def code_of(function: jit.JITCallable) -> str:
    """A hash of the code of a function and of all that it calls, with their global constants.

    Code is its text alone: where it stands, comments and docstrings do not count.
    """
    found: dict[int, str] = {}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if id(one) in found:
            continue
        found[id(one)], called = _own_code(one)
        waiting += called
    code = sorted(set(found.values()))
    return hashlib.sha256("\n".join([found[id(function)], *code]).encode()).hexdigest()


@functools.cache
def _own_code(function: jit.JITCallable) -> tuple[str, list[jit.JITCallable]]:
    """The code of one function with its global constants, and the functions that it calls.

    Kept, as most kernels call the same functions: reading them anew for each kernel took most of
    the time of a check that compiles nothing. A function's constants are those of its first look.
    """
    reader = _Dependencies(function)
    constants = {  # a set: how many modules know a constant does not matter
        (name, str(value))
        for (name, _), (value, _) in reader.used_global_vals.items()
        if isinstance(value, constexpr)
    }
    return f"{code_text(function.src)} {sorted(constants)}", reader.called


class _Dependencies(jit.DependenciesFinder):
    """Triton's search for the functions and constants that one function uses.

    Triton adds the constants of those called functions that were hashed before: which ones these
    are depends on what else the process has compiled.
    """

    def __init__(self, function: jit.JITCallable) -> None:
        nonlocals = inspect.getclosurevars(function.fn).nonlocals
        super().__init__(function.__name__, function.__globals__, nonlocals, function.src)
        self.called: list[jit.JITCallable] = []
        self.visit(function.parse())

    def _update_hash(self, func: jit.JITCallable) -> None:
        self.called.append(func)


def code_text(source: str) -> str:
    """Python without what it does not run: comments, docstrings, and where names come from."""
    return ast.unparse(_Bare().visit(ast.parse(source)))


class _Bare(ast.NodeTransformer):
    """Removes imports, and statements that are only a text."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """A docstring, or what stands for itself."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node

    def visit_Import(self, node: ast.Import) -> None:
        """Where a module comes from."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Where a name comes from."""
