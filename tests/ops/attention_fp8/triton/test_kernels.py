"""fp8 attention by Triton kernels, interpreted: bits of e4m3 by hand, products in float16.

What a GPU's own conversions and products give is measured there (`tools/fp8_gpu.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from fp8_cases import assert_close, expected, make_case
from torch import Tensor

import saccade
from saccade import masks, scores
from saccade.gpu import language
from saccade.ops.attention_fp8 import quantise
from saccade.ops.attention_fp8.triton import configs, host
from saccade.ops.attention_fp8.validation import Fp8Options, prepare
from saccade.runtime.spec import KernelConfig
from saccade.testing import poisoned

interpreted = pytest.mark.skipif(
    not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
)
SMALL = KernelConfig(query_tile=64, kv_tile=32)
ONE = {"batch": 1, "heads": (1, 1)}
CASES: dict[str, dict[str, Any]] = {
    "one number": {"form": "number", "lengths": (20, 75), "dims": (24, 40), **ONE},
    "blocks, causal": {"form": "blocks", "lengths": (70, 150), "heads": (2, 1), "causal": True},
    "both sides": {
        "lengths": (70, 200), "mask": masks.causal() & masks.window(40), "form": "heads", **ONE,
    },
    "listed": {
        "lengths": (60, 100), "mask": masks.dense(torch.rand(60, 100) < 0.9), **ONE,
    },
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_rounds_as_the_model_does(name: str) -> None:
    case = make_case(**{"batch": 1, "dims": (32, 16), **CASES[name]})
    with poisoned():
        found = case.run("triton", config=SMALL)
    wanted = expected(case, 32)
    if name == "listed":  # its order is another, so weights are rounded by other maxima
        torch.testing.assert_close(found[1].double(), wanted[1], atol=1e-5, rtol=1e-6)
        assert float((found[0] - wanted[0]).square().mean().sqrt()) < 0.02
    else:
        assert_close(found, wanted, float(case.rows[2].float().abs().max()) * 1.5)


def quantised(packed: bool, mode: str, nonfinite: bool = False) -> tuple[Any, Any]:
    """What the kernels make of 16-bit rows, and what the definition makes of them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, dim) for heads, length, dim in ((2, 40, 48), (1, 140, 48))]
    rows = [torch.randn(shape, generator=generator) for shape in (*shapes, (1, 1, 140, 20))]
    rows[1] += 2  # a mean
    if nonfinite:
        for each in rows:
            each[0, 0, 20, 3], each[0, 0, 35, 5] = torch.nan, -torch.inf
    ends: Any = (None, None)
    if packed:
        rows = [each[0].transpose(0, 1).contiguous() for each in rows]
        ends = tuple(torch.tensor(e, dtype=torch.int32) for e in ([0, 10, 35], [0, 130, 135]))
    fp8 = Fp8Options(None, None, None, mode, True, True, None)
    query, key, value = (each.half() for each in rows)
    found = prepare(
        query, key, value, ends[0], ends[1], None, None, fp8=fp8, mask=None, score=None,
        scale=None, sinks=None, return_lse=True, config=None,
    )  # fmt: skip
    call = host.Fp8Call(found.inputs, found.variant, SMALL, found.quantisation)
    return call._quantised(found.inputs), quantise.quantised(found.inputs, found.quantisation)


@interpreted
@pytest.mark.parametrize(("packed", "mode"), [(False, "block"), (True, "head")])
def test_quantises_as_the_definition_does(packed: bool, mode: str) -> None:
    (inputs, shift), wanted = quantised(packed, mode)
    for name, end in (("query", 35), ("key", 135)):
        found, exact = getattr(inputs, name), getattr(wanted.inputs, name)
        if packed:
            found, exact = found[:end], exact[:end]
        differ = found.float() != exact.float()
        assert float(differ.float().mean()) < 1e-3  # sums in another order round otherwise
        torch.testing.assert_close(found.float(), exact.float(), atol=0.01, rtol=2.0**-3)
    for name in ("query_scale", "key_scale", "value_scale"):
        found, exact = getattr(inputs, name), getattr(wanted.inputs, name)
        used = exact > 1e-30 if packed else torch.ones_like(exact, dtype=torch.bool)
        torch.testing.assert_close(found[used], exact[used], atol=0, rtol=1e-6)
    end = 35 if packed else 40
    torch.testing.assert_close(
        shift[..., :end].double(), wanted.shift[..., :end], atol=1e-4, rtol=1e-5
    )
    tiles = inputs.value.float()  # [1, heads, blocks, value_dim, 128]
    if not packed:
        values = tiles.transpose(3, 4).flatten(2, 3)[:, :, :140]
        torch.testing.assert_close(values, wanted.inputs.value.float())
        assert not tiles[0, 0, 1, :, 12:].any()


@interpreted
def test_nonfinite_numbers_take_part_in_no_mean_and_no_scale() -> None:
    (inputs, shift), wanted = quantised(False, "block", nonfinite=True)
    for name in ("query", "key"):
        found, exact = (
            each.float() for each in (getattr(inputs, name), getattr(wanted.inputs, name))
        )
        hidden = exact.isnan()  # the definition multiplies all channels of a row, NaN · 0 included
        assert bool(hidden.any()) and not bool((found.isnan() & ~hidden).any())
        assert bool(found[..., [20, 35], :].isnan().any(-1)[0, 0].all())
        differ = (found != exact)[~hidden]
        assert float(differ.float().mean()) < 1e-3
    for name in ("query_scale", "key_scale", "value_scale"):
        found, exact = getattr(inputs, name), getattr(wanted.inputs, name)
        torch.testing.assert_close(found, exact, atol=0, rtol=1e-5)
    assert bool(shift.isfinite().all())
    tiles = inputs.value.float().transpose(3, 4).flatten(2, 3)[:, :, :140]
    torch.testing.assert_close(tiles, wanted.inputs.value.float(), equal_nan=True)


@interpreted
@pytest.mark.parametrize("mode", ["block", "head"])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("incoherent", [False, True])
def test_quantises_rows_of_any_size(incoherent: bool, smooth: bool, mode: str) -> None:
    """Rows times a power of two have the same numbers, and scales times it, where sums of keys,
    keys without their mean and what the transform mixes leave float32, too.

    Rows are of float32, as the interpreter multiplies bfloat16 wrongly.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 1, length, 32, generator=generator) for length in (20, 140, 140)]
    rows = [each.clamp(-1.98, 1.98) for each in rows]
    rows[1] = (rows[1] - 1).clamp_min(-1.98)  # a mean
    rows[1][:, :, 5] = 1.98
    fp8 = Fp8Options(None, None, None, mode, incoherent, smooth, None)

    def made(*powers: int) -> tuple[Any, Any]:
        query, key, value = (each.half() for each in rows)
        found = prepare(
            query, key, value, None, None, None, None, fp8=fp8, mask=None, score=None, scale=None,
            sinks=None, return_lse=True, config=None,
        )  # fmt: skip
        sized = [each * 2.0**power for each, power in zip(rows, powers, strict=True)]
        inputs = found.inputs._replace(query=sized[0], key=sized[1], value=sized[2])
        call = host.Fp8Call(inputs, found.variant, SMALL, found.quantisation)
        return call._quantised(inputs)

    wanted, of_wanted = made(0, 0, 0)
    for powers in ((127, -80, 127), (-80, 127, -100)):
        found, shift = made(*powers)
        for name, power in zip(("query", "key", "value"), powers, strict=True):
            numbers, exact = (getattr(each, name).float() for each in (found, wanted))
            assert torch.equal(numbers, exact)
            scales = [getattr(each, f"{name}_scale").double() for each in (found, wanted)]
            assert torch.equal(scales[0], scales[1] * 2.0**power)
        assert (shift is None) == (not smooth)
        if smooth:
            assert torch.equal(shift, of_wanted * 2.0 ** (powers[0] + powers[1]))


@interpreted
@pytest.mark.parametrize("mode", ["block", "head"])
def test_what_is_all_zeros_has_the_scale_1(mode: str) -> None:
    """As the smallest scale there is, next to others, it would be far from all of them."""
    torch.manual_seed(0)
    rows = [torch.randn(1, 2, 140, 32).half() for _ in range(3)]
    for each in rows:
        each[:, :, 128:] = 0
        each[:, 1] = 0
    fp8 = Fp8Options(None, None, None, mode, True, False, None)
    found = prepare(
        rows[0], rows[1], rows[2], None, None, None, None, fp8=fp8, mask=None, score=None,
        scale=None, sinks=None, return_lse=True, config=None,
    )  # fmt: skip
    call = host.Fp8Call(found.inputs, found.variant, SMALL, found.quantisation)
    made = call._quantised(found.inputs)[0], quantise.quantised(found.inputs, found.quantisation)[0]
    for inputs in made:
        for name in ("query_scale", "key_scale", "value_scale"):
            scale = getattr(inputs, name)
            assert bool((scale[:, 1] == 1).all()) and bool((scale[:, 0].flatten()[:1] < 1).all())
            if mode == "block":
                assert bool((scale[:, :, 1] == 1).all())


@interpreted
@pytest.mark.parametrize("incoherent", [False, True])
def test_queries_and_keys_have_launches_of_their_own(incoherent: bool) -> None:
    """Lengths and strides of one must not be taken for those of the other."""
    torch.manual_seed(0)
    rows = [torch.randn(1, 1, length, 32).half() for length in (20, 140, 140)]
    fp8 = Fp8Options(None, None, None, "block", incoherent, False, None)
    found = prepare(
        rows[0], rows[1], rows[2], None, None, None, None, fp8=fp8, mask=None, score=None,
        scale=None, sinks=None, return_lse=True, config=None,
    )  # fmt: skip
    call = host.Fp8Call(found.inputs, found.variant, SMALL, found.quantisation)
    inputs, shift = call._quantised(found.inputs)
    assert len(call.steps) == 3 and shift is None  # values, keys, queries
    wanted = quantise.quantised(found.inputs, found.quantisation).inputs
    for name in ("query", "key"):
        differ = getattr(inputs, name).float() != getattr(wanted, name).float()
        assert float(differ.float().mean()) < 1e-3


@interpreted
def test_everything_of_a_packed_call_together() -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 3, 3, 40], dtype=torch.int32)
    rows = [torch.randn(45, heads, 32).half() for heads in (2, 1, 1)]
    options: dict[str, Any] = {
        "causal": True, "sinks": torch.tensor([3.0, -1.0]), "score": scores.softcap(4.0),
        "return_lse": True,
    }  # fmt: skip
    call: Any = saccade.attention_fp8_varlen
    with poisoned():
        found = call(*rows, ends, implementation="triton", config=SMALL, **options)
    wanted = call(*rows, ends, implementation="cpu", **options)
    torch.testing.assert_close(found[1], wanted[1], atol=0.02, rtol=0)
    assert float((found[0] - wanted[0]).float().square().mean().sqrt()) < 3e-3
    assert not found[0][40:].any() and bool((found[1][:, 40:] == -torch.inf).all())


@interpreted
def test_what_is_hidden_cannot_leak() -> None:
    case = make_case(
        lengths=(20, 70), mask=masks.key_lengths(torch.tensor([40])), dims=(32, 16), **ONE
    )
    rows: list[Tensor] = [rows.clone() for rows in case.rows]
    wanted = saccade.attention_fp8(*rows, **case.options, implementation="triton", config=SMALL)
    for tensor in rows[1:]:
        tensor[:, :, 40:] = torch.nan
    found = saccade.attention_fp8(*rows, **case.options, implementation="triton", config=SMALL)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)
    rows[0][:, :, 3] = torch.nan
    found = saccade.attention_fp8(*rows, **case.options, implementation="triton", config=SMALL)
    seen = found.isnan().all(-1)
    assert bool(seen[..., 3].all()) and int(seen.sum()) == 1


@interpreted
@pytest.mark.parametrize("lengths", [(0, 4), (4, 0)], ids=str)
def test_zero_sized_dimensions(lengths: tuple[int, int]) -> None:
    case = make_case(lengths=lengths, **ONE)
    rows = [rows.half() for rows in case.rows]
    output, lse = saccade.attention_fp8(*rows, return_lse=True, implementation="triton")
    assert not output.any() and bool((lse == -torch.inf).all())


def test_configs() -> None:
    for architecture in configs.ARCHITECTURES:
        for width in (32, 64, 128, 256):
            found = configs.choose(architecture, width, KernelConfig())
            assert max(found.query_tile, found.kv_tile) <= 128 and found.kv_tile >= 32
    for refused, what in (
        (KernelConfig(query_tile=256), "query_tile: got 256"),
        (KernelConfig(kv_tile=16), "kv_tile: got 16"),
    ):
        with pytest.raises(ValueError, match=f"{what}, takes a power of two"):
            configs.choose("sm_90", 128, refused)
