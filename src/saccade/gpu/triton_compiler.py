"""Triton's compiler, asked for a named target without its driver: no GPU and no C compiler needed.

The only file, with the workarounds beside it, that imports Triton's compiler, and it is imported
when something has to be compiled. What is relied on of Triton stands here: `ASTSource`,
`GluonASTSource`, `triton.compile`, and what a compiled kernel says of itself; in 3.6 to 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from saccade.gpu import compiler_workarounds
from saccade.gpu.driver import TensorMapKind
from saccade.gpu.language import Function
from saccade.gpu.signature import FUSED, Arguments, Signature
from saccade.gpu.stored_code import MachineCode

VERSION = triton.__version__

# Triton numbers the types of TMA as the device does; the host has three of them otherwise.
HOST_TYPES = {**{number: number for number in range(16)}, 8: 10, 9: 8, 10: 9}


def compiled(
    kernel: Function, arguments: Arguments, options: Mapping[str, Any], target: GPUTarget
) -> Any:
    """Triton's compiled kernel, from its cache on disk or made now."""
    form = GluonASTSource if kernel.is_gluon else ASTSource
    on_amd = target.backend == "hip"
    source = form(kernel.jit, *Signature.of(kernel.arg_names, arguments, on_amd))
    asked = {**FUSED, **compiler_workarounds.options(target), "debug": knobs.runtime.debug}
    if hasattr(knobs.compilation, "instrumentation_mode"):
        asked["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    with compiler_workarounds.applied(target):
        return triton.compile(source, target=target, options={**asked, **options})


def target_of(architecture: str) -> GPUTarget:
    """An architecture (sm_90, gfx942) as Triton names it."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def needs_triton(metadata: Any) -> str:
    """What a compiled kernel needs that no launch of ours gives; "": nothing."""
    if metadata.target.backend != "cuda":
        return "it is no kernel for CUDA"
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
        return "its programs are started in clusters"
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return "it wants scratch memory"
    return ""


def machine_code_of(found: Any) -> MachineCode:
    """What a launch needs of a compiled kernel that needs nothing of Triton's."""
    metadata = found.metadata
    maps = [
        TensorMapKind(
            one["swizzle"], one["elem_size"], HOST_TYPES[one["elem_type"]],
            tuple(one["block_size"]),
        )
        for one in getattr(metadata, "tensordesc_meta", None) or ()
    ]  # fmt: skip
    return MachineCode(
        metadata.name, found.asm["cubin"], metadata.num_warps, metadata.shared,
        bool(metadata.launch_pdl), tuple(maps),
    )  # fmt: skip
