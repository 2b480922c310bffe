"""Local calls: this rank's part of a call over ranks, and what its mask and score see there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.masks import NOTHING_HIDDEN, Mask
from saccade.modifiers.graph_constants import constants, outside_graph
from saccade.modifiers.modifier import ShardRange, restricted
from saccade.modifiers.renumber import RowNumbers, renumbered
from saccade.ops.attention.api import attention, attention_of_rows, attention_varlen
from saccade.parallel.agreement_op import agreed_in_graph
from saccade.parallel.planner import Plan
from saccade.runtime.dropout import Numbers
from saccade.runtime.spec import Inputs, KernelConfig
from saccade.scores import NOTHING_CHANGED, Score


class Options(NamedTuple):
    """Options that a part of a call has as well."""

    scale: float | None
    deterministic: bool
    implementation: str | None
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None
    dropout_p: float


class LocalCall(NamedTuple):
    """What one rank brings to a call over ranks, checked.

    Attributes:
        query, key, value: [batch, heads, rows of this rank, dim].
        sinks: [query_heads]; None: none.
        score: in the numbers of the whole call, its tensors those of the whole call.
        return_lse: whether the lse is asked for.
        seed: of dropout, the same on all ranks; None: nothing is dropped.
        whole: sinks and the score's tensors, by name, which have the same numbers on all ranks.
        facts: what ranks compare each time the call's graph runs; None: they did.
    """

    plan: Plan
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    score: Score
    options: Options
    return_lse: bool
    seed: Tensor | None
    whole: Mapping[str, Tensor]
    facts: Mapping[str, str] | None = None

    def compared(self, rows: Tensor) -> Tensor:
        """The first rows that are sent: in a graph, once all ranks have agreed.

        They are sent as they come, as a graph forgets what gives an empty tensor to another.
        """
        if self.facts is None:
            return rows
        return agreed_in_graph(self.plan, self.facts, None, rows, self.seed, self.whole)

    @property
    def tables(self) -> list[Tensor]:
        """The captured tensors of the score that may have gradients."""
        return [each for each in self.score.captured.tensors if each.is_floating_point()]

    def mask_of(self, kv_rows: Tensor, name: Any) -> Mask:
        """The mask as this rank's rows see it against some keys of the whole.

        name: what these keys are called, to be known again in the next call.
        """
        return constants(self._mask_of(kv_rows, name))

    @outside_graph
    def _mask_of(self, kv_rows: Tensor, name: Any) -> Mask:
        device = self.query.device
        known = self.plan.memory.get(("mask", name, device))
        if known is None:
            mask = self.plan.whole_call.mask
            rows = RowNumbers(self.plan.rows), RowNumbers(kv_rows)
            known = Mask(*renumbered(mask.key, mask.captured, *rows)).to(device)
            self.plan.memory["mask", name, device] = known
        return known

    def score_of(self, kv_rows: Tensor, name: Any) -> Score:
        """The score as this rank's rows see it against some keys of the whole; see `mask_of`."""
        if not self.score.key:
            return self.score
        rows = self._numbers(self.plan.rows, "rows"), self._numbers(kv_rows, name)
        found = renumbered(self.score.key, self.score.captured, *rows, device=self.query.device)
        return Score(*found)

    @outside_graph
    def _numbers(self, rows: Tensor, name: Any) -> RowNumbers:
        known = self.plan.memory.get(("numbers", name))
        if known is None:
            known = self.plan.memory["numbers", name] = self.plan.numbers(rows)
        return known

    def of_heads(self, mask: Mask, score: Score, heads: ShardRange) -> tuple[Mask, Score]:
        """A mask and a score for some heads."""
        batch = (
            self.plan.sizes.batch if self.plan.cu_seqlens is None else len(self.plan.cu_seqlens) - 1
        )
        every = ShardRange(0, batch, batch)
        return (
            Mask(*restricted(mask.key, mask.captured, every, heads)),
            Score(*restricted(score.key, score.captured, every, heads)),
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, score: Score,
        sinks: Tensor | None, numbers: Numbers | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output and lse of some rows against some keys by the public call.

        numbers: what dropout calls rows and heads; None: nothing is dropped.

        Where there are none of either, a mask and a score have nothing to say, and the score's
        tensors take part all the same: ranks that sum their gradients wait for this one.
        """
        nothing = not query.shape[2] or not key.shape[2]
        options = self.options._asdict()
        if numbers is not None and not nothing:
            inputs = Inputs(query, key, value, sinks, self.seed)
            return attention_of_rows(
                inputs, (None, None), numbers, mask=mask, score=score, **options
            )
        options["dropout_p"] = 0.0
        output, lse = attention(
            query, key, value, sinks=sinks, return_lse=True,
            mask=NOTHING_HIDDEN if nothing else mask,
            score=NOTHING_CHANGED if nothing else score, **options,
        )  # fmt: skip
        for table in self.tables if nothing else ():
            output = output + table.flatten()[:0].sum().to(output.dtype)
        return output, lse

    def attend_packed(
        self, rows: Sequence[Tensor], offsets: Offsets, mask: Mask, score: Score,
        sinks: Tensor | None, numbers: Numbers | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output and lse of sequences laid end to end, by the public call.

        rows: query, key and value, [rows, heads, dim]. numbers: as in `attend`.
        """
        query, key, value = rows
        if numbers is not None:
            inputs = Inputs(query, key, value, sinks, self.seed, offsets.query, offsets.kv)
            return attention_of_rows(
                inputs, offsets[2:], numbers, mask=mask, score=score, **self.options._asdict()
            )
        return attention_varlen(
            query, key, value, offsets.query, offsets.kv, max_seqlen_q=offsets.longest_query,
            max_seqlen_k=offsets.longest_kv, mask=mask, score=score, sinks=sinks, return_lse=True,
            **self.options._asdict(),
        )  # fmt: skip


class Offsets(NamedTuple):
    """Where sequences of a packed call begin and end, and the longest."""

    query: Tensor
    kv: Tensor
    longest_query: int
    longest_kv: int


def numbers_of(
    plan: Plan, first_head: int, rows: Tensor, kv_rows: Tensor, offsets: Offsets | None
) -> Numbers:
    """What dropout calls some rows of the whole against some keys, of the heads from one on.

    offsets: of a packed call of them; None: they are one dense sequence.
    """
    query, keys = plan.numbers(rows), plan.numbers(kv_rows)
    sequence = torch.zeros_like(rows) if query.batch is None else query.batch
    places = torch.arange(len(kv_rows))
    if offsets is not None:
        ends = offsets.query[1:].cpu(), offsets.kv[1:].cpu()
        sequence = sequence - torch.searchsorted(ends[0], torch.arange(len(rows)), right=True)
        begun = torch.searchsorted(ends[1], places, right=True)
        places = places - offsets.kv.cpu()[begun]
    return Numbers.of_rows(first_head, query.numbers, sequence, keys.numbers, places)


def heads_of(first: int, count: int, of: int) -> ShardRange:
    """Some of all query heads."""
    return ShardRange(first, count, of)


def rows_first(rows: Tensor) -> Tensor:
    """[rows, batch, heads, dim] of [batch, heads, rows, dim]."""
    return rows.permute(2, 0, 1, 3)


def heads_first(rows: Tensor) -> Tensor:
    """[batch, heads, rows, dim] of [rows, batch, heads, dim]."""
    return rows.permute(1, 2, 0, 3)


def joined(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values in one tensor, channels beside channels: one message brings both."""
    return torch.cat([key, value], -1)
