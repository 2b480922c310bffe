"""What results are compared with: float64, for some rows of some heads of a case.

Gradients are those of an output whose gradient is zero in all other rows and heads, so that they
need no other rows either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.bench.case import BenchCase, Tensors

MOST_ROWS, MOST_HEADS, MOST_BATCHES = 48, 4, 2
# Of the delta rule gradients are compared that come from a sequence's first tokens: each pair in a
# chunk keeps a number for each channel.
GRADIENT_TOKENS = 1024
CHUNK = 16


class HeadGradient(NamedTuple):
    """A part of the gradient of one head of an input: what one head of the output adds to it.

    Attributes:
        name: of the gradient.
        of_input: which of a call's inputs it is of.
        head: which of that input's heads.
        rows: which of its rows, or all.
        part: [rows, ...].
        delta_slope: ‖grad_output ∘ output‖ · ‖∂gradient / ∂δ‖ of each row; 0 where it is not asked
            for.
    """

    name: str
    of_input: int
    head: int
    rows: Tensor | slice
    part: Tensor
    delta_slope: Tensor


@dataclass(frozen=True)
class Exact:
    """The result in float64 for some rows of one head.

    Attributes:
        batch, head: which head of the output.
        output: [rows, value_dim].
        gradients: of all inputs; none of a case that decodes.
    """

    batch: int
    head: int
    output: Tensor
    gradients: tuple[HeadGradient, ...]


@dataclass(frozen=True)
class GroundTruth:
    """The exact result of a case, as far as it is checked."""

    case: BenchCase
    rows: Tensor
    heads: list[Exact]
    grad_output: Tensor  # the case's, zero outside of what is checked


def exact(case: BenchCase, tensors: Tensors) -> GroundTruth:
    """Compute the rows that are checked in float64."""
    rows = torch.tensor(_spread(case.query_len, MOST_ROWS), device=tensors.query.device)
    batches, picked = _spread(case.batch, MOST_BATCHES), _spread(case.output_heads, MOST_HEADS)
    of_gradients = rows
    if case.attention == "delta":
        first_rows = _spread(_gradient_tokens(case), MOST_ROWS)
        of_gradients = torch.tensor(first_rows, device=rows.device)
        heads = [
            one
            for batch in batches
            for one in _delta_heads(case, tensors, batch, picked, rows, of_gradients)
        ]
    else:
        heads = [_head(case, tensors, batch, head, rows) for batch in batches for head in picked]
    grad_output = torch.zeros_like(tensors.grad_output)
    for one in heads:
        picked_rows = (one.batch, one.head, of_gradients)
        grad_output[picked_rows] = tensors.grad_output[picked_rows]
    return GroundTruth(case, rows, heads, grad_output)


def _head(case: BenchCase, tensors: Tensors, batch: int, head: int, rows: Tensor) -> Exact:
    """One head of softmax or linear attention."""
    kv_head = head // (case.query_heads // case.kv_heads)
    query = tensors.query[batch, head, rows].double()
    key, value = (tensor[batch, kv_head].double() for tensor in (tensors.key, tensors.value))
    grad_output = tensors.grad_output[batch, head, rows].double()
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    if case.attention == "linear":
        ends = rows + case.kv_len - case.query_len  # the last row sees the last key
        output, grads, slopes = _linear(leaves, grad_output, ends)
    else:
        hidden = ~case.sees(rows, torch.arange(case.kv_len, device=rows.device))
        with torch.enable_grad():
            scores = leaves[0] @ leaves[1].T / math.sqrt(case.head_dim)
            output = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
            grads = torch.autograd.grad(output, leaves, grad_output)
        slopes = (grad_output.new_zeros(1),) * 3  # what is left of these differences tells enough
    places = (("grad_query", head, rows), ("grad_key", kv_head, ALL), ("grad_value", kv_head, ALL))
    gradients = tuple(
        HeadGradient(name, index, of_head, where, grads[index], slopes[index])
        for index, (name, of_head, where) in enumerate(places)
    )
    return Exact(batch, head, output.detach(), gradients)


ALL = slice(None)


def _linear(
    leaves: list[Tensor], grad_output: Tensor, ends: Tensor
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
    """Output, gradients and their slopes of causal linear attention with elu + 1, by all pairs of
    some rows.

    ends: the last key that each of them sees.
    """
    key = leaves[1]
    with torch.enable_grad():
        of_query, of_key = (torch.nn.functional.elu(leaf) + 1 for leaf in leaves[:2])
        seen = torch.arange(key.shape[0], device=ends.device) <= ends.unsqueeze(-1)
        scores = (of_query @ of_key.T).masked_fill(~seen, 0)
        divisor = scores.sum(-1, keepdim=True) + 1e-6
        output = scores @ leaves[2] / divisor
        grads = torch.autograd.grad(output, leaves, grad_output)
    output, divisor, of_query, of_key = (t.detach() for t in (output, divisor, of_query, of_key))
    size, seen = (grad_output * output).norm(dim=-1, keepdim=True) / divisor, seen.to(key.dtype)
    slopes = (
        (size * of_query.clamp(max=1) * (seen @ of_key)).norm(dim=-1),
        (of_key.clamp(max=1) * (seen.T @ (size * of_query).square()).sqrt()).norm(dim=-1),
        grad_output.new_zeros(1),
    )
    return output, grads, slopes


# ---- the gated delta rule ------------------------------------------------------------------------


def _gradient_tokens(case: BenchCase) -> int:
    """Up to which token rows of the output have a gradient."""
    first = next(iter(case.visibility.documents), case.query_len)
    return min(first, GRADIENT_TOKENS)


def _delta_heads(
    case: BenchCase, tensors: Tensors, batch: int, picked: list[int], rows: Tensor,
    of_gradients: Tensor,
) -> Iterator[Exact]:  # fmt: skip
    """Some heads of one batch entry, sequence by sequence in chunks.

    of_gradients: the rows whose outputs have a gradient.
    """
    group = case.kv_heads // case.query_heads
    of_keys = [head // group for head in picked]
    heads = (of_keys, of_keys, picked, picked, picked)
    inputs = [
        each[batch : batch + 1, of].double() for each, of in zip(tensors.inputs, heads, strict=True)
    ]
    before = case.kv_len - case.query_len  # keys of which no row is asked for
    inputs[0] = torch.nn.functional.pad(inputs[0], (0, 0, before, 0))
    ends = [0, *itertools.accumulate(case.visibility.documents or (case.kv_len,))]
    with torch.no_grad():
        sequences = [
            _delta_rule([each[:, :, start:end] for each in inputs])
            for start, end in itertools.pairwise(ends)
        ]
    output = torch.cat(sequences, 2)[0, :, rows + before]
    grads = [torch.zeros_like(each) for each in inputs]
    if not case.decodes:
        tokens = _gradient_tokens(case)
        leaves = [each[:, :, :tokens].detach().requires_grad_() for each in inputs]
        arriving = torch.zeros_like(output[:, :1]).repeat(1, tokens, 1)
        arriving[:, of_gradients] = tensors.grad_output[batch, picked][:, of_gradients].double()
        with torch.enable_grad():
            found = torch.autograd.grad(_delta_rule(leaves), leaves, arriving.unsqueeze(0))
        for grad, of_first in zip(grads, found, strict=True):
            grad[:, :, :tokens] = of_first
    for place, head in enumerate(picked):
        gradients = tuple(
            HeadGradient(f"grad_{name}", index, of[place], ALL, grad[0, place], grad.new_zeros(1))
            for index, (name, of, grad) in enumerate(zip(DELTA_NAMES, heads, grads, strict=True))
        )
        yield Exact(batch, head, output[place], gradients)


DELTA_NAMES = ("query", "key", "value", "beta", "decay")


def _delta_rule(inputs: list[Tensor]) -> Tensor:
    """The output of a sequence, chunk by chunk; all inputs have as many heads.

    What a chunk's tokens write to the state solves a triangular system, as each sees those before
    it; written apart from the library's own.
    """
    query, key, value, beta, decay = inputs
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    query, key = (
        rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for rows in (query, key)
    )
    state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    parts = (each.split(CHUNK, 2) for each in (query, key, value, beta.unsqueeze(-1), decay))
    for asked, keys, values, rate, of_tokens in zip(*parts, strict=True):
        total = of_tokens.cumsum(2)
        gap = total.unsqueeze(3) - total.unsqueeze(2)  # from the later token back to the earlier
        later = torch.ones(gap.shape[2:4], dtype=torch.bool, device=gap.device).triu(1)
        left = keys.unsqueeze(2) * gap.masked_fill(later.unsqueeze(-1), -torch.inf).exp()
        before = rate * (left @ keys.unsqueeze(-1)).squeeze(-1).tril(-1)
        scores = (left @ asked.unsqueeze(-1)).squeeze(-1)
        error = values - (keys * total.exp()) @ state
        written = torch.linalg.solve_triangular(
            before, rate * error, upper=False, unitriangular=True
        )
        outputs.append((asked * total.exp()) @ state + scores @ written)
        whole = total[:, :, -1:]
        state = whole.mT.exp() * state + (keys * (whole - total).exp()).mT @ written
    return torch.cat(outputs, 2) / key.shape[-1] ** 0.5


def _spread(size: int, most: int) -> list[int]:
    """At most `most` indices, evenly spaced, the first and the last among them."""
    if size <= most:
        return list(range(size))
    return [round(index * (size - 1) / (most - 1)) for index in range(most)]
