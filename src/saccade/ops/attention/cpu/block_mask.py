"""Block mask: which ranges of keys each tile of query rows visits, and where it needs the mask.

A model asks for the same plans and partial tiles in every layer, forwards and backwards, so they
are `Remembered`. What a mask captured may change in place at any time, with or without PyTorch's
knowledge, so tensors are compared by their contents: equal ones give the same result, whoever
wrote them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.modifiers import intervals
from saccade.modifiers.evaluate import index_range
from saccade.modifiers.expression import Captured, Coordinates
from saccade.runtime.spec import Variant

Result = TypeVar("Result")

# Captured numbers of one mask that are copied and compared: more would cost what they save.
MOST_COMPARED = 2**18


@dataclass(frozen=True)
class _Entry(Generic[Result]):
    tensors: list[Tensor]  # copies
    result: Result
    size: int


class Remembered(Generic[Result]):
    """Results by key and by the contents of tensors; the oldest go first.

    Args:
        most: the sum of sizes up to which results are kept.
        size: of one result.
    """

    def __init__(self, most: int, size: Callable[[Result], int] = lambda result: 1):
        self.most, self.size = most, size
        self.total = 0
        self.entries: OrderedDict[Hashable, _Entry[Result]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], Result]) -> Result:
        """The result that is known, or a new one of `make`, which must depend on nothing else."""
        key = (key, *[(tensor.shape, tensor.dtype) for tensor in tensors])
        found = self.entries.get(key)
        if found is not None and all(map(torch.equal, found.tensors, tensors)):
            with self.lock:
                if key in self.entries:
                    self.entries.move_to_end(key)
            return found.result
        compared = sum(tensor.numel() for tensor in tensors) <= MOST_COMPARED
        if not compared or any(tensor.is_floating_point() for tensor in tensors):
            return make()  # of real numbers 0.0 and -0.0 are equal
        with torch.inference_mode(False), torch.no_grad():  # it must serve everywhere
            copies = [tensor.clone() for tensor in tensors]
            result = make()
        self._keep(key, _Entry(copies, result, self.size(result)))
        return result

    def _keep(self, key: Hashable, entry: _Entry[Result]) -> None:
        if entry.size > self.most:
            return
        with self.lock:
            old = self.entries.pop(key, None)
            self.total += entry.size - (0 if old is None else old.size)
            self.entries[key] = entry
            while self.total > self.most:
                self.total -= self.entries.popitem(last=False)[1].size


QUERY_TILE = 256
KV_TILE = 128
# A full range this long is worth a call of its own; a shorter one runs with the mask of its
# neighbours, which costs less than merging one more partial result.
LONG_RANGE = 1024
# Key rows under one evaluation of the mask: bounds the memory that a masked run needs.
MASKED_RANGE = 4096
# Short sequences go together, under one mask: a call for each would cost more than it skips. They
# have one query tile and at most so many key tiles; and so many pairs of a head go together.
SHORT_TILES = 2
PAIRS_TOGETHER = 2**20
# Query tiles classified at once: bounds the memory of the plan for very long sequences.
STRIP = 64


class Run(NamedTuple):
    """Adjacent key rows start … stop - 1. `masked`: some pairs may be hidden."""

    start: int
    stop: int
    masked: bool


class QueryTile(NamedTuple):
    """Query rows start … stop - 1 and the runs of keys that they see."""

    start: int
    stop: int
    runs: tuple[Run, ...]

    def under_both(self, other: QueryTile) -> QueryTile:
        """This tile under both its mask and another one that visits the same keys."""
        pairs = zip(self.runs, other.runs, strict=True)
        runs = (one._replace(masked=one.masked or two.masked) for one, two in pairs)
        return self._replace(runs=tuple(runs))


class HeadGroup(NamedTuple):
    """Batch entries and query heads (as ranges) that share one plan."""

    batch: tuple[int, int]
    heads: tuple[int, int]
    tiles: tuple[QueryTile, ...]

    @property
    def ranges(self) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Which keys each tile of query rows visits, under a mask or not."""
        return [
            (tile.start, tile.stop, [(run.start, run.stop) for run in tile.runs])
            for tile in self.tiles
        ]


class TileSizes(NamedTuple):
    """The sizes of one dense problem, and the index of its first batch entry."""

    batch: int
    heads: int
    query_len: int
    kv_len: int
    first_batch: int
    query_tile: int
    kv_tile: int

    @property
    def pairs(self) -> int:
        """Pairs of one head."""
        return self.batch * self.query_len * self.kv_len

    @property
    def short(self) -> bool:
        """Whether a sequence has too few tiles for a plan of its own."""
        return self.query_len <= self.query_tile and self.kv_len <= SHORT_TILES * self.kv_tile


def head_groups(sizes: TileSizes, variant: Variant) -> tuple[HeadGroup, ...]:
    """Plans for all of a dense problem, one for each part of it that the mask treats alike."""
    captured = variant.mask_captured
    return _remembered.get(
        (sizes, variant.mask, tuple(captured.ints), tuple(map(float.hex, captured.floats))),
        captured.tensors,
        lambda: _head_groups(sizes, variant.mask, captured),
    )


_remembered: Remembered[tuple[HeadGroup, ...]] = Remembered(most=256)


def _head_groups(sizes: TileSizes, mask: str, captured: Captured) -> tuple[HeadGroup, ...]:
    everything = (0, sizes.batch), (0, sizes.heads)
    if not mask:
        run = Run(0, sizes.kv_len, masked=False)
        return (HeadGroup(*everything, (QueryTile(0, sizes.query_len, (run,)),)),)
    if sizes.short and sizes.pairs <= PAIRS_TOGETHER:
        run = Run(0, sizes.kv_len, masked=True)
        return (HeadGroup(*everything, (QueryTile(0, sizes.query_len, (run,)),)),)
    tiles: dict[tuple[int, int], list[QueryTile]] = {}
    batches = heads = 1
    for classified in _classify_strips(sizes, mask, captured):
        batches, heads = classified.shape
        for b in range(batches):
            for h in range(heads):
                tiles.setdefault((b, h), []).extend(classified.tiles(b, h))
    found = [
        HeadGroup(
            everything[0] if batches == 1 else (b, b + 1),
            everything[1] if heads == 1 else (h, h + 1),
            tuple(tiles[b, h]),
        )
        for h in range(heads)
        for b in range(batches)
    ]
    together = _together(found, PAIRS_TOGETHER * sizes.batch // max(1, sizes.pairs))
    return tuple(group._replace(tiles=tuple(_joined(group.tiles))) for group in together)


def _together(groups: list[HeadGroup], most: int) -> Iterator[HeadGroup]:
    """Join neighbouring batch entries that visit the same keys, up to so many entries."""
    waiting = groups[0]
    for group in groups[1:]:
        entries = waiting.batch[0], group.batch[1]
        alike = group.heads == waiting.heads and group.ranges == waiting.ranges
        if alike and group.batch[0] == waiting.batch[1] and entries[1] - entries[0] <= most:
            tiles = zip(waiting.tiles, group.tiles, strict=True)
            waiting = HeadGroup(
                entries, group.heads, tuple(one.under_both(two) for one, two in tiles)
            )
        else:
            yield waiting
            waiting = group
    yield waiting


class _Strip(NamedTuple):
    """Verdicts for a strip of query tiles: nested lists [batch][head][query tile][kv tile]."""

    first_row: int
    sizes: TileSizes
    shape: tuple[int, int]
    possible: list[list[list[list[bool]]]]
    certain: list[list[list[list[bool]]]]

    def tiles(self, b: int, h: int) -> Iterator[QueryTile]:
        verdicts = zip(self.possible[b][h], self.certain[b][h], strict=True)
        for index, (possible, certain) in enumerate(verdicts):
            start = self.first_row + index * self.sizes.query_tile
            stop = min(start + self.sizes.query_tile, self.sizes.query_len)
            runs = _runs(possible, certain, self.sizes.kv_tile, self.sizes.kv_len)
            yield QueryTile(start, stop, tuple(runs))


def _classify_strips(sizes: TileSizes, mask: str, captured: Captured) -> Iterator[_Strip]:
    """Ask the mask about all tiles, a strip of query tiles at a time."""
    rows = sizes.query_tile * STRIP
    num_kv_tiles = -(-sizes.kv_len // sizes.kv_tile)
    for first_row in range(0, sizes.query_len, rows):
        last_row = min(first_row + rows, sizes.query_len)
        at = Coordinates(
            batch=index_range(sizes.first_batch, sizes.first_batch + sizes.batch, 0),
            head=index_range(0, sizes.heads, 1),
            query_row=intervals.rows(first_row, last_row, sizes.query_tile, 2),
            kv_row=intervals.rows(0, sizes.kv_len, sizes.kv_tile, 3),
            shift=sizes.kv_len - sizes.query_len,
        )
        truth = intervals.classify(mask, captured, at)
        num_query_tiles = -(-(last_row - first_row) // sizes.query_tile)
        shape = [1] * (4 - truth.possible.dim()) + list(truth.possible.shape)
        batches, heads = shape[0], shape[1]
        wanted = (batches, heads, num_query_tiles, num_kv_tiles)
        yield _Strip(
            first_row,
            sizes,
            (batches, heads),
            truth.possible.expand(wanted).tolist(),
            truth.certain.expand(wanted).tolist(),
        )


def _runs(possible: list[bool], certain: list[bool], tile: int, kv_len: int) -> list[Run]:
    """Join adjacent tiles into runs: long full ranges apart, the rest under the mask."""
    runs: list[Run] = []
    for verdict, first, last in _full_ranges(possible, certain):
        start, stop = first * tile, min(last * tile, kv_len)
        if verdict == HIDDEN:
            continue
        masked = verdict == PARTIAL or stop - start < LONG_RANGE
        touches = bool(runs) and runs[-1].stop == start and runs[-1].masked and masked
        if touches and stop - runs[-1].start <= MASKED_RANGE:
            runs[-1] = Run(runs[-1].start, stop, masked=True)
        elif masked:
            step = range(start, stop, MASKED_RANGE)
            runs += [Run(s, min(s + MASKED_RANGE, stop), masked=True) for s in step]
        else:
            runs.append(Run(start, stop, masked=False))
    return _unmask_full_runs(runs, certain, tile)


HIDDEN, PARTIAL, FULL = range(3)


def _full_ranges(possible: list[bool], certain: list[bool]) -> Iterator[tuple[int, int, int]]:
    """(class, first tile, tile after the last) of each range of tiles of one class."""
    first, verdict = 0, None
    for index, (some, every) in enumerate(zip(possible, certain, strict=True)):
        this = FULL if every else PARTIAL if some else HIDDEN
        if this != verdict:
            if verdict is not None:
                yield verdict, first, index
            first, verdict = index, this
    if verdict is not None:
        yield verdict, first, len(possible)


def _unmask_full_runs(runs: list[Run], certain: list[bool], tile: int) -> list[Run]:
    """A short full range that found no masked neighbour needs no mask after all."""
    return [
        run._replace(masked=not all(certain[run.start // tile : -(-run.stop // tile)]))
        for run in runs
    ]


def _joined(tiles: Sequence[QueryTile]) -> Iterator[QueryTile]:
    """Join neighbours that see the same keys without a mask: one larger tile, one call."""
    waiting: QueryTile | None = None
    for tile in tiles:
        full = not any(run.masked for run in tile.runs)
        if waiting is not None and full and waiting.runs == tile.runs:
            waiting = waiting._replace(stop=tile.stop)
            continue
        if waiting is not None:
            yield waiting
        waiting = tile
    if waiting is not None:
        yield waiting
