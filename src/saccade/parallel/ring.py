"""Ring: keys and values come from one rank after another, and partial results are merged.

While a rank computes with what it has, the keys of the next step are on their way. A rank sends
another the rows that it needs, straight, so that after a window's few steps nothing more is sent.
Partial outputs are merged by their lse in 32 bits. The backward pass takes the merged output and
lse, as FlashAttention's does for its tiles, so each step's gradients are parts of the exact ones;
keys come once more, and their gradients go back in 32 bits and are added in the order of steps.
Rows of large scores, whose lse does not tell their sums, have the lse and the weight of each step
(`_Own`).

Source: Liu et al. 2023, "Ring attention with blockwise transformers for near-infinite context".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import masks
from saccade.masks import NOTHING_HIDDEN
from saccade.modifiers.graph_constants import constants, in_graph, outside_graph
from saccade.modifiers.normal_form import is_causal
from saccade.ops.attention.api import ATTENTION
from saccade.ops.attention.merge import merged
from saccade.parallel import large_scores
from saccade.parallel.exchange import Counts, Message, waiting_for
from saccade.parallel.large_scores import Lost
from saccade.parallel.local import LocalCall, heads_first, joined, numbers_of, rows_first
from saccade.parallel.planner import Plan
from saccade.parallel.runs import MOST_PARTS, Part
from saccade.runtime import backends
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.dropout import Numbers
from saccade.runtime.rounding import restored, rounded
from saccade.runtime.spec import (
    Gradients,
    Inputs,
    KernelConfig,
    Results,
    Variant,
    accumulate_dtype,
    empty_output,
)
from saccade.runtime.validation import prepare
from saccade.scores import Score

DEFAULT_CONFIG = KernelConfig()


class Step(NamedTuple):
    """One step of a rank: whose keys it computes with, and what it sends for the same step.

    Attributes:
        source: the rank whose keys these are.
        target: the rank that computes with this one's keys.
        receive: how many rows come from the source.
        send: the places of the rows that go to the target.
        runs: the calls that this takes.
        score: as this rank's rows see it against the source's.
        tables: where the score's tensors are among all steps' tensors.
    """

    source: int
    target: int
    receive: int
    send: Tensor
    runs: list[Part]
    score: Score
    tables: slice


def attend(call: LocalCall) -> tuple[Tensor, Tensor]:
    """Output and lse of this rank's rows."""
    steps, tables = _steps(call)
    found: Any = _Ring.apply(call, steps, call.query, call.key, call.value, call.sinks, *tables)
    return found


def _steps(call: LocalCall) -> tuple[list[Step], list[Tensor]]:
    """All steps of this rank, and the captured tensors of their scores."""
    plan, device = call.plan, call.query.device
    found: list[Step] = []
    tables: list[Tensor] = []
    for number, hop in enumerate(_hops(plan, device)):
        score = call.score_of(hop.kv_rows, ("ring", number))
        there = slice(len(tables), len(tables) + len(score.captured.tensors))
        tables += score.captured.tensors
        runs = _runs(call, hop.kv_rows, number)
        send = constants(hop.send)
        if call.seed is not None:
            runs = [
                run._replace(numbers=constants(_numbers(plan, hop.kv_rows, number, run, device)))
                for run in runs
            ]
        found.append(Step(hop.source, hop.target, len(hop.kv_rows), send, runs, score, there))
    return found, tables


def _runs(call: LocalCall, kv_rows: Tensor, number: int) -> list[Part]:
    """The calls of a step. Under a causal mask they are plain ones for rows that follow one
    another: other ranks' keys before such rows are all visible, and those behind them none."""
    plan = call.plan
    if is_causal(plan.mask.key) and plan.cu_seqlens is None and not call.score.key:
        known = _plain_runs(plan, kv_rows, number)
        if len(known) <= MOST_PARTS:
            return known
    every = (0, len(plan.rows)), (0, len(kv_rows))
    return [Part(*every, call.mask_of(kv_rows, ("ring", number)), None)]


@outside_graph
def _numbers(plan: Plan, kv_rows: Tensor, number: int, run: Part, device: torch.device) -> Numbers:
    """What dropout calls the rows of a call of a step."""
    name = "dropout of step", number, run.query, run.kv, device
    known = plan.memory.get(name)
    if known is None:
        rows, kv_rows = plan.rows.narrow(0, *run.query), kv_rows.narrow(0, *run.kv)
        known = plan.memory[name] = numbers_of(plan, 0, rows, kv_rows, None).to(device)
    return known


@outside_graph
def _plain_runs(plan: Plan, kv_rows: Tensor, number: int) -> list[Part]:
    known = plan.memory.get(("runs of step", number))
    if known is None:
        known = plan.memory["runs of step", number] = _runs_of(plan.rows, kv_rows)
    return known


def _runs_of(rows: Tensor, kv_rows: Tensor) -> list[Part]:
    found = []
    places = torch.cat([torch.tensor([0]), (rows.diff() != 1).nonzero().flatten() + 1])
    ends = [*places[1:].tolist(), len(rows)]
    for place, end in zip(places.tolist(), ends, strict=True):
        if place == end:
            continue
        before, until = torch.searchsorted(
            kv_rows, torch.stack([rows[place], rows[end - 1] + 1])
        ).tolist()
        if until > before:  # the rows themselves: a rank's keys are its own or all of another's
            found.append(Part((place, end - place), (0, until), masks.causal(), None))
        elif before:
            found.append(Part((place, end - place), (0, before), NOTHING_HIDDEN, None))
    return found


class _Hop(NamedTuple):
    """What a step sends and receives, whatever the call."""

    source: int
    target: int
    kv_rows: Tensor
    send: Tensor


@outside_graph
def _hops(plan: Plan, device: torch.device) -> list[_Hop]:
    """What all steps send and receive."""
    known = plan.memory.get(("ring", device))
    if known is None:
        known = [_hop(plan, number, device) for number in range(plan.ranks)]
        plan.memory["ring", device] = known
    return known


def _hop(plan: Plan, number: int, device: torch.device) -> _Hop:
    """The messages of a step; the first has none, and computes with all rows held here."""
    source, target = (plan.rank - number) % plan.ranks, (plan.rank + number) % plan.ranks
    kv_rows = plan.needed_rows(plan.rank, source) if number else plan.rows
    send = torch.searchsorted(plan.rows, plan.needed_rows(target, plan.rank))
    return _Hop(source, target, kv_rows, send.to(device))


class _Part(NamedTuple):
    """A step's call, checked: what its backend takes."""

    inputs: Inputs
    variant: Variant
    config: KernelConfig
    forward_by: str
    backward_by: str

    @property
    def checked(self) -> CheckedCall:
        """The call for its operator."""
        return CheckedCall(self.variant, self.config, self.forward_by, self.backward_by)


def _part(
    call: LocalCall, step: Step, run: Part, query: Tensor, rows: Tensor, sinks: Tensor | None,
    tables: Sequence[Tensor], base: Tensor | None = None,
) -> _Part:  # fmt: skip
    """A call of a step on keys and values [rows, batch, heads, dim], beside each other.

    base: what scores are less by in each row; None: nothing.
    """
    head_dim, options = call.plan.sizes.head_dim, call.options
    query, rows = query.narrow(2, *run.query), heads_first(rows.narrow(0, *run.kv))
    captured = step.score.captured._replace(tensors=tuple(tables[step.tables]))
    score = Score(step.score.key, captured)
    inputs, variant, problem, config = prepare(
        query, rows[..., :head_dim], rows[..., head_dim:], None, None, None, None, mask=run.mask,
        score=score if base is None else large_scores.less(score, base), scale=options.scale,
        sinks=sinks,
        dropout_p=options.dropout_p, return_lse=True, deterministic=options.deterministic,
        config=options.config,
    )  # fmt: skip
    forward_by, backward_by, _ = backends.choose_all(problem, options.implementation)
    variant = variant._replace(residual=query.dtype.itemsize == 2)  # what is merged is exact, too
    if run.numbers is not None:
        inputs = inputs._replace(seed=call.seed, numbers=run.numbers.table)
        variant = variant._replace(grouped=run.numbers.grouped)
    return _Part(inputs, variant, config or DEFAULT_CONFIG, forward_by, backward_by)


def _results(part: _Part) -> Results:
    """The forward pass of a call, by its backend; in a graph, by its operator."""
    if not in_graph():
        module = backends.module_of("attention", part.forward_by)
        return module.forward(part.inputs, part.variant, part.config)
    checked = part.checked
    tensors = *part.inputs, list(checked.tables)
    output, lse, residual, _ = ATTENTION.op(*tensors, *ATTENTION.flatten(checked, False))
    return Results(output, lse, residual if part.variant.residual else None)


def _lost(
    call: LocalCall, step: Step, run: Part, query: Tensor, rows: Tensor, sinks: Tensor | None,
    tables: Sequence[Tensor], lse: Tensor, so_far: Tensor | None,
) -> Lost | None:  # fmt: skip
    """What rounding took from the lse of a step's call, which is not dropped from."""
    plain = call._replace(options=call.options._replace(dropout_p=0.0))

    def again(base: Tensor, of_rows: Tensor | None) -> Tensor:
        same = run._replace(numbers=None)
        if of_rows is not None:
            entries = masks.key_lengths(large_scores.entries_of(of_rows) * run.kv[1])
            same = same._replace(mask=run.mask & entries if run.mask.key else entries)
        found = _results(_part(plain, step, same, query, rows, None, tables, base)).lse
        return found if sinks is None else large_scores.with_sinks(found, sinks, base)

    return large_scores.lost_of(lse, so_far, bool(step.score.key), again)


def _arrivals(
    call: LocalCall, steps: list[Step], own: Tensor, forward: bool
) -> Iterator[tuple[Step, Tensor]]:
    """Each step with the rows that came for it; those of the next are asked for before."""
    message: Message | None = None
    for number, step in enumerate(steps):
        rows = own if message is None else message.wait()
        message = None
        if number + 1 < len(steps):
            after = steps[number + 1]
            sent = own.index_select(0, after.send)
            if forward and not number:
                sent = call.compared(sent)
            message = Message(
                call.plan, sent,
                _counts(call, after.target, len(after.send), after.source, after.receive),
                f"keys of step {number + 1}",
            )  # fmt: skip
        yield step, rows


def _counts(call: LocalCall, target: int, send: int, source: int, receive: int) -> Counts:
    """One rank sends to one and receives from one."""
    found = Counts([0] * call.plan.ranks, [0] * call.plan.ranks)
    found.send[target], found.receive[source] = send, receive
    return found


def _computes(query: Tensor, step: Step) -> bool:
    """Whether a step has anything to compute; it sends and receives all the same."""
    return bool(query.shape[2] and step.receive and step.runs)


class _SoFar(NamedTuple):
    """What the steps so far give together."""

    output: Tensor
    lse: Tensor
    lost: Tensor  # what rounding took from the lse

    def with_part(self, part: _Found, output: Tensor, first: bool) -> _SoFar:
        """What they give together with a call of the next step."""
        number = torch.zeros_like(part.lse) if part.lost is None else part.lost.number
        here, new = [each.narrow(2, *part.run.query) for each in self], (output, part.lse, number)
        if not first:
            new: Any = merged(*map(torch.stack, zip(here, new, strict=True)))
        if part.run.query == (0, self.lse.shape[2]):
            return _SoFar(*new)
        for place, each in zip(here, new, strict=True):
            place.copy_(each)
        return self


class _Found(NamedTuple):
    """What a call of a step found beside its output."""

    run: Part
    lse: Tensor
    lost: Lost | None

    def own(self, whole: _SoFar) -> _Own:
        """What its backward pass takes in place of the lse of all steps."""
        if self.lost is None:
            return _Own(None, None)
        lse, lost = (each.narrow(2, *self.run.query) for each in whole[1:])
        rows, number = self.lost
        weight = (self.lse - lse + (number - lost)).exp()
        return _Own(self.lse.where(rows, lse), weight.where(rows, 1))


class _Own(NamedTuple):
    """What a step's backward pass takes of rows of large scores.

    It divides weights by the sum of its own keys, as it takes the lse for theirs. So it is given
    the lse of these, and gradients that are multiplied by their part in the row's sum.

    Attributes:
        lse: of the step's keys in such rows, of all steps elsewhere; None: there are no such rows.
        weight: of the step's keys among all of the row; 1 elsewhere.
    """

    lse: Tensor | None
    weight: Tensor | None


class _Ring(torch.autograd.Function):
    """The call of all steps, with gradients of everything."""

    @staticmethod
    def forward(
        ctx: Any, call: LocalCall, steps: list[Step], query: Tensor, key: Tensor, value: Tensor,
        sinks: Tensor | None, *tables: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = accumulate_dtype(query.dtype)
        output = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=wide)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
        so_far = _SoFar(output, lse, torch.zeros_like(lse))
        own = rows_first(joined(key, value))
        found: list[_Found] = []
        for step, rows in _arrivals(call, steps, own, True):
            if not _computes(query, step):
                so_far = so_far._replace(lse=waiting_for(so_far.lse, rows))
                continue
            first = step is steps[0]
            for run in step.runs:
                brought = query, rows, sinks if first else None, tables
                results = _results(_part(call, step, run, *brought))
                before = None if first else so_far.lse.narrow(2, *run.query)
                lost = _lost(call, step, run, *brought, results.lse, before)
                found.append(_Found(run, results.lse, lost))
                exact = restored(results.output, results.residual).to(wide)
                so_far = so_far.with_part(found[-1], exact, first)
        output, lse = so_far.output, so_far.lse
        rows = empty_output(query, query.shape[1], value.shape[-1], packed=False).copy_(output)
        residual = None
        if query.dtype.itemsize == 2:
            residual = torch.empty_like(rows, dtype=torch.int8).copy_(rounded(output, rows))
        apart = [each for one in found for each in one.own(so_far)]
        ctx.set_materialize_grads(False)  # with none of the lse, backends may have faster ways
        ctx.call, ctx.steps, ctx.apart = call, steps, len(apart)
        ctx.save_for_backward(query, key, value, rows, lse, residual, sinks, *apart, *tables)
        return rows, lse

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        call, steps = ctx.call, ctx.steps
        query, key, value, output, lse, residual, sinks, *others = ctx.saved_tensors
        apart, tables = iter(others[: ctx.apart]), others[ctx.apart :]
        grads = [each for each in given if each is not None]  # for which messages wait
        of_both = (torch.zeros_like(output) if given[0] is None else given[0]), given[1]
        wide, results = accumulate_dtype(query.dtype), Results(output, lse, residual)
        own = waiting_for(rows_first(joined(key, value)), *grads)
        found = _Sums(
            torch.zeros_like(query, dtype=wide), torch.zeros_like(own, dtype=wide),
            [None] * len(tables),
        )  # fmt: skip
        grad_sinks = None if sinks is None else waiting_for(torch.zeros_like(sinks), *grads)
        leaving: tuple[Step, Message] | None = None
        for step, rows in _arrivals(call, steps, own, False):
            grad_rows = torch.zeros_like(rows, dtype=wide)
            if not _computes(query, step):
                grad_rows = waiting_for(grad_rows, *grads)
            else:
                first = step is steps[0]
                for run in step.runs:
                    part = _part(call, step, run, query, rows, sinks if first else None, tables)
                    of_run = _of_run(run, results, of_both, _Own(next(apart), next(apart)))
                    gradients = _gradients(call, step, part, *of_run, tables)
                    of_keys = rows_first(joined(gradients.key, gradients.value))
                    grad_rows.narrow(0, *run.kv).add_(of_keys)
                    found.query.narrow(2, *run.query).add_(gradients.query)
                    if grad_sinks is not None and gradients.sinks is not None and first:
                        grad_sinks += gradients.sinks
                    for position, gradient in gradients.tables.items():
                        found.tables[step.tables.start + position] = gradient
            if step is steps[0]:
                found.rows.add_(grad_rows)
                continue
            found.add(leaving)
            counts = _counts(call, step.source, step.receive, step.target, len(step.send))
            what = f"gradients of step {steps.index(step)}"
            leaving = step, Message(call.plan, grad_rows, counts, what)
        found.add(leaving)
        grad_kv = heads_first(found.rows)
        head_dim = key.shape[-1]
        of_tables = [
            waiting_for(torch.zeros_like(table), *grads)
            if gradient is None and wanted
            else gradient
            for table, gradient, wanted in zip(
                tables, found.tables, ctx.needs_input_grad[6:], strict=True
            )
        ]
        return (
            None, None, found.query.to(query.dtype), grad_kv[..., :head_dim].to(key.dtype),
            grad_kv[..., head_dim:].to(value.dtype), grad_sinks, *of_tables,
        )  # fmt: skip


class _Sums(NamedTuple):
    """Gradients that add up over steps, in 32 bits."""

    query: Tensor
    rows: Tensor  # keys and values of this rank
    tables: list[Tensor | None]

    def add(self, message: tuple[Step, Message] | None) -> None:
        """Add the gradients of this rank's rows that another rank has sent."""
        if message is not None:
            step, gradients = message
            self.rows[step.send] += gradients.wait()  # a step has no row twice


def _of_run(
    run: Part, results: Results, grads: Sequence[Any], own: _Own
) -> tuple[Results, Sequence[Any]]:
    """The results of all steps, and their gradients, as a call's backward pass takes them."""
    if run.query != (0, results.output.shape[2]):  # kernels take these as they were written
        of_rows: list[Any] = [
            None if each is None else each.narrow(2, *run.query).contiguous()
            for each in (*results, *grads)
        ]
        results, grads = Results(*of_rows[: len(results)]), of_rows[len(results) :]
    if own.lse is None or own.weight is None:
        return results, grads
    of_output, of_lse = grads
    of_output = (of_output * own.weight.unsqueeze(-1)).to(of_output.dtype)
    of_lse = None if of_lse is None else of_lse * own.weight
    return results._replace(lse=own.lse), (of_output, of_lse)


def _gradients(
    call: LocalCall, step: Step, part: _Part, results: Results, grads: Sequence[Any],
    tables: Sequence[Tensor],
) -> Gradients:  # fmt: skip
    """A call's part of all gradients, by the output and lse of all steps."""
    wanted = [
        position
        for position, table in enumerate(tables[step.tables])
        if table.is_floating_point() and table.requires_grad
    ]
    deterministic = call.options.deterministic
    if not in_graph():
        module = backends.module_of("attention", part.backward_by, "backward")
        return module.backward(
            part.inputs, part.variant, part.config, results, grads[0], grads[1], wanted,
            deterministic,
        )  # fmt: skip
    checked = part.checked
    first = len(part.variant.mask_captured.tensors)
    listed = ATTENTION.call_backward(
        [first + position for position in wanted], ATTENTION.flatten(checked, deterministic),
        grads[0], grads[1], *results[:3], *part.inputs, *checked.tables,
    )  # fmt: skip
    query, key, value, *others = listed
    sinks = None if part.inputs.sinks is None else others.pop(0)
    return Gradients(query, key, value, sinks, dict(zip(wanted, others, strict=True)))
