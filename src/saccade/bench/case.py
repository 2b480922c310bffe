"""Case: a named problem of the bench, and its tensors."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from saccade.bench.visibility import FULL, Visibility

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


class Tensors(NamedTuple):
    """A case's tensors, [batch, heads, length, dim]; `grad_output` is shaped like the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor


@dataclass(frozen=True)
class Case:
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

        def normal(heads: int, length: int, dim: int) -> Tensor:
            shape = (self.batch, heads, length, dim)
            return torch.randn(
                shape, generator=generator, device=device, dtype=torch.float32
            ).to(self.torch_dtype)  # fmt: skip

        return Tensors(
            normal(self.query_heads, self.query_len, self.head_dim),
            normal(self.kv_heads, self.kv_len, self.head_dim),
            normal(self.kv_heads, self.kv_len, self.value_dim),
            normal(self.query_heads, self.query_len, self.value_dim),
        )


def short(length: int) -> str:
    """A length in thousands where it is some."""
    return f"{length / 1024:g}k" if length >= 1024 and length % 512 == 0 else str(length)
