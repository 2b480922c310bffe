"""Flex: PyTorch's FlexAttention, compiled for each case's shapes and mask."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.bench.cases import Case
from saccade.bench.peers.peer import Call, Peer
from saccade.bench.visibility import block_layout

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

COMPILE_LIMIT_SECONDS = 180

# Compiled apart from this process, where a compiler that hangs can be stopped.
PROBE = """
import sys, torch
from torch.nn.attention.flex_attention import flex_attention
query = torch.randn(1, 1, 128, 64, device=sys.argv[1])
torch.compile(flex_attention, dynamic=False)(query, query, query).sum().item()
"""


def peers() -> list[Peer]:
    """The one peer of this file; on a CPU it takes part only when it is named."""
    on_gpu = torch.cuda.is_available()
    return [Peer("flex", "FlexAttention under torch.compile", _prepare, on_gpu, compiles=True)]


def _prepare(case: Case, device: torch.device) -> Call | str:
    reason = why_not(device.type)
    if reason is not None:
        return reason
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Else a backward pass frees what the next one needs, and each graph differentiates only once.
    setattr(importlib.import_module("torch._functorch.config"), "donated_buffer", False)  # noqa: B010
    # Past a handful of shapes torch.compile would leave a function uncompiled and say nothing.
    torch._dynamo.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    visible = mask_function(case, device)
    if visible is not None:
        block_mask = create_block_mask(
            visible, None, None, case.query_len, case.kv_len, device=str(device)
        )
    grouped = case.query_heads != case.kv_heads

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled(query, key, value, block_mask=block_mask, enable_gqa=grouped)

    return Call(run)


def mask_function(case: Case, device: torch.device) -> MaskFunction | None:
    """The case's mask as FlexAttention takes it; None where everything is visible."""
    kind = _kind_function(case, device)
    if len(case.visibility.documents) < 2:
        return kind
    ids = case.visibility.document_ids(device)

    def same_document(batch: Tensor, head: Tensor, query_row: Tensor, kv_row: Tensor) -> Tensor:
        return ids[query_row] == ids[kv_row]

    if kind is None:
        return same_document
    from torch.nn.attention.flex_attention import and_masks

    return and_masks(same_document, kind)


def _kind_function(case: Case, device: torch.device) -> MaskFunction | None:
    kind, size = case.visibility.kind, case.visibility.size

    def causal(batch: Tensor, head: Tensor, query_row: Tensor, kv_row: Tensor) -> Tensor:
        return kv_row <= query_row

    def window(batch: Tensor, head: Tensor, query_row: Tensor, kv_row: Tensor) -> Tensor:
        return (kv_row <= query_row) & (kv_row >= query_row - size)

    def prefix(batch: Tensor, head: Tensor, query_row: Tensor, kv_row: Tensor) -> Tensor:
        return (kv_row <= query_row) | (kv_row < size)

    if kind == "blocks":
        layout = block_layout(-(-case.query_len // size)).to(device)

        def blocks(batch: Tensor, head: Tensor, query_row: Tensor, kv_row: Tensor) -> Tensor:
            return layout[query_row // size, kv_row // size]

        return blocks
    return {"full": None, "causal": causal, "window": window, "prefix": prefix}[kind]


@functools.cache
def why_not(device_type: str) -> str | None:
    """The reason why nothing can be compiled here, found by trying once, or None."""
    command = [sys.executable, "-c", PROBE, device_type]
    try:
        probe = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"torch.compile did not finish within {COMPILE_LIMIT_SECONDS} s"
    if probe.returncode == 0:
        return None
    lines = [line.strip() for line in probe.stderr.splitlines() if "Error" in line]
    return f"torch.compile fails: {lines[-1][:160] if lines else 'no message'}"
