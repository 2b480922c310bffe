"""Calls of linear attention: descriptions of them, which kernels are compiled for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from saccade.kernel_check.dtypes import DTYPES
from saccade.runtime.spec import KernelConfig, LinearInputs, LinearVariant, empty_linear_results

# The kernels, by what starts them.
LINEAR_PASSES = {
    "linear": ("linear_output", "linear_count", "linear_collect", "linear_chain"),
    "linear backward": (
        "linear_row_dot", "linear_grad_query", "linear_grad_key", "linear_grad_value",
    ),
    "linear step": ("linear_step",),
    "hopper_linear": (
        "hopper_linear_forward", "hopper_linear_collect", "hopper_linear_output_nan_safe",
        "hopper_linear_wide_output",
    ),
    "hopper_linear backward": (
        "hopper_linear_backward_queries", "hopper_linear_backward_keys",
        "hopper_linear_collect_queries",
        "hopper_linear_grad_key_nan_safe",  # of three that are like it
        "hopper_linear_wide_grad_query", "hopper_linear_wide_grad_key",
        "hopper_linear_wide_grad_value",
    ),
}  # fmt: skip
SWEEPS = ("linear_output", *LINEAR_PASSES["linear backward"][1:])


class LinearCall(NamedTuple):
    """A call of linear attention: plain numbers and words, so that a process can be handed it."""

    head_dim: int
    dtype: str = "bf16"
    decay: bool = False
    length: int = 1024
    batch: int = 2
    heads: int = 64
    group: int = 1  # query heads of a state

    @property
    def name(self) -> str:
        """What tells the call from others of the same sizes."""
        extras = ["decay"] if self.decay else []
        extras += ["segments"] if self.batch * self.heads < 16 else []
        extras += ["shared"] if self.group > 1 else []
        return " ".join([f"{self.dtype} d{self.head_dim} causal", *extras])


def make(call: LinearCall, device: torch.device) -> tuple[LinearInputs, LinearVariant]:
    """The tensors of a call, and what it asks for."""
    shape = call.batch, call.heads, call.length, call.head_dim
    rows = torch.zeros(shape, dtype=DTYPES[call.dtype], device=device)
    few = rows[:, : call.heads // call.group].contiguous()
    decay = torch.zeros(shape[:3], device=device) if call.decay else None
    variant = LinearVariant(True, "bottom_right", "elu+1", "sum", 1e-6, 1.0)
    return LinearInputs(rows, few, few.clone(), decay), variant


def start(
    inputs: LinearInputs, variant: LinearVariant, which: str, config: KernelConfig | None
) -> None:
    """Have the library start one of LINEAR_PASSES, as it would in a call."""
    from saccade.ops.linear_attention.triton import host as linear_host

    given = config or KernelConfig()
    body: Any = linear_host
    if which.startswith("hopper"):
        from saccade.ops.linear_attention.hopper import host as body
    results = empty_linear_results(inputs, variant)
    if which in ("linear", "hopper_linear"):
        body.forward(inputs, variant, given)
    elif which == "linear step":
        one = [rows[:, :, :1] for rows in inputs[:3]]
        here = inputs._replace(query=one[0], key=one[1], value=one[2])
        if here.decay is not None:
            here = here._replace(decay=here.decay[:, :, :1])
        linear_host.step(results.kv, results.key_sum, None, here, variant)
    else:
        gradient = torch.zeros_like(results.output)
        body.backward(
            inputs, variant, given, results.output, results.normaliser, gradient, None, None
        )
