"""The named problems that are measured, and how names and globs choose some of them.

A name says what the case is: the machine it is meant for, the mask, the dtype, the head dimension
and the length, as in ``cpu-causal-bf16-d64-4k``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from saccade.bench.case import (
    CAUSAL,
    FULL,
    PASSES,
    SHORT_DTYPES,
    SHORT_PAGES,
    BenchCase,
    LinearBenchCase,
    PagedBenchCase,
    StepCase,
    Visibility,
    lengths_text,
    short,
)
from saccade.bench.delta_case import delta_cases
from saccade.bench.fp8_case import fp8_cases


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
    yield from _grouped_cases(dtype)
    yield from _short_cases(dtype)
    # Keys wider than values, as latent attention has them, and widths between powers of two.
    for dims in ((96, 96), (192, 128), (192, 192)):
        yield _sized("gpu", "causal", CAUSAL, dtype, (16, 16), 4, 4096, dims)


def _sized(
    machine: str,
    label: str,
    visibility: Visibility,
    dtype: str,
    heads: tuple[int, int],
    batch: int,
    length: int,
    dims: tuple[int, int],
) -> BenchCase:
    """A case whose name says its heads, where kv heads are fewer, its batch and its length."""
    kind = label if heads[0] == heads[1] else f"{label}-h{heads[0]}x{heads[1]}"
    dim = f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}x{dims[1]}"
    name = f"{machine}-{kind}-{SHORT_DTYPES[dtype]}-{dim}-{batch}x{short(length)}"
    return BenchCase(name, batch, *heads, length, length, *dims, dtype, visibility)


def _grouped_cases(dtype: str) -> Iterator[BenchCase]:
    """Heads of models: few sequences, odd lengths, and so few kv heads that programs are few."""
    for query_heads, kv_heads, dim, batch, length in (
        (32, 8, 128, 4, 1024), (32, 8, 128, 1, 2048), (32, 8, 128, 2, 2048), (32, 8, 128, 1, 4096),
        (40, 8, 128, 1, 3001), (40, 8, 128, 1, 3072), (28, 4, 128, 1, 4096),
        (16, 8, 128, 1, 2048), (64, 8, 128, 1, 4096), (64, 8, 64, 1, 4096), (14, 2, 64, 1, 2048),
        (8, 4, 256, 1, 4096),
    ):  # fmt: skip
        heads = (query_heads, kv_heads)
        yield _sized("gpu", "grouped", CAUSAL, dtype, heads, batch, length, (dim, dim))


def _short_cases(dtype: str) -> Iterator[BenchCase]:
    """Many short sequences, one tile of query rows or two each: dense, and packed."""
    for dim in (64, 128):
        heads = 2048 // dim
        for length in (128, 256):
            batch = 16384 // length
            for visibility in (FULL, CAUSAL):
                sizes = batch, length, (dim, dim)
                yield _sized("gpu", visibility.kind, visibility, dtype, (heads, heads), *sizes)
            yield _documents("gpu", (length,) * batch, dtype, heads, dim, causal=True)


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
    stem: str, dtype: str, heads: int, length: int, dim: int, *, batch: int = 0
) -> LinearBenchCase:
    """A case named by its length, and by its batch if one is given."""
    size = f"{batch}x{short(length)}" if batch else short(length)
    name, sizes = f"{stem}-{SHORT_DTYPES[dtype]}-d{dim}-{size}", (length, length, dim, dim)
    return LinearBenchCase(name, batch or 1, heads, heads, *sizes, dtype, CAUSAL)


def _linear_cases() -> Iterator[LinearBenchCase]:
    """For two cores the sizes of the targets, and one problem at many lengths; for a GPU four
    sizes; for both, steps."""
    for dtype in ("float32", "bfloat16"):
        for dim in (128, 64):
            yield _linear("cpu-linear", dtype, 8, 4096, dim)
    for length in (1024, 4096, 16384, 65536, 262144):
        yield _linear("cpu-linear-length", "float32", 2, length, 64)
    for batch, length, heads, dim in (
        (8, 8192, 16, 128), (8, 8192, 32, 64), (1, 131072, 8, 128), (8, 2048, 32, 256)
    ):  # fmt: skip
        yield _linear("gpu-linear", "bfloat16", heads, length, dim, batch=batch)
    yield _linear_step("cpu", 64, 16, 128)
    yield _linear_step("cpu", 1, 8, 64)
    yield _linear_step("gpu", 64, 16, 128)
    yield _linear_step("tiny", 2, 2, 16, "float32")
    yield _linear("tiny-linear", "float32", 2, 48, 16)


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
    """Decoding on a GPU at the sizes of the targets, ragged and in eight bits, and chunks."""
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


HOST_CASES: dict[str, tuple[BenchCase, ...]] = {
    "cpu": (_case("cpu", FULL, "float32", (4, 4), (128, 128), 64, label="host"),),
    "gpu": (
        _case("gpu", FULL, "bfloat16", (4, 4), (128, 128), 64, label="host"),
        _case("gpu", CAUSAL, "bfloat16", (32, 8), (128, 128), 128, label="host-causal"),
        _documents("gpu-host", (48, 80), "bfloat16", 4, 64),
        _pages("gpu-host", (32, 8), (128,) * 4),
        _linear("gpu-host-linear", "bfloat16", 4, 256, 64),
    ),
}
"""So little work that a GPU is done before the host is: for `saccade bench --host`."""

CASES: dict[str, BenchCase] = {
    case.name: case
    for cases in (
        _cpu_cases, _linear_cases, delta_cases, _gpu_cases, fp8_cases, _paged_cases, _tiny_cases
    )
    for case in cases()
}  # fmt: skip

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


def machine(device_type: str) -> str:
    """The first word of the names of cases that are meant for a device."""
    return "cpu" if device_type == "cpu" else "gpu"


def listed_cases(device_type: str) -> list[BenchCase]:
    """The cases that are meant for a device."""
    return [case for case in CASES.values() if case.name.startswith(f"{machine(device_type)}-")]


def choose_cases(
    patterns: Sequence[str], dtypes: Sequence[str], device_type: str
) -> list[BenchCase]:
    """The cases that names and globs name, in the order of `CASES`.

    A glob such as ``*-d64-*`` takes cases meant for this device only; ``gpu-*`` and a full name
    say what they mean.
    """
    names = list(patterns) or list(DEFAULT_CASES[machine(device_type)])
    here = [case.name for case in listed_cases(device_type)]
    chosen: set[str] = set()
    for pattern in names:
        says_machine = pattern.split("-")[0] in {"cpu", "gpu", "tiny"}
        chosen.update(matching("case", pattern, list(CASES) if says_machine else here, here))
    wanted = _long_dtypes(dtypes)
    cases = [case for case in CASES.values() if case.name in chosen]
    kept = [case for case in cases if not wanted or case.dtype in wanted]
    if not kept:
        there = ", ".join(sorted({case.dtype for case in cases}))
        raise ValueError(f"no chosen case has dtype {', '.join(dtypes)}; they have {there}")
    return kept


def choose_passes(names: Sequence[str]) -> tuple[str, ...]:
    """The passes that names name; "both", the default, is forward and forward+backward."""
    passes: list[str] = []
    for name in names or ("both",):
        if name != "both" and name not in PASSES:
            raise ValueError(f"no pass is named {name!r}; there are {', '.join(PASSES)}, both")
        passes += ("forward", "forward+backward") if name == "both" else (name,)
    return tuple(dict.fromkeys(passes))


def passes_of(case: BenchCase, passes: Sequence[str]) -> tuple[str, ...]:
    """Which of the passes a case has; a single query row, say, has a forward pass only."""
    if case.decodes:
        return ("decode",) if "forward" in passes else ()
    only = "forward" if case.attention in ("paged", "fp8") else None  # which have no gradients
    only = "forward+backward" if case.memory_matters else only  # training is what needs memory
    return tuple(name for name in passes if only in (None, name))


def _long_dtypes(dtypes: Sequence[str]) -> set[str]:
    long = {name: dtype for dtype, short in SHORT_DTYPES.items() for name in (short, dtype)}
    for name in dtypes:
        if name not in long:
            takes = ", ".join(f"{short} ({dtype})" for dtype, short in SHORT_DTYPES.items())
            raise ValueError(f"no dtype is named {name!r}; there are {takes}")
    return {long[name] for name in dtypes}


def matching(
    noun: str, pattern: str, names: Sequence[str], shown: Sequence[str] | None = None
) -> list[str]:
    """The names that a glob matches."""
    if found := [name for name in names if fnmatchcase(name, pattern)]:
        return found
    shown = names if shown is None else shown
    near = difflib.get_close_matches(pattern, shown, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"no {noun} is named {pattern!r}.{hint} There are: {', '.join(folded(shown))}")


def folded(names: Sequence[str]) -> list[str]:
    """Shorter names for a list: a-b-1 and a-b-2 become a-b-{1,2}."""
    endings: dict[str, list[str]] = {}
    for name in names:
        stem, _, ending = name.rpartition("-")
        endings.setdefault(stem, []).append(ending)
    folded = []
    for stem, found in endings.items():
        if not stem:
            folded += found
        else:
            folded.append(f"{stem}-{found[0] if len(found) == 1 else '{' + ','.join(found) + '}'}")
    return folded
