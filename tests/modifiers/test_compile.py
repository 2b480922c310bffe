"""Masks and scores under torch.compile: made inside of a graph, passed in, called there."""

# A decorator of functions without annotations looks to pyright as if it gave them back.
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.torch_version import TorchVersion

import saccade
from saccade import masks, scores
from saccade.masks import as_mask
from saccade.scores import as_score

LENGTH = 24
IMPLEMENTATION = "cpu"


@masks.function
def strided(batch: Any, head: Any, query_row: Any, kv_row: Any, ids: Any, stride: Any) -> Any:
    return ((query_row - kv_row) % stride == 0) & (ids[query_row] >= ids[kv_row])


@masks.function(align="bottom_right")
def near(batch: Any, head: Any, query_row: Any, kv_row: Any, width: Any) -> Any:
    return (query_row - kv_row <= width) & (query_row >= kv_row)


@scores.function
def sloped(score: Any, batch: Any, head: Any, query_row: Any, kv_row: Any, slopes: Any, by: Any):
    return score * by - slopes[head] * (query_row - kv_row).abs()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(1, 2, LENGTH, 8, generator=torch.Generator().manual_seed(seed))


def attend(query: Tensor, **options: Any) -> Tensor:
    return saccade.attention(query, query, query, implementation=IMPLEMENTATION, **options)


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, fullgraph: bool = True) -> tuple[Any, CompileCounter]:
    counter = CompileCounter()
    return torch.compile(function, backend=counter, fullgraph=fullgraph), counter


MADE_INSIDE: dict[str, Any] = {
    "window": lambda number, tensor: {"mask": masks.window(number, 1)},
    "joined": lambda number, tensor: {"mask": masks.causal() & masks.window(number, 3)},
    "documents": lambda number, tensor: {"mask": masks.documents(tensor[None]) & masks.causal()},
    "own function": lambda number, tensor: {"mask": strided(tensor, number)},
    "own aligned function": lambda number, tensor: {"mask": near(number) | strided(tensor, 3)},
    "softcap": lambda number, tensor: {"score": scores.softcap(number + 0.5)},
    "own score": lambda number, tensor: {"score": sloped(tensor[:2] * 0.1, number * 0.5)},
    "chain": lambda number, tensor: {
        "score": scores.softcap(number * 2.0) >> sloped(tensor[:2] * 0.1, 0.5),
        "mask": masks.window(number),
    },
}


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_numbers_of_what_is_made_inside_may_change(name):
    make = MADE_INSIDE[name]

    def function(query: Tensor, number: int, tensor: Tensor) -> Tensor:
        return attend(query, **make(number, tensor))

    graph, counter = compiled(function)
    for number in (2, 3, 5, 8, 11):
        tensor = torch.arange(LENGTH) // number
        torch.testing.assert_close(graph(rows(), number, tensor), function(rows(), number, tensor))
    # Once for the first number as a constant, once for any; real numbers are constants to Dynamo.
    assert counter.frame_count <= (2 if "mask" in make(2, tensor) and name != "chain" else 5)


def test_numbers_of_about_32_bits_may_change_in_kernels():
    below = masks.function(lambda b, h, q, k, number: (number - q < k - 2**31 - 3) | (k == 0))

    def function(query: Tensor, number: int, implementation: str = "triton") -> Tensor:
        return saccade.attention(
            query, query, query, mask=below(number), implementation=implementation
        )

    if torch.cuda.is_available():
        pytest.skip("in Triton's interpreter; on a GPU test_gpu.py does it")
    graph = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    for number in (-5, 3 - 2**31, -(2**31), 2 - 2**31, -(2**31) - 6):
        wanted = function(rows(), number, "reference")
        torch.testing.assert_close(function(rows(), number), wanted)
        torch.testing.assert_close(graph(rows(), number), wanted)


MADE_OUTSIDE: dict[str, Any] = {
    "window": lambda n: {"mask": masks.window(n)},
    "lambda": lambda n: {"mask": as_mask(lambda b, h, q, k: (q - k) % n == 0)},
    "own function": lambda n: {"mask": strided(torch.arange(LENGTH) // n, n)},
    "score": lambda n: {"score": sloped(torch.ones(2) / n, 0.5)},
    "score of a lambda": lambda n: {"score": as_score(lambda s, b, h, q, k: s * n - k / n)},
}


@pytest.mark.parametrize("name", MADE_OUTSIDE)
def test_what_is_made_outside_is_passed_in(name):
    graph, counter = compiled(lambda query, options: attend(query, **options))
    for number in (2, 3, 5, 8, 11):
        options = MADE_OUTSIDE[name](number)
        torch.testing.assert_close(graph(rows(), options), attend(rows(), **options))
    assert counter.frame_count <= 3


def test_what_a_module_holds_is_read_by_each_call():
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.2]))
            self.register_buffer("ids", torch.arange(LENGTH) // 5)
            self.mask = as_mask(lambda b, h, q, k: self.ids[q] == self.ids[k])  # pyright: ignore[reportIndexIssue]
            self.score = as_score(lambda s, b, h, q, k: s - self.slopes[h] * (q - k).abs())

        def forward(self, query: Tensor) -> Tensor:
            return attend(query, mask=self.mask, score=self.score)

    module = Module()
    graph, counter = compiled(module)
    for step in range(1, 4):
        found = graph(rows())
        wanted = module(rows())
        torch.testing.assert_close(found, wanted)
        grads = [torch.autograd.grad(out.square().sum(), module.slopes) for out in (found, wanted)]
        torch.testing.assert_close(*grads)
        with torch.no_grad():
            module.slopes.add_(0.3)
            module.ids.copy_(torch.arange(LENGTH) // step)
    assert counter.frame_count == 1


def test_gradients_of_captured_tensors_flow_through_the_graph():
    def function(query: Tensor, slopes: Tensor, table: Tensor, width: int) -> Tensor:
        score = sloped(torch.exp(slopes), 0.5) >> scores.bias(table)
        return attend(query, score=score, mask=near(width)).square().sum()

    graph, _ = compiled(function)
    graph = torch.compile(function, backend="aot_eager", fullgraph=True)
    for width in (3, 5, 9):
        leaves = [rows(), torch.tensor([-1.0, 0.5]), rows(1)[..., :1].mT.mean(1)]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        results = [torch.autograd.grad(f(*leaves, width), leaves) for f in (graph, function)]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("argument", ["mask", "score"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_lambda_inside_a_graph_is_served_or_refused(argument, fullgraph):
    def function(query: Tensor, width: int) -> Tensor:
        if argument == "mask":
            return attend(query, mask=lambda b, h, q, k: (q - k <= width) & (q >= k))
        return attend(query, score=lambda s, b, h, q, k: s - (q - k) / width)

    graph, _ = compiled(function, fullgraph)
    for width in (2, 3, 5):
        try:
            found = graph(rows(), width)
        except Exception as error:  # never a mask of another number
            refusals = (
                f"{argument}: got a function inside torch.compile",
                "reaches width from outside",
            )
            assert any(refusal in str(error) for refusal in refusals), error
        else:
            torch.testing.assert_close(found, function(rows(), width))


def test_a_function_that_reaches_numbers_is_refused_inside_a_graph():
    width = 3
    reaching = masks.function(lambda b, h, q, k: q - k <= width)
    graph, _ = compiled(lambda query: attend(query, mask=reaching()))
    with pytest.raises(Exception, match="reaches width from outside, which a graph cannot follow"):
        graph(rows())


ENDS, WIDTH = torch.tensor([5, LENGTH]), 7
REACHING: dict[str, dict[str, Any]] = {
    "mask": {"mask": lambda b, h, q, k: (q >= k) & (k < ENDS[h])},
    "score": {"score": lambda s, b, h, q, k: s + ENDS[h] * k * 0.01},
    "partial": {"mask": functools.partial(lambda ends, b, h, q, k: k < ends[h], ENDS)},
    "of function": {"mask": masks.function(lambda b, h, q, k: (k < ENDS[h]) | (q - k > WIDTH))},
    "of score function": {"score": scores.function(lambda s, b, h, q, k: s - k / ENDS[h])},
}


@pytest.mark.parametrize("name", REACHING)
def test_a_function_that_reaches_tensors_breaks_the_graph(name):
    options = REACHING[name]
    graph, _ = compiled(lambda query: attend(query, **options), fullgraph=False)
    before = ENDS.clone()
    try:
        for ends in ([5, LENGTH], [1, 9]):
            ENDS.copy_(torch.tensor(ends))
            torch.testing.assert_close(graph(rows()), attend(rows(), **options))
    finally:
        ENDS.copy_(before)


@pytest.mark.parametrize("name", REACHING)
def test_a_full_graph_says_how_a_function_becomes_a_part_of_it(name):
    options = REACHING[name]
    graph, _ = compiled(lambda query: attend(query, **options))
    with pytest.raises(Exception, match=r"saccade\.(mask|score)s\.function\(the_function\)\(\)"):
        graph(rows())
    argument, function = next(iter(options.items()))
    if not isinstance(function, (masks.MaskFunction, scores.ScoreFunction)):
        function = {"mask": masks, "score": scores}[argument].function(function)
    made = {argument: function()}
    torch._dynamo.reset()
    graph, counter = compiled(lambda query: attend(query, **made))
    torch.testing.assert_close(graph(rows()), attend(rows(), **options))
    assert counter.frame_count == 1


def test_a_mask_is_inverted_inside_a_graph():
    def function(query: Tensor, width: int) -> Tensor:
        return attend(query, mask=masks.causal() & masks.window(width).__invert__())

    graph, _ = compiled(function)
    for width in (2, 3, 5):
        wanted = attend(rows(), mask=masks.causal() & ~masks.window(width))
        torch.testing.assert_close(graph(rows(), width), wanted)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_an_inverted_mask_breaks_no_graph_from_torch_2_14_on(fullgraph):
    if fullgraph and TorchVersion(torch.__version__) < TorchVersion("2.14"):
        pytest.skip("Dynamo follows ~ of a class of Python from torch 2.14 on")
    graph, _ = compiled(lambda query: attend(query, mask=~masks.causal()), fullgraph)
    torch.testing.assert_close(graph(rows()), attend(rows(), mask=~masks.causal()))


@pytest.mark.parametrize("kind", ["causal", "documents", "blocks"])
def test_lengths_that_change_compile_nothing_anew(kind: str) -> None:
    def function(query: Tensor, table: Tensor) -> Tensor:
        mask = masks.causal()
        if kind != "causal":
            mask = masks.documents(table) if kind == "documents" else masks.blocks(table, 8)
        return attend(query, mask=mask)

    counter = CompileCounter()
    run: Any = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for length in (48, 24, 31):
        query = torch.randn(2, 2, length, 8, generator=torch.Generator().manual_seed(length))
        table = torch.arange(length)[None].expand(2, -1) // 7
        if kind == "blocks":
            table = torch.ones(2, 2, -(-length // 8), -(-length // 8)).tril().bool()
        torch.testing.assert_close(run(query, table), function(query, table))
    assert counter.frame_count == 1


def test_a_row_that_is_compared_with_a_number_is_right_or_refused() -> None:
    """torch.compile makes False of a row == number where the number may change."""

    def function(query: Tensor, number: int) -> Tensor:
        mask = masks.of_positions(lambda b, h, q, k: (k == number) | (q == k), LENGTH, LENGTH)
        return attend(query, mask=mask)

    graph, _ = compiled(function)
    torch.testing.assert_close(graph(rows(), 2), function(rows(), 2))
    # By torch 2.11 and 2.12 PyTorch's own compiler refuses it.
    with pytest.raises(Exception, match=r"masks and scores take no True or False|\bTaped\b"):
        graph(rows(), 3)
