"""Stored code: machine code of kernels that need not be compiled, in the wheel or in a cache.

A kernel is known by its *address*: a hash of its name, of all that it is compiled for
(`signature.Arguments.text`, options, architecture) and of the *source digest*, a hash of every file
of this library that device code is made of. So what was compiled from other sources is never found.

    in the package   compiled/sm_90.index, .code    `make wheel` puts them there
    in a cache       one file for each address       $SACCADE_CACHE, or the user's caches

Both hold `MachineCode` as bytes: a line of JSON that says what a launch needs, with a hash of the
code, then the code. What does not fit its hash is not used, and said. A file of the cache is that,
compressed. In the package kernels that are alike are compressed together, in blocks, which takes
half the memory; one block is read for one kernel. What several addresses have in common is stored
once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import json
import lzma
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from saccade.gpu.driver import TensorMapKind

PACKAGE = Path(__file__).parent.parent
COMPILED = PACKAGE / "compiled"  # only in a wheel
IMPORTS_LANGUAGE = b"\nfrom saccade.gpu.language import "
COMPILERS = ("language.py", "signature.py", "triton_compiler.py")
MOST_CACHED = 4096  # files of the cache: about 100 MB
BLOCK = 1 << 20  # bytes that are compressed together: read in 10 ms, and what more saves is little

# What a user may tell Triton that changes neither code nor where it is kept. Inductor names the
# library of device functions when it compiles, of which our kernels use none.
HARMLESS = (
    "TRITON_CACHE_DIR", "TRITON_DISABLE_LINE_INFO", "TRITON_HOME", "TRITON_INTERPRET",
    "TRITON_LIBDEVICE_PATH", "TRITON_PRINT_AUTOTUNING",
)  # fmt: skip
# Inductor names an assembler that comes with PyTorch, in the environment of all that follows it in
# a process. Nobody asked for that; our kernels are compiled by Triton's own assembler all the same.
PTXAS = "TRITON_PTXAS_PATH"
PYTORCH = Path(torch.__file__).absolute().parent
# The same as settings of a program, and hooks that see what is compiled and do not change it.
TELLING = (
    "compilation",
    "language",
    "nvidia",
    "runtime",
)  # parts of `triton.knobs` that change code
HARMLESS_KNOBS = (
    "cuobjdump", "disable_line_info", "interpret", "jit_cache_hook", "jit_post_compile_hook",
    "kernel_load_end_hook", "kernel_load_start_hook", "launch_enter_hook", "launch_exit_hook",
    "libcuda_path", "libdevice_path", "listener", "nvdisasm", "store_binary_only",
)  # fmt: skip


class MachineCode(NamedTuple):
    """A kernel's machine code, and what a launch needs to know of it."""

    name: str  # in the machine code
    code: bytes
    num_warps: int
    shared_memory: int  # bytes
    overlapping: bool  # whether it may start while the kernel before it still runs
    maps: tuple[TensorMapKind, ...]  # of its TMA descriptors

    def plain(self) -> bytes:
        """The machine code and what is known of it, as bytes."""
        known = self._replace(code=b"")._asdict()
        known["code"] = hashlib.sha256(self.code).hexdigest()
        return json.dumps(known).encode() + b"\n" + self.code

    @staticmethod
    def of(plain: bytes) -> MachineCode:
        """What `plain` made bytes of.

        Raises:
            ValueError: for what is damaged.
        """
        head, _, code = plain.partition(b"\n")
        try:
            known = json.loads(head)
            intact = hashlib.sha256(code).hexdigest() == known.pop("code")
            maps = tuple(
                TensorMapKind(swizzle, size, kind, tuple(sides))
                for swizzle, size, kind, sides in known.pop("maps")
            )
            found = MachineCode(code=code, maps=maps, **known)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"it cannot be read: {error}") from None
        if not intact:
            raise ValueError("its hash is another")
        return found

    def packed(self) -> bytes:
        """The bytes that a file of the cache holds."""
        return lzma.compress(self.plain())

    @staticmethod
    def unpacked(stored: bytes) -> MachineCode:
        """What was packed.

        Raises:
            ValueError: for what is damaged.
        """
        return MachineCode.of(_decompressed(stored))


def _decompressed(stored: bytes) -> bytes:
    try:
        return lzma.decompress(stored)
    except lzma.LZMAError as error:
        raise ValueError(f"it cannot be read: {error}") from None


@functools.cache
def source_digest() -> str:
    """A hash of all files that device code is made of."""
    files = [PACKAGE / "gpu" / name for name in COMPILERS]
    for folder in ("gpu", "ops", "kv_cache"):
        files += sorted((PACKAGE / folder).rglob("*.py"))
    found = hashlib.sha256()
    for number, file in enumerate(files):
        text = file.read_bytes()
        if number < len(COMPILERS) or IMPORTS_LANGUAGE in text:
            found.update(text)
    return found.hexdigest()


def address_of(kernel: str, arguments: str, options: dict[str, Any], architecture: str) -> str:
    """What a variant of a kernel is known by in every process."""
    asked = f"{source_digest()} {kernel} {sorted(options.items())} {architecture} {arguments}"
    return hashlib.sha256(asked.encode()).hexdigest()


def told_triton() -> str:
    """What tells Triton to do otherwise, so that nothing stored is used; "": nothing does.

    By the environment or by a program, which sets it on `triton.knobs`. It is asked for each new
    variant: either may change at any time.
    """
    for name in sorted(os.environ):
        triton_only = name.startswith(("TRITON_", "PTXAS_", "MLIR_", "LLVM_")) or name in (
            "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "NVPTX_ENABLE_DUMP",
        )  # fmt: skip
        if triton_only and name not in HARMLESS and not (name == PTXAS and by_inductor()):
            return name
    knobs = sys.modules.get("triton.knobs")  # whoever sets them has imported it
    for part in TELLING:
        # While another thread is importing it, parts are missing, and nobody has set them.
        for name, value in vars(getattr(knobs, part, SimpleNamespace())).items():
            if value and name not in HARMLESS_KNOBS:
                return f"triton.knobs.{part}.{name}"
    return ""


def by_inductor() -> bool:
    """Whether the assembler in the environment is one of PyTorch's, which Inductor names."""
    return PYTORCH in Path(os.environ.get(PTXAS, "")).parents


# ---- in the package ------------------------------------------------------------------------------


class Shipped:
    """The machine code in the package for one architecture."""

    def __init__(self, file: Path, index: Any) -> None:
        """index: what `write_shipped` wrote beside the file."""
        self.file = file
        self.made_by: str = index["made_by"]  # the versions of what compiled it
        self.blocks = [(offset, size) for offset, size in index["blocks"]]  # in the file
        self.places = {  # by address: a block, offset and size in what it holds
            address: (block, offset, size)
            for address, (block, offset, size) in index["places"].items()
        }
        # The last one that was read: kernels of one call may lie together.
        self._read = functools.lru_cache(maxsize=1)(self._read_anew)

    def find(self, address: str) -> MachineCode | None:
        """The machine code of an address; None: it is not there."""
        if address not in self.places:
            return None
        block, offset, size = self.places[address]
        try:
            return MachineCode.of(self._read(block)[offset : offset + size])
        except (OSError, ValueError, IndexError) as error:
            _warn_of_damage(self.file, error)
            return None

    def _read_anew(self, block: int) -> bytes:
        offset, size = self.blocks[block]
        with self.file.open("rb") as file:
            file.seek(offset)
            return _decompressed(file.read(size))


def _warn_of_damage(file: Path, error: Exception) -> None:
    warnings.warn(f"machine code in {file} is damaged and not used: {error}", stacklevel=3)


@functools.cache
def shipped(architecture: str) -> Shipped | None:
    """What the package brings for an architecture; None: nothing that fits its sources."""
    index = COMPILED / f"{architecture}.index"
    try:
        read = json.loads(index.read_text(encoding="utf-8"))
        found, source = Shipped(index.with_suffix(".code"), read), read["source"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _warn_of_damage(index, error)
        return None
    if source != source_digest():
        warnings.warn(
            f"the machine code in {COMPILED} was made from other sources than those beside it, and "
            "is not used; kernels are compiled when they are first needed",
            stacklevel=2,
        )
        return None
    return found


def write_shipped(
    folder: Path, architecture: str, codes: Mapping[str, MachineCode], made_by: str
) -> int:
    """Write what `shipped` reads; gives its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    addresses: dict[MachineCode, list[str]] = {}
    for address in sorted(codes):
        addresses.setdefault(codes[address], []).append(address)
    places: dict[str, tuple[int, int, int]] = {}
    blocks: list[tuple[int, int]] = []
    end = 0
    with (folder / f"{architecture}.code").open("wb") as file:
        for block in _blocks(addresses):
            held = b""
            for code in block:
                plain = code.plain()
                place = len(blocks), len(held), len(plain)
                places |= dict.fromkeys(addresses[code], place)
                held += plain
            size = file.write(lzma.compress(held))
            blocks.append((end, size))
            end += size
    index = {"source": source_digest(), "made_by": made_by, "blocks": blocks, "places": places}
    text = json.dumps(index, separators=(",", ":"))
    (folder / f"{architecture}.index").write_text(text, encoding="utf-8")
    return end + len(text)


def _blocks(codes: Iterable[MachineCode]) -> Iterator[list[MachineCode]]:
    """Kernels that are alike side by side, in blocks of one kernel's variants."""
    for _, alike in itertools.groupby(sorted(codes, key=_likeness), lambda code: code.name):
        block, size = list[MachineCode](), 0
        for code in alike:
            if block and size + len(code.code) > BLOCK:
                yield block
                block, size = [], 0
            block.append(code)
            size += len(code.code)
        yield block


def _likeness(code: MachineCode) -> tuple[Any, ...]:
    return code.name, code.num_warps, code.shared_memory, len(code.code), code.code


# ---- in the user's cache -------------------------------------------------------------------------


@functools.cache
def cache() -> Path | None:
    """The folder of the cache: $SACCADE_CACHE, or in the user's folder of caches.

    None where $SACCADE_CACHE is empty, which turns the cache off. What other versions of Triton
    compile lies in folders of its own.
    """
    given = os.environ.get("SACCADE_CACHE")
    if given == "":
        return None
    if given:
        folder = Path(given).expanduser()
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser() / "saccade"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "saccade"
    return folder / f"triton-{triton_version()}"


def triton_version() -> str:
    """The version of the Triton that an import finds, without importing it; "none": there is none.

    It is what the first lines of the package itself say. What pip knows of may be another: a copy
    that stands earlier in PYTHONPATH, or one that was built in place.
    """
    try:
        found = importlib.util.find_spec("triton")
    except (ImportError, ValueError):  # something keeps it from being imported
        return "none"
    if found is None or found.origin is None:
        return "none"
    said = re.search(
        r'^__version__ = ["\'](.+?)["\']', Path(found.origin).read_text(), re.MULTILINE
    )
    return said[1] if said else "unknown"


def cached(address: str) -> MachineCode | None:
    """The machine code of an address in the cache; None: it is not there, or damaged."""
    folder = cache()
    if folder is None:
        return None
    try:
        return MachineCode.unpacked((folder / address).read_bytes())
    except (OSError, ValueError):
        return None  # it is compiled again, and written over


def keep(address: str, code: MachineCode) -> None:
    """Put machine code in the cache; where that cannot be done, the next process compiles it."""
    folder = cache()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(code.packed())
        os.replace(file.name, folder / address)  # whole or not at all, whoever reads meanwhile
        _forget_oldest(folder)
    except OSError:
        return


def _forget_oldest(folder: Path) -> None:
    """Keep the cache at its size: files of sources that have changed are never read again."""
    files = list(folder.iterdir())
    if len(files) > MOST_CACHED:
        files.sort(key=lambda file: file.stat().st_mtime)
        for file in files[: MOST_CACHED // 4]:
            file.unlink(missing_ok=True)
