"""Parity with flash-linear-attention's gated delta rules, whose recurrence is written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import saccade.integrations.fla

fla: Any = saccade.integrations.fla  # called with unpacked lists
F64 = torch.float64


def rows(T: int = 11) -> list[Tensor]:
    """q, k and v: two value heads for each key head."""
    torch.manual_seed(T)
    q, k = torch.randn(2, 2, T, 2, 8, dtype=F64)
    return [q, k / 3, torch.randn(2, T, 4, 6, dtype=F64)]


def naive(
    tensors: list[Tensor], g: Tensor, beta: Tensor, state: Tensor, norm: bool = False
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} + k_t (beta_t (v_t − e^{g_t} S_{t-1}ᵀ k_t))ᵀ, o_t = S_tᵀ q_t / √K."""
    q, k, v = tensors
    if norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(2, 2) for x in (q, k))
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    S, outputs = state, []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), S


GATES: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "gdn": (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule, ()),
    "kda": (fla.chunk_kda, fla.fused_recurrent_kda, (8,)),
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_both_forms(name: str, norm: bool) -> None:
    *calls, channels = GATES[name]
    for length in (11, 3):
        tensors = rows(length)
        g, beta = -torch.rand(2, length, 4, *channels).double(), torch.rand(2, length, 4).double()
        state = torch.randn(2, 4, 8, 6, dtype=F64)
        output, last = naive(tensors, g, beta, state, norm)
        fresh, _ = naive(tensors, g, beta, torch.zeros_like(state), norm)
        for call in calls:
            options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": norm}
            before = state.clone()
            found = call(*tensors, **options, initial_state=state, output_final_state=True)
            torch.testing.assert_close(found, (output, last))
            assert torch.equal(state, before)
            torch.testing.assert_close(call(*tensors, **options), (fresh, None))
            turned = call(
                *tensors, **options, initial_state=state.mT, output_final_state=True,
                state_v_first=True,
            )  # fmt: skip
            torch.testing.assert_close(turned, (output, last.mT))


@pytest.mark.parametrize("name", GATES)
def test_packed_sequences_and_gradients(name: str) -> None:
    *calls, channels = GATES[name]
    leaves = [each[:1].clone().requires_grad_() for each in rows()]
    g = (-torch.rand(1, 11, 4, *channels).double()).requires_grad_()
    beta = torch.rand(1, 11, 4).double().requires_grad_()
    state = torch.randn(2, 4, 8, 6, dtype=F64).requires_grad_()
    parts = [
        naive([each[:, at] for each in leaves], g[:, at], beta[:, at], state[b : b + 1])
        for b, at in enumerate((slice(0, 4), slice(4, 11)))
    ]
    wanted = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])
    every = [*leaves, g, beta, state]
    grads = [torch.randn_like(each) for each in wanted]
    exact = torch.autograd.grad(wanted, every, grads)
    for call in calls:
        found = call(
            *leaves, g=g, beta=beta, initial_state=state, output_final_state=True,
            cu_seqlens=torch.tensor([0, 4, 11]),
        )  # fmt: skip
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, every, grads), exact)


@pytest.mark.parametrize("name", GATES)
def test_gates_and_rates_in_the_call(name: str) -> None:
    *calls, channels = GATES[name]
    tensors, logits = rows(), torch.randn(2, 11, 4).double()
    raw, A_log, bias = torch.randn(2, 11, 4, *channels), torch.randn(4), torch.randn(4, *channels)
    factor = A_log.exp().view(4, *[1] * len(channels))
    state = torch.zeros(2, 4, 8, 6, dtype=F64)
    gates = {"plain": -factor * torch.nn.functional.softplus(raw + bias)}
    more: dict[str, dict[str, Any]] = {"plain": {}}
    if channels:
        gates["bounded"] = -5 * torch.sigmoid(factor * (raw + bias))
        more["bounded"] = {"lower_bound": -5.0}
    for kind, twice in zip(gates, (False, True), strict=False):
        wanted, _ = naive(tensors, gates[kind].double(), logits.sigmoid() * (1 + twice), state)
        for call in calls:
            found, _ = call(
                *tensors, g=raw, beta=logits, use_gate_in_kernel=True, A_log=A_log,
                dt_bias=bias.flatten(), use_beta_sigmoid_in_kernel=True, allow_neg_eigval=twice,
                **more[kind],
            )  # fmt: skip
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", GATES)
def test_gates_of_float64_are_computed_in_it(name: str) -> None:
    *calls, channels = GATES[name]
    tensors, state = rows(), torch.zeros(2, 4, 8, 6, dtype=F64)
    raw, beta = torch.randn(2, 11, 4, *channels, dtype=F64), torch.randn(2, 11, 4, dtype=F64)
    A_log, bias = torch.randn(4, dtype=F64), torch.randn(4, *channels, dtype=F64)
    factor = A_log.exp().view(4, *[1] * len(channels))
    gate = -factor * torch.nn.functional.softplus(raw + bias)
    wanted, _ = naive(tensors, gate, beta.sigmoid(), state)
    for call in calls:
        found, _ = call(
            *tensors, g=raw, beta=beta, use_gate_in_kernel=True, A_log=A_log,
            dt_bias=bias.flatten(), use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


def test_a_decay_of_both_kinds_and_no_beta() -> None:
    tensors, state = rows(), torch.zeros(2, 4, 8, 6, dtype=F64)
    g, gk = -torch.rand(2, 11, 4).double(), -torch.rand(2, 11, 4, 8).double()
    wanted, _ = naive(tensors, g.unsqueeze(-1) + gk, torch.ones(2, 11, 4), state)
    found, _ = fla.fused_recurrent_gated_delta_rule(*tensors, g=g, gk=gk)
    torch.testing.assert_close(found, wanted)


def test_what_is_not_served_is_refused_by_name() -> None:
    tensors, beta = rows(), torch.rand(2, 11, 4)
    g, by_channel = -torch.rand(2, 11, 4), -torch.rand(2, 11, 4, 8)
    for error, message, call in (
        (ValueError, "q: got batch 2, takes 1", lambda: fla.chunk_gated_delta_rule(
            *tensors, g, beta, cu_seqlens=torch.tensor([0, 11]))),
        (NotImplementedError, "gv: got a tensor", lambda: fla.fused_recurrent_gated_delta_rule(
            *tensors, g, gv=by_channel)),
        (NotImplementedError, "return_intermediate_states", lambda: fla.chunk_kda(
            *tensors, by_channel, beta, return_intermediate_states=True)),
        (NotImplementedError, "cp_context: got", lambda: fla.chunk_kda(
            *tensors, by_channel, beta, cp_context=object())),
        (ValueError, "A_log: got None", lambda: fla.chunk_gated_delta_rule(
            *tensors, g, beta, use_gate_in_kernel=True)),
        (ValueError, "allow_neg_eigval: got True", lambda: fla.chunk_kda(
            *tensors, by_channel, beta, allow_neg_eigval=True)),
        (ValueError, r"g: got shape \(2, 11, 4\)", lambda: fla.chunk_kda(*tensors, g, beta)),
        (ValueError, "chunk_size: got 48", lambda: fla.chunk_kda(
            *tensors, by_channel, beta, chunk_size=48)),
        (TypeError, "state_v_first: got", lambda: fla.chunk_kda(
            *tensors, by_channel, beta, state_v_first=None)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def options() -> dict[str, Any]:
    """A packed call's options beside its rows."""
    return {"beta": torch.rand(1, 11, 4, dtype=F64), "cu_seqlens": torch.tensor([0, 4, 11])}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(11, 2, 8)}, r"q: got shape \(11, 2, 8\), takes .*\(B, T, H, K\)"),
        ({"k": torch.randn(1, 11, 2, 6)}, r"k: got shape \(1, 11, 2, 6\), .*here \(1, 11, 2, 8\)"),
        ({"v": torch.randn(1, 9, 4, 6)}, r"v: got shape \(1, 9, 4, 6\), .*here B, T \(1, 11\)"),
        ({"v": torch.randn(1, 11, 3, 6)}, "v: got 3 heads, takes a multiple of k's 2"),
        ({"g": torch.randn(1, 4, 11)}, r"g: got shape \(1, 4, 11\), .*\(B, T, HV.*here \(1, 11, 4"),
        ({"beta": torch.rand(1, 4, 11)}, r"beta: got shape .*\(B, T, HV\), here \(1, 11, 4\)"),
        ({"beta": [1.0]}, r"beta: got list, takes a floating-point tensor \(B, T, HV\)"),
        (
            {"cu_seqlens": [0, 4, 11]},
            r"cu_seqlens: got list, takes an int32 or int64 tensor \[N \+ 1",
        ),
        (
            {"cu_seqlens": torch.tensor([0.0, 11.0])},
            "cu_seqlens: got torch.float32, takes an int32",
        ),
        ({"A_log": torch.zeros(3)}, r"A_log: got shape \(3,\), takes .*\(HV,\), here \(4,\)"),
        ({"A_log": 1.0}, r"A_log: got float, takes a floating-point tensor \(HV,\)"),
        ({"dt_bias": torch.zeros(3)}, r"dt_bias: got shape \(3,\), takes .*\(HV.*\), here \("),
        (
            {"initial_state": torch.zeros(2, 4, 6, 8)},
            r"initial_state: got shape \(2, 4, 6, 8\), .*\(N, HV, K, V\), here \(2, 4, 8, 6\)",
        ),
        (
            {"initial_state": torch.zeros(2, 4, 8, 6), "state_v_first": True},
            r"got shape \(2, 4, 8, 6\), .*\(N, HV, V, K\) with state_v_first, here \(2, 4, 6, 8",
        ),
        ({"head_first": True}, r"head_first: got True, takes False: rows are \(B, T, H, K\)"),
        ({"output_state": True}, "output_state: an unknown option; write output_final_state="),
    ],
)
def test_errors_name_what_callers_wrote(name: str, change: dict[str, Any], message: str) -> None:
    *calls, channels = GATES[name]
    given: dict[str, Any] = dict(zip("qkv", (each[:1] for each in rows()), strict=True))
    given |= {"g": torch.randn(1, 11, 4, *channels), **options(), "use_gate_in_kernel": True}
    given |= {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4, *channels)}
    for call in calls:
        call(**given, head_first=False)
        with pytest.raises((TypeError, ValueError), match=message):
            call(**given | change)


def test_a_decay_of_channels_beside_one_of_heads_is_named() -> None:
    tensors, gk = rows(), -torch.rand(2, 11, 4)
    with pytest.raises(ValueError, match=r"gk: got shape \(2, 11, 4\), takes .*\(B, T, HV, K\)"):
        fla.fused_recurrent_gated_delta_rule(*tensors, gk=gk)
    with pytest.raises(ValueError, match=r"g: got shape \(2, 11, 4, 8\), takes .*\(B, T, HV\)"):
        fla.fused_recurrent_gated_delta_rule(*tensors, g=-torch.rand(2, 11, 4, 8))
