"""What is known of Triton's inside: all of the installed version; of others, that they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from saccade.gpu import compiler_workarounds, launcher, triton_internals
from saccade.gpu.launcher import Launch
from saccade.gpu.triton_internals import PARTS, Internal
from saccade.runtime import backends

NAMES = [part.name for part in PARTS]


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_the_installed_version_is_known(part: Internal) -> None:
    assert part.look() in part.seen
    assert triton_internals.unknown() is None and triton_internals.remark() is None


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_another_form_is_noticed(part: Internal) -> None:
    other = part._replace(look=lambda: (*part.look(), "more"))
    assert part.name in str(triton_internals.unknown_of((*PARTS, other)))


def test_what_is_gone_is_noticed() -> None:
    def gone() -> Any:
        from triton.backends.nvidia.driver import NoSuchThing  # type: ignore[attr-defined]

        return NoSuchThing

    assert "lacks" in str(triton_internals.unknown_of((Internal("NoSuchThing", gone, {}),)))


class Kernel:
    """Stands in for a kernel of Triton's: notes what its front door is given."""

    arg_names = ("rows", "SIZE")

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **more: self.given.append((grid, arguments, more))


@pytest.fixture
def differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        triton_internals, "unknown", lambda: "CudaLauncher, which Triton 9.9 brings"
    )


def test_by_an_unknown_triton_kernels_take_its_front_door(
    monkeypatch: pytest.MonkeyPatch, differs: None
) -> None:
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    none = compiler_workarounds.NONE  # else it asks a GPU
    monkeypatch.setattr(compiler_workarounds, "needed", lambda: none)
    kernel, rows = Kernel(), torch.zeros(16)
    prepared = Launch(kernel, {"SIZE": 16}, {"num_warps": 4})
    for _ in range(2):
        prepared(3, 0, [rows], lambda pointer: (pointer(rows),))
    more = {"SIZE": 16, "num_warps": 4, "enable_fp_fusion": True}
    assert kernel.given == [((3,), (rows,), more)] * 2


@pytest.mark.parametrize("operation", ["attention", "paged_attention", "linear_attention"])
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_explain_says_so(differs: None, operation: str, name: str) -> None:
    problem: Any = type("Problem", (), {"device": "cuda"})
    [backend] = [each for each in backends.candidates(operation) if each.name == name]
    assert "Triton 9.9" in str(backend.remark(problem))
    problem.device = "cpu"
    assert "Triton 9.9" not in str(backend.remark(problem))


@pytest.mark.parametrize("given", [{}, {"enable_fp_fusion": False}])
def test_no_default_decides_whether_operations_are_fused(given: dict[str, Any]) -> None:
    options = Launch(Kernel(), {}, {"num_warps": 4, **given}).options
    assert options["enable_fp_fusion"] is given.get("enable_fp_fusion", True)
