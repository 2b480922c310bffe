"""Windows: how far back the layers of a model look, and the pages that this takes."""

from __future__ import annotations

import math
from typing import Any

MOST_DRAFTS = 128  # tokens behind a long chunk that sliding layers can take back


def windows_of(config: Any) -> list[int | None]:
    """How many tokens each layer sees before a token itself; None: all of them."""
    kinds, reach = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    return [
        reach - 1 if kinds and kinds[layer] == "sliding_attention" and reach else None
        for layer in range(config.num_hidden_layers)
    ]


def most_pages(max_tokens: int, window: int | None, page_size: int) -> int:
    """The most pages that a sequence of so many tokens holds in layers of a window."""
    if window is not None:
        # A chunk of a window behind a window; and then what is kept of a longer one, which is
        # taken before they are let go of. Each begins and ends within a page.
        kept = 3 * (window + 1) + MOST_DRAFTS + 3 * page_size
        max_tokens = min(max_tokens, kept)
    return math.ceil(max_tokens / page_size)
