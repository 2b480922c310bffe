"""Feature maps: what linear attention applies to queries and keys in the softmax's place.

A name ("elu+1", "relu", "exp", "identity") is applied inside the operator, chunk by chunk.
"softmax" (over the features) and everything else is a function of [..., head_dim] that gives
[..., feature_dim], and PyTorch differentiates it. A pair of maps is one for queries and one for
keys. The random maps here are modules; their projections are buffers, drawn once, and drawn anew
only when `redraw()` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module

from saccade.runtime.arguments import check_whole_number

__all__ = [
    "Favor",
    "GeneralizedRandomFeatures",
    "RandomFourierFeatures",
    "RandomProjection",
    "ScaledMap",
    "SmoothedRandomFourierFeatures",
    "softmax",
]

Map = Callable[[Tensor], Tensor]


def softmax(rows: Tensor) -> Tensor:
    """The softmax over each row's channels. Source: Shen et al. 2021, section 3.2.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
        >>> maps = saccade.feature_maps.softmax
        >>> output = saccade.linear_attention(query, key, value, feature_map=maps)
        >>> maps(query).sum(-1).allclose(torch.ones(1, 2, 8))
        True
    """
    return rows.softmax(-1)


class ScaledMap(Module):
    """A feature map whose features may be too large or small for any dtype.

    Called, it gives the features; `with_log_scale` gives them divided by a factor of each row, and
    that factor's logarithm.

    Examples:
        >>> class Exponentials(saccade.feature_maps.ScaledMap):
        ...     def with_log_scale(self, rows):
        ...         largest = rows.amax(-1)
        ...         return (rows - largest.unsqueeze(-1)).exp(), largest
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16) * 50  # exp(150) is infinite in float32
        >>> output = saccade.linear_attention(query, key, value, feature_map=Exponentials())
        >>> bool(output.isfinite().all())
        True
    """

    def with_log_scale(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Features [..., feature_dim], each row's largest 1, and log-factors [...]."""
        raise NotImplementedError

    def forward(self, rows: Tensor) -> Tensor:
        """The features themselves, [..., feature_dim]."""
        scaled, log_scale = self.with_log_scale(rows)
        return scaled * log_scale.unsqueeze(-1).exp()


class RandomProjection(Module):
    """Random directions [head_dim, num_directions] that a random feature map projects rows on.

    Args:
        orthogonal: directions are orthogonal in groups of head_dim, as long as normal ones are.

    Examples:
        >>> projection = saccade.feature_maps.RandomProjection(16, 32, orthogonal=True)
        >>> projection(torch.randn(5, 16)).shape
        torch.Size([5, 32])
    """

    projection: Tensor

    def __init__(self, head_dim: int, num_directions: int, orthogonal: bool):
        super().__init__()
        for name, size in (("head_dim", head_dim), ("num_directions", num_directions)):
            check_whole_number(name, size, least=1)
        self.orthogonal = orthogonal
        self.register_buffer("projection", torch.empty(head_dim, num_directions))
        self.redraw()

    def redraw(self) -> None:
        """Draw new directions, from PyTorch's generator, in place."""
        head_dim, num_directions = self.projection.shape
        if not self.orthogonal:
            self.projection.normal_()
            return
        with torch.no_grad():
            for start in range(0, num_directions, head_dim):
                block = torch.randn(head_dim, head_dim, device=self.projection.device)
                lengths = block.square().sum(0).sqrt()  # those of normal directions
                directions = torch.linalg.qr(block).Q * lengths
                part = self.projection[:, start : start + head_dim]
                part.copy_(directions[:, : part.shape[1]])

    def forward(self, rows: Tensor) -> Tensor:
        """Rows on directions, [..., num_directions]."""
        if rows.shape[-1] != self.projection.shape[0]:
            got, takes = rows.shape[-1], self.projection.shape[0]
            raise ValueError(f"feature_map: got rows of {got} channels, takes head_dim {takes}")
        return rows @ self.projection.to(rows.dtype)


class _Projected(Module):
    """What random maps share: rows times sqrt(temperature) on random directions."""

    project: RandomProjection
    root: float

    def __init__(
        self, head_dim: int, num_directions: int, temperature: float | None, orthogonal: bool
    ):
        super().__init__()
        self.project = RandomProjection(head_dim, num_directions, orthogonal)
        self.root = math.sqrt(_temperature(head_dim, temperature))

    def redraw(self) -> None:
        """Draw a new projection."""
        self.project.redraw()


class RandomFourierFeatures(_Projected):
    """Features whose products estimate the Gaussian kernel exp(-temperature · ‖x - y‖² / 2).

    φ(x) = sqrt(2 / num_features) · [cos u, sin u] with u = sqrt(temperature) · x · projection. They
    may be negative, so a normaliser of their sums may be near 0.

    Args:
        head_dim: channels of queries and keys.
        num_features: features, an even number; head_dim where None.
        temperature: 1/sqrt(head_dim) where None.
        orthogonal: see `RandomProjection`.

    Source: Rahimi and Recht 2007, algorithm 1; Peng et al. 2021 (Random Feature Attention).

    Examples:
        >>> rows = torch.randn(5, 16)
        >>> found = saccade.feature_maps.RandomFourierFeatures(16, num_features=4096)
        >>> gaussian = (-0.25 * torch.cdist(rows, rows).square() / 2).exp()
        >>> bool((found(rows) @ found(rows).mT - gaussian).abs().max() < 0.1)
        True
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        temperature: float | None = None,
        orthogonal: bool = False,
    ):
        super().__init__(head_dim, _half(head_dim, num_features), temperature, orthogonal)

    def forward(self, rows: Tensor) -> Tensor:
        """The features, [..., num_features]."""
        angles = self.project(rows * self.root)
        return torch.cat([angles.cos(), angles.sin()], -1) / math.sqrt(angles.shape[-1])


class SmoothedRandomFourierFeatures(RandomFourierFeatures):
    """Random Fourier features and one that is constant, so that the kernel is larger by a number.

    The constant feature is `smoothing`, hence the kernel grows by its square. There are
    num_features in all, an odd number; where None the first one from head_dim on (at least 3).

    Examples:
        >>> found = saccade.feature_maps.SmoothedRandomFourierFeatures(16, num_features=33)
        >>> found(torch.randn(5, 16)).shape
        torch.Size([5, 33])
    """

    smoothing: float

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        temperature: float | None = None,
        orthogonal: bool = False,
        smoothing: float = 1.0,
    ):
        if num_features is None:
            check_whole_number("head_dim", head_dim, least=1)
            num_features = max(head_dim + 1 - head_dim % 2, 3)
        check_whole_number("num_features", num_features, least=3)
        if num_features % 2 == 0:
            raise ValueError(f"num_features: got {num_features}, takes an odd number")
        super().__init__(head_dim, num_features - 1, temperature, orthogonal)
        if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)):
            raise TypeError(f"smoothing: got {smoothing!r}, takes a number")
        self.smoothing = float(smoothing)

    def forward(self, rows: Tensor) -> Tensor:
        """The features, [..., num_features]."""
        return torch.nn.functional.pad(super().forward(rows), (0, 1), value=self.smoothing)


class Favor(_Projected, ScaledMap):
    """Positive features whose products estimate the softmax kernel exp(temperature · x·y).

    φ(x) = exp([u, -u] - temperature · ‖x‖² / 2) / sqrt(num_features), with
    u = sqrt(temperature) · x · projection. No dtype holds them for rows of any length, so linear
    attention takes them divided by each row's largest one: a query's factor cancels in the
    normaliser, and keys and state are in units of the largest key so far, whose logarithm travels
    with the state as `log_scale`. So nothing overflows, and no row loses what it sees to larger
    keys that it does not see. A product of two features below e^-87 is lost, so long rows whose
    largest features lie apart may find no key.

    Calls that are causal and normalised tell implementations of growing units by a decay, which
    `hopper` does not take; float16 is computed in float32.

    Args: as `RandomFourierFeatures`; orthogonal by default.

    Source: Choromanski et al. 2021 (Performers), lemma 1 and section 2.4.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 64, 16)
        >>> favor = saccade.feature_maps.Favor(16, num_features=64)
        >>> output = saccade.linear_attention(query, key, value, feature_map=favor)
        >>> output.shape
        torch.Size([1, 2, 64, 16])
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        temperature: float | None = None,
        orthogonal: bool = True,
    ):
        super().__init__(head_dim, _half(head_dim, num_features), temperature, orthogonal)

    def with_log_scale(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Features [..., num_features], each row's largest 1, and log-factors [...]."""
        rows = rows * self.root
        along = self.project(rows)
        exponents = torch.cat([along, -along], -1)
        largest = exponents.amax(-1)
        length = rows.square().sum(-1) / 2 + math.log(exponents.shape[-1]) / 2
        return (exponents - largest.unsqueeze(-1)).exp(), largest - length


class GeneralizedRandomFeatures(_Projected):
    """A function of random projections: φ(x) = function(sqrt(temperature) · x · projection).

    Args: as `RandomFourierFeatures`, any number of features; `function` is the ReLU where None.

    Source: Choromanski et al. 2021 (Performers), equation 2.

    Examples:
        >>> found = saccade.feature_maps.GeneralizedRandomFeatures(16, 32, function=torch.sigmoid)
        >>> found(torch.randn(5, 16)).shape
        torch.Size([5, 32])
    """

    function: Map

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        temperature: float = 1.0,
        orthogonal: bool = True,
        function: Map | None = None,
    ):
        num_features = head_dim if num_features is None else num_features
        check_whole_number("num_features", num_features, least=1)
        if function is not None and not callable(function):
            raise TypeError(f"function: got {function!r}, takes a function or None (the ReLU)")
        super().__init__(head_dim, num_features, temperature, orthogonal)
        self.function = torch.relu if function is None else function

    def forward(self, rows: Tensor) -> Tensor:
        """The features, [..., num_features]."""
        return self.function(self.project(rows * self.root))


def _half(head_dim: int, num_features: int | None) -> int:
    """Directions of a map that has two features for each."""
    name, number = "num_features", num_features
    if number is None:
        name, number = "head_dim", head_dim
    check_whole_number(name, number, least=2)
    if number % 2:
        more = "" if num_features is not None else ", or num_features beside it"
        raise ValueError(f"{name}: got {number}, takes an even number{more}")
    return number // 2


def _temperature(head_dim: int, temperature: float | None) -> float:
    if temperature is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature: got {temperature!r}, takes a positive number or None")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: got {temperature}, takes a positive number or None")
    return float(temperature)
