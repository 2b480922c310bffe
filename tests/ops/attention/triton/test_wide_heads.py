"""Heads of more channels than a tile holds: a rest beside the first tile, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from saccade.gpu import language
from saccade.gpu.wide_heads import WIDEST_TILE, tile_width, width_of
from saccade.runtime import backends
from saccade.runtime.spec import Problem
from saccade.testing import make_case, oracle, poisoned, tolerances
from saccade.testing.oracle import assert_within

F32, F16 = torch.float32, torch.float16
interpreted = pytest.mark.skipif(
    not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
)


def test_widths() -> None:
    assert [tile_width(dim) for dim in (1, 33, 512, 513, 576)] == [16, 64, 512, 512, WIDEST_TILE]
    for head_dim, width in ((512, 512), (513, 528), (530, 544), (576, 576)):
        constants = {"HEAD_DIM": head_dim, "HEAD_WIDTH": tile_width(head_dim), "VALUE_WIDTH": 64}
        assert width_of(constants) == width


@interpreted
@pytest.mark.parametrize(
    ("sizes", "dtype"), [((576, 512), F16), ((530, 40), F32), ((320, 264), F32)], ids=str
)
def test_a_rest_is_a_second_product(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case(
        head_dim=sizes[0], value_dim=sizes[1], dtype=dtype, mask="causal", poison_hidden=True,
        lengths=((20, 37),), batch=1, kv_heads=1, packed=dtype == F16,
    )  # fmt: skip
    exact = oracle(case)
    names = ("output", "lse")
    allowed = tolerances(case, exact)
    with poisoned(), torch.no_grad():
        output, lse = case.call(case.leaves(), implementation="triton")
    got = {"output": output, "lse": lse}
    assert_within(got, {n: exact[n] for n in names}, {n: allowed[n] for n in names}, str(sizes))


WIDE = Problem(1, 8, 1, 8, 8, 576, 512, torch.bfloat16, "cuda")


def problem_on(monkeypatch: pytest.MonkeyPatch, major: int, kilobytes: int) -> None:
    found = SimpleNamespace(major=major, shared_memory_per_block_optin=kilobytes << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(backends, "_triton_device_unsupported", lambda *device: None)


def test_gradients_take_less_and_the_rest_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem_on(monkeypatch, 9, 227)
    assert backends.choose(WIDE, "triton") == "triton"
    with pytest.raises(NotImplementedError, match="gradients take a head_dim up to 512, not 576"):
        backends.choose(WIDE, "triton", "backward")
    assert backends.choose(WIDE._replace(head_dim=512), "triton", "backward") == "triton"
    for head_dim, value_dim in ((577, 512), (576, 513)):
        with pytest.raises(NotImplementedError, match=f"not {head_dim} and {value_dim}"):
            backends.choose(WIDE._replace(head_dim=head_dim, value_dim=value_dim), "triton")


@pytest.mark.parametrize(
    ("major", "kilobytes", "dtype", "head_dim", "served"),
    [
        (7, 64, F16, 512, (False, False)),
        (7, 64, F16, 256, (True, True)),
        (8, 99, F16, 512, (True, True)),
        (8, 99, F32, 512, (True, False)),
        (8, 99, F32, 576, (False, False)),
        (8, 163, F32, 512, (True, True)),
    ],
)
def test_products_without_tensor_cores_need_memory(
    monkeypatch: pytest.MonkeyPatch,
    major: int, kilobytes: int, dtype: torch.dtype, head_dim: int, served: tuple[bool, bool],
) -> None:  # fmt: skip
    problem_on(monkeypatch, major, kilobytes)
    problem = WIDE._replace(head_dim=head_dim, value_dim=min(head_dim, 512), dtype=dtype)
    problem = problem._replace(device_index=kilobytes)  # what a device has is remembered
    for of, expected in zip(("forward", "backward"), served, strict=True):
        reason = backends.explained(problem, of=of).reasons["triton"]
        assert (reason is None) == expected
        assert reason is None or "take" in reason
