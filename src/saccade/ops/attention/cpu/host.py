"""Attention on the CPU: plan, visit the rectangles that are visible, merge.

A plan gives every tile of query rows the runs of keys that it sees. Each run is one rectangle,
computed by PyTorch's flash kernel where nothing changes the scores (`flash_tile.py`), else in plain
tiles (`dense_tile.py`). Partial results merge by their lse; gradients add up. Nothing here has the
size query_len x kv_len.

Both inner paths first compute as if all numbers were finite. NaN or inf in a hidden row would
show in the result (0 · NaN is NaN), so a result that is not finite is computed again NaN-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.ops.attention.cpu import backward as attention_backward
from saccade.ops.attention.cpu import forward as attention_forward
from saccade.ops.attention.cpu.segments import DenseProblem, Segment, clear_padding, parts_of
from saccade.runtime.spec import (
    Gradients,
    Inputs,
    KernelConfig,
    Variant,
    empty_gradients,
    empty_results,
    heads_inside,
)
from saccade.runtime.validation import computed_without


@computed_without
def forward(inputs: Inputs, variant: Variant, config: KernelConfig) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention`."""
    wide, parts = _widen_half(inputs), parts_of(inputs)
    if inputs.cu_seqlens_q is None:
        output, lse = attention_forward.attend(DenseProblem.of(parts[0], wide, variant, config))
        return _laid_out(output, inputs.query, heads_inside(inputs.query)), lse.contiguous()
    output, lse = empty_results(inputs)
    clear_padding(inputs.cu_seqlens_q, output)
    clear_padding(inputs.cu_seqlens_q, lse, dim=1, number=-torch.inf)
    for part in parts:
        of_part = attention_forward.attend(DenseProblem.of(part, wide, variant, config))
        part.queries(output).copy_(of_part[0])
        part.lse(lse).copy_(of_part[1])
    return output, lse


def prepared(
    inputs: Inputs, variant: Variant, config: KernelConfig
) -> Callable[[Inputs, Variant], tuple[Tensor, Tensor]]:
    """The forward pass for calls like this one; on a CPU nothing is worth preparing."""
    return lambda inputs, variant: forward(inputs, variant, config)


@computed_without
def backward(
    inputs: Inputs,
    variant: Variant,
    config: KernelConfig,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    wanted_tables: Sequence[int],
    deterministic: bool,
) -> Gradients:
    """Gradients of the inputs, and of the wanted tensors that the score captured.

    They are the same from run to run, asked for or not (`deterministic`).
    """
    wide = _widen_half(inputs)

    def differentiate(part: Segment) -> attention_backward.DenseGradients:
        dense = DenseProblem.of(part, wide, variant, config)
        results = attention_backward.Results(
            part.queries(output).to(dense.query.dtype),
            part.lse(lse),
            part.queries(grad_output).to(dense.query.dtype),
            None if grad_lse is None else part.lse(grad_lse),
        )
        return attention_backward.differentiate(dense, results, wanted_tables)

    parts = parts_of(inputs)
    if inputs.cu_seqlens_q is None:
        found = differentiate(parts[0])
        query, key, value = (
            _laid_out(gradient, like, True)
            for gradient, like in zip(found[:3], inputs[:3], strict=True)
        )
        return Gradients(query, key, value, *_shared_sums(inputs, variant, [found], wanted_tables))
    gradients, sums = empty_gradients(inputs), []
    clear_padding(inputs.cu_seqlens_q, gradients.query)
    clear_padding(inputs.cu_seqlens_k, gradients.key, gradients.value)
    for part in parts:
        found = differentiate(part)
        part.queries(gradients.query).copy_(found.query)
        part.keys(gradients.key).copy_(found.key)
        part.keys(gradients.value).copy_(found.value)
        sums.append(found)
    sinks, tables = _shared_sums(inputs, variant, sums, wanted_tables)
    return gradients._replace(sinks=sinks, tables=tables)


def _laid_out(rows: Tensor, like: Tensor, heads_are_inside: bool) -> Tensor:
    """A result in the dtype and memory order that the operator promises; no copy if it has them."""
    rows = rows.to(like.dtype)
    if heads_are_inside:
        return rows.transpose(1, 2).contiguous().transpose(1, 2)
    return rows.contiguous()


def _widen_half(inputs: Inputs) -> Inputs:
    """float16 as float32, which is more exact, and spares PyTorch's slow float16 products."""
    if inputs.query.dtype != torch.float16:
        return inputs
    query, key, value = inputs.query.float(), inputs.key.float(), inputs.value.float()
    return inputs._replace(query=query, key=key, value=value)


def _shared_sums(
    inputs: Inputs,
    variant: Variant,
    parts: Sequence[attention_backward.DenseGradients],
    wanted_tables: Sequence[int],
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """The gradients of what all parts share: sinks and captured tensors."""
    sinks = inputs.sinks
    if sinks is not None:
        sinks = _total(sinks, [part.sinks for part in parts if part.sinks is not None])
    captured = variant.score_captured.tensors
    tables = {
        pair_block: _total(captured[pair_block], [part.tables[pair_block] for part in parts])
        for pair_block in wanted_tables
    }
    return sinks, tables


def _total(like: Tensor, contributions: Sequence[Tensor]) -> Tensor:
    """The sum of contributions, in the dtype of what it is the gradient of."""
    if not contributions:
        return torch.zeros_like(like)
    return torch.stack(list(contributions)).sum(0).to(like.dtype)
