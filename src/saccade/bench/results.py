"""Results: one JSON object a line for each thing that was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.bench.cases import Case

CASE_FIELDS = (
    "name", "batch", "query_heads", "kv_heads", "query_len", "kv_len",
    "head_dim", "value_dim", "dtype", "mask",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What was measured of one peer in one pass of one case.

    Attributes:
        date: UTC, to the second.
        commit: of saccade's source; None outside of a checkout.
        case: the case's fields, by name.
        which_pass: "forward", "backward", "forward+backward" or "decode"; "pass" in files.
        tflops, gbps: operations on visible pairs, or for decoding the least bytes, a second.
        run: the same for all that took turns; only within one run are times comparable.
        peak_mb: memory at the worst moment beyond the inputs, where it was measured.
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

    def line(self) -> str:
        """The result as it stands in a file; fields that were not measured are left out."""
        fields = asdict(self)
        fields["pass"] = fields.pop("which_pass")
        kept = {name: value for name, value in fields.items() if value is not None}
        kept.setdefault("commit", None)
        return json.dumps(kept, ensure_ascii=False)

    @staticmethod
    def parse(line: str) -> Result:
        """The result that a line holds.

        Raises:
            ValueError: for a line that is no result.
        """
        try:
            fields = dict(json.loads(line))
            return Result(which_pass=fields.pop("pass"), **fields)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"not a result: {error}") from error


def case_fields(case: Case) -> dict[str, Any]:
    """The numbers of a case, as result files hold them."""
    return {name: getattr(case, name) for name in CASE_FIELDS}


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
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            results.append(Result.parse(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return results


def latest(results: Sequence[Result]) -> dict[tuple[str, str], dict[str, Result]]:
    """For each case and pass, its last run: who took part, and with what result."""
    runs: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:
        place = (result.case["name"], result.which_pass)
        members = runs.get(place, {})
        if any(member.run != result.run for member in members.values()):
            members = {}
        runs[place] = {**members, result.who: result}
    return runs
