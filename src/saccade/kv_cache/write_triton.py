"""Write: keys and values of new tokens into their slots, turned and in eight bits on the way.

One launch for both, and nothing is read by the host. Sources: PagedAttention (Kwon et al. 2023),
section 4.3; RoFormer (Su et al. 2021), section 3.2.2.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import paged_view, tensor_view
from saccade.gpu.device_ops import as_fp8_bytes, as_int8, divided, row_scales
from saccade.gpu.language import gdc_launch_dependents, gdc_wait, tl, triton
from saccade.gpu.launcher import Launch, current_device, next_width
from saccade.gpu.paged_view import slot_pointers
from saccade.gpu.signature import Stride
from saccade.gpu.tensor_view import View, row_pointers
from saccade.ops.attention.triton.call_spec import architecture, remembered
from saccade.ops.paged_attention.triton.configs import CHAINS

ROWS = 8  # that a program writes
FLOAT8 = torch.float8_e4m3fn


class WriteMeta(NamedTuple):
    """How the kernel runs, known when it is compiled; `write_pages` says what each is."""

    ROWS: int
    CHAINED: bool


@triton.jit(do_not_specialize=["num_slots"])
def write_pages(
    key, value, key_pages, value_pages, key_scales, value_scales,  # Views, or None
    cos, sin, slot_mapping, num_rows, num_slots,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows, a row being one head of one token.

    CHAINED: it may start before the kernel in front of it has ended, and waits for that here;
    attention may start while this one runs, and waits likewise.
    """
    if META.CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0) * META.ROWS + tl.arange(0, META.ROWS)
    exist = rows < num_rows
    tokens, heads = (rows // HEADS)[:, None], (rows % HEADS)[:, None]
    slots = tl.load(slot_mapping + rows // HEADS, mask=exist, other=-1)[:, None]
    wanted = (slots >= 0) & (slots < num_slots)  # others are skipped
    slots = tl.where(wanted, slots, 0)
    place = (slots // PAGE_SIZE, 0, slots % PAGE_SIZE)
    keys = load_tokens(key, tokens, heads, wanted, HEAD_DIM, HEAD_WIDTH)
    if PAIRS > 0:
        keys = turned(key, keys, cos, sin, tokens, heads, wanted, HEAD_WIDTH, PAIRS, INTERLEAVED)
    values = load_tokens(value, tokens, heads, wanted, VALUE_DIM, VALUE_WIDTH)
    store_slots(key_pages, key_scales, heads, place, wanted, keys, HEAD_DIM)
    store_slots(value_pages, value_scales, heads, place, wanted, values, VALUE_DIM)


@triton.jit
def load_tokens(view, tokens, heads, wanted, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of tokens, in at least 32 bits."""
    channels = tl.arange(0, WIDTH)[None, :]
    exist = wanted & (channels < DIM)
    found = tl.load(row_pointers(view, 0, heads, tokens, channels), mask=exist, other=0.0)
    return found if found.dtype == tl.float64 else found.to(tl.float32)


@triton.jit
def turned(
    view, rows, cos, sin, tokens, heads, wanted,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows whose pairs of channels are turned by their angles; other channels stay."""
    channels = tl.arange(0, WIDTH)[None, :]
    if INTERLEAVED:
        pairs, first, partners = channels // 2, channels % 2 == 0, channels ^ 1
    else:
        pairs, first = channels % PAIRS, channels < PAIRS
        partners = tl.where(first, channels + PAIRS, channels - PAIRS)
    turns = wanted & (channels < 2 * PAIRS)
    others = tl.load(row_pointers(view, 0, heads, tokens, partners), mask=turns, other=0.0)
    along = tl.load(row_pointers(cos, 0, 0, tokens, pairs), mask=turns, other=1.0).to(rows.dtype)
    across = tl.load(row_pointers(sin, 0, 0, tokens, pairs), mask=turns, other=0.0).to(rows.dtype)
    product = others.to(rows.dtype) * across
    return tl.where(turns, rows * along + tl.where(first, -product, product), rows)


@triton.jit
def store_slots(view, scales, heads, place, wanted, rows, DIM: tl.constexpr):
    """Write rows into slots, in the dtype of the pages; bytes are float8_e4m3fn."""
    DTYPE: tl.constexpr = view.ptr.dtype.element_ty
    channels = tl.arange(0, rows.shape[1])[None, :]
    if scales is not None:
        of_rows = row_scales(rows.to(tl.float32), tl.uint8 == DTYPE)
        rows = divided(rows.to(tl.float32), of_rows)
        of_rows = of_rows.to(scales.ptr.dtype.element_ty)
        tl.store(slot_pointers(scales, heads, place, 0), of_rows, mask=wanted)
    if tl.uint8 == DTYPE:
        stored = as_fp8_bytes(rows.to(tl.float32))
    elif tl.int8 == DTYPE:
        stored = as_int8(rows.to(tl.float32))
    else:
        stored = rows.to(DTYPE)
    tl.store(slot_pointers(view, heads, place, channels), stored, mask=wanted & (channels < DIM))


def fits(key_pages: Tensor, value_pages: Tensor) -> bool:
    """Whether the kernel can write such pages: channels must lie side by side."""
    return all(p.stride(3) == 1 or p.shape[3] <= 1 for p in (key_pages, value_pages))


_launches: dict[Any, Launch] = {}


def write(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> None:
    """See `saccade.write_kv_cache`."""
    if key_pages.dtype == FLOAT8:
        key_pages, value_pages = key_pages.view(torch.uint8), value_pages.view(torch.uint8)
    rows = tuple(map(_with_unit_channels, (key, value)))
    angles = tuple(None if angle is None else _with_unit_channels(angle) for angle in (cos, sin))
    slots = slot_mapping.contiguous()
    written = key_pages, value_pages, key_scales, value_scales
    brought = (*rows, *written, *angles, slots)
    kinds = [t if t is None else (t.shape, t.stride(), t.dtype) for t in brought]
    launch = remembered(
        _launches,
        (*kinds, key.device, interleaved),
        lambda: _launch(_constants(key, value, key_pages, cos, interleaved)),
    )
    num_rows = key.shape[0] * key.shape[1]

    def arguments() -> tuple[Any, ...]:
        return (
            *(_rows(each) for each in rows),
            *(_pages(each) for each in written),
            *(_rows(each) for each in angles),
            slots,
            num_rows,
            key_pages.shape[0] * key_pages.shape[2],
        )

    tensors = [tensor for tensor in brought if tensor is not None]
    launch(-(-num_rows // ROWS), current_device(key), tensors, arguments)


def _launch(constants: dict[str, Any]) -> Launch:
    # Rounded after each operation, as PyTorch does.
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    if constants["CHAINED"]:
        options["launch_pdl"] = True
    return Launch(write_pages, constants, options, meta=WriteMeta)


def _constants(
    key: Tensor, value: Tensor, key_pages: Tensor, cos: Tensor | None, interleaved: bool
) -> dict[str, Any]:
    return {
        "HEADS": key.shape[1],
        "HEAD_DIM": key.shape[2],
        "VALUE_DIM": value.shape[2],
        "HEAD_WIDTH": next_width(key.shape[2]),
        "VALUE_WIDTH": next_width(value.shape[2]),
        "PAGE_SIZE": key_pages.shape[2],
        "PAIRS": 0 if cos is None else cos.shape[1],
        "INTERLEAVED": interleaved,
        "ROWS": ROWS,
        "CHAINED": architecture(key) in CHAINS,
    }


def _with_unit_channels(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _rows(rows: Tensor | None) -> View | None:
    """A View of [tokens, heads, channels], or of the angles [tokens, pairs] of all heads."""
    if rows is None:
        return None
    head = Stride(rows.stride(1) if rows.dim() == 3 else 0)
    data = rows.shape[0], 1
    step = tl.constexpr(rows.stride(0))
    return View(rows, (0, head), step, tensor_view.dense, tensor_view.dense_program, data)


def _pages(memory: Tensor | None) -> View | None:
    """A View of pages, or of their scales."""
    if memory is None:
        return None
    page, head, slot = memory.stride()[:3]
    step, data = tl.constexpr(slot), (0,)
    return View(
        memory, (Stride(page), Stride(head)), step, paged_view.paged, paged_view.paged,
        data,
    )  # fmt: skip
