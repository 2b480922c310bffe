"""Graph masks: what transformers asks a mask function for, while torch.compile follows the model.

A graph holds tensors with memory only, so a `LazyMask` would break it. Here a mask is an object
beside the graph, made of the tensors and numbers that the graph passes on. What padding or packed
sequences hide is known to nobody while a graph is made: it is read when the graph runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from saccade import masks
from saccade.integrations.transformers import kinds
from saccade.integrations.transformers.kinds import Visible
from saccade.language import index_range
from saccade.modifiers import evaluate
from saccade.modifiers.expression import Coordinates
from saccade.modifiers.tape import traced_in_graph


class GraphMask:
    """A mask of shape [batch, 1, query_len, kv_len], which a model may pass on and slice.

    It is no tensor, so a model that computes with it is refused by Python.
    """

    dtype = torch.bool
    ndim = 4

    def __init__(self, seen: Visible, shape: tuple[int, int, int, int], device: torch.device):
        self._seen, self.shape, self.device = seen, shape, device

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
        return GraphMask(moved, self.shape, torch.device(device))

    def __getitem__(self, index: Any) -> GraphMask:
        """A part of it, written out."""
        part = self.written_out()[index]
        if part.dim() != 4:
            raise TypeError(
                f"attention_mask: got a part of {part.dim()} dimensions, takes parts of 4"
            )
        shape = (part.shape[0], part.shape[1], part.shape[2], part.shape[3])
        return GraphMask(masks.dense(part), shape, self.device)

    def visible(self) -> Visible:
        """The mask for saccade's attention, None where nothing is hidden."""
        return self._seen

    def written_out(self) -> Tensor:
        """The mask as a bool tensor."""
        batch, heads, query_len, kv_len = self.shape
        ends = (batch, heads, query_len, kv_len)
        at = [index_range(0, end, dim, self.device) for dim, end in enumerate(ends)]
        seen = masks.NOTHING_HIDDEN if self._seen is None else self._seen
        pairs = Coordinates(at[0], at[1], at[2], at[3], kv_len - query_len)
        return evaluate.visible(seen.key, seen.captured, pairs).expand(ends)


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
    found = traced_in_graph(mask_function, (q_offset, kv_offset))
    if found is None:  # it branches on rows, say: transformers calls it for each pair
        written = masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length,
            q_offset=q_offset, kv_offset=kv_offset,  # pyright: ignore[reportArgumentType]
            mask_function=mask_function, attention_mask=real, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        assert written is not None, "no mask is left out"
        return GraphMask(masks.dense(written), shape, device)
    seen = masks.Mask(*found)
    parts = [None if seen.hides_nothing else seen, _padding(real, kv_length, kv_offset)]
    return GraphMask(kinds.conjunction(parts), shape, device)


def _padding(real: Tensor | None, kv_len: int, kv_offset: int) -> Visible:
    """Only keys that are no padding are visible; `real` is read when the graph runs."""
    if real is None:
        return None
    if real.shape[1] < kv_offset + kv_len:
        real = F.pad(real, (0, kv_offset + kv_len - real.shape[1]))
    real = real[:, kv_offset : kv_offset + kv_len].to(torch.bool)
    return masks.dense(real[:, None, None])
