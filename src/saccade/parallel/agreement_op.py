"""The comparison of ranks as an operator: graphs make it each time they run.

Each rank traces a graph for itself, once, and runs it as often as its program calls it, so ranks
that compared while they trace would learn nothing of the calls that follow. The operator gives back
the first rows that are sent, and graphs keep messages in their order: so nothing is sent before
ranks agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.parallel.agreement import agree, begin

FAULTS = {error.__name__: error for error in (TypeError, ValueError, NotImplementedError)}
_memory: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()  # by group


class GraphFault(Exception):
    """Why a rank cannot begin a call of a graph; other ranks learn of it when the graph runs."""

    def __init__(self, error: Exception, facts: Mapping[str, str]) -> None:
        super().__init__(str(error))
        self.error, self.facts = error, facts


class Ranks(NamedTuple):
    """The ranks of a graph's calls: what `agree` reads of a plan, which need not live as long."""

    group: Any
    verify: str
    memory: dict[Any, Any]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return dist.get_rank(self.group)


def agreed_in_graph(
    plan: Any,
    facts: Mapping[str, str],
    fault: Exception | None,
    rows: Tensor,
    seed: Tensor | None = None,
    whole: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Rows as they are, once all ranks have found that what they are about to do fits together.

    Args:
        plan, facts, fault, seed, whole: as `agree` takes them; the first fact names the call.
        rows: the first that this rank sends in the call.
    """
    kind, said = ("", "") if fault is None else (type(fault).__name__, str(fault))
    return torch.ops.saccade.compare_ranks.default(
        rows, seed, plan.group.group_name, plan.verify, list(facts), list(facts.values()), kind,
        said, list(whole or {}), list((whole or {}).values()),
    )  # fmt: skip


def _compare(
    rows: Tensor, seed: Tensor | None, group: str, verify: str, names: Sequence[str],
    words: Sequence[str], kind: str, said: str, names_of_whole: Sequence[str],
    whole: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009
    found = resolve(group)
    ranks = Ranks(found, verify, _memory.setdefault(found, {}))
    begin(ranks, words[0])
    facts = dict(zip(names, words, strict=True))
    fault = FAULTS[kind](said) if kind else None
    there = dict(zip(names_of_whole, whole, strict=True))
    agree(ranks, facts, fault, rows.device, seed, there)
    return rows.clone()


def _count_whole(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.of_whole = len(inputs[-1])


def _pass_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of rows pass as they are; PyTorch takes an empty list, of texts too, for one of
    tensors."""
    return grad, *[None] * 7, None if ctx.of_whole else [], [None] * ctx.of_whole


SCHEMA = (
    "(Tensor rows, Tensor? seed, str group, str verify, str[] names, str[] words, str kind, "
    "str said, str[] names_of_whole, Tensor[] whole) -> Tensor"
)
torch.library.define("saccade::compare_ranks", SCHEMA)
torch.library.impl("saccade::compare_ranks", "CompositeExplicitAutograd", _compare)
torch.library.register_fake("saccade::compare_ranks", lambda rows, *plain: rows.clone())
torch.library.register_autograd(
    "saccade::compare_ranks", _pass_gradients, setup_context=_count_whole
)
