"""Gather the site's pages from where they lie in the repository, with links that hold.

Usage: python tools/site_pages.py [--chapters FOLDER] [--out FOLDER]

README.md becomes the first page, docs/ the others, and the pages that tools/chapters.py made are
the chapters. A link to any other file of the repository takes that file along. Exits with 1 where
a link leads nowhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
CHAPTERS = PurePosixPath("docs/chapters")
# Pages that lie elsewhere on the site than in the repository.
PLACES = {
    "README.md": "index.md",
    f"{CHAPTERS}/README.md": "chapters/index.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "docs/reference.md": "reference/index.md",  # to which reference_pages.py adds the names
}
TOP = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md",
    "benchmarks/README.md", "benchmarks/results/h200/chapters.md",
)  # fmt: skip
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# A quote names its file behind the language, where the site's builder takes options only.
QUOTE = re.compile(r"^```python (\S+)$", re.MULTILINE)


def sources() -> Iterator[PurePosixPath]:
    """The pages, by their paths in the repository; chapters by the files that they come from."""
    yield from map(PurePosixPath, TOP)
    for file in sorted((ROOT / "docs").rglob("*.md")):
        yield PurePosixPath(file.relative_to(ROOT).as_posix())
    for file in sorted((ROOT / CHAPTERS).glob("[0-9]*.py")):
        yield CHAPTERS / file.name


def place_of(source: PurePosixPath) -> PurePosixPath:
    """Where a file of the repository lies on the site."""
    if str(source) in PLACES:
        return PurePosixPath(PLACES[str(source)])
    if source.parent == CHAPTERS and source.match("[0-9]*.py"):
        source = source.with_suffix(".md")
    if source.parts[0] == "docs":
        return PurePosixPath(*source.parts[1:])
    return source if source.suffix == ".md" else PurePosixPath("files") / source


class Site:
    """A folder of pages that is being filled.

    Attributes:
        faults: links that lead nowhere.
    """

    def __init__(self, chapters: Path, out: Path) -> None:
        self.faults: list[str] = []
        self._chapters, self._out = chapters, out
        self._pages = set(sources())

    def gather(self) -> None:
        """Write all pages, and what they link to."""
        shutil.rmtree(self._out, ignore_errors=True)
        for source in sorted(self._pages):
            of_chapter = self._chapters / source.with_suffix(".md").name
            file = of_chapter if source.suffix == ".py" else ROOT / source
            text = self.relinked(file.read_text(encoding="utf-8"), source)
            self._made(place_of(source)).write_text(text, encoding="utf-8")

    def relinked(self, text: str, source: PurePosixPath) -> str:
        """A page's text with its links as they are on the site; code has its file as a title."""
        parts, end = [], 0
        for fence in FENCE.finditer(text):
            code = QUOTE.sub(r'```python title="\1"', fence[0])
            parts += [self._relinked_prose(text[end : fence.start()], source), code]
            end = fence.end()
        return "".join([*parts, self._relinked_prose(text[end:], source)])

    def _relinked_prose(self, text: str, source: PurePosixPath) -> str:
        def on_site(link: re.Match[str]) -> str:
            target = PurePosixPath(os.path.normpath(source.parent / link[1]))
            drawn = target.parent == CHAPTERS and target.suffix == ".png"
            file = self._chapters / target.name if drawn else ROOT / target
            if target.parts[0] == ".." or not file.is_file():
                self.faults.append(f"{source}: {link[1]} leads nowhere")
                return link[0]
            if target not in self._pages:
                shutil.copyfile(file, self._made(place_of(target)))
            return os.path.relpath(place_of(target), place_of(source).parent) + (link[2] or "")

        return LINK.sub(on_site, text)

    def _made(self, place: PurePosixPath) -> Path:
        """A path on the site, in a folder that is there."""
        path = self._out / place
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def main(argv: list[str]) -> int:
    """Gather the pages; the exit status says whether all links hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chapters", type=Path, default=ROOT / "out/chapters")
    parser.add_argument("--out", type=Path, default=ROOT / "out/docs")
    given = parser.parse_args(argv)
    site = Site(given.chapters.resolve(), given.out.resolve())
    site.gather()
    for fault in site.faults:
        print(fault, file=sys.stderr)
    return int(bool(site.faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
