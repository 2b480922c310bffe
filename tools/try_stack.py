"""Run the tests by a torch and a Triton that are named, in an environment of their own.

Usage: python tools/try_stack.py TORCH TRITON [PATH ...] [--folder FOLDER] [--record] [...]

--help says more. Needs only Python >= 3.10 and its venv module. What was found: docs/stacks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGE = Path("docs/stacks.json"), Path("docs/stacks.md")
REGION = re.compile(r"(<!-- stacks: begin -->\n)(.*?)(<!-- stacks: end -->)", re.DOTALL)
ALL = "all"

# A minute or two of two cores, for what a new torch or Triton has broken so far.
OF_TRITON: tuple[str, ...] = (
    "tests/gpu/test_launcher.py",
    "tests/gpu/test_dropout.py",
    "tests/gpu/test_machine_code.py",
    "tests/gpu/test_device_ops.py",
    "tests/gpu/test_signature.py",
    "tests/ops/linear_attention/triton/test_passes.py",
    "tests/ops/attention/triton/test_one_loop.py",
    "tests/ops/delta_rule/triton/test_kernels.py",
    "tests/test_interpreter.py",
    "tests/modifiers/test_intervals.py::test_subtle_masks_are_never_classified_wrongly",
)
OF_TORCH = ("tests/integrations/test_sdpa_stand_in.py", "tests/ops/attention/test_custom_op.py")
SAMPLE = (*OF_TRITON, *OF_TORCH)

HELP = """\
Make an environment that holds TORCH and TRITON, run the tests in it, and say which fail.

PyTorch names the Triton that it wants: torch 2.11 comes with triton 3.6.0, 2.12.1 with 3.7.1, 2.14
with 3.8.0 and 2.15 with 3.9.0. No GPU is needed: the tests that need one are left out, and
Triton's interpreter runs the kernels of the others.
"""
EXAMPLES = """\
examples:
  a minute or two of tests:
    python tools/try_stack.py 2.15.0 3.9.0 --sample
  all of them, whose result docs/stacks.md gets:
    python tools/try_stack.py 2.15.0 3.9.0 --record
  some, with options of pytest's own:
    python tools/try_stack.py 2.15.0 3.9.0 tests/test_masks.py -- -k window
  beside other work, leaving nothing behind:
    nice python tools/try_stack.py 2.11.0 3.6.0 --record --remove

The environment is made once: 5 to 7 GB, since a torch with Triton brings CUDA's libraries, and
some minutes. A second run with the same TORCH, TRITON and FOLDER takes it as it is, and puts this
checkout's Saccade in. pip's own settings hold, so PIP_CONFIG_FILE=/dev/null sets aside those of a
machine that forbid a version.

exit status: 0 if all tests passed, 1 if some failed, 2 if they could not be run.
"""


class Stack(NamedTuple):
    """A torch and the Triton beside it, by their versions."""

    torch: str
    triton: str

    @property
    def name(self) -> str:
        """What its environment is called."""
        return f"torch-{self.torch}-triton-{self.triton}"


class Found(NamedTuple):
    """What a run of the tests found."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: list[str]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "try_stack.py", description=HELP, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("torch", metavar="TORCH", help="an exact version, 2.15.0")
    made.add_argument("triton", metavar="TRITON", help="an exact version, 3.9.0")
    made.add_argument("paths", metavar="PATH", nargs="*", help="tests; none: all of them")
    made.add_argument("--sample", action="store_true", help="the tests that CI runs by the newest")
    made.add_argument(
        "--folder", type=Path, default=ROOT / "out/stacks", help="holds environments (out/stacks)"
    )
    made.add_argument(
        "--record", action="store_true", help=f"write the result to {RECORDS} and {PAGE}"
    )
    made.add_argument("--remove", action="store_true", help="remove the environment afterwards")
    made.add_argument(
        "--workers", default="auto", help="of pytest's; 0 runs all in one process (auto)"
    )
    return made


def main(arguments: list[str]) -> int:
    """Run the tool; the exit status."""
    if arguments == ["--list-sample"]:  # for the Makefile, whose torch is that of all other tests
        print(*OF_TRITON)
        return 0
    own, options = _split(arguments)
    read = parser().parse_args(own)
    if read.record and (read.paths or options):
        parser().error("--record: takes all tests or --sample, not some by name or option")
    if read.sample and read.paths:
        parser().error("--sample: takes no PATH beside it")
    stack = Stack(read.torch, read.triton)
    environment = read.folder.resolve() / stack.name
    try:
        prepare(environment, stack)
        paths: list[str] = [*SAMPLE] if read.sample else read.paths
        found = run(environment, paths, [f"-n{read.workers}", *options])
    except subprocess.CalledProcessError as error:
        print(f"error: {shlex.join(map(str, error.cmd))} exited with {error.returncode}")
        return 2
    finally:
        if read.remove:
            shutil.rmtree(environment, ignore_errors=True)
    print(f"{stack.name}: {found.passed} passed, {found.failed} failed, {found.skipped} skipped")
    for name in found.failures:
        print(f"  {name}")
    if read.record:
        record(ROOT, described(stack, "sample" if read.sample else ALL, found))
        print(f"Written to {RECORDS} and {PAGE}")
    return 1 if found.failed else 0


def prepare(environment: Path, stack: Stack) -> None:
    """Make the environment, unless it is there: torch and Triton first, then what tests need."""
    ready, python = environment / "ready", environment / "bin/python"
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if ready.exists():
        print(f"[1/3] {environment} is there")
        print("[2/3] torch and Triton are installed", flush=True)
        # It may have been made by another checkout, whose Saccade is not to be tested.
        subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
        return
    print(f"[1/3] Making {environment}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    pins = [f"torch=={stack.torch}", f"triton=={stack.triton}"]
    print(f"[2/3] Installing {' '.join(pins)} and what tests need (minutes)", flush=True)
    subprocess.run([*install, *pins], check=True)
    # Named again: nothing that follows may bring another.
    subprocess.run([*install, "-e", f"{ROOT}[dev,bench]", *pins], check=True)
    ready.touch()


def run(environment: Path, paths: list[str], options: list[str]) -> Found:
    """Run the tests there and read what they found; pytest shows its progress."""
    report = environment / "report.xml"
    report.unlink(missing_ok=True)
    own = {
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(environment / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(environment / "inductor"),
    }
    command = [
        str(environment / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "-m", "not gpu and not training and not slow",
        "-o", "junit_family=xunit1", f"--junitxml={report}",
        *options, *paths,
    ]  # fmt: skip
    print(f"[3/3] {shlex.join(command)}", flush=True)
    status = subprocess.run(command, cwd=ROOT, env=os.environ | own).returncode
    if status not in (0, 1):  # nothing collected, a wrong option, an interrupt
        raise subprocess.CalledProcessError(status, command)
    return read_report(report)


def read_report(report: Path) -> Found:
    """What pytest wrote in the form of JUnit."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = {_name(case) for case in cases if _has(case, "failure", "error")}
    skipped = {_name(case) for case in cases if _has(case, "skipped")} - failed
    passed = [case for case in cases if _name(case) not in failed | skipped]
    seconds = sum(float(suite.get("time", 0)) for suite in _suites(report))
    return Found(len(passed), len(failed), len(skipped), round(seconds), sorted(failed))


def described(stack: Stack, tests: str, found: Found) -> dict[str, Any]:
    """What is written down of a run."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True, capture_output=True
    )
    return {
        "torch": stack.torch,
        "triton": stack.triton,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or None,
        "tests": tests,
        **found._asdict(),
    }


def record(root: Path, described: dict[str, Any]) -> None:
    """Put a result in the place of the one before it, and write the page's table anew."""
    records, page = root / RECORDS, root / PAGE
    before = json.loads(records.read_text(encoding="utf-8")) if records.exists() else []
    after = [one for one in before if _place(one) != _place(described)] + [described]
    after.sort(key=_place)
    records.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
    page.write_text(with_table(page.read_text(encoding="utf-8"), after), encoding="utf-8")


def with_table(page: str, records: list[dict[str, Any]]) -> str:
    """The page with the table that the records give, and the failures below it."""
    table = "| torch | Triton | Python | tests | passed | failed | skipped | date | commit |\n"
    table += "|---|---|---|---|---:|---:|---:|---|---|\n"
    columns = ("torch", "triton", "python", "tests", "passed", "failed", "skipped", "date")
    for one in records:
        cells = [str(one[column]) for column in columns]
        table += f"| {' | '.join(cells)} | {one['commit'] or ''} |\n"
    for one in filter(lambda one: one["failures"], records):
        table += f"\nBy torch {one['torch']} and Triton {one['triton']} failed:\n\n"
        table += "".join(f"- `{name}`\n" for name in one["failures"])
    return REGION.sub(lambda found: found[1] + table + found[3], page)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and behind a double dash."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _place(one: dict[str, Any]) -> tuple[Any, ...]:
    return (*(tuple(map(int, re.findall(r"\d+", one[name]))) for name in ("torch", "triton")),
            one["tests"])  # fmt: skip


def _name(case: ElementTree.Element) -> str:
    inside = (case.get("classname") or "").rpartition(".")[2]
    member = f"{inside}::" if inside[:1].isupper() else ""
    return f"{case.get('file') or case.get('classname')}::{member}{case.get('name')}"


def _has(case: ElementTree.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def _suites(report: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(report).getroot().iter("testsuite"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
