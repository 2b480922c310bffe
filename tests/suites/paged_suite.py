"""The suite for attention over pages: what every implementation of it must do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answers import expected
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from implementations import BF16, F32, F64, PAGED_IMPLEMENTATIONS, Implementation, fixture_of
from large_scores_suite import SIZES, check_pages

import saccade
from saccade.testing import PagedDescription, assert_exact, make_paged_case, oracle, poisoned
from saccade.testing.cases import MASKS, SCORES
from saccade.testing.oracle import assert_within
from saccade.testing.paged import MEMORIES

F8, I8 = torch.float8_e4m3fn, torch.int8


implementation = fixture_of(PAGED_IMPLEMENTATIONS)


def check(implementation: Implementation, **description: Any) -> None:
    """Compare one case with float64, in memory that holds NaN, both ways of cutting the keys."""
    case = make_paged_case(**{**description, "device": implementation.device})
    ways: list[dict[str, Any]] = [
        {} if config is None else {"config": config} for config in implementation.configs_of(0)
    ]
    if implementation.batch_invariant:
        ways.append({"batch_invariant": True})
    with poisoned():
        answer = expected(case.description)
        for way in ways:
            assert_within(case.run(implementation.name, **way), *answer, str(case.description))


DECODE = ((1, 40), (1, 1), (1, 17), (1, 64))
MIXED = ((1, 33), (12, 12), (9, 30), (0, 5), (4, 61), (3, 0), (5, 2))


class TestExactness:
    """Contract item 5: no further from float64 than the derived bound."""

    @pytest.mark.parametrize("score", list(SCORES))
    @pytest.mark.parametrize("mask", list(MASKS))
    def test_every_mask_with_every_score(
        self, implementation: Implementation, mask: str, score: str
    ) -> None:
        number = list(MASKS).index(mask) * len(SCORES) + list(SCORES).index(score)
        packed = number % 2 == 0
        check(
            implementation,
            mask=mask,
            score=score,
            dtype=implementation.dtypes[number // 2 % len(implementation.dtypes)],
            page_dtype=(None, I8, None, F8, None)[number % 5],
            packed=packed,
            lengths=MIXED if packed else ((5, 40), (5, 9), (5, 0)),
            sinks=number % 3 == 0,
            poison_hidden=number % 4 < 2,
            memory=MEMORIES[number // 3 % len(MEMORIES)],
            scattered=number % 7 != 0,
            seed=number,
        )

    @pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64, 256, 1024])
    @pytest.mark.parametrize("memory", MEMORIES)
    def test_pages_of_any_size_and_memory(
        self, implementation: Implementation, memory: str, page_size: int
    ) -> None:
        for scattered, dtype in ((True, F32), (False, F32), (False, BF16)):
            arguments: dict[str, Any] = {"page_size": page_size, "scattered": scattered}
            check(implementation, **arguments, memory=memory, dtype=dtype, lengths=DECODE)

    @pytest.mark.parametrize("page_dtype", [None, F8, I8], ids=["same", "fp8", "int8"])
    def test_page_dtypes(
        self, implementation: Implementation, page_dtype: torch.dtype | None
    ) -> None:
        for dtype in implementation.dtypes:
            check(
                implementation,
                dtype=dtype,
                page_dtype=page_dtype,
                lengths=MIXED,
                packed=True,
                mask="causal",
                head_dim=64,
                value_dim=32,
            )

    @pytest.mark.parametrize("mask", ["none", "causal", "window", "tree"])
    @pytest.mark.parametrize("scattered", [False, True])
    def test_lengths_of_many_pieces(
        self, implementation: Implementation, mask: str, scattered: bool
    ) -> None:
        lengths = ((1, 2500), (70, 1100), (300, 300))
        if implementation.device == "cpu":  # whose tiles hold 128 keys
            lengths = ((1, 700), (20, 530), (40, 40))
        for memory in ("pages_first", "heads_first"):
            case = make_paged_case(
                lengths=lengths, packed=True, kv_heads=1, page_size=16, mask=mask, memory=memory,
                scattered=scattered, device=implementation.device,
            )  # fmt: skip
            assert_exact(case, implementation.name)

    @pytest.mark.parametrize("size", SIZES)
    def test_large_scores(self, implementation: Implementation, size: str) -> None:
        check_pages(implementation, size)
        check_pages(implementation, size, batch_invariant=implementation.batch_invariant)

    @pytest.mark.parametrize("scale", [0, -0.5])
    def test_scales_of_at_most_zero(self, implementation: Implementation, scale: float) -> None:
        for mask in ("none", "causal"):
            check(implementation, scale=scale, mask=mask, lengths=((3, 40), (3, 17)))

    @pytest.mark.parametrize("group", [1, 3, 6, 8, 16])
    def test_groups(self, implementation: Implementation, group: int) -> None:
        check(implementation, group=group, lengths=DECODE, head_dim=40, value_dim=24)

    @pytest.mark.parametrize("sizes", [(576, 512), (1, 1), (80, 96)])
    def test_head_dims(self, implementation: Implementation, sizes: tuple[int, int]) -> None:
        head_dim, value_dim = sizes
        if max(sizes) > implementation.widest:
            pytest.skip(f"takes at most {implementation.widest} channels, and says so")
        check(implementation, head_dim=head_dim, value_dim=value_dim, mask="causal", kv_heads=1)

    @pytest.mark.parametrize(("sizes", "page_dtype"), [((576, 512), None), ((40, 33), F8)])
    def test_values_that_are_a_part_of_keys(
        self, implementation: Implementation, sizes: tuple[int, int], page_dtype: torch.dtype | None
    ) -> None:
        check(
            implementation, head_dim=sizes[0], value_dim=sizes[1], page_dtype=page_dtype,
            lengths=MIXED, mask="causal", packed=True, kv_heads=1, group=3, poison_hidden=True,
            latent=True,
        )  # fmt: skip

    def test_random_problems(self, implementation: Implementation) -> None:
        length = st.integers(0, 60)

        @settings(
            max_examples=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
            phases=[Phase.explicit, Phase.generate],
        )
        @given(
            description=st.builds(
                PagedDescription,
                lengths=st.lists(st.tuples(length, length), min_size=1, max_size=4).map(tuple),
                page_size=st.sampled_from([1, 3, 8, 16, 64]),
                kv_heads=st.integers(1, 3),
                group=st.integers(1, 4),
                head_dim=st.sampled_from([16, 8, 1, 33]),
                value_dim=st.sampled_from([16, 8, 1, 33]),
                dtype=st.sampled_from(implementation.dtypes),
                page_dtype=st.sampled_from([None, None, F8, I8]),
                packed=st.just(True),
                scattered=st.booleans(),
                memory=st.sampled_from(MEMORIES),
                mask=st.sampled_from(list(MASKS)),
                score=st.sampled_from(list(SCORES)),
                sinks=st.booleans(),
                poison_hidden=st.booleans(),
                scale=st.sampled_from([None, 0.3]),
                seed=st.integers(0, 2**16),
            )
        )
        def run(description: PagedDescription) -> None:
            check(implementation, **description.__dict__)

        run()


class TestEmpty:
    """Contract items 2 and 6: what has no rows, no keys or sees nothing."""

    @pytest.mark.parametrize(
        "empty",
        [
            {"lengths": ((0, 9),)},
            {"lengths": ((3, 0), (3, 0))},
            {"lengths": ((0, 0),), "packed": True},
            {"kv_heads": 0},
            {"head_dim": 0},
            {"value_dim": 0},
        ],
        ids=str,
    )
    def test_zero_sized_dimensions(
        self, implementation: Implementation, empty: dict[str, Any]
    ) -> None:
        for dtype in implementation.dtypes:
            check(implementation, dtype=dtype, **empty)
            check(implementation, dtype=dtype, mask="causal", sinks=True, **empty)

    def test_no_sequences(self, implementation: Implementation) -> None:
        none = torch.zeros(0, 4, dtype=torch.int32, device=implementation.device)
        pages = torch.full((3, 2, 8, 16), torch.nan, device=implementation.device)
        query = torch.zeros(0, 4, 1, 16, device=implementation.device)
        output = saccade.attention_paged(
            query, pages, pages, none, none[:, 0], implementation=implementation.name
        )
        assert output.shape == query.shape

    def test_rows_that_see_nothing(self, implementation: Implementation) -> None:
        for lengths in (((2, 9), (2, 0)), ((4, 3),)):
            case = make_paged_case(mask="nothing", lengths=lengths, device=implementation.device)
            with poisoned():
                results = case.run(implementation.name)
            assert bool((results["lse"] == -torch.inf).all())
            assert not bool(results["output"].any())


class TestHidden:
    """Contract item 3: what is hidden is never read as a number."""

    @pytest.mark.parametrize("score", ["none", "softcap"])
    @pytest.mark.parametrize("trash", [torch.nan, torch.inf])
    @pytest.mark.parametrize("nonfinite", ["key_pages", "value_pages"])
    def test_rows_before_a_nonfinite_key_stay_clean(
        self, implementation: Implementation, nonfinite: str, trash: float, score: str
    ) -> None:
        arguments: dict[str, Any] = {"mask": "causal", "score": score, "lengths": ((24, 24),)}
        case = make_paged_case(**arguments, device=implementation.device)
        clean = case.run(implementation.name)
        place = 19
        page = int(case.table["page_table"][0, place // 8])
        case.tensors[nonfinite][page, :, place % 8] = trash
        results = case.run(implementation.name)
        for name, tensor in clean.items():
            before, after = results[name][:, :, :place], results[name][:, :, place:]
            torch.testing.assert_close(before, tensor[:, :, :place], msg=name)
            assert not bool(after.isfinite().flatten(3 if after.dim() > 3 else 2).all(-1).any())

    def test_nothing_behind_a_sequence_is_read(self, implementation: Implementation) -> None:
        case = make_paged_case(lengths=((1, 17), (1, 1)), device=implementation.device)
        results = case.run(implementation.name)
        assert all(bool(tensor.isfinite().all()) for tensor in results.values())


class TestResults:
    """Contract items 1 and 6: dtypes, layouts, addresses; and equal bits."""

    def test_lse_is_natural_and_wide(self, implementation: Implementation) -> None:
        for dtype in implementation.dtypes:
            case = make_paged_case(dtype=dtype, device=implementation.device)
            results, exact = case.run(implementation.name), oracle(case)
            assert results["output"].dtype == dtype
            assert results["lse"].dtype == (F64 if dtype == F64 else F32)
            torch.testing.assert_close(
                results["lse"].double(), exact["lse"], atol=0.01, rtol=0.01, check_dtype=False
            )

    def test_a_packed_query_gives_what_a_dense_one_gives(
        self, implementation: Implementation
    ) -> None:
        device = implementation.device
        case = make_paged_case(
            lengths=((3, 20), (3, 7)), mask="causal", score="alibi", device=device
        )
        arguments = case.arguments()
        options = {"implementation": implementation.name, "return_lse": True}
        output, lse = saccade.attention_paged(**arguments, **options)
        query = arguments.pop("query").transpose(1, 2).flatten(0, 1)
        offsets = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
        packed, packed_lse = saccade.attention_paged(
            query, **arguments, cu_seqlens_q=offsets, **options
        )
        torch.testing.assert_close(packed.unflatten(0, (2, 3)).transpose(1, 2), output)
        torch.testing.assert_close(packed_lse.unflatten(1, (2, 3)).transpose(0, 1), lse)

    @pytest.mark.parametrize("page_dtype", [None, I8], ids=["same", "int8"])
    def test_batch_invariant(
        self, implementation: Implementation, page_dtype: torch.dtype | None
    ) -> None:
        if not implementation.batch_invariant:
            with pytest.raises(NotImplementedError, match="batch-invariant"):
                make_paged_case().run(implementation.name, batch_invariant=True)
            return
        for dtype in implementation.dtypes:
            case = make_paged_case(
                lengths=((1, 1500), (7, 40), (1, 2049), (64, 1100)), packed=True, mask="causal",
                dtype=dtype, page_dtype=page_dtype, head_dim=64, device=implementation.device,
            )  # fmt: skip
            together = case.run(implementation.name, batch_invariant=True)
            arguments = case.arguments()
            offsets = arguments.pop("cu_seqlens_q").tolist()
            query, lens = arguments.pop("query"), arguments.pop("kv_lens")
            table = arguments.pop("page_table")
            for sequence in range(len(lens)):
                at = slice(offsets[sequence], offsets[sequence + 1])
                alone, lse = saccade.attention_paged(
                    query[at].transpose(0, 1)[None], page_table=table[[sequence]],
                    kv_lens=lens[[sequence]], **arguments, return_lse=True, batch_invariant=True,
                    implementation=implementation.name,
                )  # fmt: skip
                assert torch.equal(alone[0].transpose(0, 1), together["output"][at])
                assert torch.equal(lse[0], together["lse"][:, at])

    def test_addresses_beyond_32_bits(self, implementation: Implementation) -> None:
        step = 2**30 + 5  # three pages further apart than 2^31 elements
        memory = torch.empty(2 * step + 512, dtype=BF16, device=implementation.device)
        key, value = (memory[i * 128 :].as_strided((3, 1, 8, 16), (step, 0, 16, 1)) for i in (0, 1))
        key.copy_(torch.randn(3, 1, 8, 16))
        value.copy_(torch.randn(3, 1, 8, 16))
        query = torch.randn(1, 2, 4, 16, device=implementation.device).to(BF16)
        table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=implementation.device)
        lens = torch.tensor([21], dtype=torch.int32, device=implementation.device)
        options: dict[str, Any] = {"implementation": implementation.name}
        far = saccade.attention_paged(query, key, value, table, lens, **options)
        near = saccade.attention_paged(
            query, key.contiguous(), value.contiguous(), table, lens, **options
        )
        assert torch.equal(far, near)
