"""The gated delta rule by Hopper kernels: what they refuse, which calls are theirs, and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import saccade
from saccade.ops.delta_rule.validation import prepare
from saccade.runtime import backends
from saccade.testing import assert_delta_exact, make_delta_case, poisoned

BF16 = torch.bfloat16


def inputs_of(
    *shape: int, value_heads: int = 0, value_dim: int = 0, dtype: torch.dtype = BF16
) -> tuple[Tensor, ...]:
    batch, heads, length, dim = shape
    rows, value_heads = torch.zeros(shape, dtype=dtype), value_heads or heads
    value = torch.zeros(batch, value_heads, length, value_dim or dim, dtype=dtype)
    return rows, rows, value, torch.zeros(batch, value_heads, length)


def reason(*inputs: Tensor, **more: Any) -> str:
    return backends.explained(prepare(*inputs, **more).problem).reasons["hopper"] or ""


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("not float16", lambda: reason(*inputs_of(1, 2, 8, 64, dtype=torch.float16))),
        (
            "decay of each channel",
            lambda: reason(*inputs_of(1, 2, 8, 64), decay=torch.zeros(1, 2, 8, 64)),
        ),
        ("up to 128, not 136 and 64", lambda: reason(*inputs_of(1, 2, 8, 136, value_dim=64))),
        ("up to 128, not 64 and 256", lambda: reason(*inputs_of(1, 2, 8, 64, value_dim=256))),
        ("multiples of 8", lambda: reason(*inputs_of(1, 2, 8, 60))),
        ("nothing to load", lambda: reason(*inputs_of(1, 2, 0, 64))),
        ("nothing to load", lambda: reason(*inputs_of(0, 2, 8, 64))),
        ("strides", lambda: reason(*[rows[..., 1:] for rows in inputs_of(1, 2, 8, 65)[:3]],
                                   torch.zeros(1, 2, 8))),
        (
            "takes no config",
            lambda: reason(*inputs_of(1, 2, 8, 64), config=saccade.KernelConfig(kv_tile=64)),
        ),
    ],
)  # fmt: skip
def test_reasons(what: str, found: Any) -> None:
    assert what in found()


def test_it_comes_before_triton_kernels_and_wants_a_hopper() -> None:
    assert list(backends.candidates("delta_rule"))[1].name == "hopper"
    with pytest.raises(NotImplementedError, match="hopper: "):
        saccade.gated_delta_rule(*inputs_of(1, 2, 8, 64), implementation="hopper")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((4, 32, 64, 128), None),
        ((2, 32, 64, 96), None),
        ((1, 8, 65536, 128), "fewer than 64 states"),
        ((4, 32, 64, 64), "computes with 128 channels"),
    ],
)
def test_what_it_is_not_faster_at_goes_to_triton_kernels_unless_it_is_named(
    shape: tuple[int, ...], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_hopper_device_unsupported", lambda device, index: None)
    monkeypatch.setattr(backends, "_triton_device_unsupported", lambda *device: None)
    asked = prepare(*inputs_of(*shape)).problem._replace(device="cuda")
    assert backends.choose(asked) == ("hopper" if said is None else "triton")
    assert backends.choose(asked, "hopper") == "hopper"
    why = backends.explained(asked).not_preferred["hopper"]
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize(
    ("shape", "by"),
    [
        ((1, 8, 65536, 128), "hopper"),
        ((2, 16, 4096, 128), "hopper"),
        ((1, 8, 8192, 128), "triton"),
        ((2, 32, 64, 128), "hopper"),  # 64 states
        ((1, 8, 65536, 64), "triton"),
    ],
)
def test_backward_passes_of_few_states_take_it_where_rows_are_many(
    shape: tuple[int, ...], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_hopper_device_unsupported", lambda device, index: None)
    monkeypatch.setattr(backends, "_triton_device_unsupported", lambda *device: None)
    asked = prepare(*inputs_of(*shape)).problem._replace(device="cuda")
    assert backends.choose(asked, None, "backward") == by


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")


def gpu_case(**description: Any) -> Any:
    return make_delta_case(
        **{
            "dtype": BF16, "device": "cuda", "head_dim": 128, "value_dim": 128, "heads": (2, 4),
            "decay": "heads", "normalize_qk": True, **description,
        }
    )  # fmt: skip


FORMS: list[dict[str, Any]] = [
    {"lengths": (1,)},
    {"lengths": (64,), "decay": "none"},
    {"lengths": (150,), "state": True},
    {"lengths": (333,), "decay": "none", "state": True, "normalize_qk": False, "strength": 0.1},
    {"lengths": (200,), "strength": 100.0, "state": True},
    {"lengths": (200,), "strength": 1e-3, "hard": True},
    {"lengths": (200,), "heads": (1, 3), "scale": -0.5},
    {"lengths": (200,), "layout": "permuted"},
    {"lengths": (200,), "head_dim": 64, "value_dim": 64, "state": True},
    {"lengths": (200,), "head_dim": 96, "value_dim": 120, "state": True},
    {"lengths": (200,), "head_dim": 128, "value_dim": 40},
    {"packed": True, "lengths": (70, 0, 1, 64, 333, 0), "state": True},
    {"packed": True, "lengths": (128, 63), "decay": "none"},
    {"packed": True, "lengths": (5, 130), "head_dim": 64, "value_dim": 96},
]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form(hopper: None, form: dict[str, Any]) -> None:
    with poisoned():
        assert_delta_exact(gpu_case(**form), "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["query", "key", "value", "beta", "decay"])
def test_nonfinite_numbers_reach_no_earlier_token(hopper: None, name: str) -> None:
    """Within a chunk too: exactly the numbers that the recurrence makes so are not finite."""
    case = gpu_case(lengths=(200,), batch=1)
    rows = case.tensors[name][0, 0]
    trash = torch.nan if name in ("key", "beta") else torch.inf
    rows[100] = torch.where(
        torch.arange(rows[100].numel(), device="cuda").view_as(rows[100]) > 2, rows[100], trash
    )
    call: Any = saccade.gated_delta_rule
    options = {"normalize_qk": True}
    found, exact = (
        call(**case.tensors, **options, implementation=one) for one in ("hopper", "reference")
    )
    assert bool(found[:, :, :100].isfinite().all())
    assert torch.equal(found.isfinite(), exact.isfinite())
    known = exact.isfinite()
    torch.testing.assert_close(found[known], exact[known], atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_nonfinite_numbers_stay_in_their_sequence_and_head(hopper: None) -> None:
    """A chunk holds the next sequence's rows, too."""
    case = gpu_case(packed=True, lengths=(70, 60, 1), state=True)
    positions, keywords = case.arguments(case.tensors)
    call: Any = saccade.gated_delta_rule_varlen
    clean, state = call(*positions, **keywords, implementation="hopper")
    for name in ("query", "key", "value", "beta", "decay"):
        case.tensors[name][70:130] = torch.nan
    positions, keywords = case.arguments(case.tensors)
    found, after = call(*positions, **keywords, implementation="hopper")
    for rows in (slice(0, 70), slice(130, 131)):
        assert torch.equal(found[rows], clean[rows])
    assert torch.equal(after[[0, 2]], state[[0, 2]])
    assert bool(found[70:130].isnan().all())


@pytest.mark.gpu
def test_rows_behind_the_last_sequence_are_cleared(hopper: None) -> None:
    query, key, value, beta = (
        torch.randn(100, 2, *channels, device="cuda").to(BF16) for channels in ((128,),) * 3 + ((),)
    )
    ends = torch.tensor([0, 70], dtype=torch.int32, device="cuda")
    with poisoned():
        found = saccade.gated_delta_rule_varlen(
            query, key, value, beta.sigmoid(), ends, normalize_qk=True, implementation="hopper"
        )
    assert not bool(found[70:].any()) and bool(found[:70].any(-1).all())


@pytest.mark.gpu
def test_errors_do_not_grow_with_the_length(hopper: None) -> None:
    """And as many programs as a GPU runs, twice."""
    case = gpu_case(lengths=(4096,), batch=2, heads=(2, 4), strength=0.1)
    call: Any = saccade.gated_delta_rule
    found = call(**case.tensors, normalize_qk=True, implementation="hopper").double()
    wide = {name: rows.double() for name, rows in case.tensors.items()}
    exact = call(**wide, normalize_qk=True, implementation="reference")
    for part in (slice(0, 512), slice(3584, 4096)):
        off = (found - exact)[:, :, part].norm() / exact[:, :, part].norm()
        assert float(off) <= 5e-3


@pytest.mark.gpu
def test_projections_are_read_as_they_lie_and_runs_are_bit_equal(hopper: None) -> None:
    joint = torch.randn(2, 700, 16, 128, device="cuda").to(BF16)
    query, key, value = (part.transpose(1, 2) for part in joint.split([4, 4, 8], 2))
    beta = torch.rand(2, 700, 8, device="cuda").transpose(1, 2)
    call: Any = saccade.gated_delta_rule
    options = {"normalize_qk": True, "implementation": "hopper"}
    found = call(query, key, value, beta, **options)
    again = call(*(each.contiguous() for each in (query, key, value, beta)), **options)
    assert torch.equal(found, again)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients_of_more_chunks_than_programs(hopper: None, packed: bool) -> None:
    """Each program takes several, the last ones of some sequences with few rows. Triton kernels,
    which the suite compares with float64, round as often."""
    lengths = (2100, 77, 1500) if packed else (2100,)
    case = gpu_case(lengths=lengths, packed=packed, batch=2, heads=(4, 8), strength=0.1)
    found, again, other = (case.run(name) for name in ("hopper", "hopper", "triton"))
    for name, rows in found.items():
        assert torch.equal(rows, again[name]), name
        off = (rows.double() - other[name].double()).norm() / other[name].double().norm()
        assert float(off) <= 2 * 5e-3, name  # the bound of each against float64


@pytest.mark.gpu
def test_gradients_of_nonfinite_numbers_stay_in_their_sequence(hopper: None) -> None:
    case = gpu_case(packed=True, lengths=(70, 60, 1))
    clean = case.run("hopper")
    for name in ("query", "key", "value", "beta", "decay"):
        case.tensors[name][70:130] = torch.nan
    found = case.run("hopper")
    del found["state"], clean["state"]  # of sequences, not of tokens
    for name, rows in found.items():
        for part in (slice(0, 70), slice(130, 131)):
            assert torch.equal(rows[part], clean[name][part]), name
