"""Machine code that is stored: found by what it was made of, and refused where that is unknown."""

from __future__ import annotations

import hashlib
import importlib.abc
import json
import lzma
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from saccade.gpu import driver, language, machine_code, stored_code
from saccade.gpu.language import Function, tl, triton
from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments
from saccade.gpu.stored_code import MachineCode

CODE = MachineCode(
    "attention_forward", bytes(range(256)) * 400, 8, 99_000, True,
    (driver.TensorMapKind(3, 2, 9, (1, 1, 64, 64)),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A package and a cache of this test's own, and nothing told to Triton."""
    monkeypatch.setattr(stored_code, "COMPILED", tmp_path / "compiled")
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_code, "told_triton", lambda: "")
    for remembered in (stored_code.shipped, stored_code.cache):
        remembered.cache_clear()
    yield tmp_path
    stored_code.shipped.cache_clear()
    stored_code.cache.cache_clear()


def test_what_was_stored_is_what_is_read() -> None:
    stored = CODE.packed()
    assert MachineCode.unpacked(stored) == CODE
    assert len(stored) < len(CODE.code) // 10


@pytest.mark.parametrize("damage", ["cut", "empty", "byte", "code", "head"])
def test_what_is_damaged_is_refused(damage: str) -> None:
    stored, (head, _, code) = CODE.packed(), CODE.plain().partition(b"\n")
    damaged = {
        "cut": stored[:-9], "empty": b"", "byte": stored[:200] + b"?" + stored[201:],
        "code": lzma.compress(head + b"\n" + code[::-1]),
        "head": lzma.compress(head[5:] + b"\n" + code),
    }[damage]  # fmt: skip
    with pytest.raises(ValueError):
        MachineCode.unpacked(damaged)


def test_the_package_serves_its_own_sources_alone(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stored_code.shipped("sm_90") is None
    codes = {letter * 64: CODE._replace(name=letter) for letter in "abc"}
    size = stored_code.write_shipped(stored_code.COMPILED, "sm_90", codes, "a test")
    assert size == sum(file.stat().st_size for file in stored_code.COMPILED.iterdir())
    stored_code.shipped.cache_clear()
    found = stored_code.shipped("sm_90")
    assert found is not None
    assert {address: found.find(address) for address in codes} == codes
    assert found.find("d" * 64) is None and stored_code.shipped("sm_80") is None

    stored_code.shipped.cache_clear()
    monkeypatch.setattr(stored_code, "source_digest", lambda: "of edited kernels")
    with pytest.warns(UserWarning, match="made from other sources"):
        assert stored_code.shipped("sm_90") is None


def test_variants_that_are_alike_are_stored_together_and_equal_ones_once() -> None:
    random = hashlib.shake_128(b"no two parts alike").digest(5000)
    codes = {
        f"{name} {number}": CODE._replace(name=name, code=random + bytes([number % 4]))
        for name in ("one", "other")
        for number in range(12)
    }
    size = stored_code.write_shipped(stored_code.COMPILED, "sm_90", codes, "a test")
    found = stored_code.shipped("sm_90")
    assert found is not None and {at: found.find(at) for at in codes} == codes
    assert len(found.blocks) == 2 and len(set(found.places.values())) == 2 * 4
    assert size > (stored_code.COMPILED / "sm_90.code").stat().st_size > 2 * len(random)
    assert size < 4 * len(random)


def test_one_block_is_read_for_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_code, "BLOCK", 3 * len(CODE.code))
    codes = {f"{n:02}": CODE._replace(code=CODE.code[:-1] + bytes([n])) for n in range(10)}
    stored_code.write_shipped(stored_code.COMPILED, "sm_90", codes, "a test")
    found, read = stored_code.shipped("sm_90"), list[int]()
    assert found is not None and len(found.blocks) == 4
    monkeypatch.setattr(
        stored_code, "_decompressed",
        lambda stored, plain=stored_code._decompressed: read.append(len(stored)) or plain(stored),
    )  # fmt: skip
    assert found.find("04") == codes["04"] and found.find("05") == codes["05"]
    assert read == [found.blocks[1][1]]


def test_a_damaged_variant_of_the_package_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_code, "BLOCK", 1)
    codes = {"a": CODE, "b": CODE._replace(num_warps=16)}
    stored_code.write_shipped(stored_code.COMPILED, "sm_90", codes, "a test")
    file = stored_code.COMPILED / "sm_90.code"
    whole = bytearray(file.read_bytes())
    whole[-20] ^= 1
    file.write_bytes(whole)
    found = stored_code.shipped("sm_90")
    assert found is not None and found.find("a") == CODE
    with pytest.warns(UserWarning, match="damaged and not used"):
        assert found.find("b") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"source": 1}', '{"made_by": "", "blocks": [1]}'])
def test_a_damaged_index_is_not_used(text: str) -> None:
    stored_code.COMPILED.mkdir()
    (stored_code.COMPILED / "sm_90.index").write_text(text)
    with pytest.warns(UserWarning, match="sm_90.index is damaged and not used"):
        assert stored_code.shipped("sm_90") is None


def test_an_index_without_its_code_is_not_used() -> None:
    stored_code.write_shipped(stored_code.COMPILED, "sm_90", {"a": CODE}, "a test")
    (stored_code.COMPILED / "sm_90.code").unlink()
    found = stored_code.shipped("sm_90")
    with pytest.warns(UserWarning, match="sm_90.code is damaged and not used"):
        assert found is not None and found.find("a") is None


DECORATED = re.compile(r"^\s*@(triton\.jit|gluon\.jit|gluon\.constexpr_function|aggregate)", re.M)
IMPORT = re.compile(r"^(import triton|from triton)\b", re.M)
IMPORTERS = ("gpu/triton_compiler.py", "kernel_check/", "bench/")


def test_all_device_code_counts_in_the_source_digest_and_imports_no_triton() -> None:
    files = sorted(stored_code.PACKAGE.rglob("*.py"))
    texts = {str(file.relative_to(stored_code.PACKAGE)): file.read_text() for file in files}
    kernels = [name for name, text in texts.items() if DECORATED.search(text)]
    assert len(kernels) > 30
    marker = stored_code.IMPORTS_LANGUAGE.decode()
    assert [name for name in kernels if marker not in texts[name]] == []
    assert {name.split("/")[0] for name in kernels} <= {"gpu", "ops", "kv_cache"}
    wrong = [name for name, text in texts.items() if IMPORT.search(text)]
    assert [name for name in wrong if not name.startswith(IMPORTERS)] == []


def test_the_cache_keeps_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored_code.cached("a") is None
    stored_code.keep("a", CODE)
    assert stored_code.cached("a") == CODE
    folder = stored_code.cache()
    assert folder is not None and [file.name for file in folder.iterdir()] == ["a"]
    (folder / "a").write_bytes(b"cut short")
    assert stored_code.cached("a") is None
    monkeypatch.setattr(stored_code, "MOST_CACHED", 8)
    for number in range(20):
        stored_code.keep(f"{number:02}", CODE)
        os.utime(folder / f"{number:02}", (number, number))
    left = {file.name for file in folder.iterdir()}
    assert len(left) <= 8 and "19" in left


def test_a_cache_that_cannot_be_written_is_no_error(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "file").write_text("")
    for where in (str(elsewhere / "file"), ""):  # "": turned off
        monkeypatch.setenv("SACCADE_CACHE", where)
        stored_code.cache.cache_clear()
        stored_code.keep("a", CODE)
        assert stored_code.cached("a") is None


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real question, and nothing told."""
    with suppress(ModuleNotFoundError):  # while it finds the interpreter as all tests have it
        importlib.import_module("saccade.gpu.triton_compiler")
    monkeypatch.undo()
    for name in list(os.environ):
        if name.startswith(("TRITON_", "PTXAS_", "MLIR_", "LLVM_")):
            monkeypatch.delenv(name)
    assert stored_code.told_triton() == ""


def test_triton_that_is_told_otherwise_is_asked(
    untold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRITON_PTXAS_PATH", "PTXAS_OPTIONS", "DISABLE_LLVM_OPT", "TRITON_DEBUG"):
        with monkeypatch.context() as told:
            told.setenv(name, "1")
            assert stored_code.told_triton() == name
    monkeypatch.setenv("TRITON_LIBDEVICE_PATH", "as Inductor sets it")
    assert stored_code.told_triton() == ""


def test_what_inductor_leaves_in_the_environment_is_nobodys_wish(
    untold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = pytest.importorskip("torch._inductor.runtime.compile_tasks")
    with monkeypatch.context() as there:  # a build of PyTorch for CPUs brings no assembler
        there.setattr("pathlib.Path.exists", lambda path: True)
        there.setattr("pathlib.Path.is_file", lambda path: True)
        there.setattr("os.access", lambda *path: True)
        tasks._set_triton_ptxas_path.__wrapped__()
    try:
        assert os.environ["TRITON_PTXAS_PATH"].endswith("ptxas")
        assert stored_code.told_triton() == ""
    finally:
        del os.environ["TRITON_PTXAS_PATH"]


def test_settings_of_a_program_count_as_the_environment_does(
    untold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton").knobs
    for name, value in (
        ("nvidia.ptxas_options", "--opt-level 0"), ("nvidia.disable_ptxas_opt", True),
        ("compilation.enable_asan", True), ("compilation.instrumentation_mode", "any"),
        ("language.default_fp_fusion", False), ("runtime.debug", True),
        ("runtime.add_stages_inspection_hook", print), ("runtime.override_arch", "sm75"),
    ):  # fmt: skip
        part, knob = name.split(".")
        with getattr(knobs, part).scope():
            setattr(getattr(knobs, part), knob, value)
            assert stored_code.told_triton(), name
        assert stored_code.told_triton() == "", name
    with knobs.runtime.scope(), knobs.compilation.scope():
        knobs.runtime.jit_post_compile_hook = knobs.compilation.listener = print
        knobs.refresh_knobs()
        assert stored_code.told_triton() == ""
        knobs.runtime.debug = True
        assert stored_code.told_triton() == "triton.knobs.runtime.debug"


def test_settings_that_another_thread_is_importing_are_nobodys_wish(
    untold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is in sys.modules before its parts are in it."""
    monkeypatch.setitem(sys.modules, "triton.knobs", ModuleType("triton.knobs"))
    assert stored_code.told_triton() == ""


def test_threads_without_triton_are_all_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One imports it in vain; others waited for that import, and Python tells them otherwise."""
    found: list[str] = []

    class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, *others: object) -> ModuleSpec | None:
            return ModuleSpec(name, self) if name == "saccade.gpu.triton_compiler" else None

        def exec_module(self, module: ModuleType) -> None:
            time.sleep(0.2)  # until the others wait
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

    def ask() -> None:
        try:
            machine_code.compiled(ours(), ARGUMENTS, {}, "sm_90")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    monkeypatch.delitem(sys.modules, "saccade.gpu.triton_compiler", raising=False)
    monkeypatch.delattr("saccade.gpu.triton_compiler", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    assert all(
        told.startswith("RuntimeError: ") and "it takes Triton (pip install triton)" in told
        for told in found
    ), found


def test_what_is_stored_is_passed_by_where_a_program_says_otherwise(
    untold: None, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, compiler: list[str]
) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setenv("SACCADE_CACHE", str(elsewhere / "cache"))
    stored_code.cache.cache_clear()
    found = [machine_code.find(ours(), ARGUMENTS, {}, "sm_90")[1] for _ in range(2)]
    assert found == [machine_code.COMPILER, machine_code.CACHE]
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        assert machine_code.find(ours(), ARGUMENTS, {}, "sm_90")[1] == machine_code.COMPILER
        monkeypatch.setattr(machine_code, "_variants", {0: SimpleNamespace(
            origin=machine_code.COMPILER, by_triton="", name="kernel",
        )})  # fmt: skip
        said = machine_code.remark()
        assert said is not None and said.endswith("as triton.knobs.runtime.debug is set")
    assert len(compiler) == 2


# ---- where a variant is looked for --------------------------------------------------------------


@triton.jit
def of_a_test(pointer, SIZE: tl.constexpr):
    tl.store(pointer + SIZE, 1.0)


def ours(name: str = "kernel") -> Function:
    """A function that this library might have."""

    def fn(pointer: Any, SIZE: Any) -> None:
        pass

    fn.__module__, fn.__name__, fn.__qualname__ = "saccade.ops.somewhere", name, name
    return cast(Any, triton.jit)(fn)


ARGUMENTS = Arguments([torch.zeros(8)], [8])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that Triton was asked for, which it pretends to compile."""
    pytest.importorskip("triton")
    from saccade.gpu import triton_compiler

    asked: list[str] = []

    def compiled(kernel: Function, *others: Any) -> Any:
        asked.append(kernel.__name__)
        return SimpleNamespace(metadata=None)

    monkeypatch.setattr(triton_compiler, "compiled", compiled)
    monkeypatch.setattr(triton_compiler, "needs_triton", lambda metadata: "")
    monkeypatch.setattr(triton_compiler, "machine_code_of", lambda found: CODE)
    return asked


def test_a_variant_is_compiled_once_and_then_found(compiler: list[str]) -> None:
    kernel, options = ours(), {"num_warps": 4}
    for origin in (machine_code.COMPILER, machine_code.CACHE, machine_code.CACHE):
        assert machine_code.find(kernel, ARGUMENTS, options, "sm_90") == (CODE, origin)
    address = machine_code.address_of(kernel, ARGUMENTS, options, "sm_90")
    assert address is not None
    shipped = CODE._replace(name="shipped")
    stored_code.write_shipped(stored_code.COMPILED, "sm_90", {address: shipped}, "a test")
    stored_code.shipped.cache_clear()
    found = machine_code.find(kernel, ARGUMENTS, options, "sm_90")
    assert found == (shipped, machine_code.PACKAGE)
    assert len(compiler) == 1


def test_what_differs_is_compiled_for_itself(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(**changed: Any) -> None:
        asked = {
            "kernel": ours(), "arguments": ARGUMENTS, "options": {"num_warps": 4},
            "architecture": "sm_90", **changed,
        }  # fmt: skip
        machine_code.find(**asked)

    for _ in range(2):
        find()
        find(kernel=ours("other"))
        find(arguments=Arguments([torch.zeros(8)], [9]))
        find(arguments=Arguments([torch.zeros(8).half()], [8]))
        find(arguments=Arguments([torch.zeros(9)[1:]], [8]))
        find(options={"num_warps": 8})
        find(architecture="sm_100")
    assert len(compiler) == 7
    monkeypatch.setattr(stored_code, "source_digest", lambda: "of edited kernels")
    find()
    assert len(compiler) == 8


def test_ada_runs_what_was_compiled_for_ampere(compiler: list[str]) -> None:
    address = machine_code.address_of(ours(), ARGUMENTS, {}, "sm_80")
    assert address is not None
    stored_code.write_shipped(stored_code.COMPILED, "sm_80", {address: CODE}, "a test")
    for architecture in ("sm_80", "sm_86", "sm_89"):
        _, origin = machine_code.find(ours(), ARGUMENTS, {}, architecture)
        assert origin == machine_code.PACKAGE
    for architecture in ("sm_75", "sm_90", "sm_121"):
        _, origin = machine_code.find(ours(), ARGUMENTS, {}, architecture)
        assert origin == machine_code.COMPILER


def test_functions_of_others_are_never_stored(compiler: list[str]) -> None:
    """Their code may change, and nothing would tell."""
    theirs = cast(Function, of_a_test)
    for kernel, arguments in ((theirs, ARGUMENTS), (ours(), Arguments([theirs], [8]))):
        for _ in range(2):
            _, origin = machine_code.find(kernel, arguments, {}, "sm_90")
            assert origin == machine_code.COMPILER
    assert len(compiler) == 4


def test_without_triton_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "saccade.gpu.triton_compiler", raising=False)
    monkeypatch.delattr("saccade.gpu.triton_compiler", raising=False)
    with pytest.raises(RuntimeError, match=r"kernel has to be compiled for sm_90.*pip install"):
        machine_code.find(ours(), ARGUMENTS, {}, "sm_90")


def test_a_compilation_that_takes_long_is_said(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_code.find(ours("quick"), ARGUMENTS, {}, "sm_90")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(machine_code, "SAID_FROM", 0.0)
    machine_code.find(ours(), ARGUMENTS, {}, "sm_90")
    said = capsys.readouterr().err
    assert said.startswith("saccade: compiled kernel for sm_90 in ") and "kept in" in said


# ---- the library's own calls, in a process that neither interprets nor imports Triton ------------

CALLS = {
    "dense": lambda calls: (calls.KernelCall(64, mask="causal"), "hopper", "hopper_backward"),
    "window": lambda calls: (calls.KernelCall(128, mask="window", packed=True), "hopper"),
    "triton": lambda calls: (calls.KernelCall(64, "fp32", "causal"), "forward", "backward"),
    "pages": lambda calls: (calls.PagedCall(128), "paged", "write"),
    "linear": lambda calls: (calls.LinearCall(128), "hopper_linear", "hopper_linear backward"),
}


def test_calls_are_prepared_without_triton_and_known_in_every_process() -> None:
    def addresses(seed: str, order: str) -> dict[str, list[str]]:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, __file__, order], env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found = addresses("1", "1")
    assert found == addresses("2", "-1"), "they depend on the process, or on the calls before"
    for of_call in found.values():
        assert len(set(of_call)) == len(of_call) > 0


def main(order: int) -> None:
    """Print what each call's kernels are known by; fails if Triton is imported."""
    from saccade.gpu.hopper import tile_scheduler
    from saccade.kernel_check import calls
    from saccade.kernel_check.calls import tensors
    from saccade.ops.attention.triton import call_spec

    found: dict[str, dict[str, None]] = {which: {} for which in CALLS}

    def look(launch: Launch, programs: int, device: Any, tensors: Any, make: Any) -> None:
        arguments = launch.arguments(make())
        address = machine_code.address_of(launch.kernel, arguments, launch.options, "sm_90")
        assert address is not None
        found[which][address] = None

    Launch.__call__ = look  # type: ignore[method-assign]
    call_spec.architecture = lambda tensor: "sm_90"
    call_spec.multiprocessors = lambda tensor: 132
    counter = torch.zeros((), dtype=torch.int32)
    tile_scheduler.counter_of = lambda device: counter
    for which in list(CALLS)[::order]:
        call, *passes = CALLS[which](calls)
        start = call.prepared(tensors.CPU)
        for one in passes:
            start(one, None)
    assert not language.INTERPRETED and "triton" not in sys.modules, "Triton was imported"
    print(json.dumps({which: list(addresses) for which, addresses in found.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
