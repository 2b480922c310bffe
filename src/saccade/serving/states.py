"""States of sequences in a step: which rows belong together, and where their states lie.

Layers that keep a state of each sequence are called once for all sequences that go on by one token,
once for all that begin with one, and once for each longer chunk
(`saccade.integrations.transformers.StateLayers`). The states lie in pools of the cache, one number
for each sequence: a layer gets a copy of those of its rows, and what it makes of them is copied
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade import integrations
from saccade.serving.decoding import on_device

if TYPE_CHECKING:
    from saccade.integrations.transformers import StateRows
    from saccade.serving.model import PackedModel
    from saccade.serving.scheduler import Chunk


class StateShape(NamedTuple):
    """One tensor of a sequence's states."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What it takes for a sequence."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StepStates:
    """The states of a step's sequences.

    Args:
        layers: how many of the cache's tensors each layer has, which follow one another.
        chunks: in the order of their rows.
        rows: of the step; those behind the chunks' belong to no sequence.
    """

    def __init__(
        self, cache: saccade.PagedCache, layers: Sequence[int], chunks: Sequence[Chunk], rows: int
    ):
        self._cache = cache
        starts = [sum(layers[:number]) for number in range(len(layers))]
        self._places = [range(at, at + count) for at, count in zip(starts, layers, strict=True)]
        sequences = [chunk.request.sequence for chunk in chunks]
        numbers = cache.state_numbers([each for each in sequences if each is not None])
        self._rows: list[StateRows] = []
        going_on, beginning = list[tuple[int, int]](), list[tuple[int, int]]()
        row = 0
        for chunk, number in zip(chunks, numbers, strict=True):
            if chunk.rows > 1:
                self._add(slice(row, row + chunk.rows), [number], fresh=chunk.start == 0)
            else:
                (going_on if chunk.start else beginning).append((row, number))
            row += chunk.rows
        for alone, fresh in ((going_on, False), (beginning, True)):
            if alone:
                self._add([row for row, _ in alone], [number for _, number in alone], fresh=fresh)
        if row < rows:
            self._rows.append(state_rows(slice(row, rows), rows - row, True, None))

    def rows(self) -> list[StateRows]:
        """All rows of the step."""
        return self._rows

    def read(self, layer: int, rows: StateRows) -> list[Tensor]:
        """Copies of a layer's states of some rows."""
        assert rows.numbers is not None  # others begin
        return [pool.index_select(0, rows.numbers) for pool in self._of(layer)]

    def write(self, layer: int, rows: StateRows, states: Sequence[Tensor]) -> None:
        """Keep a layer's states."""
        if rows.numbers is None:
            return
        for pool, state in zip(self._of(layer), states, strict=True):
            pool.index_copy_(0, rows.numbers, state.to(pool.dtype))

    def _of(self, layer: int) -> list[Tensor]:
        return [self._cache.states[place] for place in self._places[layer]]

    def _add(self, rows: slice | list[int], numbers: list[int], *, fresh: bool) -> None:
        device = self._cache.device
        if isinstance(rows, list) and rows[-1] - rows[0] + 1 == len(rows):
            rows = slice(rows[0], rows[-1] + 1)
        found = rows if isinstance(rows, slice) else on_device(rows, torch.int64, device)
        of = on_device(numbers, torch.int64, device)
        self._rows.append(state_rows(found, len(numbers), fresh, of))


def state_rows(
    rows: slice | Tensor, sequences: int, fresh: bool, numbers: Tensor | None
) -> StateRows:
    """Rows as `saccade.integrations.transformers` has them, which is loaded with a model."""
    return integrations.transformers.StateRows(rows, sequences, fresh, numbers)


def explain_states(model: PackedModel, cache: saccade.PagedCache) -> str:
    """What states of sequences take, and what follows from them; "" where there are none."""
    if model.state_layers is None:
        return ""
    of_one = sum(state.bytes for state in model.states)
    said = (
        f"{len(model.state_layers)} layers keep a state of each sequence: {of_one / 1e6:,.3g} MB, "
        f"{cache.num_states} of them take {cache.num_states * of_one / 1e6:,.3g} MB beside pages"
    )
    by_token = model.state_layers.by_token
    if by_token:
        said += (
            f"\n{by_token} of them go on from a state token by token: prompts of more than "
            "max_batch_tokens are slow"
        )
    return said
