"""Poisoned memory holds NaN, and nothing is left behind."""

from typing import Any

import pytest
import torch

from saccade.testing import poisoned

Flags = tuple[bool, bool, bool]
deterministic: Any = torch.utils.deterministic


def flags() -> Flags:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )


@pytest.fixture(params=[(False, False, True), (False, False, False), (True, True, False)], ids=str)
def before(request):
    """Some setting of the flags that a user may have chosen; put back as it was afterwards."""
    was = flags()
    enabled, warn_only, fill = request.param
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    deterministic.fill_uninitialized_memory = fill
    yield flags()
    torch.use_deterministic_algorithms(was[0], warn_only=was[1])
    deterministic.fill_uninitialized_memory = was[2]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_fresh_memory_holds_nan(dtype):
    with poisoned():
        fresh = [
            torch.empty(3, 5, dtype=dtype),
            torch.empty_like(torch.zeros(4, dtype=dtype)),
            torch.zeros(2, dtype=dtype).new_empty(7),
            torch.empty_strided((2, 3), (3, 1), dtype=dtype),
            torch.zeros(2, dtype=dtype).resize_(50)[2:],
        ]
    for tensor in fresh:
        assert tensor.isnan().all()


def test_fresh_integers_hold_the_largest_number():
    with poisoned():
        assert (torch.empty(9, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
        assert (torch.empty(9, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


def test_flags_come_back(before):
    with poisoned():
        assert flags() == (True, True, True)
    assert flags() == before


def test_flags_come_back_after_an_exception(before):
    with pytest.raises(ZeroDivisionError), poisoned():
        assert torch.empty(3).isnan().all()
        raise ZeroDivisionError
    assert flags() == before


def test_blocks_nest():
    outside = flags()
    with poisoned():
        with poisoned():
            assert torch.empty(3).isnan().all()
        assert torch.empty(3).isnan().all()
    assert flags() == outside


def test_what_is_computed_is_not_poisoned():
    rows = torch.randn(8, 8)
    with poisoned():
        product = rows @ rows
    assert torch.equal(product, rows @ rows)
