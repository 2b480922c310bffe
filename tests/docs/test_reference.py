"""The reference: every public name has a docstring, an example that runs, and a page."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path

import public_names
import pytest
import reference_pages
import torch
from public_names import CHAPTERS, documented
from public_names import public_names as names

import saccade
from saccade import masks, scores

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
NAMES = [f"{module}.{name}" for module, name in names()]


def run(example: str, name: str, namespace: dict[str, object]) -> int:
    """Run the examples of a docstring; how many lines there were."""
    test = doctest.DocTestParser().get_doctest(example, namespace, name, None, 0)
    test.globs = namespace  # not a copy: what members show goes on from what their class shows
    said = io.StringIO()
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.write, clear_globs=False)
    assert result.failed == 0, said.getvalue()
    return result.attempted


def fresh() -> dict[str, object]:
    """What every example may use, as the reference says."""
    torch.manual_seed(0)
    return {"torch": torch, "saccade": saccade, "masks": masks, "scores": scores}


@pytest.mark.parametrize("module", public_names.MODULES)
def test_examples_run(module: str) -> None:
    if module.endswith((".transformers", ".diffusers")):
        pytest.importorskip(module.rpartition(".")[2])
    for name in [name for of, name in names() if of == module]:
        texts, namespace = list(documented(module, name)), fresh()
        with contextlib.redirect_stdout(io.StringIO()):
            assert run(texts[0].text, f"{module}.{name}", namespace), f"{module}.{name}: no example"
            for member in texts[1:]:
                run(member.text, member.name, namespace)


@pytest.mark.parametrize("name", ["masks", "scores"])
def test_examples_of_modules_run(name: str) -> None:
    assert run(public_names.docstring_of_module(f"saccade.{name}"), name, fresh()) > 2


def test_the_list_of_pages_is_that_of_the_public_names() -> None:
    listed = [f"{chapter.module}.{name}" for chapter in CHAPTERS for name in chapter.names]
    assert sorted(listed) == sorted(NAMES) and len(set(listed)) == len(listed)


def test_a_name_without_a_docstring_or_a_page_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference_pages.faults() == []
    fewer = (CHAPTERS[0]._replace(names=CHAPTERS[0].names[1:]), *CHAPTERS[1:])
    monkeypatch.setattr(reference_pages, "CHAPTERS", fewer)
    [told] = reference_pages.faults()
    assert CHAPTERS[0].names[0] in told and "no page" in told
    monkeypatch.setattr(reference_pages, "documented", lambda module, name: [])
    assert any("no docstring" in fault for fault in reference_pages.faults())


def test_pages_are_written_for_all(tmp_path: Path) -> None:
    reference_pages.write(tmp_path)
    for name in NAMES:
        page = (tmp_path / "reference" / f"{name}.md").read_text(encoding="utf-8")
        assert f"title: {name}\n" in page
    index = (tmp_path / "reference/index.md").read_text(encoding="utf-8")
    assert all(f"]({name}.md)" in index for name in NAMES)


def test_a_site_that_lacks_a_name_is_refused() -> None:
    pages = [{"title": name, "location": f"reference/{name}.html", "text": ""} for name in NAMES]
    reference_pages.check_site(pages)
    with pytest.raises(SystemExit, match=rf"does not find {re.escape(NAMES[3])}$"):
        reference_pages.check_site([*pages[:3], *pages[4:]])


DOCSTRING = """One sentence.

Args:
    query: [rows]; none where it is None. None: all. value: [rows].
    key, values: [rows, dim],
        of any strides. bias: (a, b).
    mask, causal, scale,
    config: as in `attention`.

Returns:
    key, value: nothing is split here.
"""
SPLIT = """One sentence.

Args:
    query: [rows]; none where it is None. None: all.
    value: [rows].
    key: [rows, dim], of any strides.
    values: [rows, dim], of any strides.
    bias: (a, b).
    mask: as in `attention`.
    causal: as in `attention`.
    scale: as in `attention`.
    config: as in `attention`.

Returns:
    key, value: nothing is split here.
"""


def test_an_entry_of_several_names_becomes_several() -> None:
    assert reference_pages.split_names(DOCSTRING) == SPLIT
    assert reference_pages.split_names(SPLIT) == SPLIT


def test_every_page_enters_the_navigation() -> None:
    config = reference_pages.on_config({"nav": [{"Use": []}, {"Inside": []}]})
    [reference] = [part["Reference"] for part in config["nav"] if "Reference" in part]
    assert str(reference).count(".md'") == len(NAMES) + 1
    assert [next(iter(part)) for part in config["nav"]] == ["Use", "Reference", "Inside"]
