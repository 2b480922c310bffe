"""Machine code: variants of kernels, found or compiled once, and loaded where they run.

A variant is looked for in the package, then in the user's cache (`stored_code.py`), and compiled by
Triton where it is in neither (`triton_compiler.py`), which is said, as it takes seconds. The order
of parameters is Triton's: their sizes are compared with the driver's own word when a kernel is
loaded. A kernel that wants more than a launch of ours gives is started by Triton's own launcher:
slower, and right.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from saccade.gpu import compile_threads, driver, stored_code
from saccade.gpu.language import Function
from saccade.gpu.signature import DESCRIPTOR, Arguments
from saccade.gpu.stored_code import MachineCode

MAP, ADDRESS = f"{driver.TENSOR_MAP_SIZE}s", "Q"
FORMATS = {"i32": "i", "i64": "q", "fp32": "f", DESCRIPTOR: MAP}  # as `struct` writes them
ADDRESS_SIZE = 8
NO_SCRATCH = (0, 0)
"""Addresses that Triton adds behind a kernel's own parameters: of memory that ours do not want."""

SAID_FROM = 1.0  # seconds from which on it is said that a kernel was compiled

PACKAGE, CACHE, COMPILER = "the package", "the cache", "Triton's compiler"
RUN_ON = {"sm_86": ("sm_80",), "sm_87": ("sm_80",), "sm_89": ("sm_80",)}
"""Whose machine code in the package an architecture runs too, where its configs are the same."""


def formats_of(arguments: Arguments) -> list[str]:
    """How `struct` writes each parameter."""
    found = [FORMATS.get(kind, ADDRESS) for kind in arguments.kinds]
    return [*found, *(ADDRESS for _ in NO_SCRATCH)]


class Variant:
    """A kernel's machine code on one device."""

    def __init__(
        self, kernel: Function, arguments: Arguments, options: Mapping[str, Any], device: int,
        known: Found | None = None,
    ):  # fmt: skip
        """known: what `find` gave of it."""
        self.device = device
        known = known or find(kernel, arguments, options, architecture_of(device))
        found, self.origin = known
        self.by_triton = ""
        """Why Triton's own launcher has to start it; "": it need not."""
        if not isinstance(found, MachineCode):
            self.compiled, self.by_triton = found
            self.name = self.compiled.metadata.name
            return
        self.name, self.maps = found.name, found.maps
        self.function = driver.Function(found.code, found.name)
        self.function.allow_shared_memory(found.shared_memory, device)
        formats = formats_of(arguments)
        sizes = self.function.parameter_sizes()
        if sizes is not None and sizes != list(map(struct.calcsize, formats)):
            self.by_triton = f"parameters have {sizes} bytes"
            self.compiled = compiled(kernel, arguments, options, architecture_of(device))
            return
        self._lay_out(formats)
        self.config = driver.launch_config(found.num_warps, found.shared_memory, found.overlapping)
        self.launched = driver.library().cuLaunchKernelEx
        self.handed = ctypes.byref(self.config), self.function.handle, self.addresses, None

    def _lay_out(self, formats: list[str]) -> None:
        """Memory for its parameters, and the addresses of each one there, as the driver wants."""
        self.lock = threading.Lock()  # of whoever writes there
        self.format = struct.Struct("".join(formats))  # by C's rules
        self.offsets = [  # as what has no size would lie there
            struct.calcsize(f"{''.join(formats[:number])}0{kind[-1]}")
            for number, kind in enumerate(formats)
        ]
        whole = (ctypes.c_char * self.format.size)()
        self.memory = memoryview(whole).cast("B")
        self.words = self.memory.cast("Q")
        first = ctypes.addressof(whole)
        self.addresses = (ctypes.c_void_p * len(formats))(*(first + at for at in self.offsets))

    def launch(self, programs: int, stream: int) -> None:
        """Start so many programs with the parameters that lie in memory."""
        self.config.grid_x, self.config.stream = programs, stream
        result = self.launched(*self.handed)
        if result == driver.INVALID_CONTEXT:
            driver.use_context_of(self.device)
            result = self.launched(*self.handed)
        if result:
            driver.check(result, f"starting {self.name}")


Found = tuple[MachineCode | tuple[Any, str], str]


def find(
    kernel: Function, arguments: Arguments, options: Mapping[str, Any], architecture: str
) -> Found:
    """A variant's machine code and where it came from; else Triton's kernel, and why it is that."""
    told = stored_code.told_triton()  # then what is stored is not what was asked for
    address = None if told else address_of(kernel, arguments, options, architecture)
    if address is not None:
        for one, shipped in _shipped(architecture):
            theirs = address_of(kernel, arguments, options, one)
            found = shipped.find(theirs) if theirs else None
            if found is not None:
                return found, PACKAGE
        found = stored_code.cached(address)
        if found is not None:
            return found, CACHE
    made = compiled(kernel, arguments, options, architecture)
    from saccade.gpu import triton_compiler

    reason = triton_compiler.needs_triton(made.metadata)
    if reason:
        return (made, reason), COMPILER
    found = triton_compiler.machine_code_of(made)
    if address is not None:
        stored_code.keep(address, found)
    return found, COMPILER


def _shipped(architecture: str) -> Iterator[tuple[str, stored_code.Shipped]]:
    """What comes with this package that an architecture runs, by the one it was compiled for."""
    for one in (architecture, *RUN_ON.get(architecture, ())):
        found = stored_code.shipped(one)
        if found is not None:
            yield one, found


def comes_with(architecture: str) -> bool:
    """Whether machine code that an architecture runs comes with this package."""
    return any(True for _ in _shipped(architecture))


def address_of(
    kernel: Function, arguments: Arguments, options: Mapping[str, Any], architecture: str
) -> str | None:
    """What a variant is known by where machine code is stored.

    None: it has functions that are not this library's, whose code the address would not know.
    """
    functions = (value for value in (kernel, *arguments.key) if isinstance(value, Function))
    if not all(function.is_ours for function in functions):
        return None
    return stored_code.address_of(repr(kernel), arguments.text, dict(options), architecture)


def compiled(
    kernel: Function, arguments: Arguments, options: Mapping[str, Any], architecture: str
) -> Any:
    """Triton's compiled kernel; what takes long is said.

    Raises:
        RuntimeError: where there is no Triton.
    """
    with compile_threads.turn() as turn:  # not before it is there does the time count
        # One thread at a time: where an import fails, Python tells others that wait for it that
        # the package has no such name.
        try:
            from saccade.gpu import triton_compiler
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "triton":
                raise
            raise RuntimeError(
                f"{kernel.__name__} has to be compiled for {architecture}, as no machine code for "
                "this call comes with this installation of Saccade; it takes Triton (pip install "
                'triton) or implementation="reference"'
            ) from None
        begin = time.perf_counter()
        target = triton_compiler.target_of(architecture)
        found = triton_compiler.compiled(kernel, arguments, options, target, turn.end)
    _say(kernel, architecture, time.perf_counter() - begin)
    return found


def _say(kernel: Function, architecture: str, seconds: float) -> None:
    if seconds >= SAID_FROM:
        told, cache = stored_code.told_triton(), stored_code.cache()
        where = f", not kept, as {told} is set" if told else f", kept in {cache}" if cache else ""
        print(
            f"saccade: compiled {kernel.__name__} for {architecture} in {seconds:.1f} s{where}",
            file=sys.stderr,
        )


def remark() -> str | None:
    """What is to be said of the kernels that were loaded in this process; None: none was."""
    counts = Counter(found.origin for found in _variants.values())
    if not counts:
        return None
    came = " and ".join(f"{count} from {origin}" for origin, count in counts.items())
    said = f"machine code of {sum(counts.values())} kernels so far: {came}"
    told = stored_code.told_triton()
    if told:
        said += f"; what is stored is not used for new ones, as {told} is set"
    for found in _variants.values():
        if found.by_triton:
            by_triton = f"of {found.name}, {found.by_triton}"
            return f"{said}, but started by Triton's own launcher, slower: {by_triton}"
    return said


_variants: dict[Any, Variant] = {}
_found: dict[Any, Future[Found]] = {}  # what threads find, or found, and is not loaded yet
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_found.clear)  # it has none of the threads

Wanted = tuple[Function, Arguments, Mapping[str, Any]]
"""A kernel that is to be started: its arguments and options."""


def variant(
    kernel: Function, arguments: Arguments, options: Mapping[str, Any], device: int
) -> Variant:
    """The machine code for such arguments on a device; found and loaded if it is new."""
    wanted = kernel, arguments, options
    key = _key(*wanted, device)
    found = _variants.get(key)
    if found is None:
        begin_to_find([wanted], device)
        known = _result(key, _found.get(key))
        found = _variants[key] = Variant(*wanted, device, known)
        _found.pop(key, None)
    return found


def begin_to_find(wanted: Sequence[Wanted], device: int, urgent: bool = True) -> list[Any]:
    """Have threads find what is new of several variants; gives their keys. `variant` waits for each
    and loads it.

    urgent: whether a call waits for them.
    """
    architecture, keys = architecture_of(device), []
    # Gluon's kernels take longest, so their sources are read first.
    for kernel, arguments, options in sorted(wanted, key=lambda one: not one[0].is_gluon):
        key = _key(kernel, arguments, options, device)
        if key in _variants:
            continue
        keys.append(key)
        if key not in _found:
            work = functools.partial(find, kernel, arguments, options, architecture)
            _found[key] = compile_threads.submit(work, urgent)
    return keys


def find_side_by_side(wanted: Sequence[Wanted], device: int) -> None:
    """Find what is new of several variants, by a thread each; `variant` loads it."""
    for key in begin_to_find(wanted, device):
        _result(key, _found.get(key))


def _result(key: Any, future: Future[Found] | None) -> Found | None:
    """What a thread found; None where Python ends, and threads with it.

    An interrupt leaves the thread at work: what it finds is there for the next call.
    """
    if future is None:  # another thread has loaded it meanwhile
        return None
    try:
        return future.result()
    except (KeyboardInterrupt, SystemExit):
        raise
    except CancelledError:
        _found.pop(key, None)
        return None
    except BaseException:
        _found.pop(key, None)  # so that the next call tries again
        raise


def _key(
    kernel: Function, arguments: Arguments, options: Mapping[str, Any], device: int
) -> tuple[Any, ...]:
    return kernel, device, *sorted(options.items()), arguments.key


@functools.cache
def architecture_of(device: int) -> str:
    """The architecture that kernels are compiled for on a device: sm_90, gfx942."""
    import torch

    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{10 * major + minor}"
