"""The demo's plot is drawn whatever was measured."""

from pathlib import Path

import pytest

from saccade.demo.comparison import COLOURS, Measured, save_plot


@pytest.mark.parametrize("peaks", [(0, 0), (0, 1 << 20), (1 << 20, 1 << 22)], ids=str)
def test_calls_that_took_no_memory_are_drawn(tmp_path: Path, peaks: tuple[int, int]) -> None:
    pytest.importorskip("matplotlib")
    measured = [
        Measured("causal", length, who, 1.0, 2.0, peak, "")
        for who in COLOURS
        for length, peak in zip((128, 1024), peaks, strict=True)
    ]
    save_plot(measured, tmp_path / "plot.png", "a CPU")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
