"""How exactly float32 is multiplied, as PyTorch was told; in which order rows lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import saccade
from saccade.runtime import call_cache
from saccade.runtime.spec import in_order_of, precision
from saccade.testing import make_paged_case

BACKENDS: Any = torch.backends  # whose interface PyTorch's stubs leave out


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    BACKENDS.fp32_precision = "none"
    BACKENDS.cuda.matmul.fp32_precision = BACKENDS.mkldnn.matmul.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"


def older(name: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(name)


def newer(name: str) -> Callable[[], None]:
    return lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", name)


def everywhere(name: str) -> Callable[[], None]:
    return lambda: setattr(BACKENDS, "fp32_precision", name)


def allowed() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


SETTINGS: dict[str, tuple[list[Callable[[], None]], str]] = {
    "nothing": ([], "ieee"),
    "highest": ([older("highest")], "ieee"),
    "high": ([older("high")], "tf32x3"),
    "medium": ([older("medium")], "tf32"),
    "allow_tf32": ([allowed], "tf32x3"),
    "ieee": ([newer("ieee")], "ieee"),
    "tf32": ([newer("tf32")], "tf32x3"),
    "tf32 everywhere": ([everywhere("tf32")], "tf32x3"),
    "high, then ieee": ([older("high"), newer("ieee")], "ieee"),
    "medium, then ieee": ([older("medium"), newer("ieee")], "ieee"),
    "tf32, then highest": ([newer("tf32"), older("highest")], "ieee"),
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_both_interfaces_count(name: str) -> None:
    steps, wanted = SETTINGS[name]
    for step in steps:
        step()
    assert precision(torch.float32) == wanted
    assert precision(torch.bfloat16) == precision(torch.float64) == "ieee"


def calls() -> dict[str, Callable[[], Any]]:
    rows = torch.randn(2, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    packed, offsets = rows[0].transpose(0, 1).contiguous(), torch.tensor([0, 4, 9]).int()
    return {
        "dense": lambda: saccade.attention(rows, rows, rows, causal=True),
        "packed": lambda: saccade.attention_varlen(packed, packed, packed, offsets),
        "linear": lambda: saccade.linear_attention(rows, rows, rows),
        "paged": lambda: make_paged_case(lengths=((1, 5), (1, 3))).run("cpu")["output"],
    }


@pytest.mark.parametrize("name", list(calls()))
def test_the_newer_interface_ends_no_call(name: str) -> None:
    call = calls()[name]
    before = call()
    everywhere("tf32")()
    torch.testing.assert_close(call(), before, rtol=1e-5, atol=1e-5)


def test_a_call_is_kept_for_its_precision_alone() -> None:
    rows = torch.randn(1, 2, 9, 8)
    keys = []
    for name in ("ieee", "tf32", "ieee"):
        newer(name)()
        plain = None, None, None, None, None
        keys.append(
            (
                call_cache.key_of(rows, rows, rows, *plain),
                call_cache.key_of_any("linear_attention", [rows, rows, rows], (), ()),
            )
        )
    assert keys[0] == keys[2]
    assert all(one != other for one, other in zip(keys[0], keys[1], strict=True))


def test_rows_are_copied_only_where_they_lie_in_another_order() -> None:
    inside = torch.randn(2, 5, 3, 8).transpose(1, 2)
    assert in_order_of(inside.clone(), inside).stride() == inside.stride()
    for rows in (inside.contiguous(), torch.randn(()).expand(2, 3, 5, 8), inside.mT.clone().mT):
        found = in_order_of(rows, inside)
        assert found.stride() == inside.stride() and torch.equal(found, rows)
    for pattern in (inside, inside.contiguous(), inside[:1, :1]):
        same = torch.empty_strided(pattern.shape, pattern.stride()).fill_(1.0)
        assert in_order_of(same, pattern) is same
    one = torch.randn(1, 3, 5, 8)  # what a dimension of one steps by says nothing
    assert in_order_of(one, torch.empty(2, 3, 5, 8)[1:].as_strided(one.shape, (7, 40, 8, 1))) is one
