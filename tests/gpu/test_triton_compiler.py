"""What Triton does otherwise than our kernels want is set right, in the versions that do it."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest

pytest.importorskip("triton")
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from saccade.gpu import triton_compiler
from saccade.gpu.signature import Arguments
from saccade.gpu.stored_code import PTXAS, PYTORCH

CUDA, HIP = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A Triton of some version."""
    table, known = triton_compiler.BY_VERSION, version.rpartition(".")[0]
    monkeypatch.setattr(
        triton_compiler, "INSTALLED", table.get(known, triton_compiler.Workarounds())
    )


@pytest.mark.parametrize(
    ("version", "target", "told"),
    [
        ("3.6.0", CUDA, None),
        ("3.7.1", CUDA, "--regAllocOptLevel=5"),
        ("3.9.0", CUDA, "--regAllocOptLevel=5"),
        ("3.9.0", HIP, None),  # its options have no such name
        ("9.9.0", CUDA, None),  # nothing is known of what it tells ptxas
    ],
)
@pytest.mark.parametrize("users", [None, "-O2 --regAllocOptLevel=3"])
def test_registers_are_allocated_by_the_level_of_ptxas(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    target: GPUTarget,
    told: str | None,
    users: str | None,
) -> None:
    pretend(monkeypatch, version)
    monkeypatch.setattr(knobs.nvidia, "ptxas_options", users)
    options = triton_compiler.workaround_options(target)
    expected = None if told is None else " ".join(filter(None, (told, users)))
    assert options.get("ptx_options") == expected


def test_the_table_says_what_the_installed_triton_does() -> None:
    from triton.backends.nvidia import compiler

    source = inspect.getsource(compiler)
    assert compiler.get_ptxas(90).version.startswith("12.9") is triton_compiler.INSTALLED.assembler
    assert ("--regAllocOptLevel=2" in source) is triton_compiler.INSTALLED.register_level
    assert (
        "disable_slp_vectorizer=capability == 80" in source
    ) is triton_compiler.INSTALLED.vectors


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("3.6.0", CUDA, "ptxas"),
        ("3.8.0", CUDA, "ptxas-blackwell"),
        ("3.8.0", GPUTarget("cuda", 80, 32), "ptxas"),
        ("3.8.0", HIP, "ptxas"),
        ("3.9.0", CUDA, "ptxas"),  # as Triton itself has it: ptxas-blackwell, by another choice
    ],
)
def test_the_newer_ptxas_assembles_for_hopper_where_the_older_errs(
    monkeypatch: pytest.MonkeyPatch, version: str, target: GPUTarget, expected: str
) -> None:
    """For kernels of ours alone, and not where somebody named an assembler."""
    from triton.backends.nvidia import compiler

    def of_triton(arch: int) -> str:
        return "ptxas-blackwell" if arch >= 100 else "ptxas"

    pretend(monkeypatch, version)
    monkeypatch.setattr(compiler, "get_ptxas", of_triton)
    monkeypatch.setattr(triton_compiler, "ASTSource", Source)
    monkeypatch.delenv(PTXAS, raising=False)
    met: list[Any] = []

    def compile_it(source: Any, target: GPUTarget, options: dict[str, Any]) -> None:
        thread = threading.Thread(target=lambda: met.append(compiler.get_ptxas(90)))
        thread.start()
        thread.join()
        met.append(compiler.get_ptxas(90))
        met.append(options.get("ptx_version"))

    monkeypatch.setattr(triton, "compile", compile_it)
    asked = cast(Any, Kernel()), Arguments([], []), {}, target
    triton_compiler.compiled(*asked)
    told = 88 if expected == "ptxas-blackwell" else None  # another key in Triton's cache
    assert met == ["ptxas", expected, told]
    assert compiler.get_ptxas is of_triton
    met.clear()
    with monkeypatch.context() as named:
        named.setenv(PTXAS, "/a/users/ptxas")
        triton_compiler.compiled(*asked)
        named.delenv(PTXAS)
        named.setitem(vars(knobs.nvidia), "ptxas", "/a/users/ptxas")
        triton_compiler.compiled(*asked)
    assert met == ["ptxas", "ptxas", told] * 2


def test_a_failure_leaves_tritons_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import compiler

    pretend(monkeypatch, "3.8.0")
    choice = compiler.get_ptxas
    with pytest.raises(ZeroDivisionError), triton_compiler.newer_assembler(CUDA):
        assert compiler.get_ptxas(90).path == choice(100).path
        _ = 1 // 0
    assert compiler.get_ptxas is choice


class Kernel:
    """Stands in for a kernel without arguments."""

    arg_names, is_gluon, jit = (), False, None


class Source:
    """Stands in for Triton's own."""

    def __init__(self, *given: Any) -> None:
        pass

    def make_ir(self, *given: Any) -> tuple[Any, ...]:
        return given


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hook that stood in each compilation."""
    found: list[Any] = []

    def compile_it(source: Any, target: GPUTarget, options: dict[str, Any]) -> None:
        found.append(knobs.runtime.add_stages_inspection_hook)

    monkeypatch.setattr(triton, "compile", compile_it)
    monkeypatch.setattr(triton_compiler, "ASTSource", Source)
    return found


def compile_one() -> None:
    triton_compiler.compiled(cast(Any, Kernel()), Arguments([], []), {}, CUDA)


@pytest.mark.parametrize(
    ("version", "there"), [("3.6.0", False), ("3.8.0", False), ("3.9.0", True)]
)
def test_a_kernel_is_compiled_under_the_hook_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Any], version: str, there: bool
) -> None:
    pretend(monkeypatch, version)
    compile_one()
    assert hooks == [triton_compiler._pipeline if there else None]
    assert knobs.runtime.add_stages_inspection_hook is None


def test_inductors_assembler_compiles_none_of_our_kernels(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Any]
) -> None:
    met: list[str | None] = []
    monkeypatch.setattr(triton, "compile", lambda *_, **options: met.append(os.environ.get(PTXAS)))
    for path in (str(PYTORCH / "bin" / "ptxas"), "/a/users/ptxas"):
        monkeypatch.setenv(PTXAS, path)
        compile_one()
        assert os.environ[PTXAS] == path
    assert met == [None, "/a/users/ptxas"]


def test_it_is_said_when_the_source_was_read(
    monkeypatch: pytest.MonkeyPatch, hooks: list[Any]
) -> None:
    """Also if it could not be."""
    happened: list[str] = []

    def compile_it(source: Any, **options: Any) -> None:
        happened.append("begun")
        assert source.make_ir(1, 2) == (1, 2)
        happened.append("compiled")

    monkeypatch.setattr(triton, "compile", compile_it)
    asked = cast(Any, Kernel()), Arguments([], []), {}, CUDA
    triton_compiler.compiled(*asked, lambda: happened.append("read"))
    assert happened == ["begun", "read", "compiled"]
    monkeypatch.setattr(Source, "make_ir", lambda *given: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        triton_compiler.compiled(*asked, lambda: happened.append("read"))
    assert happened[3:] == ["begun", "read"]


def test_a_users_own_hook_stays(monkeypatch: pytest.MonkeyPatch, hooks: list[Any]) -> None:
    pretend(monkeypatch, "3.9.0")
    own = object()
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", own)
    compile_one()
    assert hooks == [own] and knobs.runtime.add_stages_inspection_hook is own


def test_a_failure_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "3.9.0")
    with pytest.raises(ZeroDivisionError), triton_compiler.worked_around(CUDA):
        _ = 1 // 0
    assert knobs.runtime.add_stages_inspection_hook is None


def test_the_hook_turns_vectors_off_for_the_stage_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens in it; and a key of its own says so to Triton's caches."""
    from triton.backends.nvidia import compiler

    given: list[dict[str, Any]] = []

    class Llvm:
        OPTIMIZE_O3 = "O3"

        def optimize_module(self, module: Any, level: Any, **options: Any) -> None:
            given.append({"level": level, **options})

    whole = Llvm()
    monkeypatch.setattr(compiler, "llvm", whole)

    def make(source: str, metadata: object) -> str:
        compiler.llvm.optimize_module(
            source, compiler.llvm.OPTIMIZE_O3, disable_slp_vectorizer=False, flags=["one"]
        )
        if source == "wrong":
            raise ValueError
        return source

    stages = {"ttir": make, "llir": make}
    assert triton_compiler._pipeline(object(), stages, object(), object(), 90) is None
    assert stages["ttir"] is make and stages["llir"]("right", None) == "right"
    with pytest.raises(ValueError):
        stages["llir"]("wrong", None)
    assert compiler.llvm is whole
    assert given == [{"level": "O3", "disable_slp_vectorizer": True, "flags": ["one"]}] * 2
    known_by = triton_compiler._pipeline()
    assert known_by is not None and all(known_by)


def side_by_side(change: AbstractContextManager[None], look: Callable[[], object]) -> list[object]:
    """What several threads see that are inside of a change, in turns that overlap."""
    seen: list[object] = []

    def compile_some() -> None:
        for _ in range(50):
            with change:
                time.sleep(1e-4)  # for others to come and go
                seen.append(look())

    threads = [threading.Thread(target=compile_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_the_hook_stands_until_the_last_thread_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "3.9.0")
    seen = side_by_side(
        triton_compiler.worked_around(CUDA), lambda: knobs.runtime.add_stages_inspection_hook
    )
    assert seen == [triton_compiler._pipeline] * 200
    assert knobs.runtime.add_stages_inspection_hook is None


def test_the_assembler_is_hidden_until_the_last_thread_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(PYTORCH / "bin" / "ptxas")
    monkeypatch.setenv(PTXAS, path)
    seen = side_by_side(triton_compiler.tritons_assembler, lambda: os.environ.get(PTXAS))
    assert seen == [None] * 200 and os.environ[PTXAS] == path


def test_kernels_that_are_not_ours_keep_their_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by another thread while a stage of ours is under way."""
    from triton.backends.nvidia import compiler

    given: list[dict[str, Any]] = []

    class Llvm:
        def optimize_module(self, **options: Any) -> None:
            given.append(options)

    monkeypatch.setattr(compiler, "llvm", Llvm())

    def theirs() -> None:
        compiler.llvm.optimize_module(disable_slp_vectorizer=False)

    def ours(source: object, metadata: object) -> None:
        thread = threading.Thread(target=theirs)
        thread.start()
        thread.join()
        compiler.llvm.optimize_module()

    triton_compiler._without_vectors(ours)(None, None)
    assert given == [{"disable_slp_vectorizer": False}, {"disable_slp_vectorizer": True}]
