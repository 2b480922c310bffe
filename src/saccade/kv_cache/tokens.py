"""Tokens: a caller's token numbers, as whole numbers of Python's own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

MOST = 2**63 - 1  # what the prefix index hashes in eight bytes


def token_list(tokens: Sequence[int] | Tensor) -> list[int]:
    """Tokens as whole numbers of Python's own.

    Raises:
        TypeError: for what are no whole numbers, True and False among them.
        ValueError: for numbers below 0 or above 2^63 - 1.
    """
    given: Any = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    found = [_token(token) for token in given]
    if found and not (min(found) >= 0 and max(found) <= MOST):
        got = min(found) if min(found) < 0 else max(found)
        raise ValueError(f"tokens: got {got}, takes 0 to 2^63 - 1")
    return found


def _token(token: object) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(f"tokens: got a {type(token).__name__}, takes whole numbers")
    return operator.index(token)  # pyright: ignore[reportArgumentType]  # it has __index__
