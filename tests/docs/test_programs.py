"""Pages that are one program each, whose blocks run in order."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",  # what stands in its lists is a fragment
    "docs/paged.md",
    "docs/serving.md",
    "docs/switching.md",
    "docs/transformers.md",
)
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
BLOCKS = {
    page: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for page, text in TEXTS.items()
}
WITHOUT_GRADIENTS = {"docs/paged.md"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_is_found(page):
    assert len(BLOCKS[page]) == TEXTS[page].count("\n```python") >= 3


@pytest.mark.parametrize("page", PAGES)
def test_program_runs(page):
    with torch.set_grad_enabled(page not in WITHOUT_GRADIENTS):
        exec(compile("\n".join(BLOCKS[page]), page, "exec"), {})
