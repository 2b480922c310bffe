"""Visibility: which pairs of rows a case lets through, in words, as tensors and as counts."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Of the blocks off the diagonal so many are visible; with the diagonal, 10 % of 128 × 128 blocks.
BLOCK_SHARE = 0.093
MOST_BLOCKS = 256


@dataclass(frozen=True)
class Visibility:
    """Which key rows a query row sees, for a sequence on itself.

    Attributes:
        kind: "full", "causal", "window" (its own row and `size` rows before it), "prefix" (causal,
            and the first `size` rows are visible to all), or "blocks" (of `size` × `size` pairs,
            the diagonal and a random tenth of the others).
        size: see `kind`; 0 for "full" and "causal".
        documents: lengths of the documents that the sequence is cut into; a row sees its own
            document only. Empty: there is one.
    """

    kind: Literal["full", "causal", "window", "prefix", "blocks"] = "full"
    size: int = 0
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.documents and self.kind in ("prefix", "blocks"):
            raise ValueError(f"{self.kind} counts from the sequence's start, not a document's")

    def __str__(self) -> str:
        kind = f"{self.kind} {self.size}" if self.size else self.kind
        if not self.documents:
            return kind
        equal = len(set(self.documents)) == 1
        documents = f"documents {self.documents[0] if equal else lengths_text(self.documents)}"
        return documents if self.kind == "full" else f"{kind} {documents}"

    @property
    def needs_table(self) -> bool:
        """Whether it must be written out for a peer that knows only full and causal masks."""
        return self.kind not in ("full", "causal") or len(self.documents) > 1

    def sees(self, query_rows: Tensor, kv_rows: Tensor) -> Tensor:
        """A bool tensor [query rows, key rows]; written apart from the library's own masks."""
        query_row, kv_row = query_rows[:, None], kv_rows[None, :]
        if self.kind == "blocks":
            layout = block_layout(MOST_BLOCKS).to(query_rows.device)
            return layout[query_row // self.size, kv_row // self.size]
        first, end = self._span(query_row)
        return (kv_row >= first) & (kv_row < end)

    def _span(self, query_row: Tensor) -> tuple[Tensor, Tensor]:
        """The first key row that a query row sees, and the one behind the last."""
        first = torch.zeros_like(query_row)
        end = torch.full_like(query_row, torch.iinfo(query_row.dtype).max)
        if self.kind != "full":
            end = query_row + 1
        if self.kind == "window":
            first = query_row - self.size
        if self.kind == "prefix":
            end = end.clamp(min=self.size)
        if self.documents:
            starts, ends = self._document_edges(query_row.device)
            document = torch.bucketize(query_row, ends, right=True)
            first, end = first.maximum(starts[document]), end.minimum(ends[document])
        return first, end

    def _document_edges(self, device: torch.device) -> tuple[Tensor, Tensor]:
        ends = torch.tensor(self.documents, device=device).cumsum(0)
        return ends - torch.tensor(self.documents, device=device), ends

    def document_ids(self, device: torch.device) -> Tensor:
        """The number of each row's document, int32 [length]."""
        lengths = torch.tensor(self.documents, device=device)
        ids = torch.arange(len(self.documents), dtype=torch.int32, device=device)
        return ids.repeat_interleave(lengths)

    def offsets(self, device: torch.device) -> Tensor:
        """Where each document starts, and where the last ends, int32 [documents + 1]."""
        return torch.tensor([0, *itertools.accumulate(self.documents)], dtype=torch.int32).to(
            device
        )

    def tensor(self, query_len: int, kv_len: int, device: torch.device) -> Tensor:
        """The whole mask written out, for peers that take nothing else."""
        rows = torch.arange(query_len, device=device), torch.arange(kv_len, device=device)
        return self.sees(*rows)

    def pairs(self, query_len: int, kv_len: int) -> int:
        """How many pairs are visible in one head."""
        if self.kind == "blocks":
            blocks = torch.arange(0, query_len, self.size)
            keys = self.sees(blocks, torch.arange(kv_len)).sum(-1)
            return int(keys.repeat_interleave(self.size)[:query_len].sum())
        first, end = self._span(torch.arange(query_len))
        return int((end.clamp(max=kv_len) - first.clamp(min=0)).sum())

    def tiles(self, query_len: int, kv_len: int, tile: tuple[int, int]) -> int:
        """How many tiles of (query rows, key rows) hold a visible pair, in one head."""
        query_tile, kv_tile = tile
        if self.kind == "blocks":
            # Visibility is the same all over a cell, and no cell lies in two tiles or two blocks.
            cell = math.gcd(self.size, query_tile), math.gcd(self.size, kv_tile)
            rows = torch.arange(0, query_len, cell[0]), torch.arange(0, kv_len, cell[1])
            seen = self.sees(*rows)[None].float()
            window = query_tile // cell[0], kv_tile // cell[1]
            return int(torch.nn.functional.max_pool2d(seen, window, ceil_mode=True).sum())
        first, end = self._span(torch.arange(query_len))
        first, end = first.clamp(min=0), end.clamp(max=kv_len)
        count = 0
        # The spans of neighbouring rows overlap or touch, hence those of a tile's rows are one.
        for firsts, ends in zip(first.split(query_tile), end.split(query_tile), strict=True):
            count += -(-int(ends.max()) // kv_tile) - int(firsts.min()) // kv_tile
        return count


def block_layout(num_blocks: int) -> Tensor:
    """Which blocks see each other, bool [blocks, blocks]: the diagonal and some drawn at random."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(MOST_BLOCKS, MOST_BLOCKS, generator=generator) < BLOCK_SHARE
    return (drawn | torch.eye(MOST_BLOCKS, dtype=torch.bool))[:num_blocks, :num_blocks]


def lengths_text(lengths: tuple[int, ...]) -> str:
    """Lengths in words: 8x512 for eight equal ones, 8192+64x128 for a mix."""
    runs = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
    return "+".join(
        f"{count}x{length}" if count > 1 or len(runs) == 1 else str(length)
        for length, count in runs
    )


FULL = Visibility()
CAUSAL = Visibility("causal")
