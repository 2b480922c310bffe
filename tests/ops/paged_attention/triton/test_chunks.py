"""Chunks over pages by the dense kernel: exact, and of the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import saccade
from saccade.gpu import language
from saccade.ops.attention.triton import call_spec
from saccade.ops.paged_attention.triton import host as paged_host
from saccade.ops.paged_attention.triton.call_spec import PagedCallSpec
from saccade.ops.paged_attention.triton.host import ChunkLaunch, PassLaunches
from saccade.runtime.spec import KernelConfig, PagedInputs
from saccade.runtime.validation import prepare_paged
from saccade.testing import PagedCase, assert_exact, make_paged_case, poisoned

F16, I8 = torch.float16, torch.int8
ALIKE = ((40, 70), (40, 41), (40, 12))
MIXED = ((40, 70), (1, 33), (20, 20), (3, 9), (35, 90))
SHORT = 30  # here; tiles have 32 rows and fewer

interpreted = pytest.mark.skipif(
    not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
)


@pytest.fixture(autouse=True)
def _prepared_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    paged_host._forwards.clear()
    monkeypatch.setattr(paged_host, "SHORT", SHORT)
    yield
    paged_host._forwards.clear()


def make(**description: Any) -> PagedCase:
    return make_paged_case(
        **{"kv_heads": 1, "mask": "causal", "poison_hidden": True, **description}
    )


def passes() -> list[Any]:
    (prepared,) = paged_host._forwards.values()
    return prepared.passes


@interpreted
@pytest.mark.parametrize("page_size", [1, 2, 16, 48, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_lie_in_pages_of_any_size(page_size: int, packed: bool) -> None:
    memory = {1: "slots_first", 16: "heads_first", 64: "interleaved"}.get(page_size, "pages_first")
    lengths = MIXED if packed else ALIKE
    with poisoned():
        assert_exact(
            make(lengths=lengths, packed=packed, page_size=page_size, memory=memory, dtype=F16),
            "triton",
            batch_invariant=packed,
        )
    assert type(passes()[-1]) is ChunkLaunch


@interpreted
@pytest.mark.parametrize(
    "description",
    [
        {"mask": "none", "sinks": True, "poison_hidden": False, "value_dim": 24},
        {"mask": "window", "score": "softcap", "sinks": True},
        {"mask": "own_table", "score": "bias", "dtype": F16, "head_dim": 40},
    ],
    ids=lambda description: description["mask"],
)
def test_masks_and_scores(description: dict[str, Any]) -> None:
    with poisoned():
        assert_exact(make(lengths=ALIKE, page_size=16, **description), "triton")


@interpreted
def test_the_same_bits_in_any_batch() -> None:
    case = make(lengths=MIXED, packed=True, page_size=16, poison_hidden=False, dtype=F16)
    together = case.run("triton", batch_invariant=True)
    arguments = case.arguments()
    offsets = arguments.pop("cu_seqlens_q").tolist()
    query, lens, table = (arguments.pop(n) for n in ("query", "kv_lens", "page_table"))
    for n in (0, 2, 4):  # chunks
        at = slice(offsets[n], offsets[n + 1])
        alone, lse = saccade.attention_paged(
            query[at].transpose(0, 1)[None], page_table=table[[n]], kv_lens=lens[[n]],
            **arguments, return_lse=True, batch_invariant=True, implementation="triton",
        )  # fmt: skip
        assert torch.equal(alone[0].transpose(0, 1), together["output"][at])
        assert torch.equal(lse[0], together["lse"][:, at])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_row_alone_keeps_its_mask_where_bits_must_not_change(batch_invariant: bool) -> None:
    arguments = make(lengths=((1, 40),), poison_hidden=False).arguments()
    options = {name: arguments.pop(name) for name in ("mask", "score", "scale")}
    options |= {"batch_invariant": batch_invariant, "return_lse": False, "config": None}
    _, variant, _, _ = prepare_paged(PagedInputs(**arguments), **options)
    assert (variant.mask != "") == batch_invariant


@interpreted
def test_sequences_of_few_rows_are_left_to_their_own_pass() -> None:
    case = make(lengths=MIXED, packed=True)
    inputs, variant = case.prepared()
    given = *inputs, *variant.mask_captured.tensors
    tensors = tuple(tensor for tensor in given if tensor is not None)
    prepared = paged_host.prepared(inputs, variant, KernelConfig(), True)
    results = [prepared.output().fill_(torch.nan), prepared.lse().fill_(torch.nan)]
    few, short, many = prepared.passes
    assert [type(each) for each in (few, short, many)] == [PassLaunches] * 2 + [ChunkLaunch]
    many(inputs, variant, *results, (*tensors, *results))
    assert few.of.rows[1] == short.of.rows[0]
    written = ~results[0].isnan().flatten(1).any(1)
    assert written.tolist() == [n > SHORT for n, _ in MIXED for _ in range(n)]


@pytest.mark.parametrize(
    ("changes", "invariant", "reason"),
    [
        ({}, False, None),
        ({"packed": True}, False, None),
        ({"page_dtype": I8}, True, "are converted"),
        ({"mask": "documents"}, True, "planned ahead"),
        ({"lengths": ((24, 70),)}, False, "few query rows"),
        ({"lengths": ((24, 70),)}, True, "fill no tiles"),
        ({"lengths": ((31, 70),)}, True, None),
        ({"lengths": ((64, 64), *((1, 9),) * 90), "packed": True}, False, "most sequences"),
        ({"lengths": ((64, 64), *((1, 9),) * 90), "packed": True}, True, "fill no tiles"),
    ],
    ids=str,
)
def test_reasons(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], invariant: bool, reason: str | None
) -> None:
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: 4)
    case = make(**{"lengths": ((64, 64), (64, 200)), "poison_hidden": False, **changes})
    inputs, variant = case.prepared()
    of = PagedCallSpec.of(inputs)
    last = of.passes(inputs, variant, KernelConfig(), invariant)[-1]
    assert last.chunks
    found = paged_host.chunks_unsupported(of, last, inputs, variant, KernelConfig())
    assert (found is None) if reason is None else reason in (found or "")


def test_the_config_is_the_same_for_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_spec, "architecture", lambda tensor: "sm_90")
    found = set()
    for changes in ({"lengths": ALIKE}, {"lengths": MIXED, "packed": True}):
        inputs, variant = make(poison_hidden=False, dtype=F16, **changes).prepared()
        found.add(paged_host.chunk_config(PagedCallSpec.of(inputs), variant, KernelConfig()))
        given = paged_host.chunk_config(PagedCallSpec.of(inputs), variant, KernelConfig(kv_tile=32))
        assert given.kv_tile == 32
    assert len(found) == 1
