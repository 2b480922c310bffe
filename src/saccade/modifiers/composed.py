"""Composed: functions of PyTorch's that are made of the operations of expressions.

Each is written on symbols as it could be written by a user; its derivatives follow. `n` makes a
number that is part of the code, where a number by itself would be one that is captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Make = Callable[[float], Any]


def _softplus(n: Make, x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * n(float(beta))
    # No exponent is above 0, so that neither it nor its derivative overflows.
    soft = torch.maximum(scaled, n(0.0)) + torch.log1p(torch.exp(-torch.abs(scaled)))
    return torch.where(scaled > n(float(threshold)), x, soft / n(float(beta)))


def _gelu(n: Make, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        inside = n(math.sqrt(2 / math.pi)) * (x + n(0.044715) * (x * x * x))
        return n(0.5) * x * (n(1.0) + torch.tanh(inside))
    if approximate != "none":
        raise ValueError(f"gelu: got approximate={approximate!r}, takes 'none' or 'tanh'")
    return n(0.5) * x * (n(1.0) + torch.erf(x * n(math.sqrt(0.5))))


def _elu(n: Make, x: Any, alpha: float = 1.0, scale: float = 1.0, width: float = 1.0) -> Any:
    below = torch.expm1(torch.minimum(x, n(0.0)) / n(float(width)))
    return torch.where(x > n(0.0), n(float(scale)) * x, n(float(scale * alpha)) * below)


def _round(n: Make, x: Any, *, decimals: int = 0) -> Any:
    if decimals:
        raise ValueError(f"round: got decimals={decimals}, takes 0")
    below = torch.floor(x)
    rest, odd = x - below, below % n(2.0)  # halves go to the even neighbour
    up = (rest > n(0.5)) | ((rest == n(0.5)) & (odd == n(1.0)))
    return torch.where(up, below + n(1.0), below)


def _truncated(n: Make, x: Any) -> Any:
    return torch.where(x < n(0.0), -torch.floor(-x), torch.floor(x))


def _hardsigmoid(n: Make, x: Any) -> Any:
    return torch.clamp(x + n(3.0), n(0.0), n(6.0)) / n(6.0)


def _logaddexp(n: Make, x: Any, other: Any) -> Any:
    largest = torch.maximum(x, other)
    apart = torch.abs(x - other)  # NaN where both are infinite
    more = torch.log1p(torch.exp(-apart))
    return torch.where(x == other, x + n(math.log(2)), largest + more)


# Of real numbers: the first operand is made one.
OF_REAL: dict[str, Callable[..., Any]] = {
    "tan": lambda n, x: torch.sin(x) / torch.cos(x),
    "log10": lambda n, x: torch.log(x) / n(math.log(10)),
    "logit": lambda n, x: torch.log(x / (n(1.0) - x)),
    "silu": lambda n, x: x * torch.sigmoid(x),
    "mish": lambda n, x: x * torch.tanh(_softplus(n, x)),
    "log_sigmoid": lambda n, x: -_softplus(n, -x, threshold=math.inf),
    "softplus": _softplus,
    "gelu": _gelu,
    "elu": _elu,
    "celu": lambda n, x, alpha=1.0: _elu(n, x, alpha, 1.0, alpha),
    "selu": lambda n, x: _elu(n, x, 1.6732632423543772, 1.0507009873554805),
    "leaky_relu": lambda n, x, negative_slope=0.01: torch.where(x > n(0.0), x, x * negative_slope),
    "hardtanh": lambda n, x, min_val=-1.0, max_val=1.0: torch.clamp(x, min_val, max_val),
    "relu6": lambda n, x: torch.clamp(x, n(0.0), n(6.0)),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda n, x: x * _hardsigmoid(n, x),
    "softsign": lambda n, x: x / (n(1.0) + torch.abs(x)),
    "tanhshrink": lambda n, x: x - torch.tanh(x),
    "logaddexp": _logaddexp,
    "hypot": lambda n, x, other: torch.sqrt(x * x + other * other),
    "round": _round,
    "frac": lambda n, x: x - _truncated(n, x),
    "isnan": lambda n, x: x != x,
    "isinf": lambda n, x: torch.abs(x) == n(math.inf),
    "isfinite": lambda n, x: torch.abs(x) < n(math.inf),
}


def _fmod(n: Make, x: Any, other: Any) -> Any:
    """The rest of a quotient rounded towards 0, which has the dividend's sign."""
    size = abs(other)
    return torch.where(x < n(0), -(-x % size), x % size)


def _is_real(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return isinstance(value, float) if dtype is None else dtype.is_floating_point


def divided_towards_0(n: Make, x: Any, other: Any) -> Any:
    """`torch.div(..., rounding_mode="trunc")`."""
    if x.dtype.is_floating_point or _is_real(other):
        return _truncated(n, x / other)
    if isinstance(other, int) and other < 0:
        x, other = -x, -other
    if isinstance(other, int):
        return torch.where(x < n(0), -(-x // other), x // other)
    quotient = torch.abs(x) // torch.abs(other)
    return torch.where((x < n(0)) != (other < n(0)), -quotient, quotient)


def _sign(n: Make, x: Any) -> Any:
    one = 1.0 if x.dtype.is_floating_point else 1
    zero, up = n(one * 0), n(one)
    return torch.where(x > zero, up, torch.where(x < zero, -up, zero))


# Of whatever they are given.
OF_ANY: dict[str, Callable[..., Any]] = {
    "fmod": _fmod,
    "sign": _sign,
    "sgn": _sign,
    "lerp": lambda n, x, end, weight: x + weight * (end - x),
    "addcmul": lambda n, x, one, other, value=1: x + value * one * other,
    "addcdiv": lambda n, x, one, other, value=1: x + value * one / other,
    "threshold": lambda n, x, threshold, value: torch.where(x > threshold, x, value),
    "positive": lambda n, x: x,
    "clone": lambda n, x: x,
    "contiguous": lambda n, x: x,
}
