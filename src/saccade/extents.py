"""Extents: the sizes that captured tensors must fit."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Extents(NamedTuple):
    """The sizes of a problem's four index axes.

    For packed sequences the lengths are those of the longest sequence (None: not known without
    reading the device), and a captured tensor may be longer.
    """

    batch: int
    query_heads: int
    query_len: int | None
    kv_len: int | None
    packed: bool = False

    def in_blocks(self, query_block: int, kv_block: int) -> Extents:
        """The same, with lengths counted in blocks."""
        query_len = None if self.query_len is None else -(-self.query_len // query_block)
        kv_len = None if self.kv_len is None else -(-self.kv_len // kv_block)
        return self._replace(query_len=query_len, kv_len=kv_len)


def misfit(name: str, table: Tensor, axes: tuple[str, ...], extents: Extents) -> str | None:
    """Say what is wrong with a captured tensor's shape, or None. Size 1 always broadcasts."""
    wanted = [getattr(extents, axis) for axis in axes]
    for axis, size, want in zip(axes, table.shape, wanted, strict=True):
        if size == 1 or want is None or size == want:
            continue
        if extents.packed and axis in ("query_len", "kv_len") and size > want:
            continue
        sizes = ", ".join(f"{a} {w}" if w is not None else a for a, w in zip(axes, wanted, strict=True))
        return f"{name} of shape {tuple(table.shape)} does not fit [{sizes}] (at {axis})"
    return None
