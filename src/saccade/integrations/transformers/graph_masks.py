"""Graph masks: what transformers asks a mask function for, while torch.compile follows the model.

A graph holds tensors with memory only, so a `LazyMask` would break it. Here a mask is an object
beside the graph, made of the tensors and numbers that the graph passes on. What padding or packed
sequences hide is known to nobody while a graph is made: it is read when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from saccade import masks
from saccade.integrations.transformers import kinds
from saccade.integrations.transformers.kinds import Visible


class GraphMask:
    """A mask of shape [batch, 1, query_len, kv_len], which a model may pass on and slice.

    It is no tensor, so a model that computes with it is refused by Python.
    """

    dtype = torch.bool
    ndim = 4

    def __init__(
        self,
        seen: Visible,
        shape: tuple[int, int, int, int],
        device: torch.device,
        write: Callable[[], Tensor],
    ):
        self._seen, self.shape, self.device, self._write = seen, shape, device, write

    def dim(self) -> int:
        """As many as a tensor would have."""
        return 4

    def size(self, dim: int | None = None) -> Any:
        """As a tensor says it."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, device: Any, **_: Any) -> GraphMask:
        """The same on a device; other conversions are for numbers."""
        if not isinstance(device, (torch.device, str)):
            raise TypeError(f"attention_mask: got .to({device}) of a mask, takes a device")
        moved = None if self._seen is None else self._seen.to(device)
        return GraphMask(moved, self.shape, torch.device(device), lambda: self._write().to(device))

    def __getitem__(self, index: Any) -> GraphMask:
        """A part of it, written out."""
        part = self.written_out()[index]
        if part.dim() != 4:
            raise TypeError(
                f"attention_mask: got a part of {part.dim()} dimensions, takes parts of 4"
            )
        shape = (part.shape[0], part.shape[1], part.shape[2], part.shape[3])
        return GraphMask(masks.dense(part), shape, self.device, lambda: part)

    def visible(self) -> Visible:
        """The mask for saccade's attention, None where nothing is hidden."""
        return self._seen

    def written_out(self) -> Tensor:
        """The mask as a bool tensor."""
        return self._write()


def graph_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Any,
    real: Tensor | None,
    use_vmap: bool,
    device: torch.device,
) -> GraphMask:
    """The mask that a `MaskRequest` of these fields asks for, inside of a graph."""
    shape = (batch_size, 1, q_length, kv_length)

    def write() -> Tensor:
        written = masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length,
            q_offset=q_offset, kv_offset=kv_offset,  # pyright: ignore[reportArgumentType]
            mask_function=mask_function, attention_mask=real, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        assert written is not None, "no mask is left out"
        return written

    try:
        seen = masks.of_positions(mask_function, q_length, kv_length, q_offset, kv_offset)
    except TypeError:  # it branches on rows, say: transformers calls it for each pair
        written = write()
        return GraphMask(masks.dense(written), shape, device, lambda: written)
    parts = [None if seen.hides_nothing else seen, _padding(real, kv_length, kv_offset)]
    return GraphMask(kinds.conjunction(parts), shape, device, write)


def _padding(real: Tensor | None, kv_len: int, kv_offset: int) -> Visible:
    """Only keys that are no padding are visible; `real` is read when the graph runs."""
    if real is None:
        return None
    if real.shape[1] < kv_offset + kv_len:
        real = F.pad(real, (0, kv_offset + kv_len - real.shape[1]))
    real = real[:, kv_offset : kv_offset + kv_len].to(torch.bool)
    return masks.dense(real[:, None, None])
