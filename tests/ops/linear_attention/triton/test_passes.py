"""Linear attention by Triton kernels: segments side by side, steps in place, configs."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import saccade
from saccade.gpu import language
from saccade.ops.attention.triton import call_spec
from saccade.ops.attention.triton.configs import ARCHITECTURES
from saccade.ops.linear_attention.triton import configs as linear_configs
from saccade.ops.linear_attention.triton import passes as linear_passes
from saccade.runtime.spec import LinearState
from saccade.testing import assert_linear_exact, make_linear_case, poisoned

interpreted = pytest.mark.skipif(
    not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
)
ONE_HEAD = {"batch": 1, "heads": (2, 1, 1)}


@interpreted
@pytest.mark.parametrize(
    "description",
    [
        {"lengths": ((70, 70),)},
        {"lengths": ((50, 70),), "decay": "rows", "state": True},
        {"lengths": ((50, 70),), "decay": "rows", "state": True, "value_dim": 64},  # counted first
        {"lengths": ((70, 50),), "decay": "heads", "align": "top_left", "padded": True},
        {"lengths": ((70, 60),), "decay": "rows", "state": True, "causal": False},
    ],
    ids=str,
)
def test_segments_side_by_side_are_one_sequence(
    monkeypatch: pytest.MonkeyPatch, description: dict[str, Any]
) -> None:
    monkeypatch.setattr(linear_passes, "SHORTEST_SEGMENT", 20)
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: 64)
    case = make_linear_case(**ONE_HEAD, **description)
    found = linear_passes.LinearCallSpec.of(
        *case.prepared(case.leaves())[:2], saccade.KernelConfig()
    )
    assert found.segments(2) > 1
    assert_linear_exact(case, "triton")


@interpreted
@pytest.mark.parametrize("shortest", [20, 512])  # segments side by side, or one
@pytest.mark.parametrize(
    "description",
    [
        {"lengths": ((0, 70),), "decay": "rows", "state": True},
        {"lengths": ((0, 70),), "decay": "heads", "align": "top_left", "padded": True},
        {"lengths": ((0, 70),), "state": True, "causal": False, "value_dim": 64},
        {"lengths": ((0, 70), (0, 0), (0, 9)), "packed": True, "decay": "rows", "state": True},
    ],
    ids=str,
)
def test_keys_without_rows_scan_nothing(
    monkeypatch: pytest.MonkeyPatch, description: dict[str, Any], shortest: int
) -> None:
    """They are summed up: what another part of a sequence starts from needs no output."""
    monkeypatch.setattr(linear_passes, "SHORTEST_SEGMENT", shortest)
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: 64)
    scans = []
    scan = linear_passes.Passes.scan

    def counted(self: Any, name: str, *given: Any, **options: Any) -> None:
        scans.append(name)
        scan(self, name, *given, **options)

    monkeypatch.setattr(linear_passes.Passes, "scan", counted)
    assert_linear_exact(make_linear_case(**ONE_HEAD, **description), "triton")
    assert set(scans) <= {"grad_key", "grad_value"}


@interpreted
@pytest.mark.parametrize("segments", [1, 2])
def test_float16_has_gradients_after_a_long_past(
    monkeypatch: pytest.MonkeyPatch, segments: int
) -> None:
    """Features over a divisor of a million are 1e-6, which float16 holds with four bits."""
    monkeypatch.setattr(linear_passes.LinearCallSpec, "segments", lambda *_: segments)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(1, 1, 70, 16, generator=generator).half() for _ in range(4)]
    past = LinearState(torch.zeros(1, 1, 16, 16), torch.full((1, 1, 16), 60_000.0))
    found, exact = (
        gradients([part.to(dtype) for part in rows], past, implementation)
        for dtype, implementation in ((torch.float16, "triton"), (torch.float64, "reference"))
    )
    for got, true in zip(found, exact, strict=True):
        assert (got.double() - true).norm() <= 2 * torch.finfo(torch.float16).eps * true.norm()


def gradients(
    rows: list[torch.Tensor], past: LinearState, implementation: str
) -> tuple[torch.Tensor, ...]:
    leaves = [part.requires_grad_() for part in rows[:3]]
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    state = LinearState(*(sums.to(wide) for sums in past[:2]))
    output = saccade.linear_attention(*leaves, initial_state=state, implementation=implementation)
    return torch.autograd.grad(output, leaves, 1000 * rows[3])


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_favor_finds_keys_however_small(dtype: torch.dtype, device: str) -> None:
    """Their features' units grow along the call, which kernels are told as a decay."""
    torch.manual_seed(0)
    favor = saccade.feature_maps.Favor(16).to(device)
    rows = [(torch.randn(1, 2, 40, 16) * std).to(dtype).to(device) for std in (3, 3, 1, 1)]
    found, exact = (
        favor_results(favor, [part.to(wide) for part in rows], implementation)
        for wide, implementation in ((dtype, "triton"), (torch.float64, "reference"))
    )
    for got, true in zip(found, exact, strict=True):
        off = (got.double() - true).norm(dim=-1)
        assert bool((off <= max(1e-4, torch.finfo(dtype).eps) * true.norm(dim=-1).amax()).all())


def favor_results(favor: Any, rows: list[torch.Tensor], implementation: str) -> list[torch.Tensor]:
    """Output and gradients of most rows, and the output of a step that goes on from there."""
    leaves = [part[:, :, :36].requires_grad_() for part in rows[:3]]
    options = {"feature_map": favor, "implementation": implementation}
    output, state = saccade.linear_attention(*leaves, return_state=True, **options)
    gradients = torch.autograd.grad(output, leaves, rows[3][:, :, :36])
    last = [part[:, :, 36:].detach() for part in rows[:3]]
    past = LinearState(*(part.detach() for part in state if part is not None))
    with torch.no_grad():
        if implementation == "reference":
            after = saccade.linear_attention(*last, initial_state=past, **options)
        else:
            after = saccade.linear_attention_step(past, *last, **options)
    return [output.detach(), *gradients, after]


@interpreted
@pytest.mark.parametrize("heads", [2, 4], ids=["own states", "shared states"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_step_changes_states_as_the_cpu_does(dtype: torch.dtype, heads: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pool = LinearState(normal(5, 2, 16, 24), normal(5, 2, 16).abs())
    query, key, value = normal(3, heads, 2, 16), normal(3, 2, 2, 16), normal(3, 2, 2, 24)
    results = []
    for implementation in ("cpu", "triton"):
        state = LinearState(*(sums.to(dtype, copy=True) for sums in pool[:2]))
        output = saccade.linear_attention_step(
            state,
            query,
            key,
            value,
            state_index=torch.tensor([4, 0, 2]),
            implementation=implementation,
        )
        results.append((output, state.kv.float(), state.key_sum.float()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("wide", [False, True], ids=["half", "float32"])
def test_every_architecture_has_configs(architecture: str, wide: bool) -> None:
    for width in (16, 32, 64, 128, 256):
        config = linear_configs.choose(architecture, width, wide, None)
        for size in (config.tile, config.chunk):
            assert size >= 16 and size & (size - 1) == 0


def test_a_given_chunk_is_taken() -> None:
    given = saccade.KernelConfig(kv_tile=32)
    assert linear_configs.choose("sm_90", 64, False, given).chunk == 32
    with pytest.raises(ValueError, match="kv_tile: got 24, takes a power of two"):
        linear_configs.choose("sm_90", 64, False, saccade.KernelConfig(kv_tile=24))


@pytest.mark.parametrize("which", ["output", "grad_query", "grad_key", "grad_value"])
def test_gradients_over_shared_heads_hold_the_rows_of_one_at_a_time(which: str) -> None:
    config = linear_configs.choose("sm_90", 128, False, None)
    assert config.num_stages > 1
    assert linear_configs.sharing(config, which, 1) == config
    stages = linear_configs.sharing(config, which, 2).num_stages
    assert stages == (1 if which in ("grad_key", "grad_value") else config.num_stages)


@interpreted
def test_features_are_written_once_where_many_tiles_read_them() -> None:
    # Two heads of queries and values have keys in common; rows behind a key length are NaN.
    form = {"lengths": ((40, 50),), "heads": (2, 1, 2), "value_dim": 64, "padded": True}
    case = make_linear_case(batch=1, scale=0.5, **form)
    with poisoned():
        assert_linear_exact(case, "triton", config=saccade.KernelConfig(query_tile=16))
