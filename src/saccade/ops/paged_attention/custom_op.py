"""Operators over pages: attention, writing and moving, as PyTorch knows them (`torch.library`).

Schemas hold tensors and plain values only, as in `ops/attention/custom_op.py`. Attention over pages
has one body an implementation, which eager calls reach past the operator where nobody listens to
it; what writes and moves pages is a kernel for a kind of device, registered under PyTorch's own
dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.ops.attention.autograd import mapped, table_dims
from saccade.ops.attention.custom_op import (
    EXACT_STRIDES,
    config_of,
    flatten,
    not_implemented,
    variant_of,
)
from saccade.runtime.backend_modules import paged_body_of
from saccade.runtime.call_cache import Recalled, nobody_listens
from saccade.runtime.spec import KernelConfig, PagedInputs, empty_rows

NUM_INPUTS = len(PagedInputs._fields)
IMPLEMENTATION = 8  # its place among the plain values

torch.library.define(
    "saccade::attention_paged",
    "(Tensor query, Tensor key_pages, Tensor value_pages, Tensor page_table, Tensor kv_lens, "
    "Tensor? cu_seqlens_q, Tensor? sinks, Tensor? key_scales, Tensor? value_scales, "
    "Tensor[] tables, SymInt[] ints, float[] floats, str mask, str score, float scale, "
    "float dropout_p, int[] config, bool batch_invariant, str implementation) "
    "-> (Tensor, Tensor)",
    tags=EXACT_STRIDES,
)
attention_paged_op = torch.ops.saccade.attention_paged.default


def attention_paged_through(
    inputs: PagedInputs, found: Recalled, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse by the operator, or where nobody listens to it by the body itself."""
    variant, captured = found.variant, found.variant.score_captured.tensors
    tensors = (*inputs, *captured) if captured else inputs
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):
        raise no_gradients(found.chosen)
    if torch.compiler.is_compiling() or not nobody_listens(tensors):
        tables, plain = flatten(variant, found.config, batch_invariant, found.chosen)
        return attention_paged_op(*inputs, tables, *plain)
    if found.forward is None:
        config = found.config or KernelConfig()
        body = paged_body_of(found.chosen)
        found.forward = body.prepared(inputs, variant, config, batch_invariant)
    return found.forward(inputs, variant)


def attention_paged_body(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run the named implementation; see `saccade.attention_paged`."""
    inputs, tables = PagedInputs(*arguments[:NUM_INPUTS]), arguments[NUM_INPUTS]
    plain = arguments[NUM_INPUTS + 1 :]
    body = paged_body_of(plain[IMPLEMENTATION])
    return body.forward(inputs, variant_of(tables, plain), config_of(plain), plain[7])


torch.library.impl("saccade::attention_paged", "CompositeExplicitAutograd", attention_paged_body)


@torch.library.register_fake("saccade::attention_paged")
def _attention_paged_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = PagedInputs(*arguments[:NUM_INPUTS])
    packed = inputs.cu_seqlens_q is not None
    return empty_rows(inputs.query, inputs.value_pages.shape[-1], packed)


def no_gradients(implementation: str) -> NotImplementedError:
    """The error for a gradient over pages."""
    return not_implemented(
        implementation, "a gradient of attention over pages (call it under torch.no_grad())"
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.implementation = inputs[-1]


def _backward(ctx: Any, *grads: Any) -> Any:
    raise no_gradients(ctx.implementation)


torch.library.register_autograd("saccade::attention_paged", _backward, setup_context=_setup)


def _vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    inputs, tables = arguments[:NUM_INPUTS], arguments[NUM_INPUTS]
    plain = arguments[NUM_INPUTS + 1 :]
    dims = (*in_dims[:NUM_INPUTS], *table_dims(in_dims[NUM_INPUTS], tables))

    def call(parts: Sequence[Any]) -> Any:
        return attention_paged_op(*parts[:NUM_INPUTS], list(parts[NUM_INPUTS:]), *plain)

    return mapped(info.batch_size, dims, (*inputs, *tables), call)


torch.library.register_vmap("saccade::attention_paged", _vmap)
