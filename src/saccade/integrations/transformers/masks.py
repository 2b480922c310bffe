"""Masks: what transformers asks a mask function for, kept as a description.

transformers calls the mask function once for each kind of layer in each forward pass. The answer
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
import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from transformers import masking_utils

import saccade
from saccade import masks
from saccade.integrations.transformers.deferred import Deferred, arguments_of, changes_any

# ---- mask tensors --------------------------------------------------------------------------------
# Masks in the shape of a bool tensor, which nobody takes for numbers.
#
# transformers' own code asks each attention for a mask in a form of its choice, and passes the
# answer on. Models that never ask which attention is chosen add the answer to their scores: a bool
# mask then adds 1 where a key is visible, hides nothing, and trains a model to look ahead, with no
# error. So a mask may be reshaped, sliced, turned around, combined with other masks, or choose
# between numbers (`torch.where`, `masked_fill` of what is hidden, an argument of SDPA), and stays a
# mask meanwhile; anything else raises.

aten: Any = torch.ops.aten
# What gives another mask, where it gives bools from bools.
STAYS_A_MASK = {
    aten.alias, aten.detach, aten.clone, aten._to_copy, aten.lift_fresh, aten.slice, aten.select,
    aten.view, aten._unsafe_view, aten._reshape_alias, aten.expand, aten.unsqueeze, aten.squeeze,
    aten.permute, aten.transpose, aten.t, aten.index, aten.index_select, aten.gather, aten.cat,
    aten.stack, aten.repeat, aten.split, aten.split_with_sizes, aten.unbind, aten.flip, aten.roll,
    aten.constant_pad_nd, aten.where, aten.masked_fill, aten.scatter, aten.bitwise_and,
    aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not, aten.logical_and, aten.logical_or,
    aten.logical_xor, aten.logical_not, aten.any, aten.all,
}  # fmt: skip
# What chooses by a mask, and in which argument it takes one.
CHOOSES_BY = {
    aten.where: {"condition"}, aten.masked_fill: {"mask"}, aten.masked_fill_: {"mask"},
    aten.masked_select: {"mask"}, aten.index: {"indices"}, aten.index_put: {"indices"},
    aten.index_put_: {"indices"}, aten._index_put_impl_: {"indices"},
    aten._fused_sdp_choice: {"attn_mask"}, aten.scaled_dot_product_attention: {"attn_mask"},
    aten._scaled_dot_product_attention_math: {"attn_mask"},
    aten._scaled_dot_product_flash_attention_for_cpu: {"attn_mask"},
    aten._scaled_dot_product_efficient_attention: {"attn_bias"},
    aten._scaled_dot_product_cudnn_attention: {"attn_bias"},
}  # fmt: skip
PADS = aten.constant_pad_nd
MADE_OF = ("self", "other", "tensors", "value", "values", "src")  # in operators' arguments
FILLS = {aten.masked_fill, aten.masked_fill_}  # by a mask of what is hidden
LOOKS_ONLY = {aten.equal, aten._local_scalar_dense, aten.is_nonzero}


class MaskTensor(Deferred):
    """A bool tensor, True where a key is visible, that is no number."""

    owned = False
    says_visible = True  # or, turned around, what is hidden

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what can be done to a mask.

        Raises:
            ValueError: for what takes it for numbers, naming the model. (Of a TypeError Python's
                operators would make another message, and an answer of `==`.)
            NotImplementedError: for a change in place of what others may hold.
        """
        given = arguments_of(func, args, kwargs)
        masks = {name: found for name, value in given.items() if (found := masks_in(value))}
        packet = func.overloadpacket
        chooses = set(masks) <= CHOOSES_BY.get(packet, set())
        if packet in FILLS and chooses and given["mask"].says_visible:
            raise ValueError(complaint(f"torch.ops.{func} of what it shows"))
        if packet in LOOKS_ONLY or chooses:
            return super().__torch_dispatch__(func, types, args, kwargs)
        sound = _all_bool(packet, given)
        if changes_any(func, given, MaskTensor):
            if not (sound and given["self"].owned):
                return super().__torch_dispatch__(func, types, args, kwargs)  # which refuses
            super().__torch_dispatch__(func, types, (args[0].written, *args[1:]), kwargs)
            return args[0]
        if packet in STAYS_A_MASK and sound:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            return tree_map_only(Tensor, functools.partial(_made_of, func, masks), result)
        raise ValueError(complaint(f"torch.ops.{func}"))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write truths: torch makes numbers of them (2.15), or of all numbers truths (before it).

        Raises:
            ValueError: for numbers that are no truths; -inf would become True.
        """
        if isinstance(value, int | float):
            if isinstance(value, float) or value not in (0, 1):
                raise ValueError(complaint(f"an entry of it that is set to {value}"))
            value = torch.tensor(bool(value))
        super().__setitem__(index, value)


class WrittenMask(MaskTensor):
    """A mask that is written out.

    Args:
        written: the bool tensor.
        owned: whether nobody else relies on it, so that it may be changed in place.
        says_visible: whether True is visible, and not hidden.
    """

    written: Tensor

    @staticmethod
    def __new__(cls, written: Tensor, owned: bool, says_visible: bool) -> WrittenMask:
        """The same mask, guarded."""
        strides = written.stride()
        made = Deferred.empty_shell(cls, written.shape, torch.bool, written.device, strides)
        made.written, made.owned, made.says_visible = written, owned, says_visible
        return made

    def written_out(self) -> Tensor:
        """The bool tensor."""
        return self.written


def _made_of(func: Any, masks: dict[str, list[MaskTensor]], written: Tensor) -> WrittenMask:
    """What an operator made of masks, as a mask."""
    sources = [each for found in masks.values() for each in found]
    is_view = any(returned.alias_info is not None for returned in func._schema.returns)
    owned = not is_view or all(each.owned for each in sources)
    says_visible = any(each.says_visible for each in sources)
    turned = func.overloadpacket in (aten.bitwise_not, aten.logical_not)
    return WrittenMask(written, owned, says_visible != turned)


def masks_in(value: Any) -> list[MaskTensor]:
    """The masks that an argument is, or lists."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, MaskTensor)]


def _all_bool(packet: Any, given: dict[str, Any]) -> bool:
    """Whether all that an operator's result is made of is bool: -inf would turn into True."""
    if given.get("dtype") not in (None, torch.bool):
        return False
    for value in tree_flatten([given.get(name) for name in MADE_OF])[0]:
        if isinstance(value, Tensor):
            sound = value.dtype == torch.bool
        else:  # padding turns False into 0 on the way here
            sound = isinstance(value, bool | None) or (packet is PADS and value == 0)
        if not sound:
            return False
    return True


def complaint(found: str) -> str:
    """What to say of a model that computes with a mask: who does, and what to use instead."""
    layer, model = _who()
    return (
        f"attn_implementation: got 'saccade' for {model}, whose {layer} computes with an attention "
        f"mask as if it were numbers ({found}), and not through transformers' AttentionInterface; "
        "takes 'eager', or 'sdpa' where the model has it"
    )


def _who() -> tuple[str, str]:
    """The innermost and the outermost module that are at work."""
    found: list[nn.Module] = []
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            found.append(module)
        frame = frame.f_back
    if not found:
        return "code", "no model"
    return type(found[0]).__name__, type(found[-1]).__name__


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
        real = torch.nn.functional.pad(real, (0, missing))
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
    """What all parts show; None stands for everything."""
    hiding = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, hiding) if hiding else None


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
    return GraphMask(conjunction(parts), shape, device, write)


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
        real = padding(self.real, self.kv_length, self.kv_offset, self.device)
        return conjunction([seen, real])

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
