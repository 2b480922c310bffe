"""Hopper kernels over pages on a GPU: pages, lengths, masks, and what lies behind an end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import saccade
from saccade import masks
from saccade.runtime import call_cache
from saccade.testing import assert_exact, make_paged_case, poisoned

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
CHUNKS = ((200, 700), (200, 200), (200, 1000), (200, 0), (200, 130))
MIXED = ((300, 300), (1, 77), (0, 5), (130, 600), (3, 0), (5, 200), (64, 1100))


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Small calls take the kernel too, and say so."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")
    from saccade.ops.attention.hopper import configs
    from saccade.ops.paged_attention import hopper as paged_hopper
    from saccade.ops.paged_attention.triton import host as triton_host

    classify, launched = configs.pages_unsupported, []
    start = paged_hopper.HopperChunkLaunch.__call__
    monkeypatch.setattr(
        configs, "pages_unsupported",
        lambda problem: classify(problem._replace(query_tiles=10**6, slots=10**6)),
    )  # fmt: skip
    monkeypatch.setattr(triton_host, "_forwards", {})
    monkeypatch.setattr(call_cache, "_calls", {})

    def recorded(self: Any, *arguments: Any) -> None:
        launched.append("chunk")
        start(self, *arguments)

    monkeypatch.setattr(paged_hopper.HopperChunkLaunch, "__call__", recorded)
    yield launched


def check(started: list[str], head_dim: int = 128, value_dim: int = 128, **more: Any) -> None:
    dims = {"head_dim": head_dim, "value_dim": value_dim, "dtype": BF16}
    case = make_paged_case(device="cuda", **(dims | more))
    with poisoned():
        assert_exact(case, "hopper")
    assert started, "another kernel served it"


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("memory", ["pages_first", "slots_first", "heads_first", "interleaved"])
def test_pages(started: list[str], memory: str, page_size: int) -> None:
    check(started, lengths=CHUNKS, page_size=page_size, memory=memory, mask="causal")


@pytest.mark.parametrize("dims", [(64, 64), (96, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_head_dims(started: list[str], mask: str, dims: tuple[int, int]) -> None:
    head_dim, value_dim = dims
    check(
        started, lengths=CHUNKS, page_size=64, mask=mask, head_dim=head_dim, value_dim=value_dim,
        dtype=F16,
    )  # fmt: skip


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("group", [1, 4])
def test_packed_chunks_beside_decoding(started: list[str], group: int, mask: str) -> None:
    check(started, lengths=MIXED, packed=True, page_size=16, mask=mask, group=group, sinks=True)


@pytest.mark.parametrize("score", ["softcap", "alibi", "own"])
def test_scores(started: list[str], score: str) -> None:
    check(started, lengths=CHUNKS, page_size=64, mask="causal", score=score)


def test_hidden_rows_of_nan_reach_nothing(started: list[str]) -> None:
    check(started, lengths=MIXED, packed=True, page_size=32, mask="causal", poison_hidden=True)


def test_a_long_chunk_equals_the_dense_kernel_and_replays_in_a_graph() -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=BF16)

    key, value, query = normal(8, 4096, 128), normal(8, 4096, 128), normal(1, 32, 1024, 128)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).cuda()
    pools = [torch.empty(64, 8, 64, 128, device="cuda", dtype=BF16) for _ in range(2)]
    for pool, rows in zip(pools, (key, value), strict=True):
        pool[order] = rows.unflatten(1, (64, 64)).transpose(0, 1)
    table, lens = order.int()[None], torch.tensor([4096], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"mask": masks.causal(), "implementation": "hopper"}

    def attend() -> torch.Tensor:
        output = saccade.attention_paged(query, pools[0], pools[1], table, lens, **options)
        assert isinstance(output, torch.Tensor)
        return output

    # Ends whole tiles apart let the dense kernel look for fewer maxima than a chunk, whose lengths
    # lie on the GPU; its weights then round otherwise.
    whole = saccade.attention(query, key[None], value[None], **options)
    torch.testing.assert_close(attend(), whole, rtol=0.02, atol=0.02)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    lens.fill_(3000)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
    shorter = saccade.attention(query, key[None, :, :3000], value[None, :, :3000], **options)
    assert torch.equal(captured, attend())
    assert torch.equal(captured, shorter)
