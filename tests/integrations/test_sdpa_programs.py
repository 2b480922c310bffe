"""Programs made of calls of PyTorch's function, by tracing or scripting, after `enable`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saccade
from saccade.integrations import sdpa

F: Any = torch.nn.functional  # called with unpacked lists
THEIRS: Any = F.scaled_dot_product_attention
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, a dozen terms


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True)
        for length in (5, 7, 7)
    ]


class Module(nn.Module):
    """A module that calls PyTorch's function as most do."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def scripted(module: nn.Module, tensors: list[Tensor]) -> Any:
    return torch.jit.script(module)


def traced(module: nn.Module, tensors: list[Tensor]) -> Any:
    return torch.jit.trace(module, tuple(tensors))


def exported(module: nn.Module, tensors: list[Tensor], strict: bool) -> Any:
    return torch.export.export(module, tuple(tensors), strict=strict).module()


WAYS = {
    "script": scripted, "trace": traced,
    "export": partial(exported, strict=False), "strict export": partial(exported, strict=True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")  # by torch 2.15
@pytest.mark.parametrize("way", list(WAYS))
def test_programs_for_elsewhere_keep_pytorchs_operator(way: str) -> None:
    tensors = inputs()
    with sdpa.enabled():
        program = WAYS[way](Module(), tensors)
        found = program(*tensors)
    text = str(program.graph)
    assert "scaled_dot_product_attention" in text
    assert "saccade::" not in text and "saccade.attention" not in text
    torch.testing.assert_close(found, THEIRS(*tensors, is_causal=True), **CLOSE)
    torch.testing.assert_close(program(*tensors), found, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")  # by torch 2.15
def test_pytorchs_own_layers_are_scripted() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    tokens = torch.randn(2, 6, 16)
    wanted = layer(tokens)
    with sdpa.enabled():
        torch.testing.assert_close(torch.jit.script(layer)(tokens), wanted)


def test_pytorchs_own_layers_in_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).eval()
    mixing = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    tokens = torch.randn(2, 6, 16)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            found = [layer(tokens), layer(tokens, src_key_padding_mask=padding)]
            found.append(mixing(tokens, tokens, tokens, need_weights=False)[0])
        found.append(mixing(tokens, tokens, tokens, need_weights=False)[0])
        return found

    wanted = outputs()
    calls, original = [], saccade.attention
    monkeypatch.setattr(saccade, "attention", lambda *a, **k: calls.append(1) or original(*a, **k))
    with sdpa.enabled():
        found = outputs()
    torch.testing.assert_close(found, wanted)
    assert calls  # those that are not on the fast path


def test_symbolic_graphs_hold_the_function_and_outlive_us() -> None:
    with sdpa.enabled():
        graph: Any = torch.fx.symbolic_trace(Module())
    assert "scaled_dot_product_attention" in graph.code
    tensors = inputs()
    torch.testing.assert_close(graph(*tensors), THEIRS(*tensors, is_causal=True), **CLOSE)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms() -> None:
    query, key, value = (tensor.detach() for tensor in inputs())
    queries = torch.stack((query, -query))

    def loss(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value).square().sum()

    wanted = torch.vmap(torch.func.grad(loss))(queries)
    with sdpa.enabled():
        torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(queries), wanted, **CLOSE)
