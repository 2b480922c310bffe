"""Cases: a named problem of the bench, and its tensors: softmax, linear attention, and pages."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from saccade.bench.visibility import FULL, Visibility, lengths_text

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


class Tensors(NamedTuple):
    """A case's tensors, [batch, heads, length, dim]; `grad_output` is shaped like the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor


@dataclass(frozen=True)
class BenchCase:
    """A named problem; `make` draws its tensors, always the same ones.

    Where it is `packed`, peers that can take its documents as packed sequences; the others get
    them as a mask.
    """

    attention: ClassVar[str] = "softmax"

    name: str
    batch: int
    query_heads: int
    kv_heads: int
    query_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: str
    visibility: Visibility = FULL
    memory_matters: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        if self.visibility != FULL and self.query_len != self.kv_len:
            raise ValueError(f"{self.name}: a {self.visibility} case has equal lengths")
        documents = self.visibility.documents
        if documents and sum(documents) != self.query_len:
            raise ValueError(f"{self.name}: its documents do not add up to {self.query_len} rows")
        if self.packed and not (documents and self.batch == 1):
            raise ValueError(f"{self.name}: a packed case has documents and a batch of 1")

    @property
    def mask(self) -> str:
        """The mask in words, as result files hold it."""
        return str(self.visibility)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that `dtype` names."""
        return getattr(torch, self.dtype)

    @property
    def decodes(self) -> bool:
        """Whether one query row stands at the end of a cache, where nobody needs gradients."""
        return self.query_len == 1

    def sees(self, query_rows: Tensor, kv_rows: Tensor) -> Tensor:
        """Which pairs are visible: bool [query rows, key rows]."""
        return self.visibility.sees(query_rows, kv_rows)

    @property
    def pairs(self) -> int:
        """Visible pairs over all batch entries and heads."""
        return self.batch * self.query_heads * self.visibility.pairs(self.query_len, self.kv_len)

    def tiles(self, tile: tuple[int, int]) -> int:
        """Tiles of (query rows, key rows) that hold a visible pair, over all entries and heads."""
        one_head = self.visibility.tiles(self.query_len, self.kv_len, tile)
        return self.batch * self.query_heads * one_head

    @property
    def score_bytes(self) -> int:
        """What the scores of all pairs take when they are written out, hidden ones included."""
        pairs = self.batch * self.query_heads * self.query_len * self.kv_len
        return pairs * self.torch_dtype.itemsize

    def flops(self, which_pass: str) -> int:
        """Operations on visible pairs; a backward pass counts as 2.5 forward passes.

        Forward is two products, backward five (Dao 2023, section 4.1).
        """
        forward = 2 * self.pairs * (self.head_dim + self.value_dim)
        return int(forward * {"backward": 2.5, "forward+backward": 3.5}.get(which_pass, 1))

    @property
    def bytes(self) -> int:
        """Bytes that a forward pass moves at least: each input read once, the output written."""
        rows = self.query_heads * self.query_len + self.kv_heads * self.kv_len
        return self.batch * rows * (self.head_dim + self.value_dim) * self.torch_dtype.itemsize

    def make(self, device: torch.device) -> Tensors:
        """Draw the tensors from a normal distribution, seeded by the name."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()))
        grad_output = (self.query_heads, self.query_len, self.value_dim)
        return Tensors(*(
            torch.randn(
                (self.batch, *shape), generator=generator, device=device, dtype=torch.float32
            ).to(self.torch_dtype)
            for shape in (*self.shapes, grad_output)
        ))  # fmt: skip

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(heads, length, dim) of query, key and value."""
        return [
            (self.query_heads, self.query_len, self.head_dim),
            (self.kv_heads, self.kv_len, self.head_dim),
            (self.kv_heads, self.kv_len, self.value_dim),
        ]

    def empty(self, device: torch.device) -> list[Tensor]:
        """Query, key and value for a question that reads none of them, so no memory is touched."""
        options = {"dtype": self.torch_dtype, "device": device}
        return [torch.empty(self.batch, *shape, **options) for shape in self.shapes]

    def scores_beyond(self, limit: int) -> str | None:
        """The reason of a peer that writes all scores out against more than so many bytes."""
        if self.score_bytes <= limit:
            return None
        return f"its scores alone would take {self.score_bytes / 1e9:.1f} GB"


def short(length: int) -> str:
    """A length in thousands where it is some."""
    return f"{length / 1024:g}k" if length >= 1024 and length % 512 == 0 else str(length)


CHUNK = 64  # rows of a chunk where operations are counted, as `saccade.explain` counts


@dataclass(frozen=True)
class LinearBenchCase(BenchCase):
    """A named problem of causal linear attention, normalised, with elu + 1 as its feature map."""

    attention = "linear"

    @property
    def mask(self) -> str:
        """What result files say in a mask's place."""
        return "linear causal"

    def flops(self, which_pass: str) -> int:
        """Operations in chunks of 64 rows; a backward pass is two sweeps that share nothing.

        Forward: each row meets the state twice (4 · head_dim · value_dim) and its chunk twice.
        Backward: the state five times, and the chunk as often as gradients of it need products.
        """
        product, inside = self.head_dim * self.value_dim, 2 * CHUNK
        forward = 4 * product + inside * (self.head_dim + self.value_dim)
        backward = 10 * product + inside * (3 * self.head_dim + 2 * self.value_dim)
        rows = self.batch * self.query_heads * self.query_len
        parts = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
        return rows * parts[which_pass]


@dataclass(frozen=True)
class StepCase(LinearBenchCase):
    """One more token for each of many sequences: states take its key in, and are read.

    States are float32, and made of all keys but the last. Each call changes them once more.
    """

    @property
    def mask(self) -> str:
        """What result files say in a mask's place."""
        return "linear step"

    def flops(self, which_pass: str) -> int:
        """A state is added to, and read."""
        return self.batch * self.query_heads * 4 * self.head_dim * self.value_dim

    @property
    def bytes(self) -> int:
        """States, read and written, and the rows of the token."""
        heads = self.batch * self.query_heads
        states = 2 * 4 * self.head_dim * (self.value_dim + 1)
        return heads * (states + 2 * (self.head_dim + self.value_dim) * self.torch_dtype.itemsize)


SHORT_PAGES = {**SHORT_DTYPES, "float8_e4m3fn": "fp8", "int8": "int8"}
INT8_SCALE = 1 / 16


@dataclass(frozen=True)
class PagedBenchCase(BenchCase):
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
