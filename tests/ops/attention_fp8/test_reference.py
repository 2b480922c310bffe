"""The reference of fp8 attention, how it quantises, and the model of Hopper's sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_cases import make_case
from torch import Tensor

import saccade
from saccade import scores
from saccade.ops.attention_fp8 import model, reference
from saccade.ops.attention_fp8.quantise import quantised, scale_of_rows, transform
from saccade.ops.attention_fp8.validation import Fp8Options, prepare
from saccade.runtime.fp8_spec import E4M3, Fp8Inputs, Quantisation

OPTIONS: dict[str, Any] = {
    "mask": None, "score": None, "scale": None, "sinks": None, "return_lse": True, "config": None,
}  # fmt: skip


def prepared(
    query: Tensor, key: Tensor, value: Tensor, scales: Any = (None, None, None), **options: Any
) -> Any:
    """A checked call."""
    of_query, of_key, of_value = scales
    fp8 = Fp8Options(of_query, of_key, of_value, None, None, None, None)
    return prepare(query, key, value, None, None, None, None, fp8=fp8, **{**OPTIONS, **options})


def dequantised(inputs: Fp8Inputs) -> list[Tensor]:
    """Queries, keys and values as their e4m3 numbers and scales say, in float64."""
    offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.cu_seqlens_k
    return [
        rows.double() * scale_of_rows(scale, rows, ends).double()
        for rows, scale, ends in zip(inputs[:3], inputs[3:6], offsets, strict=True)
    ]


@pytest.mark.parametrize("form", ["none", "number", "heads", "blocks"])
def test_with_exact_weights_it_is_attention_over_what_the_numbers_say(form: str) -> None:
    case = make_case(form, lengths=(140, 150), heads=(4, 2))
    sinks = torch.randn(4, dtype=torch.float64)
    options: dict[str, Any] = {"score": scores.softcap(5.0), "sinks": sinks}
    scales = [case.scales.get(f"{name}_scale") for name in ("query", "key", "value")]
    call = prepared(*case.rows, scales=scales, **options)
    found = reference.attention(
        call.inputs, call.variant, call.quantisation._replace(dtype=torch.float64),
        sums=torch.float64, round_weights=False,
    )  # fmt: skip
    rows = dequantised(call.inputs)
    wanted = saccade.attention(*rows, return_lse=True, implementation="reference", **options)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("mode", ["block", "head", "tensor"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_quantised_rows_are_within_half_a_unit(mode: str, packed: bool) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 140, 300], dtype=torch.int32)
    query, key, value = torch.randn(3, 300, 2, 48) if packed else torch.randn(3, 2, 2, 150, 48)
    offsets = (ends, ends) if packed else (None, None)
    inputs = Fp8Inputs(query, key, value, None, None, None, None, *offsets)
    found = quantised(inputs, Quantisation(mode, True, True, torch.float16))
    rows = dequantised(found.inputs)
    matrix = transform(48)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(48).double())
    sizes = [(0, 140), (140, 300)] if packed else [(0, 150)]
    for first, end in sizes:
        part = slice(first, end)

        def cut(tensor: Tensor, part: slice = part) -> Tensor:
            return tensor[part].transpose(0, 1) if packed else tensor

        keys = cut(key).double()
        mean = keys.mean(-2, keepdim=True)
        exact = (cut(query).double() @ matrix, (keys - mean) @ matrix, cut(value).double())
        for wanted, got in zip(exact, map(cut, rows), strict=True):
            unit = torch.maximum(wanted.abs() * 2.0**-4, wanted.abs().amax() / 448 * 2.0**-10)
            assert bool(((got - wanted).abs() <= unit * 1.001).all())
        assert found.shift is not None
        shift = found.shift[:, part] if packed else found.shift
        wanted = (cut(query).double() * mean).sum(-1)
        torch.testing.assert_close(shift, wanted)
    counts = {"block": 4 if packed else 2, "head": 1, "tensor": 1}
    scale = found.inputs.key_scale
    assert scale is not None and (scale.shape[-1] if scale.dim() == 3 else 1) == counts[mode]


def test_the_transform_spreads_outliers() -> None:
    """As FlashAttention-3's paper has them: one number in a thousand is ten times as large."""
    torch.manual_seed(0)
    rows = [torch.randn(1, 2, 512, 64) + (torch.rand(512, 64) < 1e-3) * 10 for _ in range(3)]
    query, key, value = [each.bfloat16() for each in rows]
    exact = saccade.attention(*[each.double() for each in (query, key, value)])
    errors = {}
    for incoherent in (False, True):
        found = saccade.attention_fp8(query, key, value, incoherent=incoherent)
        errors[incoherent] = float((found - exact).square().mean().sqrt())
    assert errors[True] < 0.8 * errors[False]


def test_sums_of_13_bits() -> None:
    """8192 + 1 needs 13 bits behind the leading one, and 16384 + 1 one more."""
    one, many = torch.ones(1, 1).double(), torch.full((1, 1), 8192.0).double()
    assert float(model.product(one, one, many, model.BITS)) == 8193
    assert float(model.product(one, one, 2 * many, model.BITS)) == 16384
    assert float(model.product(one, -one, 2 * many, model.BITS)) == 16384  # cut off, not rounded
    assert float(model.product(one, one, 2 * many, None)) == 16385
    left, right = torch.randn(3, 70).to(E4M3).double(), torch.randn(70, 5).to(E4M3).double()
    found = model.product(left, right, torch.zeros(3, 5).double(), 40)
    torch.testing.assert_close(found, left @ right, atol=1e-9, rtol=1e-9)


def test_two_level_accumulation_keeps_what_long_sums_lose() -> None:
    torch.manual_seed(0)
    query = torch.zeros(1, 32)  # all weights are alike
    key, value = torch.randn(16384, 32).to(E4M3), torch.rand(16384, 8).to(E4M3)
    exact = value.double().mean(0)
    errors = {
        tiles: float((model.attention(query, key, value, 1.0, sums)[0] - exact).abs().max())
        for tiles, sums in ((0, model.Sums()), (4, model.Sums(tiles=4)))
    }
    assert errors[4] < 2e-3 < 10 * errors[4] < errors[0]
