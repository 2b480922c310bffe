"""Linear cases: the named problems of linear attention, beside those of softmax attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from saccade.bench.case import SHORT_DTYPES, Case, short
from saccade.bench.visibility import CAUSAL, FULL

CHUNK = 64  # rows of a chunk where operations are counted, as `saccade.explain_linear` counts


@dataclass(frozen=True)
class LinearCase(Case):
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
class StepCase(LinearCase):
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


def _step(machine: str, batch: int, heads: int, dim: int, dtype: str = "bfloat16") -> StepCase:
    name = f"{machine}-linear-step-{SHORT_DTYPES[dtype]}-d{dim}-{batch}x{heads}"
    return StepCase(name, batch, heads, heads, 1, 65, dim, dim, dtype, FULL)


def _case(dtype: str, heads: int, length: int, dim: int, *, label: str = "linear") -> LinearCase:
    name = f"cpu-{label}-{SHORT_DTYPES[dtype]}-d{dim}-{short(length)}"
    return LinearCase(name, 1, heads, heads, length, length, dim, dim, dtype, CAUSAL)


def _gpu_case(batch: int, length: int, heads: int, dim: int) -> LinearCase:
    name = f"gpu-linear-bf16-d{dim}-{batch}x{short(length)}"
    return LinearCase(name, batch, heads, heads, length, length, dim, dim, "bfloat16", CAUSAL)


def linear_cases() -> Iterator[LinearCase]:
    """For two cores: the sizes of the targets, and one problem at many lengths. For a GPU: four.
    For both: steps."""
    for dtype in ("float32", "bfloat16"):
        for heads, dim in ((8, 128), (8, 64)):
            yield _case(dtype, heads, 4096, dim)
    for length in (1024, 4096, 16384, 65536, 262144):
        yield _case("float32", 2, length, 64, label="linear-length")
    for batch, length, heads, dim in (
        (8, 8192, 16, 128), (8, 8192, 32, 64), (1, 131072, 8, 128), (8, 2048, 32, 256)
    ):  # fmt: skip
        yield _gpu_case(batch, length, heads, dim)
    yield _step("cpu", 64, 16, 128)
    yield _step("cpu", 1, 8, 64)
    yield _step("gpu", 64, 16, 128)
    yield _step("tiny", 2, 2, 16, "float32")
    yield LinearCase(
        "tiny-linear-fp32-d16-48", 1, 2, 2, 48, 48, 16, 16, "float32", CAUSAL
    )  # fmt: skip
