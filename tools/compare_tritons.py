"""Time the bench's cases by several Tritons, which take turns on one GPU.

Usage: python tools/compare_tritons.py FOLDER [FOLDER ...] [--case GLOB] [--json FILE] [...]

--help says more. Needs a GPU, and what `saccade bench` needs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from saccade.bench.timing import orders

ROOT = Path(__file__).resolve().parents[1]
HELP = """\
Time calls of Saccade as the Tritons in some folders compile them, beside this environment's own.

Each FOLDER holds one, as `pip install --no-deps --target FOLDER triton==3.9.0` makes it; torch and
all else are this environment's. What is timed are the cases, passes and implementations of the
result files that are named, which `saccade bench` measured by one Triton.
"""
EXAMPLES = """\
examples:
  all that the H200's result files hold, by two other Tritons:
    python tools/compare_tritons.py out/triton-3.8 out/triton-3.9 --json out/tritons.jsonl
  the Hopper kernels' causal cases:
    python tools/compare_tritons.py out/triton-3.9 --case 'gpu-causal-*' --who saccade/hopper

Kernels are compiled first, by many processes. Then one process for each Triton makes a case ready,
and they are timed in turns, the order changing every round. Only ratios mean anything: that of a
Triton is the median, over rounds, of its time over the own one's in the same round.

exit status: 0 if no ratio is above --limit, 1 if one is, 2 if a worker died.
"""
RESULTS = ROOT / "benchmarks/results/h200"
FILES = ("hopper", "triton", "linear", "pages")
WARM_SECONDS, SAMPLE_SECONDS = 0.1, 0.02


class Job(NamedTuple):
    """What is timed: one pass of a case by one implementation."""

    case: str
    which_pass: str
    who: str


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "compare_tritons.py", description=HELP, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("folders", metavar="FOLDER", nargs="*", type=Path)
    made.add_argument("--case", metavar="GLOB", action="append", help="cases by name (all)")
    made.add_argument("--who", metavar="GLOB", default="saccade/*", help="implementations")
    made.add_argument("--results", metavar="FOLDER", type=Path, default=RESULTS)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--limit", type=float, default=1.03, help="the largest ratio (1.03)")
    made.add_argument("--compilers", type=int, default=os.cpu_count() or 1, help="processes")
    made.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    made.add_argument("--json", metavar="FILE", type=Path, help="append what was found, one a line")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str]) -> int:
    """Run the tool; the exit status."""
    read = parser().parse_args(arguments)
    if read.worker:
        return work()
    jobs = jobs_of(read.results, read.case or ["*"], read.who)
    if not jobs:
        parser().error(f"no result file in {read.results} holds such a case")
    folders = {"own": None} | {folder.name: folder.resolve() for folder in read.folders}
    caches = Path(tempfile.mkdtemp(prefix="compare-tritons-"))
    try:
        return compare(read, folders, jobs, caches)
    finally:
        shutil.rmtree(caches, ignore_errors=True)


def compare(
    read: argparse.Namespace, folders: dict[str, Path | None], jobs: list[Job], caches: Path
) -> int:
    """Compile and time all jobs; the exit status."""
    begin = time.perf_counter()
    compile_all(folders, jobs, read.compilers, caches)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    workers = {name: Worker(folder, caches) for name, folder in folders.items()}
    versions = {name: worker.ask({"version": True})["version"] for name, worker in workers.items()}
    print(" ".join(f"{name}: Triton {version}" for name, version in versions.items()), flush=True)
    worst = 0.0
    for job in jobs:
        if time.perf_counter() - begin > read.seconds:
            print("out of time; what follows was not timed")
            break
        found = compared(workers, job, read.rounds)
        if isinstance(found, str):
            print(f"{job.case} {job.which_pass} {job.who}: {found}", flush=True)
            continue
        ratios = {name: ratio for name, (_, ratio) in found.items() if name != "own"}
        worst = max(worst, *ratios.values())
        show(job, found["own"][0], ratios, read.limit)
        if read.json:
            line = {
                **job._asdict(),
                "tritons": versions,
                "median_ms": {name: round(ms, 5) for name, (ms, _) in found.items()},
                "ratio": {name: round(ratio, 4) for name, ratio in ratios.items()},
                "rounds": read.rounds,
            }
            with read.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return 1 if worst > read.limit else 0


def jobs_of(results: Path, cases: list[str], who: str) -> list[Job]:
    """What result files hold of some cases and implementations, each once."""
    found: dict[Job, None] = {}
    for name in FILES:
        for line in (results / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            job = Job(row["case"]["name"], row["pass"], row["who"])
            if fnmatchcase(job.who, who) and any(fnmatchcase(job.case, glob) for glob in cases):
                found[job] = None
    return list(found)


def show(job: Job, own_ms: float, ratios: dict[str, float], limit: float) -> None:
    """A line for each job; a star for a ratio above the limit."""
    cells = "  ".join(
        f"{name} {ratio:.3f}{'*' if ratio > limit else ' '}" for name, ratio in ratios.items()
    )
    print(f"{job.case:48} {job.which_pass:9} {job.who:18} {own_ms:8.4f} ms  {cells}", flush=True)


# ---- the side that asks -------------------------------------------------------------------------


class Worker:
    """A process that makes calls by one Triton; it answers each line of JSON with another."""

    def __init__(self, folder: Path | None, caches: Path) -> None:
        path = [str(folder)] if folder else []
        path += [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        cache = caches / (folder.name if folder else "own")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": ":".join(path), "TRITON_CACHE_DIR": str(cache)},
        )  # fmt: skip

    def send(self, asked: dict[str, Any]) -> None:
        """Ask without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for an answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(2)
        return json.loads(line)

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Ask and wait."""
        self.send(asked)
        return self.answer()


def compile_all(
    folders: dict[str, Path | None], jobs: list[Job], processes: int, caches: Path
) -> None:
    """Fill every Triton's cache on disk: each process makes a share of the calls once."""
    each = max(1, processes // len(folders))
    shares = [(Worker(folder, caches), jobs[first::each]) for folder in folders.values()
              for first in range(each)]  # fmt: skip
    for worker, share in shares:
        worker.send({"compile": share})
    for worker, _ in shares:
        worker.answer()
        worker.process.communicate()


def compared(
    workers: dict[str, Worker], job: Job, rounds: int
) -> dict[str, tuple[float, float]] | str:
    """By each Triton the median time in ms and its ratio to the own one; or why there is none."""
    for worker in workers.values():
        worker.send({"ready": job})
    answers = {name: worker.answer() for name, worker in workers.items()}
    for name, answer in answers.items():
        if "error" in answer:
            return f"{name}: {answer['error']}"
    repeats = max(1, round(SAMPLE_SECONDS / answers["own"]["seconds"]))
    taken: dict[str, list[float]] = {name: [] for name in workers}
    for order in itertools.islice(orders(list(workers)), rounds):
        for name in order:
            taken[name].append(workers[name].ask({"time": repeats})["seconds"])
    own = taken["own"]
    return {
        name: (
            statistics.median(times) * 1e3,
            statistics.median(time / base for time, base in zip(times, own, strict=True)),
        )
        for name, times in taken.items()
    }


# ---- the side that answers ----------------------------------------------------------------------


def work() -> int:
    """Answer each line of the input, until it ends."""
    import torch
    import triton

    from saccade.bench.cases import CASES
    from saccade.bench.peers import Call, all_peers, runnable
    from saccade.bench.timing import GpuClock

    device = torch.device("cuda", 0)
    clock = GpuClock(device)
    peers = {peer.who: peer for peer in all_peers()}

    def ready(job: Job) -> Any:
        case, peer = CASES[job.case], peers[job.who]
        call = peer.prepare(case, device)
        if not isinstance(call, Call):
            raise ValueError(call)
        return clock.ready(runnable(call, job.which_pass, case.make(device)))

    def warm(run: Any) -> float:
        """Seconds of a call, after a while of them."""
        end = time.perf_counter() + WARM_SECONDS
        while True:
            seconds = clock.seconds(run, 1)
            if time.perf_counter() > end:
                return seconds

    def answers(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        nonlocal now
        now = None if "time" not in asked else now
        if "version" in asked:
            yield {"version": triton.__version__}
        elif "compile" in asked:
            for job in asked["compile"]:
                try:
                    ready(Job(*job))
                except Exception as error:  # said again when it is to be timed
                    print(job, error, file=sys.stderr)
            yield {}
        elif "ready" in asked:
            try:
                now = ready(Job(*asked["ready"]))
                yield {"seconds": warm(now.run)}
            except Exception as error:  # whatever a call raises is what is to be told
                yield {"error": f"{type(error).__name__}: {error}"[:200]}
        else:
            yield {"seconds": clock.seconds(now.run, asked["time"])}

    now: Any = None
    for line in sys.stdin:
        for answer in answers(json.loads(line)):
            print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
