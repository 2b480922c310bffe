"""Linear attention, finishing: what becomes of a sweep's sums before they are stored."""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.language import maximum
from saccade.kernels.tiles import row_pointers

OUTPUT, GRAD_QUERY = tl.constexpr("output"), tl.constexpr("grad_query")
GRAD_KEY, GRAD_VALUE = tl.constexpr("grad_key"), tl.constexpr("grad_value")


@triton.jit
def store_result(
    result, numbers, through, eps, at, rows, exist, seen, outer, found, total,
    OUTER: tl.constexpr, THROUGH_SHARE: tl.constexpr, PASS: tl.constexpr, NORMALIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Divide by the normaliser, or go back through the feature map, and store; 0 where hidden."""
    batch, head, common, tile = at
    if PASS == OUTPUT:
        total = tl.where(seen, total, 0.0)
        if NUMBERS:
            tl.store(row_pointers(numbers, batch, head, rows, 0), total, mask=exist & (tile == 0))
        divisor = divisor_of(total, eps, NORMALIZE)
        found = tl.where((divisor == 0)[:, None], 0.0, found / divisor[:, None])
    if PASS == GRAD_QUERY or PASS == GRAD_KEY:  # noqa: SIM109 (a constexpr is in no tuple)
        channels = outer[None, :] < OUTER
        raw = tl.load(
            row_pointers(
                through.rows, batch, common // THROUGH_SHARE, rows[:, None], outer[None, :]
            ),
            mask=seen[:, None] & channels, other=0.0,
        )  # fmt: skip
        mapped = raw.to(tl.float32)
        if through.apply is not None:
            mapped = through.apply(mapped)
        if through.scale is not None:
            found = found * through.scale
        if NUMBERS:
            dots = tl.sum(tl.where(seen[:, None] & channels, mapped * found, 0.0), 1)
            tiles: tl.constexpr = (OUTER + outer.shape[0] - 1) // outer.shape[0]
            tl.store(row_pointers(numbers, batch, head * tiles + tile, rows, 0), dots, mask=exist)
        if through.derivative is not None:
            found = found * through.derivative(mapped)
    found = tl.where(seen[:, None], found, 0.0)
    pointers = row_pointers(result, batch, head, rows[:, None], outer[None, :])
    tl.store(
        pointers, found.to(result.ptr.dtype.element_ty),
        mask=exist[:, None] & (outer < OUTER)[None, :],
    )  # fmt: skip


@triton.jit
def divisor_of(total, eps, NORMALIZE: tl.constexpr):
    """What weighted sums are divided by; see `saccade.linear_attention`."""
    divisor = total * 0.0 + 1.0
    if NORMALIZE == "sum":
        divisor = total + eps
    elif NORMALIZE == "clamp":
        divisor = maximum(total, eps)
    elif NORMALIZE == "abs":
        divisor = maximum(tl.abs(total), eps)
    return divisor
