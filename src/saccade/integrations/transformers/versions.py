"""Versions: which transformers this package can stand on."""

from __future__ import annotations

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
