"""The tools of training end where they end with sdpa, each in fresh processes.

Losses and weights are compared with those of the same training in float64: with saccade they may
lie twice as far from them as with sdpa. `make test-training` installs the tools and runs all.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOOLS = ("accelerate", "lightning", "peft", "trl")
ALONE = (
    "trainer.plain", "trainer.left", "trainer.checkpointing", "trainer.accumulation",
    "trainer.padding_free", "trainer.padding_free_offsets", "trainer.mixed", "trainer.compiled",
    "trainer.classifier",
    "trl.sft", "trl.wrapped", "trl.best_fit", "trl.best_fit_split", "trl.padding_free",
    "trl.completions", "trl.dpo", "trl.grpo",
    "peft.lora", "peft.dora", "peft.ia3", "peft.prefix", "peft.prompt", "peft.sft_lora",
    "lightning.plain", "lightning.mixed", "lightning.ddp",
    "accelerate.loop",
)  # fmt: skip
BY_TWO = (
    "trainer.plain", "trl.best_fit", "distributed.ddp", "distributed.fsdp2",
    "distributed.fsdp2_mixed",
)  # fmt: skip
IN_BFLOAT16 = ("trl.", "peft.sft", "trainer.mixed", "lightning.mixed", "distributed.fsdp2_mixed")
NEEDS_TORCH_ALONE = "distributed.fsdp2"  # so make test-slow runs it
MINUTES = 5  # for one training; the longest takes one where others fill the machine

sys.path.insert(0, str(HERE))
from trained import distance  # noqa: E402


def run(case: str, attends: str, folder: Path, processes: int = 1) -> dict[str, Any]:
    """What a training of its own processes kept."""
    file = folder / f"{attends}.pt"
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [
        sys.executable, *(several if processes > 1 else []), str(HERE / "run_case.py"), case,
        attends, str(file),
    ]  # fmt: skip
    started(command, folder)
    return torch.load(file)


def started(command: list[str], folder: Path) -> None:
    """Run a program to its end, beside this checkout's saccade and no interpreter of kernels."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1",
           "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    programs.run(command, 60 * MINUTES, inherited | own, folder)


def compare(case: str, folder: Path, processes: int = 1, attends: str = "saccade") -> None:
    """Train three times, and let the comparison say where it ends too far away."""
    if case != NEEDS_TORCH_ALONE:
        require()
    exact, sdpa, ours = (run(case, name, folder, processes) for name in ("exact", "sdpa", attends))
    assert (ours["calls"] > 0) == (attends == "saccade")
    judge(exact, sdpa, ours, case.startswith(IN_BFLOAT16))


def judge(
    exact: dict[str, Any], sdpa: dict[str, Any], ours: dict[str, Any], in_bfloat16: bool
) -> None:
    """Raise AssertionError unless ours is about as far from exact as sdpa is."""
    rounding = torch.finfo(torch.float32).eps
    moved = distance(exact["before"], exact["after"])
    size = distance({name: 0 * rows for name, rows in exact["after"].items()}, exact["after"])
    assert moved > 100 * rounding * size
    assert len(ours["losses"]) == len(sdpa["losses"]) == len(exact["losses"]) > 2
    errors = [distance(trained["after"], exact["after"]) for trained in (ours, sdpa)]
    assert errors[0] <= 2 * errors[1] + rounding * size, [error / moved for error in errors]
    pairs = [zip(trained["losses"], exact["losses"], strict=True) for trained in (ours, sdpa)]
    errors = [max(abs(got - wanted) for got, wanted in each) for each in pairs]
    # A loss ends in one rounding of the numbers it is made of: sums of float32, or logits near 1.
    last = 2**-9 if in_bfloat16 else 8 * rounding * max(map(abs, exact["losses"]))
    assert errors[0] <= 2 * errors[1] + last, errors


def require() -> None:
    """Skip where the tools are not installed; `test_tools_are_those_that_are_pinned` then fails."""
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make test-training installs them")


@pytest.mark.training
def test_tools_are_those_that_are_pinned():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in TOOLS:
        pinned = re.search(rf'"{name}==([\d.]+)"', text)
        assert pinned and importlib.metadata.version(name) == pinned[1], name


@pytest.mark.training
@pytest.mark.parametrize("case", ALONE)
def test_one_process(case, tmp_path):
    compare(case, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=pytest.mark.slow if case == NEEDS_TORCH_ALONE else pytest.mark.training
        )
        for case in BY_TWO
    ],
)
def test_two_processes(case, tmp_path):
    compare(case, tmp_path, processes=2)


@pytest.mark.training
@pytest.mark.parametrize("case", ["trainer.left", "trl.best_fit"])
def test_notices_an_attention_that_asks_no_mask(case, tmp_path):
    require()
    with pytest.raises(AssertionError):
        compare(case, tmp_path, attends="careless")


@pytest.mark.training
def test_the_page_is_one_program_that_runs(tmp_path):
    require()
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("\n```python") >= 7
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    started([sys.executable, str(program)], tmp_path)
