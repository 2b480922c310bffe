"""Flex: PyTorch's FlexAttention, compiled for each case's shapes and mask."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from saccade.bench.cases import Case
from saccade.bench.peers.peer import Call, Peer

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

    # Past a handful of shapes torch.compile would leave a function uncompiled and say nothing.
    torch._dynamo.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if case.visibility.kind != "full":
        block_mask = create_block_mask(
            _mask_function(case), None, None, case.query_len, case.kv_len, device=str(device)
        )
    grouped = case.query_heads != case.kv_heads

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled(query, key, value, block_mask=block_mask, enable_gqa=grouped)

    return Call(run)


def _mask_function(case: Case) -> Any:
    kind, size = case.visibility.kind, case.visibility.size

    def visible(batch: Tensor, head: Tensor, query_row: Tensor, kv_row: Tensor) -> Tensor:
        if kind == "documents":
            return query_row // size == kv_row // size
        past = kv_row <= query_row
        return past & (kv_row >= query_row - size) if kind == "window" else past

    return visible


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
