"""Results survive the way to a file and back; tables and plots are made from them."""

import io
import json
import time

import pytest
import torch
from rich.console import Console

from saccade.bench.cases import CASES
from saccade.bench.display import Bar, curves_of, footnotes, plot, results_table
from saccade.bench.results import Absence, Result, append, case_fields, latest, read, record
from saccade.bench.timing import Timing

DESIGNED = {
    "date", "commit", "device", "versions", "case", "pass", "who", "median_ms", "min_ms",
    "max_ms", "rounds", "run", "threads",
}  # fmt: skip


def result(case="cpu-full-fp32-d64-1k", who="sdpa", milliseconds=2.0, **changes):
    fields = {
        "date": "2026-01-02T03:04:05Z", "commit": "abc", "device": "a CPU", "threads": 2,
        "versions": {"torch": "2.13.0"}, "case": case_fields(CASES[case]),
        "which_pass": "forward", "who": who, "median_ms": milliseconds,
        "min_ms": milliseconds - 0.5, "max_ms": milliseconds + 0.5, "rounds": 9,
        "run": f"{case} forward", "tflops": 0.1,
    }  # fmt: skip
    return Result(**{**fields, **changes})


def shown(table):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_lines_round_trip_with_all_fields(tmp_path):
    path = tmp_path / "folder" / "results.jsonl"
    first = result(peak_mb=12.5, error=3e-7)
    second = result(who="saccade/cpu", tflops=None, gbps=3.0, commit=None)
    append(path, [first])
    append(path, [second])
    assert read(path) == [first, second]
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert set(lines[0]) == DESIGNED | {"tflops", "peak_mb", "error"}
    assert set(lines[1]) == DESIGNED | {"gbps"}
    assert set(lines[0]["case"]) == {
        "name", "batch", "query_heads", "kv_heads", "query_len", "kv_len",
        "head_dim", "value_dim", "dtype", "mask",
    }  # fmt: skip


def test_each_pass_has_its_own_error():
    case, timing = CASES["tiny-full-fp32-d16-48"], {"sdpa": Timing.of([0.001])}
    for which_pass, error in (("forward", 1e-7), ("decode", 1e-7), ("backward", 3e-7)):
        errors = {"sdpa": {"forward": 1e-7, "backward": 3e-7}, "flex": {"forward": 2e-7}}
        (found,) = record(case, which_pass, timing, torch.device("cpu"), errors=errors)
        assert found.error == error


def test_files_without_errors_still_read():
    line = json.loads(result(error=1e-7).line())
    del line["error"]
    assert Result.parse(json.dumps(line)).error is None


@pytest.mark.parametrize("line", ["{", "[]", '{"who": "sdpa"}', '{"pass": "forward", "x": 1}'])
def test_a_line_that_is_no_result_is_named(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(result().line() + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"results.jsonl:2: not a result"):
        read(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("median_ms", float("nan")),
        ("min_ms", float("inf")),
        ("max_ms", "1.0"),
        ("tflops", 10**400),
        ("who", None),
        ("rounds", True),
        ("case", {}),
        ("versions", []),
    ],
)
def test_a_field_of_another_kind_is_named(tmp_path, name, value):
    path = tmp_path / "results.jsonl"
    plain = {**json.loads(result().line()), name: value}
    path.write_text(f"{result().line()}\n{json.dumps(plain)}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"results.jsonl:2: not a result: .*({name}|finite)"):
        read(path)


def test_no_file_ends_in_anything_but_a_named_error(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ValueError, match=r"results.jsonl:1: not a result"):
        read(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"results.jsonl: not a result file"):
        read(path)
    path.write_text("")
    assert read(path) == []


def test_names_hold_any_character(tmp_path):
    path = tmp_path / "results.jsonl"
    given = [result(who="a\u2028b\x85c\u2029d"), result()]
    append(path, given)
    assert read(path) == given


def test_a_number_that_is_none_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="error: got nan, takes a finite number"):
        append(tmp_path / "results.jsonl", [result(error=float("nan"))])


def test_only_the_last_run_of_a_case_counts():
    old = [result(run="1", milliseconds=1.0), result(run="1", who="plain")]
    new = [result(run="2", milliseconds=2.0), result(run="2", who="saccade/cpu")]
    (members,) = latest([*old, *new]).values()
    assert {who: member.run for who, member in members.items()} == {"sdpa": "2", "saccade/cpu": "2"}


def test_rates_are_given_where_they_mean_something():
    case, timing = CASES["tiny-full-fp32-d16-48"], {"sdpa": Timing.of([0.001])}
    (forward,) = record(case, "forward", timing, torch.device("cpu"), {"sdpa": 3.0})
    assert forward.tflops == pytest.approx(case.flops("forward") / 1e9)
    assert (forward.gbps, forward.peak_mb) == (None, 3.0)
    (decode,) = record(case, "decode", timing, torch.device("cpu"))
    assert decode.gbps == pytest.approx(case.bytes / 1e6)
    assert decode.tflops is None
    (other,) = record(case, "decode", timing, torch.device("cpu"), moves={"sdpa": 10**9})
    assert other.gbps == pytest.approx(1e3)
    (host,) = record(case, "host forward+backward", timing, torch.device("cpu"))
    assert (host.tflops, host.gbps) == (None, None)


def test_the_table_shows_times_ratios_and_gaps():
    text = shown(
        results_table(
            [
                result(),
                result(who="saccade/cpu", milliseconds=1.0, peak_mb=7.0),
                result("cpu-causal-fp32-d64-1k", who="saccade/cpu", milliseconds=123.4),
            ]
        )
    )
    assert "×0.50" in text
    assert "7 MB" in text
    assert "123" in text
    assert "–" in text


def test_the_table_shows_short_times_in_microseconds():
    text = shown(results_table([result(milliseconds=0.0123)], "µs"))
    assert "12.3" in text
    assert "median µs" in text


def test_footnotes_gather_cases_of_one_reason():
    lines = footnotes([Absence("a", "flex", "why [not]"), Absence("b", "flex", "why [not]")])
    assert lines == [r"[bold]flex[/bold]: why \[not] [dim](a and 1 more)[/dim]"]


def test_a_plot_is_drawn(tmp_path):
    path = tmp_path / "image.png"
    found = [
        result(f"cpu-full-fp32-d64-{length}", who, run=length)
        for length in ("1k", "2k")
        for who in ("sdpa", "saccade/cpu")
    ]
    singles = [result("cpu-window256-fp32-d64-4k", who) for who in ("sdpa", "saccade/cpu")]
    plot(found + singles, path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="no results"):
        plot([], path)


def test_a_curve_joins_cases_that_differ_in_length_only():
    names = ("cpu-linear-fp32-d64-4k", *(f"cpu-linear-length-fp32-d64-{n}k" for n in (1, 4)))
    (series,) = curves_of([result(name, "bmm") for name in names]).values()
    assert [length for length, _ in series["bmm"]] == [1024, 4096]


def test_the_time_left_follows_from_what_is_done():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with Bar(console, ["short", "long"], [1.0, 3.0]) as progress:
        progress.now("short: forward")
        for _ in range(2):
            progress.done(0.25)
            time.sleep(0.01)
        progress.case_done()  # whatever of it was skipped is over as well
        (task,) = progress.bar.tasks
        assert task.percentage == 25
        assert task.time_remaining is not None and task.time_remaining > 0
        progress.bar.refresh()
    shown = file.getvalue()
    assert "short: forward" in shown
    assert "case 2 of 2" in shown
    assert "left" in shown
