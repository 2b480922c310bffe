"""README names the versions that pyproject.toml asks for and that each commit is tested by."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, MAKEFILE, PROJECT, CI = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "Makefile", "pyproject.toml", ".ci/run")
)


def row(name):
    """At least, the newest that was tried, what each commit is tested by."""
    found = re.search(rf"^\| {name}[^|]*\|(.*)\|$", README, re.MULTILINE)
    assert found, name
    return [cell.strip() for cell in found[1].split("|")]


def pinned(name, text):
    return re.findall(rf"\b{name}==([\d.]+)", text)


def minor(version):
    return tuple(map(int, version.split(".")[:2]))


def test_what_is_asked_for_is_what_the_package_asks_for():
    asked = {
        "Python": re.search(r'requires-python = ">=([\d.]+)"', PROJECT),
        "torch": re.search(r'"torch>=([\d.]+)"', PROJECT),
        "transformers": re.search(r'"transformers>=([\d.]+)"', PROJECT),
    }
    for name, found in asked.items():
        assert found and row(name)[0] == found[1], name


def test_each_commit_is_tested_by_what_the_makefile_installs():
    assert pinned("torch", MAKEFILE) == [row("torch")[2]]
    oldest, newest = pinned("triton", MAKEFILE)
    assert row("Triton")[:2] == [oldest, newest]
    assert oldest in row("Triton")[2] and newest in row("Triton")[2]
    assert row("transformers")[2] in pinned("transformers", PROJECT)
    assert " test-newest " in CI


def test_the_newest_that_was_tried_stands_in_the_records():
    tried = json.loads((ROOT / "docs/stacks.json").read_text(encoding="utf-8"))
    newest = max(tried, key=lambda one: minor(one["torch"]))
    assert (newest["torch"], newest["triton"]) == (row("torch")[1], row("Triton")[1])
