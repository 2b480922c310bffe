"""Calls of linear attention, and the kernels that they start."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade import LinearState, linear_attention, linear_attention_step
from saccade.kernel_check.calls.tensors import DTYPES, StartPass, untouched
from saccade.runtime.spec import KernelConfig, LinearInputs, LinearVariant, empty_linear_results

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


class LinearCall(NamedTuple):
    """A call of linear attention."""

    head_dim: int
    dtype: str = "bf16"
    decay: bool = False
    length: int = 1024
    batch: int = 2
    heads: int = 64
    group: int = 1  # query heads of a state

    operation = "linear_attention"

    @property
    def name(self) -> str:
        """A name in which calls of one catalogue differ."""
        extras = ["decay"] if self.decay else []
        extras += ["segments"] if self.batch * self.heads < 16 else []
        extras += ["shared"] if self.group > 1 else []
        return " ".join([f"{self.dtype} d{self.head_dim} causal", *extras])

    def make(self, device: torch.device) -> tuple[LinearInputs, LinearVariant]:
        """Tensors and options."""
        shape = self.batch, self.heads, self.length, self.head_dim
        of_keys = self.batch, self.heads // self.group, *shape[2:]
        query, key, value = (
            untouched(sizes, DTYPES[self.dtype], device) for sizes in (shape, of_keys, of_keys)
        )
        decay = torch.zeros(shape[:3], device=device) if self.decay else None
        variant = LinearVariant(True, "bottom_right", "elu+1", "sum", 1e-6, 1.0)
        return LinearInputs(query, key, value, decay), variant

    def user_call(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The call by its public name: its output, and what may have gradients."""
        inputs, _ = self.make(device)
        leaves = [rows.requires_grad_() for rows in inputs[:3]]
        if inputs.decay is not None:
            leaves.append(inputs.decay.requires_grad_())
        return linear_attention(*leaves[:3], decay=inputs.decay), leaves

    def user_step(self, device: torch.device) -> None:
        """A step of decoding by the function's public name."""
        inputs, _ = self.make(device)
        shape = self.batch, self.heads // self.group, self.head_dim
        state = LinearState(
            torch.zeros(*shape, self.head_dim, device=device), torch.zeros(shape, device=device)
        )
        rows = [rows[:, :, :1].contiguous() for rows in inputs[:3]]
        decay = None if inputs.decay is None else inputs.decay[:, :, :1].contiguous()
        linear_attention_step(state, *rows, decay=decay)

    def prepared(self, device: torch.device) -> StartPass:
        """Make the tensors, and memory for a forward pass's results; start passes with these."""
        inputs, variant = self.make(device)
        results = empty_linear_results(inputs, variant)

        def start(which: str, config: KernelConfig | None) -> None:
            if which.startswith("hopper"):
                from saccade.ops.linear_attention.hopper import host
            else:
                from saccade.ops.linear_attention.triton import host
            numbers = config or KernelConfig()
            if which.endswith("backward"):
                gradient = torch.zeros_like(results.output)
                saved = results.output, results.normaliser
                host.backward(inputs, variant, numbers, *saved, gradient, None, None)
            elif which.endswith("step"):
                query, key, value = (rows[:, :, :1] for rows in inputs[:3])
                decay = None if inputs.decay is None else inputs.decay[:, :, :1]
                one = inputs._replace(query=query, key=key, value=value, decay=decay)
                host.step(results.kv, results.key_sum, None, one, variant)
            else:
                host.forward(inputs, variant, numbers)

        return start
