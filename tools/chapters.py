"""Run the chapters of the course, and make a Markdown page of each.

Usage: python tools/chapters.py [--quick] [--only 03] [--chapters FOLDER] [--out FOLDER]
                                [--tables FILE]

A chapter (docs/chapters/README.md) is run cell by cell, as `python docs/chapters/01_attention.py`
would run it at once. Its page is its prose, its code, and what the code printed and drew. Prints
the processor seconds of each, and exits with 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import linecache
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CHAPTERS = ROOT / "docs/chapters"
MARK = re.compile(r"^# %%(.*)$", re.MULTILINE)


class Cell(NamedTuple):
    """A stretch of a chapter, from one mark to the next."""

    is_prose: bool
    first_line: int  # of the text, counted from 1
    text: str


def cells_of(source: str) -> list[Cell]:
    """The cells of a chapter.

    Raises:
        ValueError: for text before the first mark, or a mark that is neither code nor prose.
    """
    marks = list(MARK.finditer(source))
    if not marks or source[: marks[0].start()].strip():
        raise ValueError("a chapter begins with a mark, `# %% [markdown]` or `# %%`")
    cells = []
    for mark, end in zip(marks, [*(mark.start() for mark in marks[1:]), len(source)], strict=True):
        kind = mark[1].strip()
        if kind not in ("", "[markdown]"):
            raise ValueError(f"a mark says `{kind}`, takes nothing or `[markdown]`")
        text = source[mark.end() + 1 : end]
        cells.append(Cell(bool(kind), source.count("\n", 0, mark.end()) + 2, text))
    return cells


def prose_of(cell: Cell) -> str:
    """The text of comments."""
    return re.sub(r"^# ?", "", cell.text, flags=re.MULTILINE).strip("\n")


def shown(output: str) -> Iterator[str]:
    """What a cell printed: tables and pictures as Markdown, all else as it is."""
    for part in re.split(r"\n\s*\n", output.strip("\n")):
        if part.startswith(("|", "**", "![")):
            yield part
        elif part.strip():
            yield f"```text\n{part}\n```"


def page_of(chapter: Path) -> str:
    """Run a chapter in this process, and give its page.

    Raises:
        Exception: whatever the chapter raises; a check that fails is an AssertionError.
    """
    source = chapter.read_text(encoding="utf-8")
    scope: dict[str, Any] = {"__name__": "__main__", "__file__": str(chapter)}
    linecache.checkcache(str(chapter))
    parts = []
    for cell in cells_of(source):
        if cell.is_prose:
            parts.append(prose_of(cell))
            continue
        program = "\n" * (cell.first_line - 1) + cell.text  # with the lines that the file has
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, str(chapter), "exec"), scope)
        parts += [f"```python\n{cell.text.strip()}\n```", *shown(printed.getvalue())]
    return "\n\n".join([*parts, _where()]) + "\n"


def tables_of(page: str) -> str:
    """What is left of a page without prose, code and pictures: its title, tables, and machine."""
    title, *parts = page.strip().split("\n\n")
    kept = [part for part in parts if part.startswith(("**", "|"))]
    return "\n\n".join([f"#{title.splitlines()[0]}", *kept, parts[-1]]) + "\n"


def _where() -> str:
    """On what the numbers of a page were measured."""
    import torch

    device = "a CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    when = time.strftime("%Y-%m-%d")
    mode = " in quick mode" if "--quick" in sys.argv else ""
    return (
        f"*Run{mode} on {device}, threads: {torch.get_num_threads()}, torch {torch.__version__}, "
        f"{when}.*"
    )


def run(chapter: Path, out: Path, quick: bool) -> None:
    """In a process of its own: run a chapter, write its page, say how long it took."""
    sys.path.insert(0, str(CHAPTERS))
    sys.argv = [str(chapter), "--out", str(out), "--page", *(["--quick"] if quick else [])]
    start = time.process_time()
    try:
        page = page_of(chapter)
    except BaseException:
        traceback.print_exc()
        print(f"{chapter.stem}: FAILED", flush=True)
        os._exit(1)  # not through what the parent has registered to do at its end
    (out / f"{chapter.stem}.md").write_text(page, encoding="utf-8")
    print(f"{chapter.stem}: {time.process_time() - start:.1f} s", flush=True)


def run_all(chapters: list[Path], out: Path, quick: bool) -> list[str]:
    """Run chapters one after the other; the names of those that failed."""
    # Importing takes longer than most quick chapters do, so that they are forked off a process
    # that has imported all but Triton: whether it interprets is each chapter's own to say.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        import matplotlib

        matplotlib.use("Agg")
        import torch.distributed
        from matplotlib import pyplot as pyplot

        import saccade as saccade

        if torch.distributed.is_available():  # torch.testing.assert_close imports this
            import torch.distributed.tensor
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for chapter in chapters:
        process = context.Process(target=run, args=(chapter, out, quick))
        process.start()
        process.join()
        if process.exitcode:
            failed.append(chapter.stem)
    return failed


def main(argv: list[str]) -> int:
    """Run what is asked for; the exit status says whether all of it held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--only", default="", help="the beginning of a chapter's name")
    parser.add_argument("--chapters", type=Path, default=CHAPTERS, help="where they lie")
    parser.add_argument("--out", type=Path, default=ROOT / "out/chapters", help="for the pages")
    parser.add_argument("--tables", type=Path, help="a file for all tables, without the rest")
    given = parser.parse_args(argv)
    chapters = sorted(given.chapters.resolve().glob(f"{given.only}*.py"))
    chapters = [chapter for chapter in chapters if chapter.stem[:2].isdigit()]
    if not chapters:
        parser.error(f"--only: got {given.only!r}, and no chapter begins so")
    failed = run_all(chapters, given.out.resolve(), given.quick)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    elif given.tables:
        pages = [(given.out / f"{chapter.stem}.md").read_text("utf-8") for chapter in chapters]
        text = "# Tables of the chapters\n\n" + "\n".join(map(tables_of, pages))
        given.tables.write_text(text, encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
