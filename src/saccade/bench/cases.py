"""Cases: the named problems that are measured.

A name says what the case is: the machine it is meant for, the mask, the dtype, the head dimension
and the length, as in ``cpu-causal-bf16-d64-4k``.
"""

from __future__ import annotations

from collections.abc import Iterator

from saccade.bench.case import (
    SHORT_DTYPES,
    SHORT_PAGES,
    BenchCase,
    LinearBenchCase,
    PagedBenchCase,
    StepCase,
    short,
)
from saccade.bench.visibility import CAUSAL, FULL, Visibility, lengths_text


def _case(
    machine: str,
    visibility: Visibility,
    dtype: str,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dim: int,
    *,
    batch: int = 1,
    label: str = "",
    memory_matters: bool = False,
) -> BenchCase:
    """A case named by what it is; `label` stands for the mask where the mask is not the point."""
    kind = label or f"{visibility.kind}{visibility.size or ''}"
    length = short(lengths[1])
    name = f"{machine}-{kind}-{SHORT_DTYPES[dtype]}-d{dim}-{length}"
    return BenchCase(name, batch, *heads, *lengths, dim, dim, dtype, visibility, memory_matters)


def _documents(
    machine: str,
    documents: tuple[int, ...],
    dtype: str,
    heads: int,
    dim: int,
    *,
    packed: bool = True,
    causal: bool = False,
) -> BenchCase:
    """A sequence cut into documents, given as packed sequences or as one sequence with a mask."""
    label = ("packed" if packed else "documents") + ("-causal" if causal else "")
    name = f"{machine}-{label}-{SHORT_DTYPES[dtype]}-d{dim}-{lengths_text(documents)}"
    visibility = Visibility("causal" if causal else "full", documents=documents)
    tokens = sum(documents)
    return BenchCase(
        name, 1, heads, heads, tokens, tokens, dim, dim, dtype, visibility, packed=packed
    )  # fmt: skip


def _cpu_cases() -> Iterator[BenchCase]:
    """Small enough for two cores, long enough that each regime of length shows."""
    for dtype in ("float32", "bfloat16"):
        for dim, heads in ((64, 8), (128, 4)):
            for visibility in (FULL, CAUSAL):
                for length in (512, 1024, 2048, 4096, 8192):
                    yield _case("cpu", visibility, dtype, (heads, heads), (length, length), dim)
    for dtype in ("float32", "bfloat16"):
        yield _case("cpu", Visibility("window", 256), dtype, (8, 8), (4096, 4096), 64)
        yield _documents("cpu", (512,) * 8, dtype, 8, 64)
        yield _case("cpu", CAUSAL, dtype, (8, 2), (2048, 2048), 64, label="grouped")
        yield _case("cpu", FULL, dtype, (32, 8), (1, 16384), 128, label="decode")
    lengths = (32768, 32768)
    yield _case("cpu", FULL, "float32", (1, 1), lengths, 64, label="memory", memory_matters=True)


def _gpu_cases() -> Iterator[BenchCase]:
    """About 16,384 tokens of 2,048 channels in all, so that every length fills the card alike."""
    dtype = "bfloat16"
    for dim in (64, 128, 256):
        heads = 2048 // dim
        # 15,360 tokens at 64: tiles of 192 rows then divide every length but the first.
        tokens = 15360 if dim == 64 else 16384
        long = (1536, 3072, 6144, 15360) if dim == 64 else (1024, 2048, 4096, 8192, 16384)
        for visibility in (FULL, CAUSAL):
            for length in (512, *long):
                batch, lengths = tokens // length, (length, length)
                yield _case("gpu", visibility, dtype, (heads, heads), lengths, dim, batch=batch)
    for visibility in (
        Visibility("window", 256), Visibility("window", 1024),
        Visibility("prefix", 4096), Visibility("blocks", 128),
    ):  # fmt: skip
        yield _case("gpu", visibility, dtype, (16, 16), (16384, 16384), 128)
    yield _documents("gpu", (1024,) * 16, dtype, 16, 128, packed=False)
    for causal in (False, True):  # as much work as the dense cases of 16 sequences of 1k
        yield _documents("gpu", (1024,) * 16, dtype, 16, 128, causal=causal)
    # A skewed mix and its two parts.
    for documents in ((8192, *(128,) * 64), (8192,), (128,) * 64):
        yield _documents("gpu", documents, dtype, 16, 128, causal=True)
    yield _case("gpu", CAUSAL, dtype, (32, 8), (4096, 4096), 128, batch=4, label="grouped")
    yield _case("gpu", FULL, dtype, (32, 8), (1, 16384), 128, batch=16, label="decode")


def _tiny_cases() -> Iterator[BenchCase]:
    """For the tests of the bench itself; their times mean nothing."""
    masked = (Visibility("window", 5), Visibility("prefix", 7), Visibility("blocks", 8))
    for visibility in (FULL, CAUSAL, *masked):
        yield _case("tiny", visibility, "float32", (2, 2), (48, 48), 16)
    yield _case("tiny", CAUSAL, "bfloat16", (2, 2), (48, 48), 16)
    yield _documents("tiny", (16,) * 3, "float32", 2, 16, packed=False)
    yield _documents("tiny", (16,) * 3, "float32", 2, 16)
    for documents in ((16,) * 3, (32, *(4,) * 4), (32,)):
        yield _documents("tiny", documents, "float32", 2, 16, causal=True)
    yield _case("tiny", CAUSAL, "float32", (4, 2), (48, 48), 16, label="grouped")
    yield _case("tiny", FULL, "float32", (4, 2), (1, 64), 16, label="decode")


def _linear_step(
    machine: str, batch: int, heads: int, dim: int, dtype: str = "bfloat16"
) -> StepCase:
    name = f"{machine}-linear-step-{SHORT_DTYPES[dtype]}-d{dim}-{batch}x{heads}"
    return StepCase(name, batch, heads, heads, 1, 65, dim, dim, dtype, FULL)


def _linear(
    dtype: str, heads: int, length: int, dim: int, *, label: str = "linear"
) -> LinearBenchCase:
    name = f"cpu-{label}-{SHORT_DTYPES[dtype]}-d{dim}-{short(length)}"
    return LinearBenchCase(name, 1, heads, heads, length, length, dim, dim, dtype, CAUSAL)


def _linear_on_gpu(batch: int, length: int, heads: int, dim: int) -> LinearBenchCase:
    name = f"gpu-linear-bf16-d{dim}-{batch}x{short(length)}"
    return LinearBenchCase(name, batch, heads, heads, length, length, dim, dim, "bfloat16", CAUSAL)


def _linear_cases() -> Iterator[LinearBenchCase]:
    """For two cores: the sizes of the targets, and one problem at many lengths. For a GPU: four.
    For both: steps."""
    for dtype in ("float32", "bfloat16"):
        for heads, dim in ((8, 128), (8, 64)):
            yield _linear(dtype, heads, 4096, dim)
    for length in (1024, 4096, 16384, 65536, 262144):
        yield _linear("float32", 2, length, 64, label="linear-length")
    for batch, length, heads, dim in (
        (8, 8192, 16, 128), (8, 8192, 32, 64), (1, 131072, 8, 128), (8, 2048, 32, 256)
    ):  # fmt: skip
        yield _linear_on_gpu(batch, length, heads, dim)
    yield _linear_step("cpu", 64, 16, 128)
    yield _linear_step("cpu", 1, 8, 64)
    yield _linear_step("gpu", 64, 16, 128)
    yield _linear_step("tiny", 2, 2, 16, "float32")
    yield LinearBenchCase(
        "tiny-linear-fp32-d16-48", 1, 2, 2, 48, 48, 16, 16, "float32", CAUSAL
    )  # fmt: skip


def _pages(
    machine: str,
    heads: tuple[int, int],
    lens: tuple[int, ...],
    *,
    dtype: str = "bfloat16",
    page_dtype: str = "",
    dim: int = 128,
    new: int = 1,
) -> PagedBenchCase:
    """A case named by its heads and lengths, and by how many tokens are new if it is not one."""
    stored = page_dtype or dtype
    lengths = lengths_text(lens) if len(set(lens)) > 1 else f"{len(lens)}x{short(lens[0])}"
    kind = f"pages-h{heads[0]}x{heads[1]}" + (f"-new{short(new)}" if new > 1 else "")
    name = f"{machine}-{kind}-{SHORT_PAGES[stored]}-d{dim}-{lengths}"
    visibility = CAUSAL if new > 1 else FULL
    return PagedBenchCase(
        name, 1, *heads, new * len(lens), sum(lens), dim, dim, dtype, visibility,
        lens=lens, new=new, page_dtype=stored,
    )  # fmt: skip


def _paged_cases() -> Iterator[PagedBenchCase]:
    """For a GPU: decoding at the sizes of the targets, ragged and in eight bits, and chunks."""
    many = ((1, 8192), (1, 131072), (16, 8192), (64, 4096), (128, 8192), (256, 2048))
    few = ((1, 8192), (16, 8192), (128, 8192))
    for heads, sizes in (((32, 8), many), ((64, 8), few), ((32, 32), few)):
        for count, length in sizes:
            yield _pages("gpu", heads, (length,) * count)
    yield _pages("gpu", (32, 8), (131072, *(1024,) * 63))
    for page_dtype in ("float8_e4m3fn", "int8"):
        for count in (16, 128):
            yield _pages("gpu", (32, 8), (8192,) * count, page_dtype=page_dtype)
    for new, length in ((2048, 8192), (512, 32768), (8192, 8192)):
        yield _pages("gpu", (32, 8), (length,), new=new)
    tiny = {"dtype": "float32", "dim": 16}
    yield _pages("tiny", (4, 2), (64, 32, 16), **tiny)
    yield _pages("tiny", (4, 2), (32,) * 2, page_dtype="int8", **tiny)
    yield _pages("tiny", (4, 2), (48,), new=20, **tiny)


HOST_CASES = {
    "cpu": _case("cpu", FULL, "float32", (4, 4), (128, 128), 64, label="host"),
    "gpu": _case("gpu", FULL, "bfloat16", (4, 4), (128, 128), 64, label="host"),
}
"""So little work that a GPU is done before the host is: for `saccade bench --host`."""

CASES: dict[str, BenchCase] = {
    case.name: case
    for cases in (_cpu_cases, _linear_cases, _gpu_cases, _paged_cases, _tiny_cases)
    for case in cases()
}

DEFAULT_CASES = {
    "cpu": (
        "cpu-full-fp32-d64-1k",
        "cpu-causal-*-d64-2k",
        "cpu-window256-fp32-*",
        "cpu-packed-fp32-*",
        "cpu-grouped-fp32-*",
        "cpu-decode-fp32-*",
    ),
    "gpu": ("gpu-*-d128-1k", "gpu-*-d128-4k", "gpu-*-d128-16k", "gpu-decode-*"),
}
"""A minute's look at a machine: what is measured when no case is named."""
