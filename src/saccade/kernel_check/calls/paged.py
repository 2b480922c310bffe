"""Calls of attention over pages, writes to them, and the kernels that they start."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade import attention_paged, masks, write_kv_cache
from saccade.kernel_check.calls.tensors import PAGE_DTYPES, StartPass, untouched
from saccade.masks import Mask
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant
from saccade.runtime.validation import prepare_paged

LONG_CHUNK = 512  # query rows over pages; so many take the dense kernel

PAGED_PASSES = {
    "paged": ("pages", "merge_partials", "plan_pages", "pages_forward"),
    "hopper_paged": ("hopper_pages_forward",),
    "write": ("write_pages",),
}


class PagedCall(NamedTuple):
    """A call over pages, or a write of rows into them."""

    head_dim: int
    dtype: str = "bf16"  # of queries; "fp8" over pages of it
    mask: str = "none"
    page_size: int = 64
    pages: str = ""  # their dtype, if it is another
    query_len: int = 1
    batch: int = 2
    heads: int = 32
    kv_heads: int = 8
    length: int = 1024
    latent: int = 0  # so many first channels of keys are the values; 0: values are as wide as keys

    operation = "attention_paged"

    @property
    def name(self) -> str:
        """A name in which calls of one catalogue differ."""
        extras = [self.pages] if self.pages else []
        short = "short chunk" if self.query_len > 1 else "decode"
        extras += ["chunk" if self.query_len >= LONG_CHUNK else short, f"p{self.page_size}"]
        extras += [f"latent {self.latent}"] if self.latent else []
        extras += [f"{self.heads} heads"] if self.latent else []
        return " ".join([f"{self.dtype} d{self.head_dim} {self.mask}", *extras])

    def make(self, device: torch.device) -> tuple[PagedInputs, Variant]:
        """Tensors and options."""
        inputs, variant, _, _ = prepare_paged(
            self._inputs(device), mask=self._mask(device), score=None, scale=None,
            batch_invariant=False, return_lse=False, config=None,
        )  # fmt: skip
        return inputs, variant

    def user_call(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The call by its public name: its output; nothing has gradients."""
        found = self._inputs(device)
        output = attention_paged(
            *found[:5], mask=self._mask(device), key_scales=found.key_scales,
            value_scales=found.value_scales, query_scale=found.query_scale,
        )  # fmt: skip
        return output, []

    def user_write(self, device: torch.device, rotary: bool) -> None:
        """Write rows by the function's public name."""
        found = self._inputs(device)
        key = found.query.transpose(1, 2).flatten(0, 1)[:, : self.kv_heads].contiguous()
        slots = torch.zeros(key.shape[0], dtype=torch.int64, device=device)
        angles = torch.zeros(key.shape[0], key.shape[2] // 2, device=device)
        write_kv_cache(
            key, key.clone(), found.key_pages, found.value_pages, slots,
            key_scales=found.key_scales, value_scales=found.value_scales,
            rotary=(angles, angles) if rotary else None,
        )  # fmt: skip

    def _inputs(self, device: torch.device) -> PagedInputs:
        count = -(-self.length // self.page_size)
        query_shape = self.batch, self.heads, self.query_len, self.head_dim
        shape = (self.batch * count, self.kv_heads, self.page_size, self.head_dim)
        stored = PAGE_DTYPES[self.pages or self.dtype]

        def scales() -> Tensor | None:
            of_eight_bits = self.pages or self.dtype == "fp8"
            return torch.ones(shape[:3], device=device) if of_eight_bits else None

        table = torch.arange(self.batch * count, dtype=torch.int32, device=device)
        keys = untouched(shape, stored, device)
        return PagedInputs(
            untouched(query_shape, PAGE_DTYPES[self.dtype], device),
            keys,
            keys[..., : self.latent] if self.latent else untouched(shape, stored, device),
            table.view(self.batch, count),
            torch.full((self.batch,), self.length, dtype=torch.int32, device=device),
            key_scales=scales(),
            value_scales=scales(),
            query_scale=torch.ones(query_shape[:2], device=device) if self.dtype == "fp8" else None,
        )

    def _mask(self, device: torch.device) -> Mask | None:
        if self.mask == "tree":
            parents = torch.arange(self.query_len).expand(self.batch, -1) - 1
            before = torch.full((self.batch,), self.length - self.query_len, device=device)
            return masks.tree(masks.tree_bits(parents).to(device), before)
        return masks.causal() if self.mask == "causal" else None

    def prepared(self, device: torch.device) -> StartPass:
        """Make the tensors; start passes with these."""
        inputs, variant = self.make(device)

        def start(which: str, config: KernelConfig | None) -> None:
            if which == "write":
                _write_pages(inputs)
                return
            if which == "hopper_paged":
                from saccade.ops.paged_attention import hopper as host
            else:
                from saccade.ops.paged_attention.triton import host
            with torch.no_grad():
                host.forward(inputs, variant, config or KernelConfig(), False)

        return start


def _write_pages(inputs: PagedInputs) -> None:
    from saccade.kv_cache import write_triton

    key = inputs.query.transpose(1, 2).flatten(0, 1)[:, : inputs.key_pages.shape[1]]
    slots = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device)
    angles = torch.zeros(key.shape[0], key.shape[2] // 2, device=key.device)
    write_triton.write(
        key, key, inputs.key_pages, inputs.value_pages, slots, inputs.key_scales,
        inputs.value_scales, angles, angles, False,
    )  # fmt: skip
