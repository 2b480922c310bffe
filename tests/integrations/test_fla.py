"""Parity with flash-linear-attention's definitions, written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import saccade.integrations.fla

fla: Any = saccade.integrations.fla  # called with unpacked lists


def qkv(T: int = 9) -> list[Tensor]:
    torch.manual_seed(T)
    q, k = (torch.randn(2, T, 3, 8, dtype=torch.float64).abs() + 0.01 for _ in range(2))
    return [q, k, torch.randn(2, T, 3, 6, dtype=torch.float64)]


def naive(
    tensors: list[Tensor], decay: Tensor, state: Any, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence: S_t = e^{g_t} S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t / sqrt(K)."""
    q, k, v = tensors
    B, T, H, K = q.shape
    S, z = state or (q.new_zeros(B, H, K, v.shape[-1]), q.new_zeros(B, 1, H, K))
    z, outputs = z[:, 0], []
    for t in range(T):
        left = decay[:, t].exp()
        S = left[..., None, None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        z = left[..., None] * z + k[:, t]
        o = torch.einsum("bhk,bhkv->bhv", q[:, t] * K**-0.5, S)
        if normalize:
            o = o / ((q[:, t] * K**-0.5 * z).sum(-1, keepdim=True) + 1e-10)
        outputs.append(o)
    return torch.stack(outputs, 1), S, z[:, None]


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_attn(normalize: bool) -> None:
    tensors = qkv()
    zero = torch.zeros(2, 9, 3)
    wanted, kv, z = naive(tensors, zero, None, normalize)
    for call in (
        fla.chunk_linear_attn, fla.fused_chunk_linear_attn, fla.fused_recurrent_linear_attn
    ):  # fmt: skip
        output, state = call(*tensors, normalize=normalize, output_final_state=True)
        torch.testing.assert_close(output, wanted)
        torch.testing.assert_close(state, (kv, z) if normalize else kv)
        assert call(*tensors, normalize=normalize)[1] is None
        more, _ = call(*tensors, normalize=normalize, initial_state=state)
        again, _, _ = naive(tensors, zero, (kv, z), normalize)
        torch.testing.assert_close(more, again)


@pytest.mark.parametrize("normalize", [True, False])
def test_reverse(normalize: bool) -> None:
    tensors = qkv()
    flipped = [rows.flip(1) for rows in tensors]
    wanted, kv, z = naive(flipped, torch.zeros(2, 9, 3), None, normalize)
    output, state = fla.fused_recurrent_linear_attn(
        *tensors, reverse=True, normalize=normalize, output_final_state=True
    )
    torch.testing.assert_close(output, wanted.flip(1))
    torch.testing.assert_close(state, (kv, z) if normalize else kv)


@pytest.mark.parametrize("reverse", [True, False])
def test_packed(reverse: bool) -> None:
    tensors = [rows[:1] for rows in qkv()]
    offsets = torch.tensor([0, 4, 9])
    arguments: dict[str, Any] = {"normalize": True, "output_final_state": True, "reverse": reverse}
    start = (torch.rand(2, 3, 8, 6).double(), torch.rand(2, 1, 3, 8).double())
    output, state = fla.fused_recurrent_linear_attn(
        *tensors, cu_seqlens=offsets, initial_state=start, **arguments
    )
    for b, rows in enumerate((slice(0, 4), slice(4, 9))):
        alone, last = fla.fused_recurrent_linear_attn(
            *(tensor[:, rows] for tensor in tensors),
            initial_state=(start[0][b : b + 1], start[1][b : b + 1]), **arguments,
        )  # fmt: skip
        torch.testing.assert_close(output[:, rows], alone)
        assert isinstance(state, tuple) and isinstance(last, tuple)
        for one, two in zip(state, last, strict=True):
            torch.testing.assert_close(one[b], two[0])
    with pytest.raises(ValueError, match="q: got batch 2"):
        fla.chunk_linear_attn(*qkv(), cu_seqlens=offsets)


def test_simple_gla() -> None:
    tensors = qkv()
    g = -torch.rand(2, 9, 3, dtype=torch.float64)
    wanted, kv, _ = naive(tensors, g, None, False)
    output, state = fla.chunk_simple_gla(*tensors, g=g, output_final_state=True)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(state, kv)
    constant = -torch.rand(3, dtype=torch.float64)
    wanted, _, _ = naive(tensors, constant.expand(2, 9, 3), None, False)
    torch.testing.assert_close(fla.chunk_simple_gla(*tensors, g_gamma=constant)[0], wanted)
    one = [rows[:1] for rows in tensors]
    packed, _ = fla.chunk_simple_gla(*one, g=g[:1], cu_seqlens=torch.tensor([0, 9]))
    torch.testing.assert_close(packed, output[:1])
    with pytest.raises(ValueError, match="g_gamma"):
        fla.chunk_simple_gla(*tensors, g=g, g_gamma=constant)


def test_states_and_gates_in_the_wrong_form_are_refused() -> None:
    tensors = qkv()
    _, state = fla.chunk_linear_attn(*tensors, output_final_state=True)
    for given in (state, list(state)):
        fla.chunk_linear_attn(*tensors, initial_state=given)
    with pytest.raises(ValueError, match="initial_state: got Tensor, takes a pair"):
        fla.chunk_linear_attn(*tensors, initial_state=state[0])
    for first, form in ((False, r"K, V\)"), (True, r"V, K\)")):
        for call in (fla.chunk_simple_gla, fla.fused_recurrent_simple_gla):
            for wrong in (3, state):  # the state of a sum has no place there
                with pytest.raises(
                    TypeError, match=rf"initial_state: got .*, takes a tensor .*{form}"
                ):
                    call(*tensors, initial_state=wrong, state_v_first=first)
    for wrong in ((state[0], None), (*state, state[1]), state[:1], (), (1.0, 2.0)):
        with pytest.raises(ValueError, match=r"initial_state: got .*, takes a pair"):
            fla.chunk_linear_attn(*tensors, initial_state=wrong)
    for wrong in ((state[0], state[1][:, 0]), (state[0], state[1].mT), (state[0][0], state[1])):
        with pytest.raises(
            ValueError, match=r"initial_state: got .*, takes \(N, H, K, V\) and \(N, 1"
        ):
            fla.chunk_linear_attn(*tensors, initial_state=wrong)
    offsets = torch.tensor([0, 4, 9])
    with pytest.raises(ValueError, match=r"initial_state: got \(Tensor, NoneType\)"):
        fla.fused_recurrent_linear_attn(
            *(rows[:1] for rows in tensors), initial_state=(state[0], None), normalize=True,
            reverse=True, cu_seqlens=offsets,
        )  # fmt: skip
    for call in (fla.chunk_linear_attn, fla.fused_recurrent_linear_attn):
        for name in ("normalize", "output_final_state"):
            with pytest.raises(TypeError, match=f"{name}: got str, takes a bool"):
                call(*tensors, **{name: "no"})
    for name in ("g", "g_gamma"):
        with pytest.raises(TypeError, match=f"{name}: got list, takes a floating-point tensor"):
            fla.chunk_simple_gla(*tensors, **{name: [-0.1] * 3})
        with pytest.raises(TypeError, match=rf"{name}: got torch.int64, takes a floating-point"):
            fla.chunk_simple_gla(*tensors, **{name: torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"g: got shape \(2, 3, 9\), takes \(2, 9, 3\)"):
        fla.chunk_simple_gla(*tensors, g=-torch.ones(2, 3, 9))
    with pytest.raises(ValueError, match=r"g_gamma: got shape \(2,\), takes \(3,\)"):
        fla.chunk_simple_gla(*tensors, g_gamma=-torch.ones(2))


# ---- simple GLA ---------------------------------------------------------------------------------

SIMPLE = ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"]


@pytest.mark.parametrize("gate", ["g", "g_gamma", "none"])
@pytest.mark.parametrize("name", SIMPLE)
def test_simple_gla_by_all_its_names(name: str, gate: str) -> None:
    call, tensors = getattr(fla, name), qkv()
    given = {
        "g": -torch.rand(2, 9, 3, dtype=torch.float64),
        "g_gamma": -torch.rand(3, dtype=torch.float64),
        "none": torch.zeros(3),
    }[gate]
    arguments = {} if gate == "none" else {gate: given}
    start = torch.randn(2, 3, 8, 6, dtype=torch.float64)
    wanted, kv, _ = naive(tensors, given.expand(2, 9, 3), (start, torch.zeros(2, 1, 3, 8)), False)
    output, state = call(*tensors, **arguments, initial_state=start, output_final_state=True)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(state, kv)
    assert call(*tensors, **arguments)[1] is None


@pytest.mark.parametrize("name", ["chunk_simple_gla", "fused_recurrent_simple_gla"])
def test_states_with_values_first(name: str) -> None:
    call, tensors = getattr(fla, name), qkv()
    g, start = -torch.rand(2, 9, 3).double(), torch.randn(2, 3, 8, 6).double()
    wanted = call(*tensors, g=g, initial_state=start, output_final_state=True)
    found = call(
        *tensors, g=g, initial_state=start.mT.contiguous(), output_final_state=True,
        state_v_first=True,
    )  # fmt: skip
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1].mT)
    assert call(*tensors, g=g, state_v_first=True)[1] is None


def test_simple_gla_from_the_end() -> None:
    tensors, g = qkv(), -torch.rand(2, 9, 3, dtype=torch.float64)
    flipped = [rows.flip(1) for rows in tensors]
    wanted, kv, _ = naive(flipped, g.flip(1), None, False)
    arguments: dict[str, Any] = {"output_final_state": True, "reverse": True}
    output, state = fla.fused_recurrent_simple_gla(*tensors, g=g, **arguments)
    torch.testing.assert_close(output, wanted.flip(1))
    torch.testing.assert_close(state, kv)
    one, start = [rows[:1] for rows in (*tensors, g)], torch.randn(2, 3, 8, 6).double()
    for call, last in ((fla.fused_recurrent_simple_gla, 4), (fla.fused_recurrent_linear_attn, 3)):
        output, state = call(
            *one[:last], cu_seqlens=torch.tensor([0, 3, 9]), initial_state=start, **arguments
        )
        for b, rows in enumerate((slice(0, 3), slice(3, 9))):
            parts = [part[:, rows] for part in one[:last]]
            alone, kv = call(*parts, initial_state=start[b : b + 1], **arguments)
            torch.testing.assert_close(output[:, rows], alone)
            torch.testing.assert_close(state[b], kv[0])
    packing = fla.linear_attention._Order(True, torch.tensor([0, 3, 7]), 9, torch.device("cpu"))
    assert packing.rows(torch.arange(9)[None])[0].tolist() == [6, 5, 4, 3, 2, 1, 0, 7, 8]
    assert packing.offsets.tolist() == [0, 4, 7]


def test_simple_gla_in_parallel() -> None:
    tensors, g = qkv(), -torch.rand(2, 9, 3, dtype=torch.float64)
    for given in (g, None):
        fade = torch.zeros(2, 9, 3) if given is None else given
        wanted, _, _ = naive(tensors, fade, None, False)
        output, nothing = fla.parallel_simple_gla(*tensors, given)
        torch.testing.assert_close(output, wanted)
        assert nothing is None
        output, scores = fla.parallel_simple_gla(*tensors, given, output_attentions=True)
        torch.testing.assert_close(torch.einsum("bhij,bjhv->bihv", scores, tensors[2]), wanted)
        assert torch.equal(scores, scores.tril())
        half, _ = fla.parallel_simple_gla(*tensors, given, 8**-0.5 / 2)
        torch.testing.assert_close(half, wanted / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_no_differences_of_rounded_sums(dtype: torch.dtype) -> None:
    ones, g = torch.ones(1, 300, 1, 1, dtype=dtype), torch.full((1, 300, 1), -0.75, dtype=dtype)
    g[:, 20] = -1e30  # nothing is left of what came before
    _, weights = fla.parallel_simple_gla(ones, ones, ones, g, output_attentions=True)
    far = torch.arange(300)[:, None] - torch.arange(300)
    wanted = torch.exp(-0.75 * far.double()).tril()
    wanted[20:, :20] = 0
    torch.testing.assert_close(weights[0, 0], wanted.to(dtype), rtol=1e-2, atol=1e-30)


def test_options_of_fla_that_change_nothing_are_checked() -> None:
    tensors, offsets = [rows[:1] for rows in qkv()], torch.tensor([0, 4, 9])
    wanted = fla.chunk_simple_gla(*tensors, cu_seqlens=offsets)[0]
    for size in (None, 16, 128):
        found, _ = fla.chunk_simple_gla(
            *tensors, cu_seqlens=offsets, cu_seqlens_cpu=offsets.int(), chunk_size=size
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    found, _ = fla.parallel_simple_gla(*tensors, cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    torch.testing.assert_close(found, wanted)
    refused: list[tuple[Any, type[Exception], str, dict[str, Any]]] = [
        (fla.chunk_simple_gla, ValueError, "chunk_size: got 48", {"chunk_size": 48}),
        (fla.chunk_simple_gla, ValueError, "chunk_size: got 0", {"chunk_size": 0}),
        (fla.chunk_simple_gla, ValueError, "chunk_size: got 16.0", {"chunk_size": 16.0}),
        (fla.chunk_simple_gla, ValueError, r"cu_seqlens_cpu: got \[0, 3, 9\], takes \[0, 4, 9\]",
         {"cu_seqlens": offsets, "cu_seqlens_cpu": torch.tensor([0, 3, 9])}),
        (fla.parallel_simple_gla, ValueError, r"cu_seqlens_cpu: got cpu \[2\], takes a copy",
         {"cu_seqlens": offsets, "cu_seqlens_cpu": torch.tensor([0, 9])}),
        (fla.chunk_simple_gla, ValueError, "cu_seqlens_cpu: got a value without",
         {"cu_seqlens_cpu": offsets}),
        (fla.chunk_simple_gla, TypeError, "state_v_first: got Tensor, takes a bool",
         {"state_v_first": offsets}),
        (fla.fused_recurrent_simple_gla, TypeError, "reverse: got Tensor", {"reverse": offsets}),
        (fla.fused_recurrent_linear_attn, TypeError, "reverse: got Tensor", {"reverse": offsets}),
        (fla.chunk_simple_gla, ValueError, "head_first: got True", {"head_first": True}),
        (fla.chunk_linear_attn, TypeError, "decays: an unknown option", {"decays": None}),
        (fla.chunk_simple_gla, TypeError, "cu_seqlens: got list", {"cu_seqlens": [0, 4, 9]}),
        (fla.parallel_simple_gla, ValueError, "output_attentions: got True with cu_seqlens",
         {"cu_seqlens": offsets, "output_attentions": True}),
    ]  # fmt: skip
    for call, kind, message, options in refused:
        with pytest.raises(kind, match=message):
            call(*tensors, **options)
    for call in (fla.parallel_simple_gla, fla.chunk_linear_attn, fla.chunk_simple_gla):
        with pytest.raises(ValueError, match=r"q: got shape .*, takes .*\(B, T, H, K\)"):
            call(*(each[0] for each in tensors))
