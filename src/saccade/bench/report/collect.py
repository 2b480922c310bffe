"""From result files to the points that the page shows, beside the most that a machine can do."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from saccade.bench.case import one_or_both
from saccade.bench.peers import all_peers
from saccade.bench.results import OURS, Result, files_of, read, runs_of


@dataclass(frozen=True)
class Limit:
    """The highest rates of a device.

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
    source: str = "NVIDIA's data sheet"

    def most(self, result: Result) -> float | None:
        """The most that a result's rate can be, in its own unit; None where that is unknown."""
        return self.gbps if result.gbps is not None else self.tflops.get(result.case["dtype"])


HOPPER = {"bfloat16": 989.5, "float16": 989.5, "float32": 67.0}
AMPERE = {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5}
LIMITS = (
    Limit("NVIDIA H200", HOPPER, 4800.0),
    Limit("NVIDIA H100 80GB HBM3", HOPPER, 3350.0),
    Limit("NVIDIA A100-SXM4-80GB", AMPERE, 2039.0),
    Limit("NVIDIA A100-SXM4-40GB", AMPERE, 1555.0),
)


def limit_of(device: str) -> Limit | None:
    """The limit of a device; None of one that is not in the table."""
    return next((limit for limit in LIMITS if limit.device == device), None)


class Source(NamedTuple):
    """Results, and the name of where they come from."""

    label: str
    results: list[Result]


class Point(NamedTuple):
    """A peer's last result in a case and pass of a source, beside what it is compared with.

    Attributes:
        source: the number of its source.
        limit: of the machine; None where it is unknown.
        share: of that limit, 0 to 1; None where it is unknown, and of what has no rate.
        against_fastest: the time over that of the fastest in its run.
        members: the results of all peers in its run.
    """

    source: int
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
    """The last result of each peer in each case and pass, source by source, machine by machine."""
    return [
        _point(index, members[who], members)
        for index, source in enumerate(sources)
        for results in by_machine([source]).values()
        for runs in runs_of(results).values()
        # A peer that is not in the last run has its last result, and its company, in an older one.
        for who, members in {who: members for members in runs for who in members}.items()
    ]


def _point(source: int, result: Result, members: dict[str, Result]) -> Point:
    times = [member.median_ms for who, member in members.items() if who not in yardsticks()]
    fastest = min(times or [member.median_ms for member in members.values()])
    limit = limit_of(result.device)
    most = limit.most(result) if limit and result.unit else None
    share = result.rate / most if most else None
    return Point(source, result, limit, share, result.median_ms / fastest, members)


def by_machine(sources: Sequence[Source]) -> dict[str, list[Result]]:
    """The results of all sources, machine by machine."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for source in sources:
        for result in source.results:
            groups[result.machine].append(result)
    return groups


@functools.cache
def yardsticks() -> frozenset[str]:
    """Peers that are timed to compare with, and compute no attention."""
    return frozenset(peer.who for peer in all_peers() if not peer.computes_attention)


def chart_data(sources: Sequence[Source], found: Sequence[Point]) -> dict[str, Any]:
    """What the page's charts draw, as JSON; charts.js reads these names."""
    runs: dict[str, int] = {}
    rows = []
    for point in found:
        result, case, limit = point.result, point.result.case, point.limit
        if not result.unit:
            continue
        rows.append(
            {
                "machine": result.machine,
                "kind": result.kind,
                "dtype": case["dtype"],
                "dim": one_or_both(case["head_dim"], case["value_dim"]),
                "pass": result.which_pass,
                "source": point.source,
                "run": runs.setdefault(result.run, len(runs)),
                "date": result.date,
                "case": case["name"],
                "who": result.who,
                "ours": result.who.startswith(OURS),
                "length": case["kv_len"],
                "heads": f"{case['batch']} × {one_or_both(case['query_heads'], case['kv_heads'])}",
                "ms": result.median_ms,
                "rate": result.rate,
                "unit": result.unit,
                "share": point.share,
                "limit": limit.most(result) if limit else None,
                "limitSource": limit.source if limit else None,
                "error": result.error,
                "mb": result.peak_mb,
                "ratio": point.against_fastest,
            }
        )
    return {"sources": [source.label for source in sources], "points": rows}
