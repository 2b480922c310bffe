"""What is timed: an attention problem by its shapes, dtype and visible pairs, and its tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

# The visible part of the blocks off the diagonal; with the diagonal, 10 % of 128 × 128 blocks.
VISIBLE_BLOCKS = 0.093
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
            offsets = self.offsets(query_row.device)
            document = torch.bucketize(query_row, offsets[1:], right=True)
            first = first.maximum(offsets[document])
            end = end.minimum(offsets[document + 1])
        return first, end

    def document_ids(self, device: torch.device) -> Tensor:
        """The number of each row's document, int32 [length]."""
        lengths = torch.tensor(self.documents, device=device)
        ids = torch.arange(len(self.documents), dtype=torch.int32, device=device)
        return ids.repeat_interleave(lengths)

    def offsets(self, device: torch.device) -> Tensor:
        """Where each document starts, and where the last ends, int32 [documents + 1]."""
        ends = itertools.accumulate(self.documents)
        return torch.tensor([0, *ends], dtype=torch.int32, device=device)

    def tensor(self, query_len: int, kv_len: int, device: torch.device) -> Tensor:
        """The whole mask written out, for peers that take nothing else."""
        return self.sees(*(torch.arange(rows, device=device) for rows in (query_len, kv_len)))

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
    drawn = torch.rand(MOST_BLOCKS, MOST_BLOCKS, generator=generator) < VISIBLE_BLOCKS
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


SHORT_DTYPES = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64",
    "float8_e4m3fn": "fp8",
}  # fmt: skip


PASSES = ("forward", "backward", "forward+backward")


class Tensors(NamedTuple):
    """A case's tensors, [batch, heads, length, dim]; `grad_output` is shaped like the output.

    others: what a call takes besides, and gives gradients of: [batch, heads, length, ...].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    others: tuple[Tensor, ...] = ()

    @property
    def inputs(self) -> list[Tensor]:
        """All that a call takes, in its order."""
        return [self.query, self.key, self.value, *self.others]


@dataclass(frozen=True)
class BenchCase:
    """A named problem; `make` draws its tensors, always the same ones.

    Attributes:
        memory_matters: whether memory is what the case is for, and not time.
        packed: whether peers that can take its documents as packed sequences; the others get them
            as a mask.
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
        """Whether one query row stands at the end of a cache, so that no gradients are needed."""
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
        generator = self.generator(device)
        grad_shape = (self.output_heads, self.query_len, self.value_dim)
        query, key, value, grad_output = (
            torch.randn(
                (self.batch, *shape), generator=generator, device=device, dtype=torch.float32
            ).to(self.torch_dtype)
            for shape in (*self.shapes, grad_shape)
        )
        return Tensors(query, key, value, grad_output)

    def generator(self, device: torch.device, of: str = "") -> torch.Generator:
        """Random numbers that are the case's own, others for another use of them."""
        return torch.Generator(device).manual_seed(zlib.crc32((self.name + of).encode()))

    @property
    def output_heads(self) -> int:
        """Heads of the output."""
        return self.query_heads

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

    def shortened(self, length: int) -> BenchCase:
        """A problem of this kind with one document, or sequence, of at most so many keys."""
        documents = self.visibility.documents[:1]
        length = documents[0] if documents else length
        return dataclasses.replace(
            self,
            query_len=1 if self.decodes else min(self.query_len, length),
            kv_len=min(self.kv_len, length),
            visibility=dataclasses.replace(self.visibility, documents=documents),
        )

    def scores_beyond(self, limit: int) -> str | None:
        """Why a peer that writes all scores out refuses a case, if they exceed `limit` bytes."""
        if self.score_bytes <= limit:
            return None
        return f"its scores alone would take {self.score_bytes / 1e9:.1f} GB"


def short(length: int) -> str:
    """A length in thousands where it is some."""
    return f"{length / 1024:g}k" if length >= 1024 and length % 512 == 0 else str(length)


def one_or_both(query: int, kv: int) -> str:
    """The sizes of queries and of keys, once if they are equal: 32/8, or 32."""
    return str(query) if query == kv else f"{query}/{kv}"


CHUNK = 64  # rows of a chunk where operations are counted, as `saccade.explain` counts


@dataclass(frozen=True)
class LinearBenchCase(BenchCase):
    """A named problem of causal linear attention, normalised, with elu + 1 as its feature map."""

    attention = "linear"

    @property
    def mask(self) -> str:
        """The text that result files hold as the mask."""
        return "linear causal"

    def flops(self, which_pass: str) -> int:
        """Operations in chunks of 64 rows; a backward pass is two sweeps with nothing in common.

        Forward: each row meets the state twice (4 · head_dim · value_dim) and its chunk twice.
        Backward: the state five times, and the chunk as often as gradients of it need products.
        """
        product, inside = self.head_dim * self.value_dim, 2 * CHUNK
        forward = 4 * product + inside * (self.head_dim + self.value_dim)
        backward = 10 * product + inside * (3 * self.head_dim + 2 * self.value_dim)
        rows = self.batch * self.query_heads * self.query_len
        return rows * (("forward" in which_pass) * forward + ("backward" in which_pass) * backward)


@dataclass(frozen=True)
class StepCase(LinearBenchCase):
    """One more token for each of many sequences, by which each call changes their states.

    States are float32, and made of all keys but the last.
    """

    @property
    def mask(self) -> str:
        """The text that result files hold as the mask."""
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


SHORT_PAGES = {**SHORT_DTYPES, "int8": "int8"}
INT8_SCALE = 1 / 16


@dataclass(frozen=True)
class PagedBenchCase(BenchCase):
    """A named problem of attention over pages; its tensors hold all sequences end to end.

    Attributes:
        lens: tokens of each sequence, new ones included.
        new: how many tokens of each sequence are new: its query rows, and its last keys.
        page_dtype: of keys and values in pages. The tensors hold only numbers that it can hold, so
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
        queries = self.query_heads * self.query_len * channels * self.torch_dtype.itemsize
        return rows * channels * stored.itemsize + scales + queries

    def sees(self, query_rows: Tensor, kv_rows: Tensor) -> Tensor:
        """A row sees its own sequence up to itself."""
        offsets = torch.tensor([0, *itertools.accumulate(self.lens)], device=query_rows.device)
        sequence = query_rows // self.new
        last = offsets[sequence + 1] - self.new + query_rows % self.new
        return (kv_rows >= offsets[sequence, None]) & (kv_rows <= last[:, None])

    def shortened(self, length: int) -> BenchCase:
        """The first sequence alone, cut to at most so many keys."""
        kept = min(self.lens[0], length)
        new = min(self.new, kept)
        return dataclasses.replace(self, lens=(kept,), new=new, query_len=new, kv_len=kept)

    def make(self, device: torch.device) -> Tensors:
        """Draw the tensors; keys and values become what their pages can hold."""
        tensors = super().make(device)
        key, value = (self._held(rows) for rows in (tensors.key, tensors.value))
        return tensors._replace(key=key, value=value)

    def _held(self, rows: Tensor) -> Tensor:
        if self.page_dtype == "int8":
            return (rows / INT8_SCALE).round().clamp(-127, 127) * INT8_SCALE
        return rows.to(getattr(torch, self.page_dtype)).to(rows.dtype)
