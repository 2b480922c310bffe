"""Recognition: a mask function as transformers composes it, as a mask of saccade.

transformers makes masks of small functions of (batch, head, q_idx, kv_idx), each made by one of the
factories in its `masking_utils`. A function knows its factory by its code object, which is compared
by identity, and its parameters by the names of what its closure holds. So a user's function of the
same name is no match, and nothing is guessed from what a function returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from transformers import masking_utils

from saccade.integrations.transformers import kinds
from saccade.integrations.transformers.kinds import Rows, Visible

Found = Callable[..., Any]


class NotUnderstood(Exception):
    """A mask function, or a part of one, that transformers' factories did not make."""


def _code_made_by(factory: str) -> CodeType | None:
    made = getattr(masking_utils, factory, None)  # some came with later versions
    constants = made.__code__.co_consts if made is not None else ()
    # and_masks holds a generator expression, too
    inner = [each for each in constants if isinstance(each, CodeType) and "<" not in each.co_name]
    return inner[0] if len(inner) == 1 else None


FACTORIES = (
    "and_masks",
    "or_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
    "blockwise_overlay",
    "padding_mask_function",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
)
BY_POSITION = {"blockwise_overlay", "padding_mask_function", "packed_sequence_mask_function"}
FACTORY_OF = {_code_made_by(factory): factory for factory in FACTORIES}
FACTORY_OF.pop(None, None)


def forget(factory: str) -> None:
    """Understand what a factory makes no longer."""
    FACTORY_OF.pop(_code_made_by(factory), None)


def _factory(function: Found) -> str | None:
    return FACTORY_OF.get(getattr(function, "__code__", None))


def _captured(function: Found, *names: str) -> list[Any]:
    """What a function's closure holds under these names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    if set(held) != set(names):
        raise NotUnderstood(f"{described(function)}, which holds {sorted(held)}")
    return [held[name] for name in names]


def described(function: object) -> str:
    """A function's name and where it is from."""
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else repr(function)


def recognised(function: Found, rows: Rows) -> Visible:
    """A mask function of transformers as a mask of saccade, None where it hides nothing.

    Raises:
        NotUnderstood: naming the part that none of transformers' factories made.
    """
    parts = list(_flattened(function, "and_masks"))
    if len(parts) > 1:
        return _all_of(parts, rows)
    if function is masking_utils.causal_mask_function:
        return kinds.reaching(rows, None, 0)
    if function is masking_utils.bidirectional_mask_function:
        return None
    return _made(function, rows)


def _made(function: Found, rows: Rows) -> Visible:
    kind = _factory(function)
    if rows.positions is not None and kind in BY_POSITION:
        raise NotUnderstood(described(function))  # its table is read at positions, not at rows
    match kind:
        case "and_masks":
            return _all_of(list(_flattened(function, "and_masks")), rows)
        case "or_masks":
            parts = _flattened(function, "or_masks")
            return kinds.disjunction([recognised(part, rows) for part in parts])
        case "sliding_window_overlay":
            (window,) = _captured(function, "sliding_window")
            return kinds.reaching(rows, window - 1, None)
        case "sliding_window_bidirectional_overlay":
            (window,) = _captured(function, "sliding_window")
            return kinds.reaching(rows, window, window)
        case "chunked_overlay":
            return kinds.chunked(rows, *_captured(function, "chunk_size", "left_padding"))
        case "blockwise_overlay":
            return kinds.blockwise(rows, *_captured(function, "block_sequence_ids"))
        case "padding_mask_function":
            return kinds.padding(rows, *_captured(function, "padding_mask"))
        case "packed_sequence_mask_function":
            return kinds.same(rows, *_captured(function, "packed_sequence_mask"))
    raise NotUnderstood(described(function))


def _flattened(function: Found, factory: str) -> Iterable[Found]:
    """The functions that a combination combines; any other function is its own only part."""
    if _factory(function) != factory:
        yield function
        return
    for part in _captured(function, "mask_functions")[0]:
        yield from _flattened(part, factory)


def _all_of(parts: list[Found], rows: Rows) -> Visible:
    causal = masking_utils.causal_mask_function in parts
    visible: list[Visible] = []
    for part in parts:
        kind = _factory(part)
        if kind == "sliding_window_overlay" and causal:  # one window rather than two masks
            visible.append(kinds.reaching(rows, _captured(part, "sliding_window")[0] - 1, 0))
        elif kind == "remap_positions_for_packed_sequence":
            visible.append(_remapped(part, parts, rows))
        else:
            visible.append(recognised(part, rows))
    if causal and any(_factory(part) == "sliding_window_overlay" for part in parts):
        at = parts.index(masking_utils.causal_mask_function)
        del visible[at]  # the window is causal already
    return kinds.conjunction(visible)


def _remapped(function: Found, beside: list[Found], rows: Rows) -> Visible:
    """A mask on positions within packed sequences.

    Where positions count up by one within each sequence, and no pair of two sequences is visible,
    distances between positions are those between rows.
    """
    inner, positions = _captured(function, "mask_function", "position_ids")
    for part in beside:
        if _factory(part) == "packed_sequence_mask_function":
            (ids,) = _captured(part, "packed_sequence_mask")
            begins = ids[:, 1:] != ids[:, :-1]
            if bool((begins | (positions.diff(dim=1) == 1)).all()):
                within = dataclasses.replace(rows, positions=positions.to(rows.device))
                return recognised(inner, within)
    raise NotUnderstood(described(function))
