"""What fp8 attention refuses, and how PyTorch sees its operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from fp8_cases import make_case
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade import masks
from saccade.ops.attention_fp8 import custom_op
from saccade.ops.attention_fp8.validation import Fp8Options, prepare
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.fp8_spec import E4M3

call: Any = saccade.attention_fp8
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shape": ({"query_scale": torch.ones(3)}, ValueError, r"query_scale: got shape \(3,\)"),
    "blocks": ({"key_scale": torch.ones(2, 1, 3)}, ValueError, r"key_scale: .*\(2, 1, 2\)"),
    "dtype": ({"value_scale": torch.ones(()).half()}, TypeError, "value_scale: got torch.float16"),
    "device": ({"key_scale": torch.ones((), device="meta")}, ValueError, "key_scale: got meta"),
    "a number": ({"key_scale": 2.0}, TypeError, "key_scale: got float"),
    "0": ({"key_scale": torch.zeros(())}, ValueError, "key_scale: got 0.0"),
    "NaN": ({"key_scale": torch.tensor(torch.nan)}, ValueError, "key_scale: got nan"),
    "negative": ({"query_scale": -torch.ones(2, 2)}, ValueError, "query_scale: got -1.0"),
    "inf": ({"value_scale": torch.tensor(torch.inf)}, ValueError, "value_scale: got inf"),
    "too large": (
        {"query_scale": torch.tensor(3e38)},
        ValueError,
        "query_scale: got 3.*e.38, takes",
    ),
    "too small": (
        {"key_scale": torch.tensor(1e-44)},
        ValueError,
        "key_scale: got 9.8.*e-45, takes",
    ),
    "an infinite product": (
        {"query_scale": torch.tensor(1e20), "key_scale": torch.tensor(1e20)},
        ValueError,
        "query_scale: got up to 1e.20, which times key_scale, up to 1e.20",
    ),
    "quantize": ({"quantize": "row"}, ValueError, "quantize: got 'row', takes one of"),
    "smooth": ({"smooth": 1}, TypeError, "smooth: got 1, takes True or False"),
    "output": ({"out_dtype": torch.float32}, ValueError, "out_dtype: got torch.float32"),
    "dropout": ({"dropout_p": 0.5}, TypeError, "dropout_p: an unknown option"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name: str) -> None:
    options, kind, message = REFUSED[name]
    rows = make_case().rows
    with pytest.raises(kind, match=message):
        call(*rows, **options)
    if "unknown" not in message:
        with pytest.raises(kind, match=message):
            saccade.explain(call, *rows, **options)


def test_refuses_other_dtypes_scales_of_16_bits_and_gradients() -> None:
    rows = [rows.half() for rows in make_case().rows]
    with pytest.raises(
        TypeError, match=r"query: got torch\.float32, takes float8_e4m3fn, bfloat16"
    ):
        call(*[rows.float() for rows in rows])
    with pytest.raises(ValueError, match=r"key_scale: got a scale for torch\.float16"):
        call(*rows, key_scale=torch.ones(()))
    rows[0].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"gradient of fp8 .*saccade\.attention"):
        call(*rows)
    with torch.no_grad():
        assert call(*rows).dtype == torch.float16
    with pytest.raises(NotImplementedError, match="it takes tensors on a GPU"):
        call(*[rows.detach().to("meta") for rows in rows], implementation="triton")


@pytest.mark.parametrize(
    "option", [{"quantize": "block"}, {"incoherent": True}, {"smooth": False}], ids=str
)
def test_refuses_to_quantise_what_is_e4m3_already(option: dict[str, Any]) -> None:
    rows = make_case().rows
    (name,) = option
    for function in (call, saccade.explain):
        with pytest.raises(ValueError, match=f"{name}: got .* for torch.float8_e4m3fn, takes None"):
            function(*((call,) if function is saccade.explain else ()), *rows, **option)
    halves = [rows.half() for rows in rows]
    unasked, asked = (call(*halves, **more) for more in ({}, {"quantize": "block"}))
    assert torch.equal(unasked, asked)
    assert call(*halves, **option).isfinite().all()


@pytest.mark.parametrize("exponent", [-119, 40, 119])
def test_takes_scales_that_float32_holds(exponent: int) -> None:
    """What one scale does to the scores, the other undoes, exactly if they are powers of two."""
    rows = make_case().rows
    scales = [torch.tensor(2.0**power) for power in (exponent, -exponent)]
    found = call(*rows, query_scale=scales[0], key_scale=scales[1])
    assert torch.equal(found, call(*rows))


def test_refuses_a_scale_after_a_call_like_it() -> None:
    rows = make_case().rows
    call(*rows, key_scale=torch.tensor(2.0))
    with pytest.raises(ValueError, match="key_scale: got"):
        call(*rows, key_scale=torch.tensor(3e38))
    call(*rows, query_scale=torch.tensor(1e10), key_scale=torch.tensor(1e10))
    with pytest.raises(ValueError, match="query_scale: got up to"):
        call(*rows, query_scale=torch.tensor(1e20), key_scale=torch.tensor(1e20))


def test_queries_take_the_scales_of_key_heads() -> None:
    case = make_case("heads", heads=(4, 2))
    of_keys = case.scales["query_scale"][:, ::2].contiguous()
    repeated = of_keys.repeat_interleave(2, 1)
    found, wanted = (call(*case.rows, query_scale=scale) for scale in (of_keys, repeated))
    assert torch.equal(found, wanted)


def test_explains_and_counts() -> None:
    rows = make_case(lengths=(64, 64)).rows
    found = saccade.explain(call, *rows, causal=True)
    assert found.chosen == "cpu" and found.backward is None
    assert "fp8 attention: batch 2" in str(found) and "e4m3 rows" in str(found)
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    packed = torch.randn(3, 10, 2, 16).half()
    of_packed = saccade.explain(saccade.attention_fp8_varlen, *packed, ends, quantize="head")
    assert "a scale for each head" in str(of_packed)
    with FlopCounterMode(display=False) as counter:
        call(*rows)
    assert counter.get_total_flops() == 2 * 2 * 2 * 64 * 64 * (32 + 32)


def test_a_call_like_one_before_gives_the_same() -> None:
    rows = [rows.half() for rows in make_case().rows]
    first, second = (call(*rows, causal=True, return_lse=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert not torch.equal(call(*rows, causal=True, quantize="tensor"), first[0])


# ---- the operator --------------------------------------------------------------------------------


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Dynamo does not trace through jaxtyping's checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch._dynamo.reset()
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_opcheck(unchecked_shapes: None) -> None:
    query, key, value = (
        rows.half().transpose(1, 2).contiguous().transpose(1, 2) for rows in make_case().rows
    )
    fp8 = Fp8Options(None, None, None, "block", True, True, torch.bfloat16)
    mask = masks.key_lengths(torch.tensor([150, 20]))
    found = prepare(
        query, key, value, None, None, None, None, fp8=fp8, mask=mask, score=None, scale=None,
        sinks=torch.zeros(2), return_lse=True, config=None,
    )  # fmt: skip
    checked = CheckedCall(found.variant, None, "cpu", quantisation=found.quantisation)
    plain = custom_op._flatten(checked, False)
    arguments = *found.inputs, list(checked.tables), *plain
    torch.library.opcheck(custom_op.ATTENTION_FP8.op, arguments)
    output, _ = custom_op.ATTENTION_FP8.op(*arguments)
    assert output.dtype == torch.bfloat16 and output.transpose(1, 2).is_contiguous()


def test_compiles_in_one_graph(unchecked_shapes: None) -> None:
    case = make_case("blocks")

    def layer(*rows: Tensor) -> Tensor:
        return saccade.attention_fp8(*rows, **case.scales, causal=True) * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*case.rows), layer(*case.rows))
    assert case.rows[0].dtype == E4M3
