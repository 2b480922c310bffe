"""Explain: which implementation serves a call, why the others do not, and what the call costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade import dispatch, expressions
from saccade.arguments import values_readable
from saccade.prepare import prepare
from saccade.problem import Config, Inputs, Problem, Variant
from saccade.reference import attention as reference

# Pairs that `explain` is ready to count one by one; larger problems are counted by sampling rows.
COUNTED_PAIRS = 2**26


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; print it, or read its fields.

    Attributes:
        problem: the call's shape.
        chosen: the implementation that serves the call, or None.
        reasons: for each implementation, in order of preference, why it cannot serve (None: can).
        config: the config that the call gives, if any.
        visible_pairs: pairs that the mask lets through, over all batch entries and heads.
        flops: operations of a forward pass over them.
        bytes: bytes that a forward pass moves at least.
    """

    problem: Problem
    chosen: str | None
    reasons: dict[str, str | None]
    config: Config | None
    visible_pairs: int
    flops: int
    bytes: int

    def __str__(self) -> str:
        p = self.problem
        shape = (
            f"{p.batch} sequences, {p.query_len} x {p.kv_len} tokens"
            if p.packed
            else f"batch {p.batch}, {p.query_len} x {p.kv_len}"
        )
        lines = [
            f"attention: {shape}, heads {p.query_heads}/{p.kv_heads}, "
            f"dim {p.head_dim}/{p.value_dim}, {str(p.dtype).removeprefix('torch.')} on {p.device}",
            f"  mask {p.mask or 'none'}, score {p.score or 'none'}, "
            f"sinks {'yes' if p.sinks else 'no'}, dropout {'yes' if p.dropout else 'no'}",
            f"  {self.visible_pairs:,} of {p.pairs:,} pairs visible: "
            f"{self.flops / 1e9:.3f} GFLOP forward, at least {self.bytes / 2**20:.2f} MiB moved",
        ]
        for name, reason in self.reasons.items():
            if reason is not None:
                lines.append(f"  {name}: no, {reason}")
            else:
                taken = "yes, taken" if name == self.chosen else "yes, not asked for"
                config = f", {self.config}" if name == self.chosen and self.config else ""
                lines.append(f"  {name}: {taken}{config}")
        return "\n".join(lines)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    implementation: str | None = None,
    **arguments: Any,
) -> Explanation:
    """Say which implementation would serve a call, without running it.

    Args:
        query, key, value, and all others: as for `saccade.attention`, or, with cu_seqlens_q, for
            `saccade.attention_packed`.

    Returns:
        An `Explanation`: printable, with every implementation's reason, FLOPs and bytes.

    Raises:
        TypeError, ValueError: as the call itself would.

    >>> print(saccade.explain(query, key, value, mask=saccade.masks.window(256)))
    """
    given: dict[str, Any] = {
        "mask": None, "score": None, "scale": None, "sinks": None, "dropout_p": 0.0,
        "return_lse": False, "deterministic": False, "config": None,
    }  # fmt: skip
    unknown = set(arguments) - set(given)
    if unknown:
        raise TypeError(f"explain: got {sorted(unknown)}, takes the arguments of saccade.attention")
    inputs, variant, problem, config = prepare(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        **{**given, **arguments},
    )  # fmt: skip
    reasons = {name: entry.unsupported(problem) for name, entry in dispatch.BY_NAME.items()}
    try:
        chosen = dispatch.choose(problem, implementation)
    except NotImplementedError:
        chosen = None
    pairs = _visible_pairs(inputs, variant, problem)
    return Explanation(problem, chosen, reasons, config, pairs, problem.flops(pairs), problem.bytes)


def _visible_pairs(inputs: Inputs, variant: Variant, problem: Problem) -> int:
    """Count visible pairs, all of them or, where there are very many, on evenly spaced rows."""
    if not variant.mask and not problem.packed:
        return problem.pairs
    if problem.pairs == 0 or not values_readable(inputs.query):
        return problem.pairs
    _, at, reachable = reference.lay_out(inputs)
    rows = at.query_row.shape[2]
    step = max(1, -(-problem.pairs // COUNTED_PAIRS))
    picked = torch.arange(0, rows, step, device=inputs.query.device)
    sampled = at._replace(
        **{
            name: index.index_select(2, picked)
            for name, index in zip(at._fields, at, strict=True)
            if isinstance(index, Tensor) and index.shape[2] == rows
        }
    )
    seen = expressions.visible(variant.mask, variant.mask_captured, sampled)
    if reachable is not None:
        seen = seen & reachable.index_select(2, picked)
    batches = 1 if problem.packed else problem.batch
    full = (batches, problem.query_heads, len(picked), problem.kv_len)
    share = problem.pairs / max(1, torch.Size(full).numel())
    return round(int(seen.expand(full).sum()) * share)
