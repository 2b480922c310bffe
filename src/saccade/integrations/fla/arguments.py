"""Arguments of fla's calls that several of them share."""

from __future__ import annotations

from torch import Tensor


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
