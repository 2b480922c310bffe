"""Driver: the few calls of CUDA's driver that a launch needs, by ctypes.

`libcuda.so.1` (`nvcuda.dll` on Windows) is there wherever a GPU is, so nothing is compiled for it
and nothing else has to be installed. Names and numbers are those of cuda.h.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
OVERLAPPING_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PREFER_SHARED_MEMORY = 1  # CU_FUNC_CACHE_PREFER_SHARED
WITHOUT_ASKING = 48 * 1024  # bytes of shared memory that every kernel may have
THREADS_PER_WARP = 32
TENSOR_MAP_SIZE, TENSOR_MAP_ALIGNMENT = 128, 64  # bytes of a CUtensorMap


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of which only values that are one number are used."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", c_uint32), ("grid_y", c_uint32), ("grid_z", c_uint32),
        ("block_x", c_uint32), ("block_y", c_uint32), ("block_z", c_uint32),
        ("shared_memory", c_uint32), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)), ("num_attributes", c_uint32),
    )  # fmt: skip


class TensorMapKind(NamedTuple):
    """What a TMA descriptor says of a tensor beside its address, shape and strides."""

    swizzle: int  # CUtensorMapSwizzle
    element_size: int  # bytes
    element_type: int  # CUtensorMapDataType
    sides: tuple[int, ...]  # of what moves at once


@functools.cache
def library() -> Any:
    """The driver's library.

    Raises:
        OSError: where there is none.
    """
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def check(result: int, what: str) -> None:
    """Raise a RuntimeError that says what failed, and how."""
    if result == 0:
        return
    name = c_char_p()
    library().cuGetErrorName(result, ctypes.byref(name))
    raise RuntimeError(f"{what} failed: {(name.value or b'unknown').decode()} ({result})")


class Function:
    """A kernel in machine code, loaded; for all devices and contexts."""

    def __init__(self, code: bytes, name: str):
        cuda = library()
        self.code, loaded, kernel = code, c_void_p(), c_void_p()  # the driver may load it later
        none = (None, None, 0)
        check(
            cuda.cuLibraryLoadData(ctypes.byref(loaded), self.code, *none, *none),
            f"loading the machine code of {name}",
        )
        check(
            cuda.cuLibraryGetKernel(ctypes.byref(kernel), loaded, name.encode()),
            f"finding {name} in its machine code",
        )
        self.name, self.handle = name, kernel

    def parameter_sizes(self) -> list[int] | None:
        """Bytes of each parameter; None: this driver cannot tell (before CUDA 12.4)."""
        cuda, found = library(), list[int]()
        if not hasattr(cuda, "cuKernelGetParamInfo"):
            return None
        offset, size = c_size_t(), c_size_t()
        asked = ctypes.byref(offset), ctypes.byref(size)
        while cuda.cuKernelGetParamInfo(self.handle, c_size_t(len(found)), *asked) == 0:
            found.append(size.value)
        return found

    def allow_shared_memory(self, size: int, device: int) -> None:
        """Let programs on a device have so much shared memory."""
        if size <= WITHOUT_ASKING:
            return
        cuda, number = library(), c_int()
        check(cuda.cuDeviceGet(ctypes.byref(number), device), f"finding device {device}")
        what = f"giving {self.name} {size} bytes of shared memory"
        check(cuda.cuKernelSetCacheConfig(self.handle, PREFER_SHARED_MEMORY, number), what)
        check(cuda.cuKernelSetAttribute(DYNAMIC_SHARED_MEMORY, size, self.handle, number), what)


def launch_config(warps: int, shared_memory: int, overlapping: bool) -> LaunchConfig:
    """How programs of so many warps are started; their number and the stream are set later.

    overlapping: they may start while the kernel before them still runs, and wait for it themselves.
    """
    config = LaunchConfig(0, 1, 1, THREADS_PER_WARP * warps, 1, 1, shared_memory)
    if overlapping:
        config.attributes = (LaunchAttribute * 1)(LaunchAttribute(OVERLAPPING_LAUNCH, 0, 1))
        config.num_attributes = 1
    return config


def use_context_of(device: int) -> None:
    """Make a device's primary context this thread's: a new thread has none yet."""
    cuda, number, context = library(), c_int(), c_void_p()
    check(cuda.cuDeviceGet(ctypes.byref(number), device), f"finding device {device}")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "retaining its context")
    check(cuda.cuCtxSetCurrent(context), "entering its context")


class TensorMapEncoder:
    """Makes TMA descriptors of one kind; memory for what the driver reads is laid out once, which
    saves most of what a descriptor takes."""

    def __init__(self, cuda: Any, kind: TensorMapKind):
        rank, sides = len(kind.sides), kind.sides[::-1]
        memory = ctypes.create_string_buffer(2 * TENSOR_MAP_SIZE)
        start = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
        self.made = memoryview(memory)[start : start + TENSOR_MAP_SIZE]
        self.lock = threading.Lock()  # of whoever writes there
        self.address, self.size = c_void_p(), kind.element_size
        self.numbers = (c_uint64 * (2 * rank))()  # sizes and steps, of which it reads one less
        self.pack_into = struct.Struct(f"{2 * rank - 1}Q").pack_into
        self.encode = cuda.cuTensorMapEncodeTiled
        self.handed = (
            c_void_p(ctypes.addressof(memory) + start),
            kind.element_type,
            rank,
            self.address,
            self.numbers,
            (c_uint64 * rank).from_buffer(self.numbers, rank * ctypes.sizeof(c_uint64)),
            (c_uint32 * rank)(*sides),  # what moves at once,
            (c_uint32 * rank)(*[1] * rank),  # and every how many elements
            0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
            kind.swizzle,
            2,  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
            0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        )

    def __call__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
        """The descriptor of a tensor; strides in elements, the last one is 1."""
        size = self.size
        steps = [size * stride for stride in strides[-2::-1]]
        with self.lock:
            self.address.value = address
            self.pack_into(self.numbers, 0, *shape[::-1], *steps)
            result = self.encode(*self.handed)
            made = self.made.tobytes()
        if result:
            what = f"of shape {tuple(shape)} and strides {tuple(strides)}"
            check(result, f"describing a tensor {what} for TMA")
        return made


@functools.cache
def _encoder(cuda: Any, kind: TensorMapKind) -> TensorMapEncoder:
    return TensorMapEncoder(cuda, kind)


def tensor_map(
    kind: TensorMapKind, address: int, shape: Sequence[int], strides: Sequence[int]
) -> bytes:
    """The TMA descriptor of a tensor; strides in elements, the last one is 1."""
    return _encoder(library(), kind)(address, shape, strides)
