"""Pages by Triton kernels: interpreted, a sample of the suite; on a GPU, what only a GPU has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from implementations import Implementation
from large_scores_suite import SIZES, check_pages

pytest.importorskip("triton")

import saccade
from saccade import masks
from saccade.gpu import language
from saccade.gpu.language import resolved, tl, triton
from saccade.gpu.paged_view import as_halves
from saccade.kv_cache import write_triton
from saccade.ops.attention.triton import call_spec
from saccade.ops.attention.triton.configs import ARCHITECTURES, SHARED_MEMORY
from saccade.ops.paged_attention.triton import call_spec as paged_kind
from saccade.ops.paged_attention.triton import configs as paged_configs
from saccade.ops.paged_attention.triton import host as paged_host
from saccade.ops.paged_attention.triton import split_kv
from saccade.ops.paged_attention.triton.configs import PagedProblem
from saccade.runtime import call_cache
from saccade.testing import PagedCase, assert_exact, make_paged_case, paged, poisoned

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
F8, I8 = torch.float8_e4m3fn, torch.int8
MIXED = ((1, 33), (12, 12), (9, 30), (0, 5), (3, 0), (5, 2))

interpreted = pytest.mark.skipif(
    not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
)


@pytest.fixture(autouse=True)
def _prepared_anew() -> Iterator[None]:
    call_cache.forget()  # or a call like one of another test takes what was prepared there
    paged_host._forwards.clear()
    yield
    call_cache.forget()
    paged_host._forwards.clear()


def check(case: PagedCase, **options: Any) -> None:
    with poisoned():
        assert_exact(case, "triton", **options)


@interpreted
@pytest.mark.parametrize(
    "description",
    [
        {"mask": "none", "sinks": True, "page_size": 3, "dtype": F16},
        {"mask": "prefix", "scale": -0.5, "sinks": True},
        {"mask": "causal", "page_dtype": F8, "dtype": F16, "memory": "slots_first"},
        {"mask": "window", "score": "bias >> softcap", "memory": "interleaved", "sinks": True},
        {"mask": "documents", "page_dtype": I8, "poison_hidden": True},
        {"mask": "tree", "score": "alibi", "poison_hidden": True, "page_size": 16},
        {"mask": "own_table", "group": 3, "page_size": 48, "dtype": F16},
        {"mask": "mixed", "page_dtype": F8, "group": 1, "poison_hidden": True, "page_size": 1},
    ],
    ids=lambda description: description["mask"],
)
def test_mixed_batches(description: dict[str, Any]) -> None:
    check(make_paged_case(lengths=MIXED, packed=True, kv_heads=1, **description))


@interpreted
@pytest.mark.parametrize(
    "description",
    [
        {"lengths": ((1, 33), (1, 90)), "dtype": F16, "head_dim": 576, "value_dim": 512},
        {"lengths": MIXED, "packed": True, "mask": "causal", "page_dtype": I8},
        {"lengths": ((70, 90),), "mask": "causal", "sinks": True, "page_size": 16},
    ],
    ids=str,
)
def test_values_that_are_a_part_of_keys(description: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"kv_heads": 1, "head_dim": 40, "value_dim": 33, "group": 5}
    case = make_paged_case(**{**sizes, **description}, latent=True)
    check(case)
    (prepared,) = paged_host._forwards.values()
    assert prepared.latent_passes is not None
    apart = case.arguments()
    apart["value_pages"] = apart["value_pages"].contiguous()
    apart["key_pages"] = apart["key_pages"].contiguous()
    with torch.no_grad():  # the same numbers where values lie by themselves
        output = saccade.attention_paged(**apart, implementation="triton")
    torch.testing.assert_close(output, case.run("triton")["output"], equal_nan=True)


@interpreted
@pytest.mark.parametrize("processors", [1, 3, 9])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_any_number_of_shares(monkeypatch: pytest.MonkeyPatch, mask: str, processors: int) -> None:
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: processors)
    lengths = ((2, 90), (2, 0), (2, 33))
    check(make_paged_case(lengths=lengths, mask=mask, kv_heads=1, group=3, sinks=True))
    check(make_paged_case(lengths=lengths[:1], mask=mask, kv_heads=2, group=3))


@interpreted
@pytest.mark.parametrize("processors", [1, 9])
@pytest.mark.parametrize("size", SIZES)
def test_large_scores(monkeypatch: pytest.MonkeyPatch, size: str, processors: int) -> None:
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: processors)
    check_pages(Implementation("triton", (F32, F16), slow=True), size)


@interpreted
@pytest.mark.parametrize("processors", [3, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_a_program_may_have_one_tile(
    monkeypatch: pytest.MonkeyPatch, packed: bool, processors: int
) -> None:
    """Or, where a packed call has programs to spare, none but what sets a work tile up."""
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: processors)
    monkeypatch.setattr(paged_configs, "LONG_TILE", 1)
    for mask in ("none", "causal"):
        lengths = ((1, 90), (1, 0), (1, 33), (1, 1))
        check(make_paged_case(lengths=lengths, mask=mask, kv_heads=2, packed=packed, sinks=True))
    (launches,) = next(iter(paged_host._forwards.values())).passes
    assert launches.of.least_payload == 1


@pytest.mark.parametrize(
    ("changes", "wanted"),  # least payload, partial results at once, whether one warp merges them
    [
        ({}, (1, 32, True)),
        ({"config": (16, 64, 4, 4, 2)}, (2, 32, True)),
        ({"value_width": 512}, (1, 32, False)),
        ({"query_len": 0}, (1, 16, True)),
        ({"chunks": True, "config": (128, 64, 8, 3, 1)}, (2, 64, False)),
        ({"splits": 4}, (paged_configs.FIXED_PAYLOAD, 16, True)),
        ({"splits": 4, "query_len": 0}, (paged_configs.FIXED_PAYLOAD, 16, True)),
    ],
    ids=str,
)
def test_how_little_a_program_has_and_how_parts_are_merged(
    changes: dict[str, Any], wanted: tuple[int, int, bool]
) -> None:
    given: dict[str, Any] = {"config": (16, 128, 4, 3, 1), "heads": 4, "value_width": 128,
                             "query_len": 1, "splits": 0} | changes  # fmt: skip
    given["config"] = paged_configs.PagedConfig(*given["config"])
    others = dict.fromkeys(paged_kind.Pass._fields, 0) | {"groups": 1, "group": 4}
    others |= {"heads_in_tile": 4, "programs": 132, "rows": (0, 1)}
    found = paged_kind.Pass(**{**others, **given})
    assert (found.least_payload, found.merged_at_once, found.merges_by_one_warp) == wanted


@interpreted
@pytest.mark.parametrize("at_once", [2, split_kv.MOST_AT_ONCE.value])
def test_lines_of_many_groups_and_units(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: 3)
    monkeypatch.setattr(paged_kind, "MOST_STEPS", 0)
    monkeypatch.setattr(paged_kind, "MOST_AT_ONCE", at_once)
    names = resolved(split_kv.equal_payloads).fn.__globals__  # what the compiled module reads
    monkeypatch.setitem(names, "MOST_AT_ONCE", resolved(tl.constexpr(at_once)))
    call_cache.forget()  # a call like one before is prepared by what these were then
    check(make_paged_case(lengths=((1, 90), (1, 0), (1, 33), (1, 40), (1, 70)), kv_heads=1))


PAIRED: list[dict[str, Any]] = [
    {"lengths": ((1, 33), (1, 70), (1, 0))},
    {"lengths": ((1, 33), (2, 12), (9, 30)), "packed": True, "mask": "causal"},
    {"lengths": ((1, 33), (3, 12)), "packed": True, "mask": "window", "poison_hidden": True},
    {"lengths": ((1, 33), (1, 5)), "head_dim": 64, "value_dim": 40, "page_size": 4, "group": 3},
    {"lengths": ((2, 90), (2, 0)), "mask": "tree", "sinks": True, "score": "softcap"},
]


def check_pairs(**description: Any) -> None:
    sizes: dict[str, Any] = {"kv_heads": 1, "head_dim": 32, "value_dim": 32, "dtype": F16}
    check(make_paged_case(**{**sizes, **description}))
    (prepared,) = paged_host._forwards.values()
    assert prepared.passes[0].of.paired


@interpreted
@pytest.mark.parametrize("description", PAIRED, ids=str)
def test_pairs_of_eight_bit_numbers(description: dict[str, Any]) -> None:
    check_pairs(page_dtype=I8, **description)


@interpreted
@pytest.mark.parametrize("odd", [{"head_dim": 33}, {"value_dim": 33}, {"head_dim": 16}], ids=str)
def test_what_has_no_pairs_is_read_one_by_one(odd: dict[str, Any]) -> None:
    sizes = {"head_dim": 32, "value_dim": 32, "dtype": F16, "page_dtype": I8, **odd}
    check(make_paged_case(lengths=((1, 33),), kv_heads=1, **sizes))
    (prepared,) = paged_host._forwards.values()
    assert not prepared.passes[0].of.paired


@interpreted
def test_tiles_of_a_config() -> None:
    case = make_paged_case(lengths=((7, 40), (1, 9)), packed=True, mask="causal", kv_heads=1)
    check(case, config=saccade.KernelConfig(16, 16))
    with pytest.raises(ValueError, match="query_tile: got 8, takes a power of two"):
        case.run("triton", config=saccade.KernelConfig(8))


@interpreted
def test_a_group_of_more_heads_than_a_tile_has_rows() -> None:
    check(make_paged_case(lengths=((1, 20), (1, 3)), kv_heads=1, group=19, mask="own_table"))


@interpreted
def test_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_configs, "FIXED_PAYLOAD", 2)
    case = make_paged_case(
        lengths=((1, 100), (9, 20), (2, 33)), packed=True, mask="causal", kv_heads=1, dtype=F16,
        page_dtype=I8,
    )  # fmt: skip
    check(case, batch_invariant=True)
    together = case.run("triton", batch_invariant=True)
    arguments = case.arguments()
    offsets = arguments.pop("cu_seqlens_q").tolist()
    query, lens, table = (arguments.pop(n) for n in ("query", "kv_lens", "page_table"))
    for n in range(len(lens)):
        at = slice(offsets[n], offsets[n + 1])
        alone, lse = saccade.attention_paged(
            query[at].transpose(0, 1)[None], page_table=table[[n]], kv_lens=lens[[n]],
            **arguments, return_lse=True, batch_invariant=True, implementation="triton",
        )  # fmt: skip
        assert torch.equal(alone[0].transpose(0, 1), together["output"][at])
        assert torch.equal(lse[0], together["lse"][:, at])


@interpreted
@pytest.mark.parametrize(
    "empty",
    [{"lengths": ((0, 9),)}, {"kv_heads": 0}, {"head_dim": 0}, {"value_dim": 0}],
    ids=str,
)
def test_zero_sized_dimensions(empty: dict[str, Any]) -> None:
    check(make_paged_case(**{"lengths": ((1, 9),), "mask": "causal", "sinks": True, **empty}))


def test_too_many_channels_are_refused() -> None:
    case = make_paged_case(lengths=((1, 9),), head_dim=600)
    with pytest.raises(NotImplementedError, match="head_dim goes up to 576"):
        case.run("triton")


# ---- writing ------------------------------------------------------------------------------------


def write_both(
    device: str, dtype: torch.dtype, page_dtype: torch.dtype, scaled: bool, pairs: int,
    interleaved: bool,
) -> list[list[torch.Tensor]]:  # fmt: skip
    """Pages and scales after a write of ten tokens, by the kernel and by the reference."""
    results: list[list[torch.Tensor]] = []
    functions: tuple[Any, ...] = (write_triton.write, paged.write)
    for function in functions:
        generator = torch.Generator().manual_seed(1)
        key = torch.randn(10, 2, 6, generator=generator)
        key[4, 1, 3] = torch.nan
        value, angles = (torch.randn(10, *s, generator=generator) for s in ((2, 3), (pairs,)))
        slots = torch.tensor([3, 4, 5, -1, 19, 0, 9, 11, -1, 12])
        pages = [torch.full((2, 5, 4, dim), 7.0).to(page_dtype).transpose(0, 1) for dim in (6, 3)]
        scales = [torch.full((5, 2, 4), torch.nan) if scaled else None for _ in range(2)]
        turned = [angles.cos(), angles.sin()] if pairs else [None, None]
        where = device if function is write_triton.write else "cpu"
        rows = [each.to(dtype).to(where) for each in (key, value)]
        changed = [each if each is None else each.to(where) for each in (*pages, *scales)]
        others = [each if each is None else each.to(where) for each in turned]
        given: list[Any] = [*rows, *changed[:2], slots.to(where), *changed[2:], *others]
        function(*given, interleaved)
        results.append([each.cpu().double() for each in changed if each is not None])
    return results


WRITTEN = [
    (F32, F32, False),
    (torch.float64, torch.float64, False),
    (F16, I8, True),
    (F32, F8, True),
    (F16, F8, False),
]


@interpreted
@pytest.mark.parametrize(("dtype", "page_dtype", "scaled"), WRITTEN)
@pytest.mark.parametrize(("pairs", "interleaved"), [(0, False), (2, True), (3, False)])
def test_written_as_the_reference_writes(
    dtype: torch.dtype, page_dtype: torch.dtype, scaled: bool, pairs: int, interleaved: bool
) -> None:
    found, wanted = write_both("cpu", dtype, page_dtype, scaled, pairs, interleaved)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


# ---- configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_configs(architecture: str) -> None:
    for width in (16, 32, 64, 128, 256):
        for chunks in (False, True):
            config = paged_configs.default(PagedProblem(architecture, chunks, width, False))
            for size in (config.query_tile, config.kv_tile):
                assert size >= 16 and size & (size - 1) == 0
            ahead = max(config.num_stages - 1, 1) * config.kv_tile * 2 * width * 2
            assert ahead <= SHARED_MEMORY[architecture]


def test_few_rows_share_a_tile() -> None:
    def tile(group: int, rows: int = 0) -> int:
        problem = PagedProblem("sm_90", False, 128, False, group, rows)
        return paged_configs.default(problem).query_tile

    assert [tile(group) for group in (1, 8, 16, 17, 40, 128)] == [16, 16, 16, 32, 64, 64]
    assert [tile(4, rows) for rows in (4, 20, 64)] == [16, 32, 64]


@triton.jit
def store_halves(pairs, found, PTX: tl.constexpr):
    numbers = tl.arange(0, 256)
    halves = as_halves(tl.load(pairs + numbers), PTX)
    tl.store(found + numbers, halves[0])
    tl.store(found + 256 + numbers, halves[1])


@interpreted
@pytest.mark.parametrize("dtype", [I8, F8], ids=["int8", "fp8"])
def test_pairs_are_taken_apart_exactly(dtype: torch.dtype) -> None:
    numbers = torch.arange(256).to(torch.uint8)
    pairs = torch.stack([numbers, numbers.flip(0)], 1)
    found = torch.empty(2, 256, dtype=F16)
    store_halves[(1,)](pairs.view(paged_kind.PAIRS[dtype]), found, False)  # type: ignore[index]
    wanted = pairs.view(dtype).to(F16).T
    known = wanted.isfinite()  # the interpreter has no NaN among eight bits
    assert torch.equal(found[known], wanted[known])


# ---- on a GPU -----------------------------------------------------------------------------------


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Operations that wait for the device raise. That the mode is a prototype, PyTorch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
class TestOnGpu:
    """What no interpreter shows: graphs, waiting, writing beside PyTorch's own kernels."""

    LENGTHS = ((1, 33), (12, 12), (9, 300), (0, 5), (40, 610), (3, 0), (5, 2), (1, 1500))

    def case(self, **changes: Any) -> PagedCase:
        given = {"lengths": self.LENGTHS, "packed": True, "mask": "causal", "page_size": 16}
        sizes = {"head_dim": 64, "value_dim": 64, "group": 4, "dtype": BF16, "device": "cuda"}
        return make_paged_case(**{**given, **sizes, **changes})

    @pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
    @pytest.mark.parametrize("page_dtype", [None, F8, I8], ids=["same", "fp8", "int8"])
    def test_dtypes(self, dtype: torch.dtype, page_dtype: torch.dtype | None) -> None:
        check(self.case(dtype=dtype, page_dtype=page_dtype))

    @pytest.mark.parametrize("page_dtype", [F8, I8], ids=["fp8", "int8"])
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("description", PAIRED, ids=str)
    def test_pairs_of_eight_bit_numbers(
        self, description: dict[str, Any], dtype: torch.dtype, page_dtype: torch.dtype
    ) -> None:
        check_pairs(dtype=dtype, page_dtype=page_dtype, device="cuda", **description)

    @pytest.mark.parametrize("page_dtype", [F8, I8], ids=["fp8", "int8"])
    def test_pairs_have_the_range_of_bfloat16(self, page_dtype: torch.dtype) -> None:
        arguments = self.case(mask="none", page_dtype=page_dtype).arguments()
        options = {"implementation": "triton", "return_lse": True}
        with torch.no_grad():
            output, lse = saccade.attention_paged(**arguments, **options)
            for name, factor in (("query", 2.0**60), ("key_scales", 2.0**-60)):
                arguments[name] = arguments[name] * factor
            arguments["value_scales"] = arguments["value_scales"] * 2.0**-60
            scaled, same = saccade.attention_paged(**arguments, **options)
        assert torch.equal(scaled * 2.0**60, output) and torch.equal(same, lse)

    def test_every_number_of_eight_bits_is_a_half_of_its_pair(self) -> None:
        numbers = torch.arange(256, dtype=torch.uint8, device="cuda")
        pairs = torch.stack([numbers, numbers.flip(0)], 1)
        for dtype, pair in paged_kind.PAIRS.items():
            for ptx in (False, True):
                found = torch.empty(2, 256, dtype=F16, device="cuda")
                store_halves[(1,)](pairs.view(pair), found, ptx)  # type: ignore[index]
                wanted = pairs.view(dtype).to(F16).T
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)

    def test_nothing_waits_for_the_device(self) -> None:
        arguments = {**self.case().arguments(), "implementation": "triton"}
        with torch.no_grad():
            saccade.attention_paged(**arguments)
            with waiting_refused():
                saccade.attention_paged(**arguments)

    @pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(100)], ids=str)
    @pytest.mark.parametrize("batch_invariant", [False, True])
    def test_a_graph_replays_with_other_lengths_and_tables(
        self, mask: masks.Mask | None, batch_invariant: bool
    ) -> None:
        arguments = {**self.case(mask="none").arguments(), "mask": mask}
        arguments |= {"implementation": "triton", "batch_invariant": batch_invariant}

        def run() -> torch.Tensor:
            with torch.no_grad():
                return saccade.attention_paged(**arguments)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        lens, table = arguments["kv_lens"].clone(), arguments["page_table"].clone()
        for factor in (1.0, 0.6, 0.1, 0.0):
            arguments["kv_lens"].copy_((lens * factor).int())
            arguments["page_table"].copy_(table.flip(0) if factor == 0.1 else table)
            if factor == 0.1:
                arguments["kv_lens"].copy_((lens.flip(0) * 0.1).int())
            graph.replay()
            assert torch.equal(captured, run())

    @pytest.mark.parametrize(("dtype", "page_dtype", "scaled"), [*WRITTEN, (BF16, BF16, False)])
    @pytest.mark.parametrize(("pairs", "interleaved"), [(0, False), (2, True), (3, False)])
    def test_written_as_the_reference_writes(
        self, dtype: torch.dtype, page_dtype: torch.dtype, scaled: bool, pairs: int,
        interleaved: bool,
    ) -> None:  # fmt: skip
        found, wanted = write_both("cuda", dtype, page_dtype, scaled, pairs, interleaved)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)

    def test_writing_waits_for_nothing(self) -> None:
        pages: Any = [torch.zeros(4, 2, 8, 16, device="cuda") for _ in range(2)]
        rows = torch.randn(6, 2, 16, device="cuda")
        slots = torch.tensor([3, -1, 9, 0, 31, -1], device="cuda")
        saccade.write_kv_cache(rows, rows, pages[0], pages[1], slots)
        with waiting_refused():
            saccade.write_kv_cache(rows, rows, pages[0], pages[1], slots)
        assert torch.equal(pages[0][1, :, 1], rows[2])
