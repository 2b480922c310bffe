"""Linear attention backward on Hopper: kinds of rows, of numbers beside them, and of sweeps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# What a stage holds two tiles of: the first two where queries are collected, the first four for
# gradients of keys and values, all for those of queries.
QUERIES, GRADS = gl.constexpr(0), gl.constexpr(1)  # of the output
KEYS, VALUES, OUTPUTS = gl.constexpr(2), gl.constexpr(3), gl.constexpr(4)
# Kinds of numbers beside them: 64 each.
SUM = gl.constexpr(0)  # of features, over the chunks that were visited before
MINUS_DELTA, FACTOR = gl.constexpr(1), gl.constexpr(2)  # of each query
ACROSS, LINE = gl.constexpr(3), gl.constexpr(4)  # of each key, and channel: see elu_correction.py

ONES = gl.constexpr(5)  # of each query: the factor of what was taken from its features


@gluon.constexpr_function
def is_balanced(feature_map, normalize):
    """Whether gradients of queries may be found from features of keys less 1."""
    return feature_map == "elu+1" and normalize == "sum"
