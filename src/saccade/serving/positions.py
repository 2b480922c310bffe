"""Positions: how many a model has, where it looks them up in a table.

Learned positions are rows of a table, and so are rotations that a model has made in advance: a
request that runs past the last row fails, on a GPU for the whole process. Rotations that are worked
out from the position have no end. Which of these a model does is told by a pass over one row at the
last position, with every index compared with its table before it is used.

Some rotations ("longrope", "dynamic") are other ones in passes that go past a length: by the same
pass, one long request would turn the rows of all short ones otherwise. They are told by buffers
that a pass over a row at the last position leaves with other numbers. Where each row is turned by
its own sequence's length (rotations.py) they bound nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.serving.decoding import check_number
from saccade.serving.model import PackedModel

aten = torch.ops.aten
UNLIMITED = 2**20  # tokens of a request, where the model's settings name no number


class PastTableError(Exception):
    """A lookup past the end of a table; positions: how many have a row."""

    def __init__(self, positions: int):
        super().__init__(positions)
        self.positions = positions


class TableWatch(TorchDispatchMode):
    """Raises PastTableError before an index past a table's end is used.

    Args:
        position: of the only row. A table may begin with some other rows.
    """

    def __init__(self, position: int):
        super().__init__()
        self._position = position

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at the indices of what looks rows up."""
        packet = getattr(func, "overloadpacket", None)
        if packet is aten.embedding:
            self._check(args[0].shape[0], args[1])
        elif packet in (aten.gather, aten.index_select):
            self._check(args[0].shape[args[1]] if args[0].dim() else 1, args[2])
        elif packet is aten.index:
            dim = 0
            for index in args[1]:  # None: a slice of all
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    dim += index.dim()
                    continue
                if index is not None:
                    self._check(args[0].shape[dim], index)
                dim += 1
        return func(*args, **(kwargs or {}))

    def _check(self, rows: int, index: Tensor) -> None:
        if type(index) is not Tensor or index.is_meta or not index.numel():
            return
        greatest = int(index.max())
        if greatest >= rows:
            raise PastTableError(max(0, rows - (greatest - self._position)))


def positions_within(model: PackedModel, length: int) -> int | None:
    """How many positions a model has, if it looks them up in a table of fewer than `length`."""
    try:
        with TableWatch(length - 1):
            model.probe(1, first=length - 1)
    except ValueError as error:
        if isinstance(error.__cause__, PastTableError):
            return error.__cause__.positions
        raise
    return None


def positions_alike(model: PackedModel, length: int) -> int | None:
    """How many positions have rotations that are the same whatever else is in a step, if fewer than
    `length`."""
    model.probe(1)
    before = model.buffers()
    model.probe(1, first=length - 1)
    written = model.buffers_written_since(before)
    if model.long_rotations is not None:
        written = {name for name in written if not model.long_rotations.makes(name)}
    if not written:
        return None

    def rotations(position: int) -> list[Tensor]:
        model.probe(1)  # "dynamic" keeps those of a long pass until a short one
        model.probe(1, first=position)
        return [model.module.get_buffer(name).clone() for name in written]

    def are_first(position: int) -> bool:
        found = rotations(position)
        return all(torch.equal(*pair) for pair in zip(found, first, strict=True))

    first = rotations(0)
    if are_first(length - 1):
        return None
    alike, other = 0, length - 1
    told = [bound for bound in _bounds_told(model.module.config) if bound < length]
    # Where a config tells the bound, two passes find it.
    tried = [position for bound in told for position in (bound, bound - 1)]
    while other - alike > 1:
        position = tried.pop(0) if tried else (alike + other) // 2
        if alike < position < other:
            alike, other = (position, other) if are_first(position) else (alike, position)
    model.probe(1)
    return other


def _bounds_told(config: Any) -> set[int]:
    """How many positions a config says that a model has had, or has."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    settings = [vars(text), rope, *(each for each in rope.values() if isinstance(each, dict))]
    names = "original_max_position_embeddings", "max_position_embeddings"
    found = {each.get(name) for each in settings for name in names}
    return {bound for bound in found if isinstance(bound, int) and bound > 1}


def read_max_length(model: PackedModel, max_length: int | None) -> int:
    """The tokens of a request at most.

    Raises:
        TypeError, ValueError: naming max_length, if it is more than the model has positions for, or
            more than it turns alike beside a longer request.
    """
    asked = max_length
    if asked is None:
        asked = model.longest or UNLIMITED
    check_number("max_length", asked, least=2)
    because = "which the model has positions for"
    most = positions_within(model, asked)
    if most is None:
        because = "past which the model's rotations follow the longest request of a step"
        most = positions_alike(model, asked)
    model.watch()  # a table may have grown
    if most is None:
        return asked
    if max_length is None and most >= 2:
        return most
    raise ValueError(f"max_length: got {asked}, takes at most {most}, {because}")
