"""What a report of a fault names: GPUs, drivers, and where kernels come from."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from saccade.gpu import driver, environment, machine_code, stored_code
from saccade.gpu.stored_code import MachineCode

CODE = MachineCode("attention_forward", b"code" * 99, 8, 0, False, ())


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A package and a cache of this test's own."""
    monkeypatch.setattr(stored_code, "COMPILED", tmp_path / "compiled")
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_code, "told_triton", lambda: "")
    stored_code.cache.cache_clear()
    stored_code.shipped.cache_clear()
    yield tmp_path
    stored_code.cache.cache_clear()
    stored_code.shipped.cache_clear()


def named(name: str) -> list[str]:
    return [found for known, found in environment.environment() if known == name]


def test_gpus_have_name_capability_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(machine_code, "architecture_of", lambda index: "sm_90")
    assert named("gpu 1") == ["NVIDIA H200, capability 9.0 (sm_90), 139 GiB"]


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "library", missing)
    assert named("gpu")[0].startswith("none that torch sees")
    assert named("driver") == ["none of CUDA's"]


def test_the_driver_has_its_release_and_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(found: ctypes._Pointer[ctypes.c_int]) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 12080
        return 0

    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuDriverGetVersion=version))
    said = subprocess.CompletedProcess([], 0, "570.86.15\n570.86.15\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: said)
    assert named("driver") == ["570.86.15, for CUDA 12.8 and older"]


def test_machine_code_of_the_package_is_counted(elsewhere: Path) -> None:
    assert named("machine code, package") == ["none comes with this installation"]
    stored_code.write_shipped(elsewhere / "compiled", "sm_90", {"a": CODE, "b": CODE}, "Triton 3.6")
    assert named("machine code, package") == ["sm_90: 2 variants, by Triton 3.6"]


def test_machine_code_of_other_sources_is_said_not_to_be_used(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_code.write_shipped(elsewhere / "compiled", "sm_90", {"a": CODE}, "Triton 3.6")
    monkeypatch.setattr(stored_code, "source_digest", lambda: "another")
    [found] = named("machine code, package")
    assert found.startswith("sm_90: not used: ") and "other sources" in found


def test_the_cache_is_counted_and_may_be_passed_by(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_code.keep("a", CODE)
    [found] = named("machine code, cache")
    assert found.startswith(str(elsewhere / "cache")) and "1 files" in found
    monkeypatch.setattr(stored_code, "told_triton", lambda: "TRITON_DEBUG")
    assert "as TRITON_DEBUG is set" in named("machine code, cache")[0]
    monkeypatch.setenv("SACCADE_CACHE", "")
    stored_code.cache.cache_clear()
    assert named("machine code, cache")[0].startswith("off")


def test_a_folder_in_the_home_does_not_name_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/somebody"))
    monkeypatch.setenv("SACCADE_CACHE", "/home/somebody/.cache/saccade")
    stored_code.cache.cache_clear()
    assert named("machine code, cache")[0].startswith(os.path.join("~", ".cache", "saccade"))


def test_settings_are_shown_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_API_KEY", "very secret")
    monkeypatch.setenv("TRITON_DEBUG", "1")
    assert named("SACCADE_API_KEY") == ["(set)"] and named("TRITON_DEBUG") == ["1"]
