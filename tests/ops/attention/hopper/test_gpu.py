"""Hopper kernels on a GPU: lengths around every partial tile, schedules, graphs, streams,
addresses.

Each comparison with float64 looks at gradients too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade import masks
from saccade.gpu.kernel_args import Extent
from saccade.ops.attention.hopper import configs
from saccade.testing import assert_exact, make_case
from saccade.testing.oracle import oracle, tolerances

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
LENGTHS = [(1, 1), (63, 129), (64, 128), (65, 127), (192, 193), (129, 1000), (700, 64)]


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def attend(*tensors: Tensor, **options: Any) -> Tensor:
    return saccade.attention(*tensors, implementation="hopper", **options)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "documents", "blocks"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_lengths_around_tiles(head_dim: int, mask: str, lengths: tuple[int, int]) -> None:
    case = make_case(
        mask=mask, lengths=(lengths,), head_dim=head_dim, value_dim=head_dim, dtype=BF16,
        group=2, device="cuda", poison_hidden=lengths[0] == 129,
    )  # fmt: skip
    assert_exact(case, "hopper")


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_narrow_heads_with_many_keys(mask: str) -> None:
    """Few keys have a schedule of their own."""
    many = configs.SHORT + 277
    case = make_case(
        mask=mask, lengths=((129, many),), head_dim=64, value_dim=64, dtype=BF16, group=2,
        device="cuda", poison_hidden=True,
    )  # fmt: skip
    assert_exact(case, "hopper")


# Queries and keys that end together or whole tiles apart have a straight path of their own; others
# see part of a tile more, or nothing.
SHIFTED = [(1200, 1200), (1000, 1128), (1100, 1227), (1100, 1163), (1300, 1100), (1328, 1200)]


@pytest.mark.parametrize("lengths", SHIFTED, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_keys_that_end_with_tiles(head_dim: int, mask: str, lengths: tuple[int, int]) -> None:
    case = make_case(
        mask=mask, lengths=(lengths,), head_dim=head_dim, value_dim=head_dim, dtype=BF16, group=2,
        device="cuda",
    )  # fmt: skip
    assert_exact(case, "hopper")


@pytest.mark.parametrize("length", [2100, 6300])
def test_narrow_causal_heads_of_many_lengths(length: int) -> None:
    """Two consumers, and three, each of which may pass over a tile that hides all of its rows."""
    case = make_case(
        mask="causal", lengths=((length, length),), head_dim=64, value_dim=64, dtype=BF16,
        group=2, device="cuda",
    )  # fmt: skip
    assert_exact(case, "hopper")


TOGETHER, APART = ((300, 300), (200, 200), (400, 400)), ((300, 77), (200, 523), (400, 300))


@pytest.mark.parametrize("together_first", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_calls_of_equal_shapes_whose_sequences_end_apart(
    head_dim: int, together_first: bool
) -> None:
    """Offsets that both sides share say more than their shape. Whichever call comes first, the
    other kind after it is right."""
    more = int(together_first)  # rows: shapes that no call before had
    cases = []
    for lengths in (TOGETHER, APART):
        case = make_case(
            mask="causal", lengths=(*lengths, (more, more)), packed=True, head_dim=head_dim,
            value_dim=head_dim, dtype=BF16, group=2, device="cuda",
        )  # fmt: skip
        cases.append(case)
    assert cases[0].cu_seqlens is not None
    cases[0].cu_seqlens = (cases[0].cu_seqlens[0],) * 2
    for case in (cases if together_first else cases[::-1]) * 2:
        assert_exact(case, "hopper")


# Query heads on kv heads, batch, length: few programs, so that query heads are split over several.
GROUPED = [(8, 1, 1, 1500), (10, 2, 1, 1100), (6, 2, 2, 700), (28, 4, 1, 513)]


@pytest.mark.parametrize("shape", GROUPED, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_gradients_of_few_kv_heads(
    head_dim: int, mask: str, shape: tuple[int, int, int, int]
) -> None:
    heads, kv_heads, batch, length = shape
    problem = configs.BackwardProblem(
        128, 128, length, length, mask != "none", False, causal=mask == "causal"
    )
    keys = Extent(batch, length, kv_heads, False)
    assert configs.backward_splits(problem, keys, heads // kv_heads, 132) > 1
    case = make_case(
        mask=mask, lengths=((length, length),), batch=batch, head_dim=head_dim, value_dim=head_dim,
        dtype=BF16, group=heads // kv_heads, kv_heads=kv_heads, device="cuda",
    )  # fmt: skip
    assert_exact(case, "hopper")


@pytest.mark.parametrize("mask", ["none", "causal", "documents"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_packed(head_dim: int, mask: str, dtype: torch.dtype) -> None:
    case = make_case(
        packed=True, lengths=((200, 300), (0, 40), (65, 0), (130, 130), (1, 700)), mask=mask,
        head_dim=head_dim, value_dim=head_dim, group=3, dtype=dtype, sinks=True, device="cuda",
    )  # fmt: skip
    assert_exact(case, "hopper")


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("dims", [(192, 128), (128, 256)], ids=str)
def test_values_of_another_width(dims: tuple[int, int], mask: str) -> None:
    for packed in (False, True):
        case = make_case(
            mask=mask, lengths=((300, 260), (65, 400)) if packed else ((300, 260),),
            packed=packed, head_dim=dims[0], value_dim=dims[1], dtype=BF16, group=2, sinks=True,
            device="cuda", poison_hidden=True,
        )  # fmt: skip
        assert_exact(case, "hopper")


@pytest.mark.parametrize("last", [8.0, 90.0], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_that_leave_their_references_behind(head_dim: int, mask: str, last: float) -> None:
    """The farther on, the larger are scores; the largest overflow what they are measured by."""
    case = make_case(
        mask=mask, lengths=((333, 909),), head_dim=head_dim, value_dim=head_dim, dtype=BF16,
        group=1, device="cuda",
    )  # fmt: skip
    key = case.tensors["key"]
    for ramp in (torch.linspace(0.1, last, 909), torch.linspace(last, 0.1, 909)):
        case.tensors["key"] = key * ramp.to(key)[:, None]
        exact = oracle(case)
        allowed = tolerances(case, exact)
        leaves = {name: tensor.detach() for name, tensor in case.tensors.items()}
        output, lse = case.call(leaves, implementation="hopper")
        for name, found in (("output", output), ("lse", lse)):
            assert bool(((found.double() - exact[name]).abs() <= allowed[name]).all()), name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_calls_that_start_early_wait_for_what_they_read(head_dim: int) -> None:
    rows = normal(4, 9, 700, head_dim)

    def chain(wait: bool) -> Tensor:
        found = rows
        for _ in range(8):
            found = attend(found, found, found, mask=masks.causal())
            if wait:
                torch.cuda.synchronize()
        return found

    wanted = chain(True)
    assert all(torch.equal(chain(False), wanted) for _ in range(5))


def test_a_graph_replays_beside_calls_on_its_stream() -> None:
    static = [normal(4, 8, 1000, 128, seed=n) for n in range(3)]
    wanted = attend(*static, mask=masks.causal())
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        captured = attend(*static, mask=masks.causal())
    for _ in range(5):
        graph.replay()
        with torch.cuda.stream(stream):
            beside = attend(*static, mask=masks.causal())
        torch.cuda.synchronize()
        assert torch.equal(captured, wanted)
        assert torch.equal(beside, wanted)


def test_graphs_do_not_share_a_counter() -> None:
    tensors = [normal(2, 8, 2000, 64, seed=n) for n in range(3)]
    wanted = attend(*tensors, mask=masks.causal())
    torch.cuda.synchronize()
    graphs, streams, found = [], [torch.cuda.Stream() for _ in range(2)], []
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found.append([attend(*tensors, mask=masks.causal()) for _ in range(3)])
        graphs.append(graph)
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(output, wanted) for outputs in found for output in outputs)


def test_calls_on_two_streams_do_not_share_a_counter() -> None:
    tensors = [normal(2, 8, 2000, 64, seed=n) for n in range(3)]
    wanted = attend(*tensors, mask=masks.causal())
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(attend(*tensors, mask=masks.causal()))
    torch.cuda.synchronize()
    assert all(torch.equal(output, wanted) for output in found)


def test_unaligned_equals_aligned() -> None:
    tensors = [normal(1, 2, 300, 64, seed=n) for n in range(3)]
    moved = []
    for tensor in tensors:
        memory = torch.empty(tensor.numel() + 1, dtype=BF16, device="cuda")
        moved.append(memory[1:].view(tensor.shape).copy_(tensor))
    assert torch.equal(attend(*moved), attend(*tensors))


def test_grouped_queries_of_a_projection_are_read_as_they_lie() -> None:
    joint = normal(2, 500, 8 + 2 + 2, 128)
    query, key, value = (part.transpose(1, 2) for part in joint.split([8, 2, 2], 2))
    found = attend(query, key, value, mask=masks.causal())
    wanted = attend(*(t.contiguous() for t in (query, key, value)), mask=masks.causal())
    assert torch.equal(found, wanted)


def differentiate(tensors: list[Tensor], grad_output: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(attend(*leaves, **options), leaves, grad_output)


@pytest.mark.parametrize("score", ["softcap", "alibi", "bias", "own"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_through_scores(head_dim: int, score: str) -> None:
    case = make_case(
        mask="causal", score=score, sinks=True, lengths=((300, 333),), head_dim=head_dim,
        value_dim=head_dim, group=2, dtype=BF16, device="cuda",
    )  # fmt: skip
    assert_exact(case, "hopper")


@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
def test_gradients_with_any_scale(scale: float) -> None:
    case = make_case(
        lengths=((200, 200),), scale=scale, head_dim=64, value_dim=64, dtype=BF16, device="cuda"
    )
    assert_exact(case, "hopper")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", ["causal", "window", "documents", "blocks"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hidden_rows_of_nan_reach_no_gradient(head_dim: int, mask: str, packed: bool) -> None:
    case = make_case(
        mask=mask, lengths=((300, 260), (150, 400)) if packed else ((300, 260),),
        packed=packed, head_dim=head_dim, value_dim=head_dim, dtype=BF16, group=2,
        device="cuda", poison_hidden=True,
    )  # fmt: skip
    assert_exact(case, "hopper")


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_backward_passes_agree(head_dim: int, mask: Any) -> None:
    """Gradients of keys and values add up in order; those of queries in any order, in float32."""
    tensors = [normal(2, 8, 1500, head_dim, seed=n) for n in range(3)]
    grad_output = normal(2, 8, 1500, head_dim, seed=3)
    first, second = (differentiate(tensors, grad_output, mask=mask) for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    torch.testing.assert_close(first[0], second[0], rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(300)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_are_equal_bits(head_dim: int, mask: masks.Mask | None) -> None:
    """So many heads that programs take several tiles of keys, and partial sums wait for each
    other."""
    tensors = [normal(4, 8, 1500, head_dim, seed=n) for n in range(3)]
    grad_output = normal(4, 8, 1500, head_dim, seed=3)
    first, *others = (
        differentiate(tensors, grad_output, mask=mask, deterministic=True) for _ in range(4)
    )
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal", "window", "prefix", "key_lengths"])
def test_shares_in_turns(mask: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As deterministic passes have it; nonfinite rows, ragged sequences, and heads that share
    keys."""
    monkeypatch.setattr(configs, "in_key_order", lambda problem: problem.contiguity is not None)
    for lengths in (((1300, 1260),), ((200, 300), (0, 440), (65, 0), (130, 130), (1, 1700))):
        case = make_case(
            packed=len(lengths) > 1, lengths=lengths, mask=mask, head_dim=head_dim,
            value_dim=head_dim, group=2, dtype=BF16, sinks=True, poison_hidden=mask != "none",
            device="cuda",
        )  # fmt: skip
        assert_exact(case, "hopper")


def test_a_gradient_without_strides() -> None:
    tensors = [normal(1, 4, 300, 128, seed=n) for n in range(3)]
    ones = torch.ones((), dtype=BF16, device="cuda").expand(1, 4, 300, 128)
    found = differentiate(tensors, ones)
    for got, wanted in zip(found, differentiate(tensors, ones.contiguous()), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.01, atol=1e-4)


def test_a_graph_of_a_backward_pass_replays() -> None:
    tensors = [normal(2, 8, 1000, 128, seed=n) for n in range(3)]
    grad_output = normal(2, 8, 1000, 128, seed=3)
    wanted = differentiate(tensors, grad_output, mask=masks.causal())
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        captured = differentiate(tensors, grad_output, mask=masks.causal())
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(captured[0], wanted[0], rtol=0.01, atol=1e-4)
        assert torch.equal(captured[1], wanted[1])
        assert torch.equal(captured[2], wanted[2])
