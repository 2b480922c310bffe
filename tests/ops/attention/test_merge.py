"""Attention over parts of the keys, merged, is attention over all of them."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade.ops.attention.merge import merged

Parts = tuple[list[torch.Tensor], list[torch.Tensor]]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> Any:
    return saccade.attention(query, key, value, return_lse=True, implementation="reference", **more)


def in_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int]) -> Parts:
    """Results over the keys between neighbouring ends; equal ends make an empty part."""
    results = [
        attend(query, key[:, :, start:stop], value[:, :, start:stop])
        for start, stop in itertools.pairwise(ends)
    ]
    return [output for output, _ in results], [lse for _, lse in results]


@st.composite
def splits(draw: Any) -> tuple[int, list[int]]:
    """A number of keys, and where it is cut: anywhere, any number of times, also at one place."""
    keys = draw(st.integers(0, 12))
    cuts = draw(st.lists(st.integers(0, keys), max_size=5))
    return keys, [0, *sorted(cuts), keys]


@settings(deadline=None, max_examples=80, derandomize=True)
@given(splits(), st.integers(0, 5), st.booleans(), st.floats(0.1, 300))
def test_parts_merge_to_the_whole(split, rows, stacked, spread):
    keys, ends = split
    query, key = spread * normal(2, 4, rows, 8), normal(2, 2, keys, 8, seed=1)
    value = normal(2, 2, keys, 3, seed=2)
    parts: Any = in_parts(query, key, value, ends)
    if stacked:
        parts = [torch.stack(part) for part in parts]
    output, lse = saccade.merge_states(*parts)
    wanted, wanted_lse = attend(query, key, value)
    torch.testing.assert_close(output, wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_merges_within_rounding(dtype):
    query, key = normal(2, 4, 6, 8, dtype=dtype), normal(2, 2, 12, 8, seed=1, dtype=dtype)
    value = normal(2, 2, 12, 3, seed=2, dtype=dtype)
    outputs, lses = in_parts(query, key, value, [0, 3, 3, 10, 12])
    output, lse = saccade.merge_states(outputs, lses)
    wanted, wanted_lse = attend(query.double(), key.double(), value.double())
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)
    # Each part was rounded once, and so was their sum.
    unit = torch.finfo(dtype).eps / 2
    slack = 1e-6 + 2 * unit * float(torch.stack(outputs).abs().double().amax(1).sum(0).amax())
    assert float((output.double() - wanted).abs().max()) <= slack
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_wide_whatever_the_dtype_of_the_parts(dtype):
    """One hundred parts of equal weight: sums in bfloat16 would lose the last digits."""
    outputs = [torch.full((1, 1, 1, 1), 1 + k / 128).to(dtype) for k in range(100)]
    lses = [torch.zeros(1, 1, 1)] * 100
    output, lse = saccade.merge_states(outputs, lses)
    wanted = torch.stack(outputs).double().mean().to(dtype)
    assert float(lse) == pytest.approx(4.605170185988092, rel=1e-6)
    assert float(output) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("trash", [torch.nan, torch.inf, -torch.inf])
def test_output_of_a_part_that_saw_nothing_is_not_read(trash):
    outputs = [normal(1, 2, 3, 4, seed=k) for k in range(3)]
    lses = [normal(1, 2, 3, seed=k) for k in range(3)]
    lses[1][:, 0], lses[1][:, 1, 1] = -torch.inf, -torch.inf
    clean = saccade.merge_states(outputs, lses)
    outputs[1] = outputs[1].masked_fill(lses[1][..., None] == -torch.inf, trash)
    inputs = [part.requires_grad_() for part in (*outputs, *lses)]
    found = saccade.merge_states(inputs[:3], inputs[3:])
    torch.testing.assert_close(found, clean, rtol=0, atol=0)
    for gradient in torch.autograd.grad([part.sum() for part in found], inputs):
        assert gradient.isfinite().all()
    nothing = outputs[1].detach()[:, :1], lses[1].detach()[:, :1]
    output, lse = saccade.merge_states([nothing[0]] * 2, [nothing[1]] * 2)
    assert torch.equal(output, torch.zeros(1, 1, 3, 4, dtype=torch.float64))
    assert torch.equal(lse, torch.full((1, 1, 3), -torch.inf, dtype=torch.float64))


def test_one_part_is_the_result():
    output, lse = normal(2, 3, 4, 5), normal(2, 3, 4)
    found = saccade.merge_states([output], [lse])
    torch.testing.assert_close(found, (output, lse), rtol=1e-15, atol=1e-15)


def test_huge_log_sum_exps_do_not_overflow():
    outputs, lses = [normal(1, 1, 2, 3, seed=k) for k in range(2)], torch.zeros(2, 1, 1, 2).double()
    lses[0], lses[1] = 1e6, 1e6 - 1
    output, lse = saccade.merge_states(outputs, list(lses))
    share = torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(output, share * outputs[0] + (1 - share) * outputs[1])
    torch.testing.assert_close(lse, torch.full((1, 1, 2), 1e6, dtype=torch.float64) - share.log())


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed):
    shape = (5, 2, 3) if packed else (2, 2, 3, 3)
    rows = shape[1::-1] if packed else shape[:-1]
    outputs = [normal(*shape, seed=k).requires_grad_() for k in range(3)]
    lses = [normal(*rows, seed=k + 3) for k in range(3)]
    lses[0][..., 0] = -torch.inf

    def merged(*inputs: torch.Tensor) -> Any:
        # gradcheck moves its inputs a little, which -inf cannot be.
        filled = [inputs[3].masked_fill(lses[0] == -torch.inf, -torch.inf), *inputs[4:]]
        return saccade.merge_states(inputs[:3], filled)

    finite = [lse.masked_fill(lse == -torch.inf, 0).requires_grad_() for lse in lses]
    assert torch.autograd.gradcheck(merged, (*outputs, *finite))
    assert torch.autograd.gradgradcheck(merged, (*outputs, *finite))


def test_gradients_of_attention_pass_through_merge():
    inputs = [normal(1, 2, n, 4, seed=n).requires_grad_() for n in (3, 9, 9)]

    def whole() -> Any:
        return attend(*inputs)

    def merged() -> Any:
        return saccade.merge_states(*in_parts(inputs[0], inputs[1], inputs[2], [0, 4, 4, 9]))

    found = []
    for call in (whole, merged):
        output, lse = call()
        loss = (output * normal(1, 2, 3, 4)).sum() + (lse * normal(1, 2, 3)).sum()
        found.append(torch.autograd.grad(loss, inputs))
    torch.testing.assert_close(found[1], found[0])


def test_packed_parts_merge_to_the_whole():
    """Keys beyond and before a limit that differs from sequence to sequence, tokens first."""
    counts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    kv_counts = torch.tensor([0, 6, 8, 15], dtype=torch.int32)
    query, key, value = normal(8, 4, 8), normal(15, 2, 8, seed=1), normal(15, 2, 5, seed=2)
    first = saccade.masks.key_lengths(torch.tensor([2, 1, 7]))

    def call(**more: Any) -> Any:
        return saccade.attention_varlen(
            query, key, value, counts, kv_counts, return_lse=True, **more
        )

    outputs, lses = zip(call(mask=first), call(mask=~first), strict=True)
    found, wanted = saccade.merge_states(outputs, lses), call()
    assert found[0].shape == (8, 4, 5)
    assert found[1].shape == (4, 8)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_sink_belongs_to_one_part():
    query, key, value = normal(1, 2, 3, 4), normal(1, 2, 9, 4, seed=1), normal(1, 2, 9, 4, seed=2)
    sinks = normal(2, seed=3)
    parts = [
        attend(query, key[:, :, :5], value[:, :, :5], sinks=sinks),
        attend(query, key[:, :, 5:], value[:, :, 5:]),
    ]
    found = saccade.merge_states(*zip(*parts, strict=True))
    torch.testing.assert_close(found, attend(query, key, value, sinks=sinks), rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [-1e9, 1e6, torch.finfo(torch.float32).min, 0.0])
@pytest.mark.parametrize("apart", [0.0, 300.0])
def test_what_rounding_took_is_merged(size: float, apart: float) -> None:
    """Parts of so many keys of one score, which the lse does not tell; apart: how far it is off, as
    where a score came out otherwise when its sum was computed."""
    counts = torch.tensor([3.0, 5.0, 0.0, 11.0], dtype=torch.float64)
    score = torch.tensor(size, dtype=torch.float32).double()
    lses = (score - apart).float().expand(4).where(counts > 0, -torch.inf)
    lost = (score - lses.double() + counts.log()).nan_to_num(0.0).float()
    outputs = torch.randn(4, 1, 7)
    output, lse, found = merged(outputs, lses[:, None], lost[:, None])
    assert found is not None
    weights = (counts / counts.sum()).view(4, 1, 1)
    rounding = 2.0**-23 * (apart + 4)  # of exponents, in the two sums that make them
    bound = 2 * rounding * (outputs.double().abs() * weights).sum(0) + 1e-6
    assert bool(((output.double() - (outputs.double() * weights).sum(0)).abs() <= bound).all())
    log_sum = lse.double() - score + found.double()
    assert float((log_sum - counts.sum().log()).abs()) <= 2 * rounding
