"""Candidates fit, the winner is worth it, and tables and lines say so; all times are made up."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from saccade.kernel_check import tuning
from saccade.kernel_check.calls import KernelCall, attention
from saccade.kernel_check.catalogue import Compiled, Job
from saccade.kernel_check.machine_code import Usage
from saccade.kernel_check.tuning import (
    MeasuredConfig,
    candidates,
    least_registers,
    least_shared_memory,
)
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.configs import ConfigTable, KernelProblem
from saccade.runtime.spec import KernelConfig

HOPPER = KernelProblem("sm_90", "forward", 128, wide=False)
DEFAULT = configs.default(HOPPER)
OTHER, THIRD = KernelConfig(64, 64, 4, 2), KernelConfig(128, 64, 8, 2)


@pytest.mark.parametrize("architecture", configs.ARCHITECTURES)
@pytest.mark.parametrize("which", configs.PASSES)
def test_candidates_may_fit_and_begin_with_the_default(architecture, which):
    for width, wide in ((64, False), (256, False), (128, True)):
        problem = KernelProblem(architecture, which, width, wide)
        found = candidates(problem)
        assert found[0] == configs.default(problem)
        assert len(found) == len(set(found))
        assert 3 <= len(found) <= 120
        for config in found[1:]:
            configs.check(config)
            limit = configs.SHARED_MEMORY[architecture]
            assert least_shared_memory(problem, config) <= limit


def test_estimates_follow_what_a_kernel_keeps():
    assert least_shared_memory(HOPPER, KernelConfig(128, 128, 8, 3)) == 2 * 2 * 128 * 128 * 2
    keys = HOPPER._replace(which="backward_keys")
    assert least_shared_memory(keys, KernelConfig(32, 128, 8, 3)) == 2 * 2 * 32 * 128 * 2
    assert least_registers(HOPPER, KernelConfig(128, 128, 8, 3)) == 128
    assert KernelConfig(128, 128, 4, 2) not in candidates(HOPPER)  # 256 registers for sums alone


def test_the_winner_is_the_fastest_if_it_is_worth_it():
    measured = [
        MeasuredConfig(DEFAULT, 1.0),
        MeasuredConfig(OTHER, 0.9),
        MeasuredConfig(THIRD, 2.0),
    ]
    assert tuning.winner(measured, DEFAULT) == measured[1]
    measured[1] = MeasuredConfig(OTHER, 0.99)
    assert tuning.winner(measured, DEFAULT) == measured[0]
    measured[0] = MeasuredConfig(DEFAULT, reason="too large")
    assert tuning.winner(measured, DEFAULT) == measured[1]
    assert tuning.winner([measured[0]], DEFAULT) is None


def test_a_candidate_is_judged_by_the_worst_of_its_compilations():
    def result(usage, error=""):
        job = Job("sm_90", KernelCall(128), "ordered", ("backward_keys",))
        return Compiled(job, "backward_keys", (64, 64, 4, 2), 1.0, usage, error, "")

    plain, nan_safe = result(Usage(200, 0, 1000)), result(Usage(255, 7, 500))
    assert tuning.classified(HOPPER, OTHER, [plain, nan_safe]) == MeasuredConfig(
        OTHER, math.inf, "", 255, 7, 1000
    )
    assert "shared memory" in tuning.classified(HOPPER, OTHER, [result(Usage(9, 0, 10**6))]).reason
    assert tuning.classified(HOPPER, OTHER, [plain, result(None, "Oh: no")]).reason == "Oh: no"
    assert tuning.classified(HOPPER, OTHER, []).reason == "was not compiled"


def test_the_table_is_sorted_and_marks_default_and_winner():
    task = tuning.task("sm_90", "forward", KernelCall(100))
    assert task.problem == HOPPER
    measured = [
        MeasuredConfig(DEFAULT, 1.0, "", 250),
        MeasuredConfig(OTHER, 0.5),
        MeasuredConfig(THIRD, reason="no"),
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tuning.results_table(task, measured))
    text = console.export_text()
    assert text.index("64×64 w4 s2") < text.index("64×64 w4 s3")
    for part in ("winner", "default", "0.50", "2 timed, 1 left out"):
        assert part in text


def test_the_line_to_commit_changes_one_column():
    queries = HOPPER._replace(which="backward_queries")
    line = tuning.line_to_commit(queries, OTHER)
    name, row = configs.row_of(queries)
    assert line.startswith(f'"{name}": _row(')
    assert "(64, 64, 4, 2)" in line
    assert str(tuple(row[1].numbers())) in line
    assert str(tuple(row[2].numbers())) not in line


def test_times_and_failures_find_their_candidates():
    entry = MeasuredConfig(OTHER)
    assert tuning.with_time(entry, {str(OTHER.numbers()): 2.0}, {}).milliseconds == 2.0
    assert tuning.with_time(entry, {}, {str(OTHER.numbers()): "out"}).reason == "out"
    assert tuning.with_time(entry._replace(reason="large"), {}, {}).reason == "large"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "--dtype: got 'int8', takes bf16, fp16, fp32"),
        ({"mask_names": ["casual"]}, "--mask: got 'casual', takes none, causal"),
        ({"head_dims": [600]}, "--head-dim: got 600, takes 1 to 512"),
        ({"kv_heads": 3}, "--kv-heads: got 3, takes a divisor of 8"),
    ],
)
def test_options_that_describe_no_call_are_refused(changes, message):
    options = {
        "head_dims": [64], "length": 128, "dtype": "bf16", "mask_names": ["none"], "batch": 1,
        "heads": 8, "kv_heads": None,
    }  # fmt: skip
    assert tuning.calls_of(**options) == [KernelCall(64, batch=1, heads=8, kv_heads=8, length=128)]
    with pytest.raises(ValueError, match=message):
        tuning.calls_of(**{**options, **changes})


def test_winners_are_saved(tmp_path, monkeypatch):
    file = tmp_path / "configs.json"
    monkeypatch.setenv("SACCADE_CONFIGS", str(file))
    console = Console(width=200, record=True, file=io.StringIO())
    tuning.save_winners(ConfigTable("sm_90", "H200", "3.6.0", {HOPPER: OTHER}), console)
    assert configs.tuned() == {HOPPER: OTHER}
    assert str(file) in console.export_text()
    assert json.loads(file.read_text())["tables"][0]["device"] == "H200"
    configs.tuned.cache_clear()
    monkeypatch.setenv("SACCADE_CONFIGS", "")
    with pytest.raises(ValueError, match="--save"):
        tuning.save_winners(ConfigTable("sm_90", "H200", "3.6.0", {}), console)


class MadeUpEvent:
    """An event of a device that takes a millisecond between any two."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, end):
        return 1.0


@pytest.mark.parametrize("which", ["forward", "backward_keys", "backward_queries"])
def test_only_the_kernel_itself_is_timed(monkeypatch, which):
    from saccade.gpu import language, launcher

    if not language.INTERPRETED:
        pytest.skip("kernels run on the CPU under the interpreter only")
    # Here they do run, and numpy warns of what lies in memory that nobody has written.
    monkeypatch.setattr(
        attention, "untouched", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype)
    )
    monkeypatch.setattr(torch.cuda, "Event", MadeUpEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    call = KernelCall(16, "fp32", "causal", batch=1, heads=1, kv_heads=1, length=16)
    task = tuning.task("sm_75", which, call)
    watch = tuning.KernelClock(which)
    running = tuning.runnables(task, [KernelConfig(16, 16, 1, 1)], torch.device("cpu"))
    before = launcher.Launch.__call__
    with watch.listening():
        seconds = watch.seconds(running["[16, 16, 1, 1]"].run, 2)
    assert launcher.Launch.__call__ is before
    starts = 2 if which == "backward_keys" else 1  # NaN-safe, too
    assert len(watch.events) == starts
    assert seconds == pytest.approx(starts * 1e-3 / 2)


def test_a_launch_that_was_prepared_is_timed_too(monkeypatch):
    from saccade.gpu.launcher import Launch

    monkeypatch.setattr(torch.cuda, "Event", MadeUpEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Launch, "relaunch", lambda *call: True)  # as on a GPU from the second on
    task = tuning.task("sm_75", "forward", KernelCall(16, "fp32", length=16))
    clock = tuning.KernelClock("forward")
    (run,) = tuning.runnables(task, [KernelConfig(16, 16, 1, 1)], torch.device("cpu")).values()
    with clock.listening():
        assert clock.seconds(run.run, 2) == pytest.approx(1e-3 / 2)
