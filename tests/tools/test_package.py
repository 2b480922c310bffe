"""What is published: the wheel and the sdist, by what is in them; the files of the host."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import saccade

ROOT = Path(__file__).parents[2]
NAME = f"saccade-{saccade.__version__}"
# A sample that takes seconds, and reads sources, tests' own modules, and the project's files.
SAMPLE = ("tests/test_tree.py", "tests/docs/test_versions.py", "tests/test_masks_tree.py")


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def files_of_package(root: Path) -> set[str]:
    """What a package made of a tree holds: no machine code, which only `make wheel` adds."""
    found = (path.relative_to(root / "src") for path in (root / "src").rglob("*") if path.is_file())
    left_out = {"__pycache__", "compiled"}
    return {path.as_posix() for path in found if left_out.isdisjoint(path.parts)}


def build_wheel(root: Path, to: Path) -> Path:
    [path] = WheelBuilder(str(root)).build(directory=str(to), versions=["standard"])
    return Path(path)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built and unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    [path] = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(path) as archive:
        archive.extractall(folder)
    return folder / NAME


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    path = build_wheel(ROOT, tmp_path)
    assert path.name == f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        described = {
            name: wheel.read(name).decode() for name in wheel.namelist() if "-info/" in name
        }
    assert names == files_of_package(ROOT)
    assert {"saccade/py.typed", "saccade/bench/report/page.html", "saccade_cli.py"} <= names
    known = {Path(name).name: text for name, text in described.items()}
    assert {"METADATA", "RECORD", "WHEEL", "LICENSE", "entry_points.txt"} == set(known)
    points = configparser.ConfigParser()
    points.read_string(known["entry_points.txt"])
    assert points["console_scripts"]["saccade"] == "saccade_cli:main"
    assert points["vllm.general_plugins"]["saccade"] == "saccade.integrations.vllm:register"


def test_the_wheel_says_what_it_needs(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(ROOT, tmp_path)) as wheel:
        metadata = Parser().parsestr(wheel.read(f"{NAME}.dist-info/METADATA").decode())
    assert metadata["Version"] == saccade.__version__ and metadata["Requires-Python"] == ">=3.10"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {re.split(r"[<>=]", line)[0] for line in needed}
    assert names == {"torch", "jaxtyping", "typing-extensions", "typer", "rich"}
    assert str(metadata.get_payload()).startswith("# Saccade")


def test_the_sdist_holds_what_is_tracked(unpacked: Path) -> None:
    assert files_of_package(unpacked) == files_of_package(ROOT)
    for folder in ("tests", "tools", "docs", "benchmarks"):
        have, want = (
            {
                path.relative_to(root).as_posix()
                for path in (root / folder).rglob("*")
                if path.is_file() and "__pycache__" not in path.parts
            }
            for root in (unpacked, ROOT)
        )
        assert have == want


def test_a_wheel_made_from_the_sdist_is_the_checkout_s(unpacked: Path, tmp_path: Path) -> None:
    wheels = build_wheel(ROOT, tmp_path / "a"), build_wheel(unpacked, tmp_path / "b")
    with zipfile.ZipFile(wheels[0]) as ours, zipfile.ZipFile(wheels[1]) as theirs:
        assert {name: ours.read(name) for name in ours.namelist()} == {
            name: theirs.read(name) for name in theirs.namelist()
        }


def test_tests_run_from_the_sdist(unpacked: Path) -> None:
    program = (
        "import sys, pytest\n"
        "status = pytest.main(['-q', '-p', 'no:cacheprovider', '-n', '0', *sys.argv[1:]])\n"
        "import saccade; print(saccade.__file__); sys.exit(status)"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked / "src"), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, *SAMPLE], cwd=unpacked, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{unpacked / 'src/saccade/__init__.py'}\n")
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 30


# ---- the project's host --------------------------------------------------------------------------


def test_workflows_test_every_python_that_is_served() -> None:
    versions = read_yaml(".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"][
        "python"
    ]
    assert versions == [f"3.{minor}" for minor in range(10, 15)]


def test_workflows_call_targets_that_there_are() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    called = set[str]()
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        for job in read_yaml(f".github/workflows/{path.name}")["jobs"].values():
            for step in job.get("steps", []):
                for words in re.findall(r"\bmake (?:-C \w+ )?([a-z -]+)", step.get("run", "")):
                    called |= set(words.split())
    assert {"check", "kernels", "test", "test-newest", "docs", "wheel"} <= called <= targets


def test_a_release_is_published_by_trust_in_its_workflow_and_after_the_tests() -> None:
    jobs = read_yaml(".github/workflows/release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert set(jobs["publish"]["needs"]) == {"tests", "build"}
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert "secrets." not in text and "password:" not in text


def test_a_report_of_a_fault_is_asked_for_what_is_needed() -> None:
    fields = read_yaml(".github/ISSUE_TEMPLATE/bug.yml")["body"]
    labels = [field["attributes"]["label"] for field in fields if field["validations"]["required"]]
    for asked in ("saccade.explain", "saccade --version --environment"):
        assert any(asked in label for label in labels)


def test_the_version_is_one() -> None:
    assert read_yaml("CITATION.cff")["version"] == saccade.__version__
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{saccade.__version__}"' in project
    newest = re.search(r"^## ([\d.]+) ", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest and newest[1] == saccade.__version__
