"""Triton kernels on a GPU: graphs, torch.compile, streams, repeats, addresses, preparation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import saccade
from saccade import masks, scores
from saccade.ops.attention.triton import host
from saccade.testing import assert_exact, make_case

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KINDS = ["causal", "documents", "blocks", "packed"]


@pytest.fixture(autouse=True)
def _atomic_unless_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ordered_is_faster", lambda spec: False)
    monkeypatch.setattr(host, "_launches", {})


def normal(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def problem(spec: str, seed: int, length: int = 384, dtype: torch.dtype = BF16) -> list[Tensor]:
    """Query, key and value, a gradient of the output, and what the mask reads."""
    heads = (4, 2, 2, 4)
    shapes = [(2 * length, h, 64) if spec == "packed" else (2, h, length, 64) for h in heads]
    tensors = [normal(*shape, seed=10 * seed + n, dtype=dtype) for n, shape in enumerate(shapes)]
    torch.manual_seed(seed)
    if spec == "documents":
        tensors.append(torch.randint(0, 4, (2, length)).sort(1).values.cuda())
    elif spec == "blocks":
        blocks = -(-length // 48)
        tensors.append(torch.randint(0, 3, (2, 4, blocks, blocks)).bool().cuda())
    elif spec == "packed":
        inner = torch.randint(1, 2 * length, (3,)).sort().values.tolist()
        tensors.append(torch.tensor([0, *inner, 2 * length], dtype=torch.int32, device="cuda"))
    return tensors


def attend(spec: str, *tensors: Tensor, **options: Any) -> Tensor:
    query, key, value, *tables = tensors
    options["implementation"] = "triton"
    if spec == "packed":
        mask = masks.causal()
        return saccade.attention_varlen(query, key, value, tables[0], mask=mask, **options)
    if spec == "documents":
        mask = masks.causal() & masks.documents(tables[0])
    else:
        mask = masks.causal() if spec == "causal" else masks.blocks(tables[0], 48)
    return saccade.attention(query, key, value, mask=mask, **options)


def results(spec: str, *tensors: Tensor, deterministic: bool = True) -> list[Tensor]:
    """The output without gradients, the output with them, and the gradients."""
    query, key, value, grad, *tables = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    alone = attend(spec, query, key, value, *tables)
    output = attend(spec, *leaves, *tables, deterministic=deterministic)
    return [alone, output.detach(), *torch.autograd.grad(output, leaves, grad)]


def assert_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    for position, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(mine, theirs), f"result {position} differs"


def assert_near(found: list[Tensor], wanted: list[Tensor], tolerance: float = 2e-2) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), atol=tolerance, rtol=tolerance)


class TestGraphs:
    @pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
    @pytest.mark.parametrize("spec", KINDS)
    def test_a_graph_replays_with_changed_inputs(self, spec: str, deterministic: bool) -> None:
        static = problem(spec, seed=0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                results(spec, *static, deterministic=deterministic)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results(spec, *static, deterministic=deterministic)
        for seed in (1, 2, 3):
            fresh = problem(spec, seed)
            for mine, theirs in zip(static, fresh, strict=True):
                mine.copy_(theirs)
            graph.replay()
            wanted = results(spec, *fresh, deterministic=deterministic)
            if deterministic:
                assert_bits(captured, wanted)
            else:  # gradients of queries add up in any order
                assert_bits([*captured[:2], *captured[3:]], [*wanted[:2], *wanted[3:]])
                assert_near(captured[2:3], wanted[2:3])


class TestCompile:
    @pytest.fixture(autouse=True)
    def _unchecked_shapes(self) -> Iterator[None]:
        """Dynamo does not trace through jaxtyping's checks."""
        disabled = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", True)
        torch._dynamo.reset()
        yield
        jaxtyping.config.update("jaxtyping_disable", disabled)

    @pytest.mark.parametrize("spec", KINDS)
    def test_compiled_equals_eager_and_is_compiled_once(self, spec: str) -> None:
        def function(*tensors: Tensor) -> Tensor:
            return attend(spec, *tensors, deterministic=True) * 2

        counter = CompileCounterWithBackend("inductor")
        compiled: Any = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)

        def both(seed: int, length: int) -> None:
            query, key, value, grad, *tables = problem(spec, seed, length)
            found = []
            for run in (compiled, function):
                leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
                output = run(*leaves, *tables)
                found.append([output.detach(), *torch.autograd.grad(output, leaves, grad)])
            assert_bits(*found)

        both(seed=0, length=384)
        both(seed=1, length=240)
        count = counter.frame_count
        for seed in (2, 3, 4):  # other numbers in the captured tensors
            both(seed=seed, length=384)
            both(seed=seed, length=240)
        assert counter.frame_count == count <= 2


class TestStreams:
    @pytest.mark.parametrize("spec", KINDS)
    def test_two_streams_at_once_give_what_one_gives(self, spec: str) -> None:
        problems = [problem(spec, seed=1), problem(spec, seed=2)]
        wanted = [results(spec, *tensors) for tensors in problems]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        found: list[list[list[Tensor]]] = [[], []]
        for _ in range(20):
            for n, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found[n].append(results(spec, *problems[n]))
        torch.cuda.synchronize()
        for n in range(2):
            for once in found[n]:
                assert_bits(once, wanted[n])


class TestRepeats:
    def test_a_thousand_runs_are_bit_equal(self) -> None:
        leaves = [normal(2, h, 200, 64, seed=n).requires_grad_() for n, h in enumerate((4, 2, 2))]
        bias = normal(1, 4, 200, 200, seed=5, dtype=F32).requires_grad_()
        grad = normal(2, 4, 200, 64, seed=6)

        def once() -> list[Tensor]:
            output = saccade.attention(
                *leaves, mask=masks.causal(), score=scores.bias(bias), deterministic=True,
                implementation="triton",
            )  # fmt: skip
            return [output.detach(), *torch.autograd.grad(output, [*leaves, bias], grad)]

        first, differing = once(), torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            for mine, theirs in zip(first, once(), strict=True):
                differing += (mine != theirs).sum()
        assert int(differing) == 0


class TestSize:
    def test_more_elements_than_2_31(self) -> None:
        """The whole against both halves of the keys, merged; takes up to 60 GB."""
        kv_len = 2**24 + 128
        query = normal(1, 2, 64, 64, seed=0).requires_grad_()
        whole = [normal(1, 2, kv_len, 64, seed=n).requires_grad_() for n in (1, 2)]
        assert whole[0].numel() > 2**31
        options: dict[str, Any] = {
            "return_lse": True, "deterministic": True, "implementation": "triton",
        }  # fmt: skip
        output, lse = saccade.attention(query, *whole, **options)
        grad = normal(*output.shape, seed=3)
        grads = torch.autograd.grad(output, [query, *whole], grad)

        cut = 2**23 + 37
        halves = [
            [tensor.detach()[:, :, rows].requires_grad_() for tensor in whole]
            for rows in (slice(0, cut), slice(cut, None))
        ]
        parts = [saccade.attention(query, *half, **options) for half in halves]
        merged, merged_lse = saccade.merge_states(*zip(*parts, strict=True))
        of_query, *of_halves = torch.autograd.grad(merged, [query, *halves[0], *halves[1]], grad)
        torch.testing.assert_close(lse, merged_lse, atol=1e-3, rtol=0)

        def assert_alike(found: Tensor, wanted: Tensor) -> None:
            largest = wanted.abs().max()
            assert largest > 0 and (found - wanted).abs().max() <= 0.03 * largest

        assert_alike(output, merged)
        assert_alike(grads[0], of_query)
        for n in range(2):
            for head in range(2):  # a piece at a time: differences take memory too
                assert_alike(grads[1 + n][:, head, :cut], of_halves[n][:, head])
                assert_alike(grads[1 + n][:, head, cut:], of_halves[2 + n][:, head])

    @pytest.mark.parametrize("position", ["batch", "head"])
    def test_strides_beyond_2_31(self, position: str) -> None:
        step = 2**31 + 8
        memory = torch.zeros(step + 40000, dtype=BF16, device="cuda")
        sizes = (2, 2, 100, 64) if position == "batch" else (1, 2, 100, 64)
        strides = (step, 6400, 64, 1) if position == "batch" else (0, step, 64, 1)
        far = []
        for n in range(3):
            far.append(memory[n * 12800 :].as_strided(sizes, strides))
            far[n].copy_(normal(*sizes, seed=n))
        near = [tensor.contiguous() for tensor in far]
        found, wanted = (results("causal", *t, normal(*sizes, seed=4)) for t in (far, near))
        assert_bits(found, wanted)


def moved(tensor: Tensor) -> Tensor:
    """A copy that starts one element past an aligned address."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    copy = memory[1:].view(tensor.shape)
    copy.copy_(tensor)
    return copy


class TestAddresses:
    @pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
    @pytest.mark.parametrize("spec", KINDS)
    def test_unaligned_equals_aligned(self, spec: str, dtype: torch.dtype) -> None:
        tensors = problem(spec, seed=3, dtype=dtype)
        wanted = results(spec, *tensors)
        assert_bits(results(spec, *map(moved, tensors)), wanted)
        for position in range(len(tensors)):  # one at a time, then aligned ones again
            mixed = [moved(t) if n == position else t for n, t in enumerate(tensors)]
            assert_bits(results(spec, *mixed), wanted)
            assert_bits(results(spec, *tensors), wanted)

    def test_an_unaligned_bias_sinks_and_gradient_of_the_lse(self) -> None:
        case = make_case(
            mask="causal", score="bias", sinks=True, device="cuda", lengths=((70, 90),)
        )
        wanted = case.run("triton", deterministic=True)
        case.tensors = {name: moved(tensor) for name, tensor in case.tensors.items()}
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in case.tensors.items()}
        output, lse = case.call(leaves, implementation="triton", deterministic=True)
        grads = [moved(case.grads["output"].float()), moved(case.grads["lse"].float())]
        found = torch.autograd.grad([output, lse], list(leaves.values()), grads)
        assert_bits(list(found), [wanted[f"grad_{name}"] for name in leaves])


@masks.function
def every_nth(batch: Any, head: Any, query_row: Any, kv_row: Any, step: Any, offset: Any) -> Any:
    return ((query_row - kv_row + offset) % step == 0) | (query_row == kv_row)


def nearby(distance: Any, width: Any) -> Any:
    return (distance // 3 >= -width) & (distance // -5 <= 2)


@masks.function(align="bottom_right")
def by_table(batch: Any, head: Any, query_row: Any, kv_row: Any, table: Any, width: Any) -> Any:
    entry = masks.take(table, batch, kv_row - 7)  # before the first one: the first
    return nearby(query_row - kv_row, width) | (entry == head % 3)


@scores.function
def bent(score: Any, batch: Any, head: Any, query_row: Any, kv_row: Any, gain: Any) -> Any:
    far = scores.absolute(query_row - kv_row) * 0.01
    return 2.0 * scores.tanh(score * gain) - far


CALLS: dict[str, list[Callable[[], dict[str, Any]]]] = {
    "windows": [lambda n=n: {"mask": masks.window(n, n)} for n in (1, 5, 16, 32)],
    "steps": [lambda n=n: {"mask": every_nth(n, n)} for n in (1, 2, 16, 17)],
    "offsets": [lambda n=n: {"mask": every_nth(7, n)} for n in (False, 16, 1, -3, True)],
    "scales": [lambda s=s: {"scale": s} for s in (0.1, 0.3, -0.3, 0.0)],
    "caps": [lambda c=c: {"score": scores.softcap(c)} for c in (1.0, 2.0, 16.0)],
    "forms": [
        dict, lambda: {"mask": masks.causal()}, lambda: {"mask": masks.causal("top_left")},
        lambda: {"sinks": torch.ones(4, device="cuda")}, lambda: {"score": bent(0.4)},
    ],
}  # fmt: skip


class TestPreparedKernels:
    """A kernel that was prepared for one call never serves another that it does not fit."""

    @pytest.mark.parametrize("name", list(CALLS))
    def test_alternating_calls_are_not_mixed_up(self, name: str) -> None:
        tensors = [normal(2, h, 90, 64, seed=n, dtype=F32) for n, h in enumerate((4, 2, 2, 4))]

        def run(options: dict[str, Any], dtype: torch.dtype, implementation: str) -> list[Tensor]:
            options = {**options, "implementation": implementation}
            leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors[:3]]
            with torch.no_grad():
                alone = saccade.attention(*leaves, **options)
            output = saccade.attention(*leaves, **options)
            grads = torch.autograd.grad(output, leaves, tensors[3].to(dtype))
            return [alone, output.detach(), *grads]

        wanted = [run(make(), torch.float64, "reference") for make in CALLS[name]]
        for order in itertools.permutations(range(len(wanted)), 2):
            for which in (*order, order[0]):
                assert_near(run(CALLS[name][which](), F32, "triton"), wanted[which], 1e-4)

    def test_alternating_dtypes_and_shapes_are_not_mixed_up(self) -> None:
        choices = [(F32, 90), (BF16, 90), (F16, 90), (BF16, 91), (F32, 128), (F16, 1)]
        wanted = {}
        for dtype, length in choices:
            tensors = problem("causal", seed=1, length=length, dtype=dtype)
            query, key, value, grad = (tensor.double() for tensor in tensors)
            leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
            output = saccade.attention(*leaves, mask=masks.causal(), implementation="reference")
            exact = [output.detach(), *torch.autograd.grad(output, leaves, grad)]
            wanted[dtype, length] = tensors, exact
        for order in itertools.permutations(choices, 2):
            for choice in (*order, order[0]):
                tensors, exact = wanted[choice]
                found = results("causal", *tensors)
                assert_near(found[1:], exact, 1e-4 if choice[0] == F32 else 0.06)
                assert torch.equal(found[0], found[1])


class TestForms:
    @pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
    @pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
    @pytest.mark.parametrize(
        "description",
        [
            {},
            {"group": 4, "mask": "causal"},
            {"group": 4, "mask": "window", "score": "softcap", "sinks": True},
            {"mask": "documents", "dropout_p": 0.3},
            {"mask": "blocks", "score": "head_bias", "poison_hidden": True},
            {"mask": "tensor", "poison_hidden": True},
            {"packed": True, "lengths": ((200, 300), (0, 40), (65, 0), (130, 130))},
            {"packed": True, "lengths": ((257, 257), (3, 64)), "mask": "causal", "group": 3},
        ],
        ids=str,
    )
    def test_both_forms_are_exact(
        self, description: dict[str, Any], dtype: torch.dtype, deterministic: bool
    ) -> None:
        sizes = {"lengths": ((260, 390),), "head_dim": 64, "value_dim": 64, "dtype": dtype}
        case = make_case(**{**sizes, **description, "device": "cuda"})
        assert_exact(case, "triton", deterministic=deterministic)


class TestCallers:
    def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_leaves(self) -> None:
        tensors = problem("causal", seed=0, dtype=F32)
        with torch.autocast("cuda", dtype=BF16):
            found = results("causal", *tensors[:3], tensors[3].to(BF16))
        wanted = results("causal", *(tensor.to(BF16) for tensor in tensors))
        assert [tensor.dtype for tensor in found] == [BF16, BF16, F32, F32, F32]
        assert_bits([tensor.to(BF16) for tensor in found], wanted)

    @pytest.mark.parametrize("lengths", [(90, 90), (33, 140), (140, 33)], ids=str)
    def test_own_mask_and_score(self, lengths: tuple[int, int]) -> None:
        rows = (lengths[0], lengths[1], lengths[1], lengths[0])
        tensors = [
            normal(2, h, n, 64, seed=n + h, dtype=F32)
            for h, n in zip((4, 2, 2, 4), rows, strict=True)
        ]
        table = torch.arange(2 * 50, device="cuda").view(2, 50) % 3  # shorter than the keys
        found: list[list[Tensor]] = []
        for dtype, name in ((F32, "triton"), (torch.float64, "reference")):
            leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors[:3]]
            output = saccade.attention(
                *leaves, mask=by_table(table, 2), score=bent(0.7), implementation=name
            )
            grads = torch.autograd.grad(output, leaves, tensors[3].to(dtype))
            found.append([output.detach(), *grads])
        assert_near(found[0], found[1], 1e-4)
