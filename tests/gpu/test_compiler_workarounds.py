"""What Triton does otherwise than our kernels want is set right, in the versions that do it."""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

import pytest

pytest.importorskip("triton")
import triton
from triton import knobs

from saccade.gpu import compiler_workarounds
from saccade.gpu.launcher import Launch


class Driver:
    """Stands in for a driver of Triton's, which needs a GPU."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def get_current_target(self) -> Driver:
        return self


def pretend(monkeypatch: pytest.MonkeyPatch, version: str, backend: str) -> None:
    """A Triton of some version on a GPU of some make."""
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    table, known = compiler_workarounds.BY_VERSION, version.rpartition(".")[0]
    monkeypatch.setattr(
        compiler_workarounds, "INSTALLED", table.get(known, compiler_workarounds.NONE)
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(backend), raising=False)


@pytest.mark.parametrize(
    ("version", "backend", "told"),
    [
        ("3.6.0", "cuda", None),
        ("3.7.1", "cuda", "--regAllocOptLevel=5"),
        ("3.9.0", "cuda", "--regAllocOptLevel=5"),
        ("3.9.0", "hip", None),  # its options have no such name
        ("9.9.0", "cuda", None),  # nothing is known of what it tells ptxas
    ],
)
@pytest.mark.parametrize("users", [None, "-O2 --regAllocOptLevel=3"])
def test_registers_are_allocated_by_the_level_of_ptxas(
    monkeypatch: pytest.MonkeyPatch, version: str, backend: str, told: str | None, users: str | None
) -> None:
    pretend(monkeypatch, version, backend)
    monkeypatch.setattr(knobs.nvidia, "ptxas_options", users)
    options = Launch(object(), {}, {"num_warps": 4}).options
    expected = None if told is None else " ".join(filter(None, (told, users)))
    assert options.get("ptx_options") == expected


def test_the_table_says_what_the_installed_triton_does() -> None:
    from triton.backends.nvidia import compiler

    source = inspect.getsource(compiler)
    assert ("--regAllocOptLevel=2" in source) is compiler_workarounds.INSTALLED.register_level
    assert (
        "disable_slp_vectorizer=capability == 80" in source
    ) is compiler_workarounds.INSTALLED.vectors


class Kernel:
    """Stands in for a kernel: its compilation notes which hook stands, and runs it."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def warmup(self, *arguments: Any, **more: Any) -> None:
        self.hooks.append(knobs.runtime.add_stages_inspection_hook)


@pytest.mark.parametrize(
    ("version", "there"), [("3.6.0", False), ("3.8.0", False), ("3.9.0", True)]
)
def test_a_kernel_is_compiled_under_the_hook_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch, version: str, there: bool
) -> None:
    pretend(monkeypatch, version, "cuda")
    kernel = Kernel()
    Launch(kernel, {}, {}).compile(())
    assert kernel.hooks == [compiler_workarounds._pipeline if there else None]
    assert knobs.runtime.add_stages_inspection_hook is None


def test_a_users_own_hook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "3.9.0", "cuda")
    own = object()
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", own)
    kernel = Kernel()
    Launch(kernel, {}, {}).compile(())
    assert kernel.hooks == [own] and knobs.runtime.add_stages_inspection_hook is own


def test_a_failure_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "3.9.0", "cuda")
    with pytest.raises(ZeroDivisionError), compiler_workarounds.applied():
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
    assert compiler_workarounds._pipeline(object(), stages, object(), object(), 90) is None
    assert stages["ttir"] is make and stages["llir"]("right", None) == "right"
    with pytest.raises(ValueError):
        stages["llir"]("wrong", None)
    assert compiler.llvm is whole
    assert given == [{"level": "O3", "disable_slp_vectorizer": True, "flags": ["one"]}] * 2
    known_by = compiler_workarounds._pipeline()
    assert known_by is not None and all(known_by)


def test_two_threads_compile_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "3.9.0", "cuda")
    inside, most = [], []

    def compile_one() -> None:
        for _ in range(50):
            with compiler_workarounds.applied():
                inside.append(1)
                time.sleep(1e-4)  # for the others to come
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=compile_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and knobs.runtime.add_stages_inspection_hook is None
