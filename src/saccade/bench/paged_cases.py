"""Paged cases: new tokens of sequences whose keys and values lie in pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.bench.case import SHORT_DTYPES, Case, Tensors, short
from saccade.bench.visibility import CAUSAL, FULL, lengths_text

SHORT_PAGES = {**SHORT_DTYPES, "float8_e4m3fn": "fp8", "int8": "int8"}
INT8_SCALE = 1 / 16


@dataclass(frozen=True)
class PagedCase(Case):
    """A named problem over pages; its tensors hold all sequences, one after the other.

    Attributes:
        lens: tokens of each sequence, new ones included.
        new: how many tokens of each sequence are new: its query rows, and its last keys.
        page_dtype: of keys and values in pages. The tensors hold numbers that it holds exactly, so
            that all peers compute the same.
    """

    attention = "paged"

    lens: tuple[int, ...] = ()
    new: int = 1
    page_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.kv_len != sum(self.lens) or self.query_len != self.new * len(self.lens):
            raise ValueError(f"{self.name}: its lengths are not those of its sequences")

    @property
    def mask(self) -> str:
        """The lengths and what new tokens see."""
        return f"pages {lengths_text(self.lens)}" + (" causal" if self.new > 1 else "")

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one new token."""
        return self.new == 1

    @property
    def pairs(self) -> int:
        """Visible pairs over all heads."""
        before = sum(self.lens) - self.new * len(self.lens)  # keys that are not new
        seen = before * self.new + len(self.lens) * self.new * (self.new + 1) // 2
        return self.query_heads * seen

    @property
    def bytes(self) -> int:
        """Keys and values with their scales, queries and output, each moved once."""
        rows = self.kv_heads * self.kv_len
        stored = getattr(torch, self.page_dtype)
        scales = 8 * rows if stored.itemsize == 1 else 0
        channels = self.head_dim + self.value_dim
        asked = self.query_heads * self.query_len * channels * self.torch_dtype.itemsize
        return rows * channels * stored.itemsize + scales + asked

    def sees(self, query_rows: Tensor, kv_rows: Tensor) -> Tensor:
        """A row sees its own sequence, up to its own place there."""
        ends = torch.tensor(list(itertools.accumulate(self.lens)), device=query_rows.device)
        lens = torch.tensor(self.lens, device=query_rows.device)
        sequence = query_rows // self.new
        end = ends[sequence] - self.new + query_rows % self.new + 1
        first = ends[sequence] - lens[sequence]
        return (kv_rows >= first[:, None]) & (kv_rows < end[:, None])

    def make(self, device: torch.device) -> Tensors:
        """Draw the tensors; keys and values become what their pages can hold."""
        tensors = super().make(device)
        key, value = (self._held(rows) for rows in (tensors.key, tensors.value))
        return tensors._replace(key=key, value=value)

    def _held(self, rows: Tensor) -> Tensor:
        if self.page_dtype == "int8":
            return (rows / INT8_SCALE).round().clamp(-127, 127) * INT8_SCALE
        return rows.to(getattr(torch, self.page_dtype)).to(rows.dtype)


def _case(
    machine: str,
    heads: tuple[int, int],
    lens: tuple[int, ...],
    *,
    dtype: str = "bfloat16",
    page_dtype: str = "",
    dim: int = 128,
    new: int = 1,
) -> PagedCase:
    """A case named by its heads and lengths, and by how many tokens are new if it is not one."""
    stored = page_dtype or dtype
    lengths = lengths_text(lens) if len(set(lens)) > 1 else f"{len(lens)}x{short(lens[0])}"
    kind = f"pages-h{heads[0]}x{heads[1]}" + (f"-new{short(new)}" if new > 1 else "")
    name = f"{machine}-{kind}-{SHORT_PAGES[stored]}-d{dim}-{lengths}"
    visibility = CAUSAL if new > 1 else FULL
    return PagedCase(
        name, 1, *heads, new * len(lens), sum(lens), dim, dim, dtype, visibility,
        lens=lens, new=new, page_dtype=stored,
    )  # fmt: skip


def paged_cases() -> Iterator[PagedCase]:
    """For a GPU: decoding at the sizes of the targets, ragged and in eight bits, and chunks."""
    many = ((1, 8192), (1, 131072), (16, 8192), (64, 4096), (128, 8192), (256, 2048))
    few = ((1, 8192), (16, 8192), (128, 8192))
    for heads, sizes in (((32, 8), many), ((64, 8), few), ((32, 32), few)):
        for count, length in sizes:
            yield _case("gpu", heads, (length,) * count)
    yield _case("gpu", (32, 8), (131072, *(1024,) * 63))
    for page_dtype in ("float8_e4m3fn", "int8"):
        for count in (16, 128):
            yield _case("gpu", (32, 8), (8192,) * count, page_dtype=page_dtype)
    for new, length in ((2048, 8192), (512, 32768), (8192, 8192)):
        yield _case("gpu", (32, 8), (length,), new=new)
    tiny = {"dtype": "float32", "dim": 16}
    yield _case("tiny", (4, 2), (64, 32, 16), **tiny)
    yield _case("tiny", (4, 2), (32,) * 2, page_dtype="int8", **tiny)
    yield _case("tiny", (4, 2), (48,), new=20, **tiny)
