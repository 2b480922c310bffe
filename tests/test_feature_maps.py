"""Feature maps by themselves: what they estimate, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import saccade

maps: Any = saccade.feature_maps  # called with wrong types too


def test_random_features_estimate_their_kernels() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 40, 4, dtype=torch.float64) / 2
    fourier = maps.RandomFourierFeatures(4, 20000, temperature=0.5)
    kernel = torch.exp(-0.25 * torch.cdist(x, y).square())
    assert float((fourier(x) @ fourier(y).T - kernel).abs().max()) < 0.05
    smoothed = maps.SmoothedRandomFourierFeatures(4, 20001, 0.5, smoothing=2.0)
    assert float((smoothed(x) @ smoothed(y).T - kernel - 4).abs().max()) < 0.05
    for orthogonal in (False, True):
        favor = maps.Favor(4, 20000, temperature=0.5, orthogonal=orthogonal)
        kernel = torch.exp(0.5 * x @ y.T)
        assert float((favor(x) @ favor(y).T / kernel - 1).abs().max()) < 0.1


def test_orthogonal_directions() -> None:
    project = maps.RandomProjection(8, 20, orthogonal=True)
    for start in (0, 8, 16):
        block = project.projection[:, start : start + 8]
        products = block.T @ block
        torch.testing.assert_close(products, products.diag().diag(), atol=1e-4, rtol=0)
    before = project.projection.clone()
    project(torch.randn(3, 8))
    assert torch.equal(before, project.projection)
    project.redraw()
    assert not torch.equal(before, project.projection)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: maps.Favor(7), ValueError, "head_dim: got 7"),
        (lambda: maps.Favor(8, 7), ValueError, "num_features: got 7"),
        (lambda: maps.Favor("8"), TypeError, "head_dim: got '8'"),
        (lambda: maps.RandomFourierFeatures(8, 8.0), TypeError, "num_features: got 8.0"),
        (lambda: maps.RandomFourierFeatures(0, 8), ValueError, "head_dim: got 0"),
        (lambda: maps.GeneralizedRandomFeatures(8, 0), ValueError, "num_features: got 0"),
        (lambda: maps.GeneralizedRandomFeatures(8, function="relu"), TypeError, "function: got"),
        (lambda: maps.SmoothedRandomFourierFeatures(8, 8), ValueError, "num_features: got 8"),
        (lambda: maps.SmoothedRandomFourierFeatures(8, smoothing="1"), TypeError, "smoothing: got"),
    ],
)
def test_what_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
