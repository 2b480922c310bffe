"""Chunks over pages by the Hopper kernel: which calls it takes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import saccade

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def problem(**changes: Any) -> Any:
    from saccade.ops.attention.hopper.configs import HopperPagedProblem

    return HopperPagedProblem(128, 128, 64, 512, 512, 132, False)._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"page_size": 16}, None),
        ({"page_size": 1024}, None),
        ({"page_size": 8}, "slots"),
        ({"page_size": 48}, "slots"),
        ({"page_size": 192}, "slots"),
        ({"page_size": 192, "head_width": 256}, None),  # whose tiles are of 64 keys
        ({"planned": True}, "planned ahead"),
        ({"query_tiles": 99, "slots": 99}, None),
        ({"query_tiles": 98, "slots": 98}, "few query rows"),
        ({"slots": 1025}, "most sequences"),
    ],
)
def test_which_passes_it_takes(changes: dict[str, Any], reason: str | None) -> None:
    from saccade.ops.attention.hopper.configs import pages_unsupported

    found = pages_unsupported(problem(**changes))
    assert (found is None) if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, "GPU"),
        ({"pages": torch.float8_e4m3fn}, "eight bits"),
        ({"batch_invariant": True}, "batch"),
        ({"dtype": torch.float32}, "float32"),
        ({"slot_step": 17}, "strides"),
    ],
)
def test_dispatch_says_what_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    dtype = changes.get("dtype", torch.bfloat16)
    pool_ = torch.zeros(4, 2, 16, changes.get("slot_step", 16), dtype=dtype)[..., :16]
    pool_ = pool_.to(changes.get("pages", dtype))
    scales = torch.ones(4, 2, 16) if pool_.element_size() == 1 else None
    found = saccade.explain(
        saccade.attention_paged, torch.zeros(1, 2, 3, 16, dtype=dtype), pool_, pool_,
        torch.zeros(1, 2, dtype=torch.int32), torch.tensor([20]).int(),
        key_scales=scales, value_scales=scales,
        batch_invariant=changes.get("batch_invariant", False),
    )  # fmt: skip
    assert reason in (found.reasons["hopper"] or "")
    assert found.chosen != "hopper"
