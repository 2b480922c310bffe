"""Pipeline: how a producer hands tiles to consumers; the only file that knows barriers and phases.

A ring is shared memory in stages. Its users count *turns*, from 0 on and never back: turn t is in
stage t % stages, for the (t // stages)-th time. A stage is full or empty;
who waits for turn t to be full, or for its stage to be empty, need know nothing else.

What differs between versions of Triton's Gluon (3.6 to 3.9) stays in this file.

Descriptors, at the end, are tensors as TMA reads and writes them, of four axes: batch entry, head,
row, channel. Packed sequences are one batch entry. TMA fills what lies outside a tensor with zeros,
and writes nothing there, so rows past the end and channels past the last one need no care.
"""

# Triton's language has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

import functools
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.gpu.language import Name, aggregate, gdc_launch_dependents, gdc_wait, gl, gluon
from saccade.gpu.launcher import next_width
from saccade.gpu.signature import ALIGNMENT, Described, fixed
from saccade.runtime.delta_spec import DeltaInputs
from saccade.runtime.spec import Inputs, LinearInputs
from saccade.runtime.validation import strides_fit_tma

hopper: Any = Name("triton.experimental.gluon.language.nvidia.hopper")
builtin: Any = Name("triton.experimental.gluon.language._core.builtin")
mbarrier, tma = hopper.mbarrier, hopper.tma
fence_async_shared = hopper.fence_async_shared
warpgroup_mma = hopper.warpgroup_mma
warpgroup_mma_wait = hopper.warpgroup_mma_wait
mma_v2 = hopper.mma_v2
# 3.9 has other names for these two.
start_load: Any = Name(f"{tma}.async_load", f"{tma}.async_copy_global_to_shared")
start_store: Any = Name(f"{tma}.async_store", f"{tma}.async_copy_shared_to_global")
ir: Any = Name("triton._C.libtriton.ir")
INSTALLED: Any = Name("saccade.gpu.triton_compiler.INSTALLED")


@builtin
def _add_by_descriptor(desc, coordinates, memory, _semantic: Any = None):
    """What 3.6 can do and has no name for."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, memory.handle
    )


start_add: Any = Name(f"{tma}.async_atomic_add", f"{__name__}._add_by_descriptor")


@builtin
def reinterpreted(memory, dtype, shape, layout, _semantic: Any = None):
    """Shared memory as tiles of another shape; Triton 3.9 has another name for it."""
    function = getattr(memory, "_reinterpret", None) or memory.reinterpret
    return function(dtype, shape, layout, _semantic=_semantic)


# And for this one.
wait_for_each_other: Any = Name(f"{gl!r}.barrier", f"{gl!r}.thread_barrier")


@gluon.jit
def follow():
    """Wait until all kernels before are done; then the next may begin to get ready."""
    gdc_wait()
    gdc_launch_dependents()


@aggregate
class Ring:
    """Stages of shared memory, each with a barrier that says full and one that says empty."""

    memory: gl.shared_memory_descriptor  # [stages, ...]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, memory, full, empty):
        self.memory = memory
        self.full = full
        self.empty = empty

    @gluon.jit
    def acquire(self, iteration):
        """Wait until the stage of a turn is empty."""
        mbarrier.wait(self.empty.index(self.stage(iteration)), (self.round(iteration) & 1) ^ 1)

    @gluon.jit
    def load(self, iteration, desc, coordinates):
        """Start to fill the stage of a turn from global memory; full when all has arrived."""
        stage = self.stage(iteration)
        ready = self.full.index(stage)
        mbarrier.expect(ready, desc.block_type.nbytes)
        start_load(desc, coordinates, ready, self.memory.index(stage))

    @gluon.jit
    def load_with(self, iteration, desc, coordinates, other_desc, other_coordinates, other_memory):
        """Load into this memory and a second one of as many stages: full when both have arrived."""
        stage = self.stage(iteration)
        ready = self.full.index(stage)
        mbarrier.expect(ready, desc.block_type.nbytes + other_desc.block_type.nbytes)
        start_load(desc, coordinates, ready, self.memory.index(stage))
        start_load(other_desc, other_coordinates, ready, other_memory.index(stage))

    @gluon.jit
    def load_boxes(self, iteration, desc, pages, head, slot):
        """Load from several pages: boxes of some slots and channels of each of them. They fill the
        stage as one box of all would: some channels of all rows, then the next ones."""
        stage = self.stage(iteration)
        ready = self.full.index(stage)
        CHANNELS: gl.constexpr = desc.block_type.shape[3]
        COLUMNS: gl.constexpr = self.memory.shape[4] // CHANNELS
        BOXES: gl.constexpr = in_stages(
            self.memory.shape[0] * COLUMNS * len(pages), desc.block_type.shape
        )
        boxes = reinterpreted(self.memory, desc.dtype, BOXES, desc.layout)
        mbarrier.expect(ready, COLUMNS * len(pages) * desc.block_type.nbytes)
        for column in gl.static_range(COLUMNS):
            for position in gl.static_range(len(pages)):
                box = boxes.index((stage * COLUMNS + column) * len(pages) + position)
                start_load(desc, [pages[position], head, slot, column * CHANNELS], ready, box)

    @gluon.jit
    def expect(self, iteration, desc):
        """Say what will fill the stage of a turn, where it is several tiles: see `load_tile`."""
        tiles: gl.constexpr = self.memory.shape[0] // self.full.shape[0]
        mbarrier.expect(self.full.index(self.stage(iteration)), tiles * desc.block_type.nbytes)

    @gluon.jit
    def load_tile(self, iteration, which, desc, coordinates):
        """Start to fill one of the tiles of a turn."""
        memory = self.tile_of(iteration, which).reshape(desc.block_type.shape)
        start_load(desc, coordinates, self.full.index(self.stage(iteration)), memory)

    @gluon.jit
    def tile_of(self, iteration, which):
        """One of the tiles of a turn."""
        tiles: gl.constexpr = self.memory.shape[0] // self.full.shape[0]
        return self.memory.index(tiles * self.stage(iteration) + which)

    @gluon.jit
    def put(self, iteration, numbers):
        """Fill the stage of a turn from registers."""
        stage = self.stage(iteration)
        self.memory.index(stage).store(numbers)
        mbarrier.arrive(self.full.index(stage), count=1)

    @gluon.jit
    def put_rows(self, iteration, first_row, numbers):
        """Fill some rows of the stage of a turn from registers, for products to read."""
        stage = self.stage(iteration)
        self.memory.index(stage).slice(first_row, numbers.shape[0]).store(numbers)
        fence_async_shared()
        mbarrier.arrive(self.full.index(stage), count=1)

    @gluon.jit
    def wait(self, iteration):
        """Wait until the stage of a turn is full."""
        mbarrier.wait(self.full.index(self.stage(iteration)), self.round(iteration) & 1)

    @gluon.jit
    def at(self, iteration):
        """The shared memory of a turn."""
        return self.memory.index(self.stage(iteration))

    @gluon.jit
    def release(self, iteration):
        """One consumer is done with the stage of a turn."""
        mbarrier.arrive(self.empty.index(self.stage(iteration)), count=1)

    @gluon.jit
    def release_loaded(self, iteration):
        """Release a stage that loads have read, and not products alone: they may still be on their
        way, and TMA would overtake them."""
        fence_async_shared()
        self.release(iteration)

    @gluon.jit
    def stage(self, iteration):
        """Where a turn is."""
        STAGES: gl.constexpr = self.full.shape[0]
        return iteration & (STAGES - 1) if is_power_of_two(STAGES) else iteration % STAGES

    @gluon.jit
    def round(self, iteration):
        """How often its stage was used before."""
        STAGES: gl.constexpr = self.full.shape[0]
        return iteration >> exponent_of(STAGES) if is_power_of_two(STAGES) else iteration // STAGES


@gluon.jit
def make_ring(
    dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, USERS: gl.constexpr,
    WRITERS: gl.constexpr = 1,
):  # fmt: skip
    """A ring of shape[0] stages, each of which so many consumers empty, and so many fill."""
    return make_ring_in(dtype, shape, layout, shape[0], USERS, WRITERS)


@gluon.jit
def make_ring_in(
    dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, STAGES: gl.constexpr,
    USERS: gl.constexpr, WRITERS: gl.constexpr,
):  # fmt: skip
    """A ring of so many stages, whatever part of the memory each of them is.

    Without USERS, those of another ring say when it is empty: it has no barriers that do.
    """
    memory = gl.allocate_shared_memory(dtype, shape, layout)
    full = make_barriers(STAGES, WRITERS)
    empty = full
    if USERS > 0:
        empty = make_barriers(STAGES, USERS)
    return Ring(memory, full, empty)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each of which waits for so many arrivals; see `settle`.

    All of them have to be used: the memory of those that are not is given to tiles, and what makes
    a barrier of it may come later than what TMA writes there.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(number), count=ARRIVALS)
    return barriers


@gluon.jit
def settle():
    """Make barriers known to TMA, before any role starts: once, when all of them are made."""
    fence_async_shared()


@gluon.jit
def pinned(numbers):
    """Numbers that no compiler takes to be known further up; one product may run on.

    Without this, LLVM and ptxas mix the use of them into the instructions that start a product.
    """
    return warpgroup_mma_wait(1, deps=[numbers])


@gluon.jit
def here(number):
    """A whole number of which nothing that depends on it is computed ahead of a loop.

    Descriptors of products that do not change would else be kept in registers, one for each 16
    channels, and there are none to spare."""
    # $0 = $1. What assembly gives is unknown to compilers, and is_pure=False keeps it in its place.
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store(desc, coordinates, memory):
    """Start to write shared memory, just written by this partition, to global memory."""
    fence_async_shared()
    start_store(desc, coordinates, memory)


@gluon.jit
def add(desc, coordinates, memory):
    """Start to add shared memory, just written by this partition, to global memory."""
    fence_async_shared()
    start_add(desc, coordinates, memory)


@gluon.jit
def wait_for_stores(RUNNING: gl.constexpr = 0):
    """Wait until this partition's stores, all but the last so many, have read their memory."""
    tma.store_wait(RUNNING)


@gluon.jit
def wait_for_sums():
    """Wait until this partition's additions are in memory, where another program may add more."""
    # Wait until of the bulk copies that this thread has committed 0 are left, their writes done
    # (`store_wait` below waits for their reads alone). $0 = 0: assembly has to give something.
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def count_at(pointer):
    """A number in memory as it is now; asked for at once, and waited for where it is used."""
    # $0 = the 32 bits at the address $1. relaxed.gpu: as the programs of the GPU see it, so never
    # from the L1, where it might be old; and later loads need not wait for it.
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def flag_at(pointer):
    """Read a number that this program alone writes; mostly it comes from the L1."""
    # $0 = the 32 bits at the address $1. relaxed.cta: as this program sees it, so from the L1 too.
    return gl.inline_asm_elementwise(
        "ld.relaxed.cta.global.b32 $0, [$1];", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def make_ring_for(desc, STAGES: gl.constexpr, USERS: gl.constexpr):
    """A ring of tiles as a descriptor loads them."""
    SHAPE: gl.constexpr = in_stages(STAGES, desc.block_type.shape)
    LAYOUT: gl.constexpr = desc.layout
    return make_ring(desc.dtype, SHAPE, LAYOUT, USERS)


@gluon.jit
def make_ring_of(
    dtype: gl.constexpr, SHAPE: gl.constexpr, STAGES: gl.constexpr, USERS: gl.constexpr
):
    """A ring of tiles as products read them."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return make_ring(dtype, in_stages(STAGES, SHAPE), LAYOUT, USERS)


@gluon.jit
def make_memory_for(desc):
    """Shared memory of one tile as a descriptor stores it."""
    LAYOUT: gl.constexpr = desc.layout
    return gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, LAYOUT)


@gluon.constexpr_function
def is_power_of_two(number):
    """Whether a remainder is a matter of bits."""
    return number & (number - 1) == 0


@gluon.constexpr_function
def exponent_of(power_of_two):
    """The base-2 logarithm of a power of two."""
    return power_of_two.bit_length() - 1


@gluon.constexpr_function
def in_stages(stages, shape):
    """The shape of so many stages."""
    return [stages, *shape]


@gluon.constexpr_function
def by_twos(SUMS):
    """Whether numbers are converted by assembly: by Triton 3.9, and for 64 columns of sums.

    For 128 and 256, and by 3.6, it takes 1.03 to 1.05 of the time.
    """
    return INSTALLED.conversions and SUMS.instr_shape[1] <= 64


@gluon.jit
def as_operand(weights, dtype: gl.constexpr, SUMS: gl.constexpr):
    """Weights as a product takes them from registers: two neighbours of a row in each."""
    if by_twos(SUMS) and weights.dtype == gl.float32:
        # $1, $2: two neighbours. cvt puts its first operand into the upper half of $0, its second
        # one into the lower half, each rounded to the nearest.
        if dtype == gl.bfloat16:
            weights = gl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [weights], dtype=gl.bfloat16,
                is_pure=True, pack=2,
            )  # fmt: skip
        else:
            weights = gl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [weights], dtype=gl.float16,
                is_pure=True, pack=2,
            )  # fmt: skip
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, SUMS, 2))


SMALLEST_WIDTH = 64  # channels: the 128 bytes that TMA swizzles at once
NVMMASharedLayout = gl.NVMMASharedLayout
PLAIN = NVMMASharedLayout(0, 32)
DTYPES = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}  # fmt: skip


class Box(NamedTuple):
    """Which part of a tensor moves at once, and how it lies in shared memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sides: tuple[int, ...]
    layout: Any  # gl.NVMMASharedLayout

    @staticmethod
    def of(tensor: Any, packed: bool, rows: int, channels: int) -> "Box":
        """Tiles of so many rows and channels of a dense or packed tensor, or of its layout."""
        shape, strides = tuple(tensor.shape), tensor.stride()
        if packed:
            tokens, heads, dim = shape
            shape = fixed(1), heads, tokens, dim
            strides = fixed(0), strides[1], strides[0], strides[2]
        sides = (1, 1, rows, channels)
        return Box(shape, (*strides[:3], fixed(1)), sides, _layout_of(sides, tensor.dtype))

    @staticmethod
    def plain(rows: int, columns: int, at_once: int) -> "Box":
        """Some whole rows of a contiguous float32 matrix, which lie the same in shared memory."""
        strides = fixed(columns), fixed(1)
        return Box((rows, strides[0]), strides, (at_once, columns), PLAIN)


@functools.cache
def _layout_of(sides: tuple[int, ...], dtype: torch.dtype) -> Any:
    return NVMMASharedLayout.get_default_for(list(sides), DTYPES[dtype])


def descriptor(tensor: Tensor, box: Box) -> Any:
    """A descriptor as a kernel argument."""
    return Described(tensor, *box, tensor.dtype)


def width_of(dim: int) -> int:
    """The channels that a kernel computes with."""
    return max(SMALLEST_WIDTH, next_width(dim))


AnyInputs = TypeVar("AnyInputs", Inputs, LinearInputs, DeltaInputs)


def aligned(inputs: AnyInputs) -> AnyInputs:
    """The inputs at addresses that TMA takes; copied where they are not."""
    query, key, value = inputs[:3]
    if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % ALIGNMENT == 0:
        return inputs
    query, key, value = (
        tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
        for tensor in (query, key, value)
    )
    return inputs._replace(query=query, key=key, value=value)


def readable(rows: Tensor) -> Tensor:
    """Rows as TMA can read them; copied where it could not (gradients of a sum have no strides)."""
    if strides_fit_tma(rows) and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
