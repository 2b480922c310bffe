"""Rounding on the device: residuals of outputs in 16 bits; see `saccade.runtime.rounding`."""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false

from __future__ import annotations

from saccade.gpu.language import tl, triton

# A float32 to which this is added has its whole number in its last bits: unlike a conversion, of
# which a multiprocessor does few at a time, that is an addition. What overflows 8 bits, beside 0
# and below the normal numbers of float16, is another number of 8 bits, and as harmless as any.
WHOLE = tl.constexpr(1.5 * 2**23)
STEPS_BFLOAT16 = tl.constexpr(127.0 * 2**8)  # as `steps_per_one` of `saccade.runtime.rounding`
STEPS_FLOAT16 = tl.constexpr(127.0 * 2**11)


@triton.jit
def residual_of(exact, output):
    """What rounding took from float32 numbers, given what they were rounded to."""
    STEPS: tl.constexpr = STEPS_BFLOAT16 if output.dtype == tl.bfloat16 else STEPS_FLOAT16
    rounded = output.to(tl.float32)
    steps = (exact - rounded) * STEPS / rounded
    return (steps + WHOLE).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def restored(output, residual):
    """Numbers with what rounding took from them, in float32."""
    STEPS: tl.constexpr = STEPS_BFLOAT16 if output.dtype == tl.bfloat16 else STEPS_FLOAT16
    return output.to(tl.float32) * (1.0 + residual.to(tl.float32) * (1.0 / STEPS))
