"""Reach: which masks let rows see few keys only."""

import pytest
import torch

from saccade import masks
from saccade.ops.attention.triton import call_spec
from saccade.ops.attention.triton.call_spec import FEW, is_short

TABLE = torch.zeros(1, 16, dtype=torch.int64)


def of(mask, query_len, kv_len):
    return is_short(mask.key, mask.captured, query_len, kv_len)


@pytest.mark.parametrize(
    ("mask", "lengths", "short"),
    [
        (masks.causal(), (1024, 1024), True),
        (masks.causal(), (16384, 16384), False),
        (masks.causal() & masks.window(256), (16384, 16384), True),
        (masks.window(256), (16384, 16384), True),
        (masks.window(4096), (16384, 16384), False),
        (masks.causal() & masks.window(256), (1, 16384), True),
        (~masks.window(256), (16384, 16384), False),
        (masks.documents(TABLE), (16, 16), False),  # what tensors hold may change
    ],
    ids=range(8),
)
def test_rows_that_see_few_keys_on_average(mask, lengths, short):
    assert of(mask, *lengths) is short


def test_the_length_alone_decides_where_nothing_is_hidden():
    mask = masks.window(1 << 20)
    assert of(mask, FEW, FEW)
    assert not of(mask, FEW, 2 * FEW)


def test_neither_no_mask_nor_no_rows_is_short():
    assert not is_short("", masks.causal().captured, 16, 16)
    assert not of(masks.causal(), 0, 16)
    assert not of(masks.causal(), 16, 0)


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(300), masks.causal("top_left")])
def test_new_lengths_are_seldom_asked_anew(mask):
    call_spec._is_short.cache_clear()
    for length in range(4096, 8192, 3):
        of(mask, length, length)
        of(mask, length, length + 100)
    assert call_spec._is_short.cache_info().misses <= 4 * 2**call_spec.LENGTH_BITS


@pytest.mark.parametrize("lengths", [(1900, 1900), (2500, 2500), (700, 5000), (5000, 700)])
def test_rounded_lengths_answer_as_exact_ones(lengths, monkeypatch):
    """Where the average is not within a tenth of what divides them."""
    for mask in (masks.causal(), masks.window(200), masks.window(3000), ~masks.causal()):
        rounded = of(mask, *lengths)
        with monkeypatch.context() as exact:
            exact.setattr(call_spec, "LENGTH_BITS", 32)
            assert of(mask, *lengths) == rounded
