"""Every chapter runs, shows a table and a picture, and stands in the site; broken ones are told."""

import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from chapters import CHAPTERS, cells_of, page_of, prose_of, shown
from site_pages import ROOT, Site, place_of, sources

NAMES = sorted(file.stem for file in CHAPTERS.glob("[0-9]*.py"))
MOST_SECONDS, MOST_SECONDS_OF_ONE = 60, 12  # of the processor, in quick mode
PROSE = "# %% [markdown]\n# # 00 · Nothing\n\n# %%\n"


def run_chapters(*arguments, quick=True):
    options = [*(["--quick"] if quick else []), *map(str, arguments)]
    command = [sys.executable, str(ROOT / "tools/chapters.py"), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def assert_picture(file):
    from matplotlib import image

    pixels = image.imread(file)
    height, width, _ = pixels.shape
    assert height > 300 and width > 800
    colours = {tuple(pixel) for pixel in pixels[::7, ::7, :3].reshape(-1, 3).round(1)}
    assert len(colours) >= 3, f"{file} is empty"


def test_every_chapter_runs_and_shows_a_table_and_a_picture(tmp_path):
    pytest.importorskip("triton")
    done = run_chapters("--out", tmp_path, "--tables", tmp_path / "tables")
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = dict(re.findall(r"^(\w+): ([\d.]+) s$", done.stdout, re.MULTILINE))
    assert sorted(seconds) == NAMES and len(NAMES) == 13
    for name in NAMES:
        page = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {name[:2]} · ")
        assert "\n## Change this and see\n" in page
        assert re.search(r"^\| --- \|( ---: \|)+\n\| .+ \|$", page, re.MULTILINE)
        assert re.search(rf"^!\[.{{20,}}\]\({name}\.png\)$", page, re.MULTILINE)
        assert_picture(tmp_path / f"{name}.png")
        assert float(seconds[name]) < MOST_SECONDS_OF_ONE
    assert sum(map(float, seconds.values())) < MOST_SECONDS
    tables = (tmp_path / "tables").read_text(encoding="utf-8")
    titles = re.findall(r"^## (\d\d) · .+\n\n\*\*.+\*\*\n\n\| ", tables, re.MULTILINE)
    assert titles == [name[:2] for name in NAMES]
    assert tables.count("*Run in quick mode on ") == len(NAMES) and "```" not in tables

    site = Site(tmp_path, tmp_path / "site")
    site.gather()
    assert site.faults == []
    page = (tmp_path / "site/chapters/02_online_softmax.md").read_text(encoding="utf-8")
    assert "(07_split_keys.md)" in page and "(../forward.md)" in page
    assert (tmp_path / "site/chapters/02_online_softmax.png").exists()
    first = (tmp_path / "site/index.md").read_text(encoding="utf-8")
    assert "(chapters/index.md)" in first


@pytest.mark.slow  # compiles all that the chapter shows
def test_the_chapter_on_hopper_compiles_what_was_committed(tmp_path):
    """In quick mode it reads docs/kernels.md instead."""
    pytest.importorskip("triton")
    done = run_chapters("--only", "09", "--out", tmp_path, quick=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "**compiled now**" in (tmp_path / "09_hopper.md").read_text(encoding="utf-8")


def test_chapter_runs_as_a_program(tmp_path):
    command = [sys.executable, str(CHAPTERS / "02_online_softmax.py"), "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "all at once" in done.stdout and "picture: " in done.stdout
    assert_picture(tmp_path / "02_online_softmax.png")


def test_chapter_whose_check_fails_is_told(tmp_path):
    (tmp_path / "00_wrong.py").write_text(PROSE + "assert 1 + 1 == 3\n", encoding="utf-8")
    (tmp_path / "01_right.py").write_text(PROSE + "assert 1 + 1 == 2\n", encoding="utf-8")
    done = run_chapters("--chapters", tmp_path, "--out", tmp_path / "pages")
    assert done.returncode == 1
    assert "00_wrong: FAILED" in done.stdout and "failed: 00_wrong" in done.stderr
    assert "line 5, in <module>\n    assert 1 + 1 == 3" in done.stderr
    assert [file.name for file in (tmp_path / "pages").iterdir()] == ["01_right.md"]


def test_page_holds_prose_code_and_what_was_printed(tmp_path):
    chapter = tmp_path / "00_chapter.py"
    table = "print('\\n**Title**\\n\\n| a | b |\\n| --- | ---: |\\n| c | 1 |\\n')"
    chapter.write_text(f"{PROSE}print('seen')\n{table}\n", encoding="utf-8")
    page = page_of(chapter)
    assert page.startswith("# 00 · Nothing\n\n```python\nprint('seen')\n")
    assert "```text\nseen\n```\n\n**Title**\n\n| a | b |\n| --- | ---: |\n| c | 1 |\n" in page


def test_cells():
    prose, code = cells_of(PROSE + "x = 1\n")
    assert prose_of(prose) == "# 00 · Nothing"
    assert (code.is_prose, code.first_line, code.text) == (False, 5, "x = 1\n")
    assert list(shown("one\n\ntwo\n")) == ["```text\none\n```", "```text\ntwo\n```"]


@pytest.mark.parametrize("text", ["x = 1\n", "import os\n# %%\n", "# %% [raw]\n# x\n"])
def test_text_that_is_no_chapter(text):
    with pytest.raises(ValueError, match="mark"):
        cells_of(text)


def test_link_that_leads_nowhere(tmp_path):
    site = Site(tmp_path, tmp_path / "site")
    source = PurePosixPath("docs/chapters/01_attention.py")
    text = "[a](../glossary.md#lengths) [b](nowhere.md) [c](../../../x) [d](https://x.y/z)"
    assert "(../glossary.md#lengths) [b](nowhere.md)" in site.relinked(text, source)
    assert site.faults == [
        f"{source}: {link} leads nowhere" for link in ("nowhere.md", "../../../x")
    ]


def test_code_keeps_its_brackets(tmp_path):
    text = "```python\nx = table[0](nowhere)\n```\n"
    site = Site(tmp_path, tmp_path / "site")
    assert site.relinked(text, PurePosixPath("README.md")) == text
    assert site.faults == []


def test_quotes_have_their_file_as_a_title(tmp_path):
    text = "```python src/x.py\nx = 1\n```\n"
    page = Site(tmp_path, tmp_path / "site").relinked(text, PurePosixPath("docs/forward.md"))
    assert page == text.replace(" src/x.py", ' title="src/x.py"')


def test_lists_of_chapters_are_complete():
    contents = (CHAPTERS / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\((\d\d_\w+)\.py\)", contents)[: len(NAMES)] == NAMES
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = re.findall(r"^\s+- (?:[\w ]+: )?([\w/]+\.md)$", navigation, re.MULTILINE)
    assert sorted([*pages, "reference/index.md"]) == sorted(
        str(place_of(source)) for source in sources()
    )


def test_only_one_kernel_is_history():
    """Chapters import the library's kernels; two have code for Triton, and none of it is ours."""
    kernels = {
        Path(file).stem: len(
            re.findall(r"^@(?:triton|gluon)\.jit", file.read_text(encoding="utf-8"), re.M)
        )
        for file in CHAPTERS.glob("*.py")
    }
    assert {name: count for name, count in kernels.items() if count} == {
        "03_flash_attention_1": 1,
        "09_hopper": 1,
    }
