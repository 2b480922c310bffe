"""Calls of fp8 attention, and the kernels that they start."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade import attention_fp8, attention_fp8_varlen, masks
from saccade.kernel_check.calls.tensors import PAGE_DTYPES, SHORT, WINDOW, StartPass, untouched
from saccade.masks import Mask
from saccade.ops.attention_fp8.validation import Fp8Options
from saccade.ops.attention_fp8.validation import prepare as prepare_fp8
from saccade.runtime.spec import KernelConfig

SCALES = "query_scale", "key_scale", "value_scale"

FP8_PASSES = {
    "fp8": ("fp8_forward", "fp8_quantise_values", "fp8_mean_keys", "fp8_quantise_rows"),
    "hopper_fp8": ("hopper_fp8_forward",),
}  # fmt: skip


class Fp8KernelCall(NamedTuple):
    """A call of fp8 attention."""

    head_dim: int
    dtype: str = "bf16"  # or "fp8"
    mask: str = "none"
    packed: bool = False
    quantize: str = "block"
    length: int = SHORT
    batch: int = 2
    heads: int = 4
    kv_heads: int = 0  # 0: as many as query heads
    heads_inside: bool = False  # [batch, length, heads, dim] in memory, as projections leave them
    scaled: bool = True  # whether e4m3 rows have scales

    @property
    def operation(self) -> str:
        """The function that is called."""
        return "attention_fp8_varlen" if self.packed else "attention_fp8"

    @property
    def name(self) -> str:
        """A name in which calls of one catalogue differ."""
        extras = [f"scales of {self.quantize}s"] if self.quantize != "block" else []
        extras += ["packed"] if self.packed else []
        extras += [] if self.scaled else [f"{self.length} rows without scales"]
        return " ".join([f"{self.dtype} d{self.head_dim} {self.mask}", *extras])

    def user_call(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The call by its public name: its output; nothing has gradients."""
        scales = dict(zip(SCALES, self._scales(device), strict=True))
        rows, options = self._rows(device), {"mask": self._mask(), "quantize": self._quantize}
        if self.packed:
            ends = self._ends(device)
            return attention_fp8_varlen(*rows, ends, ends, **scales, **options), []
        return attention_fp8(*rows, **scales, **options), []

    @property
    def _quantize(self) -> str | None:
        """How rows of 16 bits are quantised."""
        return None if self.dtype == "fp8" else self.quantize

    def _mask(self) -> Mask | None:
        if self.mask == "window":
            return masks.causal() & masks.window(WINDOW)
        return masks.causal() if self.mask == "causal" else None

    def _rows(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        def rows(heads: int) -> Tensor:
            shape = self.batch, heads, self.length, self.head_dim
            if self.packed:
                shape = self.batch * self.length, heads, self.head_dim
            elif self.heads_inside:
                shape = self.batch, self.length, heads, self.head_dim
            made = untouched(shape, PAGE_DTYPES[self.dtype], device)
            return made.transpose(1, 2) if self.heads_inside and not self.packed else made

        of_keys = self.kv_heads or self.heads
        return rows(self.heads), rows(of_keys), rows(of_keys)

    def _scales(
        self, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        if self.dtype != "fp8" or not self.scaled:
            return None, None, None
        of_keys = self.kv_heads or self.heads
        query, key, value = (
            torch.ones(self.batch, heads, device=device) for heads in (self.heads, of_keys, of_keys)
        )
        return query, key, value

    def _ends(self, device: torch.device) -> Tensor:
        tokens = self.batch * self.length
        return torch.arange(0, tokens + 1, self.length, dtype=torch.int32, device=device)

    def prepared(self, device: torch.device) -> StartPass:
        """Make the tensors; start passes with these."""
        from saccade.ops.attention_fp8.hopper import host as hopper_host
        from saccade.ops.attention_fp8.triton import host as triton_host

        ends = self._ends(device) if self.packed else None
        fp8 = Fp8Options(*self._scales(device), self._quantize, None, None, None)
        found = prepare_fp8(
            *self._rows(device), ends, None, None, None, fp8=fp8, mask=self._mask(), score=None,
            scale=None, sinks=None, return_lse=False, config=None,
        )  # fmt: skip

        def start(which: str, config: KernelConfig | None) -> None:
            with torch.no_grad():
                numbers = config or KernelConfig()
                host = hopper_host if which == "hopper_fp8" else triton_host
                host.forward(found.inputs, found.variant, numbers, found.quantisation)

        return start
