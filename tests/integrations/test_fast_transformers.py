"""Parity with fast-transformers' published formulas, written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.integrations import fast_transformers as ft


def rows(L: int = 7, S: int = 7, E: int = 8, M: int = 6, dtype: Any = None) -> list[Tensor]:
    torch.manual_seed(L * 100 + S)
    shapes = ((2, L, 3, E), (2, S, 3, E), (2, S, 3, M))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def theirs(tensors: list[Tensor], kept: Tensor, feature_map: Any, causal: bool) -> Tensor:
    """`LinearAttention.forward` and `CausalLinearAttention.forward`, by their einsums."""
    queries, keys, values = tensors
    Q = feature_map.forward_queries(queries)
    K = feature_map.forward_keys(keys) * kept[:, :, None, None]
    if not causal:
        KV = torch.einsum("nshd,nshm->nhmd", K, values)
        Z = 1 / (torch.einsum("nlhd,nhd->nlh", Q, K.sum(dim=1)) + 1e-6)
        return torch.einsum("nlhd,nhmd,nlh->nlhm", Q, KV, Z)
    L, S = Q.shape[1], K.shape[1]
    if S > L:
        K, values = K[:, :L], values[:, :L]
    elif S < L:
        K, values = (
            torch.cat([x, x.new_zeros(x.shape[0], L - S, *x.shape[2:])], 1) for x in (K, values)
        )
    Z = 1 / (torch.einsum("nlhi,nlhi->nlh", Q, K.cumsum(1)) + 1e-6)
    scores = torch.einsum("nlhd,nshd->nhls", Q, K).tril()
    return torch.einsum("nhls,nshm->nlhm", scores, values) * Z[:, :, :, None]


FEATURES: dict[str, Any] = {
    "elu": ft.elu_feature_map,
    "square": ft.activation_function_feature_map(torch.square),
    "fourier": ft.RandomFourierFeatures.factory(n_dims=16, softmax_temp=0.1),
    "smoothed": ft.SmoothedRandomFourierFeatures.factory(n_dims=16),
    "favor": ft.Favor.factory(n_dims=16, stabilize=True),
    "favor of 15": ft.Favor.factory(n_dims=15),
    "generalized": ft.GeneralizedRandomFeatures.factory(n_dims=12),
}


def kept_by(kind: str, S: int) -> tuple[Any, Tensor]:
    if kind == "all":
        return ft.FullMask(2, S), torch.ones(2, S)
    if kind == "lengths":
        mask = ft.LengthMask(torch.tensor([S - 2, S]), max_len=S)
        return mask, mask.float_matrix
    kept = torch.ones(2, S, dtype=torch.bool)
    kept[0, 1] = kept[1, 3] = False
    return ft.FullMask(kept), kept.float()


@pytest.mark.parametrize("mask", ["all", "lengths", "holes"])
@pytest.mark.parametrize("name", list(FEATURES))
@pytest.mark.parametrize("causal", [True, False])
def test_layers_and_their_gradients(causal: bool, name: str, mask: str) -> None:
    torch.manual_seed(3)
    layer: Any = (ft.CausalLinearAttention if causal else ft.LinearAttention)(8, FEATURES[name])
    layer.feature_map.deterministic_eval = True
    layer.feature_map.new_feature_map(torch.device("cpu"))
    layer.eval()
    for L, S in ((7, 7), (5, 9), (9, 5)):
        tensors = [x.requires_grad_() for x in rows(L, S, dtype=torch.float64)]
        key_lengths, kept = kept_by(mask, S)
        attn_mask = ft.TriangularCausalMask(L) if causal else ft.FullMask(L, S)
        found = layer(*tensors, attn_mask, ft.FullMask(2, L), key_lengths)
        assert found.is_contiguous()
        wanted = theirs(tensors, kept.double(), layer.feature_map, causal)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        grad = torch.randn_like(wanted)
        torch.testing.assert_close(
            torch.autograd.grad(found, tensors, grad),
            torch.autograd.grad(wanted, tensors, grad),
            atol=2e-3,
            rtol=2e-3,
        )


def test_no_valid_keys_give_zero() -> None:
    layer = ft.LinearAttention(8)
    mask = ft.LengthMask(torch.tensor([0, 7]), max_len=7)
    output = layer(*rows(), ft.FullMask(7), ft.FullMask(2, 7), mask)
    assert not bool(output[0].any()) and bool(output[1].any())


@pytest.mark.parametrize("layer", [ft.LinearAttention, ft.CausalLinearAttention])
def test_wrong_masks_are_refused(layer: Any) -> None:
    wrong = ft.FullMask(7) if layer is ft.CausalLinearAttention else ft.TriangularCausalMask(7)
    with pytest.raises(RuntimeError, match="attn_mask"):
        layer(8)(*rows(), wrong, ft.FullMask(2, 7), ft.FullMask(2, 7))


def test_causal_dot_product_takes_any_strides_and_lengths() -> None:
    for L, S in ((7, 7), (5, 9), (9, 5)):
        Q, K, V = (x.transpose(1, 2).requires_grad_() for x in rows(L, S))
        found = ft.causal_dot_product(Q, K, V)
        wanted = torch.einsum("nhld,nhsd->nhls", Q, K).tril() @ V
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(  # .sum() sends an expanded gradient back
            torch.autograd.grad(found.sum(), (Q, K, V)),
            torch.autograd.grad(wanted.sum(), (Q, K, V)),
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.mark.parametrize("name", list(FEATURES))
@pytest.mark.parametrize("training", [True, False])
def test_recurrent_twin(training: bool, name: str) -> None:
    torch.manual_seed(3)
    causal: Any = ft.CausalLinearAttention(8, FEATURES[name])
    twin: Any = ft.RecurrentLinearAttention(8, FEATURES[name])
    for layer in (causal, twin):
        layer.eval()
        layer.feature_map.deterministic_eval = True
    causal.feature_map.train().deterministic_eval = False
    causal.feature_map.new_feature_map(torch.device("cpu"))
    causal.feature_map.eval().deterministic_eval = True
    twin.load_state_dict(causal.state_dict())
    queries, keys, values = (x.requires_grad_(training) for x in rows(dtype=torch.float64))
    masks = ft.TriangularCausalMask(7), ft.FullMask(2, 7), ft.FullMask(2, 7)
    whole = causal(queries, keys, values, *masks)
    state, outputs = None, []
    for i in range(7):
        before = state
        output, state = twin(queries[:, i], keys[:, i], values[:, i], state)
        assert before is None or (before[0] is state[0]) != training
        outputs.append(output)
    torch.testing.assert_close(torch.stack(outputs, 1), whole, atol=1e-4, rtol=1e-4)
    if training:
        (grad,) = torch.autograd.grad(outputs[-1].sum(), keys)
        assert bool(grad.any())
    with pytest.raises(ValueError, match="state: got batch 2"):
        twin(queries[:1, 0], keys[:1, 0], values[:1, 0], state)


@pytest.mark.parametrize("training", [True, False])
def test_favor_underflows_nowhere(training: bool) -> None:
    """Its features are near e^-100 here, far below eps: twins, and masks with holes."""
    torch.manual_seed(3)
    favor = ft.Favor.factory(n_dims=16, deterministic_eval=True)
    layers: list[Any] = [ft.LinearAttention(8, favor), ft.CausalLinearAttention(8, favor)]
    layers += [ft.RecurrentCrossLinearAttention(8, favor), ft.RecurrentLinearAttention(8, favor)]
    layers[0].feature_map.new_feature_map(torch.device("cpu"))
    for layer in layers:
        layer.eval().load_state_dict(layers[0].state_dict())
    tensors = [x.requires_grad_(training) for x in rows(dtype=torch.float64)]
    queries, keys, values = tensors[0] * 8, tensors[1] * 8, tensors[2]
    omega = layers[0].feature_map.omega.double()
    length = (queries.square().sum(-1) + keys.square().sum(-1)).mean()
    assert float(length.detach()) * layers[0].feature_map.softmax_temp / 2 > 100
    kept = torch.rand(2, 7) > 0.4
    kept[:, 0] = True
    of = [x * layers[0].feature_map.root @ omega for x in (queries, keys)]
    of = [torch.cat([u, -u], -1) for u in of]
    logs = (of[0][:, :, None] + of[1][:, None]).logsumexp(-1)  # [N, L, S, H]
    logs = logs - keys.square().sum(-1)[:, None] * layers[0].feature_map.softmax_temp / 2
    outputs = []
    for causal in (False, True):
        seen = kept[:, None, :].expand(2, 7, 7)
        seen = seen.tril() if causal else seen
        weights = logs.masked_fill(~seen[..., None], -torch.inf).softmax(2)
        wanted = torch.einsum("nlsh,nshm->nlhm", weights, values)
        mask = ft.TriangularCausalMask(7) if causal else ft.FullMask(7)
        found = layers[causal](queries, keys, values, mask, None, ft.FullMask(kept))
        torch.testing.assert_close(found, wanted)
        outputs.append(wanted)
        if training:
            grad = torch.randn_like(wanted)
            torch.testing.assert_close(
                torch.autograd.grad(found, tensors, grad, retain_graph=True),
                torch.autograd.grad(wanted, tensors, grad, retain_graph=True),
            )
    whole = layers[1](queries, keys, values, ft.TriangularCausalMask(7), None, None)
    states: list[Any] = [None, None]
    for i in range(7):
        cross, states[0] = layers[2](queries[:, i], keys, values, ft.FullMask(kept), states[0])
        torch.testing.assert_close(cross, outputs[0][:, i])
        output, states[1] = layers[3](queries[:, i], keys[:, i], values[:, i], states[1])
        torch.testing.assert_close(output, whole[:, i])
    assert [tuple(part.shape) for part in states[1]] == [(2, 3, 16, 6), (2, 3, 16), (2, 3)]


@pytest.mark.parametrize("mask", ["all", "lengths", "holes"])
def test_recurrent_cross_twin(mask: str) -> None:
    queries, keys, values = rows(4, 7, dtype=torch.float64)
    key_lengths, _ = kept_by(mask, 7)
    wanted = ft.LinearAttention(8)(
        queries, keys, values, ft.FullMask(4, 7), ft.FullMask(2, 4), key_lengths
    )
    twin, state = ft.RecurrentCrossLinearAttention(8), None
    for i in range(4):
        output, state = twin(queries[:, i], keys, values, key_lengths, state)
        torch.testing.assert_close(output, wanted[:, i])
    assert state is not None
    assert [tuple(part.shape) for part in state] == [(2, 3, 6, 8), (2, 3, 8)]


class TestMasks:
    def test_matrices(self) -> None:
        kept = torch.tensor([[True, False], [True, True]])
        for mask, matrix in (
            (ft.FullMask(2), torch.ones(2, 2).bool()),
            (ft.FullMask(N=2, M=3), torch.ones(2, 3).bool()),
            (ft.FullMask(kept), kept),
            (ft.TriangularCausalMask(2), kept),
            (ft.LengthMask(torch.tensor([1, 2])), kept),
        ):
            assert torch.equal(mask.bool_matrix, matrix)
            assert torch.equal(mask.float_matrix, matrix.float())
            assert mask.shape == tuple(matrix.shape)
            assert torch.equal(mask.additive_matrix == 0, matrix)
            assert torch.equal(mask.additive_matrix_finite < -1e23, ~matrix)
            assert torch.equal(mask.lengths, matrix.sum(-1))
            assert mask.all_ones == bool(matrix.all())
            square = matrix.shape[0] == matrix.shape[1]
            assert mask.lower_triangular == (square and torch.equal(matrix, matrix.tril()))

    def test_no_matrix_is_made_for_what_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "ones", None)
        million = 2**20
        assert ft.FullMask(million).all_ones and ft.FullMask(million).shape == (million, million)
        assert ft.TriangularCausalMask(million).lower_triangular
        layer = ft.CausalLinearAttention(8)
        output = layer(*rows(), ft.TriangularCausalMask(7), ft.FullMask(2, 7), ft.FullMask(2, 7))
        assert output.shape == (2, 7, 3, 6)

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match=r"mask: got torch\.float32"):
            ft.FullMask(torch.ones(2, 2))
        with pytest.raises(ValueError, match="mask: got None"):
            ft.FullMask()
        with pytest.raises(ValueError, match="lengths"):
            _ = ft.FullMask(torch.tensor([[False, True]])).lengths


def test_random_maps_are_drawn_as_the_library_draws_them() -> None:
    device = torch.device("cpu")
    made = ft.RandomFourierFeatures(8, redraw=2)
    seen = []
    for _ in range(4):
        made.new_feature_map(device)
        seen.append(made.omega.clone())
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[1], seen[2])
    steady = ft.Favor(8, deterministic_eval=True).eval()
    before = steady.omega.clone()
    steady.new_feature_map(device)
    assert torch.equal(steady.omega, before)
    assert ft.SmoothedRandomFourierFeatures(64)(torch.randn(2, 64)).shape == (2, 63)


@pytest.mark.parametrize("name", ["LinearAttention", "CausalLinearAttention"])
def test_a_mask_of_other_keys_is_named(name: str) -> None:
    layer, tensors = getattr(ft, name)(8), rows()
    attn_mask = ft.TriangularCausalMask(7) if "Causal" in name else ft.FullMask(7)
    shorter, longer = ft.LengthMask(torch.tensor([5, 3])), ft.LengthMask(torch.tensor([9, 3]))
    for wrong in (shorter, longer, ft.FullMask(2, 6), ft.FullMask(3, 7), ft.FullMask(7)):
        with pytest.raises(ValueError, match=r"key_lengths: got a mask .*, takes \(2, 7\)"):
            layer(*tensors, attn_mask, None, wrong)
    with pytest.raises(TypeError, match="key_lengths: got Tensor, takes a LengthMask"):
        layer(*tensors, attn_mask, None, torch.ones(2, 7, dtype=torch.bool))
    of_one = ft.LengthMask(torch.tensor([4]), max_len=7)  # of all sequences
    of_each = ft.LengthMask(torch.tensor([4, 4]), max_len=7)
    found = layer(*tensors, attn_mask, None, of_one)
    torch.testing.assert_close(found, layer(*tensors, attn_mask, None, of_each), rtol=0, atol=0)
