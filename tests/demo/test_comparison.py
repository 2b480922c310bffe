"""Errors are those of the dtype, and time and memory are measured while there is time."""

import sys
import time

import pytest
import torch

from saccade.demo import comparison
from saccade.demo.comparison import (
    CONTENDERS,
    TimedCall,
    make_inputs,
    measure_errors,
    measure_peak,
    ratios_to_plain,
)
from saccade.demo.model import LOOKING_BACK, ByteModel, DemoModelShape

SHORT = (64, 128), (64,), 1  # lengths, those with a window, rounds


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
    shortest, shortest_window, longer = comparison.measure_lengths(*SHORT, time.perf_counter() - 1)
    assert not any(one.left_out for one in (*shortest, *shortest_window))
    assert all(one.left_out.startswith("skipped") for one in longer)


def test_plain_attention_is_left_out_where_it_is_too_large(monkeypatch):
    monkeypatch.setattr(comparison, "measure_peak", lambda call: 1)
    monkeypatch.setattr(comparison, "PLAIN_LIMIT", 0)
    for at_length in comparison.measure_lengths(*SHORT, time.perf_counter() + 60):
        left_out = {one.who: one.left_out for one in at_length}
        assert left_out.pop("plain PyTorch").startswith("too large")
        assert not any(left_out.values())


def findings():
    torch.manual_seed(0)
    model = ByteModel(DemoModelShape(32, 4, 2, 48, windows=(8, None), context=64)).eval()
    return list(measure_errors(model.attention_calls(torch.arange(60)[None]), seed=0))


def test_every_layer_dtype_and_contender_is_compared():
    found = findings()
    assert len({(one.layer, one.dtype, one.who) for one in found}) == len(found) == 2 * 2 * 3 + 4
    capped = {one.who for one in found if "softcap" in one.layer}
    assert capped == {"saccade", "plain PyTorch"}  # SDPA has no softcap


def test_errors_are_those_of_the_dtype():
    """Of outputs; gradients of keys are sums of queries, which the first layer's biases make
    LOOKING_BACK times larger."""
    for one in findings():
        largest = 1e-4 if one.dtype == "float32" else 1e-1
        assert 1e-9 < one.output.rms <= one.output.worst < largest, one
        assert 1e-9 < one.gradient.rms <= one.gradient.worst < largest * LOOKING_BACK, one


def test_a_wrong_mask_would_be_seen():
    for one in findings():
        assert one.output.worst < 0.1, one
    assert set(ratios_to_plain(findings(), "float32")) == {"saccade", "PyTorch SDPA"}
