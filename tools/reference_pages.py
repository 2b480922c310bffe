"""Make the pages of the reference, one for each public name, and look whether the site has all.

Usage: python tools/reference_pages.py [--out FOLDER]     write the pages
       python tools/reference_pages.py --check [SITE]     look at the built site

Signatures, types, sections and source come from the docstrings, by mkdocstrings, when the site is
built. Exits with 1 where a public name has no docstring or page, or the site's search lacks it.
As a hook of mkdocs (mkdocs.yml) this file puts the pages into the navigation.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs imports this file by its path
from public_names import (
    CHAPTERS,
    GIVEN_BY,
    INTEGRATIONS,
    OF_PYTORCH,
    ROOT,
    Chapter,
    definition,
    docstring_of_module,
    documented,
    public_names,
)

FOLDER = "reference"
INTRODUCTION = ROOT / "docs/reference.md"
NAMES_FOLLOW = "<!-- names -->"


def faults() -> list[str]:
    """Public names that have no docstring or no page."""
    listed = {(chapter.module, name) for chapter in CHAPTERS for name in chapter.names}
    found = []
    for module, name in public_names():
        if (module, name) not in listed:
            found.append(f"{module}.{name} has no page: list it in public_names.CHAPTERS")
        if not any(one.text for one in documented(module, name)):
            found.append(f"{module}.{name} has no docstring")
    return found


def write(out: Path) -> None:
    """Write all pages below a folder of pages."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for chapter in CHAPTERS:
        for name in chapter.names:
            full = f"{chapter.module}.{name}"
            (folder / f"{full}.md").write_text(page(chapter.module, name), encoding="utf-8")
    first = folder / "index.md"  # site_pages.py puts the introduction there, with links that hold
    found = (first if first.exists() else INTRODUCTION).read_text(encoding="utf-8")
    introduction = found.partition(NAMES_FOLLOW)[0] + NAMES_FOLLOW + "\n"
    first.write_text("\n".join([introduction, *index()]), encoding="utf-8")


def page(module: str, name: str) -> str:
    """The page of a name, which mkdocstrings fills."""
    full = f"{module}.{name}"
    title = f"---\ntitle: {full}\n---\n\n"
    where = definition(module, name)
    if full in OF_PYTORCH:
        origin = f"PyTorch's own `{'.'.join(where)}`, here under the same name."
        return f"{title}# {full}\n\n{origin} {as_markdown(OF_PYTORCH[full])}"
    parts = [reference_to(".".join(where), full, level=1)]
    for given in GIVEN_BY.get(full, ()):
        parts.append(reference_to(".".join(given), given.name, level=2))
    return title + "\n".join(parts)


def reference_to(path: str, heading: str, level: int) -> str:
    """What tells mkdocstrings to show an object."""
    options = f'    options:\n      heading: "{heading}"\n      toc_label: "{heading}"\n'
    return f"::: {path}\n{options}      heading_level: {level}\n"


def as_markdown(docstring: str) -> str:
    """A docstring whose examples are code."""
    text, _, example = docstring.partition("Examples:\n")
    lines = [line.strip() if not line.strip() else line[8:] for line in example.splitlines()]
    return f"{text.strip()}\n\n```pycon\n" + "\n".join(lines).strip() + "\n```\n"


def index() -> Iterator[str]:
    """What the first page of the reference has below its introduction: a table for each chapter."""
    for chapter in CHAPTERS:
        yield f"## {chapter.title}\n"
        if chapter.module != "saccade":
            first = docstring_of_module(chapter.module).splitlines()[0]
            yield f"`{chapter.module}`. {first}\n"
        rows = [row(chapter, name) for name in chapter.names]
        yield "\n".join(["| name | what it is |", "|---|---|", *rows]) + "\n"


def row(chapter: Chapter, name: str) -> str:
    """A name with a link to its page, and its docstring's first sentence."""
    text = next(documented(chapter.module, name)).text
    first = " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")
    return f"| [`{name}`]({chapter.module}.{name}.md) | {first} |"


# ---- as mkdocs and griffe want it ----------------------------------------------------------------

SECTION = re.compile(r"^(Args|Attributes):\n((?: +.*\n?|\n(?= ))+)", re.MULTILINE)
ENTRY = re.compile(r"^    (?=\S)", re.MULTILINE)
NAMES = re.compile(r"(?:^|(?<=\.) )((?!None\b)\*{0,2}\w+(?:, \*{0,2}\w+)*): ")


def split_names(text: str) -> str:
    """A docstring in which each entry of its arguments and attributes has one name.

    Docstrings here say `key, value: [batch, kv_heads, kv_len, dim].`, and `rows: [tokens, dim].
    scale: a number.` on one line, where mkdocstrings expects one name an entry.
    """
    return SECTION.sub(lambda found: f"{found[1]}:\n{_one_name_each(found[2])}", text)


def _one_name_each(body: str) -> str:
    lines = []
    text = re.sub(r"^(    (?:\w+, )*\w+,)\n +(?=\w+[:,])", r"\1 ", body, flags=re.MULTILINE)
    for entry in ENTRY.split(text):
        parts = NAMES.split(" ".join(entry.split()))  # "", names, what is said of them, names ...
        lines += [
            f"    {name}: {said}"
            for names, said in zip(parts[1::2], parts[2::2], strict=True)
            for name in names.split(", ")
        ]
    return "\n".join([*lines, ""])


def on_config(config: Any) -> Any:
    """mkdocs asks this before it builds: the reference enters the navigation."""
    chapters: list[Any] = [f"{FOLDER}/index.md"]
    integrations: list[Any] = []
    for chapter in CHAPTERS:
        pages = [f"{FOLDER}/{chapter.module}.{name}.md" for name in chapter.names]
        is_integration = chapter.module.startswith(INTEGRATIONS)
        (integrations if is_integration else chapters).append({chapter.title: pages})
    place = next(i for i, part in enumerate(config["nav"]) if "Inside" in part)
    config["nav"].insert(place, {"Reference": [*chapters, {"Integrations": integrations}]})
    return config


def check_site(found: list[dict[str, str]]) -> None:
    """Look whether search finds each public name by its own, on its own page.

    Raises:
        SystemExit: naming those that it does not find.
    """
    titles = {(entry["location"].partition("#")[0], entry["title"]) for entry in found}
    missing = [
        f"{module}.{name}"
        for module, name in public_names()
        if (f"{FOLDER}/{module}.{name}.html", f"{module}.{name}") not in titles
    ]
    if missing:
        raise SystemExit(f"the site's search does not find {', '.join(missing)}")


def main(argv: list[str]) -> int:
    """Write the pages or check the site; the exit status says whether nothing is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out/docs")
    parser.add_argument("--check", type=Path, nargs="?", const=ROOT / "out/site")
    given = parser.parse_args(argv)
    found = faults()
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    if given.check is not None:
        text = (given.check / "search/search_index.json").read_text(encoding="utf-8")
        check_site(json.loads(text)["docs"])
    else:
        write(given.out)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
