"""The operator of attention over pages; `runtime/custom_op.py` says how it is made.

It has no gradient. What writes and moves pages is a kernel for a kind of device, registered under
PyTorch's own dispatcher (`kv_cache/`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.ops.attention.custom_op import (
    DEFAULT_CONFIG,
    MODIFIERS,
    config_of,
    modifier_values,
    variant_of,
)
from saccade.runtime.backends import module_of
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.custom_op import Arguments, Operation, not_implemented
from saccade.runtime.spec import PagedInputs, Variant, empty_rows

BATCH_INVARIANT, FORWARD_BY = 7, 8  # among the plain values
NO_GRADIENT = "a gradient of attention over pages (call it under torch.no_grad())"


def _flatten(checked: CheckedCall, deterministic: bool) -> tuple[Any, ...]:
    values = modifier_values(checked.variant, checked.config)
    return (*values, checked.batch_invariant, checked.forward_by)


def _prepare(
    inputs: PagedInputs, checked: CheckedCall
) -> Callable[[PagedInputs, Variant], tuple[Tensor, Tensor]]:
    module = module_of("paged_attention", checked.forward_by)
    config = checked.config or DEFAULT_CONFIG
    return module.prepared(inputs, checked.variant, config, checked.batch_invariant)


def _run(arguments: Arguments) -> tuple[Tensor, Tensor]:
    inputs, tables, plain = arguments
    module = module_of("paged_attention", plain[FORWARD_BY])
    variant, config = variant_of(tables, plain), config_of(plain)
    return module.forward(inputs, variant, config, plain[BATCH_INVARIANT])


def _empty(arguments: Arguments) -> tuple[Tensor, Tensor]:
    inputs = arguments.inputs
    packed = inputs.cu_seqlens_q is not None
    return empty_rows(inputs.query, inputs.value_pages.shape[-1], packed)


PAGED = Operation(
    "attention_paged",
    PagedInputs,
    "Tensor query, Tensor key_pages, Tensor value_pages, Tensor page_table, Tensor kv_lens, "
    "Tensor? cu_seqlens_q, Tensor? sinks, Tensor? key_scales, Tensor? value_scales, "
    "Tensor[] tables",
    f"{MODIFIERS}, int[] config, bool batch_invariant, str forward_by",
    num_results=2,
    variant_of=variant_of,
    flatten=_flatten,
    prepare=_prepare,
    run=_run,
    empty=_empty,
    no_gradient=NO_GRADIENT,
)


def attention_paged(inputs: PagedInputs, checked: CheckedCall) -> tuple[Tensor, ...]:
    """Output and lse of a validated call; an error where a gradient may be asked for."""
    captured = checked.variant.score_captured.tensors
    tensors = (*inputs, *captured) if captured else inputs
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):
        raise not_implemented(checked.forward_by, NO_GRADIENT)
    return PAGED(inputs, checked)
