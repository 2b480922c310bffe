"""Triton's compiler, asked for a named target without its driver: no GPU and no C compiler needed.

The only file that imports Triton's compiler; it is imported when something has to be compiled. What
is relied on of Triton is here: `ASTSource`, `GluonASTSource`, `triton.compile`, and what a compiled
kernel says of itself; in 3.6 to 3.9.

What Triton's own compiler does to our kernels is worked around here, by its version:

    in     what Triton does                                       what that does to our kernels
    3.8    has ptxas 12.9.86 assemble for Hopper, which may      the delta rule's systems were NaN:
           write constants of a left operand of WGMMA too late,   packed calls always, others when
           or while a product still reads it (Triton's pull       anything around them changed
           request 11781; mended in CUDA 13.3, as NVIDIA's notes
           on it say; 12.8 and 13.1 do the same to 3.8's code)
    3.7 on has ptxas allocate registers by its level 2, against   Hopper kernels spill two to eight
           a fault of ptxas 13 that it does not name              times as much
    3.9 on lets LLVM's SLP vectorizer gather scalars in vectors,  addresses take registers all at
           which ptxas takes apart again                          once, which spill
    3.9 on converts two numbers that a loop carries to one        each tile of weights is turned
           register, the wrong way round                          round before its product

The first three are undone for our kernels alone: by the ptxas that 3.8 brings for Blackwell,
13.3.33, which assembles for Hopper too, as 3.9 has it by itself; by an option; and by a hook that
stands while any thread compiles a kernel of ours. The last is why `gpu/hopper/pipeline.py` converts
by assembly there. What the last three cost on an H200: benchmarks/results/h200/triton_versions.txt.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from saccade.gpu.driver import TensorMapKind
from saccade.gpu.language import Function
from saccade.gpu.signature import FUSED, Arguments, Signature
from saccade.gpu.stored_code import PTXAS, MachineCode, by_inductor

VERSION = triton.__version__

# Triton numbers the types of TMA as the device does; the host has three of them otherwise.
HOST_TYPES = {**{number: number for number in range(16)}, 8: 10, 9: 8, 10: 9}


def compiled(
    kernel: Function, arguments: Arguments, options: Mapping[str, Any], target: GPUTarget,
    on_read: Callable[[], None] = lambda: None,
) -> Any:  # fmt: skip
    """Triton's compiled kernel, from its cache on disk or made now.

    on_read: called when its source has been read. What comes before is Python, and for one thread
        at a time: Triton's reader changes the filters of warnings, which are the process's.
    """
    form = GluonASTSource if kernel.is_gluon else ASTSource
    on_amd = target.backend == "hip"
    source: Any = form(kernel.jit, *Signature.of(kernel.arg_names, arguments, on_amd))
    read = source.make_ir

    def make_ir(*given: Any) -> Any:
        try:
            return read(*given)
        finally:
            on_read()

    source.make_ir = make_ir
    asked = {**FUSED, **workaround_options(target), "debug": knobs.runtime.debug}
    if hasattr(knobs.compilation, "instrumentation_mode"):
        asked["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    with tritons_assembler, newer_assembler(target), worked_around(target):
        return triton.compile(source, target=target, options={**asked, **options})


def target_of(architecture: str) -> GPUTarget:
    """An architecture (sm_90, gfx942) as Triton names it."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def needs_triton(metadata: Any) -> str:
    """What a compiled kernel needs that no launch of ours gives; "": nothing."""
    if metadata.target.backend != "cuda":
        return "it is no kernel for CUDA"
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
        return "its programs are started in clusters"
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return "it wants scratch memory"
    return ""


def machine_code_of(found: Any) -> MachineCode:
    """What a launch needs of a compiled kernel that needs nothing of Triton's."""
    metadata = found.metadata
    maps = [
        TensorMapKind(
            one["swizzle"], one["elem_size"], HOST_TYPES[one["elem_type"]],
            tuple(one["block_size"]),
        )
        for one in getattr(metadata, "tensordesc_meta", None) or ()
    ]  # fmt: skip
    return MachineCode(
        metadata.name, found.asm["cubin"], metadata.num_warps, metadata.shared,
        bool(metadata.launch_pdl), tuple(maps),
    )  # fmt: skip


class Workarounds(NamedTuple):
    """Which of the four a version of Triton needs."""

    assembler: bool = False
    register_level: bool = False
    vectors: bool = False
    conversions: bool = False


BY_VERSION = {
    "3.7": Workarounds(register_level=True),
    "3.8": Workarounds(assembler=True, register_level=True),
    "3.9": Workarounds(register_level=True, vectors=True, conversions=True),
}
INSTALLED = BY_VERSION.get(".".join(triton.__version__.split(".")[:2]), Workarounds())
HOPPER, BLACKWELL = 90, 100
OWN_LEVEL = "--regAllocOptLevel=5"  # ptxas takes the last that it is given; from 4 on all are alike
PTX_OF_BOTH = (
    88  # a version of PTX that 3.8's two assemblers read; by it Triton's cache tells apart
)
PIPELINE = "saccade: scalars stay scalars"  # what Triton knows kernels by that were compiled so


class Meanwhile:
    """A change of the whole process that stands while any thread is inside."""

    def __init__(self, make: Callable[[], None], undo: Callable[[], None]) -> None:
        """make: called by each thread that enters; undo: when the last one has left."""
        self._make, self._undo = make, undo
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._make()
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._undo()


def wrapped(name: str, wrapper: type[Any]) -> Meanwhile:
    """What Triton's compiler for NVIDIA calls by a name, inside of a wrapper of ours meanwhile."""

    def replace() -> None:
        from triton.backends.nvidia import compiler

        if not isinstance(getattr(compiler, name), wrapper):
            setattr(compiler, name, wrapper(getattr(compiler, name)))

    def restore() -> None:
        from triton.backends.nvidia import compiler

        if isinstance(getattr(compiler, name), wrapper):
            setattr(compiler, name, getattr(compiler, name).whole)

    return Meanwhile(replace, restore)


def needed(target: GPUTarget) -> Workarounds:
    """What this Triton needs for a target."""
    if target.backend != "cuda":
        return Workarounds()
    return INSTALLED._replace(assembler=INSTALLED.assembler and target.arch == HOPPER)


def workaround_options(target: GPUTarget) -> dict[str, Any]:
    """Options for every kernel: none by most versions.

    What a user has ptxas told (PTXAS_OPTIONS) stands behind ours, and so holds.
    """
    options: dict[str, Any] = {}
    if needed(target).register_level:
        told = filter(None, (OWN_LEVEL, knobs.nvidia.ptxas_options))
        options["ptx_options"] = " ".join(told)
    if needed(target).assembler:
        options["ptx_version"] = PTX_OF_BOTH
    return options


_hidden: list[str] = []  # the assembler that Inductor named, meanwhile


def _hide_assembler() -> None:
    if by_inductor():
        _hidden[:] = [os.environ.pop(PTXAS)]


def _show_assembler() -> None:
    if _hidden:
        os.environ.setdefault(PTXAS, _hidden.pop())


tritons_assembler = Meanwhile(_hide_assembler, _show_assembler)
"""Triton's own assembler, where Inductor named PyTorch's: else a kernel's machine code would depend
on what a process compiled before, and spill by one version of the assembler what it does not by the
other."""


class Stage(threading.local):
    """What a thread compiles."""

    on_hopper = False  # whether it is a kernel of ours that another assembler is wanted for
    ours = False  # whether it is in a stage of one of our kernels


_stage = Stage()


@contextmanager
def newer_assembler(target: GPUTarget) -> Iterator[None]:
    """Assemble what this thread compiles meanwhile as 3.9 does, where 3.8 errs."""
    if not needed(target).assembler:
        yield
        return
    with _newer_assembler:
        _stage.on_hopper = True
        try:
            yield
        finally:
            _stage.on_hopper = False


class _Assembler:
    """Triton's choice of an assembler, which for our kernels is the one for Blackwell."""

    def __init__(self, whole: Callable[[int], Any]) -> None:
        self.whole = whole

    def __call__(self, arch: int) -> Any:
        """The assembler of an architecture; who named one himself is given that."""
        named = os.environ.get(PTXAS) or vars(knobs.nvidia).get("ptxas")
        return self.whole(BLACKWELL if _stage.on_hopper and not named else arch)


_newer_assembler = wrapped("get_ptxas", _Assembler)


def worked_around(target: GPUTarget) -> AbstractContextManager[None]:
    """Compile kernels without vectors meanwhile, unless a user's own hook stands there."""
    return _hooked if needed(target).vectors else nullcontext()


def _set_hook() -> None:
    if knobs.runtime.add_stages_inspection_hook is None:
        hook: Any = _pipeline  # Triton's own type knows one of the two ways in which it is called
        knobs.runtime.add_stages_inspection_hook = hook


def _drop_hook() -> None:
    hook: Any = knobs.runtime.add_stages_inspection_hook
    if hook is _pipeline:
        knobs.runtime.add_stages_inspection_hook = None


_hooked = Meanwhile(_set_hook, _drop_hook)


def _pipeline(*asked: Any) -> tuple[str, str] | None:
    """Triton's hook: asked for nothing, a key; else it is given (backend, stages, …) to change."""
    if not asked:
        return PIPELINE, PIPELINE
    stages: dict[str, Callable[[Any, Any], Any]] = asked[1]
    stages["llir"] = _without_vectors(stages["llir"])
    return None


def _without_vectors(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The stage that makes LLVM's code, with its vectorizer of scalars turned off."""

    def made(source: Any, metadata: Any) -> Any:
        with _scalars:
            _stage.ours = True
            try:
                return make(source, metadata)
            finally:
                _stage.ours = False

    return made


class _Scalars:
    """Triton's LLVM, which is told to make no vectors of scalars in stages of our kernels."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def optimize_module(self, *arguments: Any, **options: Any) -> Any:
        """Optimise as Triton does, but for the vectorizer."""
        if _stage.ours:
            options["disable_slp_vectorizer"] = True
        return self.whole.optimize_module(*arguments, **options)


_scalars = wrapped("llvm", _Scalars)
