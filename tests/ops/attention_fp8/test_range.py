"""fp8 attention at the ends of float32's range: what is finite there is right, or refused by name.

Powers of two change no digit: rows times one, and scales or the factor of the scores times its
inverse, give what rows of size 1 give.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_cases import Case, make_case, visible_pairs
from torch import Tensor

import saccade
from saccade import masks
from saccade.gpu import language
from saccade.runtime.arguments import (
    LARGEST_FACTOR,
    LARGEST_PRODUCT,
    LARGEST_VALUE_FACTOR,
    SMALLEST_FACTOR,
)

IMPLEMENTATIONS = ["cpu", "reference"]
INTERPRETED = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
    ),
)
LARGEST = torch.finfo(torch.float32).max
LOG2_E = 1.4426950408889634
call: Any = saccade.attention_fp8


def rows_of_16_bits(kv_len: int = 300) -> list[Tensor]:
    """Rows below 2, so that 2^127 times them is a number; keys have a mean of about -1."""
    generator = torch.Generator().manual_seed(0)
    lengths = 150, kv_len, kv_len
    query, key, value = (torch.randn(1, 2, length, 64, generator=generator) for length in lengths)
    rows = query, key - 1, value
    return [each.clamp(-1.98, 1.98).bfloat16() for each in rows]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("quantize", ["block", "head", "tensor"])
def test_values_of_any_size(quantize: str, implementation: str) -> None:
    query, key, value = rows_of_16_bits()
    options: dict[str, Any] = {"quantize": quantize, "implementation": implementation}
    value[:, :, 140:] *= 2.0**-9  # a block, and most of another, far below the rest
    wanted = call(query, key, value, **options)
    for power in (2.0**127, 2.0**-100):
        assert torch.equal(call(query, key, value * power, **options) / power, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("incoherent", [False, True])
def test_queries_and_keys_of_any_size(incoherent: bool, smooth: bool, implementation: str) -> None:
    """Sums of keys, keys without their mean and rows that the Hadamard transform mixed leave
    float32 here."""
    query, key, value = rows_of_16_bits()
    options: dict[str, Any] = {
        "incoherent": incoherent, "smooth": smooth, "implementation": implementation,
        "return_lse": True,
    }  # fmt: skip
    wanted = call(query, key, value, scale=0.25, **options)
    assert bool(torch.stack([each.isfinite().all() for each in wanted]).all())
    for of_query, of_key in ((127, -109), (-109, 127), (127, -37), (-37, 127)):
        scale = 0.25 * 2.0 ** -(of_query + of_key)
        found = call(query * 2.0**of_query, key * 2.0**of_key, value, scale=scale, **options)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_smoothing_takes_may_leave_float32_before_the_scale(implementation: str) -> None:
    query, key, value = rows_of_16_bits()
    options: dict[str, Any] = {"implementation": implementation, "return_lse": True}
    wanted = call(query, key, value, scale=2.0**36, **options)
    found = call(query * 2.0**90, key * 2.0**45, value, scale=2.0**-99, **options)
    assert bool(wanted[1].isfinite().all())
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


# ---- scales that are given -----------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, INTERPRETED])
@pytest.mark.parametrize("form", ["number", "heads", "blocks"])
def test_scales_of_values_up_to_the_limits(form: str, implementation: str) -> None:
    case = make_case(form, (140, 300), dims=(32, 32))
    scale = torch.ones_like(case.scales["value_scale"])
    query, key, value = case.rows
    value = (value.float() * 64).to(value.dtype)  # up to some 250

    def run(size: float) -> Tensor:
        options: dict[str, Any] = {"implementation": implementation, "causal": True}
        return call(query, key, value, value_scale=scale * size, **options).double() / size

    wanted = run(1.0)
    assert torch.equal(run(2.0**118), wanted)
    # Outputs of a few times 2^-126 have few digits in bfloat16, and their sums in float32; the
    # interpreter makes those below 0.
    atol = 1.0 if implementation == "triton" else 2.0**-8
    torch.testing.assert_close(run(SMALLEST_FACTOR), wanted, atol=atol, rtol=2.0**-7)
    value = torch.full_like(value, 448)
    of_ones, largest = run(1.0), run(LARGEST_VALUE_FACTOR)
    torch.testing.assert_close(largest, of_ones, atol=0, rtol=2.0**-7)
    with pytest.raises(ValueError, match=r"value_scale: got 3\.7.*e.35, takes .* to 3\.78e\+35"):
        run(LARGEST_VALUE_FACTOR * 1.001)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, INTERPRETED])
def test_rounded_weights_may_double_the_largest_value(implementation: str) -> None:
    """Most of the weight is of keys whose weights are next above 2^-18, which become 2^-17."""
    query, key = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 2**18, 16)
    query[..., 0], key[:, :, -1, 0] = 1.0, 13.0
    score = 12.45  # e^-12.45 is 2^-17.96
    rows = [each.to(torch.float8_e4m3fn) for each in (query, key, torch.full_like(key, 448))]
    scales = {
        "query_scale": torch.tensor(score / 13.0),
        "value_scale": torch.tensor(LARGEST_VALUE_FACTOR * (1 - 2.0**-20)),
    }  # fmt: skip
    found = call(rows[0], rows[1], rows[2], **scales, scale=1.0, implementation=implementation)
    largest = 448 * LARGEST_VALUE_FACTOR
    assert bool(found.isfinite().all()) and bool((found.double() > 1.2 * largest).all())


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, INTERPRETED])
@pytest.mark.parametrize("mask", [None, masks.window(60)], ids=["all", "window"])
def test_scales_of_values_far_apart(mask: Any, implementation: str) -> None:
    """Rows that see one block of keys alone have its size, however small beside others."""
    case = make_case("blocks", (512, 512), mask=mask)
    most, least = (85.0, -85.0) if implementation == "triton" else (118.0, -100.0)
    powers = torch.tensor([0.0, most, least, 30.0])
    case.scales["value_scale"] = torch.exp2(powers).expand(2, 1, 4).contiguous()
    found = call(*case.rows, **case.scales, **case.options, implementation=implementation)
    query, key, value = case.rows
    of_value = case.scales["value_scale"].double().repeat_interleave(128, 2).unsqueeze(-1)
    query, key = (
        rows.double() * case.scales[name].double().repeat_interleave(128, 2).unsqueeze(-1)
        for rows, name in ((query, "query_scale"), (key, "key_scale"))
    )
    wanted, sizes = (
        saccade.attention(query, key, rows * of_value, **case.options, implementation="reference")
        for rows in (value.double(), value.double().abs())
    )
    # A weight is off by a sixteenth or, where it is small, by 2^-18; the output by 2^-9 of it.
    smallest = 2.0**-18 * case.rows[1].shape[2] * _largest_value(case)
    off = (found.double() - wanted).abs()
    assert bool((off <= (2.0**-4 + 2.0**-8) * sizes + smallest).all())
    if mask is not None:
        alone = found[:, :, 320:340].double().abs()  # they see keys of the third block alone
        assert bool((alone < 2.0 ** (least + 10)).all()) and bool((alone > 0).any())


def _largest_value(case: Case) -> Tensor:
    """The largest value that each query row sees, [batch, heads, rows, 1]."""
    scale = case.scales["value_scale"].repeat_interleave(128, 2).unsqueeze(-1)
    sizes = (case.rows[2].double().abs() * scale).amax(-1)  # [batch, kv_heads, keys]
    pairs, visible = sizes.unsqueeze(2), visible_pairs(case)
    if visible is not None:
        pairs = pairs.masked_fill(~visible, 0)
    return pairs.amax(-1, keepdim=True)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, INTERPRETED])
@pytest.mark.parametrize("given", [("query",), ("key",), ("query", "key")], ids="-".join)
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_the_largest_scores_that_are_taken(
    scale: float, given: tuple[str, ...], implementation: str
) -> None:
    """With all numbers 448 the row of keys with the same signs has all of the weight."""
    query, key, value = (torch.full((1, 1, rows, 32), 448.0) for rows in (3, 200, 200))
    key[:, :, 1:] *= -1
    value = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    rows = [each.to(torch.float8_e4m3fn) for each in (query, key, value)]
    limit = LARGEST / (LOG2_E * LARGEST_PRODUCT * 32 * scale)
    sizes = [min(limit ** (1 / len(given)), LARGEST_FACTOR) * (1 - 2.0**-20)] * len(given)
    options = {f"{name}_scale": torch.tensor(size) for name, size in zip(given, sizes, strict=True)}
    found, lse = call(*rows, **options, scale=scale, implementation=implementation, return_lse=True)
    wanted = rows[2][:, :, :1].bfloat16().expand_as(found)
    assert bool(lse.isfinite().all()) and torch.equal(found, wanted)
    if sizes[0] < 0.9 * LARGEST_FACTOR:
        options = {name: each * 1.01 for name, each in options.items()}
        with pytest.raises(ValueError, match=f"{given[0]}_scale: got up to .* makes scores of 32"):
            call(*rows, **options, scale=scale, implementation=implementation)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, INTERPRETED])
def test_small_scales_beside_large_ones(implementation: str) -> None:
    rows = make_case(lengths=(140, 150)).rows
    wanted = call(*rows, scale=0.25, implementation=implementation)
    for of_query, of_key, scale in ((-126, 119, 7), (119, -126, 7), (-126, 40, 86), (90, 0, -90)):
        scales = {
            "query_scale": torch.tensor(2.0**of_query), "key_scale": torch.tensor(2.0**of_key),
        }  # fmt: skip
        found = call(*rows, **scales, scale=0.25 * 2.0**scale, implementation=implementation)
        assert torch.equal(found, wanted)
