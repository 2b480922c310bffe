"""Calls of the gated delta rule, and the kernels that they start."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import gated_delta_rule, gated_delta_rule_step, gated_delta_rule_varlen
from saccade.gpu.kernel_args import there_are
from saccade.kernel_check.calls.tensors import DTYPES, StartPass, untouched
from saccade.runtime.delta_spec import DeltaInputs, DeltaVariant
from saccade.runtime.spec import KernelConfig

LONG_ROWS = 65536  # of a sequence that is cut into segments, if its heads are few

DELTA_PASSES = {
    "delta": (
        "delta_sums", "delta_channel_sums", "delta_norms", "delta_system", "delta_segments",
        "delta_join_segments", "delta_forward_scan", "delta_forward_scan, NaN-safe",
    ),
    "delta backward": (
        "delta_reverse_scan", "delta_gradients", "delta_sum_heads", "delta_clear_behind",
    ),
    "delta step": ("delta_step",),
    "hopper_delta": ("hopper_delta_forward", "hopper_delta_nan_safe"),
    "hopper_delta backward": ("hopper_delta_forward, keeping", "hopper_delta_chunk_gradients"),
}  # fmt: skip


class DeltaCall(NamedTuple):
    """A call of the gated delta rule."""

    head_dim: int
    dtype: str = "bf16"
    decay: str = "heads"  # none, heads or channels
    length: int = 1024
    batch: int = 2
    heads: int = 32
    key_heads: int = 16
    heads_inside: bool = False  # heads beside channels, as projections leave them
    packed: bool = False  # a sequence for each batch entry

    @property
    def operation(self) -> str:
        """The public name of what is called."""
        return "gated_delta_rule_varlen" if self.packed else "gated_delta_rule"

    @property
    def name(self) -> str:
        """A name in which calls of one catalogue differ."""
        more = (", long" if self.length >= LONG_ROWS else "") + (", packed" if self.packed else "")
        return f"{self.dtype} d{self.head_dim} decay of {self.decay}{more}"

    def make(self, device: torch.device) -> tuple[DeltaInputs, DeltaVariant]:
        """Tensors and options."""

        def rows(heads: int, *channels: int, dtype: torch.dtype = DTYPES[self.dtype]) -> Tensor:
            if self.packed:
                tokens = self.batch * self.length
                return untouched((tokens, heads, *channels), dtype, device)
            if self.heads_inside:
                made = untouched((self.batch, self.length, heads, *channels), dtype, device)
                return made.transpose(1, 2)
            return untouched((self.batch, heads, self.length, *channels), dtype, device)

        query, key = (rows(self.key_heads, self.head_dim) for _ in "qk")
        value, beta, decay = rows(self.heads, self.head_dim), rows(self.heads), None
        if self.decay != "none":
            channels = (self.head_dim,) if self.decay == "channels" else ()
            decay = rows(self.heads, *channels, dtype=torch.float32)
        inputs = DeltaInputs(query, key, value, beta, decay)
        if self.packed:
            ends = torch.arange(self.batch + 1, dtype=torch.int32, device=device) * self.length
            inputs = inputs._replace(cu_seqlens=ends)
        return inputs, DeltaVariant(True, 1.0)

    def user_call(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The call by its public name: its output, and what may have gradients."""
        inputs, _ = self.make(device)
        leaves = [each.requires_grad_() for each in there_are(inputs[:5])]
        ends = there_are((inputs.cu_seqlens,))
        call: Any = gated_delta_rule_varlen if self.packed else gated_delta_rule
        output = call(*leaves[:4], *ends, decay=inputs.decay, normalize_qk=True)
        assert isinstance(output, Tensor)
        return output, leaves

    def user_step(self, device: torch.device) -> None:
        """A step of decoding by the function's public name."""
        inputs, _ = self._replace(length=1).make(device)
        state = self._states(device)
        gated_delta_rule_step(state, *inputs[:4], decay=inputs.decay, normalize_qk=True)

    def _states(self, device: torch.device) -> Tensor:
        shape = self.batch, self.heads, self.head_dim, self.head_dim
        return torch.zeros(shape, device=device)

    def prepared(self, device: torch.device) -> StartPass:
        """Make the tensors; start passes with these."""
        inputs, variant = self.make(device)

        def start(which: str, config: KernelConfig | None) -> None:
            from saccade.ops.delta_rule.hopper import host as hopper_host
            from saccade.ops.delta_rule.triton import host

            numbers = config or KernelConfig()
            if which.endswith("backward"):
                backward = hopper_host.backward if which.startswith("hopper") else host.backward
                backward(inputs, variant, numbers, torch.zeros_like(inputs.value), None)
            elif which.endswith("step"):
                one, slots = self._replace(length=1).make(device)[0], torch.arange(self.batch)
                host.step(self._states(device), slots.to(device), one, variant)
            elif which.startswith("hopper"):
                hopper_host.forward(inputs, variant, numbers)
            else:
                host.forward(inputs, variant, numbers)

        return start
