"""The oracle: the answer in float64, and how far from it an implementation may be.

The bound is derived for each number, in two parts (contract item 5):

    1.1 · (the largest error of plain PyTorch in the same dtype)
    + 6 · (the standard deviation of rounding errors in a sum of that number's terms)

A sum whose terms t each carry an independent relative error of at most u has an error beyond
6 · u · sqrt(Σ t²) with a probability under 4e-8 (Hoeffding's inequality, as in Higham and Mary
2019, "A new approach to probabilistic rounding error analysis", theorem 2.4). Terms carry u of
the inputs' dtype, since low-precision products read rounded weights; the sums themselves
u · sqrt(terms) of the accumulation dtype; and each weight the error of its score and of the lse,
which the exponential turns into a relative one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.modifiers.evaluate import take
from saccade.modifiers.expression import Coordinates
from saccade.ops.attention import reference
from saccade.ops.paged_attention import reference as paged_reference
from saccade.runtime.spec import Inputs, Variant, accumulate_dtype
from saccade.testing.cases import Case
from saccade.testing.paged import PagedCase

CONFIDENCE = 6.0  # standard deviations
AGAINST_PLAIN = 1.1


def oracle(case: Case | PagedCase) -> dict[str, Tensor]:
    """Output, lse and gradients of a case by the reference in float64.

    Examples:
        >>> case = saccade.testing.make_case(lengths=((5, 9),))
        >>> sorted(saccade.testing.oracle(case))
        ['grad_key', 'grad_query', 'grad_value', 'lse', 'output']
    """
    return case.run("reference", torch.float64)


def tolerances(case: Case | PagedCase, exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each result, the error that is allowed to each of its numbers.

    Examples:
        >>> case = saccade.testing.make_case(lengths=((5, 9),))
        >>> allowed = saccade.testing.tolerances(case, saccade.testing.oracle(case))
        >>> allowed["output"].shape
        torch.Size([2, 4, 5, 16])
    """
    spread = _paged_spread(case) if isinstance(case, PagedCase) else _spread(case)
    return bounds(exact, case.run_plain(), spread, case.tensors["query"].dtype)


def bounds(
    exact: dict[str, Tensor],
    plain: dict[str, Tensor],
    spread: dict[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The allowed errors, from plain PyTorch's results and the spread of rounding errors."""
    allowed, unit = {}, torch.finfo(dtype).eps / 2
    for name, truth in exact.items():
        error = (plain[name].double() - truth)[truth.isfinite()].abs()
        error = error[error.isfinite()]  # plain PyTorch overflows where float64 does not
        worst = error.max() if error.numel() else torch.tensor(0.0, dtype=torch.float64)
        allowed[name] = AGAINST_PLAIN * worst + CONFIDENCE * spread[name] + unit * truth.abs()
    return allowed


def assert_exact(case: Case | PagedCase, implementation: str, **more: Any) -> None:
    """Compare an implementation with the oracle on every result of a case.

    Raises:
        AssertionError: naming the result, the worst error and what was allowed.

    Examples:
        >>> case = saccade.testing.make_case(lengths=((5, 9),), mask="causal")
        >>> saccade.testing.assert_exact(case, "cpu")
    """
    exact, got = oracle(case), case.run(implementation, **more)
    assert_within(got, exact, tolerances(case, exact), str(case.description))


def assert_within(
    got: dict[str, Tensor], exact: dict[str, Tensor], allowed: dict[str, Tensor], what: str
) -> None:
    """Compare results by name with the exact ones, number by number.

    Raises:
        AssertionError: naming the result, the worst error, what was allowed, and `what` it was.
    """
    for name, truth in exact.items():
        result = got[name].double()
        if result.shape != truth.shape:
            raise AssertionError(f"{name}: shape {tuple(result.shape)}, not {tuple(truth.shape)}")
        infinite = truth.isinf()
        if not torch.equal(result[infinite], truth[infinite]):
            raise AssertionError(f"{name}: wrong where float64 is infinite\n{what}")
        excess = ((result - truth).abs() - allowed[name])[~infinite]
        if excess.numel() and not bool((excess <= 0).all()):  # NaN fails too
            worst = int(excess.nan_to_num(nan=torch.inf).argmax())
            off = float((result - truth)[~infinite].flatten()[worst].abs())
            may = float(allowed[name][~infinite].flatten()[worst])
            raise AssertionError(f"{name}: off by {off:.3e} where {may:.3e} is allowed\n{what}")


def _spread(case: Case) -> dict[str, Tensor]:
    """For each result, the standard deviation (at most) of its rounding errors."""
    leaves = {name: leaf.detach() for name, leaf in case.leaves(torch.float64).items()}
    inputs, variant = case.prepared(leaves)
    dense, at, reachable = reference.lay_out(inputs)
    scores, visible, value = reference.score_pairs(dense, variant, at, reachable)
    output, lse = reference.attend(dense, variant, at, reachable)
    packed = case.cu_seqlens is not None
    grad_output, grad_lse = case.grads["output"], case.grads["lse"]
    if packed:
        grad_output, grad_lse = grad_output.transpose(0, 1)[None], grad_lse[None]
    units = _units(case, _channels(dense), *scores.shape[-2:])
    forward = _forward(dense, variant, (scores, visible, value), lse, units)
    (of_inputs, of_sums, of_one), terms, weights = units, forward.terms, forward.weights
    lse = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
    query, key, kv_heads = forward.query, forward.key, dense.key.shape[1]
    dots = grad_output * output
    row_dot = dots.sum(-1, keepdim=True).abs() + grad_lse.abs().unsqueeze(-1)
    grad_weights = (grad_output @ value.mT).abs()
    of_row_dot = (of_inputs + of_sums) * dots.square().sum(-1, keepdim=True).sqrt()
    of_grad_weights = of_sums * root(grad_output, value.mT)
    grad_terms = (grad_weights + row_dot) * terms + weights * (of_row_dot + of_grad_weights)
    found = {
        "output": forward.output,
        "lse": forward.lse,
        "grad_query": abs(variant.scale) * root(grad_terms, key),
        "grad_key": abs(variant.scale) * grouped(root(grad_terms.mT, query), kv_heads),
        "grad_value": grouped(root(terms.mT, grad_output), kv_heads),
    }
    if inputs.sinks is not None:
        sink_weights = (inputs.sinks.view(1, -1, 1, 1) - lse).exp()
        of_sinks = row_dot * (of_inputs + of_sums + of_one * lse.abs()) + of_row_dot
        found["grad_sinks"] = (sink_weights * of_sinks).square().sum((0, 2, 3)).sqrt()
    if packed:
        for name in ("output", "grad_query", "grad_key", "grad_value"):
            found[name] = found[name].squeeze(0).transpose(0, 1)
        found["lse"] = found["lse"].squeeze(0)
    if "bias" in case.tensors:
        found["grad_bias"] = _taken(leaves["bias"], grad_terms, at)
    return found


class _Forward(NamedTuple):
    """Standard deviations of the forward pass's rounding errors, and the tensors behind them."""

    query: Tensor  # finite, in float64
    key: Tensor  # the same, for each query head
    weights: Tensor
    terms: Tensor  # of each pair's weight
    output: Tensor
    lse: Tensor


def _forward(
    dense: Inputs,
    variant: Variant,
    scored: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    units: tuple[float, float, float],
) -> _Forward:
    """The forward pass of a problem whose pairs, and lse, are known in float64."""
    scores, visible, value = scored
    of_inputs, of_sums, of_one = units
    lse = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
    weights = (scores - lse).exp().masked_fill(~visible, 0) / (1 - variant.dropout_p)
    group = dense.query.shape[1] // max(dense.key.shape[1], 1)
    key = dense.key.nan_to_num(0, 0, 0).repeat_interleave(group, 1)
    query = dense.query.nan_to_num(0, 0, 0)
    # Products add up in at least 16 partial sums: that many numbers fill a vector register.
    steps = max(query.shape[-1] / 16, 1.0)
    products = abs(variant.scale) * steps**0.5 * root(query, key.mT)
    of_scores = of_one * (products + scores.nan_to_num(0, 0, 0).abs() + lse.abs())
    # An error of a score, or of the lse, is a relative error of the pair's weight.
    terms = weights * (of_inputs + of_sums + of_scores)
    of_lse = (weights * of_scores).sum(-1) + of_sums + of_one * lse.squeeze(-1).abs()
    return _Forward(query, key, weights, terms, root(terms, value), of_lse)


def _paged_spread(case: PagedCase) -> dict[str, Tensor]:
    """`_spread` of a call over pages, which has no gradients."""
    inputs, variant = case.prepared(torch.float64)
    dense, at, reachable = paged_reference.lay_out(inputs, torch.float64)
    scored = reference.score_pairs(dense, variant, at, reachable)
    _, lse = reference.attend(dense, variant, at, reachable)
    units = _units(case, _channels(dense), *scored[0].shape[-2:])
    forward = _forward(dense, variant, scored, lse, units)
    if inputs.cu_seqlens_q is None:
        return {"output": forward.output, "lse": forward.lse}
    return {
        "output": paged_reference.unpadded(forward.output, inputs, 0.0),
        "lse": paged_reference.unpadded(forward.lse, inputs, 0.0).transpose(0, 1),
    }


def _channels(dense: Inputs) -> int:
    """Channels of a pair: those of its score and those of its value."""
    return dense.query.shape[-1] + dense.value.shape[-1]


def _taken(table: Tensor, terms: Tensor, at: Coordinates) -> Tensor:
    """Root-sum-square of the terms of all pairs that take each entry of a table."""
    table = table.clone().requires_grad_()
    entries = take(table, at.batch, at.head, at.query_row, at.kv_row).expand(terms.shape)
    (squares,) = torch.autograd.grad(entries, table, terms.square())
    return squares.sqrt()


def _units(
    case: Case | PagedCase, channels: int, rows: int, keys: int
) -> tuple[float, float, float]:
    """Unit roundoff of the inputs' dtype, of a sum in the accumulation dtype, of one operation."""
    dtype = case.tensors["query"].dtype
    of_one = torch.finfo(accumulate_dtype(dtype)).eps / 2
    return torch.finfo(dtype).eps / 2, of_one * (channels + rows + keys) ** 0.5, of_one


def root(weights: Tensor, rows: Tensor) -> Tensor:
    """Root of the sum of squared terms of weights · rows."""
    return (weights.square() @ rows.square()).sqrt()


def grouped(per_head: Tensor, heads: int) -> Tensor:
    """Root-sum-square over the heads that share one of `heads`."""
    if heads == 0:
        return per_head
    return per_head.square().unflatten(1, (heads, -1)).sum(2).sqrt()
