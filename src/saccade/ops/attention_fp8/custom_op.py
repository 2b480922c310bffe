"""The operator of fp8 attention, which has no gradient; see `runtime/custom_op.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from saccade.ops.attention.api import (
    DEFAULT_CONFIG,
    MODIFIERS,
    config_of,
    modified,
    modifier_values,
)
from saccade.runtime.backends import module_of
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.custom_op import Arguments, Operation, gradient_asked, not_implemented
from saccade.runtime.fp8_spec import Fp8Inputs, Quantisation, empty_fp8_results
from saccade.runtime.spec import Variant

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? query_scale, Tensor? key_scale, "
    "Tensor? value_scale, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor[] tables"
)
QUANTISATION = "str quantize, bool incoherent, bool smooth, ScalarType out_dtype"
FIRST, FORWARD_BY = 7, 11  # of QUANTISATION among the plain values, and behind it
NO_GRADIENT = "a gradient of fp8 attention"
INSTEAD = "call it under torch.no_grad(), or saccade.attention, which has gradients"


def _flatten(checked: CheckedCall, deterministic: bool) -> tuple[Any, ...]:
    values = modifier_values(checked.variant, checked.config)
    assert checked.quantisation is not None
    return (*values, *checked.quantisation, checked.forward_by)


def quantisation_of(plain: Sequence[Any]) -> Quantisation:
    """How a call's rows become e4m3 numbers, from its plain values."""
    return Quantisation(*plain[FIRST:FORWARD_BY])


def _prepare(
    inputs: Fp8Inputs, checked: CheckedCall
) -> Callable[[Fp8Inputs, Variant], tuple[Tensor, Tensor]]:
    module = module_of("attention_fp8", checked.forward_by)
    config = checked.config or DEFAULT_CONFIG
    return module.prepared(inputs, checked.variant, config, checked.quantisation)


def _run(arguments: Arguments) -> tuple[Tensor, Tensor]:
    inputs, tables, plain = arguments
    module = module_of("attention_fp8", plain[FORWARD_BY])
    variant, config = modified(tables, plain), config_of(plain)
    return module.forward(inputs, variant, config, quantisation_of(plain))


def _empty(arguments: Arguments) -> tuple[Tensor, Tensor]:
    return empty_fp8_results(arguments.inputs, quantisation_of(arguments.plain).dtype)


ATTENTION_FP8 = Operation(
    "attention_fp8",
    Fp8Inputs,
    TENSORS,
    f"{MODIFIERS}, int[] config, {QUANTISATION}, str forward_by",
    num_results=2,
    variant_of=modified,
    flatten=_flatten,
    prepare=_prepare,
    run=_run,
    empty=_empty,
    no_gradient=NO_GRADIENT,
    instead=INSTEAD,
)


def check_no_gradient(inputs: Fp8Inputs, checked: CheckedCall) -> None:
    """Refuse a call of which a gradient may be asked."""
    if gradient_asked(inputs, checked.variant):
        raise not_implemented(checked.forward_by, NO_GRADIENT, INSTEAD)
