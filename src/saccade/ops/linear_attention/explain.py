"""Explain: which implementation serves a call of linear attention, why not the others, its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from saccade.explain import answers, costs
from saccade.ops.linear_attention.api import Options
from saccade.ops.linear_attention.validation import prepare
from saccade.runtime import backends
from saccade.runtime.arguments import OFFSETS
from saccade.runtime.linear_spec import LinearProblem
from saccade.runtime.spec import KernelConfig


@dataclass(frozen=True)
class LinearExplanation:
    """What `explain_linear` found; print it, or read its fields.

    Attributes:
        problem: the call's shape.
        chosen: the implementation that serves the call, or None.
        reasons: for each implementation, in order of preference, why it cannot serve (None: can).
        config: the config that the call gives, if any.
        flops: operations of a forward pass, in chunks of 64 rows.
        bytes: bytes that a forward pass moves at least.
        yields: for each implementation, why without a name those after it go first (None: they do
            not).
        remark: what else there is to say of the implementation that was chosen, or None.
    """

    problem: LinearProblem
    chosen: str | None
    reasons: dict[str, str | None]
    config: KernelConfig | None
    flops: int
    bytes: int
    yields: Mapping[str, str | None] | None = None
    remark: str | None = None

    def __str__(self) -> str:
        p = self.problem
        batch = f"{p.batch} sequences" if p.packed else f"batch {p.batch}"
        heads = f"{p.query_heads}/{p.key_heads}/{p.value_heads}"
        lines = [
            f"linear attention: {batch}, {p.query_len} x {p.kv_len} tokens, heads {heads}, "
            f"dim {p.head_dim}/{p.value_dim}, {str(p.dtype).removeprefix('torch.')} on {p.device}",
            f"  {'causal' if p.causal else 'not causal'}, feature map {p.feature_map}, "
            f"normaliser {p.normalize}, decay {'yes' if p.decay else 'no'}, "
            f"initial state {'yes' if p.state else 'no'}",
            f"  {costs(self.flops, self.bytes)}",
        ]
        lines += answers(self.reasons, self.chosen, self.config, self.remark, self.yields)
        return "\n".join(lines)


def explain_linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    implementation: str | None = None,
    **arguments: Any,
) -> LinearExplanation:
    """Say which implementation would serve a call of linear attention, without running it.

    Args:
        query, key, value, and all others: as for `saccade.linear_attention`, or, with
            cu_seqlens_q, for `saccade.linear_attention_varlen`.

    Returns:
        A `LinearExplanation`: printable, with every implementation's reason, FLOPs and bytes. A
        feature map that is a function runs, and shows as "identity"; units that grow along a causal
        call (`feature_maps.Favor`) show as decay.

    Raises:
        TypeError, ValueError: as the call itself would.

    >>> print(saccade.explain_linear(query, key, value, normalize=False))
    """
    taken = {*Options.__annotations__, "return_state", "key_lengths"} - {"implementation"}
    if cu_seqlens_q is not None:
        taken.remove("key_lengths")
    elif cu_seqlens_k is not None:
        raise TypeError(f"cu_seqlens_q: got None beside cu_seqlens_k, takes {OFFSETS}")
    unknown = set(arguments) - taken
    if unknown:
        raise TypeError(f"explain_linear: got the unknown arguments {sorted(unknown)}")
    prepared = prepare(query, key, value, cu_seqlens_q, cu_seqlens_k, **arguments)
    problem = prepared.problem
    reasons = backends.reasons_of(problem, backends.LINEAR_BY_NAME)
    try:
        chosen = backends.choose(problem, implementation, backends.LINEAR_BY_NAME)
    except NotImplementedError:
        chosen = None
    yields = {name: entry.yields(problem) for name, entry in backends.LINEAR_BY_NAME.items()}
    costs = problem.flops, problem.bytes
    remark = chosen and backends.LINEAR_BY_NAME[chosen].remark(problem)
    return LinearExplanation(problem, chosen, reasons, prepared.config, *costs, yields, remark)
