"""PyTorch's SDPA and diffusers asked for fp8: computed so, in 16 bits, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_diffusers
import torch
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

import saccade
from saccade import scores
from saccade.integrations import diffusers, sdpa

F: Any = torch.nn.functional  # called with unpacked lists
ours: Any = saccade.scaled_dot_product_attention
explain: Any = sdpa.explain
their_backend: Any = diffusers.fp8_attention
fp8: Any = saccade.attention_fp8
attention: Any = saccade.attention


def rows(dtype: torch.dtype = torch.bfloat16, heads: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, 70, 64), (2, heads, 70, 64), (2, heads, 70, 64)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    yield
    sdpa.disable()


MASKS: dict[str, Any] = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.arange(70) < torch.tensor([70, 9]).view(2, 1, 1, 1)},
    "added": {"attn_mask": torch.linspace(-3, 3, 70).to(torch.bfloat16)},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_calls_of_16_bits_are_computed_in_fp8(options: dict[str, Any]) -> None:
    tensors = rows()
    translated = {
        "mask": options.get("attn_mask"), "causal": options.get("is_causal", False),
    }  # fmt: skip
    if options.get("attn_mask") is not None and options["attn_mask"].dtype != torch.bool:
        translated = {"score": scores.bias(options["attn_mask"])}
    wanted = fp8(*tensors, **translated)
    with sdpa.enabled(fp8=True):
        found = F.scaled_dot_product_attention(*tensors, **options)
        assert "fp8 attention" in str(explain(*tensors, **options))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    with sdpa.enabled():
        exact = F.scaled_dot_product_attention(*tensors, **options)
        assert "fp8" not in str(explain(*tensors, **options))
    assert 0 < float((found - exact).abs().max()) < 0.3


def test_heads_and_dimensions_are_those_of_the_call() -> None:
    query, key, value = rows(heads=2)
    with sdpa.enabled(fp8=True):
        grouped = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        alone = F.scaled_dot_product_attention(query[0], key[0], value[0], enable_gqa=True)
    torch.testing.assert_close(grouped, fp8(query, key, value), rtol=0, atol=0)
    torch.testing.assert_close(alone, grouped[0], rtol=0, atol=0)


OTHERS: dict[str, tuple[torch.dtype, bool, dict[str, Any], str]] = {
    "float32": (torch.float32, False, {}, r"quantises bfloat16 and float16, not torch\.float32"),
    "gradient": (torch.bfloat16, True, {}, "no gradient"),
    "dropout": (torch.bfloat16, False, {"dropout_p": 0.5}, "no dropout, .* asks 0.5"),
}


@pytest.mark.parametrize(("dtype", "wants_gradient", "options", "why"), OTHERS.values(), ids=OTHERS)
def test_other_calls_are_computed_as_without_it(
    dtype: torch.dtype, wants_gradient: bool, options: dict[str, Any], why: str
) -> None:
    tensors = [each.requires_grad_(wants_gradient) for each in rows(dtype)]
    torch.manual_seed(3)
    wanted = ours(*tensors, **options)
    sdpa.enable(fp8=True)
    torch.manual_seed(3)
    found = F.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert found.requires_grad == wants_gradient
    route = explain(*tensors, **options)
    assert route.reason is None
    assert re.search(f"not in fp8: .*{why}", str(route))


def test_a_bias_that_wants_a_gradient_is_not_quantised() -> None:
    bias = torch.zeros(70, dtype=torch.bfloat16, requires_grad=True)
    with sdpa.enabled(fp8=True):
        F.scaled_dot_product_attention(*rows(), attn_mask=bias).sum().backward()
    assert bias.grad is not None


def test_the_last_word_holds() -> None:
    tensors = rows()
    exact = attention(*tensors)
    sdpa.enable(fp8=True)
    sdpa.enable()
    found = F.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(found, exact, rtol=0, atol=0)
    with pytest.raises(TypeError, match="fp8: got str, takes True or False"):
        sdpa.enable(fp8="block")  # type: ignore[arg-type]
    for call in (sdpa.enable, lambda **options: sdpa.enabled(**options).__enter__()):
        with pytest.raises(TypeError, match="fp4: an unknown option; takes fp8"):
            call(fp4=True)


def test_compiled_calls_are_in_fp8_too() -> None:
    tensors = rows()
    wanted = fp8(*tensors, causal=True)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return output

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with sdpa.enabled(fp8=True):
        torch.testing.assert_close(compiled(*tensors), wanted, rtol=0, atol=0)
    with sdpa.enabled():
        exact = attention(*tensors, causal=True)
        torch.testing.assert_close(compiled(*tensors), exact, rtol=0, atol=0)
    torch._dynamo.reset()


# ---- diffusers -----------------------------------------------------------------------------------


def test_a_backend_of_diffusers() -> None:
    diffusers.register()
    tensors = [each.transpose(1, 2) for each in rows()]  # [batch, length, heads, dim]
    shown = torch.arange(70) < torch.tensor([[70], [9]])
    wanted = fp8(*rows(), mask=shown[:, None, None])
    with torch.no_grad(), dispatch.attention_backend("saccade-fp8"):
        found = dispatch.dispatch_attention_fn(*tensors, attn_mask=shown)
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=0, atol=0)


def test_what_the_backend_does_not_take_is_refused() -> None:
    tensors = rows()
    with pytest.raises(NotImplementedError, match=r"dropout_p: got 0\.1.*'saccade' has dropout"):
        their_backend(*tensors, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="no context parallelism"):
        their_backend(*tensors, _parallel_config=object())
    with pytest.raises(TypeError, match=r"query: got torch\.float32"):
        their_backend(*rows(torch.float32))
    with pytest.raises(NotImplementedError, match="gradient"):
        their_backend(*[each.requires_grad_() for each in rows()])


def test_a_model_that_the_backend_does_not_reach_says_what_does() -> None:
    diffusers.register()
    model = tiny_diffusers.unet()
    with pytest.warns(UserWarning, match=r"got 'saccade-fp8' for .*sdpa\.enable\(fp8=True\)"):
        model.set_attention_backend("saccade-fp8")
    native = dispatch.AttentionBackendName.NATIVE
    dispatch._AttentionBackendRegistry.set_active_backend(native)
