"""Recurrences over ranks: what linear attention and the gated delta rule share.

The rows of a rank are a few pieces of sequences, each of rows that follow one another. Three phases
compute them: each rank finds what its pieces do to a state (`transitions`), all ranks exchange that
in one message, and each piece is computed from the state before it, which is the transitions of the
pieces before one after another. The message is as long as a state, whatever the length.

Gradients go the same ways back. The loss is the sum of what ranks compute from their results, so
gradients of what every rank has are summed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.modifiers.graph_constants import constants, in_graph, outside_graph
from saccade.parallel.agreement import agree, begin, checked_plan, dealt_facts
from saccade.parallel.agreement_op import GraphFault, agreed_in_graph
from saccade.parallel.exchange import Counts, Message, summed_over_ranks, waiting_for
from saccade.parallel.planner import Plan
from saccade.runtime import shards
from saccade.runtime.arguments import check_flag, unknown_options
from saccade.runtime.spec import accumulate_dtype

Compared = Callable[[Tensor], Tensor]

# ---- pieces --------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows of one sequence that follow one another and lie on one rank.

    Attributes:
        sequence: which of those laid end to end; 0 where there is one.
        first, end: rows of the whole.
        rank: where they lie.
        place: the first row among the rank's.
    """

    sequence: int
    first: int
    end: int
    rank: int
    place: int

    @property
    def size(self) -> int:
        """How many rows."""
        return self.end - self.first


@outside_graph
def pieces_of(plan: Plan) -> list[Piece]:
    """The pieces of all ranks, in the order of rows."""
    known = plan.memory.get("pieces")
    if known is None:
        known = plan.memory["pieces"] = _pieces(plan)
    return known


def _pieces(plan: Plan) -> list[Piece]:
    offsets = plan.cu_seqlens
    found = []
    for rank in range(plan.ranks):
        rows = plan.rows_of(rank)
        if not len(rows):
            continue
        sequence = torch.zeros_like(rows)
        if offsets is not None:
            sequence = torch.searchsorted(offsets[1:].long(), rows, right=True)
        new = (rows.diff() != 1) | (sequence.diff() != 0)
        places = torch.cat([torch.zeros(1, dtype=torch.int64), new.nonzero().flatten() + 1])
        ends = torch.cat([places[1:], torch.tensor([len(rows)])])
        firsts = rows[places].tolist(), rows[ends - 1].tolist(), sequence[places].tolist()
        for place, first, last, number in zip(places.tolist(), *firsts, strict=True):
            found.append(Piece(number, first, last + 1, rank, place))
    return sorted(found, key=lambda piece: piece.first)


class Route(NamedTuple):
    """Which pieces' transitions are exchanged, and whose each piece of this rank takes.

    Attributes:
        own: this rank's pieces.
        sent: those of them whose transitions others need, by their place in `own`.
        counts: how many transitions each rank sends.
        before: for each own piece, the places of transitions before it among all that come.
        all_of: for each sequence, those of all its pieces; where all are sent.
    """

    own: list[Piece]
    sent: list[int]
    counts: list[int]
    before: list[list[int]]
    all_of: list[list[int]]


@outside_graph
def route_of(plan: Plan, every: bool) -> Route:
    """The route of a plan.

    every: whether all transitions are sent, as for the last state, or only those that another piece
        of the sequence follows.
    """
    known = plan.memory.get(("route", every))
    if known is not None:
        return known
    pieces = pieces_of(plan)
    followed = [one.sequence == other.sequence for one, other in itertools.pairwise(pieces)]
    wanted = [every or follows for follows in [*followed, False]][: len(pieces)]
    by_rank = sorted(range(len(pieces)), key=lambda number: pieces[number].rank)
    place_of: dict[int, int] = {}
    for number in by_rank:
        if wanted[number]:
            place_of[number] = len(place_of)
    counts = [0] * plan.ranks
    for number in place_of:
        counts[pieces[number].rank] += 1
    sequences = 1 if plan.cu_seqlens is None else len(plan.cu_seqlens) - 1
    all_of: list[list[int]] = [[] for _ in range(sequences)]
    own, sent, before = [], [], []
    for number, piece in enumerate(pieces):
        if piece.rank == plan.rank:
            before.append(list(all_of[piece.sequence]))
            if wanted[number]:
                sent.append(len(own))
            own.append(piece)
        if wanted[number]:
            all_of[piece.sequence].append(place_of[number])
    plan.memory["route", every] = found = Route(own, sent, counts, before, all_of)
    return found


# ---- messages ------------------------------------------------------------------------------------


class _Spread(torch.autograd.Function):
    """Rows of all ranks, those of rank 0 first; gradients are summed over ranks, in their order."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, rows: Tensor, counts: list[int], compared: Compared
    ) -> Tensor:
        ctx.plan, ctx.counts = plan, counts
        ctx.message = Counts([len(rows)] * plan.ranks, counts)
        sent = compared(rows.repeat(plan.ranks, 1))
        return Message(plan, sent, ctx.message, "transitions of states").wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        what = "gradients of transitions of states"
        found = Message(ctx.plan, grad, ctx.message.back, what).wait()
        return None, found.unflatten(0, (ctx.plan.ranks, -1)).sum(0), None, None


class _SummedTogether(torch.autograd.Function):
    """Tensors that every rank has; their gradients are summed over ranks, in 32 bits.

    One node of the graph, so that ranks cannot enter the sums in another order.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dtypes = [grad.dtype for grad in grads]
        wide = max(map(accumulate_dtype, dtypes), key=lambda dtype: dtype.itemsize)
        total = torch.cat([grad.flatten().to(wide) for grad in grads])
        total = summed_over_ranks(ctx.plan, total)
        parts = total.split([grad.numel() for grad in grads])
        found = [part.view_as(grad).to(grad.dtype) for part, grad in zip(parts, grads, strict=True)]
        return None, *found


def summed_together(plan: Plan, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Tensors that every rank has, whose gradients are summed over ranks."""
    found = dict(tensors)
    names = [name for name, each in tensors.items() if each is not None and each.requires_grad]
    if plan.ranks > 1 and names and torch.is_grad_enabled():
        together: Any = _SummedTogether.apply(plan, *(tensors[name] for name in names))
        found |= dict(zip(names, together, strict=True))
    return found


def spread(plan: Plan, rows: Tensor, counts: list[int], compared: Compared) -> Tensor:
    """The rows of all ranks, [sum of counts, numbers]; nothing is sent where there are none.

    compared: as `agreed` gives it.
    """
    if plan.ranks == 1 or not sum(counts):
        return rows
    found: Any = _Spread.apply(plan, rows, counts, compared)
    return found


class _Tied(torch.autograd.Function):
    """`tied`, which graphs would see through: gradients that are 0, and wait for nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.likes = [(each.shape, each.dtype) for each in others]
        return waiting_for(tensor, *others) if in_graph() else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        if not in_graph():  # one number stands for all
            zeros = [grad.new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.likes]
            return grad, *zeros
        zeros = [grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.likes]
        return grad, *[waiting_for(each, grad) for each in zeros]


def tied_to_rows(
    tensor: Tensor, rows: Sequence[Tensor | None], whole: Sequence[Tensor | None], route: Route
) -> Tensor:
    """`tied`, of what pieces do to a state: to what every rank has whole, and to this rank's rows
    where no piece is sent, whose transitions would come of these. (A gradient of 0 is as long as
    rows are. Graphs take them all.)"""
    return tied(tensor, *whole, *(rows if in_graph() or not route.sent else ()))


def tied(tensor: Tensor, *others: Tensor | None) -> Tensor:
    """A tensor whose gradients pass by some others, with 0 for them.

    So every rank comes to a message of the backward pass, whether its rows need what came or not.
    """
    wanted = [each for each in others if each is not None and each.requires_grad]
    if not wanted and not in_graph():
        return tensor
    found: Any = _Tied.apply(tensor, *wanted)
    return found


# ---- a call --------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """How the tensors of a call have rows: packed, the first dimension, else the third."""

    packed: bool

    @property
    def dim(self) -> int:
        """The dimension of rows."""
        return 0 if self.packed else 2

    def of(self, tensor: Tensor, piece: Piece) -> Tensor:
        """The rows of a piece."""
        return tensor.narrow(self.dim, piece.place, piece.size)

    def stacks(self, tensors: Sequence[Tensor | None], pieces: Sequence[Piece]) -> bool:
        """Whether pieces are one call as the entries of a batch: several of one sequence, as long
        as one another, that lie side by side. Tensors without rows hinder nothing."""
        return (
            not self.packed and len(pieces) > 1
            and all(each is None or (each.dim() > 2 and each.shape[0] == 1) for each in tensors)
            and len({piece.size for piece in pieces}) == 1
            and all(one.place + one.size == other.place
                    for one, other in itertools.pairwise(pieces))
        )  # fmt: skip

    def stacked(self, tensor: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The rows of pieces that `stacks` is true of, as they lie: [pieces, heads, size, ...]."""
        if tensor.shape[2] == 0:
            return tensor.expand(len(pieces), *tensor.shape[1:])
        first, size = pieces[0].place, pieces[0].size
        rows = tensor
        if tensor.shape[2] > size * len(pieces):
            rows = tensor.narrow(2, first, size * len(pieces))
        return rows.squeeze(0).unflatten(1, (len(pieces), size)).transpose(0, 1)

    def of_group(self, tensor: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The rows of pieces that one call computes (`groups_of`); all of a tensor without rows."""
        if not self.packed and len(pieces) > 1:
            return self.stacked(tensor, pieces)
        return tensor if tensor.shape[self.dim] == 0 else self.of_pieces(tensor, pieces)

    def all_of_group(self, tensors: Sequence[Tensor | None], pieces: Sequence[Piece]) -> list[Any]:
        """`of_group` of several tensors, of which some are not there."""
        return [None if each is None else self.of_group(each, pieces) for each in tensors]

    def ungrouped(self, tensor: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Rows end to end, [1, heads, rows, ...] where they are dense, of what such a call gave."""
        if self.packed or len(pieces) < 2:
            return tensor
        return tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def of_pieces(self, tensor: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The rows of several pieces, end to end; the tensor itself where they are all."""
        if sum(piece.size for piece in pieces) == tensor.shape[self.dim]:
            return tensor
        if not pieces:
            return tensor.narrow(self.dim, 0, 0)
        if len(pieces) == 1:
            return self.of(tensor, pieces[0])
        return torch.cat([self.of(tensor, piece) for piece in pieces], self.dim)


class _TakenTwice(torch.autograd.Function):
    """Rows as both calls of a rank take them: all for the first call, then all for the second.
    Gradients are written and added where rows lie."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.route = rows, route
        ctx.likes = [torch.empty_like(each, device="meta") for each in tensors]
        calls = [route.own[number] for number in route.sent], route.own
        return tuple([rows.of_group(each, pieces) for pieces in calls for each in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        half = len(grads) // 2
        every = zip(ctx.likes, grads[:half], grads[half:], strict=True)
        return None, None, *[_added(ctx.rows, ctx.route, *each) for each in every]


def _added(
    rows: Rows, route: Route, like: Tensor, of_sent: Tensor | None, of_own: Tensor | None
) -> Tensor | None:
    """The gradient of rows that both calls took, laid out as `like`."""
    given = of_sent if of_own is None else of_own
    if given is None:
        return None
    total = given.new_empty_strided(like.shape, like.stride())
    if of_own is None:
        total.zero_()
    for place, piece in enumerate(route.own):
        parts = [] if of_own is None else [_of_piece(of_own, place, route.own)]
        if of_sent is not None and place in route.sent:
            parts.append(_of_piece(of_sent, route.sent.index(place), route.sent))
        into = rows.of(total, piece)
        if len(parts) == 2:
            torch.add(*parts, out=into)
        elif parts:
            into.copy_(parts[0])
    return total


def _of_piece(stacked: Tensor, place: int, pieces: Sequence[Any]) -> Tensor:
    """The rows of one of several pieces that one call computed."""
    return stacked.narrow(0, place, 1) if len(pieces) > 1 else stacked


class TakenRows(NamedTuple):
    """A call's tensors as each of a rank's two calls takes them: of the pieces that it sends, and
    of all its pieces."""

    sent: list[Any]
    own: list[Any]


def taken_twice(
    rows: Rows, query: Tensor, others: Sequence[Tensor | None], route: Route
) -> TakenRows | None:
    """What both calls read beside queries, where both are one call of rows as they lie. (Else
    gradients of either are as long as all rows, and are added.)"""
    sent, own = [route.own[number] for number in route.sent], route.own
    if rows.packed or in_graph() or not sent:
        return None
    every = query, *others
    if any(len(pieces) > 1 and not rows.stacks(every, pieces) for pieces in (sent, own)):
        return None
    found = TakenRows(rows.all_of_group(others, sent), rows.all_of_group(others, own))
    differ = [place for place, each in enumerate(others) if each is not None and each.requires_grad]
    if differ and torch.is_grad_enabled():
        both: Any = _TakenTwice.apply(rows, route, *[others[place] for place in differ])
        for number, place in enumerate(differ):
            found.sent[place], found.own[place] = both[number], both[len(differ) + number]
    return found


def groups_of(
    rows: Rows, tensors: Sequence[Tensor | None], pieces: list[Piece]
) -> list[list[Piece]]:
    """Pieces by the calls that compute them: of one call for all, where that can be; at least one
    call, which checks all arguments. tensors: those that have rows."""
    if rows.packed or not pieces or rows.stacks(tensors, pieces):
        return [pieces]
    return [[piece] for piece in pieces]


def offsets_of(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """The offsets of pieces laid end to end; of one sequence without rows where there are none."""
    sizes = [piece.size for piece in pieces] or [0]
    return whole_numbers((0, *itertools.accumulate(sizes)), device, torch.int32)


def whole_numbers(
    numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers of a plan as a tensor, which must not be changed: a constant of graphs."""
    return constants(_whole_numbers(numbers, device, dtype))


@outside_graph
@functools.lru_cache(maxsize=256)
def _whole_numbers(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    # Kept, as the host waits for all that a GPU has to do when it hands over a few numbers.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Refuse what is no tensor of one process."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, takes a tensor")
        if shards.any_sharded(tensor):
            raise NotImplementedError(
                f"{name}: got a DTensor, takes a tensor of this rank: {name}.to_local()"
            )


def check_rows(plan: Plan, tensors: Mapping[str, Tensor | None], rows: Rows) -> None:
    """Refuse tensors that are not this rank's rows."""
    check_tensors(tensors)
    if rows.packed != (plan.cu_seqlens is not None):
        got, takes = ("a length", "offsets") if rows.packed else ("offsets", "a length")
        raise ValueError(f"plan: got one of {got}, takes one of {takes}")
    for name, tensor in tensors.items():
        if (
            tensor is not None
            and tensor.dim() > rows.dim
            and tensor.shape[rows.dim] != len(plan.rows)
        ):
            raise ValueError(
                f"{name}: got {tensor.shape[rows.dim]} rows on rank {plan.rank}, takes the plan's "
                f"{len(plan.rows)}"
            )


def agreed(
    name: str, plan: Plan, first: Any, options: Mapping[str, Any], taken: Set[str],
    prepare: Callable[[dict[str, Any], bool], tuple[Any, dict[str, str], dict[str, Tensor]]],
) -> tuple[Any, bool, Compared]:  # fmt: skip
    """What `prepare` gives, once all ranks have found that their calls fit together; and whether
    the last state is asked for. In a graph ranks compare later: the third is for the first rows
    that are sent, or for the keys where none are.

    first: the call's first tensor, whose device says where ranks compare.
    options: of the call, whose names must be among those taken.
    prepare: called with the other options and `return_state`; gives facts that are to be equal,
        and tensors that are to have the same numbers on every rank.
    """
    checked_plan(plan)
    fault, found, facts, whole, given = None, None, {}, {}, dict(options)
    return_state = given.pop("return_state", False)
    try:
        if unknown := sorted(set(options) - taken):
            raise unknown_options(unknown, sorted(taken))
        check_flag("return_state", return_state)
        found, facts, whole = prepare(given, return_state)
    except (TypeError, ValueError, NotImplementedError) as error:
        fault = error  # others learn of it before they wait for this rank
    facts = {"call": name, **dealt_facts(plan), **facts}
    if plan.ranks > 1 and in_graph():
        if fault is not None:
            raise GraphFault(fault, facts)
        compared: Compared = lambda rows: agreed_in_graph(  # noqa: E731
            plan, facts, None, rows, whole=whole
        )
        return found, return_state, compared
    if plan.ranks > 1:
        begin(plan, name)
        where = first.device if isinstance(first, Tensor) else torch.device("cpu")
        agree(plan, facts, fault, where, whole=whole)
    if fault is not None:
        raise fault
    return found, return_state, lambda rows: rows


def check_initial(
    call: Callable[..., Any], tensors: Sequence[Tensor], decay: Tensor | None, initial: Any,
    plan: Plan, rows: Rows, options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Refuse a state that does not fit, by a call of no rows."""
    nothing = [each.narrow(rows.dim, 0, 0) for each in tensors]
    if decay is not None and decay.dim() > 1:  # one for each row
        decay = decay.narrow(rows.dim, 0, 0)
    if plan.cu_seqlens is not None:
        nothing.append(nothing[0].new_zeros(len(plan.cu_seqlens), dtype=torch.int32))
    call(*nothing, decay=decay, initial_state=initial, **options)


def wanted_gradients(tensors: Mapping[str, Tensor | None]) -> str:
    """The names of tensors whose gradients are wanted."""
    if not torch.is_grad_enabled():
        return "nothing"
    names = [name for name, each in tensors.items() if each is not None and each.requires_grad]
    return ", ".join(names) or "nothing"


def sizes_of(tensors: Mapping[str, Tensor | None], rows: Rows) -> dict[str, str]:
    """Shapes but for rows, by name, in words that are equal on all ranks."""
    found = {}
    for name, tensor in tensors.items():
        found[name] = "none"
        if tensor is not None:
            shape = [size for dim, size in enumerate(tensor.shape) if dim != rows.dim]
            found[name] = f"{shape} beside rows, {tensor.dtype}"
    return found


def whole_facts(whole: Mapping[str, Tensor | None]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Shapes, by name, of tensors that every rank has whole; and those that there are."""
    there = {name: each.detach() for name, each in whole.items() if each is not None}
    facts = {
        name: "none" if each is None else f"{tuple(each.shape)} {each.dtype}, whole"
        for name, each in whole.items()
    }
    return facts, there
