"""Which modes, transforms and tensor types see the operators that a call runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.runtime import call_cache


class Subclass(Tensor):
    pass


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("mode", [TorchDispatchMode, TorchFunctionMode, FakeTensorMode])
def test_modes_listen(mode: Any) -> None:
    with mode():
        assert call_cache.observed()
    assert not call_cache.observed()


def test_transforms_listen() -> None:
    heard: list[bool] = []

    def function(rows: Tensor) -> Tensor:
        heard.append(call_cache.unobserved([rows]))
        return rows.sum()

    torch.func.vmap(function)(torch.zeros(2, 2))
    torch.func.grad(function)(torch.zeros(2))
    assert heard == [False, False]


def test_subclasses_listen() -> None:
    plain = torch.zeros(2)
    assert call_cache.unobserved([plain, None, torch.nn.Parameter(plain)])
    assert not call_cache.unobserved([plain, plain.as_subclass(Subclass)])


@pytest.mark.parametrize("around", [torch.device("cpu"), torch.no_grad()])
def test_neither_devices_nor_grad_modes_listen(around: AbstractContextManager[Any]) -> None:
    with around:
        assert not call_cache.observed()


def test_a_default_device_does_not_listen(default_device: None) -> None:
    assert not call_cache.observed()


def test_forward_mode_wants_gradients_of_what_requires_none() -> None:
    rows = torch.zeros(2)
    assert not call_cache.wants_gradients([rows, None])
    assert call_cache.wants_gradients([None, rows.requires_grad_()])
    with torch.no_grad():
        assert not call_cache.wants_gradients([rows])
        with torch.autograd.forward_ad.dual_level():
            assert call_cache.wants_gradients([rows.detach()])
