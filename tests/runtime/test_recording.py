"""torch.jit.trace would record a call's lengths and masks as constants: every call refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade.integrations.fla import chunk_kda
from saccade.integrations.flash_attn.functions import flash_attn_varlen_func
from saccade.integrations.flex_attention import flex_attention

OFFSETS = torch.tensor([0, 4, 12], dtype=torch.int32)
PAGES = torch.zeros(4, 4, 4, 8)
TABLE, LENGTHS = torch.tensor([[0, 1], [2, 3]]).int(), torch.tensor([5, 8]).int()

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda q: saccade.attention(q, q, q, causal=True),
    "reference": lambda q: saccade.attention(q, q, q, causal=True, implementation="reference"),
    "sdpa": lambda q: saccade.scaled_dot_product_attention(q, q, q),
    "varlen": lambda q: saccade.attention_varlen(q[0], q[0], q[0], OFFSETS),
    "fp8": lambda q: saccade.attention_fp8(*[q.bfloat16()] * 3),
    "paged": lambda q: saccade.attention_paged(q[:, :, :1], PAGES, PAGES, TABLE, LENGTHS),
    "write": lambda q: saccade.write_kv_cache(
        q[0], q[0], PAGES, PAGES, torch.arange(12, dtype=torch.int32)
    ),
    "linear": lambda q: saccade.linear_attention(q, q, q),
    "delta": lambda q: saccade.gated_delta_rule(q, q, q, torch.ones(2, 12, 4)),
    "flash": lambda q: flash_attn_varlen_func(q[0], q[0], q[0], OFFSETS, OFFSETS, 8, 8),
    "flex": lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 2),
    "kda": lambda q: chunk_kda(q, q, q, g=-q.abs(), beta=torch.ones(2, 12, 4))[0],
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")  # by torch 2.15
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of what was looked at before
@pytest.mark.parametrize("name", CALLS)
def test_traced_calls_are_refused(name: str) -> None:
    call, rows = CALLS[name], torch.randn(2, 12, 4, 8)
    for _ in range(2):  # a call that is known already, too
        with pytest.raises(NotImplementedError, match=r"got one inside of torch\.jit\.trace"):
            torch.jit.trace(call, rows)
        call(rows)
