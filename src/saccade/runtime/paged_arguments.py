"""Paged arguments: every check of what a caller passed beside pages, before anything is computed.

Like `arguments.py`: each complaint names the argument, what it got and what it takes, and values
are looked at where reading them costs nothing, or under `saccade.testing.checked()`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.runtime.arguments import check_heads, values_readable
from saccade.runtime.spec import DTYPES, QUANTISED, PagedInputs

KEY_PAGES = "[num_pages, kv_heads, page_size, head_dim]"
VALUE_PAGES = "[num_pages, kv_heads, page_size, value_dim]"
SCALES = "a floating-point tensor [num_pages, kv_heads, page_size]"
LARGEST_PAGE = 1024
PACKED_QUERY = "[tokens, query_heads, head_dim] with cu_seqlens_q"
DENSE_QUERY = "[batch, query_heads, query_len, head_dim] without cu_seqlens_q"


def check_paged(inputs: PagedInputs) -> None:
    """Refuse queries, pages and tables that do not fit together."""
    _check_query(inputs)
    check_pages(inputs.key_pages, inputs.value_pages, inputs.query.dtype, inputs.query.device)
    _check_sizes(inputs)
    check_scales(
        inputs.key_pages, inputs.value_pages, inputs.key_scales, inputs.value_scales, required=True
    )
    _check_table(inputs)


def _check_query(inputs: PagedInputs) -> None:
    query, packed = inputs.query, inputs.cu_seqlens_q is not None
    takes = PACKED_QUERY if packed else DENSE_QUERY
    if not isinstance(query, Tensor):
        raise TypeError(f"query: got {type(query).__name__}, takes a tensor {takes}")
    if query.dim() != (3 if packed else 4):
        raise ValueError(f"query: got shape {tuple(query.shape)}, takes {takes}")
    if query.dtype not in DTYPES:
        raise TypeError(f"query: got {query.dtype}, takes float32, float64, bfloat16 or float16")


def check_pages(
    key_pages: Tensor, value_pages: Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse pages that do not fit together, or tokens of this dtype and device."""
    for name, pages, takes in (
        ("key_pages", key_pages, KEY_PAGES),
        ("value_pages", value_pages, VALUE_PAGES),
    ):
        if not isinstance(pages, Tensor):
            raise TypeError(f"{name}: got {type(pages).__name__}, takes a tensor {takes}")
        if pages.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(pages.shape)}, takes {takes}")
        if pages.dtype != dtype and pages.dtype not in QUANTISED:
            raise TypeError(
                f"{name}: got {pages.dtype}, takes the tokens' {dtype}, float8_e4m3fn or int8"
            )
        if pages.device != device:
            raise ValueError(f"{name}: got {pages.device}, takes the tokens' {device}")
    if value_pages.dtype != key_pages.dtype:
        raise TypeError(f"value_pages: got {value_pages.dtype}, takes key_pages' {key_pages.dtype}")
    if value_pages.shape[:3] != key_pages.shape[:3]:
        raise ValueError(
            f"value_pages: got {tuple(value_pages.shape[:3])} pages, heads and slots, takes "
            f"key_pages' {tuple(key_pages.shape[:3])}"
        )
    if not 1 <= key_pages.shape[2] <= LARGEST_PAGE:
        raise ValueError(f"key_pages: got pages of {key_pages.shape[2]} slots, takes 1 to 1024")


def _check_sizes(inputs: PagedInputs) -> None:
    query, key_pages = inputs.query, inputs.key_pages
    check_heads("key_pages", query.shape[1], key_pages.shape[1])
    if key_pages.shape[3] != query.shape[-1]:
        raise ValueError(
            f"key_pages: got head_dim {key_pages.shape[3]}, takes query's head_dim "
            f"{query.shape[-1]}"
        )


def check_scales(
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    *,
    required: bool,
) -> None:
    """Refuse scales that are not one number for each slot of each head; int8 needs them."""
    for name, scales, pages in (
        ("key_scales", key_scales, key_pages),
        ("value_scales", value_scales, value_pages),
    ):
        if scales is None:
            if pages.dtype == torch.int8 and required:
                raise TypeError(f"{name}: got None for pages of int8, takes {SCALES}")
            continue
        if pages.dtype not in QUANTISED:
            raise TypeError(f"{name}: got scales for pages of {pages.dtype}, takes None there")
        if not isinstance(scales, Tensor) or not scales.is_floating_point():
            got = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
            raise TypeError(f"{name}: got {got}, takes {SCALES}")
        if scales.shape != pages.shape[:3]:
            raise ValueError(
                f"{name}: got shape {tuple(scales.shape)}, takes {tuple(pages.shape[:3])}"
            )
        if scales.device != pages.device:
            raise ValueError(f"{name}: got {scales.device}, takes the pages' {pages.device}")


TABLE = "an int32 tensor [batch, max_pages] of page numbers"
LENS = "an int32 tensor [batch] of lengths, the new tokens included"


def _check_table(inputs: PagedInputs) -> None:
    for name, tensor, dims, takes in (
        ("page_table", inputs.page_table, 2, TABLE),
        ("kv_lens", inputs.kv_lens, 1, LENS),
    ):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, takes {takes}")
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name}: got {tensor.dtype}, takes {takes}")
        if tensor.dim() != dims:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, takes {takes}")
        if tensor.device != inputs.query.device:
            raise ValueError(f"{name}: got {tensor.device}, takes query's {inputs.query.device}")
    offsets = inputs.cu_seqlens_q
    batch = inputs.query.shape[0] if offsets is None else offsets.shape[0] - 1
    for name, tensor in (("page_table", inputs.page_table), ("kv_lens", inputs.kv_lens)):
        if tensor.shape[0] != batch:
            raise ValueError(f"{name}: got {tensor.shape[0]} sequences, takes query's {batch}")
    if values_readable(inputs.kv_lens) and values_readable(inputs.page_table):
        _check_values(inputs)


def _check_values(inputs: PagedInputs) -> None:
    lens, table = inputs.kv_lens, inputs.page_table
    num_pages, _, page_size, _ = inputs.key_pages.shape
    if lens.numel() == 0:
        return
    slots = table.shape[1] * page_size
    if int(lens.min()) < 0 or int(lens.max()) > slots:
        got = int(lens.min()) if int(lens.min()) < 0 else int(lens.max())
        raise ValueError(
            f"kv_lens: got {got}, takes 0 to {slots}: page_table has {table.shape[1]} pages of "
            f"{page_size} slots"
        )
    used = torch.arange(table.shape[1], device=lens.device) * page_size < lens.unsqueeze(1)
    wrong = used & ((table < 0) | (table >= num_pages))
    if bool(wrong.any()):
        got = int(table[wrong][0])
        raise ValueError(f"page_table: got page {got}, takes 0 to {num_pages - 1}")
