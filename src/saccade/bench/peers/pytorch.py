"""PyTorch's attention as peers: by hand, SDPA and FlexAttention; and yardsticks.

Yardsticks say how fast products and the memory are: none of them computes attention.
"""

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

from saccade.bench.case import BenchCase, block_layout
from saccade.bench.peers import Call, Peer

# Forward and backward hold about four tensors as large as the scores.
LARGEST_WRITTEN = 2**30


def peers() -> list[Peer]:
    """SDPA by its own choice and by each backend's name, FlexAttention, and attention by hand."""
    on_gpu = torch.cuda.is_available()  # on a CPU FlexAttention takes part only when it is named
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
        mask = None
        if case.visibility.needs_table:
            mask = case.visibility.tensor(case.query_len, case.kv_len, device)
        options: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": case.visibility.kind == "causal" and mask is None,
            "enable_gqa": case.query_heads != case.kv_heads,
        }
        call = Call(functools.partial(scaled_dot_product_attention, **options), around=around)
        return call if backend is None else _reason_against(call, case, device) or call

    # What a backend adds to PyTorch's own choice shows on a GPU; on a CPU that choice is flash.
    by_default = backend is None or (backend != SDPBackend.MATH and torch.cuda.is_available())
    name = "PyTorch's own choice" if backend is None else f"the {backend.name} backend"
    return Peer(who, f"scaled_dot_product_attention, {name}", prepare, by_default)


def _reason_against(call: Call, case: BenchCase, device: torch.device) -> str | None:
    """Why a backend does not take the case, as PyTorch words it, or None."""
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
    if reason := why_not(device.type):
        return reason
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Else a backward pass frees what the next one needs, and each graph differentiates only once.
    setattr(importlib.import_module("torch._functorch.config"), "donated_buffer", False)  # noqa: B010
    # Past a handful of shapes torch.compile would leave a function uncompiled and say nothing.
    torch._dynamo.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if visible := mask_function(case, device):
        sizes = case.query_len, case.kv_len
        block_mask = create_block_mask(visible, None, None, *sizes, device=str(device))
    grouped = case.query_heads != case.kv_heads
    return Call(functools.partial(compiled, block_mask=block_mask, enable_gqa=grouped))


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


COPY_BYTES = 2**30
"""What "copy" moves, read and written together, whatever the case."""


def yardsticks() -> list[Peer]:
    """The rate that a product reaches, a pure read of a case's bytes, and a pure copy of many."""
    both: dict[str, Any] = {
        "by_default": False,
        "attention": ("paged", "linear", "delta"),
        "computes_attention": False,
    }
    bmm = "torch.bmm on as many operations: not attention, a yardstick"
    copy = "a copy of half a GiB, whatever the case"
    return [
        Peer("bmm", bmm, _bmm, attention=("linear", "delta"), computes_attention=False),
        Peer("read", "a sum over as many bytes as the case has", _read, **both),
        Peer("copy", copy, _copy, moves=COPY_BYTES, **both),
    ]


def _read(case: BenchCase, device: torch.device) -> Call | str:
    add_up = functools.partial(torch.sum, dim=0)
    return _moving(case, add_up, case.bytes // 4, lambda source: source.new_empty(()), device)


def _copy(case: BenchCase, device: torch.device) -> Call | str:
    # An operation: copies have an engine of their own.
    return _moving(case, torch.neg, COPY_BYTES // 8, torch.empty_like, device)


def _moving(
    case: BenchCase, operation: Any, count: int, target: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Call | str:  # fmt: skip
    """Reads that many numbers of float32, which the first call makes, and writes to a target."""
    if case.attention in ("linear", "delta") and not case.decodes:
        return "memory does not bound it"

    @functools.cache
    def memory() -> tuple[Tensor, Tensor]:
        source = torch.ones(count, device=device)
        return source, target(source)

    def run(*inputs: Tensor) -> Tensor:
        source, out = memory()
        return operation(source, out=out)

    return Call(run)


class _Products(torch.autograd.Function):
    """A product of some rows forward, and of others backward."""

    @staticmethod
    def forward(ctx: Any, products: dict[str, Any], *inputs: Tensor) -> Tensor:
        ctx.products, ctx.shapes = products, [rows.shape for rows in inputs]
        torch.bmm(*products["forward"][:2], out=products["forward"][2])
        return inputs[2].new_zeros(()).expand(products["output"])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        torch.bmm(*ctx.products["backward"][:2], out=ctx.products["backward"][2])
        nothing = grads[0].new_zeros(())
        return (None, *(nothing.expand(shape) for shape in ctx.shapes))


def _bmm(case: BenchCase, device: torch.device) -> Call | str:
    """Rows of head_dim times a matrix for each head, into memory that is there."""
    if case.decodes:
        return "a step is bound by memory: see copy"
    count = case.batch * case.output_heads
    products: dict[str, Any] = {
        "output": (case.batch, case.output_heads, case.query_len, case.value_dim)
    }
    for which_pass in ("forward", "backward"):
        rows = case.flops(which_pass) // (2 * count * case.head_dim * case.value_dim)
        options: dict[str, Any] = {"dtype": case.torch_dtype, "device": device}
        products[which_pass] = (
            torch.randn(count, rows, case.head_dim, **options),
            torch.randn(count, case.head_dim, case.value_dim, **options),
            torch.empty(count, rows, case.value_dim, **options),
        )
    return Call(lambda *inputs: _Products.apply(products, *inputs))
