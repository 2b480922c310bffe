"""Products of the same rows in compiled layers, as the layers give them."""

from typing import Any

import pytest
import served
import torch
from torch import nn
from torch.nn import functional as F

from saccade.serving.compiled_layers import CompiledLayers
from saccade.serving.compiled_products import with_products_of_all
from saccade.serving.merged_products import MergedGroup


class Projections(nn.Module):
    """Three products of the same rows, one of what they give, and one of the rows again."""

    def __init__(self, bias: bool):
        super().__init__()
        sizes = (6, 2, 2)
        self.linears = [nn.Linear(8, size, bias=bias) for size in sizes]
        self.parts = nn.ModuleList(self.linears)
        self.out, self.last = nn.Linear(10, 8, bias=bias), nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = torch.cat([part(rows) for part in self.parts], -1)
        return self.last(rows + self.out(found.tanh()))


def made(bias: bool) -> tuple[Projections, MergedGroup]:
    with torch.inference_mode(False):
        torch.manual_seed(0)
        module = Projections(bias).double()
        group = MergedGroup(module.linears)
    return module, group


def compiled(module: nn.Module, merges: bool) -> tuple[Any, list[Any]]:
    """The module compiled, and what its graphs call."""
    torch._dynamo.reset()
    called: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    products = with_products_of_all(backend) if merges else backend
    return torch.compile(module, backend=products, dynamic=True), called


PRODUCT = torch.ops.saccade.product_of_all.default


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_products_of_the_same_rows_are_one(bias):
    module, _ = made(bias)
    rows = torch.randn(1, 5, 8, dtype=torch.float64)
    call, called = compiled(module, merges=True)
    torch.testing.assert_close(call(rows), module(rows))
    assert called.count(PRODUCT) == 1 and called.count(F.linear) == 2


@torch.inference_mode()
def test_without_merging_there_are_as_many_as_there_were():
    module, _ = made(True)
    rows = torch.randn(1, 5, 8, dtype=torch.float64)
    call, called = compiled(module, merges=False)
    assert torch.equal(call(rows), module(rows))
    assert called.count(PRODUCT) == 0 and called.count(F.linear) == 5


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_weights_that_lie_elsewhere_later_are_found_there(bias):
    module, _ = made(bias)
    rows = torch.randn(1, 5, 8, dtype=torch.float64)
    call, _ = compiled(module, merges=True)
    call(rows)
    with torch.inference_mode(False):
        part, other = module.linears[1:]
        others = torch.randn_like(part.weight)
        part.weight.data = others
    torch.testing.assert_close(call(rows), module(rows))
    with torch.inference_mode(False), torch.no_grad():
        other.weight.mul_(3)
    torch.testing.assert_close(call(rows), module(rows))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_engine_gives_the_models_tokens(name, monkeypatch):
    monkeypatch.setattr(CompiledLayers.__init__, "__defaults__", ("eager",))
    engine = served.engine(name, num_pages=200, compile=True, merge_products=True)
    said = engine.explain()
    assert "4 groups of products are merged" in said
    assert "\n2 layers are compiled as one (" in said and "by itself" not in said
    made = engine.generate(served.prompts(), max_new_tokens=12, stop_tokens=())
    assert served.tokens_of(made) == served.wanted(name, 12)
    served.assert_nothing_is_held(engine)
