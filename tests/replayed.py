"""CUDA graphs for machines without a GPU: the same work each time, at the same addresses."""

from typing import Any

import pytest
import torch

from saccade.serving import decode_steps
from saccade.serving import engine as engines


def replayed(work: Any, pool: Any) -> Any:
    """In the place of a graph: the same work each time, whose results stay at one address."""
    result = work()

    def replay() -> Any:
        again = work()
        for kept, new in zip(_tensors(result), _tensors(again), strict=True):
            kept.copy_(new)
        return result

    return replay


def _tensors(result: Any) -> list[torch.Tensor]:
    several = [result] if isinstance(result, torch.Tensor) else result
    return [each for each in several if each is not None]


def with_graphs(monkeypatch: pytest.MonkeyPatch, captured: Any = replayed) -> None:
    """As if there were graphs on a CPU."""
    monkeypatch.setattr(decode_steps, "captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(engines, "why_eager", lambda *asked: "" if asked[1] else "not asked")
