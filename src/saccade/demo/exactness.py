"""Exactness: the trained layers' attention beside the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
        return output

    return {
        "saccade": with_saccade,
        "PyTorch SDPA": partial(with_sdpa, window=call.window),
        "plain PyTorch": partial(by_hand, window=call.window),
    }


def reference(call: AttentionCall) -> Run:
    """The specification of the library, with the layer's mask."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention(query, key, value, mask=call.mask, implementation="reference")
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


def ratios_to_plain(findings: list[Finding], dtype: str) -> dict[str, float]:
    """For each contender, its largest RMS error as a multiple of plain PyTorch's in that place."""
    chosen = [finding for finding in findings if finding.dtype == dtype]
    plain = {one.layer: one for one in chosen if one.who == "plain PyTorch"}
    ratios: dict[str, float] = {}
    for one in chosen:
        if one.who != "plain PyTorch":
            beside = plain[one.layer]
            here = max(one.output.rms / beside.output.rms, one.gradient.rms / beside.gradient.rms)
            ratios[one.who] = max(here, ratios.get(one.who, 0.0))
    return ratios
