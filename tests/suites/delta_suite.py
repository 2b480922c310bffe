"""The one suite of the gated delta rule. See implementations.py for a new implementation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from answers import expected
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from implementations import DELTA_IMPLEMENTATIONS, F64, Implementation, fixture_of
from pairs import covering
from torch import Tensor

import saccade
from saccade.runtime.delta_spec import DECAY_KINDS
from saccade.testing import delta_oracle, poisoned
from saccade.testing.cases import LAYOUTS
from saccade.testing.delta import DeltaCase, DeltaDescription
from saccade.testing.oracle import assert_within

implementation = fixture_of(DELTA_IMPLEMENTATIONS)


def check(implementation: Implementation, configs: Any = None, **description: Any) -> None:
    """Compare one case with float64, in memory that holds NaN; small chunks too where there are."""
    case = implementation.delta_case(**description)
    exact, allowed = expected(case.description)
    for config in configs or implementation.configs_of(0):
        given_config: dict[str, Any] = {} if config is None else {"config": config}
        with poisoned():
            found = case.run(implementation.name, **given_config)
        assert_within(found, exact, allowed, str(case.description))


PACKED = (24, 5, 0, 7, 7)
HEADS = [(2, 4), (1, 1), (2, 2), (1, 3)]


class TestExactness:
    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    @pytest.mark.parametrize("decay", DECAY_KINDS)
    def test_every_decay(self, implementation: Implementation, decay: str, packed: bool) -> None:
        number = 2 * DECAY_KINDS.index(decay) + packed
        for dtype, config, flag in implementation.combinations_of(number, (True, False)):
            check(
                implementation,
                configs=[config],
                dtype=dtype,
                decay=decay,
                packed=packed,
                lengths=PACKED[: 3 if implementation.interpreted else 5] if packed else (24,),
                normalize_qk=flag,
                state=not flag,
                seed=number,
            )

    @pytest.mark.parametrize(
        ("heads", "decay"), covering(HEADS, DECAY_KINDS)[::2], ids=str
    )  # fmt: skip
    def test_shared_heads(
        self, implementation: Implementation, heads: tuple[int, int], decay: str
    ) -> None:
        for dtype in implementation.dtypes_of(HEADS.index(heads))[:2]:
            check(implementation, heads=heads, decay=decay, state=True, dtype=dtype, batch=1)

    @pytest.mark.parametrize("decay", DECAY_KINDS[1:])
    @pytest.mark.parametrize("hard", [False, True], ids=["strong", "hard"])
    def test_strong_decay_and_equal_keys(
        self, implementation: Implementation, decay: str, hard: bool
    ) -> None:
        """Up to -100 a token, of which the factors of a chunk are beyond any dtype."""
        for strength in (100.0, 1e-3) if not implementation.interpreted else (100.0,):
            check(
                implementation,
                decay=decay,
                strength=strength,
                hard=hard,
                normalize_qk=hard,
                state=True,
                lengths=(70,),
                batch=1,
                heads=(1, 2),
            )

    def test_random_problems(self, implementation: Implementation) -> None:
        @settings(
            max_examples=4 if implementation.slow else 12,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(description=descriptions(implementation.dtypes, **implementation.draws))
        def run(description: DeltaDescription) -> None:
            check(implementation, **description.__dict__)

        run()

    @pytest.mark.parametrize("layout", LAYOUTS[1:])
    def test_any_strides(self, implementation: Implementation, layout: str) -> None:
        for dtype in implementation.dtypes_of(LAYOUTS.index(layout))[:1]:
            check(implementation, layout=layout, dtype=dtype, lengths=(17,), decay="heads")

    @pytest.mark.parametrize("sizes", [(64, 128), (128, 16), (40, 24)])
    def test_head_dims(self, implementation: Implementation, sizes: tuple[int, int]) -> None:
        dims = {"head_dim": sizes[0], "value_dim": sizes[1]}
        for dtype in implementation.dtypes_of(sizes[0])[:1]:
            check(implementation, dtype=dtype, decay="channels", heads=(1, 1), batch=1, **dims)

    @pytest.mark.parametrize("scale", [0, -0.5])
    def test_scales_of_at_most_zero(self, implementation: Implementation, scale: float) -> None:
        check(implementation, scale=scale, decay="heads", lengths=(9,))

    @pytest.mark.parametrize("decay", DECAY_KINDS)
    def test_lengths_of_many_chunks(self, implementation: Implementation, decay: str) -> None:
        check(implementation, lengths=(150,), batch=1, heads=(1, 1), decay=decay, state=True)


@st.composite
def descriptions(
    draw: Any,
    dtypes: Sequence[torch.dtype],
    dims: Sequence[int] = (16, 8, 1, 5),
    layouts: Sequence[str] = LAYOUTS,
    least: int = 0,
) -> DeltaDescription:
    """Descriptions of cases: anything goes with anything, zero lengths included.

    least: of lengths, and of batch entries.
    """
    packed = draw(st.booleans())
    lengths = st.lists(st.integers(least, 24), min_size=1, max_size=4 if packed else 1)
    return DeltaDescription(
        batch=draw(st.integers(least, 3)),
        heads=draw(st.sampled_from(HEADS)),
        lengths=tuple(draw(lengths)),
        head_dim=draw(st.sampled_from(list(dims))),
        value_dim=draw(st.sampled_from(list(dims))),
        dtype=draw(st.sampled_from(list(dtypes))),
        packed=packed,
        decay=draw(st.sampled_from(DECAY_KINDS)),
        strength=draw(st.sampled_from([1.0, 10.0])),
        # A row of one number is nothing but its sign once it is divided by its length.
        normalize_qk=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3])),
        state=draw(st.booleans()),
        layout=draw(st.sampled_from(list(layouts))),
        seed=draw(st.integers(0, 2**16)),
    )


class TestEmpty:
    @pytest.mark.parametrize(
        "empty",
        [
            {"batch": 0},
            {"heads": (0, 0)},
            {"lengths": (0,)},
            {"value_dim": 0},
            {"packed": True, "lengths": (0, 0)},
        ],
        ids=str,
    )
    def test_zero_sized_dimensions(
        self, implementation: Implementation, empty: dict[str, Any]
    ) -> None:
        check(implementation, decay="channels", state=True, **empty)


class TestNonfinite:
    @pytest.mark.parametrize("trash", [torch.nan, torch.inf])
    @pytest.mark.parametrize("nonfinite", ["query", "key", "value", "beta", "decay"])
    def test_one_sequence_does_not_reach_another(
        self, implementation: Implementation, nonfinite: str, trash: float
    ) -> None:
        """Of a packed batch, of a dense one, or a head."""
        for packed in (True, False):
            case = implementation.delta_case(
                packed=packed, lengths=(9, 9), decay="heads", state=True, heads=(1, 2)
            )
            exact = delta_oracle(case)
            case.tensors[nonfinite][(4,) if packed else (0, 0, 4)] = trash
            results = case.run(implementation.name)
            for name in ("output", "state", "grad_key", "grad_beta", "grad_decay"):
                one = slice(9, 18) if packed and "state" not in name else slice(1, 2)
                clean = results[name][one].double()
                torch.testing.assert_close(clean, exact[name][one], atol=1e-2, rtol=1e-2)
            assert not bool(results["output"][: 9 if packed else 1].isfinite().all())


def split_up(case: DeltaCase, at: int) -> list[dict[str, Tensor]]:
    """The tensors of a dense case in two halves."""
    return [
        {name: each[:, :, rows] for name, each in case.tensors.items() if name != "initial_state"}
        for rows in (slice(0, at), slice(at, None))
    ]


class TestResults:
    @pytest.mark.parametrize("of", ["output", "state"])
    def test_gradient_of_one_result_alone(self, implementation: Implementation, of: str) -> None:
        case = implementation.delta_case(decay="heads", state=True, lengths=(9,), batch=1)
        leaves, exact = case.leaves(), case.leaves(F64)
        ours = case.call(leaves, implementation=implementation.name)[of]
        theirs = case.call(exact, implementation="reference")[of]
        grad = case.grads[of]
        found = torch.autograd.grad(
            ours, list(leaves.values()), grad.to(ours.dtype), allow_unused=True
        )
        truth = torch.autograd.grad(theirs, list(exact.values()), grad, allow_unused=True)
        for name, mine, wanted in zip(leaves, found, truth, strict=True):
            mine = torch.zeros_like(leaves[name]) if mine is None else mine
            wanted = torch.zeros_like(exact[name]) if wanted is None else wanted
            torch.testing.assert_close(mine.double(), wanted, atol=1e-4, rtol=1e-4, msg=name)

    @pytest.mark.parametrize("decay", DECAY_KINDS)
    def test_any_parts_are_the_whole(self, implementation: Implementation, decay: str) -> None:
        """Wherever a sequence is cut, with its state carried over."""
        length = 40 if implementation.interpreted else 150
        case = implementation.delta_case(
            decay=decay, lengths=(length,), heads=(1, 2), normalize_qk=True, batch=1
        )
        options: dict[str, Any] = {
            "implementation": implementation.name, "return_state": True, "normalize_qk": True,
        }  # fmt: skip
        call: Any = saccade.gated_delta_rule
        whole, last = call(**case.tensors, **options)
        for at in (1, 17, length - 1) if not implementation.interpreted else (17,):
            outputs, state = [], None
            for part in split_up(case, at):
                output, state = call(**part, initial_state=state, **options)
                outputs.append(output)
            torch.testing.assert_close(torch.cat(outputs, 2), whole, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("decay", DECAY_KINDS)
    def test_packed_sequences_are_each_their_own(
        self, implementation: Implementation, decay: str
    ) -> None:
        case = implementation.delta_case(packed=True, lengths=PACKED, decay=decay, state=True)
        assert case.cu_seqlens is not None
        packed, keywords = case.arguments(case.tensors)
        options = keywords | {"implementation": implementation.name}
        call: Any = saccade.gated_delta_rule_varlen
        output, state = call(*packed, **options)
        ends = case.cu_seqlens.tolist()
        for b in (0, 1, 2, 4):
            at = slice(ends[b], ends[b + 1])
            one = {
                name: each[b : b + 1] if name == "initial_state" else each[at].transpose(0, 1)[None]
                for name, each in case.tensors.items()
            }
            dense: Any = saccade.gated_delta_rule
            alone, last = dense(**one, return_state=True, implementation=implementation.name)
            torch.testing.assert_close(output[at], alone[0].transpose(0, 1), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(state[b : b + 1], last, atol=1e-5, rtol=1e-4)

    def test_padding_behind_the_last_sequence(self, implementation: Implementation) -> None:
        case = implementation.delta_case(packed=True, lengths=(5, 7), decay="channels")
        assert case.cu_seqlens is not None
        case.cu_seqlens[-1] = 8
        for name in ("query", "key", "value", "beta", "decay"):
            case.tensors[name][8:] = torch.nan
        with poisoned():
            results = case.run(implementation.name)
        for name, each in results.items():
            assert bool(each.isfinite().all()), name
            assert "state" in name or not bool(each[8:].any()), name

    def test_runs_are_bit_equal(self, implementation: Implementation) -> None:
        case = implementation.delta_case(lengths=(70,), decay="channels", batch=1)
        first, again = (case.run(implementation.name) for _ in range(2))
        assert all(torch.equal(first[name], again[name]) for name in first)

    def test_an_output_lies_as_its_query(self, implementation: Implementation) -> None:
        """Heads beside channels, so that flattening them copies nothing."""
        case = implementation.delta_case(layout="permuted", heads=(2, 2), lengths=(9,))
        output = case.call(case.tensors, implementation=implementation.name)["output"]
        assert output.transpose(1, 2).is_contiguous()


class TestSteps:
    @pytest.mark.parametrize("decay", DECAY_KINDS)
    def test_steps_are_the_whole_call(self, implementation: Implementation, decay: str) -> None:
        """Tokens one by one, and a few at once, on a pool in any order."""
        case = implementation.delta_case(
            decay=decay, lengths=(12,), state=True, normalize_qk=True, heads=(1, 2)
        )
        tensors: dict[str, Any] = dict(case.tensors)
        state = tensors.pop("initial_state")
        call: Any = saccade.gated_delta_rule
        whole, last = call(
            **tensors, initial_state=state, normalize_qk=True, return_state=True,
            implementation="reference",
        )  # fmt: skip
        pool = torch.full((5, *state.shape[1:]), torch.nan, device=state.device)
        slots = torch.tensor([3, 1], device=state.device)
        pool[slots] = state
        outputs, cuts = [], (0, 1, 2, 12) if not implementation.interpreted else (0, 1, 4, 12)
        for start, stop in itertools.pairwise(cuts):
            part = {name: each[:, :, start:stop] for name, each in tensors.items()}
            outputs.append(
                saccade.gated_delta_rule_step(
                    pool, **part, state_index=slots, normalize_qk=True,
                    implementation=implementation.name,
                )
            )  # fmt: skip
        torch.testing.assert_close(torch.cat(outputs, 2), whole, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool[slots], last, atol=1e-5, rtol=1e-4)
        assert bool(pool[[0, 2, 4]].isnan().all())

    def test_states_of_any_dtype_change_where_they_lie(
        self, implementation: Implementation
    ) -> None:
        case = implementation.delta_case(decay="heads", lengths=(1,), state=True)
        tensors: dict[str, Any] = dict(case.tensors)
        state = tensors.pop("initial_state")
        wanted = state.clone()
        output = saccade.gated_delta_rule_step(
            wanted, **tensors, implementation=implementation.name
        )
        for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 3e-2)):
            held = state.to(dtype).transpose(2, 3).contiguous().transpose(2, 3)
            found = saccade.gated_delta_rule_step(
                held, **tensors, implementation=implementation.name
            )
            torch.testing.assert_close(found, output, atol=bound, rtol=bound)
            torch.testing.assert_close(held.float(), wanted, atol=bound, rtol=bound)
