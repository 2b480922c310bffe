"""Who computes the gated delta rule: Saccade's implementations, and fla's kernels.

Tensors lie as models make them, [batch, length, heads, channels], and queries and keys are divided
by their lengths in the call.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade.bench.case import BenchCase
from saccade.bench.delta_case import DeltaBenchCase, DeltaStepCase
from saccade.bench.peers import Call, tune_quickly

# The reference goes token by token, in Python.
LONGEST_REFERENCE = 4096


def heads_first(rows: Tensor) -> Tensor:
    """Rows [batch, length, heads, ...] as Saccade's dense calls take them, and back."""
    return rows.transpose(1, 2)


def of_ours(name: str, case: BenchCase, device: torch.device) -> Call | str:
    """A call of one of Saccade's implementations."""
    assert isinstance(case, DeltaBenchCase)
    sizes = (1, 1, 1, case.head_dim)
    row = torch.empty(sizes, dtype=case.torch_dtype, device=device)
    value = torch.empty(*sizes[:3], case.value_dim, dtype=case.torch_dtype, device=device)
    decay = row.float() if case.decay == "channels" else row[..., 0].float()
    reasons = saccade.explain(
        saccade.gated_delta_rule, row, row, value, row[..., 0], decay=decay
    ).reasons
    if (reason := reasons.get(name, "it has no gated delta rule")) is not None:
        return reason
    if isinstance(case, DeltaStepCase):
        return _step(name)
    if name == "reference" and case.kv_len > LONGEST_REFERENCE:
        return f"it would go through {case.kv_len} tokens one by one"
    options: dict[str, Any] = {"normalize_qk": True, "implementation": name}
    if case.packed:
        offsets = case.visibility.offsets(device)

        def packed(
            query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
        ) -> Tensor:
            return saccade.gated_delta_rule_varlen(
                query, key, value, beta, offsets, decay=decay, **options
            )

        return Call(packed, "packed")

    def dense(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        query, key, value, beta, decay = map(heads_first, (query, key, value, beta, decay))
        return heads_first(
            saccade.gated_delta_rule(query, key, value, beta, decay=decay, **options)
        )

    return Call(dense, "rows first")


def _step(name: str) -> Call | str:
    """A step in place from the state of all keys but the last, which the first call makes."""
    if name == "reference":
        return "it changes no states in place"
    made: list[Tensor] = []

    def run(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        query, *keys = map(heads_first, (query, key, value, beta, decay))
        if not made:
            key, value, beta, decay = (each[:, :, :-1] for each in keys)
            _, state = saccade.gated_delta_rule(
                key, key, value, beta, decay=decay, normalize_qk=True, return_state=True
            )
            made.append(state)
        key, value, beta, decay = (each[:, :, -1:] for each in keys)
        return heads_first(
            saccade.gated_delta_rule_step(
                made[0], query, key, value, beta, decay=decay, normalize_qk=True,
                implementation=name,
            )
        )  # fmt: skip

    return Call(run, "rows first")


def of_fla(module: Any, case: BenchCase, device: torch.device) -> Call:
    """A call of fla's, whose kernels are tuned among all of their configs, but quickly.

    module: fla.ops.
    """
    assert isinstance(case, DeltaBenchCase)
    by_channel = case.decay == "channels"
    chunk = module.chunk_kda if by_channel else module.chunk_gated_delta_rule
    for name in [name for name in sys.modules if name.startswith("fla.ops.")]:
        tune_quickly(sys.modules[name])
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    if isinstance(case, DeltaStepCase):
        recurrent = (
            module.fused_recurrent_kda if by_channel else module.fused_recurrent_gated_delta_rule
        )
        return _fla_step(chunk, recurrent, options)
    if case.packed:
        options["cu_seqlens"] = case.visibility.offsets(device).long()

    def run(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return chunk(query, key, value, g=decay, beta=beta, **options)[0]

    return Call(run, "rows first")


def _fla_step(chunk: Any, recurrent: Any, options: dict[str, Any]) -> Call:
    """A step that leaves a new state, and goes on from the same one each time."""
    made: list[Tensor] = []

    def run(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        keys = key, value, beta, decay
        more = {**options, "output_final_state": True}
        if not made:
            key, value, beta, decay = (each[:, :-1] for each in keys)
            made.append(chunk(key, key, value, g=decay, beta=beta, **more)[1])
        key, value, beta, decay = (each[:, -1:] for each in keys)
        return recurrent(query, key, value, g=decay, beta=beta, initial_state=made[0], **more)[0]

    return Call(run, "rows first")
