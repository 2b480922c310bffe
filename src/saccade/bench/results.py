"""Results and files of them: one JSON object a line, with the machine and the versions."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import saccade
from saccade.bench.case import PASSES, SHORT_DTYPES, BenchCase
from saccade.bench.timing import Timing

PACKAGES = (
    "triton", "transformers", "flash-attn", "xformers", "flash-attention-triton",
    "flash-linear-attention",
)  # fmt: skip


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of everything that takes part."""
    found = {
        "saccade": saccade.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the source that runs, "+" behind it where files differ; None outside of git."""
    here = Path(__file__)
    try:
        _git("ls-files", "--error-unmatch", here.name)  # or it is another repository
        changed = _git("status", "--porcelain", "--untracked-files=no", ":/src")
        return _git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout.strip()


# How the names of peers begin that are saccade: its choice, and its kernels by name.
OURS = ("saccade/", "triton/", "hopper/")

CASE_FIELDS = (
    "name", "batch", "query_heads", "kv_heads", "query_len", "kv_len",
    "head_dim", "value_dim", "dtype", "mask",
)  # fmt: skip


# What is said of an engine under load, all numbers. `rate`: of requests a second that arrived in
# `seconds`; `capacity`: the same of a closed loop; `prompt_tokens`, `new_tokens`: drawn, in the
# mean. `running` and `waiting`: requests at the end, with a first token and without.
LOAD_FIELDS = (
    "rate", "seconds", "capacity", "max_sequences", "seed", "prompt_tokens", "new_tokens",
    "first_token_median_ms", "first_token_p99_ms", "tokens_per_second",
    "arrived", "done", "running", "waiting",
)  # fmt: skip
# Where a request had more than one token; and the names of those times that may be longer.
FURTHER_LOAD_FIELDS = ("between_tokens_median_ms", "between_tokens_p99_ms", "at_least")


@dataclass(frozen=True)
class Result:
    """The measurement of one peer in one pass of one case.

    Attributes:
        date: UTC, to the second.
        commit: of saccade's source; None outside of a checkout.
        case: the case's fields, by name.
        which_pass: "forward", "backward", "forward+backward" or "decode", or a kind of call whose
            host's time or first call was measured; "pass" in files.
        tflops, gbps: operations on visible pairs, or for decoding the least bytes, a second; of a
            yardstick that moves other bytes than the case's, those.
        run: the same for all peers that took turns; only within a run are times comparable.
        peak_mb: memory at the worst moment beyond the inputs, where it was measured; of training
            steps all that is allocated, weights and optimizer included.
        error: the largest ‖result − exact‖ / ‖exact‖ of what was compared with float64: of rows of
            a forward pass, of a head's gradients of a backward pass.
        tokens_per_second, first_seconds, losses, gradient_norms: of training steps alone: the time
            of the first step, which compiles, and what the first steps gave from the same weights.
        floor_ms: of an engine's steps alone: the time in which their weights and their cache can be
            read once, at the rate of a copy in the same run.
        load: of an engine under load alone, whose times above are those to the first token: what
            arrived and what came of it (`LOAD_FIELDS`).
    """

    date: str
    commit: str | None
    device: str
    threads: int
    versions: dict[str, str]
    case: dict[str, Any]
    which_pass: str
    who: str
    median_ms: float
    min_ms: float
    max_ms: float
    rounds: int
    run: str
    tflops: float | None = None
    gbps: float | None = None
    peak_mb: float | None = None
    error: float | None = None
    tokens_per_second: float | None = None
    first_seconds: float | None = None
    losses: list[float] | None = None
    gradient_norms: list[float] | None = None
    floor_ms: float | None = None
    load: dict[str, Any] | None = None

    @property
    def ours(self) -> bool:
        """Whether it is of one of saccade's implementations, but for the reference."""
        return self.who.startswith(OURS) and self.who != "saccade/reference"

    @property
    def machine(self) -> str:
        """The device, with its threads where they compute."""
        if "cuda" in self.versions and not self.case["name"].startswith("cpu-"):
            return self.device
        return f"{self.device}, {self.threads} thread{'s' if self.threads != 1 else ''}"

    @property
    def kind(self) -> str:
        """The mask, and what else the case's name says: packed, grouped, decode ..."""
        words, text = self.case["name"].split("-"), self.case["mask"]
        dtype = SHORT_DTYPES.get(self.case["dtype"], self.case["dtype"])
        label = "-".join(words[1 : words.index(dtype)] if dtype in words else words[1:])
        return text if not label or label in text.replace(" ", "") else f"{text} ({label})"

    @property
    def rate(self) -> float:
        """The throughput in `unit`; 0 where there is none."""
        return self.gbps or self.tflops or 0.0

    @property
    def unit(self) -> str:
        """The unit of the throughput; "" where there is none."""
        return "GB/s" if self.gbps is not None else "" if self.tflops is None else "TFLOP/s"

    def line(self) -> str:
        """The result as it stands in a file; fields that were not measured are left out.

        Raises:
            ValueError: for a number that is not finite, and what `parse` refuses.
        """
        _check(self)
        named = asdict(self)
        named["pass"] = named.pop("which_pass")
        kept = {name: value for name, value in named.items() if value is not None}
        kept.setdefault("commit", None)
        return json.dumps(kept, ensure_ascii=False)

    @staticmethod
    def parse(line: str) -> Result:
        """The result that a line holds."""
        try:
            named = dict(json.loads(line, parse_constant=_refuse_constant))
            found = Result(which_pass=named.pop("pass"), **named)
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"not a result: {error}") from error
        _check(found)
        return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"got {name}, takes finite numbers")


def _check(result: Result) -> None:
    """Refuse fields of other kinds than `Result` says."""
    for field in fields(Result):
        value, kinds = getattr(result, field.name), _KINDS[str(field.type)]
        name = "pass" if field.name == "which_pass" else field.name
        parts = value if isinstance(value, list) else [value]
        known = isinstance(value, kinds) and (parts is not value or all(map(_is_number, parts)))
        if isinstance(value, bool) or not known:
            raise ValueError(f"not a result: {name}: got {value!r}, takes {field.type}")
        if any(_is_number(part) and not abs(part) <= sys.float_info.max for part in parts):
            raise ValueError(f"not a result: {name}: got {value!r}, takes a finite number")
    if not isinstance(result.case.get("name"), str):
        raise ValueError("not a result: case: got no name, takes the fields of a case")
    if result.load is not None:
        _check_load(result.load)


def _check_load(load: dict[str, Any]) -> None:
    """Refuse a load that lacks a number, or holds something else in its place."""
    *times, names = FURTHER_LOAD_FIELDS
    for name in (*LOAD_FIELDS, *(name for name in times if name in load)):
        value: Any = load.get(name)
        if not _is_number(value) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"not a result: load: {name}: got {value!r}, takes a finite number")
    if not load["capacity"] > 0:
        raise ValueError(f"not a result: load: capacity: got {load['capacity']}, takes more than 0")
    if not isinstance(load.get(names, []), list):
        raise ValueError(f"not a result: load: {names}: got {load[names]!r}, takes a list of names")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_NUMBER, _NONE = (int, float), (type(None),)
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, *_NONE),
    "int": (int,),
    "float": _NUMBER,
    "float | None": (*_NUMBER, *_NONE),
    "list[float] | None": (list, *_NONE),
    "dict[str, str]": (dict,),
    "dict[str, Any]": (dict,),
    "dict[str, Any] | None": (dict, *_NONE),
}


def case_fields(case: BenchCase) -> dict[str, Any]:
    """The numbers of a case, as result files hold them."""
    return {name: getattr(case, name) for name in CASE_FIELDS}


def record(
    case: BenchCase,
    which_pass: str,
    timings: Mapping[str, Timing],
    device: torch.device,
    peaks: Mapping[str, float] | None = None,
    errors: Mapping[str, Mapping[str, float]] | None = None,
    moves: Mapping[str, int] | None = None,
) -> list[Result]:
    """The results of one run: of all that took turns in one pass of a case.

    moves: bytes that a peer moves, where these are not the case's own.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    run = f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
    operates, reads = which_pass in PASSES, which_pass == "decode"  # which computes little
    checked = "forward" if which_pass == "decode" else which_pass
    results = []
    for who, timing in timings.items():
        seconds = timing.median_ms / 1e3
        results.append(
            Result(
                date=f"{now:%Y-%m-%dT%H:%M:%SZ}",
                commit=commit(),
                device=device_name(device),
                threads=torch.get_num_threads(),
                versions=versions(),
                case=case_fields(case),
                which_pass=which_pass,
                who=who,
                run=run,
                peak_mb=(peaks or {}).get(who),
                **asdict(timing),
                tflops=case.flops(which_pass) / seconds / 1e12 if operates else None,
                gbps=(moves or {}).get(who, case.bytes) / seconds / 1e9 if reads else None,
                error=(errors or {}).get(who, {}).get(checked),
            )
        )
    return results


class Absence(NamedTuple):
    """Why a peer has no time, or no memory, in a case."""

    case: str
    who: str
    reason: str


def first_line(error: Exception) -> str:
    """The first line of what an exception says, cut to what fits in a footnote."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else "no message"


def append(path: Path, results: Iterable[Result]) -> None:
    """Add results to a file, which is made with its folders where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(result.line() + "\n" for result in results)


def read(path: Path) -> list[Result]:
    """All results of a file.

    Raises:
        ValueError: naming the line that is no result.
    """
    results = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a result file: {error}") from error
    lines = text.split("\n")  # nothing else ends a line: a name may hold U+2028
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        try:
            results.append(Result.parse(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return results


def files_of(path: Path) -> list[Path]:
    """The file itself, or every result file of a folder and of the folders in it."""
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*.jsonl"))
    if not files:
        raise ValueError(f"{path} holds no result files: *.jsonl, as --json writes them")
    return files


def runs_of(results: Sequence[Result]) -> dict[tuple[str, str], list[dict[str, Result]]]:
    """For each case and pass, its runs, the last one last, each as results by peer."""
    runs: dict[tuple[str, str], dict[str, dict[str, Result]]] = {}
    for result in results:
        case_and_pass = (result.case["name"], result.which_pass)
        runs.setdefault(case_and_pass, {}).setdefault(result.run, {})[result.who] = result
    return {case_and_pass: list(members.values()) for case_and_pass, members in runs.items()}


def latest(results: Sequence[Result]) -> dict[tuple[str, str], dict[str, Result]]:
    """For each case and pass, its last run, as results by peer."""
    return {case_and_pass: runs[-1] for case_and_pass, runs in runs_of(results).items()}
