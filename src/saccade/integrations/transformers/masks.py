"""Masks: what transformers asks a mask function for, kept as a description.

transformers calls the mask function once for each kind of layer in each forward pass. The answer
is a `LazyMask`, which has the shape of the mask and none of its memory. The attention function asks
it for a mask of saccade; that is worked out once, at the first layer that asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

import saccade
from saccade.integrations.transformers import kinds
from saccade.integrations.transformers.graph_masks import GraphMask, graph_mask
from saccade.integrations.transformers.kinds import Visible
from saccade.integrations.transformers.mask_tensors import MaskTensor


@dataclass(frozen=True)
class MaskRequest:
    """What transformers says of a mask.

    Attributes:
        batch_size, q_length, kv_length: its shape, but for the heads, which are alike.
        q_offset, kv_offset: the positions of the first query and key. Static caches know q_offset
            as a tensor.
        mask_function: of (batch, head, q_idx, kv_idx), positions; True is visible.
        real: bool [batch, positions], False at padding, or None.
        use_vmap: whether `mask_function` must be called on one index at a time.
        device: of the model's inputs.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    mask_function: Callable[..., Any]
    real: Tensor | None
    use_vmap: bool
    device: torch.device

    def visible(self) -> Visible:
        """The mask as one of saccade, None where nothing is hidden.

        Raises:
            TypeError: if the mask function does what cannot be known without its rows.
        """
        seen = saccade.masks.of_positions(
            self.mask_function, self.q_length, self.kv_length, int(self.q_offset), self.kv_offset
        )
        seen = None if seen.hides_nothing else seen.to(self.device)
        if self.real is None:
            return seen
        real = kinds.padding(self.real, self.kv_length, self.kv_offset, self.device)
        return kinds.conjunction([seen, real])

    def dense(self) -> Tensor:
        """The mask as transformers itself writes it out: bool [batch, 1, q_length, kv_length].

        Raises:
            TypeError: naming the mask function, if that is not possible.
        """
        try:
            written = masking_utils.sdpa_mask(
                batch_size=self.batch_size, q_length=self.q_length, kv_length=self.kv_length,
                q_offset=self.q_offset, kv_offset=self.kv_offset,  # pyright: ignore[reportArgumentType]
                mask_function=self.mask_function, attention_mask=self.real,
                allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
                use_vmap=self.use_vmap, device=self.device,
            )  # fmt: skip
        except Exception as error:
            raise TypeError(self._complaint(f"fails on index tensors ({error})")) from error
        shape = (self.batch_size, 1, self.q_length, self.kv_length)
        if not isinstance(written, Tensor) or written.dtype != torch.bool:
            got = written.dtype if isinstance(written, Tensor) else type(written).__name__
            raise TypeError(self._complaint(f"gives {got}"))
        if tuple(written.shape) != shape:
            raise TypeError(self._complaint(f"gives shape {tuple(written.shape)} for {shape}"))
        return written

    def _complaint(self, problem: str) -> str:
        return (
            f"mask_function: got {described(self.mask_function)}, which {problem}; takes a "
            "function of (batch_idx, head_idx, q_idx, kv_idx) index tensors that gives bools. Or "
            "pass attention_mask as a bool tensor [batch, 1, query_len, kv_len] (True = visible)"
        )


def described(function: object) -> str:
    """A function's name and where it is from."""
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else repr(function)


class LazyMask(MaskTensor):
    """A mask of shape [batch, 1, query_len, kv_len] that is not written out.

    Args:
        request: what transformers asked for.
    """

    request: MaskRequest
    _visible: list[Visible]
    _dense: Tensor | None

    @staticmethod
    def __new__(cls, request: MaskRequest) -> LazyMask:
        """A mask that is worked out when it is asked for."""
        shape = (request.batch_size, 1, request.q_length, request.kv_length)
        made = MaskTensor.empty_shell(cls, shape, torch.bool, request.device)
        made.request, made._visible, made._dense = request, [], None
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As other mask tensors, but a mask that only moves with its layer stays a mask."""
        options = kwargs or {}
        device, dtype = options.get("device"), options.get("dtype", torch.bool)
        if func is torch.ops.aten._to_copy.default and device is not None and dtype == torch.bool:
            return cls(dataclasses.replace(args[0].request, device=torch.device(device)))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @torch.compiler.disable(reason="what a closure holds is for Python to look at")
    def visible(self) -> Visible:
        """The mask for saccade's attention, None where nothing is hidden.

        Raises:
            TypeError: naming the mask function, if it can neither be traced nor written out.
        """
        if not self._visible:
            try:
                self._visible.append(self.request.visible())
            except TypeError:  # it branches on rows, say: transformers calls it for each pair
                self._visible.append(saccade.masks.dense(self.written_out()))
        return self._visible[0]

    def written_out(self) -> Tensor:
        """The mask as a bool tensor."""
        if self._dense is None:
            self._dense = self.request.dense()
        return self._dense


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> LazyMask | GraphMask:
    """The mask function that is registered with transformers' AttentionMaskInterface.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, use_vmap, device: see
            `MaskRequest`.
        attention_mask: [batch, positions], 0 at padding, or None.
        options: what other masks need (dtype, config, when to leave the mask out).
    """
    if torch.compiler.is_compiling():
        return graph_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            use_vmap, torch.device(device),
        )  # fmt: skip
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache counts it up in place, before layers ask
    return LazyMask(
        MaskRequest(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            use_vmap, torch.device(device),
        )
    )  # fmt: skip
