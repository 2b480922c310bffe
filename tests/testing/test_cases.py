"""Cases: reproducible, as their descriptions say, with trash only where nothing sees it."""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade.masks import Mask
from saccade.testing import Case, make_case, poisoned
from saccade.testing.cases import LAYOUTS, MASKS, SCORES, Description, descriptions, problems

RICH = {
    "mask": "mixed", "score": "bias >> softcap", "sinks": True, "dropout_p": 0.3,
    "lengths": ((5, 9), (0, 3), (7, 7)),
}  # fmt: skip


def tensors_of(case: Case) -> list[torch.Tensor]:
    captured = case.mask.captured.tensors if isinstance(case.mask, Mask) else ()
    return [*case.tensors.values(), *case.grads.values(), *captured]


@pytest.mark.parametrize("packed", [False, True])
def test_a_description_always_makes_the_same_case(packed):
    one = make_case(**RICH, packed=packed, seed=3)
    torch.manual_seed(99)  # the global generator plays no part
    same = make_case(one.description)
    for first, second in zip(tensors_of(one), tensors_of(same), strict=True):
        assert torch.equal(first, second)
    state = torch.get_rng_state()
    make_case(one.description)
    assert torch.equal(torch.get_rng_state(), state)
    other = make_case(**RICH, packed=packed, seed=4)
    assert not torch.equal(one.tensors["query"], other.tensors["query"])


def test_a_case_runs_the_same_every_time():
    case = make_case(**RICH, packed=True)
    one, same = case.run("cpu"), case.run("cpu")
    assert one.keys() == same.keys()
    for name in one:
        assert torch.equal(one[name], same[name]), name


def test_shapes_are_as_described():
    case = make_case(batch=3, kv_heads=2, group=4, lengths=((5, 9),), head_dim=7, value_dim=3)
    assert case.tensors["query"].shape == (3, 8, 5, 7)
    assert case.tensors["key"].shape == (3, 2, 9, 7)
    assert case.tensors["value"].shape == (3, 2, 9, 3)
    assert case.grads["output"].shape == (3, 8, 5, 3)
    assert case.grads["lse"].shape == (3, 8, 5)
    packed = make_case(kv_heads=2, group=4, lengths=((5, 9), (0, 2)), packed=True, sinks=True)
    assert packed.tensors["query"].shape == (5, 8, 16)
    assert packed.tensors["key"].shape == (11, 2, 16)
    assert packed.tensors["sinks"].shape == (8,)
    assert packed.grads["lse"].shape == (8, 5)
    assert packed.cu_seqlens is not None
    assert [offsets.tolist() for offsets in packed.cu_seqlens] == [[0, 5, 5], [0, 9, 11]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_what_their_names_say(layout):
    case = make_case(layout=layout, lengths=((5, 9),), head_dim=8)
    key = case.tensors["key"]
    assert key.shape == (2, 2, 9, 8)
    strides = key.stride()
    facts = {
        "contiguous": key.is_contiguous(),
        "permuted": key.transpose(1, 2).is_contiguous(),
        "sliced": strides[-1] == 1 and not key.is_contiguous() and key.storage_offset() > 0,
        "strided_last": strides[-1] != 1,
        "expanded": strides[1] == 0,
    }
    assert facts[layout]
    for dtype in (None, torch.float64):
        leaf = case.leaves(dtype)["key"]
        assert leaf.stride() == strides
        assert leaf.requires_grad
        assert torch.equal(leaf.detach().float(), key)
        assert leaf.untyped_storage().data_ptr() != key.untyped_storage().data_ptr()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["causal_top_left", "key_lengths", "nothing"])
def test_trash_lies_where_nothing_sees_it_and_only_there(name, packed):
    lengths = ((5, 9), (3, 8)) if packed else ((5, 9),)
    changes = {"mask": name, "lengths": lengths, "packed": packed, "group": 1}
    clean, nonfinite = make_case(**changes), make_case(**changes, poison_hidden=True)
    for tensor in ("key", "value"):
        trash = ~nonfinite.tensors[tensor].isfinite().all(-1)
        assert trash.any()
        assert torch.equal(nonfinite.tensors[tensor][~trash], clean.tensors[tensor][~trash])
    # A hidden value takes part in no output, so its gradient is 0; a seen one has some.
    gradient = clean.run("reference")["grad_value"]
    assert torch.equal(gradient.abs().sum(-1) == 0, trash)


def test_every_mask_and_score_by_name_makes_a_call_that_runs():
    for mask in MASKS:
        for score in SCORES:
            case = make_case(mask=mask, score=score, lengths=((4, 6),))
            output, _ = case.call(case.leaves())
            assert output.isfinite().all(), (mask, score)


def test_masks_by_name_differ():
    """No name hides the mask of another (a case named `window` is not causal)."""
    seen = {}
    for name in MASKS:
        case = make_case(mask=name, lengths=((19, 23),), seed=1)
        gradient = case.run("reference")["lse"]
        for other, result in seen.items():
            assert not torch.equal(gradient, result), (name, other)
        seen[name] = gradient


# ---- strategies -------------------------------------------------------------------------------


def test_strategy_yields_everything():
    drawn: list[Description] = []

    @settings(deadline=None, max_examples=400, derandomize=True, database=None)
    @given(descriptions())
    def collect(description):
        drawn.append(description)

    collect()
    assert {d.mask for d in drawn} == set(MASKS)
    assert {d.score for d in drawn} == set(SCORES)
    assert {d.layout for d in drawn} == set(LAYOUTS)
    for field in ("packed", "sinks", "poison_hidden"):
        assert {getattr(d, field) for d in drawn} == {True, False}
    assert {d.dropout_p > 0 for d in drawn} == {True, False}
    assert {d.group for d in drawn} == {d.kv_heads for d in drawn} == {1, 2, 3}
    lengths = [pair for d in drawn for pair in d.lengths]
    assert any(q == 0 for q, _ in lengths)
    assert any(k == 0 for _, k in lengths)
    assert any(q > k for q, k in lengths)
    assert any(q < k for q, k in lengths)
    assert any(d.head_dim != d.value_dim for d in drawn)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(problems(dtypes=(torch.float32, torch.bfloat16), longest=12))
def test_strategy_yields_cases_that_run(case):
    assert isinstance(case, Case)
    assert max(case.description.longest) <= 12
    results = case.run("reference")
    assert set(results) == {"output", "lse", *(f"grad_{name}" for name in case.tensors)}
    assert results["output"].isfinite().all()


def test_strategy_takes_its_dtypes():
    for dtype in (torch.float64, torch.float16):
        found = hypothesis.find(
            descriptions(dtypes=(dtype,)), lambda d: True, settings=settings(database=None)
        )
        assert found.dtype == dtype


def test_names_of_the_module():
    strategy: Any = saccade.testing.problems
    assert isinstance(strategy(), st.SearchStrategy)
    assert all(hasattr(saccade.testing, name) for name in saccade.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        saccade.testing.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


# ---- poisoned memory: it holds NaN, and nothing is left behind ----

Flags = tuple[bool, bool, bool]
deterministic: Any = torch.utils.deterministic


def flags() -> Flags:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )


@pytest.fixture(params=[(False, False, True), (False, False, False), (True, True, False)], ids=str)
def before(request):
    """Some setting of the flags that a user may have chosen; put back as it was afterwards."""
    was = flags()
    enabled, warn_only, fill = request.param
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    deterministic.fill_uninitialized_memory = fill
    yield flags()
    torch.use_deterministic_algorithms(was[0], warn_only=was[1])
    deterministic.fill_uninitialized_memory = was[2]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_fresh_memory_holds_nan(dtype):
    with poisoned():
        fresh = [
            torch.empty(3, 5, dtype=dtype),
            torch.empty_like(torch.zeros(4, dtype=dtype)),
            torch.zeros(2, dtype=dtype).new_empty(7),
            torch.empty_strided((2, 3), (3, 1), dtype=dtype),
            torch.zeros(2, dtype=dtype).resize_(50)[2:],
        ]
    for tensor in fresh:
        assert tensor.isnan().all()


def test_fresh_integers_hold_the_largest_number():
    with poisoned():
        assert (torch.empty(9, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
        assert (torch.empty(9, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


def test_flags_come_back(before):
    with poisoned():
        assert flags() == (True, True, True)
    assert flags() == before


def test_flags_come_back_after_an_exception(before):
    with pytest.raises(ZeroDivisionError), poisoned():
        assert torch.empty(3).isnan().all()
        raise ZeroDivisionError
    assert flags() == before


def test_blocks_nest():
    outside = flags()
    with poisoned():
        with poisoned():
            assert torch.empty(3).isnan().all()
        assert torch.empty(3).isnan().all()
    assert flags() == outside


def test_what_is_computed_is_not_poisoned():
    rows = torch.randn(8, 8)
    with poisoned():
        product = rows @ rows
    assert torch.equal(product, rows @ rows)
