"""Write the tables of measurements of README.md and of pages in docs/ from the result files alone.

Usage: python tools/readme_table.py [--check] [ROOT]

Rewrites what stands between ``<!-- table: begin -->`` and ``<!-- table: end -->`` in both from
benchmarks/results/*/*.jsonl. With --check nothing is written, and the exit status is 1 if a page
differs from what the files give. Globs of case names in the first mark choose rows,
`against=` the peer that Saccade stands beside (sdpa, if it is not given), `by=` one of its
implementations (the fastest of each run, if it is not given), and `from=` a glob of files:

    <!-- table: begin cpu-*-4k cpu-decode-* -->
    <!-- table: begin against=sdpa/flash by=triton from=h200/triton.jsonl gpu-causal-* -->

The word `summary` writes one sentence instead, with geometric means over the cases and the worst:

    <!-- table: begin summary against=sdpa/cudnn,sdpa/flash by=hopper from=h200/hopper.jsonl -->

The line below a table says how many measured rows are not shown, and the worst ratio of all.
Memory has columns where it was measured. Training steps have a table of their own: tokens a second,
and how far losses and gradient norms of the first steps lie apart.
"""

from __future__ import annotations

import json
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

REGION = re.compile(r"(<!-- table: begin([^>]*?)-->\n)(.*?)(<!-- table: end -->)", re.DOTALL)
RESULTS = "benchmarks/results"
PAGES = ("README.md", "docs/measured.md", "docs/which.md")
AGAINST, BY, FROM = "against=", "by=", "from="
TIMES = "| case | pass | Saccade ms | {0} ms | Saccade / {0} |", "|---|---|---:|---:|---:|"
MEMORY = " Saccade MB | {0} MB |", "---:|---:|"
STEPS = (
    "| case | batch | pass | Saccade tokens/s | {0} tokens/s | time, Saccade / {0} "
    "| Saccade GB | {0} GB |",
    "|---|---:|---|---:|---:|---:|---:|---:|",
)


class Row(NamedTuple):
    """Saccade beside a peer in one run of one case and pass."""

    case: str
    which_pass: str
    saccade: dict[str, Any]
    peer: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Saccade's time over the peer's."""
        return self.saccade["median_ms"] / self.peer["median_ms"]

    @property
    def has_memory(self) -> bool:
        """Whether memory was measured beside the time."""
        return "peak_mb" in self.saccade or "peak_mb" in self.peer

    @property
    def of_training(self) -> bool:
        """Whether it stands for training steps, which are shown by tokens a second."""
        return "tokens_per_second" in self.saccade and "tokens_per_second" in self.peer

    def step_cells(self) -> str:
        """A line of the table of training steps."""
        both = self.saccade, self.peer
        rates = [result["tokens_per_second"] for result in both]
        cells = [
            f"`{self.case}`",
            str(self.saccade["case"]["batch"]),
            self.which_pass,
            *(f"{rate:,.0f}" for rate in rates),
            f"{self.ratio:.2f}",
            *(f"{result['peak_mb'] / 1e3:.1f}" if "peak_mb" in result else "–" for result in both),
        ]
        return f"| {' | '.join(cells)} |\n"

    def cells(self, memory: bool) -> str:
        """A line of the table."""
        cells = [
            f"`{self.case}`",
            self.which_pass,
            _milliseconds(self.saccade),
            _milliseconds(self.peer),
            f"{self.ratio:.2f}",
        ]
        if memory:
            cells += [_megabytes(self.saccade), _megabytes(self.peer)]
        return f"| {' | '.join(cells)} |\n"


def rows_of(path: Path, peer: str, by: str) -> list[Row]:
    """The last run of each case and pass in which a peer and Saccade (`by`) both took part."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    places: dict[tuple[str, str], str] = {}
    for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):
        result = json.loads(line)
        if "run" not in result:  # not written by the bench
            continue
        members = runs.setdefault(result["run"], {})
        members[result["who"]] = result
        if peer in members and _ours(members, by):
            places[result["case"]["name"], result["pass"]] = result["run"]
    return [
        Row(case, which_pass, _ours(runs[run], by)[0], runs[run][peer])
        for (case, which_pass), run in places.items()
    ]


def _ours(members: dict[str, dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Saccade's implementations in a run, the fastest first; the reference is no contestant."""
    ours = [
        result
        for who, result in members.items()
        if fnmatchcase(who, f"saccade/{by}") and who != "saccade/reference"
    ]
    return sorted(ours, key=lambda result: result["median_ms"])


def table(root: Path, words: list[str]) -> str:
    """The Markdown between the marks."""
    peer, words = _option(words, AGAINST, "sdpa")
    by, words = _option(words, BY, "*")
    files, globs = _option(words, FROM, "*/*.jsonl")
    if "summary" in words:
        return "".join(_summary(root, path, peer, by) for path in root.glob(f"{RESULTS}/{files}"))
    parts = []
    for path in sorted(root.glob(f"{RESULTS}/{files}")):
        rows = rows_of(path, peer, by)
        shown = [row for row in rows if not globs or any(fnmatchcase(row.case, g) for g in globs)]
        steps = [row for row in shown if row.of_training]
        others = [row for row in shown if not row.of_training]
        if others:
            memory = any(row.has_memory for row in others)
            head = [times + more * memory for times, more in zip(TIMES, MEMORY, strict=True)]
            lines = "\n".join(head).format(peer.replace("sdpa", "SDPA"))
            text = f"{lines}\n{''.join(row.cells(memory) for row in others)}"
            note = "; memory at the worst moment beyond the inputs, where it was measured" * memory
            parts.append(f"{text}\n{_source(path.relative_to(root), rows, others, note)}\n")
        if steps:
            lines = "\n".join(STEPS).format(peer.replace("sdpa", "SDPA"))
            text = f"{lines}\n{''.join(row.step_cells() for row in steps)}"
            note = f" of steps; GB: all that is allocated at the worst moment. {_course(steps)}"
            parts.append(f"{text}\n{_source(path.relative_to(root), rows, steps, note)}\n")
    return "\n".join(parts) or "Nothing has been measured yet.\n"


def _summary(root: Path, path: Path, peers: str, by: str) -> str:
    """One sentence: the mean and the worst ratio to each peer, by passes."""
    name, parts, rows = path.relative_to(root).as_posix(), [], []
    for peer in peers.split(","):
        rows = rows_of(path, peer, by)
        passes = dict.fromkeys(row.which_pass for row in rows)
        ratios = {one: [row.ratio for row in rows if row.which_pass == one] for one in passes}
        said = " and ".join(
            f"{geometric_mean(found):.2f} {which_pass} (at most {max(found):.2f})"
            for which_pass, found in ratios.items()
        )
        parts.append(f"of {peer.replace('sdpa', 'SDPA')}'s time it takes {said}")
    cases = len({row.case for row in rows})
    device = rows[-1].saccade["device"]
    return (
        f"On one {device}, in the mean of {cases} cases, {'; '.join(parts)} ([{name}]({name})).\n"
    )


def _option(words: list[str], name: str, default: str) -> tuple[str, list[str]]:
    """What follows `name` in the last of the words that begin so, and the other words."""
    found = [word.removeprefix(name) for word in words if word.startswith(name)]
    return (found or [default])[-1], [word for word in words if not word.startswith(name)]


def _course(steps: list[Row]) -> str:
    """How far what the first steps computed lies from what the peer's did."""
    distances = []
    for name in ("losses", "gradient_norms"):
        pairs = [
            pair for row in steps for pair in zip(row.saccade[name], row.peer[name], strict=True)
        ]
        distances.append(max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs))
    return "Losses of the first steps differ by at most {:.0e}, gradient norms by {:.0e}".format(
        *distances
    )


def _source(path: Path, rows: list[Row], shown: list[Row], note: str) -> str:
    """Where the numbers come from, and what the table leaves out."""
    newest = max((row.saccade for row in rows), key=lambda result: result["date"])
    name = path.as_posix()
    text = (
        f"From [{name}]({name}): {newest['device']}, {newest['threads']} threads, "
        f"torch {newest['versions']['torch']}, {newest['date'][:10]}. Medians{note}."
    )
    if len(shown) < len(rows):
        worst = max(rows, key=lambda row: row.ratio)
        verb = "is" if len(shown) == 1 else "are"
        text += (
            f" Shown {verb} {len(shown)} of {len(rows)} measurements; the worst ratio of all is "
            f"{worst.ratio:.2f} (`{worst.case}`, {worst.which_pass})."
        )
    return text


def rewritten(text: str, root: Path, page: str = PAGES[0]) -> str:
    """A page with its tables made anew.

    Raises:
        ValueError: if it has no marks.
    """
    if not REGION.search(text):
        raise ValueError(f"{page} has no <!-- table: begin --> ... <!-- table: end -->")
    up = "../" * page.count("/")

    def region(found: re.Match[str]) -> str:
        made = table(root, found[2].split()).replace(f"]({RESULTS}", f"]({up}{RESULTS}")
        return f"{found[1]}\n{made}\n{found[4]}"

    return REGION.sub(region, text)


def _milliseconds(result: dict[str, Any]) -> str:
    value = result["median_ms"]
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _megabytes(result: dict[str, Any]) -> str:
    return f"{result['peak_mb']:.0f}" if "peak_mb" in result else "–"


def main(arguments: list[str]) -> int:
    """Write the pages that there are, or say whether they are as they should be."""
    roots = [argument for argument in arguments if argument != "--check"]
    root = Path(roots[0]) if roots else Path(__file__).parent.parent
    same = True
    for page in PAGES:
        path = root / page
        if page != PAGES[0] and not path.exists():
            continue
        before = path.read_text(encoding="utf-8")
        try:
            after = rewritten(before, root, page)
        except ValueError as error:
            print(f"readme table: {error}")
            return 1
        same = same and before == after
        if "--check" not in arguments:
            path.write_text(after, encoding="utf-8")
    if "--check" not in arguments:
        print("readme table: written")
        return 0
    told = "as the result files give it" if same else "differs; run tools/readme_table.py"
    print(f"readme table: {told}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
