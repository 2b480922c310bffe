"""Strategies: hypothesis draws descriptions of cases and shrinks those that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from saccade.testing.cases import MASKS, SCORES, Case, Description, make_case

LAYOUTS = ("contiguous", "permuted", "sliced", "strided_last", "expanded")


@st.composite
def descriptions(
    draw: Any,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    longest: int = 40,
    masks: Sequence[str] = tuple(MASKS),
    dims: Sequence[int] = (16, 8, 1, 5, 33),
    layouts: Sequence[str] = LAYOUTS,
    dropouts: Sequence[float] = (0.0, 0.0, 0.3),
) -> Description:
    """Descriptions of cases: any of these masks, any score, layout and length, zero included."""
    packed = draw(st.booleans())
    length = st.integers(0, longest)
    pairs = st.lists(st.tuples(length, length), min_size=1, max_size=4 if packed else 1)
    return Description(
        batch=draw(st.integers(0, 3)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        lengths=tuple(draw(pairs)),
        head_dim=draw(st.sampled_from(list(dims))),
        value_dim=draw(st.sampled_from(list(dims))),
        dtype=draw(st.sampled_from(list(dtypes))),
        packed=packed,
        mask=draw(st.sampled_from(list(masks))),
        score=draw(st.sampled_from(list(SCORES))),
        sinks=draw(st.booleans()),
        dropout_p=draw(st.sampled_from(list(dropouts))),
        layout=draw(st.sampled_from(list(layouts))),
        poison_hidden=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3])),
        seed=draw(st.integers(0, 2**16)),
    )


def problems(
    dtypes: Sequence[torch.dtype] = (torch.float32,), longest: int = 40
) -> st.SearchStrategy[Case]:
    """Random problems; see `saccade.testing.make_case`."""
    return descriptions(dtypes, longest).map(make_case)
