"""Products of equal inputs in one: q, k and v of an attention layer, gate and up of an MLP.

Which linear layers are given the same rows is seen in a pass, so no architecture's names are
needed. Their weights are laid one behind the other in memory, of which the model's own parameters
become views: optimisers, `load_state_dict` and ties by the parameter see no difference, and what is
written in place is seen by the merged product. The first of such layers that is called multiplies
by all weights, and the others take their part of what it found.

The model itself is not changed: its layers do so only while a step is under way, and only for the
thread that takes it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Parameter

from saccade.serving.model import PackedModel, check_packed_passes

R = TypeVar("R")


class Place(NamedTuple):
    """Where a layer's parameter lay when it was merged: another one there is no part of it."""

    layer: Linear
    name: str
    parameter: Parameter
    address: int

    @property
    def left(self) -> bool:
        """Whether the parameter was replaced, or lies elsewhere now."""
        now = _parameter(self.layer, self.name)
        return now is not self.parameter or now.data_ptr() != self.address


class MergedGroup:
    """Layers whose products are one.

    Args:
        layers: that are given the same rows; none of them has a reason in `why_not`.
    """

    def __init__(self, layers: Sequence[Linear]):
        self.layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._weight = _side_by_side(layers, "weight")
        self._bias = None if layers[0].bias is None else _side_by_side(layers, "bias")
        names = ["weight"] if self._bias is None else ["weight", "bias"]
        self._places = [
            Place(layer, name, _parameter(layer, name), _parameter(layer, name).data_ptr())
            for layer in layers
            for name in names
        ]
        self._rows: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return self._weight.nbytes

    def forget(self) -> None:
        """Let go of what a pass has left."""
        self._rows, self._parts = None, {}

    def product(self, number: int, rows: Tensor) -> Tensor:
        """What the layer of that number gives."""
        if rows is not self._rows or number not in self._parts:
            if any([place.left for place in self._places]):  # weights were replaced: others' layers
                return Linear.forward(self.layers[number], rows)
            found = F.linear(rows, self._weight, self._bias)
            self._rows = rows
            self._parts = dict(enumerate(found.split(self._sizes, dim=-1)))
        part = self._parts.pop(number)
        if not self._parts:
            self._rows = None
        return part


class MergedProducts:
    """The groups of a model, in it while a step is under way (`StepLayers`).

    Attributes:
        complete: whether all layers of equal rows are in groups.
    """

    def __init__(self, groups: Sequence[MergedGroup], *, complete: bool):
        self.groups, self.complete = groups, complete
        self._thread: int | None = None  # that takes a step
        self._forwards = [
            [self._forward(group, number) for number in range(len(group.layers))]
            for group in groups
        ]

    def call(self, step: Any, run: Callable[[Any], R]) -> R:
        """Run a pass of a step with merged products.

        Whatever ends the pass, an interrupt between any two lines included, the model is what it
        was. A layer whose forward was replaced since keeps that.
        """
        replaced: list[Linear] = []

        def put_back() -> None:
            self._thread = None
            for layer in replaced:
                vars(layer).pop("forward", None)
            for group in self.groups:
                group.forget()

        try:
            try:
                self._thread = threading.get_ident()
                for group, forwards in zip(self.groups, self._forwards, strict=True):
                    if any(["forward" in vars(layer) for layer in group.layers]):
                        continue
                    for layer, forward in zip(group.layers, forwards, strict=True):
                        replaced.append(layer)
                        vars(layer)["forward"] = forward
                return run(step)
            finally:
                put_back()
        except BaseException:  # an interrupt may have ended that, too
            put_back()
            raise

    def _forward(self, group: MergedGroup, number: int) -> Callable[[Tensor], Tensor]:
        layer = group.layers[number]

        def forward(input: Tensor) -> Tensor:
            if threading.get_ident() != self._thread:
                return Linear.forward(layer, input)
            return group.product(number, input)

        return forward


def merge_products(model: PackedModel) -> str:
    """Merge the products of a model's layers for all of its steps, where that can be done.

    Returns:
        How it went, for users to read.
    """
    found, reasons = list[MergedGroup](), Counter[str]()
    others = Counter(_own(each).untyped_storage().data_ptr() for each in model.module.parameters())
    for layers in linears_of_equal_rows(model):
        reason = why_not(layers, others)
        if reason:
            reasons[reason] += 1
        else:
            found.append(MergedGroup(layers))
    said = [f"{count} groups of products are not merged: {why}" for why, count in reasons.items()]
    if found:
        model.call_with(MergedProducts(found, complete=not reasons))
        size = sum(group.nbytes for group in found) / 2**20
        where = " in compiled layers" if any(map(_is_shared_out, found[0].layers)) else ""
        said.insert(0, f"{len(found)} groups of products are merged{where} ({size:.1f} MiB of "
                    "weights moved, none copied for good)")  # fmt: skip
    return "\n".join(said) or "no products are merged: no linear layers are given the same rows"


def read_merge(
    asked: bool | Literal["auto"], *, by_default: bool, shared_out: bool = False
) -> bool:
    """Whether products are to be merged.

    Args:
        shared_out: whether ranks share layers that are not compiled.

    Raises:
        ValueError: for what is neither a bool nor "auto", and for layers that are shared out as
            they are.
    """
    if asked is True and shared_out:
        raise ValueError(
            "merge_products: got True with a model whose weights are shared out, takes it with "
            "compile=True or with one process"
        )
    if isinstance(asked, bool):
        return asked
    if asked != "auto":
        raise ValueError(f'merge_products: got {asked!r}, takes True, False or "auto"')
    return by_default


def linears_of_equal_rows(model: PackedModel) -> list[list[Linear]]:
    """Linear layers that are called one after the other, once each, with the same tensor."""
    calls: list[tuple[Linear, Tensor]] = []

    def note(layer: Linear, arguments: tuple[Any, ...]) -> None:
        calls.append((layer, arguments[0]))

    linears = [each for each in model.module.modules() if isinstance(each, Linear)]
    hooks = [each.register_forward_pre_hook(note) for each in linears]
    try:
        model.probe(2)
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(id(layer) for layer, _ in calls)
    groups: list[list[Linear]] = []
    before: Tensor | None = None
    for layer, rows in calls:
        if rows is not before:
            groups.append([])
        groups[-1].append(layer)
        before = rows
    return [
        group for group in groups
        if len(group) > 1 and all(times[id(layer)] == 1 for layer in group)
    ]  # fmt: skip


def why_not(layers: Sequence[Linear], in_storage: Counter[int]) -> str:
    """Why the products of layers cannot be one; "" where they can.

    Args:
        in_storage: how many of the model's parameters lie in each storage.
    """
    kinds = {type(layer) for layer in layers} - {Linear}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        return f"a layer is a {names}, no plain Linear"
    shared_out = {_is_shared_out(layer) for layer in layers}
    if len(shared_out) > 1:
        return "some are shared out over ranks, others not"
    if shared_out == {False} and any("forward" in vars(layer) for layer in layers):
        return "a layer's forward was replaced"
    if len({layer.bias is None for layer in layers}) > 1:
        return "some have a bias, others none"
    parameters = [
        _own(each) for layer in layers for each in (layer.weight, layer.bias) if each is not None
    ]
    plain = torch.Tensor if shared_out == {True} else Parameter
    if any(type(each) is not plain for each in parameters):
        return "a weight is no plain parameter"
    if len({(each.dtype, each.device) for each in parameters}) > 1:
        return "weights are of unlike dtypes or devices"
    if any(each.is_inference() or not each.is_contiguous() for each in parameters):
        return "a weight was made in inference mode, or is not contiguous"
    names = ["weight"] if layers[0].bias is None else ["weight", "bias"]
    if all(as_one([_parameter(layer, name) for layer in layers]) is not None for name in names):
        # another engine has merged them
        return ""
    storages = [each.untyped_storage() for each in parameters]
    alone = all(
        storage.nbytes() == each.nbytes and in_storage[storage.data_ptr()] == 1
        for each, storage in zip(parameters, storages, strict=True)
    )
    if not alone or any(each.device.type == "cpu" and each.is_shared() for each in parameters):
        return "a weight's memory holds, or is shared with, something else"
    return ""


def _parameter(layer: Linear, name: str) -> Any:
    return _own(layer._parameters[name])


def _own(parameter: Any) -> Any:
    """A parameter, or this rank's part of one that is shared out."""
    return getattr(parameter, "_local_tensor", parameter)


def _is_shared_out(layer: Linear) -> bool:
    """Whether ranks share a layer's weight: its forward is replaced then, by what sums or splits.
    Products of such layers are merged where they are compiled."""
    return hasattr(layer.weight, "_local_tensor")


# Of parts that have storages of their own, by the first one's address.
_whole_of: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Weights that lie one behind the other, as one tensor; None where they do not."""
    whole = _whole_of.get(parts[0].data_ptr())
    if whole is not None and _lie_in(parts, whole):
        return whole
    if not _follow(parts):
        return None
    size = sum([part.shape[0] for part in parts])
    return parts[0].detach().as_strided((size, *parts[0].shape[1:]), parts[0].stride())


def _follow(parts: Sequence[Tensor]) -> bool:
    """Whether tensors lie one behind the other in memory of their own, which holds nothing else."""
    storage = parts[0].untyped_storage()
    address = storage.data_ptr()
    if storage.nbytes() != sum([part.nbytes for part in parts]):
        return False
    for part in parts:
        if part.data_ptr() != address or not part.is_contiguous():
            return False
        address += part.nbytes
    return True


def _lie_in(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether tensors lie one behind the other where a whole lies, and are all of it."""
    address, sizes, dtype = whole.data_ptr(), whole.shape[1:], whole.dtype
    for part in parts:
        if part.data_ptr() != address or not part.is_contiguous():
            return False
        if part.shape[1:] != sizes or part.dtype != dtype:
            return False
        address += part.nbytes
    return address == whole.data_ptr() + whole.nbytes


def _side_by_side(layers: Sequence[Linear], name: str) -> Tensor:
    """All weights or biases as one tensor, of which the layers' own become views."""
    parts = [_parameter(layer, name) for layer in layers]
    shared_out = _is_shared_out(layers[0])
    with torch.inference_mode(False), torch.no_grad():
        found = as_one(parts)
        if found is not None:
            return found
        whole = torch.cat([part.data for part in parts])
        for part, view in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
            # Inputs of a graph that are wrapped must not share a storage, as PyTorch gives them one
            # on no device while it traces.
            part.data = torch.from_dlpack(view) if shared_out else view
        if shared_out:
            _whole_of[whole.data_ptr()] = whole
        if whole.device.type == "cuda":  # else blocks too small for the next group would pile up
            torch.cuda.empty_cache()
    return whole


def check_merged(
    model: PackedModel, page_size: int, options: Mapping[str, Any], merge: bool
) -> str:
    """`check_packed_passes`, with merged products where they are wanted and give the same.

    Returns:
        How merging went; "" where it was not wanted.
    """
    if not merge:
        check_packed_passes(model, page_size, options)
        return ""
    if model.state_layers is not None:
        check_packed_passes(model, page_size, options)
        return "no products are merged: layers that keep states are called otherwise"
    said = merge_products(model)
    try:
        check_packed_passes(model, page_size, options)
    except Exception as error:  # a view of a product may be refused where a tensor is not
        model.call_with(None)
        check_packed_passes(model, page_size, options)
        return f"no products are merged: {shorten(' '.join(str(error).split()), 300)}"
    return said
