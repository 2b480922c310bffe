"""Selection: names and globs, as a user types them, turned into cases and peers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from saccade.bench.case import SHORT_DTYPES, BenchCase
from saccade.bench.cases import CASES, DEFAULT_CASES
from saccade.bench.peers import Peer
from saccade.bench.results import PASSES


def split(values: Iterable[str]) -> list[str]:
    """The names in options that may be given several times and may hold commas."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def machine(device_type: str) -> str:
    """The first word of the names of cases that are meant for a device."""
    return "cpu" if device_type == "cpu" else "gpu"


def listed_cases(device_type: str) -> list[BenchCase]:
    """The cases that are meant for a device."""
    return [case for case in CASES.values() if case.name.startswith(f"{machine(device_type)}-")]


def choose_cases(
    patterns: Sequence[str], dtypes: Sequence[str], device_type: str
) -> list[BenchCase]:
    """The cases that names and globs stand for, in the order of the list.

    A glob such as ``*-d64-*`` takes cases meant for this device only; ``gpu-*`` and a full name
    say what they mean.

    Raises:
        ValueError: for a name or glob that no case has, listing those that exist.
    """
    names = list(patterns) or list(DEFAULT_CASES[machine(device_type)])
    here = [case.name for case in listed_cases(device_type)]
    chosen: set[str] = set()
    for pattern in names:
        says_machine = pattern.split("-")[0] in {"cpu", "gpu", "tiny"}
        found = _matching(pattern, list(CASES) if says_machine else here)
        if not found:
            raise ValueError(_unknown("case", pattern, here))
        chosen.update(found)
    wanted = _long_dtypes(dtypes)
    cases = [case for case in CASES.values() if case.name in chosen]
    kept = [case for case in cases if not wanted or case.dtype in wanted]
    if not kept:
        there = ", ".join(sorted({case.dtype for case in cases}))
        raise ValueError(f"no chosen case has dtype {', '.join(dtypes)}; they have {there}")
    return kept


def choose_peers(patterns: Sequence[str], peers: Sequence[Peer]) -> list[Peer]:
    """The peers that names and globs stand for; those of a normal run where none is named.

    Raises:
        ValueError: for a name or glob that no peer has, listing those that exist.
    """
    if not patterns:
        return [peer for peer in peers if peer.by_default]
    names = [peer.who for peer in peers]
    chosen: set[str] = set()
    for pattern in patterns:
        found = _matching(pattern, names)
        if not found:
            raise ValueError(_unknown("peer", pattern, names))
        chosen.update(found)
    return [peer for peer in peers if peer.who in chosen]


def choose_passes(asked: Sequence[str]) -> tuple[str, ...]:
    """The passes that names stand for; "both", as where none is named, is forward alone and all.

    Raises:
        ValueError: for a pass that does not exist.
    """
    passes: list[str] = []
    for name in asked or ("both",):
        if name != "both" and name not in PASSES:
            raise ValueError(f"no pass is named {name!r}; there are {', '.join(PASSES)}, both")
        passes += ("forward", "forward+backward") if name == "both" else (name,)
    return tuple(dict.fromkeys(passes))


def passes_of(case: BenchCase, passes: Sequence[str]) -> tuple[str, ...]:
    """Which of the passes a case has; a single query row, say, has a forward pass only."""
    if case.decodes:
        return ("decode",) if "forward" in passes else ()
    if case.attention == "paged":  # nobody trains on pages
        return tuple(name for name in passes if name == "forward")
    if case.memory_matters:  # training is what needs memory
        return tuple(name for name in passes if name == "forward+backward")
    return tuple(passes)


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _long_dtypes(dtypes: Sequence[str]) -> set[str]:
    long = {short: dtype for dtype, short in SHORT_DTYPES.items()}
    long |= {dtype: dtype for dtype in SHORT_DTYPES}
    for name in dtypes:
        if name not in long:
            takes = ", ".join(f"{short} ({dtype})" for dtype, short in SHORT_DTYPES.items())
            raise ValueError(f"no dtype is named {name!r}; there are {takes}")
    return {long[name] for name in dtypes}


def _unknown(kind: str, pattern: str, names: Sequence[str]) -> str:
    """One message for all: what is unknown, what looks like it, and everything that exists."""
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"no {kind} is named {pattern!r}.{hint} There are: {', '.join(folded(names))}"


def folded(names: Sequence[str]) -> list[str]:
    """Names with what follows their last hyphen gathered: a-b-1 and a-b-2 as a-b-{1,2}."""
    endings: dict[str, list[str]] = {}
    for name in names:
        stem, _, ending = name.rpartition("-")
        endings.setdefault(stem, []).append(ending)
    folded = []
    for stem, found in endings.items():
        if not stem:
            folded += found
        else:
            folded.append(f"{stem}-{found[0] if len(found) == 1 else '{' + ','.join(found) + '}'}")
    return folded
