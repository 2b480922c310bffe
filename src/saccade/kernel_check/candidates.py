"""Candidates: the configs worth compiling for a kernel, pruned by what they must take at least."""

from __future__ import annotations

from itertools import product

from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.configs import KernelProblem
from saccade.runtime.spec import Config

TILES = (16, 32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
FEWEST_PAIRS, MOST_PAIRS = 16 * 32, 128 * 128  # in a tile: below, tensor cores idle
REGISTERS = 255  # of a thread, on NVIDIA's GPUs
# What is beside sums and pairs in registers (addresses, operands) is not estimated: a kernel may
# spill a little and still be the fastest, and the compiler will tell.
TENSOR_MEMORY = ("sm_100",)  # keeps sums outside of registers


def candidates(problem: KernelProblem) -> list[Config]:
    """Tiles × warps × stages that may fit; the default is always among them, and first."""
    found = [configs.default(problem)]
    for numbers in product(TILES, TILES, WARPS, _stages(problem.architecture)):
        config = Config(*numbers)
        if config not in found and _may_fit(problem, config):
            found.append(config)
    return found


def least_shared_memory(problem: KernelProblem, config: Config) -> int:
    """Bytes of the tiles that wait in shared memory while others are computed."""
    row = problem.width * (4 if problem.wide else 2)
    ahead = max(config.num_stages - 1, 0)
    streamed = config.query_tile if over_queries(problem.which) else config.kv_tile
    return 2 * ahead * streamed * row  # keys and values, or queries and gradients of outputs


def least_registers(problem: KernelProblem, config: Config) -> float:
    """Registers of a thread for the sums and for one tile of pairs."""
    threads = config.num_warps * (64 if problem.architecture.startswith("gfx") else 32)
    pairs = config.query_tile * config.kv_tile
    if problem.which == "backward_bias":
        sums = pairs
    elif over_queries(problem.which):
        sums = 2 * config.kv_tile * problem.width  # gradients of keys and of values
    else:
        sums = config.query_tile * problem.width
    return (sums + pairs) / threads


def over_queries(which: str) -> bool:
    """Whether programs of a kernel stand at keys and walk over queries."""
    return which in ("backward_keys", "backward_shared")


def _stages(architecture: str) -> tuple[int, ...]:
    if architecture == "sm_75":  # no asynchronous copies
        return STAGES[:1]
    return STAGES[:2] if architecture.startswith("gfx") else STAGES


def _may_fit(problem: KernelProblem, config: Config) -> bool:
    most = FEWEST_PAIRS, MOST_PAIRS
    if not most[0] <= config.query_tile * config.kv_tile <= most[1]:
        return False
    if problem.which == "backward_bias" and config.num_stages > 1:
        return False  # its loops are short, and each tile is another
    if least_shared_memory(problem, config) > configs.SHARED_MEMORY[problem.architecture]:
        return False
    spacious = problem.architecture in TENSOR_MEMORY or problem.architecture.startswith("gfx")
    return spacious or least_registers(problem, config) <= REGISTERS
