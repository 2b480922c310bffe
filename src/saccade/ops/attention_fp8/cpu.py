"""fp8 attention on the CPU: rows in float32 as e4m3 numbers and scales say, weights rounded.

A CPU has no fp8 products, so this is for tests and for what follows a GPU's numbers elsewhere. It
visits what the mask lets through, a tile of keys after the other (`ops/attention/cpu/fp8_tile.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.ops.attention.cpu.fp8_tile import attend
from saccade.ops.attention.cpu.segments import DenseProblem, clear_padding, parts_of
from saccade.ops.attention_fp8.quantise import operands, quantised
from saccade.runtime.fp8_spec import (
    BLOCK_ROWS,
    Fp8Inputs,
    Quantisation,
    empty_fp8_results,
)
from saccade.runtime.spec import Inputs, KernelConfig, Variant
from saccade.runtime.validation import computed_without


@computed_without
def forward(
    inputs: Fp8Inputs, variant: Variant, config: KernelConfig, quantisation: Quantisation
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_fp8`."""
    output, lse = empty_fp8_results(inputs, quantisation.dtype)
    clear_padding(inputs.cu_seqlens_q, output)
    clear_padding(inputs.cu_seqlens_q, lse, dim=1, number=-torch.inf)
    found = operands(quantised(inputs, quantisation), variant.scale, torch.float32)
    variant = variant._replace(scale=1.0)  # queries have it
    wide = Inputs(*found[:3], inputs.sinks, None, *inputs[7:])
    nonfinite = not all(bool(rows.isfinite().all()) for rows in wide[:3])
    for part in parts_of(wide):
        dense = DenseProblem.of(part, wide, variant, config)
        shift = None if found.shift is None else part.lse(found.shift)
        of_part = attend(dense, config.kv_tile or BLOCK_ROWS, nonfinite, shift=shift)
        part.queries(output).copy_(of_part[0])
        part.lse(lse).copy_(of_part[1])
    return output, lse


def prepared(
    inputs: Fp8Inputs, variant: Variant, config: KernelConfig, quantisation: Quantisation
) -> Callable[[Fp8Inputs, Variant], tuple[Tensor, Tensor]]:
    """The forward pass for calls like this one; on a CPU nothing is worth preparing."""
    return lambda inputs, variant: forward(inputs, variant, config, quantisation)
