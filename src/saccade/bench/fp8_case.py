"""Cases of fp8 attention: rows of e4m3 numbers, which have no scales.

About 16,384 tokens of 2,048 channels in all, as the cases in 16 bits have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from saccade.bench.case import CAUSAL, FULL, SHORT_DTYPES, BenchCase, Tensors, Visibility, short

E4M3 = "float8_e4m3fn"
OUTPUT_BYTES = 2  # of a number of the output, which has 16 bits


@dataclass(frozen=True)
class Fp8BenchCase(BenchCase):
    """A named problem of fp8 attention. Peers that have no fp8 get its rows in bfloat16."""

    attention = "fp8"

    @property
    def bytes(self) -> int:
        """Bytes that a forward pass moves at least: each input read once, the output written."""
        queries = self.query_heads * self.query_len
        rows = queries * self.head_dim + self.kv_heads * self.kv_len * (
            self.head_dim + self.value_dim
        )
        return self.batch * (rows + queries * self.value_dim * OUTPUT_BYTES)

    def make(self, device: torch.device) -> Tensors:
        """Draw the rows from a normal distribution, rounded to e4m3 numbers."""
        tensors = super().make(device)
        return tensors._replace(grad_output=tensors.grad_output.bfloat16())


def fp8_cases() -> Iterator[BenchCase]:
    """For a GPU three widths at three lengths; for tests of the bench itself tiny ones."""
    for dim in (64, 128, 256):
        for visibility in (FULL, CAUSAL):
            for length in (1024, 4096, 16384):
                yield _fp8("gpu", visibility, 2048 // dim, 16384 // length, length, dim)
    for visibility in (FULL, CAUSAL):
        yield _fp8("tiny", visibility, 2, 2, 48, 16)


def _fp8(
    machine: str, visibility: Visibility, heads: int, batch: int, length: int, dim: int
) -> Fp8BenchCase:
    """A case named by its mask, its batch and its length."""
    name = f"{machine}-{visibility.kind}-{SHORT_DTYPES[E4M3]}-d{dim}-{batch}x{short(length)}"
    sizes = heads, heads, length, length, dim, dim
    return Fp8BenchCase(name, batch, *sizes, E4M3, visibility)
