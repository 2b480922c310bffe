"""Targets are judged on all that belongs to them, in runs that may be compared."""

import dataclasses
import io

import pytest
from rich.console import Console

from saccade.bench.cases import CASES
from saccade.bench.command import show_targets
from saccade.bench.display import targets_table
from saccade.bench.peers.pytorch import COPY_BYTES
from saccade.bench.results import Result, append, case_fields
from saccade.bench.targets import (
    CPU_TARGETS,
    FASTEST,
    GOOD_RATE,
    GPU_TARGETS,
    TARGETS,
    AgainstPeer,
    Copying,
    History,
    Memory,
    Published,
    Reading,
    SameAmount,
    Sum,
    Time,
    Unmeasured,
    compare_with_targets,
    still_missing,
)

FULL_1K, PACKED = "gpu-full-bf16-d128-1k", "gpu-packed-bf16-d128-16x1024"


def result(case, who, milliseconds, which_pass="forward", **changes):
    fields = {
        "date": "2026-01-02T03:04:05Z", "commit": "abc", "device": "a device", "threads": 2,
        "versions": {}, "case": case_fields(CASES[case]), "which_pass": which_pass, "who": who,
        "median_ms": milliseconds, "min_ms": milliseconds, "max_ms": milliseconds, "rounds": 9,
        "run": f"{case} {which_pass}", "peak_mb": 90.0,
    }  # fmt: skip
    return Result(**{**fields, **changes})


def time_of(case):
    """A time that grows with what a case is made of."""
    problem = CASES[case]
    recurrent = problem.attention in ("linear", "delta")
    if problem.attention == "paged" or (recurrent and problem.decodes):
        return problem.bytes / 5e9  # 5 TB/s, in ms
    return problem.query_len if recurrent else problem.tiles((128, 64)) / 1000


def peers_of(yardstick):
    """Whose times it compares with."""
    if isinstance(yardstick, AgainstPeer):
        return [yardstick.who]
    kinds = {Published: ["copy"], Reading: ["read"], Copying: ["copy"]}
    return kinds.get(type(yardstick), [])


def complete(targets=TARGETS):
    """Results in which every target is reached: ours are as `time_of` says, others' are longer."""
    found = {}
    for target in targets:
        subject = "saccade/cpu" if target.subject == FASTEST else target.subject
        for case, which_pass in target.expected():
            known = found.get((subject, case, which_pass))
            times = {subject: known.median_ms if known else time_of(case)}
            if isinstance(target.yardstick, Time):
                times[subject] = min(times[subject], target.limit / 2)
            for who in peers_of(target.yardstick):
                if known := found.get((who, case, which_pass)):  # the subject of another target
                    times[subject] = min(times[subject], known.median_ms / 5)
                else:
                    times[who] = 0.5 if who == "copy" else times[subject] * 5
            others = ()
            if isinstance(target.yardstick, Sum):
                others = target.yardstick.others[case]
            if isinstance(target.yardstick, SameAmount):
                others = (target.yardstick.other,)
            for other in others:
                times[subject, other] = time_of(other)
            for key, milliseconds in times.items():
                who, where = key if isinstance(key, tuple) else (key, case)
                found[who, where, which_pass] = result(where, who, milliseconds, which_pass)
    return found


def answers(found):
    return [verdict.answer for verdict in compare_with_targets(list(found))]


def shown(verdicts):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(targets_table(verdicts))
    for line in still_missing(verdicts):
        console.print("missing", line)
    return console.export_text()


@pytest.mark.parametrize("targets", [CPU_TARGETS, GPU_TARGETS, TARGETS], ids=["cpu", "gpu", "all"])
def test_targets_are_reached_only_if_all_of_them_is_measured(targets):
    everything = list(complete(targets).values())
    assert answers(everything) == ["yes"] * len(targets)
    assert set(answers(everything[2:])) == {"yes", "not measured"}


def test_without_results_all_targets_are_open():
    assert answers([]) == ["not measured"] * len(TARGETS)
    tiny = result("tiny-full-fp32-d16-48", "sdpa", 1.0)
    assert answers([tiny]) == ["not measured"] * len(TARGETS)


def test_every_target_names_cases_of_one_machine():
    for target in TARGETS:
        assert target.expected()
        assert {case.split("-")[0] for case, _ in target.expected()} == {target.machine}
    lengths = {case.rsplit("-")[-1] for case, _ in GPU_TARGETS[0].expected()}
    assert lengths == {"1k", "2k", "4k", "8k", "16k", "1.5k", "3k", "6k", "15k"}


def test_a_missed_target_names_the_case():
    found = complete(CPU_TARGETS)
    place = ("saccade/cpu", "cpu-full-fp32-d64-1k", "forward")
    sdpa = found["sdpa", place[1], place[2]].median_ms
    found[place] = dataclasses.replace(found[place], median_ms=sdpa * 1.06)
    verdict = compare_with_targets(list(found.values()))[0]
    assert verdict.answer == "no"
    assert verdict.misses == [(pytest.approx(1.06), place[1], place[2])]
    text = shown([verdict])
    assert place[1] in text
    assert "1.06" in text


def test_the_gpu_s_subjects_are_named_and_no_other_counts():
    found = complete(GPU_TARGETS)
    faster = [dataclasses.replace(item, who="saccade/other") for item in found.values()]
    subjects = {target.subject for target in GPU_TARGETS}
    others = [item for item in found.values() if item.who not in subjects]
    assert set(answers([*faster, *others])) == {"not measured"}


def test_a_mean_may_hide_a_slow_case_and_not_a_missing_one():
    (target,) = (one for one in GPU_TARGETS if one.mean and "D256" in one.what)
    found = complete([target])
    slow = ("sdpa/cudnn", "gpu-full-bf16-d256-1k", "forward")
    found[slow] = dataclasses.replace(found[slow], median_ms=found[slow].median_ms / 10)
    (verdict,) = [one for one in compare_with_targets(list(found.values())) if one.target == target]
    assert verdict.answer == "yes"
    assert verdict.measured[0][0] == pytest.approx(0.2 * 10 ** (1 / len(target.expected())))
    del found[slow]
    (verdict,) = [one for one in compare_with_targets(list(found.values())) if one.target == target]
    assert verdict.answer == "not measured"


def test_published_times_are_scaled_by_the_rate_of_a_copy():
    case, who = "gpu-pages-h32x8-bf16-d128-1x8k", "saccade/scattered-64"
    copy = COPY_BYTES / 4e9 * 2  # ms, at 2000 GB/s
    history = History([result(case, who, 0.05, "decode"), result(case, "copy", copy, "decode")])
    value = Published({case: 20.0}, 4000.0).value(history, who, case, "decode")
    assert value == pytest.approx(50 / 40)


def test_a_copy_of_a_step_s_states_is_one_of_as_many_bytes():
    case, who = "gpu-linear-step-bf16-d128-64x16", "saccade/triton"
    copy = COPY_BYTES / 4e9  # ms, at 4000 GB/s
    ours = CASES[case].bytes / 3.2e9  # at 3200
    history = History([result(case, who, ours, "decode"), result(case, "copy", copy, "decode")])
    assert Copying().value(history, who, case, "decode") == pytest.approx(1 / 0.8)


def test_a_read_is_the_bound_unless_it_is_slow_itself():
    case, who = "gpu-pages-h32x8-bf16-d128-16x8k", "saccade/scattered-64"
    good = CASES[case].bytes / GOOD_RATE / 1e6
    for read, value in ((good * 2, 1.0), (good / 2, 2.0)):
        history = History(
            [result(case, who, good * 2, "decode"), result(case, "read", read, "decode")]
        )
        assert Reading().value(history, who, case, "decode") == pytest.approx(value)


def test_a_folder_of_results_is_judged_as_one(tmp_path, capsys):
    found = list(complete(CPU_TARGETS).values())
    append(tmp_path / "one.jsonl", found[::2])
    append(tmp_path / "two.jsonl", found[1::2])
    show_targets(tmp_path)
    assert "not measured" not in capsys.readouterr().out


def test_what_is_missing_is_said():
    found = complete(GPU_TARGETS)
    del found["sdpa/flash", "gpu-full-bf16-d128-1k", "forward"]
    del found["saccade/triton", "gpu-packed-causal-bf16-d128-64x128", "backward"]
    text = shown(compare_with_targets(list(found.values())))
    assert "missing without sdpa/flash: forward of gpu-full-bf16-d128-1k" in text
    assert "gpu-packed-causal-bf16-d128-64x128: not measured: backward of gpu-packed" in text
    nothing = shown(compare_with_targets([result(FULL_1K, "flex", 1.0)]))
    assert "missing not measured: forward of" in nothing
    assert "gpu-causal-bf16-d128-{1k,2k,4k,8k,16k}" in nothing


def test_ratios_across_runs_do_not_count():
    found = complete(CPU_TARGETS).values()
    apart = [dataclasses.replace(item, run=item.run + item.who) for item in found]
    verdict = compare_with_targets(apart)[0]
    assert verdict.answer == "not measured"
    assert "never took turns" in verdict.missing[0][2]


def test_the_last_run_in_which_both_took_part_counts():
    ours = [result(FULL_1K, "saccade/triton", ms, run=run) for ms, run in ((4, "1"), (9, "2"))]
    theirs = [result(FULL_1K, "flex", 2.0, run="1"), result(FULL_1K, "sdpa", 3.0, run="2")]
    history = History([ours[0], theirs[0], ours[1], theirs[1]])

    def ratio(who):
        return AgainstPeer(who).value(history, "saccade/triton", FULL_1K, "forward")

    assert ratio("flex") == 2.0
    assert ratio("sdpa") == 3.0
    with pytest.raises(Unmeasured, match="without sdpa/flash"):
        ratio("sdpa/flash")


def test_the_fastest_of_ours_is_judged_and_never_the_reference():
    times = {"saccade/a": 3.0, "saccade/b": 2.0, "saccade/reference": 1.0, "sdpa": 4.0}
    history = History([result(FULL_1K, who, ms) for who, ms in times.items()])
    assert AgainstPeer("sdpa").value(history, "saccade", FULL_1K, "forward") == 0.5


def test_a_mix_is_judged_by_the_sum_of_its_parts():
    found = [
        result(PACKED, "saccade/triton", 6.0),
        result(FULL_1K, "saccade/triton", 3.0),
        result("gpu-full-bf16-d128-2k", "saccade/triton", 1.0),
    ]
    parts = Sum({PACKED: (FULL_1K, "gpu-full-bf16-d128-2k")})
    assert parts.value(History(found), "saccade", PACKED, "forward") == 1.5
    elsewhere = [*found[:2], dataclasses.replace(found[2], device="another")]
    with pytest.raises(Unmeasured, match="2k: measured on another device"):
        parts.value(History(elsewhere), "saccade", PACKED, "forward")


def test_a_tile_s_time_is_judged():
    full, window = "gpu-full-bf16-d128-16k", "gpu-window256-bf16-d128-16k"
    tiles = {name: CASES[name].tiles((128, 64)) for name in (full, window)}
    assert tiles[full] == 16 * 128 * 256
    found = [
        result(full, "saccade/triton", tiles[full] * 2.0),
        result(window, "saccade/triton", tiles[window] * 3.0),
    ]
    value = SameAmount("tiles", full).value(History(found), "saccade/triton", window, "forward")
    assert value == pytest.approx(1.5)


def test_memory_that_was_not_measured_is_missing():
    found = complete(CPU_TARGETS)
    bare = [dataclasses.replace(item, peak_mb=None) for item in found.values()]
    (verdict,) = [
        found for found in compare_with_targets(bare) if isinstance(found.target.yardstick, Memory)
    ]
    assert verdict.missing[0][2] == "memory not measured"
    assert "200 MB" in shown([verdict])
