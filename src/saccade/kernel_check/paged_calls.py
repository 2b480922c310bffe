"""Calls over pages: descriptions of them, which kernels are compiled for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade import masks
from saccade.kernel_check.dtypes import STORED
from saccade.masks import Mask
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant
from saccade.runtime.validation import prepare_paged

# The kernels, by what starts them.
PAGED_PASSES = {
    "paged": ("pages", "merge_partials", "plan_pages", "pages_forward"),
    "hopper_paged": ("hopper_pages_forward",),  # by kernels for sm_90 alone
    "write": ("write_pages",),
}
LONG_CHUNK = 512  # query rows


class PagedCall(NamedTuple):
    """A call over pages. Plain numbers and words, so that it can be handed to a process."""

    head_dim: int
    dtype: str = "bf16"
    mask: str = "none"
    page_size: int = 64
    pages: str = ""  # their dtype, if it is another
    query_len: int = 1
    batch: int = 2
    heads: int = 32
    kv_heads: int = 8
    length: int = 1024

    @property
    def name(self) -> str:
        """What tells the call from others of the same sizes."""
        extras = [self.pages] if self.pages else []
        short = "short chunk" if self.query_len > 1 else "decode"
        extras += ["chunk" if self.query_len >= LONG_CHUNK else short, f"p{self.page_size}"]
        return " ".join([f"{self.dtype} d{self.head_dim} {self.mask}", *extras])


def make(call: PagedCall, device: torch.device) -> tuple[PagedInputs, Variant]:
    """The tensors of a call, and what it asks for."""
    count = -(-call.length // call.page_size)
    shape = (call.batch * count, call.kv_heads, call.page_size, call.head_dim)
    stored = STORED[call.pages or call.dtype]

    def scales() -> Tensor | None:
        return torch.ones(shape[:3], device=device) if call.pages else None

    table = torch.arange(call.batch * count, dtype=torch.int32, device=device)
    inputs = PagedInputs(
        torch.zeros(
            call.batch, call.heads, call.query_len, call.head_dim, dtype=STORED[call.dtype],
            device=device,
        ),
        torch.zeros(shape, device=device).to(stored),
        torch.zeros(shape, device=device).to(stored),
        table.view(call.batch, count),
        torch.full((call.batch,), call.length, dtype=torch.int32, device=device),
        key_scales=scales(),
        value_scales=scales(),
    )  # fmt: skip
    mask = _mask(call, device)
    inputs, variant, _, _ = prepare_paged(
        inputs, mask=mask, score=None, scale=None, batch_invariant=False, return_lse=False,
        config=None,
    )  # fmt: skip
    return inputs, variant


def _mask(call: PagedCall, device: torch.device) -> Mask | None:
    if call.mask == "tree":
        parents = torch.arange(call.query_len).expand(call.batch, -1) - 1
        before = torch.full((call.batch,), call.length - call.query_len, device=device)
        return masks.tree(masks.tree_bits(parents).to(device), before)
    return {"none": None, "causal": masks.causal()}[call.mask]


def start(inputs: PagedInputs, variant: Variant, which: str, config: KernelConfig | None) -> None:
    """Have the library start one of PAGED_PASSES, as it would in a call."""
    from saccade.kv_cache import write_triton
    from saccade.ops.paged_attention.triton import host as paged_host

    if which == "paged":
        paged_host.forward(inputs, variant, config or KernelConfig(), False)
        return
    if which == "hopper_paged":
        from saccade.ops.paged_attention.hopper import host as paged_host

        paged_host.forward(inputs, variant, config or KernelConfig(), False)
        return
    key = inputs.query.transpose(1, 2).flatten(0, 1)[:, : inputs.key_pages.shape[1]]
    slots = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device)
    angles = torch.zeros(key.shape[0], key.shape[2] // 2, device=key.device)
    write_triton.write(
        key, key, inputs.key_pages, inputs.value_pages, slots, inputs.key_scales,
        inputs.value_scales, angles, angles, False,
    )  # fmt: skip
