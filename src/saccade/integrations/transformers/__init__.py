"""transformers: models of Hugging Face attend through saccade, and generate with its pages.

After `register()` a model takes it by name, `attn_implementation="saccade"`, and
`PagedGenerationCache.for_model` gives `generate` its pages.

Importing this package needs transformers, 5.17 or newer, and says so where there is none.
"""

import importlib.metadata
import re

OLDEST = (5, 17)
INSTALL = "pip install 'saccade[transformers]'"


def require() -> None:
    """Refuse to go on without a transformers that has the interfaces used here.

    Raises:
        ImportError: saying what was found, what is needed and how to install it.
    """
    needed = ".".join(map(str, OLDEST))
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"saccade.integrations.transformers: found no transformers, needs {needed} or newer: "
            f"{INSTALL}"
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        raise ImportError(
            f"saccade.integrations.transformers: found transformers {found}, needs {needed} or "
            f"newer: {INSTALL}"
        )


require()

# What needs transformers is imported where a new enough one is known to be there.
from saccade.integrations.transformers.attention import (  # noqa: E402
    AttentionStep,
    attention_forward,
    fp8_forward,
    register,
)
from saccade.integrations.transformers.cache import PagedGenerationCache  # noqa: E402
from saccade.integrations.transformers.latent import LatentLayers  # noqa: E402
from saccade.integrations.transformers.masks import lazy_mask  # noqa: E402
from saccade.integrations.transformers.sharding import shard_sequences  # noqa: E402
from saccade.integrations.transformers.states import (  # noqa: E402
    SequenceStates,
    StateLayers,
    StateRows,
)

__all__ = [
    "AttentionStep", "LatentLayers", "PagedGenerationCache", "SequenceStates", "StateLayers",
    "StateRows", "attention_forward", "fp8_forward", "lazy_mask", "register",
    "shard_sequences",
]  # fmt: skip
