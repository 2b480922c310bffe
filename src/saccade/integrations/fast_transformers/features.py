"""Feature maps and masks as fast-transformers has them.

Maps are made by factories from `query_dims`. `new_feature_map(device)` is called before every
forward pass, and random maps draw their `omega` anew every `redraw` calls, also in evaluation
unless `deterministic_eval`: both as in the library.

Masks hold True where a pair is kept. A matrix is made when it is read, so a mask of 131,072 rows
takes no memory until then: the library's own `FullMask` holds 17 GB there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from saccade import feature_maps

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FeatureMap(Module):
    """A feature map of vectors of `query_dims` channels; `saccade_map` is it in saccade's terms.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> class Squares(ft.FeatureMap):
        ...     def forward(self, x):
        ...         return x.square()
        >>> layer = ft.CausalLinearAttention(16, feature_map=Squares.factory())
    """

    def __init__(self, query_dims: int):
        super().__init__()
        self.query_dims = query_dims

    def new_feature_map(self, device: torch.device | str | int) -> None:
        """Draw what is random; nothing here."""

    def forward_queries(self, x: Tensor) -> Tensor:
        """Features of queries."""
        return self(x)

    def forward_keys(self, x: Tensor) -> Tensor:
        """Features of keys."""
        return self(x)

    @property
    def saccade_map(self) -> Any:
        """What `saccade.linear_attention` takes as its feature_map."""
        return own_functions(self)

    @classmethod
    def factory(cls, *args: Any, **kwargs: Any) -> Callable[[int], FeatureMap]:
        """A function of query_dims that makes this map with these arguments."""

        def make(query_dims: int) -> FeatureMap:
            return cls(query_dims, *args, **kwargs)

        return make


def own_functions(feature_map: Any) -> tuple[Callable[[Tensor], Tensor], ...]:
    """A map as a pair of functions, of queries and of keys."""
    return feature_map.forward_queries, feature_map.forward_keys


def in_our_terms(feature_map: Any) -> Any:
    """What `saccade.linear_attention` takes as its feature_map, for any map.

    It is the map's `saccade_map`; its functions where there is none (a map of the library's own
    class), or where a subclass, an assignment or a hook has changed what they compute.
    """
    classes = type(feature_map).__mro__
    made = _first(classes, "saccade_map")
    names = ("__call__", "forward", "forward_queries", "forward_keys")
    changed = any(_first(classes, name) < made or name in vars(feature_map) for name in names)
    hooked = any(getattr(feature_map, name, None) for name in HOOKS)
    if made == len(classes) or changed or hooked:
        return own_functions(feature_map)
    return feature_map.saccade_map


def _first(classes: tuple[type, ...], name: str) -> int:
    """The index of the first class that defines a name; behind the last where none does."""
    return next((i for i, each in enumerate(classes) if name in vars(each)), len(classes))


class ActivationFunctionFeatureMap(FeatureMap):
    """A function applied channel by channel; a name of saccade's is applied in its operator.

    Examples:
        >>> from saccade.integrations.fast_transformers import ActivationFunctionFeatureMap
        >>> ActivationFunctionFeatureMap(16, torch.relu)(torch.tensor([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """

    activation_function: Callable[[Tensor], Tensor]
    name: str

    def __init__(
        self, query_dims: int, activation_function: Callable[[Tensor], Tensor], name: str = ""
    ):
        super().__init__(query_dims)
        self.activation_function, self.name = activation_function, name

    @property
    def saccade_map(self) -> Any:
        """The name, or the function."""
        return self.name or self.activation_function

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        return self.activation_function(x)


activation_function_feature_map: Callable[..., Callable[[int], FeatureMap]] = (
    ActivationFunctionFeatureMap.factory
)
"""A factory of `ActivationFunctionFeatureMap`: give it the function, and a name if it has one.

Examples:
    >>> from saccade.integrations import fast_transformers as ft
    >>> layer = ft.LinearAttention(16, ft.activation_function_feature_map(torch.relu))
"""


def _elu_plus_one(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1


elu_feature_map: Callable[[int], FeatureMap] = activation_function_feature_map(
    _elu_plus_one, name="elu+1"
)
"""The factory of the map elu(x) + 1, which layers take where none is given.

Examples:
    >>> from saccade.integrations.fast_transformers import elu_feature_map
    >>> elu_feature_map(2)(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 3.0]
"""


class _Random(FeatureMap):
    """A map by a random matrix `omega` [query_dims, columns], which is drawn anew now and then."""

    omega: Tensor
    query_dimensions: int
    softmax_temp: float
    root: float
    orthogonal: bool
    redraw: int
    deterministic_eval: bool

    def __init__(
        self,
        query_dims: int,
        columns: int,
        softmax_temp: float | None,
        orthogonal: bool,
        redraw: int,
        deterministic_eval: bool,
    ):
        super().__init__(query_dims)
        self.query_dimensions = query_dims  # the library has both names
        temperature = 1 / math.sqrt(query_dims) if softmax_temp is None else softmax_temp
        self.softmax_temp, self.root = temperature, math.sqrt(temperature)
        self.orthogonal, self.redraw = orthogonal, redraw
        self.deterministic_eval = deterministic_eval
        self.register_buffer("omega", torch.zeros(query_dims, columns))
        self._calls = -1

    def new_feature_map(self, device: torch.device | str | int) -> None:
        """Count the call; draw omega anew if it is time, else only move it to the device."""
        if self.deterministic_eval and not self.training:
            return
        self._calls += 1
        omega = self.omega
        if self._calls % self.redraw == 0 and omega.numel():
            drawn = feature_maps.RandomProjection(*omega.shape, orthogonal=self.orthogonal)
            omega = drawn.projection.to(omega.dtype)
        self.omega = omega.to(device)

    def project(self, x: Tensor) -> Tensor:
        """Rows, scaled, on the columns of omega."""
        return (x * self.root) @ self.omega.to(x.dtype)


class RandomFourierFeatures(_Random):
    """√(2 / n_dims) [cos u, sin u], u = √softmax_temp · x · omega.

    An odd n_dims has n_dims - 1 features, and keeps its factor: so it is in the library.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> layer = ft.LinearAttention(16, ft.RandomFourierFeatures.factory(n_dims=32))
    """

    n_dims: int

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = False,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        self.n_dims = n_dims or query_dimensions
        columns = self.n_dims // 2
        super().__init__(
            query_dimensions, columns, softmax_temp, orthogonal, redraw, deterministic_eval
        )

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        u = self.project(x)
        return torch.cat([u.cos(), u.sin()], -1) * math.sqrt(2 / self.n_dims)


class SmoothedRandomFourierFeatures(RandomFourierFeatures):
    """Random Fourier features of n_dims - 1 dimensions beside a constant one, `smoothing`.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> layer = ft.LinearAttention(16, ft.SmoothedRandomFourierFeatures.factory(n_dims=33))
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = False,
        smoothing: float = 1.0,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        n_dims = query_dimensions if n_dims is None else n_dims
        super().__init__(
            query_dimensions, n_dims - 1, softmax_temp, orthogonal, redraw, deterministic_eval
        )
        self.smoothing = smoothing

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        return torch.nn.functional.pad(super().forward(x), (0, 1), value=self.smoothing)


class Favor(_Random):
    """exp([u, -u] - softmax_temp · ‖x‖² / 2) / √n_dims, positive features of the softmax kernel.

    `stabilize` is there for the library's sake: layers and their twins never take the features
    themselves, but divided by factors that cancel (`saccade.feature_maps.Favor`); no eps is added.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> layer = ft.CausalLinearAttention(16, ft.Favor.factory(n_dims=32))
    """

    n_dims: int

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = True,
        stabilize: bool = False,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        self.n_dims = n_dims or query_dimensions
        columns = self.n_dims // 2
        super().__init__(
            query_dimensions, columns, softmax_temp, orthogonal, redraw, deterministic_eval
        )
        self.stabilize = stabilize

    @functools.cached_property
    def _scaled(self) -> feature_maps.Favor:
        return feature_maps.Favor(self.query_dims, 2 * (self.n_dims // 2), self.softmax_temp)

    @property
    def saccade_map(self) -> Any:
        """The map with this omega, with factors beside the features."""
        self._scaled.project.projection = self.omega
        return self._scaled

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        return self.saccade_map(x) * math.sqrt(2 * (self.n_dims // 2) / self.n_dims)


class GeneralizedRandomFeatures(_Random):
    """kernel_fn(√softmax_temp · x · omega).

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> layer = ft.LinearAttention(16, ft.GeneralizedRandomFeatures.factory(n_dims=32))
    """

    n_dims: int

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float = 1.0,
        orthogonal: bool = True,
        kernel_fn: Callable[[Tensor], Tensor] = torch.relu,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        columns = query_dimensions if n_dims is None else n_dims
        self.n_dims = 2 * columns  # so it is in the library
        super().__init__(
            query_dimensions, columns, softmax_temp, orthogonal, redraw, deterministic_eval
        )
        self.kernel_fn = kernel_fn

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        return self.kernel_fn(self.project(x))


class BaseMask:
    """A mask of rows; subclasses give `bool_matrix`, and set what they know without a matrix.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> isinstance(ft.FullMask(4), ft.BaseMask)
        True
    """

    @property
    def bool_matrix(self) -> Tensor:
        """True where a pair is kept."""
        raise NotImplementedError

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return tuple(self.bool_matrix.shape)

    @property
    def float_matrix(self) -> Tensor:
        """1 where a pair is kept, else 0."""
        return self.bool_matrix.float()

    @property
    def additive_matrix(self) -> Tensor:
        """0 where a pair is kept, else -inf."""
        return self.float_matrix.log()

    @property
    def additive_matrix_finite(self) -> Tensor:
        """0 where a pair is kept, else -1e24."""
        return (1 - self.float_matrix) * -1e24

    @cached_property
    def lengths(self) -> Tensor:
        """How many are kept of each row, if they are the first ones."""
        kept = self.bool_matrix
        lengths = kept.sum(-1)
        first = torch.arange(self.shape[-1], device=kept.device) < lengths.unsqueeze(-1)
        if not torch.equal(first, kept):
            raise ValueError("lengths: got a mask that keeps others than the first, takes lengths")
        return lengths

    @cached_property
    def all_ones(self) -> bool:
        """Whether everything is kept."""
        return bool(self.bool_matrix.all())

    @cached_property
    def lower_triangular(self) -> bool:
        """Whether row i keeps the first i + 1, for all i."""
        kept = self.bool_matrix
        return kept.dim() == 2 and torch.equal(kept, torch.ones_like(kept).tril())


class FullMask(BaseMask):
    """Any mask of bools; `FullMask(N, M)` keeps everything, and needs no memory for it.

    Args:
        mask: a bool tensor, or N.
        N, M: the shape, M = N where None; ignored where mask is a tensor.
        device: where a matrix is made.

    Examples:
        >>> from saccade.integrations.fast_transformers import FullMask
        >>> FullMask(4).all_ones, FullMask(torch.tensor([[True, False]])).shape
        (True, (1, 2))
    """

    device: torch.device | str

    def __init__(
        self,
        mask: Tensor | int | None = None,
        N: int | None = None,
        M: int | None = None,
        device: torch.device | str = "cpu",
    ):
        self.device, self._mask = device, None
        if isinstance(mask, Tensor):
            if mask.dtype != torch.bool:
                raise ValueError(f"mask: got {mask.dtype}, takes torch.bool")
            self._mask = mask.detach().clone()
            return
        if mask is not None and M is None:
            mask, N, M = None, mask, N
        if N is None:
            raise ValueError("mask: got None, takes a bool tensor, or N")
        self.shape = (N, N if M is None else M)
        self.lengths = torch.full((N,), self.shape[1], device=device)
        self.all_ones, self.lower_triangular = True, self.shape[1] <= 1

    @property
    def bool_matrix(self) -> Tensor:
        """True where a pair is kept."""
        if self._mask is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        return self._mask


class LengthMask(BaseMask):
    """Each row keeps as many of its first columns as its length.

    Args:
        lengths: [N] whole numbers.
        max_len: columns; the largest length where None, which is read from the device.
        device: where the lengths are kept; their own where None.

    Examples:
        >>> from saccade.integrations.fast_transformers import LengthMask
        >>> LengthMask(torch.tensor([1, 3]), max_len=3).bool_matrix.int().tolist()
        [[1, 0, 0], [1, 1, 1]]
    """

    def __init__(
        self,
        lengths: Tensor,
        max_len: int | None = None,
        device: torch.device | str | None = None,
    ):
        self.lengths = lengths.detach().clone().to(device or lengths.device)
        self.shape = len(lengths), int(self.lengths.max()) if max_len is None else max_len

    @property
    def bool_matrix(self) -> Tensor:
        """True where a pair is kept."""
        column = torch.arange(self.shape[1], device=self.lengths.device)
        return column < self.lengths.unsqueeze(-1)


class TriangularCausalMask(BaseMask):
    """Row i keeps the first i + 1 of N.

    Examples:
        >>> from saccade.integrations.fast_transformers import TriangularCausalMask
        >>> TriangularCausalMask(2).bool_matrix.int().tolist()
        [[1, 0], [1, 1]]
    """

    device: torch.device | str

    def __init__(self, N: int, device: torch.device | str = "cpu"):
        self.shape, self.device = (N, N), device
        self.lengths = torch.arange(1, N + 1, device=device)
        self.all_ones, self.lower_triangular = N <= 1, True

    @property
    def bool_matrix(self) -> Tensor:
        """True where a pair is kept."""
        return torch.ones(self.shape, dtype=torch.bool, device=self.device).tril()
