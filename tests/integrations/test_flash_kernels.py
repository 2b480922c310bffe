"""PyTorch's flash operators computed by saccade, on CPU tensors, which they have no kernel for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as registry

from saccade.integrations import flash_kernels

F: Any = torch.nn.functional  # called with unpacked lists
flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, a few dozen terms


@pytest.fixture
def in_place() -> Iterator[None]:
    handle = flash_kernels.take_the_place("CPU")
    yield
    handle.remove()
    handle.remove()  # once more changes nothing


def rows(length: int, heads: int, dim: int = 8) -> Tensor:
    return torch.randn(2, heads, length, dim, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_output_and_gradients(
    in_place: None, options: dict[str, Any], lengths: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    leaves = [rows(lengths[0], 4), rows(lengths[1], 4), rows(lengths[1], 4, 6)]
    output, lse, *_ = flash(*leaves, **options)
    wanted = F.scaled_dot_product_attention(*leaves, **options)
    torch.testing.assert_close(output, wanted, **CLOSE)
    assert lse.shape == (2, 4, lengths[0])
    grad = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(output, leaves, grad),
        torch.autograd.grad(wanted, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **CLOSE)


def test_grouped_heads(in_place: None) -> None:
    q, k, v = rows(9, 4), rows(9, 2), rows(9, 2)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(flash(q, k, v, 0.0, True)[0], wanted, **CLOSE)


def test_dropout_and_debug_masks_are_refused(in_place: None) -> None:
    tensors = [rows(4, 2) for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"dropout_p = 0\.1 and return_debug_mask = False"):
        flash(*tensors, 0.1)
    with pytest.raises(RuntimeError, match="return_debug_mask = True, take neither"):
        flash(*tensors, 0.0, False, True)


def test_pytorch_s_kernels_come_back() -> None:
    tensors = [rows(4, 2) for _ in range(3)]
    handle = flash_kernels.take_the_place("CPU")
    flash(*tensors)
    handle.remove()
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
        flash(*tensors)


def test_the_registry_activates_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    original = flash_kernels.take_the_place

    def on_cpu(device: str = "CPU") -> flash_kernels.Handle:
        taken.append(device)
        return original(device)

    monkeypatch.setattr(flash_kernels, "take_the_place", on_cpu)
    flash_kernels.register()
    assert "saccade" in registry.list_flash_attention_impls()
    assert not taken
    registry.activate_flash_attention_impl("saccade")
    assert taken == ["CPU"] and registry.current_flash_attention_impl() == "saccade"
    flash(*[rows(4, 2) for _ in range(3)])
    registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None
