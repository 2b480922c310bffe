"""SDPA's signature, against PyTorch's own function; and calls that find their way here and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade
from saccade.integrations import sdpa

F: Any = torch.nn.functional  # called with unpacked lists
ours: Any = saccade.scaled_dot_product_attention
explain: Any = sdpa.explain
THEIRS: Any = F.scaled_dot_product_attention
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, a dozen terms


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(len(shapes[0]))
    return [rows(*shape) for shape in shapes]


SHAPES = {
    "4": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    "no heads": ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    "rows alone": ((5, 8), (7, 8), (7, 6)),
    "two batches": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6)),
    "one head for all": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6)),
    "one batch for all": ((2, 4, 5, 8), (1, 4, 7, 8), (4, 7, 6)),
    "one head for some": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 6)),
    "one query head": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "keys alone": ((2, 4, 5, 8), (7, 8), (7, 6)),
    "one head of batches": ((2, 1, 3, 5, 8), (7, 8), (1, 2, 1, 7, 6)),
    "no rows": ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
}


def compared(tensors: list[Tensor], mask: Tensor | None = None, **options: Any) -> None:
    """Output and gradients are PyTorch's."""
    leaves = [*tensors, mask] if mask is not None and mask.requires_grad else tensors
    found = ours(*tensors, mask, **options)
    wanted = THEIRS(*tensors, mask, **options)
    torch.testing.assert_close(found, wanted, **CLOSE)
    grad = torch.randn_like(wanted)
    gradients = torch.autograd.grad(found, leaves, grad)
    for one, other in zip(gradients, torch.autograd.grad(wanted, leaves, grad), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes(shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    compared(inputs(*shapes), **options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_grouped_heads(options: dict[str, Any]) -> None:
    tensors = inputs((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    compared(tensors, enable_gqa=True, **options)
    with pytest.raises(ValueError, match="2 and 2 heads for query's 4"):
        ours(*tensors)


MASKS = {
    "4": [(5, 7), (1, 7), (5, 1), (4, 5, 7), (2, 1, 1, 7), (2, 4, 5, 7)],
    "no heads": [(5, 7), (3, 1, 7), (3, 5, 7)],
    "two batches": [(5, 7), (2, 1, 1, 5, 7), (3, 1, 1, 7), (2, 3, 4, 5, 7)],
}


@pytest.mark.parametrize("kind", ["bool", "added", "added with gradient"])
@pytest.mark.parametrize(
    ("shapes", "mask"), [(kind, shape) for kind, shapes in MASKS.items() for shape in shapes]
)
def test_masks(shapes: str, mask: tuple[int, ...], kind: str) -> None:
    tensors = inputs(*SHAPES[shapes])
    tensor = torch.randn(mask, dtype=torch.float64)
    if kind == "bool":
        tensor = tensor > -0.5
        tensor[..., 0] = True  # PyTorch's gradients of a row that sees nothing are NaN
    compared(tensors, tensor.requires_grad_(kind.endswith("gradient")))


def test_masks_under_autocast_may_be_wider_or_narrower_than_rows() -> None:
    tensors = [each.float() for each in inputs(*SHAPES["4"])]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mask = torch.randn(5, 7).to(dtype).requires_grad_()
        exact = THEIRS(*(each.bfloat16().double() for each in tensors), mask.double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = ours(tensors[0].bfloat16(), *tensors[1:], mask)
            theirs = THEIRS(tensors[0].bfloat16(), *tensors[1:], mask)
        assert found.dtype == theirs.dtype == torch.bfloat16
        rounding = torch.finfo(torch.bfloat16).eps * exact.abs().max()
        assert (found - exact).abs().max() <= (theirs - exact).abs().max() + rounding
        (grad,) = torch.autograd.grad(found.float().sum(), mask)
        assert grad.dtype == dtype


def test_a_row_that_sees_nothing_gives_0() -> None:
    output = ours(*inputs(*SHAPES["4"]), torch.zeros(5, 7, dtype=torch.bool))
    assert not output.any()


def test_dropout_drops_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 32, 8) for _ in range(3)]
    dropped = torch.stack([ours(*tensors, dropout_p=0.5) for _ in range(300)])
    spread = dropped.std(0) / 300**0.5
    assert spread.min() > 0
    assert ((dropped.mean(0) - ours(*tensors)).abs() < 6 * spread).all()


def test_wrong_arguments_are_named() -> None:
    q, k, v = inputs(*SHAPES["4"])
    seen = torch.ones(5, 7, dtype=torch.bool)
    refused: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "is_causal: got True with attn_mask", lambda: ours(q, k, v, seen, 0.0, True)),
        (ValueError, r"attn_mask: got \[5, 6\], takes what broadcasts to \[2, 4, 5, 7\]",
         lambda: ours(q, k, v, seen[:, :6])),
        (TypeError, "attn_mask: got torch.bfloat16, takes bool, float32 or query's torch.float64",
         lambda: ours(q, k, v, seen.bfloat16())),
        (ValueError, "query: got 1 dimensions", lambda: ours(q[0, 0, 0], k, v)),
        (ValueError, "takes batches that broadcast", lambda: ours(q, k.repeat(2, 1, 1, 1), v)),
    ]  # fmt: skip
    for kind, message, call in refused:
        with pytest.raises(kind, match=message):
            call()


# ---- enable and disable ---------------------------------------------------------------------


class Seen:
    """How often saccade was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, original = 0, saccade.attention

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return original(*arguments, **options)

        monkeypatch.setattr(saccade, "attention", counted)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def test_calls_come_here_until_they_are_sent_back(seen: Seen) -> None:
    tensors = inputs(*SHAPES["4"])
    with sdpa.enabled():
        sdpa.enable()  # once more changes nothing
        found = F.scaled_dot_product_attention(*tensors, is_causal=True)
        assert seen.calls == 1
    assert F.scaled_dot_product_attention is THEIRS
    sdpa.disable()  # once more changes nothing
    torch.testing.assert_close(found, THEIRS(*tensors, is_causal=True), **CLOSE)
    assert seen.calls == 1


def test_an_error_still_gives_the_function_back() -> None:
    with pytest.raises(KeyError), sdpa.enabled():
        raise KeyError
    assert F.scaled_dot_product_attention is THEIRS


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_is_not_served_goes_to_pytorch(seen: Seen) -> None:
    q, k, v = inputs(*SHAPES["4"])
    nested = [torch.nested.nested_tensor([rows(4, 3, 8), rows(4, 5, 8)]) for _ in range(3)]
    with sdpa.enabled():
        F.scaled_dot_product_attention(*nested)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v)
        assert seen.calls == 0
        with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set"):
            F.scaled_dot_product_attention(q, k, v, torch.ones(5, 7).bool(), is_causal=True)
    for tensors, reason in (
        (nested, "plain tensors, not nested"),
        ((q, k[:, :3], v), "3 and 4 heads for query's 4"),
    ):
        route = explain(*tensors)
        assert route.reason is not None and reason in str(route)
        assert "by PyTorch's own scaled_dot_product_attention" in str(route)
    with sdpa_kernel(SDPBackend.MATH):
        assert "turned off" in str(sdpa.explain(q, k, v))


def test_explain_says_what_serves_the_call() -> None:
    route = explain(*inputs(*SHAPES["4"]), is_causal=True)
    assert route.reason is None and route.explanation.chosen == "cpu"
    assert "cpu: yes, taken" in str(route)
    assert "mask none" not in str(route) and "mask" in str(route)


def test_a_layer_of_pytorch_trains_the_same(seen: Seen) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double()
    tokens = torch.randn(2, 6, 16, dtype=torch.float64)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    gradients = []
    for around in (sdpa.enabled(), None):
        layer.zero_grad()
        if around is not None:
            with around:
                layer(tokens, src_key_padding_mask=padding).sum().backward()
        else:
            layer(tokens, src_key_padding_mask=padding).sum().backward()
        gradients.append([weight.grad for weight in layer.parameters()])
    assert seen.calls == 1
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_compiled_code_comes_here_too() -> None:
    tensors = [torch.randn(2, 4, 16, 8) for _ in range(3)]
    met: list[str] = []

    def look(graph: Any, examples: Any) -> Any:
        met.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with sdpa.enabled():
        compiled = torch.compile(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            backend=look, fullgraph=True,
        )  # fmt: skip
        found = compiled(*tensors)
    assert any("saccade" in name for name in met)
    torch.testing.assert_close(found, THEIRS(*tensors, is_causal=True))
