"""Complaints about the arguments of a call over pages: what they name, and that nothing ran."""

import re
from typing import Any

import pytest
import torch

import saccade
from saccade.testing import make_paged_case

F32, I32 = torch.float32, torch.int32


def arguments(**changes: Any) -> dict[str, Any]:
    case = make_paged_case(lengths=((2, 20), (2, 9)))
    return {**case.arguments(), **changes}


def refuses(error: type[Exception], message: str, **changes: Any) -> None:
    with pytest.raises(error, match=re.escape(message)):
        saccade.attention_paged(**arguments(**changes))


PAGES = torch.zeros(7, 2, 8, 16)
TABLE = torch.zeros(2, 3, dtype=I32)
LENS = torch.tensor([20, 9], dtype=I32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": 3}, TypeError, "query: got int, takes a tensor [batch, query_heads"),
        ({"query": PAGES[0]}, ValueError, "query: got shape (2, 8, 16), takes [batch"),
        ({"query": PAGES.int()}, TypeError, "query: got torch.int32, takes float32"),
        ({"key_pages": None}, TypeError, "key_pages: got NoneType, takes a tensor [num_pages"),
        ({"key_pages": PAGES[0]}, ValueError, "key_pages: got shape (2, 8, 16), takes [num_pages"),
        ({"key_pages": PAGES.half()}, TypeError, "key_pages: got torch.float16, takes the tokens'"),
        ({"value_pages": PAGES.to(torch.int8)}, TypeError, "value_pages: got torch.int8, takes"),
        ({"value_pages": PAGES[:5]}, ValueError, "value_pages: got (5, 2, 8) pages, heads"),
        ({"key_scales": PAGES[..., 0]}, TypeError, "key_scales: got scales for pages of"),
        ({"page_table": TABLE.long()}, TypeError, "page_table: got torch.int64, takes an int32"),
        ({"page_table": TABLE[0]}, ValueError, "page_table: got shape (3,), takes an int32"),
        ({"page_table": TABLE[:1]}, ValueError, "page_table: got 1 sequences, takes query's 2"),
        ({"page_table": [1]}, TypeError, "page_table: got list, takes an int32 tensor"),
        ({"kv_lens": LENS.float()}, TypeError, "kv_lens: got torch.float32, takes an int32"),
        ({"kv_lens": LENS * 9}, ValueError, "kv_lens: got 180, takes 0 to 32"),
        ({"kv_lens": -LENS}, ValueError, "kv_lens: got -20, takes 0 to 32"),
        ({"kv_lens": LENS[:1]}, ValueError, "kv_lens: got 1 sequences, takes query's 2"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant: got 1, takes True or False"),
        ({"return_lse": None}, TypeError, "return_lse: got None, takes True or False"),
        ({"scale": "big"}, TypeError, "scale: got 'big'"),
        ({"sinks": PAGES[0, 0, 0]}, ValueError, "sinks: got shape (16,), takes (4,)"),
        ({"mask": PAGES}, TypeError, "mask: got a tensor of torch.float32"),
        ({"mask": PAGES[0, 0] > 0}, ValueError, "mask: tensor: got shape"),
        ({"implementation": "fast"}, ValueError, "implementation: got 'fast'"),
        ({"cu_seqlens_q": LENS}, ValueError, "query: got shape (2, 4, 2, 16), takes [tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_complaint(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    if changes.get("value_pages") is not None or changes.get("key_pages") is not None:
        pages = {"key_pages": PAGES, "value_pages": PAGES}
        changes = {**pages, **changes}
    refuses(error, message, **changes)


def test_a_page_outside_the_pool():
    case = make_paged_case(lengths=((1, 20),))
    for wrong in (-1, 6):
        given: dict[str, Any] = case.arguments()
        given["page_table"] = given["page_table"].clone()
        given["page_table"][0, 2] = wrong
        with pytest.raises(ValueError, match=rf"page_table: got page {wrong}, takes 0 to 5"):
            saccade.attention_paged(**given)


def test_entries_behind_the_last_page_are_not_looked_at():
    case = make_paged_case(lengths=((1, 16),))
    assert case.table["page_table"][0, 2] < 0
    saccade.attention_paged(**case.arguments())


def test_sizes_of_pages_and_heads():
    refuses(
        ValueError, "key_pages: got pages of 1025 slots, takes 1 to 1024",
        key_pages=torch.zeros(2, 2, 1025, 16), value_pages=torch.zeros(2, 2, 1025, 16),
    )  # fmt: skip
    refuses(
        ValueError, "key_pages: got 3 heads, takes a number that divides query's 4",
        key_pages=torch.zeros(7, 3, 8, 16), value_pages=torch.zeros(7, 3, 8, 16),
    )  # fmt: skip
    refuses(
        ValueError, "key_pages: got head_dim 8, takes query's head_dim 16",
        key_pages=PAGES[..., :8], value_pages=PAGES,
    )  # fmt: skip


def test_scales_of_eight_bits():
    numbers = {"key_pages": PAGES.to(torch.int8), "value_pages": PAGES.to(torch.int8)}
    refuses(TypeError, "key_scales: got None for pages of", **numbers)
    scales = torch.ones(7, 2, 8)
    refuses(TypeError, "value_scales: got None", **numbers, key_scales=scales)
    both = {"value_scales": scales}
    refuses(
        ValueError, "key_scales: got shape (7, 2)", **numbers, **both, key_scales=scales[..., 0]
    )
    refuses(TypeError, "key_scales: got torch.int64", **numbers, **both, key_scales=scales.long())


def test_offsets_are_those_of_a_packed_call():
    query = torch.zeros(4, 4, 16)
    refuses(TypeError, "cu_seqlens_q: got torch.int64", query=query, cu_seqlens_q=LENS.long())
    wrong = torch.tensor([1, 2, 4], dtype=I32)
    refuses(ValueError, "cu_seqlens_q: got a first offset of 1", query=query, cu_seqlens_q=wrong)


@pytest.mark.parametrize("name", ["query", "key_pages", "sinks"])
def test_a_gradient_is_refused_before_anything_runs(name: str) -> None:
    given = {**make_paged_case(sinks=True).arguments()}
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"under torch\.no_grad.*reference"):
        saccade.attention_paged(**given)
    with torch.no_grad():
        saccade.attention_paged(**given)
