"""Arguments of kinds that no call takes: nested tensors, and what is no state, are named.

A nested tensor has no sizes, and says of itself that its layout is that of dense ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import saccade

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
call_of: Any = saccade
ROWS = ("query", "key", "value")


def calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Calls by their names, with arguments that they take."""
    dense = dict.fromkeys(ROWS, torch.zeros(1, 2, 3, 8))
    tokens = dict.fromkeys(ROWS, torch.zeros(3, 2, 8))
    pages, ends = torch.zeros(4, 2, 4, 8), torch.tensor([0, 3], dtype=torch.int32)
    decay, sinks = torch.zeros(1, 2, 3), torch.zeros(2)
    paged = {
        "query": dense["query"], "key_pages": pages, "value_pages": pages, "sinks": sinks,
        "page_table": torch.zeros(1, 1, dtype=torch.int32), "kv_lens": ends[1:],
    }  # fmt: skip
    eight = {name: rows.to(torch.float8_e4m3fn) for name, rows in dense.items()}
    of_delta = {"beta": decay, "decay": decay, "initial_state": torch.zeros(1, 2, 8, 8)}
    lengths = torch.tensor([3])
    return {
        "attention": (call_of.attention, {**dense, "sinks": sinks}),
        "attention_varlen": (call_of.attention_varlen, {**tokens, "cu_seqlens_q": ends}),
        "attention_paged": (call_of.attention_paged, paged),
        "attention_fp8": (
            call_of.attention_fp8, {**eight, "query_scale": torch.ones(1, 2), "sinks": sinks},
        ),
        "linear_attention": (
            call_of.linear_attention, {**dense, "decay": decay, "key_lengths": lengths},
        ),
        "gated_delta_rule": (call_of.gated_delta_rule, {**dense, **of_delta}),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_nested_tensors_are_named(name: str) -> None:
    call, arguments = calls()[name]
    call(**arguments)
    nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(2, 8)])
    for argument in arguments:
        with pytest.raises(TypeError, match=rf"{argument}: got .*(nested|torch\.float32)"):
            call(**{**arguments, argument: nested})


@pytest.mark.parametrize("state", [3, torch.zeros(1, 2, 8, 8), object()], ids=type)
def test_what_is_no_linear_state_is_named(state: Any) -> None:
    rows: dict[str, Tensor] = dict.fromkeys(ROWS, torch.zeros(1, 2, 3, 8))
    with pytest.raises(TypeError, match=r"initial_state: got .*, takes a LinearState or None"):
        call_of.linear_attention(**rows, initial_state=state)


def test_what_is_no_dtype_is_named() -> None:
    rows: dict[str, Any] = dict.fromkeys(ROWS, torch.zeros(1, 2, 3, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="out_dtype: got tensor"):
        call_of.attention_fp8(**rows, out_dtype=torch.zeros(2))
