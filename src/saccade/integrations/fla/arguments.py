"""Arguments of fla's calls that several of them share: checked as fla names them and lays them out.

What comes behind knows them by Saccade's names, with heads before rows.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def check_unknown(unknown: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Refuse options that a function does not have; older versions of fla had `head_first`."""
    if unknown.get("head_first", False) is not False:
        got = unknown["head_first"]
        raise ValueError(f"head_first: got {got!r}, takes False: rows are (B, T, H, K)")
    for name in unknown:
        if name == "head_first":
            continue
        found = inspect.signature(function).parameters.values()
        takes = [each.name for each in found if each.default is not each.empty]
        near = difflib.get_close_matches(name, takes, 1)
        advice = f"write {near[0]}=" if near else f"takes {', '.join(takes)}"
        raise TypeError(f"{name}: an unknown option; {advice}")


def check_floats(name: str, value: object, form: str) -> str:
    """Refuse what is no floating-point tensor; gives what is taken instead."""
    takes = f"a floating-point tensor {form}"
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, takes {takes}")
    if not value.is_floating_point():
        raise TypeError(f"{name}: got {value.dtype}, takes {takes}")
    return takes


def check_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse rows of queries, keys and values that do not fit together."""
    keys, values = "(B, T, H, K)", "(B, T, HV, V)"
    for name, rows, form in (("q", q, keys), ("k", k, keys), ("v", v, values)):
        takes = check_floats(name, rows, form)
        if rows.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(rows.shape)}, takes {takes}")
    check_shape("k", k, "(B, T, H, K) as q", q.shape, q)
    if any(map(operator.ne, v.shape[:2], q.shape[:2])):
        wanted = tuple(q.shape[:2])
        raise ValueError(f"v: got shape {tuple(v.shape)}, takes (B, T, HV, V), here B, T {wanted}")


def check_heads(q: Tensor, v: Tensor) -> None:
    """Refuse values whose heads are no multiple of those of keys."""
    key_heads, heads = q.shape[2], v.shape[2]
    if key_heads != heads and (key_heads == 0 or heads % key_heads):
        raise ValueError(f"v: got {heads} heads, takes a multiple of k's {key_heads}")


def check_shape(name: str, tensor: Any, form: str, shape: Any, like: Tensor) -> None:
    """Refuse what is no floating-point tensor of a shape, beside q."""
    takes = check_floats(name, tensor, form)
    if tensor.dim() != len(shape) or any(map(operator.ne, tensor.shape, shape)):
        got = tuple(tensor.shape)
        raise ValueError(f"{name}: got shape {got}, takes {takes}, here {tuple(shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: got {tensor.device}, takes q's {like.device}")


def check_count(name: str, tensor: Any, form: str, shape: Any) -> None:
    """Refuse what does not hold as many numbers as a shape has, in whatever shape it has."""
    takes = check_floats(name, tensor, form)
    if tensor.numel() != math.prod(shape):
        got = tuple(tensor.shape)
        raise ValueError(f"{name}: got shape {got}, takes {takes}, here {tuple(shape)}")


def check_offsets(offsets: Any, rows: Tensor) -> None:
    """Refuse offsets that are no whole numbers in a tensor, and a batch beside them."""
    if offsets is None:
        return
    takes = "an int32 or int64 tensor [N + 1] of offsets"
    if not isinstance(offsets, Tensor):
        raise TypeError(f"cu_seqlens: got {type(offsets).__name__}, takes {takes}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: got {offsets.dtype}, takes {takes}")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"cu_seqlens: got shape {tuple(offsets.shape)}, takes {takes}")
    if offsets.device != rows.device:
        raise ValueError(f"cu_seqlens: got {offsets.device}, takes q's {rows.device}")
    if rows.shape[0] != 1:
        raise ValueError(f"q: got batch {rows.shape[0]}, takes 1 with cu_seqlens")


def check_flag(name: str, value: object) -> None:
    """Refuse what is no bool: another version has its arguments in another order."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, takes a bool")


def check_chunk(size: object) -> None:
    """Refuse a chunk_size that fla refuses."""
    if size is not None and (type(size) is not int or size < 1 or size & (size - 1)):
        raise ValueError(f"chunk_size: got {size!r}, takes a power of 2 or None")


def check_copy(copy: object, offsets: Tensor | None) -> None:
    """Refuse a cu_seqlens_cpu that is no copy, as far as shows without reading from a GPU."""
    if copy is None:
        return
    if offsets is None:
        raise ValueError("cu_seqlens_cpu: got a value without cu_seqlens, takes None")
    if not isinstance(copy, Tensor) or copy.device.type != "cpu" or copy.shape != offsets.shape:
        got = f"{copy.device} {list(copy.shape)}" if isinstance(copy, Tensor) else repr(copy)
        raise ValueError(f"cu_seqlens_cpu: got {got}, takes a copy of cu_seqlens on the CPU")
    if offsets.device.type == "cpu" and offsets.tolist() != copy.tolist():
        raise ValueError(f"cu_seqlens_cpu: got {copy.tolist()}, takes {offsets.tolist()}")
