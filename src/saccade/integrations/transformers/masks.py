"""Masks: what transformers asks a mask function for, kept as a description.

transformers calls the mask function once for each type of layer in each forward pass. The answer
is a `LazyMask`, which has the shape of the mask and none of its memory. The attention function asks
it for a mask of saccade; that is worked out once, at the first layer that asks.

A graph of torch.compile holds tensors with memory only, so a `LazyMask` would break it. There a
`GraphMask` is an object beside the graph, made of the tensors and numbers that the graph passes on.
What padding or packed sequences hide is not known while a graph is made: it is read when the graph
runs.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from saccade import masks
from saccade.integrations.transformers.deferred import MaskTensor

Visible = masks.Mask | None  # None: everything is


def padding(real: Tensor, kv_len: int, kv_offset: int, device: torch.device) -> Visible:
    """Only keys that are no padding are visible.

    Args:
        real: bool [batch, positions]; positions behind its end are padding.
        kv_len, kv_offset: rows of keys, and the position of the first one.
        device: where the mask is used.
    """
    missing = kv_offset + kv_len - real.shape[1]
    if missing > 0:
        real = F.pad(real, (0, missing))
    real = real.to(device=device, dtype=torch.bool)[:, kv_offset : kv_offset + kv_len]
    numbers = real.int()
    # one transfer from the device for all three
    counts, firsts, lasts = torch.stack(
        [numbers.sum(1), numbers.argmax(1), kv_len - 1 - numbers.flip(1).argmax(1)]
    ).tolist()
    if all(count == kv_len for count in counts):
        return None
    spans = [
        (0, 0) if c == 0 else (f, e + 1) for c, f, e in zip(counts, firsts, lasts, strict=True)
    ]
    if any(stop - start != count for (start, stop), count in zip(spans, counts, strict=True)):
        return masks.dense(real[:, None, None])
    starts, stops = torch.tensor(spans, dtype=torch.int32, device=device).unbind(1)
    before = None if not any(start for start, _ in spans) else ~masks.key_lengths(starts)
    behind = None if all(stop == kv_len for _, stop in spans) else masks.key_lengths(stops)
    return conjunction([before, behind])


def conjunction(parts: Iterable[Visible]) -> Visible:
    """The mask of what is visible in all parts; None where nothing is hidden."""
    hiding = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, hiding) if hiding else None


class GraphMask:
    """A mask of shape [batch, 1, query_len, kv_len], which a model may pass on and slice.

    It is no tensor, so a model that computes with it is refused by Python.
    """

    shape: tuple[int, int, int, int]
    device: torch.device

    dtype: torch.dtype = torch.bool
    ndim: int = 4

    def __init__(
        self,
        seen: Visible,
        shape: tuple[int, int, int, int],
        device: torch.device,
        write: Callable[[], Tensor],
    ):
        self._seen, self.shape, self.device, self._write = seen, shape, device, write

    def dim(self) -> int:
        """The number of dimensions that a tensor would have."""
        return 4

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one side of it."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, device: Any, **_: Any) -> GraphMask:
        """This mask on a device; other conversions are for numbers."""
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


def graph_mask(request: MaskRequest) -> GraphMask:
    """The mask that a request asks for, inside of a graph."""

    def write() -> Tensor:  # a bound method cannot leave a graph
        return request.written()

    try:
        seen = request.traced(request.q_offset)
    except TypeError:  # it branches on rows, say: transformers calls it for each pair
        written = request.written()
        return GraphMask(masks.dense(written), request.shape, request.device, lambda: written)
    parts = [None if seen.hides_nothing else seen]
    parts.append(_padding(request.real, request.kv_length, request.kv_offset))
    return GraphMask(conjunction(parts), request.shape, request.device, write)


def _padding(real: Tensor | None, kv_len: int, kv_offset: int) -> Visible:
    """Only keys that are no padding are visible; `real` is read when the graph runs."""
    if real is None:
        return None
    if real.shape[1] < kv_offset + kv_len:
        real = F.pad(real, (0, kv_offset + kv_len - real.shape[1]))
    real = real[:, kv_offset : kv_offset + kv_len].to(torch.bool)
    return masks.dense(real[:, None, None])


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

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, 1, q_length, kv_length]."""
        return self.batch_size, 1, self.q_length, self.kv_length

    def traced(self, q_offset: int | Tensor) -> masks.Mask:
        """The mask function as a mask of saccade, without padding.

        Raises:
            TypeError: if the mask function does what cannot be known without its rows.
        """
        return masks.of_positions(
            self.mask_function, self.q_length, self.kv_length, q_offset, self.kv_offset
        )

    def visible(self) -> Visible:
        """The mask as one of saccade, None where nothing is hidden.

        Raises:
            TypeError: as `traced`.
        """
        seen = self.traced(int(self.q_offset))
        seen = None if seen.hides_nothing else seen.to(self.device)
        if self.real is None:
            return seen
        real = padding(self.real, self.kv_length, self.kv_offset, self.device)
        return conjunction([seen, real])

    def written(self) -> Tensor:
        """The mask as transformers itself writes it out."""
        written = masking_utils.sdpa_mask(
            batch_size=self.batch_size, q_length=self.q_length, kv_length=self.kv_length,
            q_offset=self.q_offset, kv_offset=self.kv_offset,  # pyright: ignore[reportArgumentType]
            mask_function=self.mask_function, attention_mask=self.real, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=self.use_vmap, device=self.device,
        )  # fmt: skip
        assert written is not None, "no mask is left out"
        return written

    def dense(self) -> Tensor:
        """The written mask, checked: bool [batch, 1, q_length, kv_length].

        Raises:
            TypeError: naming the mask function, if that is not possible.
        """
        try:
            written = self.written()
        except Exception as error:
            raise TypeError(self._complaint(f"fails on index tensors ({error})")) from error
        if not isinstance(written, Tensor) or written.dtype != torch.bool:
            got = written.dtype if isinstance(written, Tensor) else type(written).__name__
            raise TypeError(self._complaint(f"gives {got}"))
        if tuple(written.shape) != self.shape:
            raise TypeError(self._complaint(f"gives shape {tuple(written.shape)} for {self.shape}"))
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
        made = MaskTensor.empty_shell(cls, request.shape, torch.bool, request.device)
        made.request, made._visible, made._dense = request, [], None
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what can be done to a mask; one that only moves with its layer is not written out."""
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
                self._visible.append(masks.dense(self.written_out()))
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

    Examples:
        >>> from saccade.integrations.transformers import lazy_mask
        >>> mask = lazy_mask(batch_size=1, q_length=2, kv_length=4, q_offset=2)
        >>> mask.shape
        torch.Size([1, 1, 2, 4])
    """
    in_graph = torch.compiler.is_compiling()
    if isinstance(q_offset, Tensor) and not in_graph:
        q_offset = q_offset.clone()  # a static cache counts it up in place, before layers ask
    request = MaskRequest(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        use_vmap, torch.device(device),
    )  # fmt: skip
    return graph_mask(request) if in_graph else LazyMask(request)
