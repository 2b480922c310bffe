"""PyTorch: softmax attention by hand, scaled_dot_product_attention, and FlexAttention."""

from __future__ import annotations

import functools
import importlib
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from saccade.bench.case import BenchCase
from saccade.bench.peers.peer import Call, Peer
from saccade.bench.visibility import block_layout

# Forward and backward hold about four tensors as large as the scores.
LARGEST_WRITTEN = 2**30


def peers() -> list[Peer]:
    """By hand, SDPA by its own choice and by each backend's name, and FlexAttention.

    On a CPU FlexAttention takes part only when it is named.
    """
    on_gpu = torch.cuda.is_available()
    return [
        *(_sdpa(who, backend) for who, backend in BACKENDS.items()),
        Peer("flex", "FlexAttention under torch.compile", _flex, on_gpu, compiles=True),
        Peer("plain", "softmax(query @ key.T * scale) @ value, written by hand", _plain),
    ]


def _plain(case: BenchCase, device: torch.device) -> Call | str:
    if reason := case.scores_beyond(LARGEST_WRITTEN):
        return reason
    hidden = None
    if case.visibility.kind != "full" or case.visibility.needs_table:
        hidden = ~case.visibility.tensor(case.query_len, case.kv_len, device)
    group = case.query_heads // case.kv_heads
    scale = 1 / math.sqrt(case.head_dim)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if group > 1:
            key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        scores = query @ key.transpose(-1, -2) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ value

    return Call(run)


BACKENDS = {
    "sdpa": None,
    "sdpa/cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa/flash": SDPBackend.FLASH_ATTENTION,
    "sdpa/efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa/math": SDPBackend.MATH,
}
# A mask that is more than full or causal must be written out, a byte a pair.
LARGEST_MASK = 2**30


def _sdpa(who: str, backend: SDPBackend | None) -> Peer:
    def around() -> AbstractContextManager[object]:
        return nullcontext() if backend is None else sdpa_kernel(backend)

    def prepare(case: BenchCase, device: torch.device) -> Call | str:
        if backend == SDPBackend.MATH and (reason := case.scores_beyond(LARGEST_WRITTEN)):
            return reason
        table_bytes = case.query_len * case.kv_len
        if case.visibility.needs_table and table_bytes > LARGEST_MASK:
            return f"its mask alone would take {table_bytes / 1e9:.1f} GB"
        call = Call(_function(case, device), around=around)
        return call if backend is None else _reason_against(call, case, device) or call

    # What a backend adds to PyTorch's own choice shows on a GPU; on a CPU that choice is flash.
    by_default = backend is None or (backend != SDPBackend.MATH and torch.cuda.is_available())
    name = "PyTorch's own choice" if backend is None else f"the {backend.name} backend"
    return Peer(who, f"scaled_dot_product_attention, {name}", prepare, by_default)


def _function(case: BenchCase, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    needs_table = case.visibility.needs_table
    causal = case.visibility.kind == "causal" and not needs_table
    mask = None
    if needs_table:
        mask = case.visibility.tensor(case.query_len, case.kv_len, device)
    grouped = case.query_heads != case.kv_heads

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )

    return run


def _reason_against(call: Call, case: BenchCase, device: torch.device) -> str | None:
    """Whether a backend takes the case: the reason against it, as PyTorch words it, or None."""
    with warnings.catch_warnings(record=True) as caught, call.around(), torch.no_grad():
        warnings.simplefilter("always")
        try:
            call.run(*case.empty(device))
        except RuntimeError as error:
            reasons = [str(warning.message) for warning in caught]
            return _first_reason([*reasons, str(error)])
    return None


def _first_reason(texts: list[str]) -> str:
    """The first text that tells something: PyTorch's warnings say why, its error only that."""
    noise = ("not used because", "runtime disabled")
    telling = [text for text in texts if not any(words in text for words in noise)]
    return telling[0].split(" (Triggered internally")[0].strip().split(". ")[0].splitlines()[0]


MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

COMPILE_LIMIT_SECONDS = 180

# Compiled apart from this process, where a compiler that hangs can be stopped.
PROBE = """
import sys, torch
from torch.nn.attention.flex_attention import flex_attention
query = torch.randn(1, 1, 128, 64, device=sys.argv[1])
torch.compile(flex_attention, dynamic=False)(query, query, query).sum().item()
"""


def _flex(case: BenchCase, device: torch.device) -> Call | str:
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


def mask_function(case: BenchCase, device: torch.device) -> MaskFunction | None:
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


def _kind_function(case: BenchCase, device: torch.device) -> MaskFunction | None:
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
