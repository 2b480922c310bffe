"""Attention on the CPU: plan, visit the rectangles that are visible, merge.

A plan gives every tile of query rows the runs of keys that it sees. Each run is one rectangle,
computed by PyTorch's flash kernel where nothing changes the scores (`flash.py`), else in plain
tiles (`tile.py`). Partial results merge by their lse; gradients add up. Nothing here has the size
query_len x kv_len.

Both inner paths first compute as if all numbers were finite. NaN or inf in a hidden row would
show in the result (0 · NaN is NaN), so a result that is not finite is computed again with care.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.cpu import backward as backwards
from saccade.cpu import forward as forwards
from saccade.cpu.parts import Part, parts_of
from saccade.cpu.walk import Dense
from saccade.problem import Config, Gradients, Inputs, Variant, empty_gradients, empty_results


def forward(inputs: Inputs, variant: Variant, config: Config) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention`."""
    wide, parts = _widen_half(inputs), parts_of(inputs)
    output, lse = empty_results(inputs)
    for part in parts:
        of_part = forwards.attend(Dense.of(part, wide, variant, config))
        if _is_the_result(of_part[0], output, part):
            output = of_part[0]
        else:
            part.queries(output).copy_(of_part[0])
        part.lse(lse).copy_(of_part[1])
    return output, lse


def backward(
    inputs: Inputs,
    variant: Variant,
    config: Config,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    wanted_tables: Sequence[int],
) -> Gradients:
    """Gradients of the inputs, and of the wanted tensors that the score captured."""
    wide, parts = _widen_half(inputs), parts_of(inputs)
    gradients = empty_gradients(inputs)
    sums: list[tuple[Tensor | None, dict[int, Tensor]]] = []
    for part in parts:
        dense = Dense.of(part, wide, variant, config)
        results = backwards.Results(
            part.queries(output).to(dense.query.dtype),
            part.lse(lse),
            part.queries(grad_output).to(dense.query.dtype),
            None if grad_lse is None else part.lse(grad_lse),
        )
        of_part = backwards.differentiate(dense, results, wanted_tables)
        gradients = _stored(gradients, of_part, part)
        sums.append((of_part.sinks, of_part.tables))
    return _with_sums(gradients, inputs, variant, sums, wanted_tables)


def _widen_half(inputs: Inputs) -> Inputs:
    """float16 as float32: on a CPU that is both faster (6 times, backward) and more exact."""
    if inputs.query.dtype != torch.float16:
        return inputs
    query, key, value = inputs.query.float(), inputs.key.float(), inputs.value.float()
    return inputs._replace(query=query, key=key, value=value)


def _is_the_result(candidate: Tensor, memory: Tensor, part: Part) -> bool:
    """Whether a part's result can be handed on as it is, instead of copied into memory."""
    alike = candidate.dtype == memory.dtype and candidate.stride() == memory.stride()
    return part.query_tokens is None and alike


def _stored(gradients: Gradients, of_part: backwards.DenseGradients, part: Part) -> Gradients:
    """The gradients with a part's rows filled in."""
    stored: list[Tensor] = []
    for name in ("query", "key", "value"):
        memory, computed = getattr(gradients, name), getattr(of_part, name)
        if _is_the_result(computed, memory, part):
            memory = computed
        else:
            (part.queries if name == "query" else part.keys)(memory).copy_(computed)
        stored.append(memory)
    query, key, value = stored
    return gradients._replace(query=query, key=key, value=value)


def _with_sums(
    gradients: Gradients,
    inputs: Inputs,
    variant: Variant,
    sums: Sequence[tuple[Tensor | None, dict[int, Tensor]]],
    wanted_tables: Sequence[int],
) -> Gradients:
    """Add up what all parts share: sinks and captured tensors."""
    sinks = inputs.sinks
    if sinks is not None:
        sinks = _total(sinks, [of_part for of_part, _ in sums if of_part is not None])
    tables = {
        index: _total(
            variant.score_captured.tensors[index], [of_part[index] for _, of_part in sums]
        )
        for index in wanted_tables
    }
    return gradients._replace(sinks=sinks, tables=tables)


def _total(like: Tensor, shares: Sequence[Tensor]) -> Tensor:
    """The sum of shares, in the dtype of what it is the gradient of."""
    if not shares:
        return torch.zeros_like(like)
    return torch.stack(list(shares)).sum(0).to(like.dtype)
