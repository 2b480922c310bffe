"""The page about several GPUs: its program runs, and its table is what the cost model says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import parallel_costs
import pytest
import torch.distributed as dist

PAGE = (Path(__file__).parents[2] / "docs/parallel.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo")
def test_the_program_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    call = f'init_process_group("gloo", init_method="file://{tmp_path}/s", rank=0, world_size=1'
    assert 'init_process_group("gloo"' in program
    try:
        exec(program.replace('init_process_group("gloo"', call), {})
    finally:
        dist.destroy_process_group()
    assert "1,000 rows on 1 ranks" in capsys.readouterr().out


def test_the_table_is_printed_by_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.split("<!-- costs: begin -->")[1].split("<!-- costs: end -->")[0]
    lines = text.strip().splitlines()
    masks = len(parallel_costs.MASKS)
    assert len(lines) == 2 + masks * len(parallel_costs.RANKS)
    monkeypatch.setattr(parallel_costs, "RANKS", (8, 64))  # of more a plan takes seconds
    found = list(parallel_costs.rows())
    assert len(found) == 2 + masks * 2 and set(found) <= set(lines)
