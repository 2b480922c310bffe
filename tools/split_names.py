"""An extension of griffe: an entry of a docstring that names several arguments becomes several.

`mkdocs.yml` names this file; `reference_pages.split_names` says what is done.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # griffe imports this file by its path
from reference_pages import split_names


class SplitNames(griffe.Extension):
    """Splits names in every docstring that is read."""

    def on_instance(self, *, obj: Any, **options: Any) -> None:
        """Rewrite the docstring of an object, if it has one."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = split_names(obj.docstring.value)
