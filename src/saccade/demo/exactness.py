"""Exactness: outputs and gradients of Saccade and of PyTorch, compared with a float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

import saccade
from saccade.demo.model import AttentionCall

Rows = Float[Tensor, "batch heads rows dim"]
Contender = Callable[[Rows, Rows, Rows, int | None], Rows]


def by_saccade(query: Rows, key: Rows, value: Rows, window: int | None) -> Rows:
    """`saccade.attention`, whose masks are never written out in full."""
    mask = saccade.masks.causal() if window is None else saccade.masks.window(window)
    output = saccade.attention(query, key, value, mask=mask)
    return output


def with_sdpa(query: Rows, key: Rows, value: Rows, window: int | None) -> Rows:
    """PyTorch's `scaled_dot_product_attention`, which takes a window only as a whole matrix."""
    if window is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    mask = visible(query.shape[2], window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def by_hand(
    query: Rows, key: Rows, value: Rows, window: int | None, softcap: float | None = None
) -> Rows:
    """softmax(QKᵀ)V as one writes it: every score lies in memory at once."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    hidden = ~visible(query.shape[2], window)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def visible(length: int, window: int | None) -> Bool[Tensor, "length length"]:
    """The mask written out: causal, and at most `window` rows back."""
    mask = torch.ones(length, length, dtype=torch.bool).tril_()
    return mask if window is None else mask.triu_(-window)


CONTENDERS: dict[str, Contender] = {
    "saccade": by_saccade,
    "PyTorch SDPA": with_sdpa,
    "plain PyTorch": by_hand,
}


DTYPES = (torch.float32, torch.bfloat16)
SOFTCAP = 30.0
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class LargestError(NamedTuple):
    """The distance from the reference, at its worst and as a root mean square."""

    worst: float
    rms: float


class Finding(NamedTuple):
    """One contender's errors on one layer in one dtype."""

    layer: str
    dtype: str
    who: str
    output: LargestError
    gradient: LargestError


def compare(calls: list[AttentionCall], seed: int) -> Iterator[Finding]:
    """Errors of Saccade, SDPA and plain PyTorch on what trained layers attend with.

    All of them, the reference too, start from the same numbers, rounded to the dtype: the errors
    are those of the computation alone. The reference computes in float64. The last layer is
    compared once more with capped scores, which SDPA does not compute.
    """
    capped = replace(calls[-1], layer=f"{len(calls)} (softcap)", softcap=SOFTCAP)
    for call in (*calls, capped):
        for dtype in DTYPES:
            rows = [tensor.to(dtype) for tensor in (call.query, call.key, call.value)]
            generator = torch.Generator().manual_seed(seed)
            grad_output = torch.randn(call.query.shape, generator=generator).to(dtype)
            exact = results(by_layer(call, "reference"), rows, grad_output, torch.float64)
            for who, run in contenders(call).items():
                got = results(run, rows, grad_output, dtype)
                name = str(dtype).removeprefix("torch.")
                gradient = error(got[1:], exact[1:])
                yield Finding(call.layer, name, who, error(got[:1], exact[:1]), gradient)


def contenders(call: AttentionCall) -> dict[str, Run]:
    """Who is compared, each with the layer's mask."""
    plain = partial(by_hand, window=call.window, softcap=call.softcap)
    sdpa: dict[str, Run] = {"PyTorch SDPA": partial(with_sdpa, window=call.window)}
    return {
        "saccade": by_layer(call),
        **(sdpa if call.softcap is None else {}),
        "plain PyTorch": plain,
    }


def by_layer(call: AttentionCall, implementation: str | None = None) -> Run:
    """`saccade.attention` as the layer calls it."""
    score = None if call.softcap is None else saccade.scores.softcap(call.softcap)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention(
            query, key, value, mask=call.mask, score=score, implementation=implementation
        )
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


def error(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> LargestError:
    """How far results are from the exact ones, over all their numbers."""
    pairs = zip(got, exact, strict=True)
    off = torch.cat([(one.double() - other).flatten() for one, other in pairs])
    return LargestError(float(off.abs().max()), float(off.square().mean().sqrt()))


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
