"""The report is one page, complete in itself; its charts, tables and colours work in a browser."""

import json
import re
from pathlib import Path

import pytest
import typer
from browser import MISSING, Browser, find, required
from typer.testing import CliRunner

from saccade.bench import report
from saccade.bench.cases import CASES
from saccade.bench.command import bench
from saccade.bench.report import compiled_kernels, sections
from saccade.bench.results import Result, append, case_fields, read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PEERS = {"saccade/triton": 1.0, "saccade/hopper": 0.8, "sdpa/flash": 2.0, "flex": 1.5}
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
    runner = CliRunner(env={"COLUMNS": "300"})  # paths are long, and messages not to be cut
    return runner.invoke(app, [*map(str, arguments), "--device", "cpu"])


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
    assert "1/1.25 of the time of SDPA&#x27;s flash, dense, forward." in text
    assert "default-src 'none'" in text
    sources = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)|@import', text)
    assert all(one.startswith(("#", "data:")) for pair in sources for one in pair if one)
    assert len(text.encode()) < 300_000


def test_all_committed_results_make_a_page_below_2_mb(tmp_path):
    size = report.write(report.gather(RESULTS), tmp_path / "deep" / "page.html")
    assert size == (tmp_path / "deep" / "page.html").stat().st_size < 2_000_000


def test_shares_are_of_the_limit_of_the_result_s_dtype():
    h200 = sections.limit_of("NVIDIA H200")
    assert h200 is not None
    assert sections.limit_of("an abacus") is None
    (point, *_) = sections.points([report.Source("", gpu_results())])
    assert point.of_limit == pytest.approx(400 / 989.5)
    reads = result("gpu-decode-bf16-d128-16k", "saccade/triton", tflops=None, gbps=2400.0)
    (point,) = sections.points([report.Source("", [reads])])
    assert point.of_limit == pytest.approx(0.5)
    assert h200.most(result("tiny-full-fp32-d16-48", "sdpa")) == 67.0


def test_who_missed_the_last_run_is_compared_with_its_own():
    case = "gpu-full-bf16-d128-1k"
    old = [result(case, who, ms, run="1") for who, ms in (("saccade/triton", 1.0), ("flex", 4.0))]
    source = report.Source("", [*old, result(case, "saccade/triton", 2.0, run="2")])
    points = {point.result.who: point for point in sections.points([source])}
    assert points["saccade/triton"].result.median_ms == 2.0
    assert points["flex"].against_fastest == 4.0
    ((who, _, ratio, *_),) = sections.beside_peers([source]).rows
    assert (who.text, ratio.number) == ("flex", 0.25)


def test_our_kernels_by_name_are_no_peers():
    names = ("saccade/scattered-64", "triton/scattered-64", "hopper/scattered-64")
    found = [result("gpu-full-bf16-d128-1k", who) for who in names]
    assert not sections.beside_peers([report.Source("", found)]).rows


def test_errors_stand_beside_the_least_of_their_run():
    case = "gpu-full-bf16-d128-1k"
    found = [
        result(case, "saccade/triton", error=3e-3), result(case, "flex", error=2e-3),
        result(case, "sdpa"),
    ]  # fmt: skip
    rows = sections.errors(sections.points([report.Source("", found)])).rows
    assert [(row[3].text, row[4].text, row[5].number) for row in rows] == [
        ("saccade/triton", "3.0e-03", pytest.approx(1.5)), ("flex", "2.0e-03", 1.0),
    ]  # fmt: skip


def test_names_from_files_are_no_markup(tmp_path):
    odd = "</script><img src=x onerror=alert(1)>"
    report.write([report.Source(odd, [result("gpu-full-bf16-d64-512", odd)])], tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<img" not in text
    assert data_of(tmp_path / "p.html")["points"][0]["who"] == odd


def test_kernels_come_from_a_checkout_or_are_said_to_be_absent(tmp_path):
    assert ">sm_90</button>" in compiled_kernels()
    assert "255 / 48 !</td>" in compiled_kernels()
    assert "`" not in compiled_kernels(tmp_path / "none.md")
    assert "<code>saccade kernels</code>" in compiled_kernels(tmp_path / "none.md")


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
    assert "is a directory" in " ".join(done.output.split())


# In a browser.


@pytest.fixture(scope="module")
def browser():
    path = find()
    if path is None and required():
        pytest.fail(MISSING)
    if path is None:
        pytest.skip(MISSING)
    with Browser(path) as running:
        yield running


@pytest.fixture
def opened(browser, page):
    browser.open(page)
    yield browser
    assert browser.complaints == []


def choose(browser, name, value):
    """Choose as a user does: the select tells the page."""
    browser.run(
        f"(() => {{ const select = document.getElementById('choose-{name}');"
        f" select.value = {json.dumps(value)};"
        " select.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def title(browser):
    return browser.run("document.getElementById('chart-title').textContent")


def column(browser, table, index):
    return browser.run(
        f"[...document.querySelector({json.dumps(table)}).tBodies[0].rows]"
        f".map(row => row.cells[{index}].textContent)"
    )


def test_curves_are_drawn_for_every_peer(opened):
    assert title(opened) == "Throughput: full, bfloat16, head dim 64, forward, on NVIDIA H200"
    lines = opened.run("[...document.querySelectorAll('#chart .line')].map(l => l.outerHTML)")
    assert len(lines) == len(PEERS)
    for line in lines:
        assert re.search(r'd="M[\d.]+ [\d.]+L[\d.]+ [\d.]+L[\d.]+ [\d.]+"', line)
    points = "document.querySelectorAll('#chart .point')"
    assert opened.run(f"{points}.length") == 3 * len(PEERS)
    shapes = opened.run(f"new Set([...{points}].map(p => p.getAttribute('d'))).size")
    colors = opened.run(
        "new Set([...document.querySelectorAll('#chart .line')]"
        ".map(line => getComputedStyle(line).stroke)).size"
    )
    assert shapes == colors == len(PEERS)
    assert "The table below" in opened.run(
        "document.querySelector('#chart svg').getAttribute('aria-label')"
    )


def test_selects_change_the_chart_and_keep_to_what_exists(opened):
    before = opened.run("document.getElementById('chart').innerHTML")
    choose(opened, "pass", "backward")
    choose(opened, "dim", "128")
    assert title(opened) == "Throughput: full, bfloat16, head dim 128, backward, on NVIDIA H200"
    assert opened.run("document.getElementById('chart').innerHTML") != before
    assert column(opened, "#chart-table table", 0)[::4] == ["1k", "2k", "4k"]
    choose(opened, "value", "error")
    assert title(opened).endswith("not measured")
    choose(opened, "pass", "forward")
    assert title(opened).startswith("Error against float64")
    choose(opened, "machine", "an unknown CPU, 2 threads")
    choose(opened, "kind", "full (decode)")
    choose(opened, "value", "rate")
    assert opened.run("document.querySelectorAll('#chart .bar').length") == 2
    assert "GB/s" in opened.run("document.querySelector('#chart svg').textContent")


def test_the_legend_switches_peers_off_and_on(opened):
    lines = "document.querySelectorAll('#chart .line').length"
    opened.click("#legend button")
    assert opened.run(lines) == len(PEERS) - 1
    # The button was made anew; whoever pressed it by keyboard still stands on it.
    assert opened.run("document.activeElement.getAttribute('aria-pressed')") == "false"
    opened.press(" ")
    assert opened.run(lines) == len(PEERS)


def test_tables_sort_by_click_and_by_keyboard(opened):
    table = "#glance table"
    header = f"{table} th:nth-child(3)"

    def medians():
        return [float(text) for text in column(opened, table, 2)]

    def order():
        return opened.run(f"document.querySelector({json.dumps(header)}).getAttribute('aria-sort')")

    assert order() is None
    opened.click(f"{header} button")
    assert (order(), medians()) == ("ascending", sorted(medians()))
    opened.press("Enter")
    assert (order(), medians()) == ("descending", sorted(medians(), reverse=True))
    opened.press("Tab")
    opened.press(" ")
    assert order() is None
    assert opened.run("document.activeElement.closest('th').ariaSort") == "ascending"
    outline = opened.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_missing_numbers_sort_last_either_way(opened):
    opened.run("document.querySelector('#everything details').open = true")
    header = "#everything th:nth-child(11)"
    for _ in range(2):
        opened.click(f"{header} button")
        errors = column(opened, "#everything table", 10)
        filled = [text != "–" for text in errors]
        assert filled == sorted(filled, reverse=True) and False in filled


@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
def test_colours_follow_the_system_until_the_button_is_used(browser, page, scheme, other):
    browser.open(page, scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    first = browser.run(background)
    assert browser.run("document.documentElement.dataset.theme") == scheme
    browser.click("#theme")
    assert browser.run("document.documentElement.dataset.theme") == other
    assert browser.run(background) != first
    browser.open(page, scheme=scheme)
    assert browser.run("document.documentElement.dataset.theme") == other  # it is remembered
    browser.run("localStorage.clear()")
    assert browser.complaints == []


def test_nothing_is_wider_than_a_phone(browser, page):
    browser.open(page, width=360)
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert browser.run("document.documentElement.scrollWidth") == 360
    # What scrolls by itself may be wider inside; all the rest ends at the edge.
    wide = browser.run(
        "[...document.querySelectorAll('body *')].filter(one =>"
        " !one.closest('.scroll > *, nav > *, .skip')"
        " && one.getBoundingClientRect().right > 360.5).map(one => one.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert browser.run("document.querySelectorAll('#chart .line').length") == len(PEERS)
    assert browser.complaints == []


@pytest.mark.parametrize(("width", "index"), [(1280, 3), (390, 2)])
def test_the_column_that_the_first_table_speaks_of_is_seen_at_once(browser, page, width, index):
    browser.open(page, width=width)
    cell = f"document.querySelector('#glance table').tBodies[0].rows[0].cells[{index}]"
    right = browser.run(f"{cell}.getBoundingClientRect().right")
    seen = browser.run("document.querySelector('#glance .scroll').getBoundingClientRect().right")
    assert 0 < right <= seen <= width
    assert browser.complaints == []


def test_every_control_has_a_name(opened):
    nameless = opened.run(
        "[...document.querySelectorAll('button, select, a, [tabindex]')].filter(one =>"
        " !(one.textContent.trim() || one.ariaLabel) || (one.tagName === 'SELECT'"
        " && !one.labels.length)).map(one => one.outerHTML)"
    )
    assert nameless == []


def test_all_committed_results_paint_at_once(browser, tmp_path):
    report.write(report.gather(RESULTS), tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    paint = browser.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert 0 < paint < 1000
    assert browser.complaints == []
    outside = [url for url in browser.requests() if not url.startswith(("file:", "data:"))]
    assert outside == []
    assert browser.run("document.querySelectorAll('#chart .line').length") > 2


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        ({"tflops": 0.25}, "250 GFLOP/s"),
        ({"tflops": 735.0}, "735 TFLOP/s"),
        ({"tflops": None, "gbps": 19.8}, "19.8 GB/s"),
        ({"tflops": None, "gbps": 4502.0}, "4.5 TB/s"),
    ],
)
def test_a_rate_has_no_thousands(rate, text):
    found = result("gpu-full-bf16-d128-4k", "saccade/hopper", **rate)
    point = sections.Point(0, found, None, None, 1.0, {})
    assert sections._rate_text(point) == text
