"""Arguments of a cache, as its callers give them: checked by name, and in one form."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from saccade.kv_cache.sequences import Tokens
from saccade.kv_cache.storage import LayerSizes, StateSize
from saccade.runtime.arguments import LARGEST_PAGE, check_whole_number
from saccade.runtime.spec import DTYPES, QUANTISED

LARGEST_TOKEN = 2**63 - 1  # what the prefix index hashes in eight bytes
# Of attention and of writes, what a cache gives itself.
OWN = ("key_pages", "value_pages", "page_table", "kv_lens", "key_scales", "value_scales")


# ---- of a cache ----------------------------------------------------------------------------------


def check_pages(page_size: int, dtype: torch.dtype) -> None:
    """Refuse sizes and dtypes that pages do not have."""
    check_whole_number("page_size", page_size, least=1)
    if page_size > LARGEST_PAGE:
        raise ValueError(f"page_size: got {page_size}, takes 1 to {LARGEST_PAGE}")
    if dtype not in DTYPES + QUANTISED:
        raise TypeError(f"dtype: got {dtype}, takes a floating-point dtype or int8")


def pages_of_windows(
    name: str,
    numbers: int | Mapping[int | None, int],
    windows: Sequence[int | None],
    *,
    least: int,
) -> tuple[int, ...]:
    """Numbers of pages, one for each window."""
    found = []
    for window in windows:
        if isinstance(numbers, Mapping) and window not in numbers:
            got = dict(numbers)
            raise ValueError(f"{name}: got {got}, takes a number for the window {window} too")
        found.append(numbers[window] if isinstance(numbers, Mapping) else numbers)
        check_whole_number(name, found[-1], least=least)
    for window in numbers if isinstance(numbers, Mapping) else ():
        if window not in windows:
            raise ValueError(f"{name}: got a number for the window {window}, which no layer has")
    return tuple(found)


def sizes_of(count: int, numbers: Mapping[str, int | Sequence[int]]) -> list[LayerSizes]:
    """What each layer keeps for a token."""
    of_layers: list[list[int]] = []
    for name, number in numbers.items():
        several = [*number] if isinstance(number, Sequence) else [number] * count
        if len(several) != count:
            raise ValueError(f"{name}: got {len(several)} numbers, takes one for each of {count}")
        for each in several:
            check_whole_number(name, each, least=1)
        of_layers.append(several)
    return [LayerSizes(*sizes) for sizes in zip(*of_layers, strict=True)]


def check_latent(sizes: Sequence[LayerSizes], dtype: torch.dtype) -> None:
    """Refuse values that are no part of their keys, and pages with scales for both."""
    if dtype in QUANTISED:
        raise TypeError(f"dtype: got {dtype} with latent=True, takes a floating-point dtype")
    for size in sizes:
        if size.value_dim > size.head_dim:
            raise ValueError(
                f"value_dim: got {size.value_dim} with latent=True, takes at most head_dim, "
                f"{size.head_dim}"
            )


def states_of(
    states: Sequence[tuple[Sequence[int], torch.dtype]], num_states: int, host_states: int
) -> list[StateSize]:
    """The tensors of a sequence's states."""
    check_whole_number("num_states", num_states, least=1 if states else 0)
    check_whole_number("host_states", host_states, least=0)
    found = []
    for shape, dtype in states:
        for size in shape:
            check_whole_number("states", size, least=1)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"states: got {type(dtype).__name__}, takes shapes and dtypes")
        found.append(StateSize(tuple(shape), dtype))
    return found


def windows_of(
    num_layers: int | None,
    window: int | None,
    windows: Sequence[int | None] | None,
    *,
    paged: bool,
) -> list[int | None]:
    """The window of each layer; `paged`: there is one at least."""
    if windows is None:
        if num_layers is None:
            raise TypeError("num_layers: got None, takes a whole number, or windows for each layer")
        check_whole_number("num_layers", num_layers, least=1)
        check_whole_number("window", 0 if window is None else window, least=0)
        return [window] * num_layers
    if num_layers is not None or window is not None:
        raise TypeError("windows: got it beside num_layers or window, takes either")
    if not isinstance(windows, Sequence):
        got = type(windows).__name__
        raise TypeError(f"windows: got {got}, takes a window or None for each layer")
    if not windows and paged:
        raise ValueError("windows: got none, takes one for each layer")
    for each in windows:
        check_whole_number("windows", 0 if each is None else each, least=0)
    return list(windows)


# ---- of tokens -----------------------------------------------------------------------------------


def new_tokens(tokens: Mapping[int, Tokens]) -> dict[int, Tokens]:
    """A caller's new tokens, for each sequence.

    Raises:
        TypeError, ValueError: naming what is no token and no number of them.
    """
    found: dict[int, Tokens] = {}
    if not isinstance(tokens, Mapping):
        got = type(tokens).__name__
        raise TypeError(f"tokens: got {got}, takes a mapping from sequences to their new tokens")
    for sequence, new in tokens.items():
        if type(new) is not int or new < 0:  # else it is a number of them, as in most calls
            if isinstance(new, int):
                check_whole_number("tokens", new, least=0)
            else:
                new = token_list(new)
        found[sequence] = new
    return found


def spares_of(spare: object, groups: int) -> list[int | None]:
    """For each group of layers None, or how many of its new tokens may be trimmed.

    Raises:
        TypeError, ValueError: naming `spare`.
    """
    takes = f"a list of None or whole numbers, one for each of {groups} groups of layers"
    if isinstance(spare, (str, bytes)) or not isinstance(spare, Sequence):
        raise TypeError(f"spare: got {type(spare).__name__}, takes {takes}")
    if len(spare) != groups:
        raise ValueError(f"spare: got {len(spare)} of them, takes {takes}")
    for each in spare:
        check_whole_number("spare", 0 if each is None else each, least=0)
    return [*spare]


def token_list(tokens: Sequence[int] | Tensor) -> list[int]:
    """Tokens as whole numbers of Python's own.

    Raises:
        TypeError: for what are no whole numbers, True and False among them.
        ValueError: for numbers below 0 or above 2^63 - 1.
    """
    check_order(tokens)
    several: Any = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    found = [_token(token) for token in several]
    if found and not (min(found) >= 0 and max(found) <= LARGEST_TOKEN):
        got = min(found) if min(found) < 0 else max(found)
        raise ValueError(f"tokens: got {got}, takes 0 to 2^63 - 1")
    return found


def check_order(tokens: object) -> None:
    """Refuse what holds no tokens in an order, or is text, whose bytes are no tokens."""
    if (
        not isinstance(tokens, Iterable)
        or isinstance(tokens, (str, bytes, bytearray, Set, Mapping))
        or (isinstance(tokens, Tensor) and tokens.dim() == 0)
    ):
        raise TypeError(f"tokens: got {type(tokens).__name__}, takes several whole numbers")


def _token(token: object) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(f"tokens: got {type(token).__name__}, takes whole numbers")
    return operator.index(token)  # pyright: ignore[reportArgumentType]  # it has __index__


# ---- of calls on layers --------------------------------------------------------------------------


def sequence_list(sequences: Any) -> list[int]:
    """Numbers of sequences in a list.

    Raises:
        TypeError: for one number by itself, or what is none.
    """
    found = sequences.tolist() if isinstance(sequences, Tensor) else sequences
    if not isinstance(found, Iterable):
        raise TypeError(f"sequences: got {found!r}, takes a list of numbers")
    return list(found)


def slots_of_group(slots: Any, number: int, groups: int) -> Tensor:
    """A group's slots, of a list with those of each.

    Raises:
        TypeError: for what is no such list.
    """
    if not isinstance(slots, (list, tuple)) or len(slots) != groups:
        several = f"a list of {groups} such, one for each group of layers"
        raise TypeError(f"slots: got {type(slots).__name__}, takes int64 [tokens], or {several}")
    return slots[number]


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that are the cache's own to give."""
    for name in options:
        if name in OWN:
            raise TypeError(f"{name}: got it as an option, takes none here: the cache has its own")
