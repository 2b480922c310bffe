"""Which masks let rows see few keys only, and how results lie in memory."""

import pytest
import torch

from saccade import masks
from saccade.modifiers.expression import Captured
from saccade.ops.attention.triton import call_spec
from saccade.ops.attention.triton.call_spec import FEW, is_short
from saccade.runtime.spec import Inputs, Variant, empty_gradients, empty_results

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


SHAPES = ((2, 4, 9, 16), (1, 1, 7, 16), (1, 3, 1, 8), (2, 2, 0, 16), (1, 2, 5, 16))


@pytest.mark.parametrize("heads_inside", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_lie_as_all_implementations_have_them(
    shape: tuple[int, ...], heads_inside: bool
) -> None:
    query = torch.zeros(shape, dtype=torch.bfloat16)
    if heads_inside:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    value = query.new_zeros(*shape[:3], 24)
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    packed = [rows.transpose(1, 2).reshape(-1, shape[1], rows.shape[-1]) for rows in (query, value)]
    for inputs in (
        Inputs(query, query, value),
        Inputs(packed[0], packed[0], packed[1], None, None, offsets, offsets),
    ):
        variant = Variant("", "", Captured(), Captured(), 1.0, 0.0, residual=True, max_logit=True)
        memories, (output, lse) = call_spec.results_memory(inputs, variant), empty_results(inputs)
        wanted = output, lse, torch.empty_like(output, dtype=torch.int8), lse
        for memory, tensor in zip(memories, wanted, strict=True):
            assert memory is not None
            assert memory == (tensor.shape, tensor.stride(), tensor.dtype)
            made = memory.on(query.device)
            assert (made.shape, made.stride(), made.dtype) == memory
    gradients = empty_gradients(Inputs(query, query, value))[:3]
    for rows, gradient in zip((query, query, value), gradients, strict=True):
        assert call_spec.beside_channels(rows.shape) == gradient.stride()
