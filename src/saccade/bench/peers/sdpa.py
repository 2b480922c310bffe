"""SDPA: PyTorch's scaled_dot_product_attention, by default choice and by each of its backends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from saccade.bench.cases import Case
from saccade.bench.peers.peer import Call, Peer

BACKENDS = {
    "sdpa": None,
    "sdpa/cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa/flash": SDPBackend.FLASH_ATTENTION,
    "sdpa/efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa/math": SDPBackend.MATH,
}
# The math backend writes all scores out.
LARGEST_SCORES = 2**30
# A mask that is more than full or causal must be written out, a byte a pair.
LARGEST_MASK = 2**30


def peers() -> list[Peer]:
    """PyTorch's own choice, and each backend by name."""
    return [_peer(who, backend) for who, backend in BACKENDS.items()]


def _peer(who: str, backend: SDPBackend | None) -> Peer:
    def around() -> AbstractContextManager[object]:
        return nullcontext() if backend is None else sdpa_kernel(backend)

    def prepare(case: Case, device: torch.device) -> Call | str:
        if backend == SDPBackend.MATH and case.score_bytes > LARGEST_SCORES:
            return f"its scores alone would take {case.score_bytes / 1e9:.1f} GB"
        table_bytes = case.query_len * case.kv_len
        if case.visibility.needs_table and table_bytes > LARGEST_MASK:
            return f"its mask alone would take {table_bytes / 1e9:.1f} GB"
        call = Call(_function(case, device), around=around)
        return call if backend is None else _try(call, case, device) or call

    # What a backend adds to PyTorch's own choice shows on a GPU; on a CPU that choice is flash.
    by_default = backend is None or (backend != SDPBackend.MATH and torch.cuda.is_available())
    name = "PyTorch's own choice" if backend is None else f"the {backend.name} backend"
    return Peer(who, f"scaled_dot_product_attention, {name}", prepare, by_default)


def _function(case: Case, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
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


def _try(call: Call, case: Case, device: torch.device) -> str | None:
    """Whether a backend takes the case: the reason against it, as PyTorch words it, or None."""
    query, key, value = (
        torch.empty(case.batch, heads, length, dim, dtype=case.torch_dtype, device=device)
        for heads, length, dim in (
            (case.query_heads, case.query_len, case.head_dim),
            (case.kv_heads, case.kv_len, case.head_dim),
            (case.kv_heads, case.kv_len, case.value_dim),
        )
    )
    with warnings.catch_warnings(record=True) as caught, call.around(), torch.no_grad():
        warnings.simplefilter("always")
        try:
            call.run(query, key, value)
        except RuntimeError as error:
            reasons = [str(warning.message) for warning in caught]
            return _first_reason([*reasons, str(error)])
    return None


def _first_reason(texts: list[str]) -> str:
    """The first text that tells something: PyTorch's warnings say why, its error only that."""
    noise = ("not used because", "runtime disabled")
    telling = [text for text in texts if not any(words in text for words in noise)]
    return telling[0].split(" (Triggered internally")[0].strip().split(". ")[0].splitlines()[0]
