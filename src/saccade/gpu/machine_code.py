"""Machine code: variants of kernels, compiled once, and loaded where they run.

Triton's compiler is asked for a named target, without its driver: no C compiler is needed, and no
GPU (`kernel_check` compiles so for all architectures). What is relied on of Triton stands here:
`ASTSource`, `GluonASTSource`, `triton.compile`, and what a compiled kernel says of itself; in 3.6
to 3.9. The order of parameters is Triton's as well: their sizes are compared with the driver's own
word when a kernel is loaded. A kernel that wants more than a launch of ours gives is started by
Triton's own launcher: slower, and right.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Mapping
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from saccade.gpu import compiler_workarounds, driver
from saccade.gpu.signature import Arguments, Described, Signature

FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}  # of numbers, as `struct` writes them
MAP, ADDRESS = f"{driver.TENSOR_MAP_SIZE}s", "Q"
ADDRESS_SIZE = 8
NO_SCRATCH = (0, 0)
"""Addresses that Triton adds behind a kernel's own parameters: of memory that ours do not want."""

FUSED = {"enable_fp_fusion": True}
"""Multiplies and additions are fused, said of every kernel: Triton's default is to change."""


def compiled(
    kernel: Any, arguments: Arguments, options: Mapping[str, Any], target: GPUTarget
) -> Any:
    """Triton's compiled kernel, from its cache on disk or made now."""
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    on_amd = target.backend == "hip"
    source = form(kernel, *Signature.of(kernel.arg_names, arguments, on_amd))
    asked = {**FUSED, **compiler_workarounds.options(target), "debug": knobs.runtime.debug}
    if hasattr(knobs.compilation, "instrumentation_mode"):
        asked["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    with compiler_workarounds.applied(target):
        return triton.compile(source, target=target, options={**asked, **options})


def formats_of(arguments: Arguments) -> list[str]:
    """How `struct` writes each parameter; a TMA descriptor's sizes and strides follow it."""
    found: list[str] = []
    for kind, value in arguments.parameters:
        if isinstance(value, Described):
            found += MAP, *("i" for _ in value.shape), *("q" for _ in value.strides)
        else:
            found.append(FORMATS.get(kind, ADDRESS))
    return [*found, *(ADDRESS for _ in NO_SCRATCH)]


class Variant:
    """A kernel's machine code on one device."""

    def __init__(self, kernel: Any, arguments: Arguments, options: Mapping[str, Any], device: int):
        self.kept = kernel, arguments.kept  # whose ids are in its key
        target = target_of(device)
        self.compiled = compiled(kernel, arguments, options, target)
        metadata = self.compiled.metadata
        self.name, self.device = metadata.name, device
        self.by_triton = _by_triton(metadata)
        """Why Triton's own launcher has to start it; "": it need not."""
        if self.by_triton:
            return
        self.maps = [
            driver.TensorMapKind(
                one["swizzle"], one["elem_size"], HOST_TYPES[one["elem_type"]],
                tuple(one["block_size"]),
            )
            for one in getattr(metadata, "tensordesc_meta", None) or ()
        ]  # fmt: skip
        self.function = driver.Function(self.compiled.asm["cubin"], self.name)
        self.function.allow_shared_memory(metadata.shared, device)
        formats = formats_of(arguments)
        sizes = self.function.parameter_sizes()
        if sizes is not None and sizes != list(map(struct.calcsize, formats)):
            self.by_triton = f"parameters have {sizes} bytes"
        self._lay_out(formats)
        self.config = driver.launch_config(
            metadata.num_warps, metadata.shared, bool(metadata.launch_pdl)
        )
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


def _by_triton(metadata: Any) -> str:
    """What a compiled kernel needs that no launch of ours gives."""
    if metadata.target.backend != "cuda":
        return "it is no kernel for CUDA"
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
        return "its programs are started in clusters"
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return "it wants scratch memory"
    return ""


def remark() -> str | None:
    """What is to be said of launches, of the kernels that were loaded in this process."""
    for found in _variants.values():
        if found.by_triton:
            return (
                f"but started by Triton's own launcher, slower: of {found.name}, {found.by_triton}"
            )
    return None


# Triton numbers the types of TMA as the device does; the host has three of them otherwise.
HOST_TYPES = {**{number: number for number in range(16)}, 8: 10, 9: 8, 10: 9}

_variants: dict[Any, Variant] = {}


def variant(kernel: Any, arguments: Arguments, options: Mapping[str, Any], device: int) -> Variant:
    """The machine code for such arguments on a device; compiled and loaded if it is new."""
    key = (id(kernel), device, *sorted(options.items()), arguments.key)
    found = _variants.get(key)
    if found is None:
        found = _variants[key] = Variant(kernel, arguments, options, device)
    return found


@functools.cache
def target_of(device: int) -> GPUTarget:
    """What Triton's compiler calls a device."""
    import torch

    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return GPUTarget("hip", name, torch.cuda.get_device_properties(device).warp_size)
    major, minor = torch.cuda.get_device_capability(device)
    return GPUTarget("cuda", 10 * major + minor, driver.THREADS_PER_WARP)
