"""The gated delta rule by Triton kernels: interpreted, a sample of the suite; steps and configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from delta_suite import TestResults, TestSteps
from implementations import F16, F32, Implementation, fixture_of

import saccade
from saccade.gpu import language
from saccade.ops.attention.triton.configs import ARCHITECTURES
from saccade.ops.delta_rule.triton import configs, host, passes
from saccade.runtime.delta_spec import DeltaInputs, DeltaVariant
from saccade.runtime.spec import KernelConfig
from saccade.testing import assert_delta_exact, make_delta_case, poisoned

__all__ = ["TestResults", "TestSteps", "implementation"]

ONE_HEAD: dict[str, Any] = {"batch": 1, "heads": (1, 1)}

interpreted = pytest.mark.skipif(
    not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
)

_TRITON = Implementation("triton", (F32, F16), slow=True)
implementation = fixture_of([_TRITON] if language.INTERPRETED else [])


@interpreted
@pytest.mark.parametrize(
    ("chunk", "description"),
    [
        # Equal keys and beta 1: powers of the system's matrix would cancel numbers of 6,000.
        (64, {"decay": "heads", "strength": 1e-3, "hard": True, "lengths": (70,), **ONE_HEAD}),
        (64, {"decay": "channels", "strength": 100.0, "lengths": (66,), "state": True, **ONE_HEAD}),
        # About as much as one reference in a chunk can stand: of some channels, not of others.
        (64, {"decay": "channels", "strength": 3.7, "lengths": (130,), "state": True, **ONE_HEAD}),
        (64, {"decay": "channels", "strength": 0.2, "lengths": (70,), "dtype": F16, **ONE_HEAD}),
        (32, {"decay": "heads", "strength": 100.0, "lengths": (40,), **ONE_HEAD}),
        (16, {"packed": True, "lengths": (18, 3, 0), "heads": (1, 2), "dtype": F16, "state": True}),
        (16, {"decay": "channels", "lengths": (18,), "layout": "permuted", "dtype": F16,
              "head_dim": 40, "value_dim": 24, **ONE_HEAD}),
    ],
    ids=str,
)  # fmt: skip
def test_as_exact_as_float64_allows(chunk: int, description: dict[str, Any]) -> None:
    case = make_delta_case(**description, normalize_qk=True)
    with poisoned():
        assert_delta_exact(case, "triton", config=KernelConfig(kv_tile=chunk))


@interpreted
@pytest.mark.parametrize(
    "empty",
    [{"batch": 0}, {"heads": (0, 0)}, {"lengths": (0,)}, {"packed": True, "lengths": (0, 0)}],
    ids=str,
)
def test_zero_sized_dimensions(empty: dict[str, Any]) -> None:
    case = make_delta_case(**{"decay": "channels", "state": True, "heads": (1, 1), **empty})
    with poisoned():
        assert_delta_exact(case, "triton")


@interpreted
@pytest.mark.parametrize("decay", ["heads", "channels"])
def test_a_token_that_forgets_everything(decay: str) -> None:
    """−inf: what follows is as if nothing came before, in the same chunk too."""
    case = make_delta_case(decay=decay, lengths=(12,), state=True, normalize_qk=True, **ONE_HEAD)
    case.tensors["decay"][:, :, 7] = -torch.inf
    found = case.run("triton")
    assert all(bool(each.isfinite().all()) for each in found.values())
    later = {name: each[:, :, 7:] for name, each in case.tensors.items() if name != "initial_state"}
    call: Any = saccade.gated_delta_rule
    alone = call(**later, normalize_qk=True, implementation="reference")
    torch.testing.assert_close(found["output"][:, :, 7:], alone, atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize(
    "description",
    [
        {"decay": "heads", "packed": True, "lengths": (18, 0, 33, 5), "state": True},
        {"decay": "channels", "lengths": (33,), "batch": 1, "dtype": F16},
    ],
    ids=str,
)
def test_segments_are_the_whole(
    description: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sequences cut into segments, of one chunk here: outputs, states and gradients."""
    monkeypatch.setattr(configs, "segment", lambda *sizes: 1)
    monkeypatch.setattr(passes, "_call_specs", {})
    case = make_delta_case(**description, heads=(1, 1), normalize_qk=True)
    with poisoned():
        assert_delta_exact(case, "triton", config=KernelConfig(kv_tile=16))


def test_few_long_sequences_are_cut() -> None:
    """And no others: 132 processors have as many programs as they can run."""
    assert configs.segment(16, 1024, 1.0, 132) == 64
    assert configs.segment(16, 16, 1.0, 132) == 0
    assert configs.segment(512, 1024, 1.0, 132) == 0
    assert configs.segment(16, 1024, 1.0, 1) == 0


@interpreted
@pytest.mark.parametrize("decay", ["heads", "channels"])
@pytest.mark.parametrize("name", ["query", "key", "value", "beta", "decay"])
def test_nonfinite_numbers_reach_no_earlier_token(name: str, decay: str) -> None:
    """Within a chunk too: exactly the numbers that the recurrence makes so are not finite."""
    case = make_delta_case(lengths=(12,), decay=decay, **ONE_HEAD)
    rows = case.tensors[name][0, 0]
    trash = torch.nan if name in ("key", "beta") else torch.inf
    rows[7] = torch.where(torch.arange(rows[7].numel()).view_as(rows[7]) > 2, rows[7], trash)
    call: Any = saccade.gated_delta_rule
    found, exact = (call(**case.tensors, implementation=one) for one in ("triton", "reference"))
    assert bool(found[:, :, :7].isfinite().all())
    assert torch.equal(found.isfinite(), exact.isfinite())
    known = exact.isfinite()
    torch.testing.assert_close(found[known], exact[known], atol=1e-5, rtol=1e-5)


@interpreted
def test_nonfinite_numbers_stay_in_their_sequence_and_head() -> None:
    case = make_delta_case(packed=True, lengths=(5, 6), heads=(1, 2), decay="heads")
    clean = case.run("triton")
    case.tensors["value"][3, 1] = torch.nan
    found = case.run("triton")
    assert bool(found["output"][3:5, 1].isnan().all())
    for name in ("output", "grad_value", "grad_beta", "grad_decay"):
        torch.testing.assert_close(found[name][5:], clean[name][5:], atol=0, rtol=0)
        torch.testing.assert_close(found[name][:, 0], clean[name][:, 0], atol=0, rtol=0)


@interpreted
def test_a_slot_below_0_is_of_no_state() -> None:
    """A row of padding in a batch; on a GPU nobody looks at slots before the kernel."""
    case = make_delta_case(lengths=(1,), state=True, heads=(1, 2), value_dim=40)
    inputs, pool = DeltaInputs(**case.tensors), case.tensors["initial_state"]
    before = pool.clone()
    output = host.step(pool, torch.tensor([-1, 1]), inputs, DeltaVariant(True, 0.5))
    assert torch.equal(pool[0], before[0]) and not torch.equal(pool[1], before[1])
    assert not bool(output[0].any()) and bool(output[1].any())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_configs(architecture: str) -> None:
    """Of every width: tiles that divide what is widened, and chunks whose system can be solved."""
    for width in (16, 64, 128, 256):
        for wide in (False, True):
            for by_channel in (False, True):
                found = configs.choose(architecture, width, 16, wide, by_channel, None)
                assert found.chunk in configs.CHUNKS
                assert found.tile <= 16 and found.gradient_values <= 16
                assert width % found.system_tile == 0
    requested = KernelConfig(kv_tile=32, query_tile=16, num_warps=2)
    found = configs.choose(architecture, 64, 64, False, False, requested)
    assert (found.chunk, found.tile, found.num_warps) == (32, 16, 2)


def test_a_chunk_that_no_kernel_has_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kv_tile: got 128, takes 16, 32 or 64"):
        configs.choose("sm_90", 64, 64, False, False, KernelConfig(kv_tile=128))


def test_a_scan_that_reads_outside_of_its_memory_is_refused() -> None:
    few = KernelConfig(num_warps=4, num_stages=1)
    with pytest.raises(ValueError, match="num_stages: got 1 with num_warps 4, takes 2 or more"):
        configs.choose("sm_90", 128, 128, False, False, few)
    assert configs.choose("sm_80", 128, 128, False, False, few).num_stages == 1
    assert (
        configs.choose("sm_90", 256, 128, False, False, KernelConfig(num_stages=1)).num_warps == 8
    )
