"""Exactness: the trained layers' attention beside the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import saccade
from saccade.demo.contenders import by_hand, with_sdpa
from saccade.demo.model import AttentionCall

DTYPES = (torch.float32, torch.bfloat16)
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Error(NamedTuple):
    """The distance from the reference, at its worst and as a root mean square."""

    worst: float
    rms: float


class Finding(NamedTuple):
    """One contender's errors on one layer in one dtype."""

    layer: str
    dtype: str
    who: str
    output: Error
    gradient: Error


def compare(calls: list[AttentionCall], seed: int) -> Iterator[Finding]:
    """Errors of Saccade, SDPA and plain PyTorch on what trained layers attend with.

    All of them, the reference too, start from the same numbers, rounded to the dtype: the errors
    are those of the computation alone. The reference computes in float64.
    """
    for call in calls:
        for dtype in DTYPES:
            rows = [tensor.to(dtype) for tensor in (call.query, call.key, call.value)]
            generator = torch.Generator().manual_seed(seed)
            grad_output = torch.randn(call.query.shape, generator=generator).to(dtype)
            exact = results(reference(call), rows, grad_output, torch.float64)
            for who, run in contenders(call).items():
                got = results(run, rows, grad_output, dtype)
                name = str(dtype).removeprefix("torch.")
                gradient = error(got[1:], exact[1:])
                yield Finding(call.layer, name, who, error(got[:1], exact[:1]), gradient)


def contenders(call: AttentionCall) -> dict[str, Run]:
    """Who is compared, each with the layer's mask."""

    def with_saccade(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention(query, key, value, mask=call.mask)
        assert isinstance(output, Tensor)
        return output

    return {
        "saccade": with_saccade,
        "PyTorch SDPA": lambda *rows: with_sdpa(*rows, call.window),
        "plain PyTorch": lambda *rows: by_hand(*rows, call.window),
    }


def reference(call: AttentionCall) -> Run:
    """The specification of the library, with the layer's mask."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention(query, key, value, mask=call.mask, implementation="reference")
        assert isinstance(output, Tensor)
        return output

    return run


def results(
    run: Run, rows: list[Tensor], grad_output: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Output and the gradients of query, key and value, computed in a dtype."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in rows]
    output = run(*leaves)
    gradients = torch.autograd.grad(output, leaves, grad_output.to(dtype))
    return output.detach(), *gradients


def error(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> Error:
    """How far results are from the exact ones, over all their numbers."""
    pairs = zip(got, exact, strict=True)
    off = torch.cat([(one.double() - other).flatten() for one, other in pairs])
    return Error(float(off.abs().max()), float(off.square().mean().sqrt()))


def ratio_to_plain(findings: list[Finding]) -> float:
    """The largest RMS error of Saccade as a multiple of plain PyTorch's in the same place."""
    errors = {(f.layer, f.dtype, f.who): (f.output.rms, f.gradient.rms) for f in findings}
    ratios = []
    for (layer, dtype, who), ours in errors.items():
        if who == "saccade":
            plain = errors[layer, dtype, "plain PyTorch"]
            ratios += [mine / max(theirs, 1e-30) for mine, theirs in zip(ours, plain, strict=True)]
    return max(ratios)
