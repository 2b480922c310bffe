"""Installed: packages for attention that the user may have beside PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.bench.cases import Case
from saccade.bench.peers.peer import Call, Peer

Maker = Callable[[Any, Case, torch.device], Call | str]


def peers() -> list[Peer]:
    """Each package that is known here, whether it is installed or not."""
    return [
        _peer("flash_attn", "flash_attn", "FlashAttention-2", flash_attn),
        _peer("flash_attn_3", "flash_attn_interface", "FlashAttention-3", flash_attn),
        _peer("xformers", "xformers.ops", "memory_efficient_attention", _xformers),
        _peer("flash_attention_triton", "flash_attention_triton", "FlashAttention-2", _triton),
    ]


def _peer(who: str, module_name: str, about: str, make: Maker) -> Peer:
    def prepare(case: Case, device: torch.device) -> Call | str:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            package = module_name.split(".")[0]
            missing = isinstance(error, ModuleNotFoundError) and error.name == package
            return "not installed" if missing else f"import fails: {error}"
        if device.type != "cuda":
            return "it takes tensors on a GPU"
        if case.torch_dtype not in (torch.float16, torch.bfloat16):
            return f"it takes float16 and bfloat16, not {case.dtype}"
        return make(module, case, device)

    package = module_name.split(".")[0]
    installed = importlib.util.find_spec(package) is not None
    return Peer(who, f"{about}, by the package {package}", prepare, by_default=installed)


def flash_attn(module: Any, case: Case, device: torch.device) -> Call | str:
    """FlashAttention-2 and -3, whose functions take the same arguments."""
    kind, documents = case.visibility.kind, case.visibility.documents
    if kind not in ("full", "causal", "window") or (documents and not case.packed):
        return f"it has no {case.mask} mask"
    masked: dict[str, Any] = {
        "causal": kind != "full",
        "window_size": (case.visibility.size, 0) if kind == "window" else (-1, -1),
    }
    if case.packed:
        offsets, longest = case.visibility.offsets(device), max(documents)

        def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return _first(
                module.flash_attn_varlen_func(
                    query, key, value, offsets, offsets, longest, longest, **masked
                )
            )

        return Call(packed, "packed")

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _first(module.flash_attn_func(query, key, value, **masked))

    return Call(run, "rows first")


def _xformers(module: Any, case: Case, device: torch.device) -> Call | str:
    if case.query_heads != case.kv_heads:
        return "its 4-D call takes equal numbers of query and kv heads"
    if case.visibility.needs_table:
        return f"not set up here for a {case.mask} mask"
    bias = module.LowerTriangularMask() if case.visibility.kind == "causal" else None

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return module.memory_efficient_attention(query, key, value, attn_bias=bias)

    return Call(run, "rows first")


def _triton(module: Any, case: Case, device: torch.device) -> Call | str:
    if case.visibility.kind != "causal" or case.visibility.needs_table:
        return f"its mask is always causal, not {case.mask}"
    if case.query_heads != case.kv_heads:
        return "it takes equal numbers of query and kv heads"
    # [batch, heads, length, dim]; other dtypes than float16 it converts, there and back.
    return Call(module.flash_attention_v2)


def _first(result: Any) -> Tensor:
    """Some versions give the output alone, others a tuple that begins with it."""
    return result[0] if isinstance(result, tuple) else result
