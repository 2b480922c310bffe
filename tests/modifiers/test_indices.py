"""Indices that query rows and keys make together: with 32 bits, and read where they are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import mask_of_kernel

from saccade import masks
from saccade.gpu.kernel_args import captured_data
from saccade.modifiers import triton_source
from saccade.modifiers.expression import parse, slots

SHAPE = (2, 2, 11, 14)
TABLE = torch.arange(2 * 24).reshape(2, 24) % 5 < 2
BIG = 2**30  # the largest captured number of 32 bits


def text_of(mask: masks.Mask) -> str:
    expression = parse(mask.key)
    last = len(expression) - 1
    return triton_source.function("visible", expression, slots(mask.key), last, score=False)


@pytest.mark.parametrize("name", ["a distance", "through large sums", "of 64 bits", "from the end"])
def test_the_entries_are_those_of_python(name: str) -> None:
    wide = torch.tensor(2**40)
    function = {
        "a distance": lambda b, h, q, k: TABLE[h, q - k + SHAPE[3] - 1],
        "through large sums": lambda b, h, q, k: TABLE[
            h, q + BIG + BIG + BIG - BIG - k - BIG - BIG
        ],
        "of 64 bits": lambda b, h, q, k: TABLE[h, q + wide - k - wide],
        "from the end": lambda b, h, q, k: TABLE[-h, q - k],
    }[name]
    mask = masks.as_mask(function)
    found = mask_of_kernel(mask, SHAPE)
    assert found.equal(mask.to_dense(*SHAPE)) and 0 < int(found.sum()) < found.numel()
    text = text_of(mask)
    assert "gather(" in text and "widened" not in text


def test_what_is_compared_too_keeps_its_width() -> None:
    def both(b: Any, h: Any, q: Any, k: Any) -> Any:
        index = q - k + BIG + BIG - BIG - BIG
        return TABLE[0, index] & (index % 7 < 4)

    mask = masks.as_mask(both)
    assert "widened" in text_of(mask)
    assert mask_of_kernel(mask, SHAPE).equal(mask.to_dense(*SHAPE))


def test_neighbours_that_lie_side_by_side_are_read_as_they_are() -> None:
    table = torch.zeros(11, 14, dtype=torch.bool)
    assert "gather" not in text_of(masks.as_mask(lambda b, h, q, k: table[q, k]))


def test_a_table_that_32_bits_do_not_number_is_refused() -> None:
    mask = masks.as_mask(lambda b, h, q, k: TABLE[0, q * 14 + k])
    long = torch.zeros(1, dtype=torch.bool).expand(1, 2**31)
    with pytest.raises(ValueError, match=r"captured tensor of \[1, 2147483648\], takes at most"):
        captured_data(mask.key, mask.captured._replace(tensors=(long,)))
