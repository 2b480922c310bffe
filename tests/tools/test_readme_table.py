"""The README's table says what the result files say, and the check notices when it does not."""

import json

import pytest
import readme_table

README = "# Title\n\n<!-- table: begin{globs} -->\nold\n<!-- table: end -->\n\nrest\n"


def line(name, who, milliseconds, run="1", date="2026-01-02T03:04:05Z", **more):
    fields = {
        "date": date, "device": "a CPU", "threads": 2, "versions": {"torch": "2.13.0"},
        "case": {"name": name}, "pass": "forward", "who": who, "median_ms": milliseconds,
        "run": run,
    } | more  # fmt: skip
    return json.dumps(fields) + "\n"


def make(root, *lines, globs=""):
    folder = root / "benchmarks/results/cpu"
    folder.mkdir(parents=True)
    (folder / "dense.jsonl").write_text("".join(lines), encoding="utf-8")
    (root / "README.md").write_text(README.format(globs=globs), encoding="utf-8")


def text(root):
    return (root / "README.md").read_text(encoding="utf-8")


def test_files_that_the_bench_did_not_write_are_passed_by(tmp_path):
    make(tmp_path, line("a", "saccade/cpu", 1.0), line("a", "sdpa", 2.0))
    serving = tmp_path / "benchmarks/results/cpu/serving.jsonl"
    serving.write_text('{"case": "decode", "tokens_per_second": 90}\n', encoding="utf-8")
    assert readme_table.main([str(tmp_path)]) == 0
    assert "| `a` |" in text(tmp_path)


def test_the_table_is_written_and_then_checks(tmp_path):
    make(
        tmp_path,
        line("a", "saccade/cpu", 1.0, peak_mb=12.3),
        line("a", "saccade/reference", 0.1),
        line("a", "sdpa", 2.0),
        line("b", "saccade/cpu", 123.4, run="2"),
        line("b", "sdpa", 100.0, run="2"),
    )
    assert readme_table.main(["--check", str(tmp_path)]) == 1
    assert readme_table.main([str(tmp_path)]) == 0
    assert readme_table.main(["--check", str(tmp_path)]) == 0
    written = text(tmp_path)
    assert "| `a` | forward | 1.00 | 2.00 | 0.50 | 12 | – |" in written
    assert "| `b` | forward | 123 | 100 | 1.23 | – | – |" in written
    assert "benchmarks/results/cpu/dense.jsonl" in written
    assert "old" not in written
    assert written.startswith("# Title\n")
    assert written.endswith("rest\n")


def test_the_last_run_counts_and_runs_are_not_mixed(tmp_path):
    make(
        tmp_path,
        line("a", "saccade/cpu", 1.0),
        line("a", "sdpa", 2.0),
        line("a", "saccade/cpu", 3.0, run="2"),
        line("a", "sdpa", 4.0, run="2"),
        line("a", "sdpa", 9.0, run="3"),
    )
    readme_table.main([str(tmp_path)])
    assert "| 3.00 | 4.00 | 0.75 |" in text(tmp_path)


def test_what_is_left_out_is_said(tmp_path):
    lines = [
        line(case, who, milliseconds, run=case)
        for case, ours in (("a-1k", 1.0), ("a-2k", 3.0))
        for who, milliseconds in (("saccade/cpu", ours), ("sdpa", 2.0))
    ]
    make(tmp_path, *lines, globs=" a-1k")
    readme_table.main([str(tmp_path)])
    written = text(tmp_path)
    assert "`a-1k` |" in written
    assert "`a-2k` |" not in written
    assert "Shown is 1 of 2 measurements" in written
    assert "the worst ratio of all is 1.50 (`a-2k`, forward)" in written
    assert readme_table.main(["--check", str(tmp_path)]) == 0


def test_without_files_or_marks(tmp_path):
    (tmp_path / "README.md").write_text(README.format(globs=""), encoding="utf-8")
    readme_table.main([str(tmp_path)])
    assert "Nothing has been measured yet." in text(tmp_path)
    (tmp_path / "README.md").write_text("no marks\n", encoding="utf-8")
    assert readme_table.main([str(tmp_path)]) == 1


@pytest.mark.parametrize(("value", "shown"), [(0.1234, "0.12"), (12.34, "12.3"), (1234.5, "1234")])
def test_milliseconds_have_three_figures_or_so(value, shown):
    assert readme_table._milliseconds({"median_ms": value}) == shown


def test_memory_has_columns_where_it_was_measured(tmp_path):
    make(tmp_path, line("a", "saccade/cpu", 1.0), line("a", "sdpa", 2.0))
    readme_table.main([str(tmp_path)])
    written = text(tmp_path)
    assert "| `a` | forward | 1.00 | 2.00 | 0.50 |\n" in written
    assert "MB" not in written and "memory" not in written


def test_one_implementation_may_stand_for_saccade(tmp_path):
    make(
        tmp_path,
        line("a", "saccade/hopper", 1.0),
        line("a", "saccade/triton", 3.0),
        line("a", "sdpa", 2.0),
        line("a", "saccade/hopper", 1.5, run="2"),  # a later run without Triton's
        line("a", "sdpa", 2.0, run="2"),
        globs=" by=triton a ",
    )
    readme_table.main([str(tmp_path)])
    assert "| `a` | forward | 3.00 | 2.00 | 1.50 |\n" in text(tmp_path)


def test_files_may_be_chosen(tmp_path):
    lines = line("a", "saccade/cpu", 1.0), line("a", "sdpa", 2.0)
    make(tmp_path, *lines, globs=" from=cpu/sparse.jsonl")
    readme_table.main([str(tmp_path)])
    assert "Nothing has been measured yet." in text(tmp_path)
    (tmp_path / "benchmarks/results/cpu/sparse.jsonl").write_text("".join(lines), encoding="utf-8")
    readme_table.main([str(tmp_path)])
    assert text(tmp_path).count("| `a` |") == 1 and "cpu/sparse.jsonl" in text(tmp_path)


def test_another_peer_may_stand_beside_saccade(tmp_path):
    lines = [
        line("a", "saccade/triton", 1.0),
        line("a", "sdpa/flash", 2.0),
        line("a", "sdpa", 4.0),
    ]
    make(
        tmp_path,
        *lines,
        line("b", "saccade/triton", 9.0, run="2"),
        globs=" against=sdpa/flash a ",
    )
    assert readme_table.main([str(tmp_path)]) == 0
    assert "| case | pass | Saccade ms | SDPA/flash ms | Saccade / SDPA/flash |" in text(tmp_path)
    assert "| `a` | forward | 1.00 | 2.00 | 0.50 |" in text(tmp_path)
    assert "`b`" not in text(tmp_path)


def step(who, rate, peak, losses, norms):
    return line(
        "gpu-training-2k", who, 1.6384e7 / rate, tokens_per_second=rate, peak_mb=peak,
        losses=losses, gradient_norms=norms, case={"name": "gpu-training-2k", "batch": 8},
    )  # fmt: skip


def test_training_steps_are_shown_by_tokens_a_second(tmp_path):
    make(
        tmp_path,
        line("a", "saccade/cpu", 1.0, peak_mb=12.3),
        line("a", "sdpa", 2.0),
        step("saccade/hopper", 123456.7, 15600.0, [8.0, 7.0], [2.0, 1.0]).replace('"1"', '"2"'),
        step("sdpa", 100000.0, 24500.0, [8.0, 7.007], [2.0, 1.02]).replace('"1"', '"2"'),
    )
    assert readme_table.main([str(tmp_path)]) == 0
    written = text(tmp_path)
    assert "| `a` | forward | 1.00 | 2.00 | 0.50 | 12 | – |" in written
    assert (
        "| case | batch | pass | Saccade tokens/s | SDPA tokens/s | time, Saccade / SDPA |"
        in written
    )
    assert "| `gpu-training-2k` | 8 | forward | 123,457 | 100,000 | 0.81 | 15.6 | 24.5 |" in written
    assert "Losses of the first steps differ by at most 1e-03, gradient norms by 2e-02." in written
    assert readme_table.main(["--check", str(tmp_path)]) == 0


def test_a_summary_is_a_sentence_of_means_and_the_worst(tmp_path):
    make(
        tmp_path,
        *(line(name, "saccade/cpu", ms, run=name) for name, ms in (("a", 1.0), ("b", 4.0))),
        *(line(name, "sdpa", 2.0, run=name) for name in "ab"),
        globs=" summary",
    )
    assert readme_table.main([str(tmp_path)]) == 0
    assert "of SDPA's time it takes 1.00 forward (at most 2.00)" in text(tmp_path)
    assert "in the mean of 2 cases" in text(tmp_path)


def test_tables_of_docs_link_from_there_and_are_checked(tmp_path):
    make(tmp_path, line("a", "saccade/cpu", 1.0), line("a", "sdpa", 2.0))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/measured.md"
    page.write_text(README.format(globs=""), encoding="utf-8")
    assert readme_table.main([str(tmp_path)]) == 0
    assert "](../benchmarks/results/cpu/dense.jsonl)" in page.read_text(encoding="utf-8")
    assert readme_table.main(["--check", str(tmp_path)]) == 0
    page.write_text(README.format(globs=""), encoding="utf-8")
    assert readme_table.main(["--check", str(tmp_path)]) == 1
