"""The report is one page, complete in itself."""

import json
import re
import zipfile
from pathlib import Path

import pytest
import typer
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

from saccade.bench import report
from saccade.bench.cases import CASES
from saccade.bench.command import bench
from saccade.bench.report import collect, compiled, limits, sections
from saccade.bench.report.write import SCRIPTS
from saccade.bench.results import Result, append, case_fields, read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PEERS = {"saccade/portable": 1.0, "saccade/hopper": 0.8, "sdpa/flash": 2.0, "flex": 1.5}
GPU = {"torch": "2.13.0", "cuda": "13.0"}

app = typer.Typer()
app.command()(bench)


def result(case, who, milliseconds=1.0, which_pass="forward", **changes):
    fields = {
        "date": "2026-01-02T03:04:05Z", "commit": "abc", "device": "NVIDIA H200", "threads": 16,
        "versions": GPU, "case": case_fields(CASES[case]), "which_pass": which_pass, "who": who,
        "median_ms": milliseconds, "min_ms": milliseconds / 2, "max_ms": milliseconds * 2,
        "rounds": 9, "run": f"{case} {which_pass}", "tflops": 400 / milliseconds,
    }  # fmt: skip
    return Result(**{**fields, **changes})


def gpu_results():
    return [
        result(
            f"gpu-{mask}-bf16-d{dim}-{length}", who, times, which_pass,
            error=times * 1e-3 if which_pass == "forward" else None,
        )
        for mask in ("full", "causal")
        for dim in (64, 128)
        for length in (("1.5k", "3k", "6k") if dim == 64 else ("1k", "2k", "4k"))
        for which_pass in ("forward", "backward")
        for who, times in PEERS.items()
    ]  # fmt: skip


def cpu_results():
    changes = {"device": "an unknown CPU", "threads": 2, "versions": {"torch": "2.13.0"}}
    decode = {"tflops": None, "gbps": 12.0, **changes}
    return [
        result("cpu-decode-fp32-d128-16k", "saccade/cpu", 5.0, "decode", error=3e-7, **decode),
        result("cpu-decode-fp32-d128-16k", "sdpa", 9.0, "decode", **decode),
        result("cpu-memory-fp32-d64-32k", "saccade/cpu", 9.0, peak_mb=35.5, **changes),
        result("cpu-full-fp32-d64-1k", "sdpa", 0.02, "host", tflops=None, **changes),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("results")
    append(made / "gpu" / "dense.jsonl", gpu_results())
    append(made / "cpu.jsonl", cpu_results())
    return made


@pytest.fixture(scope="module")
def page(folder):
    report.write(report.gather(folder), folder / "page.html")
    return folder / "page.html"


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"])


def data_of(page):
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_every_result_and_asks_for_nothing(page):
    text = page.read_text(encoding="utf-8")
    assert len(data_of(page)["points"]) == len(gpu_results()) + 3  # "host" has no rate
    for words in ("an unknown CPU, 2 threads", "NVIDIA H200", "cpu-memory-fp32-d64-32k", "35.5"):
        assert words in text
    assert "torch 2.13.0, cuda 13.0" in text
    assert "No limit is known for an unknown CPU" in text
    assert "dense: forward at most 1/1.25 of SDPA&#x27;s flash" in text
    assert "default-src 'none'" in text
    sources = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)|@import', text)
    assert all(one.startswith(("#", "data:")) for pair in sources for one in pair if one)
    assert len(text.encode()) < 250_000


def test_all_committed_results_make_a_page_below_2_mb(tmp_path):
    size = report.write(report.gather(RESULTS), tmp_path / "deep" / "page.html")
    assert size == (tmp_path / "deep" / "page.html").stat().st_size < 2_000_000


def test_shares_are_of_the_limit_of_the_result_s_dtype():
    h200 = limits.limit_of("NVIDIA H200")
    assert h200 is not None
    assert limits.limit_of("an abacus") is None
    (point, *_) = collect.points([report.Source("", gpu_results())])
    assert point.share == pytest.approx(400 / 989.5)
    reads = result("gpu-decode-bf16-d128-16k", "saccade/portable", tflops=None, gbps=2400.0)
    (point,) = collect.points([report.Source("", [reads])])
    assert point.share == pytest.approx(0.5)
    assert h200.most(result("tiny-full-fp32-d16-48", "sdpa")) == 67.0


def test_who_missed_the_last_run_is_compared_with_its_own():
    case = "gpu-full-bf16-d128-1k"
    old = [result(case, who, ms, run="1") for who, ms in (("saccade/portable", 1.0), ("flex", 4.0))]
    source = report.Source("", [*old, result(case, "saccade/portable", 2.0, run="2")])
    points = {point.result.who: point for point in collect.points([source])}
    assert points["saccade/portable"].result.median_ms == 2.0
    assert points["flex"].against_fastest == 4.0
    ((_, who, _, ratio, *_),) = sections.beside_peers([source]).rows
    assert (who.text, ratio.number) == ("flex", 0.25)


def test_errors_stand_beside_the_least_of_their_run():
    case = "gpu-full-bf16-d128-1k"
    found = [
        result(case, "saccade/portable", error=3e-3), result(case, "flex", error=2e-3),
        result(case, "sdpa"),
    ]  # fmt: skip
    rows = sections.errors(collect.points([report.Source("", found)])).rows
    assert [(row[3].text, row[4].text, row[5].number) for row in rows] == [
        ("saccade/portable", "3.0e-03", pytest.approx(1.5)), ("flex", "2.0e-03", 1.0),
    ]  # fmt: skip


def test_names_from_files_are_no_markup(tmp_path):
    odd = "</script><img src=x onerror=alert(1)>"
    report.write([report.Source(odd, [result("gpu-full-bf16-d64-512", odd)])], tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<img" not in text
    assert data_of(tmp_path / "p.html")["points"][0]["who"] == odd


def test_kernels_come_from_a_checkout_or_are_said_to_be_absent(tmp_path):
    assert ">sm_90</button>" in compiled.section()
    assert "255 / 48 !</td>" in compiled.section()
    assert "`" not in compiled.section(tmp_path / "none.md")
    assert "<code>saccade kernels</code>" in compiled.section(tmp_path / "none.md")


def test_a_folder_is_read_onto_a_page(folder, tmp_path):
    page = tmp_path / "page.html"
    done = run("--read", folder, "--report", page)
    assert done.exit_code == 0, done.output
    assert f"{len(gpu_results()) + len(cpu_results())} results" in done.output
    assert data_of(page)["sources"] == ["cpu.jsonl", "gpu/dense.jsonl"]


def test_a_fresh_run_joins_what_is_read(folder, tmp_path):
    page, file = tmp_path / "page.html", tmp_path / "new.jsonl"
    done = run(
        "-c", "tiny-causal-fp32-*", "-w", "saccade/cpu,sdpa", "--pass", "forward", "--quick",
        "--read", folder, "--report", page, "--json", file,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert [item.who for item in read(file)] == ["saccade/cpu", "sdpa"]
    data = data_of(page)
    assert data["sources"][-1] == "this run"
    fresh = [point for point in data["points"] if point["source"] == 2]
    assert {point["who"]: 0 < point["error"] < 1e-5 for point in fresh} == {
        "saccade/cpu": True, "sdpa": True,
    }  # fmt: skip
    assert len(data["points"]) > len(fresh)


@pytest.mark.parametrize("named", [(), ("-c", "tiny-causal-fp32-*")])
def test_a_folder_without_results_is_refused_before_anything_is_measured(tmp_path, named):
    done = run("--read", tmp_path, "--report", tmp_path / "page.html", *named)
    assert done.exit_code == 2
    assert "holds no result files: *.jsonl" in " ".join(done.output.split())
    (tmp_path / "empty.jsonl").touch()
    done = run("--read", tmp_path, "--report", tmp_path / "page.html", *named)
    assert "holds no results" in " ".join(done.output.split())
    assert not (tmp_path / "page.html").exists()


def test_a_page_needs_a_name(tmp_path):
    done = run("-c", "tiny-causal-fp32-*", "--report", tmp_path)
    assert done.exit_code == 2
    assert "takes the name of a file" in " ".join(done.output.split())


def test_the_wheel_holds_the_page_s_parts(tmp_path):
    builder = WheelBuilder(str(Path(__file__).parents[2]))
    (path,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(path) as wheel:
        names = {Path(name).name for name in wheel.namelist() if "bench/report/" in name}
    assert {"page.html", "style.css", *SCRIPTS} <= names
