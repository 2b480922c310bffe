"""Tuned configs: the user's own table of configs, which `saccade tune --save` writes.

It is a JSON file and holds one table for each architecture that was tuned:

    {"version": 1, "tables": [{"architecture": "sm_90", "device": "NVIDIA H200", "triton": "3.6.0",
      "entries": [{"which": "forward", "width": 128, "wide": false, "masked": true,
                   "dropout": false, "listed": false, "short": false, "config": [64, 64, 4, 3]}]}]}
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.configs import KernelProblem
from saccade.runtime.spec import KernelConfig

VERSION = 1
FLAGS = ("wide", "masked", "dropout", "listed", "short")


class ConfigTable(NamedTuple):
    """What was found on one device."""

    architecture: str
    device: str
    triton: str
    entries: dict[KernelProblem, KernelConfig]


def path() -> Path | None:
    """Where the file is looked for: $SACCADE_CONFIGS, or in the user's folder of settings.

    None where $SACCADE_CONFIGS is empty, which turns the table off.
    """
    given = os.environ.get("SACCADE_CONFIGS")
    if given is not None:
        return Path(given).expanduser() if given else None
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "saccade" / "configs.json"


@functools.cache
def load() -> Mapping[KernelProblem, KernelConfig]:
    """The configs of the user's own table, read once; nothing if there is no file.

    Raises:
        ValueError: naming the file, what is wrong with it, and how to get rid of it.
    """
    file = path()
    if file is None:
        return {}
    return {
        problem: config
        for table in read(file).values()
        for problem, config in table.entries.items()
    }


def read(file: Path) -> dict[str, ConfigTable]:
    """The tables of a file by architecture; none if there is no file.

    Raises:
        ValueError: as `load`.
    """
    try:
        tables = [_table(table) for table in _tables(json.loads(file.read_text(encoding="utf-8")))]
    except FileNotFoundError:
        return {}
    except OSError as error:  # a folder, or a file of somebody else
        raise ValueError(
            f"{file}: cannot be read: {error.strerror}. $SACCADE_CONFIGS names another file"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:  # of text, of JSON or of what it holds
        raise ValueError(
            f"{file}: {error}. Delete the file, or write it anew with `saccade tune --save`"
        ) from None
    return {table.architecture: table for table in tables}


def save(file: Path, found: ConfigTable) -> Path | None:
    """Add what was found to a file; entries for other problems stay.

    A file that cannot be read is put aside under the name that this returns.
    """
    aside = None
    try:
        tables = read(file)
    except ValueError:
        if not file.is_file():  # a folder is not ours to put aside
            raise
        tables, aside = {}, file.with_name(f"{file.name}.broken")
        file.replace(aside)
    before = tables.get(found.architecture)
    kept = {} if before is None else before.entries
    tables[found.architecture] = found._replace(entries={**kept, **found.entries})
    text = json.dumps({"version": VERSION, "tables": list(map(_plain, tables.values()))}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(f"{text}\n", encoding="utf-8")
    fresh.replace(file)  # a reader sees the old file or the new one
    load.cache_clear()
    return aside


def _plain(table: ConfigTable) -> dict[str, Any]:
    entries = [
        {
            "which": problem.which, "width": problem.width,
            **{name: getattr(problem, name) for name in FLAGS}, "config": config.numbers()[:4],
        }
        for problem, config in sorted(table.entries.items())
    ]  # fmt: skip
    return {**table._asdict(), "entries": entries}


def _tables(document: Any) -> list[Any]:
    _fields("the file", document, ("version", "tables"))
    if document["version"] != VERSION:
        raise ValueError(f"version: got {document['version']!r}, takes {VERSION}")
    return _list("tables", document["tables"])


def _table(plain: Any) -> ConfigTable:
    _fields("a table", plain, ConfigTable._fields)
    architecture = plain["architecture"]
    if architecture not in configs.ARCHITECTURES:
        known = ", ".join(configs.ARCHITECTURES)
        raise ValueError(f"architecture: got {architecture!r}, takes one of {known}")
    entries = dict(_entry(architecture, entry) for entry in _list("entries", plain["entries"]))
    return ConfigTable(architecture, str(plain["device"]), str(plain["triton"]), entries)


def _entry(architecture: str, plain: Any) -> tuple[KernelProblem, KernelConfig]:
    _fields("an entry", plain, ("which", "width", *FLAGS, "config"))
    if plain["which"] not in configs.PASSES:
        raise ValueError(f"which: got {plain['which']!r}, takes one of {', '.join(configs.PASSES)}")
    if plain["width"] not in configs.WIDTHS:
        raise ValueError(f"width: got {plain['width']!r}, takes one of {configs.WIDTHS}")
    for name in FLAGS:
        if not isinstance(plain[name], bool):
            raise ValueError(f"{name}: got {plain[name]!r}, takes true or false")
    numbers = _list("config", plain["config"])
    if len(numbers) != 4 or not all(numbers):
        raise ValueError(f"config: got {numbers}, takes two tiles, warps and stages")
    config = KernelConfig(*numbers)
    configs.check(config)
    flags = {name: plain[name] for name in FLAGS}
    return KernelProblem(architecture, plain["which"], plain["width"], **flags), config


def _fields(what: str, plain: Any, names: tuple[str, ...]) -> None:
    got = sorted(plain) if isinstance(plain, dict) else plain
    if got != sorted(names):
        raise ValueError(f"{what}: got {got!r}, takes fields {', '.join(names)}")


def _list(name: str, plain: Any) -> list[Any]:
    if not isinstance(plain, list):
        raise ValueError(f"{name}: got {plain!r}, takes a list")
    return plain
