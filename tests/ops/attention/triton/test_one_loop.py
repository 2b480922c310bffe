"""Full tiles and partial tiles in one loop, in Triton's interpreter: exact, and hidden stays
hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import saccade
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton import host as attention_host
from saccade.ops.attention.triton.configs import KernelProblem
from saccade.testing import assert_exact, make_case

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),  # numpy on rows of NaN
]

TILES = saccade.KernelConfig(16, 16, backward=saccade.KernelConfig(16, 16))
CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal", "lengths": ((40, 50),)},  # both kinds of tiles
    "window": {"mask": "window", "lengths": ((70, 70),), "score": "softcap"},
    "packed": {"mask": "causal", "packed": True, "lengths": ((33, 33), (0, 5), (20, 17))},
    "nonfinite": {"mask": "window", "lengths": ((40, 60),), "poison_hidden": True},
}


@pytest.mark.parametrize("name", list(CASES))
def test_one_loop_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "in_one_loop", lambda problem: True)
    monkeypatch.setattr(attention_host, "_forwards", {})
    monkeypatch.setattr(attention_host, "_lengths", {})
    case = make_case(batch=1, kv_heads=1, group=2, **CASES[name])
    assert_exact(case, "triton", deterministic=True, config=TILES)
    loops = [each.launch.constants["ONE_LOOP"] for each in attention_host._lengths.values()]
    assert loops == [True]


def test_short_ranges_share_a_loop_where_it_was_timed() -> None:
    short = KernelProblem("sm_90", "forward", 128, False, masked=True, short=True)
    assert configs.in_one_loop(short)
    others = [
        short._replace(architecture="sm_80"), short._replace(width=64), short._replace(width=256),
        short._replace(wide=True), short._replace(dropout=True), short._replace(short=False),
    ]  # fmt: skip
    assert not any(map(configs.in_one_loop, others))
