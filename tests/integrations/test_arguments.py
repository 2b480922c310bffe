"""Conventions of several libraries, in saccade's terms."""

import pytest
import torch

from saccade import masks, scores
from saccade.integrations import arguments


def test_a_window_may_be_open_on_either_side():
    far = arguments.FAR
    for sides, mask in (
        ((None, None), None),
        ((None, 0), masks.causal()),
        ((3, 0), masks.window(3)),
        ((3, None), masks.window(3, far)),
        ((None, 2), masks.window(far, 2)),
    ):
        assert arguments.window(*sides) == mask
    assert arguments.window(None, 0, "top_left") == masks.causal("top_left")
    assert arguments.window(2, 1, "top_left") == masks.window(2, 1, "top_left")


def test_a_sliding_window_counts_the_row_itself():
    assert arguments.sliding_window_mask(4, causal=True) == masks.window(3)
    assert arguments.sliding_window_mask(4, causal=False) == masks.window(3, 3)
    assert arguments.sliding_window_mask(None, causal=True) == masks.causal()
    assert arguments.sliding_window_mask(None, causal=False) is None


def test_scores_are_chained_in_their_order():
    softcap, alibi = scores.softcap(5.0), scores.alibi(torch.ones(2))
    assert arguments.chained(None, None) is None
    assert arguments.chained(None, alibi) == alibi
    assert arguments.chained(softcap, alibi) == softcap >> alibi


def test_options_are_refused_by_name():
    arguments.serve_only(None, a=None)
    arguments.serve_only(0, a=0)
    with pytest.raises(NotImplementedError, match=r"^b: got Tensor, takes None$"):
        arguments.serve_only(None, a=None, b=torch.ones(2))
    with pytest.raises(NotImplementedError, match=r"^c: got int with pages, takes None$"):
        arguments.serve_only(None, "with pages", c=3)
    with pytest.raises(NotImplementedError, match=r"^d: got 3, takes 0$"):
        arguments.serve_only(0, d=3)


def test_rows_are_laid_out_as_they_came():
    rows = torch.randn(2, 7, 3, 4)
    assert torch.equal(arguments.heads_first(lambda each: each, rows), rows)
    output, shape = arguments.heads_first(lambda each: (each, each.shape), rows)
    assert torch.equal(output, rows) and shape == (2, 3, 7, 4)


def test_a_slab_is_cut_into_pages_of_its_own():
    slabs = torch.arange(3 * 1100 * 2 * 4).view(3, 1100, 2, 4)
    entry = torch.tensor([2, 0], dtype=torch.int32)
    table, (pages,) = arguments.pages_of_slabs("slabs", entry, slabs)
    assert table.tolist() == [[4, 5], [0, 1]] and pages.shape == (6, 2, 550, 4)
    assert pages.data_ptr() == slabs.data_ptr()
    assert pages[table[0].long()].transpose(1, 2).flatten(0, 1).equal(slabs[2])
    with pytest.raises(ValueError, match=r"^slabs: got strides .* takes entries that lie one beh"):
        arguments.pages_of_slabs("slabs", entry, slabs[::2])
