"""docs/serving.md is one program, whose blocks run in order."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_block_of_code_is_found():
    assert len(BLOCKS) == PAGE.count("```python") > 8


def test_program_runs():
    exec(compile("\n".join(BLOCKS), "docs/serving.md", "exec"), {})
