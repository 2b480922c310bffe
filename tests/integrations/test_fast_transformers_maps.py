"""Feature maps and layers of fast-transformers, against the library's formulas, written out."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saccade.integrations import fast_transformers as ft
from saccade.integrations.fast_transformers import features


def fourier(x: Tensor, omega: Tensor, n_dims: int, temperature: float) -> Tensor:
    """`RandomFourierFeatures.forward` of the library."""
    u = x * math.sqrt(temperature) @ omega
    return torch.cat([torch.cos(u), torch.sin(u)], dim=-1) * math.sqrt(2 / n_dims)


def smoothed(x: Tensor, omega: Tensor, n_dims: int, temperature: float) -> Tensor:
    """`SmoothedRandomFourierFeatures.forward` of the library, with smoothing 0.7."""
    y = fourier(x, omega, n_dims - 1, temperature)
    return torch.cat([y, torch.full((*y.shape[:-1], 1), 0.7, dtype=y.dtype)], dim=-1)


def favor(x: Tensor, omega: Tensor, n_dims: int, temperature: float) -> Tensor:
    """`Favor.forward` of the library."""
    x = x * math.sqrt(temperature)
    u = x @ omega
    offset = (x * x).sum(-1, keepdim=True) * 0.5 + 0.5 * math.log(n_dims)
    return torch.cat([torch.exp(u - offset), torch.exp(-u - offset)], dim=-1)


def generalized(x: Tensor, omega: Tensor, n_dims: int, temperature: float) -> Tensor:
    """`GeneralizedRandomFeatures.forward` of the library."""
    return torch.relu(x * math.sqrt(temperature) @ omega)


SMOOTHED = functools.partial(ft.SmoothedRandomFourierFeatures, smoothing=0.7)
RANDOM: list[tuple[Any, Any, Any]] = [
    (ft.RandomFourierFeatures, fourier, lambda n: n // 2),
    (SMOOTHED, smoothed, lambda n: (n - 1) // 2),
    (ft.Favor, favor, lambda n: n // 2),
    (ft.GeneralizedRandomFeatures, generalized, lambda n: n),
]


@pytest.mark.parametrize("n_dims", [2, 5, 8, 15, 16, None])
@pytest.mark.parametrize(("kind", "formula", "columns"), RANDOM)
def test_features_are_the_librarys(kind: Any, formula: Any, columns: Any, n_dims: Any) -> None:
    torch.manual_seed(0)
    made = kind(8, n_dims=n_dims, softmax_temp=0.3)
    made.new_feature_map(torch.device("cpu"))
    size = n_dims or 8
    assert tuple(made.omega.shape) == (8, columns(size)) and made.query_dimensions == 8
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    wanted = formula(x, made.omega.double(), size, 0.3)
    torch.testing.assert_close(made(x), wanted, rtol=1e-12, atol=1e-12)


FORMS: list[Any] = ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)]
MAPS = [kind for kind, _, _ in RANDOM]


@pytest.mark.parametrize("device", [*FORMS, "meta", torch.device("meta")], ids=str)
@pytest.mark.parametrize("kind", MAPS)
def test_any_form_of_a_device_draws_when_it_is_time(kind: Any, device: Any) -> None:
    made = kind(8, redraw=3)
    drawn = []
    for _ in range(6):
        made.new_feature_map(device)
        assert made.omega.device.type == torch.device(device).type
        drawn.append(made.omega.clone())
    if made.omega.device.type != "meta":
        same = [torch.equal(one, other) for one, other in itertools.pairwise(drawn)]
        assert same == [True, True, False, True, True]


@pytest.mark.parametrize("kind", MAPS)
def test_a_map_that_is_not_drawn_anew_is_only_moved(kind: Any) -> None:
    made = kind(8, redraw=3)
    made.new_feature_map("meta")
    made.omega = torch.randn(made.omega.shape)
    kept = made.omega
    made.new_feature_map("cpu")
    assert made.omega is kept


# ---- maps that somebody wrote -----------------------------------------------------------------


class TheirFeatureMap(nn.Module):
    """The library's own base class."""

    def __init__(self, query_dims: int) -> None:
        super().__init__()
        self.query_dims = query_dims

    def new_feature_map(self, device: Any) -> None:
        raise NotImplementedError

    def forward_queries(self, x: Tensor) -> Tensor:
        return self(x)

    def forward_keys(self, x: Tensor) -> Tensor:
        return self(x)


class TheirSquares(TheirFeatureMap):
    """A map that subclasses the library's."""

    def new_feature_map(self, device: Any) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class OurSquares(ft.FeatureMap):
    """A map that subclasses ours."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class ChangedElu(ft.ActivationFunctionFeatureMap):
    """A map whose base is known by a name, and which computes something else."""

    def __init__(self, query_dims: int) -> None:
        super().__init__(query_dims, torch.nn.functional.elu, name="elu+1")

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class ChangedKeys(ft.Favor):
    """A map whose base scales its features, with other functions."""

    def forward_queries(self, x: Tensor) -> Tensor:
        return x.square()

    forward_keys = forward_queries


def assigned(query_dims: int) -> Any:
    made = ft.elu_feature_map(query_dims)
    made.forward = torch.square  # type: ignore[method-assign,assignment]
    return made


def hooked(query_dims: int) -> Any:
    made = ft.activation_function_feature_map(torch.abs)(query_dims)
    made.register_forward_hook(lambda module, inputs, output: output.square())
    return made


SQUARES = [TheirSquares, OurSquares, ChangedElu, ChangedKeys, assigned, hooked]


def rows() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 7, 3, n, dtype=torch.float64) for n in (8, 8, 6)]


def by_squares(queries: Tensor, keys: Tensor, values: Tensor, kept: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("nlhd,nshd->nhls", queries.square(), keys.square()) * kept[:, None, None]
    scores = scores.tril() if causal else scores
    output = torch.einsum("nhls,nshm->nlhm", scores, values)
    return output / (scores.sum(-1).transpose(1, 2) + 1e-6)[..., None]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("kind", SQUARES)
def test_what_a_map_computes_is_what_counts(kind: Any, holes: bool) -> None:
    tensors = rows()
    kept = torch.ones(2, 7, dtype=torch.bool)
    if holes:
        kept[0, 2] = kept[1, 4] = False
    masks = ft.FullMask(2, 7), ft.FullMask(kept)
    wanted_by: Any = functools.partial(by_squares, *tensors, kept=kept.double())
    wanted = wanted_by(causal=False)
    found = ft.LinearAttention(8, kind)(*tensors, ft.FullMask(7), *masks)
    torch.testing.assert_close(found, wanted)
    whole = wanted_by(causal=True)
    found = ft.CausalLinearAttention(8, kind)(*tensors, ft.TriangularCausalMask(7), *masks)
    torch.testing.assert_close(found, whole)
    cross, states = ft.RecurrentCrossLinearAttention(8, kind), None
    step, state = ft.RecurrentLinearAttention(8, kind), None
    for i in range(7):
        found, states = cross(tensors[0][:, i], *tensors[1:], masks[1], states)
        torch.testing.assert_close(found, wanted[:, i])
        if not holes:
            found, state = step(*(tensor[:, i] for tensor in tensors), state)
            torch.testing.assert_close(found, whole[:, i])


def test_maps_of_ours_keep_what_the_operator_knows() -> None:
    assert features.in_our_terms(ft.elu_feature_map(8)) == "elu+1"
    made = ft.Favor(8)
    made.new_feature_map("cpu")
    assert features.in_our_terms(made) is made.saccade_map
    kept = ft.ActivationFunctionFeatureMap(8, torch.square)
    assert features.in_our_terms(kept) is torch.square


# ---- layers -----------------------------------------------------------------------------------


def by_hand(layer: Any, queries: Tensor, keys: Tensor, values: Tensor, *masks: Any) -> Tensor:
    """`AttentionLayer.forward` of the library."""
    N, L, _ = queries.shape
    S = keys.shape[1]
    projected = (
        layer.query_projection(queries).view(N, L, layer.n_heads, -1),
        layer.key_projection(keys).view(N, S, layer.n_heads, -1),
        layer.value_projection(values).view(N, S, layer.n_heads, -1),
    )
    return layer.out_projection(layer.inner_attention(*projected, *masks).view(N, L, -1))


def test_the_layer_around_an_attention() -> None:
    torch.manual_seed(0)
    layer = ft.AttentionLayer(ft.LinearAttention(6), 12, 3, d_keys=6, d_values=5, d_model_keys=10)
    queries, keys = torch.randn(2, 4, 12), torch.randn(2, 7, 10)
    masks = ft.FullMask(4, 7), ft.FullMask(2, 4), ft.LengthMask(torch.tensor([3, 7]), max_len=7)
    found = layer(queries, keys, keys, *masks)
    torch.testing.assert_close(found, by_hand(layer, queries, keys, keys, *masks))
    sizes = {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
    assert sizes["query_projection.weight"] == (18, 12)
    assert sizes["key_projection.weight"] == (18, 10)
    assert sizes["value_projection.weight"] == (15, 10)
    assert sizes["out_projection.weight"] == (12, 15)
    assert [*layer.state_dict()][:2] == ["query_projection.weight", "query_projection.bias"]
    assert layer.inner_attention is not None


def test_the_recurrent_layer_takes_the_layers_weights() -> None:
    torch.manual_seed(0)
    layer = ft.AttentionLayer(ft.CausalLinearAttention(4), 12, 3)
    step = ft.RecurrentAttentionLayer(ft.RecurrentLinearAttention(4), 12, 3)
    step.load_state_dict(layer.state_dict())
    tokens = torch.randn(2, 7, 12)
    masks = ft.TriangularCausalMask(7), ft.FullMask(2, 7), ft.FullMask(2, 7)
    wanted, state = layer(tokens, tokens, tokens, *masks), None
    for i in range(7):
        found, state = step(tokens[:, i], tokens[:, i], tokens[:, i], state)
        torch.testing.assert_close(found, wanted[:, i], rtol=1e-4, atol=1e-5)
    with pytest.warns(DeprecationWarning, match="its name is state"):
        step(tokens[:, 0], tokens[:, 0], tokens[:, 0], memory=state)


def test_the_recurrent_layer_of_two_sequences() -> None:
    torch.manual_seed(0)
    layer = ft.AttentionLayer(ft.LinearAttention(4), 12, 3, d_model_keys=10)
    step = ft.RecurrentCrossAttentionLayer(
        ft.RecurrentCrossLinearAttention(4), 12, 3, d_model_keys=10
    )
    step.load_state_dict(layer.state_dict())
    queries, keys = torch.randn(2, 4, 12), torch.randn(2, 7, 10)
    lengths = ft.LengthMask(torch.tensor([3, 7]), max_len=7)
    wanted = layer(queries, keys, keys, ft.FullMask(4, 7), ft.FullMask(2, 4), lengths)
    nothing: Any = None
    found, state = step(queries[:, 0], keys, keys, lengths)
    torch.testing.assert_close(found, wanted[:, 0], rtol=1e-4, atol=1e-5)
    for i in range(1, 4):
        found, state = step(queries[:, i], nothing, nothing, lengths, state)
        torch.testing.assert_close(found, wanted[:, i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda events: ft.LinearAttention(8, event_dispatcher=events),
        lambda events: ft.RecurrentLinearAttention(8, event_dispatcher=events),
        lambda events: ft.AttentionLayer(ft.LinearAttention(4), 12, 3, event_dispatcher=events),
        lambda events: ft.RecurrentAttentionLayer(nn.Identity(), 12, 3, None, None, events),
    ],
)
def test_who_waits_for_events_is_told(make: Any) -> None:
    make("")
    with pytest.raises(NotImplementedError, match="event_dispatcher: got 'mine', takes '' alone"):
        make("mine")


def test_a_mask_that_says_only_its_matrix() -> None:
    class Odd(ft.BaseMask):
        @property
        def bool_matrix(self) -> Tensor:
            return torch.tensor([[True, False], [True, True]])

    mask = Odd()
    assert mask.shape == (2, 2) and mask.lengths.tolist() == [1, 2]
    assert mask.lower_triangular and not mask.all_ones
