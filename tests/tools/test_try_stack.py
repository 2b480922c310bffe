"""What a run of the tests by another torch found is read and written down as it was."""

import json
import re
from pathlib import Path

import pytest
import try_stack

ROOT = Path(__file__).parents[2]
REPORT = """\
<testsuites><testsuite time="61.6">
  <testcase classname="tests.a.test_one" file="tests/a/test_one.py" name="test_fine" />
  <testcase classname="tests.a.test_one.TestIt" file="tests/a/test_one.py" name="test_bad[2]">
    <failure message="no">why</failure></testcase>
  <testcase classname="tests.a.test_one" file="tests/a/test_one.py" name="test_left">
    <skipped message="no GPU" /></testcase>
  <testcase classname="tests.a.test_one" file="tests/a/test_one.py" name="test_twice">
    <failure message="no">why</failure></testcase>
  <testcase classname="tests.a.test_one" file="tests/a/test_one.py" name="test_twice">
    <error message="at its end">why</error></testcase>
</testsuite></testsuites>
"""
PAGE = "# Stacks\n\n<!-- stacks: begin -->\nold\n<!-- stacks: end -->\n\nrest\n"


def found(**changes):
    return try_stack.Found(3, 0, 1, 60, [])._replace(**changes)


def written(root, stack, tests="all", **changes):
    (root / "docs").mkdir(exist_ok=True)
    page = root / try_stack.PAGE
    if not page.exists():
        page.write_text(PAGE, encoding="utf-8")
    try_stack.record(root, try_stack.described(stack, tests, found(**changes)))
    return page.read_text(encoding="utf-8")


def test_a_report_is_counted_by_tests(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT, encoding="utf-8")
    assert try_stack.read_report(tmp_path / "report.xml") == try_stack.Found(
        1, 2, 1, 62,
        ["tests/a/test_one.py::TestIt::test_bad[2]", "tests/a/test_one.py::test_twice"],
    )  # fmt: skip


def test_a_result_takes_the_place_of_the_one_before_it(tmp_path):
    new, old = try_stack.Stack("2.15.0", "3.9.0"), try_stack.Stack("2.9.1", "3.5.0")
    written(tmp_path, new, failed=1, failures=["tests/test_a.py::test_b"])
    written(tmp_path, new, "sample", passed=2)
    written(tmp_path, old)
    text = written(tmp_path, new, passed=7)
    rows = re.findall(r"^\| (\d\S*) \|.*?\| (all|sample) \| (\d+) \|", text, re.MULTILINE)
    assert rows == [("2.9.1", "all", "3"), ("2.15.0", "all", "7"), ("2.15.0", "sample", "2")]
    assert "old" not in text and "test_b" not in text and text.endswith("\n\nrest\n")


def test_failures_are_named_below_the_table(tmp_path):
    stack = try_stack.Stack("2.15.0", "3.9.0")
    text = written(tmp_path, stack, failed=1, failures=["tests/test_a.py::test_b"])
    assert "By torch 2.15.0 and Triton 3.9.0 failed:\n\n- `tests/test_a.py::test_b`\n" in text


def test_the_page_says_what_the_records_say():
    records = json.loads((ROOT / try_stack.RECORDS).read_text(encoding="utf-8"))
    page = (ROOT / try_stack.PAGE).read_text(encoding="utf-8")
    assert records and try_stack.with_table(page, records) == page


def test_the_sample_is_there():
    for test in try_stack.SAMPLE:
        path, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / path).read_text(encoding="utf-8"), test


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["2.15.0"], "TRITON"),
        (["2.15.0", "3.9.0", "tests/test_masks.py", "--record"], "--record"),
        (["2.15.0", "3.9.0", "--record", "--", "-k", "window"], "--record"),
        (["2.15.0", "3.9.0", "tests/test_masks.py", "--sample"], "--sample"),
    ],
)
def test_wrong_arguments_are_named(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        try_stack.main(arguments)
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_help_teaches_by_examples(capsys):
    with pytest.raises(SystemExit):
        try_stack.main(["--help"])
    text = capsys.readouterr().out
    assert "python tools/try_stack.py 2.15.0 3.9.0 --sample" in text and "exit status" in text
