import sys
import time
from dataclasses import replace

import pytest
import torch

from saccade.demo import comparison
from saccade.demo.comparison import TimedCall, make_inputs, measure_peak
from saccade.demo.exactness import CONTENDERS
from saccade.demo.settings import QUICK

SHORT = replace(QUICK, lengths=(64, 128), window_lengths=(64,), rounds=1)


@pytest.mark.parametrize("window", [None, 16])
def test_contenders_compute_the_same(window):
    query, key, value, _ = make_inputs(TimedCall("", 100, 2, 16, window))
    outputs = [run(query, key, value, window) for run in CONTENDERS.values()]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell a process's peak")
def test_peak_memory_counts_the_scores_of_plain_attention_only():
    plain = measure_peak(TimedCall("plain PyTorch", 1024, 2, 64, None))
    fused = measure_peak(TimedCall("saccade", 1024, 2, 64, None))
    assert plain is not None and fused is not None
    scores = 2 * 4 * 1024**2
    assert fused < 2 * scores < plain < 12 * scores


def test_lengths_beyond_the_deadline_are_left_out(monkeypatch):
    monkeypatch.setattr(comparison, "measure_peak", lambda call: 1)
    shortest, shortest_window, longer = comparison.compare(SHORT, time.perf_counter() - 1)
    assert not any(one.left_out for one in (*shortest, *shortest_window))
    assert all(one.left_out.startswith("skipped") for one in longer)


def test_plain_attention_is_left_out_where_it_is_too_large(monkeypatch):
    monkeypatch.setattr(comparison, "measure_peak", lambda call: 1)
    monkeypatch.setattr(comparison, "PLAIN_LIMIT", 0)
    for at_length in comparison.compare(SHORT, time.perf_counter() + 60):
        left_out = {one.who: one.left_out for one in at_length}
        assert left_out.pop("plain PyTorch").startswith("too large")
        assert not any(left_out.values())
