"""Mask functions: the registered functions of the built-in masks, and what they may capture.

Each is a plain function of (batch, head, query_row, kv_row, *captured); `masks.py` has the
constructors that give them their captured values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade.captures import Extents, misfit
from saccade.functions import Function, register
from saccade.language import take

WORD = 64  # bits of a tree mask in one number


def _built_in(body: Callable[..., Any], check: Callable[..., str | None] | None = None) -> str:
    name = body.__name__.strip("_")
    return register(Function(name, body, check=check)).name


def _causal(batch, head, query_row, kv_row):
    return kv_row <= query_row


def _window(batch, head, query_row, kv_row, left, right):
    return (kv_row >= query_row - left) & (kv_row <= query_row + right)


def _key_lengths(batch, head, query_row, kv_row, lengths):
    return kv_row < take(lengths, batch)


def _documents(batch, head, query_row, kv_row, query_ids, kv_ids):
    return take(query_ids, batch, query_row) == take(kv_ids, batch, kv_row)


def _blocks(batch, head, query_row, kv_row, layout, query_block, kv_block):
    return take(layout, batch, head, query_row // query_block, kv_row // kv_block)


def _dense(batch, head, query_row, kv_row, table):
    return take(table, batch, head, query_row, kv_row)


def _drafted(batch, head, query_row, kv_row, bits, context_lens):
    draft = kv_row - take(context_lens, batch)  # before the drafts, any bit may be read
    return ((take(bits, batch, query_row, draft // 64) >> (draft % 64)) & 1) == 1


def _check_lengths(data: list[Any], extents: Extents) -> str | None:
    return misfit("lengths", data[0], ("batch",), extents)


def _check_documents(data: list[Any], extents: Extents) -> str | None:
    complaint = misfit("query_ids", data[0], ("batch", "query_len"), extents)
    named = "kv_ids (query_ids, since none were given)" if data[0] is data[1] else "kv_ids"
    return complaint or misfit(named, data[1], ("batch", "kv_len"), extents)


def _check_blocks(data: list[Any], extents: Extents) -> str | None:
    layout, query_block, kv_block = data
    in_blocks = extents.in_blocks(query_block, kv_block)
    return misfit("layout", layout, ("batch", "query_heads", "query_len", "kv_len"), in_blocks)


def _check_dense(data: list[Any], extents: Extents) -> str | None:
    return misfit("tensor", data[0], ("batch", "query_heads", "query_len", "kv_len"), extents)


def _check_drafted(data: list[Any], extents: Extents) -> str | None:
    bits, context_lens = data
    if extents.query_len is not None and extents.query_len > WORD * bits.shape[2]:
        return (
            f"bits: got {bits.shape[2]} words for {extents.query_len} query rows, takes 64 a word"
        )
    axes = extents._replace(kv_len=bits.shape[2])
    complaint = misfit("bits", bits, ("batch", "query_len", "kv_len"), axes)
    return complaint or misfit("context_lens", context_lens, ("batch",), extents)


CAUSAL = _built_in(_causal)
WINDOW = _built_in(_window)
KEY_LENGTHS = _built_in(_key_lengths, _check_lengths)
DOCUMENTS = _built_in(_documents, _check_documents)
BLOCKS = _built_in(_blocks, _check_blocks)
DENSE = _built_in(_dense, _check_dense)
DRAFTED = _built_in(_drafted, _check_drafted)
