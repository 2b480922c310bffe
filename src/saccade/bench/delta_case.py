"""Cases of the gated delta rule: heads of models, dense, packed, in one long sequence, and steps.

They have more tensors than attention has: beta and decay. Queries and keys are divided by their
lengths in the call, as models do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from saccade.bench.case import (
    CAUSAL,
    CHUNK,
    FULL,
    SHORT_DTYPES,
    BenchCase,
    Tensors,
    Visibility,
    short,
)

STATE_BYTES = 4  # of a number of a state, which is float32


@dataclass(frozen=True)
class DeltaBenchCase(BenchCase):
    """A named problem of the gated delta rule; value heads share key heads.

    `query_heads` are those of queries and keys, `kv_heads` those of values, beta, decay and the
    output.

    Attributes:
        decay: whether all "heads" fade as a whole, or their "channels" each.
    """

    attention = "delta"

    decay: str = "heads"

    @property
    def mask(self) -> str:
        """The text that result files hold as the mask."""
        documents = self.visibility.documents
        lengths = f", sequences of {', '.join(map(str, documents))}" if documents else ""
        return f"delta rule, decay of {self.decay}{lengths}"

    @property
    def output_heads(self) -> int:
        """Heads of the output."""
        return self.kv_heads

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(heads, length, dim) of query, key and value."""
        return [
            (self.query_heads, self.query_len, self.head_dim),
            (self.query_heads, self.kv_len, self.head_dim),
            (self.kv_heads, self.kv_len, self.value_dim),
        ]

    def flops(self, which_pass: str) -> int:
        """Operations in chunks of 64 rows, as `saccade.explain` counts them.

        Forward: each row meets the state three times (2 · head_dim · value_dim each), and its
        chunk in products over channels of keys and of values, two each. Backward: the state
        eight times, and the chunk six and five times.
        """
        product, inside = 2 * self.head_dim * self.value_dim, 2 * CHUNK
        forward = 3 * product + inside * (2 * self.head_dim + 2 * self.value_dim)
        backward = 8 * product + inside * (6 * self.head_dim + 5 * self.value_dim)
        both = {"backward": backward, "forward+backward": forward + backward}
        rows = self.batch * self.kv_heads * self.query_len
        return rows * both.get(which_pass, forward)

    @property
    def bytes(self) -> int:
        """Bytes that a forward pass moves at least: each input read once, the output written."""
        channels = 2 * self.query_heads * self.head_dim + 2 * self.kv_heads * self.value_dim
        wide = self.head_dim if self.decay == "channels" else 1
        row = (channels + self.kv_heads) * self.torch_dtype.itemsize + 4 * self.kv_heads * wide
        return self.batch * self.query_len * row

    def make(self, device: torch.device) -> Tensors:
        """Draw the tensors; beta is the sigmoid of normal numbers, decay uniform in (-1, 0)."""
        tensors = super().make(device)
        generator = self.generator(device, "others")
        shape = self.batch, self.kv_heads, self.kv_len
        channels = (self.head_dim,) if self.decay == "channels" else ()
        beta = torch.randn(shape, generator=generator, device=device).sigmoid()
        decay = -torch.rand(*shape, *channels, generator=generator, device=device)
        return tensors._replace(others=(beta.to(self.torch_dtype), decay))


@dataclass(frozen=True)
class DeltaStepCase(DeltaBenchCase):
    """One more token for each of many sequences, by which each call changes their states.

    States are float32, and made of all keys but the last.
    """

    @property
    def mask(self) -> str:
        """The text that result files hold as the mask."""
        return f"delta rule step, decay of {self.decay}"

    @property
    def bytes(self) -> int:
        """States, read and written, and the rows of the token."""
        numbers = self.batch * self.kv_heads * self.head_dim * self.value_dim
        return 2 * STATE_BYTES * numbers + super().bytes


PACKED = (20480, 14080, 10240, 8192, 6144, 4096, 1536, 768)  # 64k tokens in all


def delta_cases() -> Iterator[BenchCase]:
    """For a GPU heads of Qwen3-Next and Kimi Linear, for two cores a few sequences of 2k."""
    yield _delta("gpu", (16, 32), 8, 8192)
    yield _delta("gpu", (16, 32), 1, sum(PACKED), documents=PACKED)
    yield _delta("gpu", (2, 8), 1, 65536)
    yield _delta("gpu", (32, 32), 4, 8192, decay="channels")
    yield _step("gpu", (16, 32), 64)
    yield _step("gpu", (32, 32), 64, decay="channels")
    for dtype in ("float32", "bfloat16"):
        for decay in ("heads", "channels"):
            yield _delta("cpu", (8, 8), 1, 2048, decay=decay, dtype=dtype)
    yield _step("cpu", (4, 8), 16)
    tiny = {"dtype": "float32", "dim": 16}
    yield _delta("tiny", (2, 4), 2, 70, **tiny)
    yield _delta("tiny", (2, 2), 1, 70, decay="channels", **tiny)
    yield _delta("tiny", (2, 4), 1, 48, documents=(23, 9, 16), **tiny)
    yield _step("tiny", (2, 4), 3, **tiny)
    yield _step("tiny", (2, 2), 3, decay="channels", **tiny)


def _name(
    machine: str, kind: str, heads: tuple[int, int], decay: str, dtype: str, dim: int, size: str
) -> str:
    by_channel = "channels-" if decay == "channels" else ""
    heads_text = f"h{heads[0]}x{heads[1]}"
    return f"{machine}-delta-{by_channel}{kind}{heads_text}-{SHORT_DTYPES[dtype]}-d{dim}-{size}"


def _delta(
    machine: str,
    heads: tuple[int, int],
    batch: int,
    length: int,
    *,
    decay: str = "heads",
    dtype: str = "bfloat16",
    dim: int = 128,
    documents: tuple[int, ...] = (),
) -> DeltaBenchCase:
    """A case named by its heads, its batch and its length."""
    kind, visibility = ("packed-" if documents else ""), Visibility("causal", documents=documents)
    size = short(length) if documents else f"{batch}x{short(length)}"
    return DeltaBenchCase(
        _name(machine, kind, heads, decay, dtype, dim, size), batch, *heads, length, length, dim,
        dim, dtype, visibility if documents else CAUSAL, packed=bool(documents), decay=decay,
    )  # fmt: skip


def _step(
    machine: str, heads: tuple[int, int], batch: int, *, decay: str = "heads",
    dtype: str = "bfloat16", dim: int = 128,
) -> DeltaStepCase:  # fmt: skip
    """A step of so many sequences, behind 64 tokens each."""
    name = _name(machine, "step-", heads, decay, dtype, dim, str(batch))
    return DeltaStepCase(name, batch, *heads, 1, 65, dim, dim, dtype, FULL, decay=decay)
