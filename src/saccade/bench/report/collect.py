"""Collect: result files become what the page shows, beside the most that a machine can do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from saccade.bench.case import SHORT_DTYPES
from saccade.bench.peers import all_peers
from saccade.bench.results import Result, files_of, read, runs_of


@dataclass(frozen=True)
class Limit:
    """What a device can do at most.

    Attributes:
        device: its name, as PyTorch gives it.
        tflops: by dtype. Of half precision: tensor cores, without sparsity. Of float32: without
            tensor cores, whose tf32 has too few bits to be float32.
        gbps: of its memory.
        source: where the numbers come from.
    """

    device: str
    tflops: Mapping[str, float]
    gbps: float
    source: str

    def most(self, result: Result) -> float | None:
        """The most that a result's rate can be, in its own unit; None where that is unknown."""
        return self.gbps if result.gbps is not None else self.tflops.get(result.case["dtype"])


def _nvidia(device: str, half: float, single: float, gbps: float) -> Limit:
    tflops = {"bfloat16": half, "float16": half, "float32": single}
    return Limit(device, tflops, gbps, "NVIDIA's data sheet")


LIMITS = (
    _nvidia("NVIDIA H200", 989.5, 67.0, 4800.0),
    _nvidia("NVIDIA H100 80GB HBM3", 989.5, 67.0, 3350.0),
    _nvidia("NVIDIA A100-SXM4-80GB", 312.0, 19.5, 2039.0),
    _nvidia("NVIDIA A100-SXM4-40GB", 312.0, 19.5, 1555.0),
)


def limit_of(device: str) -> Limit | None:
    """The limit of a device; None of one that is not in the table."""
    return next((limit for limit in LIMITS if limit.device == device), None)


# Peers that are saccade: what it chooses, and its kernels where they are asked for by name.
OURS = ("saccade/", "triton/", "hopper/")


class Source(NamedTuple):
    """Results, and the name of where they come from."""

    label: str
    results: list[Result]


class Point(NamedTuple):
    """Somebody's last result in a case and pass of a source, beside what it is judged by.

    Attributes:
        source: the number of its source.
        machine: the device, with its threads where these matter.
        kind: what is visible, in words.
        limit: of the machine; None where it is unknown.
        share: of that limit, 0 to 1; None where it is unknown, and of what has no rate.
        against_fastest: the time over that of the fastest in its run.
        members: everybody's results in its run.
    """

    source: int
    machine: str
    kind: str
    result: Result
    limit: Limit | None
    share: float | None
    against_fastest: float
    members: dict[str, Result]


def gather(path: Path) -> list[Source]:
    """The results of a file, or of every file of a folder and the folders in it.

    Raises:
        ValueError: for a line that is no result, and where there are no results at all.
    """
    root = path if path.is_dir() else path.parent
    sources = [Source(file.relative_to(root).as_posix(), read(file)) for file in files_of(path)]
    kept = [source for source in sources if source.results]
    if not kept:
        raise ValueError(f"{path} holds no results; --json writes some")
    return kept


def points(sources: Sequence[Source]) -> list[Point]:
    """The last result of everybody in each case and pass, source by source, machine by machine."""
    found = []
    idle = yardsticks()
    for index, source in enumerate(sources):
        for machine, results in by_machine([source]).items():
            for runs in runs_of(results).values():
                # Who is not in the last run has its last result, and its company, in an older one.
                last = {who: members for members in runs for who in members}
                found += [
                    _point(index, machine, members[who], members, idle)
                    for who, members in last.items()
                ]
    return found


def _point(
    source: int,
    machine: str,
    result: Result,
    members: dict[str, Result],
    idle: frozenset[str],
) -> Point:
    times = [member.median_ms for who, member in members.items() if who not in idle]
    fastest = min(times or [member.median_ms for member in members.values()])
    limit, rate = limit_of(result.device), rate_of(result)
    most = limit.most(result) if limit else None
    return Point(
        source, machine, kind_of(result), result, limit,
        rate[0] / most if rate and most else None, result.median_ms / fastest, members,
    )  # fmt: skip


def by_machine(sources: Sequence[Source]) -> dict[str, list[Result]]:
    """The results of all sources, machine by machine."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for source in sources:
        for result in source.results:
            groups[machine_of(result)].append(result)
    return groups


def yardsticks() -> frozenset[str]:
    """Who is timed to compare with, and computes no attention."""
    return frozenset(peer.who for peer in all_peers() if not peer.computes_attention)


def is_ours(who: str) -> bool:
    """Whether it is one of saccade's implementations; the reference is not there to be fast."""
    return who.startswith(OURS) and who != "saccade/reference"


def machine_of(result: Result) -> str:
    """The device; threads are of no matter where a GPU computes."""
    if "cuda" in result.versions and not result.case["name"].startswith("cpu-"):
        return result.device
    return f"{result.device}, {result.threads} thread{'s' if result.threads != 1 else ''}"


def kind_of(result: Result) -> str:
    """The mask, and behind it what else the case's name says: packed, grouped, decode ..."""
    case = result.case
    words = case["name"].split("-")
    dtype = SHORT_DTYPES.get(case["dtype"], case["dtype"])
    label = "-".join(words[1 : words.index(dtype)] if dtype in words else words[1:])
    mask = case["mask"].replace(" ", "")
    return case["mask"] if not label or label in mask else f"{case['mask']} ({label})"


def rate_of(result: Result) -> tuple[float, str] | None:
    """A result's throughput and its unit, where it has one."""
    if result.gbps is not None:
        return result.gbps, "GB/s"
    return None if result.tflops is None else (result.tflops, "TFLOP/s")


def chart_data(sources: Sequence[Source], found: Sequence[Point]) -> dict[str, Any]:
    """What the page's charts draw, as JSON; charts.js reads these names."""
    runs: dict[str, int] = {}
    rows = []
    for point in found:
        result, rate = point.result, rate_of(point.result)
        if rate is None:
            continue
        case, limit = result.case, point.limit
        dims = (case["head_dim"], case["value_dim"])
        rows.append(
            {
                "machine": point.machine,
                "kind": point.kind,
                "dtype": case["dtype"],
                "dim": str(dims[0]) if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}",
                "pass": result.which_pass,
                "source": point.source,
                "run": runs.setdefault(result.run, len(runs)),
                "date": result.date,
                "case": case["name"],
                "who": result.who,
                "ours": result.who.startswith(OURS),
                "length": case["kv_len"],
                "heads": heads_text(result),
                "ms": result.median_ms,
                "rate": rate[0],
                "unit": rate[1],
                "share": point.share,
                "limit": limit.most(result) if limit else None,
                "limitSource": limit.source if limit else None,
                "error": result.error,
                "mb": result.peak_mb,
                "ratio": point.against_fastest,
            }
        )
    return {"sources": [source.label for source in sources], "points": rows}


def heads_text(result: Result) -> str:
    """Batch entries and heads: 4 × 32/8."""
    case = result.case
    heads = (case["query_heads"], case["kv_heads"])
    text = str(heads[0]) if heads[0] == heads[1] else f"{heads[0]}/{heads[1]}"
    return f"{case['batch']} × {text}"
