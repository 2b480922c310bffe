"""The check of a peer's results against float64, before they are timed.

The exact result is computed for some rows of some heads. Gradients are those of an output whose
gradient is zero in all other rows, so that they need no other rows either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.bench.case import BenchCase, Tensors
from saccade.bench.peers import Call, from_layout, in_layout

MOST_ROWS, MOST_HEADS, MOST_BATCHES = 48, 4, 2

# Largest ‖result − exact‖ / ‖exact‖, of a row of the output and of a head's gradients, for normal
# inputs. Plain PyTorch stays about five times below; tf32 products of float32 inputs, or one wrong
# tile, go beyond.
OUTPUT_LIMITS = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
GRADIENT_LIMITS = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
# Gradients of linear attention's queries and keys are differences; one side of them is
# δ = grad_output · output. Numbers of the output that are rounded, each by its share ε, move δ by
# ε · ‖grad_output ∘ output‖, and gradients by that times ∂gradient / ∂δ. ‖exact‖ does not tell how
# much that is: of the first row's difference, which sees one key, nothing is left. So each row may
# be off by the limit times ‖grad_output ∘ output‖ · ‖∂gradient / ∂δ‖; what is beyond is judged.


@dataclass(frozen=True)
class Exact:
    """The result in float64 for some rows of one head.

    Attributes:
        batch, head: which query head.
        output: [rows, value_dim].
        grad_query: [rows, head_dim].
        grad_key, grad_value: [kv_len, dim], this query head's part of its kv head's gradients.
        through_delta: ‖grad_output ∘ output‖ · ‖∂gradient / ∂δ‖ of each row of queries and of keys.
    """

    batch: int
    head: int
    output: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    through_delta: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GroundTruth:
    """The exact result of a case, as far as it is checked."""

    case: BenchCase
    rows: Tensor
    heads: list[Exact]
    grad_output: Tensor  # the case's, zero outside of what is checked


class Checked(NamedTuple):
    """How far a peer's result is from float64.

    Attributes:
        fault: what is wrong with it, in one line, or None.
        errors: the largest ‖result − exact‖ / ‖exact‖ of a row of the output ("forward"), and of a
            head's gradients ("backward"), if there are any.
    """

    fault: str | None
    errors: dict[str, float]


class Error(NamedTuple):
    """The distance of one result from the exact one, and the part of it that limits count."""

    name: str
    relative: float
    limited: float


def exact(case: BenchCase, tensors: Tensors) -> GroundTruth:
    """Compute the rows that are checked in float64."""
    device = tensors.query.device
    rows = torch.tensor(_spread(case.query_len, MOST_ROWS), device=device)
    batches, picked = _spread(case.batch, MOST_BATCHES), _spread(case.query_heads, MOST_HEADS)
    heads = [_exact_head(case, tensors, batch, head, rows) for batch in batches for head in picked]
    grad_output = torch.zeros_like(tensors.grad_output)
    for item in heads:
        picked_rows = (item.batch, item.head, rows)
        grad_output[picked_rows] = tensors.grad_output[picked_rows]
    return GroundTruth(case, rows, heads, grad_output)


def _exact_head(case: BenchCase, tensors: Tensors, batch: int, head: int, rows: Tensor) -> Exact:
    kv_head = head // (case.query_heads // case.kv_heads)
    query = tensors.query[batch, head, rows].double()
    key, value = (tensor[batch, kv_head].double() for tensor in (tensors.key, tensors.value))
    grad_output = tensors.grad_output[batch, head, rows].double()
    if case.attention == "linear":
        ends = rows + case.kv_len - case.query_len  # the last row sees the last key
        return Exact(batch, head, *_linear_head(query, key, value, grad_output, ends))
    hidden = ~case.sees(rows, torch.arange(case.kv_len, device=rows.device))
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        scores = leaves[0] @ leaves[1].T / math.sqrt(case.head_dim)
        output = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
        of_q, of_k, of_v = torch.autograd.grad(output, leaves, grad_output)
    nothing = grad_output.new_zeros(1)  # what is left of these differences tells enough
    return Exact(batch, head, output.detach(), of_q, of_k, of_v, (nothing, nothing))


def _linear_head(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The fields of `Exact` for causal linear attention with elu + 1, by all pairs of some rows.

    ends: the last key that each of them sees.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        of_query, of_key = (torch.nn.functional.elu(leaf) + 1 for leaf in leaves[:2])
        seen = torch.arange(key.shape[0], device=ends.device) <= ends.unsqueeze(-1)
        scores = (of_query @ of_key.T).masked_fill(~seen, 0)
        divisor = scores.sum(-1, keepdim=True) + 1e-6
        output = scores @ leaves[2] / divisor
        of_q, of_k, of_v = torch.autograd.grad(output, leaves, grad_output)
    output, divisor, of_query, of_key = (t.detach() for t in (output, divisor, of_query, of_key))
    size, seen = (grad_output * output).norm(dim=-1, keepdim=True) / divisor, seen.to(key.dtype)
    through_delta = (
        (size * of_query.clamp(max=1) * (seen @ of_key)).norm(dim=-1),
        (of_key.clamp(max=1) * (seen.T @ (size * of_query).square()).sqrt()).norm(dim=-1),
    )
    return output, of_q, of_k, of_v, through_delta


def check(call: Call, truth: GroundTruth, tensors: Tensors, *, gradients: bool) -> Checked:
    """Compare a peer's result with what is exact."""
    inputs = tensors._replace(grad_output=truth.grad_output)
    leaves, grad_output = in_layout(call, inputs, gradients=gradients)
    with call.around(), torch.set_grad_enabled(gradients):
        output = call.run(*leaves)
        results = [output.detach()]
        if gradients:
            results += torch.autograd.grad(output, leaves, grad_output)
    results = [from_layout(tensor, call.layout, truth.case.batch) for tensor in results]
    if results[0].shape != truth.grad_output.shape:
        return Checked(f"wrong: its output is {list(results[0].shape)}", {})
    limit = GRADIENT_LIMITS[truth.case.dtype]
    errors = list(_errors(truth, results, limit))
    largest = {"forward": max(error.relative for error in errors if error.name == "output")}
    if gradients:
        largest["backward"] = max(error.relative for error in errors if error.name != "output")
    return Checked(_fault(errors, truth.case.dtype), largest)


def _fault(errors: list[Error], dtype: str) -> str | None:
    """The first error beyond its limit, in words."""
    for name, _, limited in errors:
        limit = (OUTPUT_LIMITS if name == "output" else GRADIENT_LIMITS)[dtype]
        if not limited <= limit:  # NaN is no result either
            return f"wrong: {name} is {limited:.1e} away from float64, more than {limit:.0e}"
    return None


def _errors(truth: GroundTruth, results: list[Tensor], limit: float) -> Iterator[Error]:
    """Every error that is limited: of the output's rows, and of gradients by head."""
    group = truth.case.query_heads // truth.case.kv_heads
    for item in truth.heads:
        output = results[0][item.batch, item.head, truth.rows]
        of_output = float(_distance(output, item.output).max())
        yield Error("output", of_output, of_output)
        if len(results) > 1:
            grad_query = results[1][item.batch, item.head, truth.rows]
            yield _error("grad_query", grad_query, item.grad_query, limit * item.through_delta[0])
    kv_heads = {(item.batch, item.head // group) for item in truth.heads if len(results) > 1}
    for kv_head in kv_heads:
        parts = [item for item in truth.heads if (item.batch, item.head // group) == kv_head]
        for name, result in (("grad_key", results[2]), ("grad_value", results[3])):
            total = torch.stack([getattr(item, name) for item in parts]).sum(0)
            through = torch.stack([item.through_delta[1] for item in parts]).norm(dim=0)
            allowed = limit * through if name == "grad_key" else torch.zeros_like(through)
            yield _error(name, result[kv_head], total, allowed)


def _error(name: str, result: Tensor, true: Tensor, allowed: Tensor) -> Error:
    """The error of a gradient; allowed: what each row may be off by."""
    off, size = (result.double() - true).norm(dim=-1), true.norm()
    beyond = (off - allowed).clamp(min=0)
    return Error(name, float(off.norm() / size), float(beyond.norm() / size))


def _distance(result: Tensor, true: Tensor) -> Tensor:
    """‖result − true‖ / ‖true‖ along the last axis."""
    return (result.double() - true).norm(dim=-1) / true.norm(dim=-1)


def _spread(size: int, most: int) -> list[int]:
    """At most `most` indices, evenly spaced, the first and the last among them."""
    if size <= most:
        return list(range(size))
    return [round(index * (size - 1) / (most - 1)) for index in range(most)]
