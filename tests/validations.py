"""Validations: the calls of an operation that were validated anew, and not found in the cache."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from saccade.runtime import call_cache


def noted(monkeypatch: pytest.MonkeyPatch, api: ModuleType) -> list[dict[str, Any]]:
    """The options of every call that is validated from now on; none is in the cache."""
    seen: list[dict[str, Any]] = []
    validate: Any = vars(api)["prepare"]

    def prepare(*tensors: Any, **options: Any) -> Any:
        seen.append(options)
        return validate(*tensors, **options)

    monkeypatch.setattr(api, "prepare", prepare)
    call_cache.forget()
    return seen
