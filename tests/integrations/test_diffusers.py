"""diffusers finds saccade among its backends, and its models compute the same."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import tiny_diffusers
import torch
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

import saccade
from saccade.integrations import diffusers

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}  # float64, a few layers


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    diffusers.register()
    diffusers.register()  # once more changes nothing
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def rows(length: int, heads: int = 4) -> Tensor:
    return torch.randn(2, length, heads, 8, dtype=torch.float64)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"scale": 0.2},
    {"attn_mask": torch.arange(7) < torch.tensor([[7], [3]])},
    {"attn_mask": torch.randn(2, 7, dtype=torch.float64)},
    {"attn_mask": torch.randn(2, 4, 5, 7) > -1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_a_call_through_their_dispatch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    tensors = rows(5), rows(7), rows(7)
    with dispatch.attention_backend("saccade"):
        found = dispatch.dispatch_attention_fn(*tensors, **options)
    with dispatch.attention_backend("native"):
        wanted = dispatch.dispatch_attention_fn(*tensors, **options)
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_model_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = tiny_diffusers.flux().double()
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(1, 16, 4, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(1, 6, 32, dtype=torch.float64),
        "pooled_projections": torch.randn(1, 32, dtype=torch.float64),
        "timestep": torch.tensor([0.5], dtype=torch.float64),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3), "return_dict": False,
    }  # fmt: skip
    calls: list[torch.Size] = []
    original = saccade.scaled_dot_product_attention

    def counted(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls.append(query.shape)
        return original(query, *arguments, **options)

    monkeypatch.setattr(diffusers, "scaled_dot_product_attention", counted)
    found = {}
    for backend in ("native", "saccade"):
        model.set_attention_backend(backend)
        with torch.no_grad():
            (found[backend],) = model(**inputs)
    model.set_attention_backend("native")
    assert calls == [torch.Size((1, 2, 22, 16))] * 2
    torch.testing.assert_close(found["saccade"], found["native"], **CLOSE)


@pytest.mark.parametrize(
    ("make", "others"),
    [
        (tiny_diffusers.unet, r"reach 0 attention modules, and not \d+ through AttnProcessor2_0"),
        (tiny_diffusers.autoencoder, "AttnProcessor2_0"),
        (tiny_diffusers.tiny_autoencoder, "reach 0 attention modules;"),
    ],
)
def test_model_that_backends_do_not_reach_says_so(make: Any, others: str) -> None:
    model = make()
    with pytest.warns(UserWarning, match=f"got 'saccade' for {type(model).__name__}.*{others}"):
        model.set_attention_backend("saccade")


def test_reached_models_and_other_backends_are_silent() -> None:
    flux = tiny_diffusers.flux()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        flux.set_attention_backend("saccade")
        tiny_diffusers.unet().set_attention_backend("native")
    assert diffusers.not_reached(flux, "saccade") is None


def test_what_is_not_there_is_refused() -> None:
    tensors = rows(5), rows(7), rows(7)
    with pytest.raises(NotImplementedError, match="return_lse: got True"):
        diffusers.attention(*tensors, return_lse=True)
    with pytest.raises(NotImplementedError, match="no context parallelism"):
        diffusers.attention(*tensors, _parallel_config=object())


def test_other_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, diffusers.DISPATCH, ModuleType(diffusers.DISPATCH))
    with pytest.raises(ImportError, match=r"kept in another way; takes 0\.42"):
        diffusers.register()
    monkeypatch.setitem(sys.modules, diffusers.DISPATCH, None)
    with pytest.raises(ImportError, match=r"takes diffusers 0\.42"):
        diffusers.register()
