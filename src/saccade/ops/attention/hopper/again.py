"""NaN-safe backward: Triton's pass, where a hidden row may have reached what it must not reach.

The kernels here do nothing unless a flag is up: NaN or inf was found among the gradients, and
0 · NaN is NaN. Then all of the pass is done once more, with the care that Triton kernels take.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.ops.attention.triton.backward_dkdv import AGAIN, differentiate_keys
from saccade.ops.attention.triton.backward_dq import attention_backward_queries


@triton.jit(do_not_specialize=["rules"])
def attention_backward_again_keys(
    flag, forward, grad_key, grad_value, rules,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `attention_backward_keys` without gradients of queries."""
    if tl.load(flag) != 0:
        differentiate_keys(
            forward, grad_key, grad_value, None, rules, None, tl.program_id(0), AGAIN,
            HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
            QUERY_TILE, KV_TILE, PRECISION, True, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rules"])
def attention_backward_again_queries(
    flag, forward, grad_query, rules,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `attention_backward_queries`."""
    if tl.load(flag) != 0:
        attention_backward_queries(
            forward, grad_query, rules, None, None, None,
            HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
            QUERY_TILE, KV_TILE, PRECISION, False,
        )  # fmt: skip


@triton.jit
def every_tile(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """A mask's walk that takes every tile for an edge, so that nothing need be planned ahead for
    what is seldom done."""
    num_tiles = tl.cdiv(lengths[1], OTHER)
    return 0, num_tiles, 0, num_tiles, 0, 0
