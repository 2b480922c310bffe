"""The operator of attention and of its gradient; `runtime/custom_op.py` says how they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.modifiers.expression import Captured, num_captured
from saccade.runtime.backends import module_of
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.custom_op import Arguments, Gradient, Operation
from saccade.runtime.spec import (
    Gradients,
    Inputs,
    KernelConfig,
    Variant,
    empty_gradients,
    empty_results,
)

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor[] tables"
)
MODIFIERS = "SymInt[] ints, float[] floats, str mask, str score, float scale, float dropout_p"
PLAIN_VALUES = f"{MODIFIERS}, int[] config, bool deterministic, str forward_by, str backward_by"
MASK, CONFIG, DETERMINISTIC, FORWARD_BY, BACKWARD_BY = 2, 6, 7, 8, 9  # among the plain values
NOTHING = Captured()
DEFAULT_CONFIG = KernelConfig()  # tiles of the backend's own choice


# ---- plain values there and back --------------------------------------------------------------


def modifier_values(variant: Variant, config: KernelConfig | None) -> tuple[Any, ...]:
    """MODIFIERS and the config of a call, as plain values."""
    captured = variant.mask_captured.joined(variant.score_captured)
    return (
        list(captured.ints),
        list(captured.floats),
        variant.mask,
        variant.score,
        variant.scale,
        variant.dropout_p,
        [] if config is None else config.numbers(),
    )


def flatten(checked: CheckedCall, deterministic: bool) -> tuple[Any, ...]:
    """PLAIN_VALUES of a call."""
    chosen = checked.forward_by, checked.backward_by
    return (*modifier_values(checked.variant, checked.config), deterministic, *chosen)


def variant_of(tables: Sequence[Tensor], plain: Sequence[Any]) -> Variant:
    """The variant that tables and plain values stand for."""
    ints, floats, mask, score, scale, dropout_p = plain[:6]
    if not (tables or ints or floats):
        return Variant(mask, score, NOTHING, NOTHING, scale, dropout_p)
    t, i, f = num_captured(mask)
    return Variant(
        mask,
        score,
        Captured(tables[:t], ints[:i], floats[:f]),
        Captured(tables[t:], ints[i:], floats[f:]),
        scale,
        dropout_p,
    )


def config_of(plain: Sequence[Any]) -> KernelConfig:
    """The config that plain values stand for."""
    return KernelConfig.of_numbers(plain[CONFIG]) if plain[CONFIG] else DEFAULT_CONFIG


# ---- the forward pass -------------------------------------------------------------------------


def _prepare(
    inputs: Inputs, checked: CheckedCall
) -> Callable[[Inputs, Variant], tuple[Tensor, Tensor]]:
    module = module_of("attention", checked.forward_by)
    return module.prepared(inputs, checked.variant, checked.config or DEFAULT_CONFIG)


def _run(arguments: Arguments) -> tuple[Tensor, Tensor]:
    inputs, tables, plain = arguments
    module = module_of("attention", plain[FORWARD_BY])
    return module.forward(inputs, variant_of(tables, plain), config_of(plain))


# ---- the backward pass ------------------------------------------------------------------------


def _run_backward(
    arguments: Arguments,
    results: Sequence[Tensor | None],
    wanted: Sequence[int],
    variant: Variant,
) -> list[Tensor]:
    """Gradients of query, key and value, of sinks where there are any, of the wanted tables."""
    inputs, _, plain = arguments
    grad_output, grad_lse, output, lse = results
    assert output is not None and lse is not None
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    if wanted:
        first = _num_mask_tables(plain)
        wanted = [position - first for position in wanted]
    gradients = module_of("attention", plain[BACKWARD_BY], "backward").backward(
        inputs, variant, config_of(plain), output, lse, grad_output, grad_lse, wanted,
        plain[DETERMINISTIC],
    )  # fmt: skip
    return _listed(gradients, wanted)


def _listed(gradients: Gradients, wanted: Sequence[int]) -> list[Tensor]:
    listed = [gradients.query, gradients.key, gradients.value]
    if gradients.sinks is not None:
        listed.append(gradients.sinks)
    return listed + [gradients.tables[position] for position in wanted]


def _empty_backward(arguments: Arguments, wanted: Sequence[int]) -> list[Tensor]:
    found = {position: torch.empty_like(arguments.tables[position]) for position in wanted}
    return _listed(empty_gradients(arguments.inputs)._replace(tables=found), wanted)


def _wanted(tables: Sequence[Any], plain: Sequence[Any]) -> list[int]:
    """The score's tables whose gradients may be asked for."""
    first = _num_mask_tables(plain)
    return [
        position
        for position, table in enumerate(tables)
        if position >= first and table.is_floating_point() and table.requires_grad
    ]


def _num_mask_tables(plain: Sequence[Any]) -> int:
    """How many of the tables belong to the mask; the score's follow."""
    return num_captured(plain[MASK])[0]


ATTENTION = Operation(
    "attention",
    Inputs,
    TENSORS,
    PLAIN_VALUES,
    num_results=2,
    variant_of=variant_of,
    flatten=flatten,
    prepare=_prepare,
    run=_run,
    empty=lambda arguments: empty_results(arguments.inputs),
    gradient=Gradient(
        schema="Tensor? grad_output, Tensor? grad_lse, Tensor output, Tensor lse",
        results=(0, 1),
        kept=(0, 1),
        inputs=(0, 1, 2, 3),
        run=_run_backward,
        empty=_empty_backward,
        wanted=_wanted,
    ),
)
