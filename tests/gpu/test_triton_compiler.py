"""What Triton does otherwise than our kernels want is set right, in the versions that do it."""

from __future__ import annotations

import inspect
import os
import threading
import time
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
    assert ("--regAllocOptLevel=2" in source) is triton_compiler.INSTALLED.register_level
    assert (
        "disable_slp_vectorizer=capability == 80" in source
    ) is triton_compiler.INSTALLED.vectors


class Kernel:
    """Stands in for a kernel without arguments."""

    arg_names, is_gluon, jit = (), False, None


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hook that stood in each compilation."""
    found: list[Any] = []

    def compile_it(source: Any, target: GPUTarget, options: dict[str, Any]) -> None:
        found.append(knobs.runtime.add_stages_inspection_hook)

    monkeypatch.setattr(triton, "compile", compile_it)
    monkeypatch.setattr(triton_compiler, "ASTSource", lambda *given: None)
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


def test_two_threads_compile_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "3.9.0")
    inside, most = [], []

    def compile_some() -> None:
        for _ in range(50):
            with triton_compiler.worked_around(CUDA):
                inside.append(1)
                time.sleep(1e-4)  # for the others to come
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=compile_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and knobs.runtime.add_stages_inspection_hook is None
