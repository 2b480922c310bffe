"""Fixtures: an empty call cache, and offsets and lengths that cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.runtime import call_cache
from saccade.runtime.arguments import check_tensors


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call was checked before."""
    monkeypatch.setattr(call_cache, "_calls", {})
    monkeypatch.setattr(call_cache, "_layouts", {})


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values cannot be read without waiting for them, as on a GPU."""
    monkeypatch.setattr(call_cache, "values_readable", lambda tensor: False)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each call whose tensors were checked."""
    seen: list[Any] = []

    def counted(*arguments: Any) -> None:
        seen.append(arguments)
        check_tensors(*arguments)

    monkeypatch.setattr("saccade.runtime.validation.arguments.check_tensors", counted)
    return seen
