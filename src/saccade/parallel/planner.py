"""Planner: a plan says which rows each rank holds, who needs which keys, and what all that costs.

It is made once from the mask, before any tensor is there, and is the same on every rank. Layers
whose masks differ share the rows of one plan (`Plan.for_mask`).
"""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from saccade import masks
from saccade.masks import AnyMask, Mask, as_mask
from saccade.modifiers.expression import Captured
from saccade.modifiers.graph_constants import in_graph, outside_graph
from saccade.modifiers.modifier import Extents, expanded, misfit
from saccade.modifiers.normal_form import by_distance, is_causal
from saccade.modifiers.renumber import RowNumbers, renumbered
from saccade.parallel import display
from saccade.parallel.agreement import agree, begin, dealt_facts
from saccade.parallel.costs import METHODS, Cost, Machine, Sizes, cheapest, costs
from saccade.parallel.dealing import Deal, deals, work_of
from saccade.parallel.exchange import Routes, gathered
from saccade.parallel.work import RowWork, WholeCall, needs, row_work
from saccade.runtime.arguments import (
    check_flag,
    check_offsets,
    check_whole_number,
    options_of,
    unknown_options,
)
from saccade.runtime.spec import DTYPES
from saccade.runtime.validation import with_causal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLANS: weakref.WeakValueDictionary[str, Plan] = weakref.WeakValueDictionary()
SEGMENTS = 2048  # of rows, at most, whose keys are sent or not; or one for each chunk
DEFAULT_MACHINE = Machine()


@dataclass(eq=False, repr=False)
class Plan:
    """Which rows each rank holds, who needs which keys, and what each method costs.

    Attributes:
        mask: which pairs are visible, in the numbers of the whole call.
        length: rows of all ranks.
        cu_seqlens: int32 [sequences + 1] on the CPU, of sequences laid end to end; else None.
        ranks, rank: how many, and this one.
        method: "gather", "ulysses" or "ring".
        work: float64 [ranks], the pairs that each rank computes.
        costs: what each method takes, by name.
        machine: what the cost model assumes.
        group: the process group; None: ranks are simulated, and nothing can be sent.

    Examples:
        >>> plan = saccade.parallel.plan(masks.causal(), 65536, 8)  # 8 simulated ranks
        >>> plan.rows_of(0).shape, plan.imbalance < 0.03
        (torch.Size([8192]), True)
    """

    mask: Mask
    length: int
    cu_seqlens: Tensor | None
    ranks: int
    rank: int
    method: str
    sizes: Sizes
    dealt: Deal
    costs: dict[str, Cost]
    machine: Machine
    group: Any
    verify: str
    segments: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    needed: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    named_method: bool = False
    memory: dict[Any, Any] = field(default_factory=dict)  # what calls prepared before
    name: str = field(init=False)  # by which graphs know it: no other plan of any process has it

    def __post_init__(self) -> None:
        self.name = uuid.uuid4().hex
        PLANS[self.name] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # a copy is another plan

    # ---- rows -----------------------------------------------------------------------------------

    @property
    def work(self) -> Tensor:
        """float64 [ranks], the pairs that each rank computes, over all batch entries and heads."""
        return self.dealt.work

    @property
    def imbalance(self) -> float:
        """How much more than the mean the busiest rank computes: 0.02 is 2 %."""
        return self.dealt.imbalance

    @outside_graph
    def rows_of(self, rank: int) -> Tensor:
        """int64, the rows of all that a rank holds, ascending, on the CPU."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank: got {rank}, takes 0 to {self.ranks - 1}")
        known = self.memory.get(("rows", rank))
        if known is None:
            known = self.memory["rows", rank] = self.dealt.rows_of(rank)
        return known

    @property
    def rows(self) -> Tensor:
        """int64, the rows that this rank holds, ascending, on the CPU."""
        return self.rows_of(self.rank)

    @property
    def positions(self) -> Tensor:
        """int64, where each row of this rank stands in its sequence, for rotary embeddings."""
        return self.numbers(self.rows).numbers

    def numbers(self, rows: Tensor) -> RowNumbers:
        """The numbers of some rows in their sequences, and which of several these are."""
        if self.cu_seqlens is None:
            return RowNumbers(rows)
        offsets = self.cu_seqlens.long()
        batch = torch.searchsorted(offsets[1:], rows, right=True)
        return RowNumbers(rows - offsets[batch], batch)

    def at(self, rank: int) -> Plan:
        """The plan as another rank has it, without a process group: to look at it.

        Examples:
            >>> plan = saccade.parallel.plan(masks.causal(), 64, 2)
            >>> plan.at(1).rows.shape
            torch.Size([32])
        """
        self.rows_of(rank)
        return replace(self, rank=rank, group=None, memory={})

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """The rows of this rank of a tensor that has all of them along a dimension.

        Its gradient is that of these rows; of others it is 0.

        Raises:
            TypeError, ValueError: if it is no tensor, has no such dimension, or another number of
                rows.

        Examples:
            >>> plan = saccade.parallel.plan(masks.causal(), 64, 2)
            >>> plan.shard(torch.randn(1, 4, 64, 16), dim=2).shape
            torch.Size([1, 4, 32, 16])
        """
        self._check_rows("tensor", tensor, dim, self.length)
        return tensor.index_select(dim, self.on(tensor.device, "rows"))

    def unshard(self, shards: Tensor | Sequence[Tensor], dim: int) -> Tensor:
        """All rows, in their order, from this rank's (a collective) or from those of all ranks.

        Of a collective the gradient is that of this rank's rows: what follows is computed on every
        rank alike.

        Args:
            shards: this rank's rows, or a sequence of each rank's.
            dim: along which rows lie.

        Raises:
            TypeError, ValueError: if there are other rows than the plan's, or no such dimension; of
                a collective on every rank, and where shapes, dtypes or plans differ between ranks,
                naming the difference.
            RuntimeError: where messages fail or time out.

        Examples:
            >>> whole = torch.randn(1, 4, 61, 16)
            >>> plan = saccade.parallel.plan(masks.causal(), 61, 4)
            >>> shards = [plan.at(rank).shard(whole, dim=2) for rank in range(4)]
            >>> torch.equal(plan.unshard(shards, dim=2), whole)
            True
        """
        if isinstance(shards, Tensor):
            self._compare_shards(shards, dim)
            counts = [len(self.rows_of(rank)) for rank in range(self.ranks)]
            together = gathered(self, shards, dim, counts)
        else:
            if len(shards) != self.ranks:
                raise ValueError(f"shards: got {len(shards)}, takes one for each of {self.ranks}")
            for rank, shard in enumerate(shards):
                self._check_rows(f"shards[{rank}]", shard, dim, len(self.rows_of(rank)))
            together = torch.cat(list(shards), dim)
        return together.index_select(dim, self.on(together.device, "places"))

    def _compare_shards(self, shards: Tensor, dim: int) -> None:
        """Refuse rows that are not the plan's, or do not fit those of other ranks, on every rank.

        Graphs do not compare.
        """
        fault, facts = None, {"call": "unshard"}
        try:
            self._check_rows("shards", shards, dim, len(self.rows))
            others = [size for at, size in enumerate(shards.shape) if at != dim % shards.dim()]
            facts["shards"] = f"{others} beside rows, {shards.dtype}"
            facts["dim"] = str(dim % shards.dim())
        except (TypeError, ValueError) as error:
            fault = error  # others learn of it before they wait for this rank
        if self.group is not None and not in_graph() and not torch.compiler.is_compiling():
            begin(self, "unshard")
            agree(self, {**facts, **dealt_facts(self)}, fault, shards.device)
        if fault is not None:
            raise fault

    @functools.cached_property
    @outside_graph
    def longest(self) -> int:
        """Rows of the longest sequence."""
        return longest_of(self.length, self.cu_seqlens)

    @functools.cached_property
    @outside_graph
    def order(self) -> Tensor:
        """int64, all rows as they come when those of rank 0, 1, ... are laid end to end."""
        return torch.cat([self.rows_of(rank) for rank in range(self.ranks)])

    @functools.cached_property
    @outside_graph
    def places(self) -> Tensor:
        """int64, where each row is among those of rank 0, 1, ... laid end to end."""
        return self.order.argsort()

    def _check_rows(self, name: str, tensor: Tensor, dim: int, rows: int) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, takes a tensor")
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"dim: got {type(dim).__name__}, takes a whole number")
        if not -tensor.dim() <= dim < tensor.dim():
            takes = f"takes {-tensor.dim()} to {tensor.dim() - 1}" if tensor.dim() else "has none"
            raise ValueError(f"dim: got {dim} of {name} of {tensor.dim()} dimensions, {takes}")
        if tensor.shape[dim] != rows:
            raise ValueError(
                f"{name}: got {tensor.shape[dim]} rows along dimension {dim}, takes {rows}"
            )

    # ---- keys -----------------------------------------------------------------------------------

    def needed_rows(self, rank: int, owner: int) -> Tensor:
        """int64, the rows of an owner whose keys a rank needs, ascending."""
        rows = self.rows_of(owner)
        segment = torch.searchsorted(self.segments[1:], rows, right=True)
        return rows[self.needed[rank][segment]]

    @functools.cached_property
    def sent(self) -> Tensor:
        """float64 [ranks, ranks]: of how many rows each rank (first) needs the keys of each other,
        and of itself."""
        owners, order = self._owners_of_segments().sort(stable=True)
        rows = (self.needed[:, order] * self.segments.diff()[order].double()).cumsum(1)
        rows = torch.nn.functional.pad(rows, (1, 0))
        return rows[:, torch.searchsorted(owners, torch.arange(self.ranks + 1))].diff()

    @functools.cached_property
    @outside_graph
    def sends_nothing(self) -> bool:
        """Whether the rows of every rank see keys of that rank alone."""
        return bool(self.sent.count_nonzero() == self.sent.diagonal().count_nonzero())

    def _owners_of_segments(self) -> Tensor:
        chunk = torch.searchsorted(self.dealt.edges[1:], self.segments[:-1], right=True)
        return self.dealt.owners[chunk.clamp_max(len(self.dealt.owners) - 1)]

    @functools.cached_property
    @outside_graph
    def routes(self) -> Routes:
        """Which rows of its own this rank sends to each rank, and which it receives from each."""
        others = range(self.ranks)
        send = [torch.searchsorted(self.rows, self.needed_rows(to, self.rank)) for to in others]
        receive = [self.needed_rows(self.rank, of) for of in others]
        arrived, order = torch.cat(receive).sort()
        return Routes(send, [len(rows) for rows in receive], arrived, order, order.argsort())

    @outside_graph
    def on(self, device: torch.device, name: str) -> Tensor:
        """An attribute, "rows", "order", "places" or "cu_seqlens", on a device."""
        known = self.memory.get((name, device))
        if known is None:
            known = self.memory[name, device] = getattr(self, name).to(device)
        return known

    def for_mask(self, mask: AnyMask, *, causal: bool = False) -> Plan:
        """A plan of these rows on these ranks for another mask, as of a layer with a window.

        Args:
            mask: as in `plan`.
            causal: as in `plan`.

        Examples:
            >>> plan = saccade.parallel.plan(masks.causal(), 65536, 8)
            >>> local = plan.for_mask(masks.window(4096))
            >>> torch.equal(local.rows, plan.rows), float(local.sent.sum() / plan.sent.sum()) < 0.5
            (True, True)
        """
        found = replace(self, mask=as_mask(with_causal(mask, causal)), memory={})
        return found.priced(row_work(found.whole_call))

    @functools.cached_property
    @outside_graph
    def whole_call(self) -> WholeCall:
        """The call of all ranks as a dense one: sequences laid end to end are documents."""
        _check_fits(self.mask, self.length, self.cu_seqlens, self.sizes)
        mask = self.mask.to("cpu")
        if self.cu_seqlens is not None:
            rows = self.numbers(torch.arange(self.length))
            assert rows.batch is not None
            same = masks.documents(rows.batch[None])
            found = mask
            if not (is_causal(mask.key) or by_distance(mask.key)):  # numbers in sequences matter
                found = Mask(*renumbered(mask.key, mask.captured, rows, rows))
            mask = found & same if found.key else same
        return WholeCall(mask, self.length, self.sizes.batch, self.sizes.query_heads)

    def priced(self, work: RowWork) -> Plan:
        """This plan with who needs which keys, work and costs; the method where none is named."""
        edges, owners = self.dealt.edges, self.dealt.owners
        self.dealt = self.dealt._replace(work=work_of(work, edges, owners, self.ranks))
        step = max(1, self.length // SEGMENTS)
        starts = torch.arange(0, self.length + 1, step)
        starts = edges if len(edges) > SEGMENTS else torch.cat([edges, starts]).unique()
        self.segments = starts
        seen = needs(self.whole_call, edges, starts)
        counts = torch.zeros(self.ranks, len(starts) - 1, dtype=torch.uint8)
        self.needed = counts.index_add_(0, owners, seen.to(torch.uint8)) > 0
        self.costs = costs(self.length, self.work, self.sent, self.sizes, self.machine)
        if not self.named_method:
            self.method = cheapest(self.costs)
        return self

    # ---- shown ----------------------------------------------------------------------------------

    def __str__(self) -> str:
        return display.text(self)

    def __repr__(self) -> str:
        return (
            f"Plan(mask={self.mask!r}, length={self.length}, ranks={self.ranks}, "
            f"rank={self.rank}, method={self.method!r})"
        )

    def __rich__(self) -> Any:
        return display.tables(self)

    def plot(self, path: Any = None) -> Figure:
        """A picture: which rank computes which tiles of pairs, and what each has to do.

        Args:
            path: where to save it; None: nowhere.

        Returns:
            matplotlib's figure, which needs matplotlib (``pip install 'saccade[bench]'``).

        Examples:
            >>> figure = saccade.parallel.plan(masks.causal(), 4096, 4).plot()
            >>> len(figure.axes)
            3
        """
        return display.picture(self, path)


def plan(  # breaks function-length: most of it is the docstring
    mask: AnyMask,
    length: int | Tensor,
    mesh: Any,
    *,
    causal: bool = False,
    method: str = "auto",
    batch: int = 1,
    query_heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    machine: Machine = DEFAULT_MACHINE,
    verify: str = "auto",
    **unknown: Any,
) -> Plan:
    """Deal the rows of a sequence to ranks so that all have as many, and as much work.

    The mask itself says what each row tile has to do and which keys it needs: intervals classify
    whole tiles, so causal masks, windows, documents and blocks are dealt alike. Nothing is sent,
    and every rank makes the same plan.

    Args:
        mask: which pairs are visible, as in `saccade.attention`; batch entries and heads may have
            masks of their own. It is read now: a mask whose tensors change needs a new plan.
        length: rows, of queries and keys alike; or int32 [sequences + 1], the offsets of sequences
            laid end to end, as `saccade.attention_varlen` takes them.
        mesh: a `ProcessGroup`, a `DeviceMesh` of one dimension, or how many ranks to simulate.
        causal: also hide keys behind each row.
        method: "gather" (each rank gets the keys that its rows see), "ulysses" (each rank gets all
            rows of some heads), "ring" (keys come rank by rank, and partial results are merged), or
            "auto": the one that the cost model expects to take least time.
        batch, query_heads, kv_heads, head_dim, value_dim, dtype: of the calls, for work and bytes;
            a call must have the same, but for dtype. value_dim is head_dim where None.
        machine: what the cost model assumes.
        verify: "always" compares what ranks are about to do before every call, "first" before the
            first of each kind, and "auto" is "always" on CPUs and "first" on GPUs, where a
            comparison waits for the device.

    Returns:
        The plan. ``print(plan)`` shows it as tables, ``plan.plot()`` as a picture.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    Examples:
        >>> plan = saccade.parallel.plan(masks.causal(), 65536, 8)
        >>> plan.ranks, round(plan.imbalance, 2)
        (8, 0.0)
        >>> documents = torch.tensor([0, 5000, 5100, 9000], dtype=torch.int32)
        >>> plan = saccade.parallel.plan(None, documents, 4, causal=True)
        >>> len(plan.rows_of(3))
        2240
    """
    if unknown:
        raise unknown_options(unknown, options_of(plan))
    check_flag("causal", causal)
    sizes = _sizes(batch, query_heads, kv_heads, head_dim, value_dim, dtype)
    rows, offsets = _rows(length)
    if offsets is not None and batch != 1:
        raise ValueError(f"batch: got {batch} beside offsets of sequences, takes 1")
    ranks, rank, group = members(mesh)
    if method not in ("auto", *METHODS):
        takes = ", ".join(f'"{each}"' for each in ("auto", *METHODS))
        raise ValueError(f"method: got {method!r}, takes one of {takes}")
    if verify not in ("auto", "always", "first"):
        raise ValueError(f'verify: got {verify!r}, takes "auto", "always" or "first"')
    found = Plan(
        as_mask(with_causal(mask, causal)), rows, offsets, ranks, rank, method, sizes,
        Deal(torch.zeros(1), torch.zeros(0), torch.zeros(ranks)), {}, machine, group, verify,
        named_method=method != "auto",
    )  # fmt: skip
    work, call = row_work(found.whole_call), found.whole_call
    priced = [replace(found, dealt=dealt, memory={}) for dealt in deals(work, ranks)]
    for each in priced:
        each.__dict__["whole_call"] = call
        each.priced(work)
    found = min(priced, key=lambda each: each.costs[each.method].total)
    refused = found.costs[found.method].refused
    if refused:
        raise ValueError(f'method: got "{found.method}" with {refused}')
    return found


def members(mesh: Any) -> tuple[int, int, Any]:
    """How many ranks a mesh has, which one this is, and the process group; None: simulated."""
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        check_whole_number("mesh", mesh, least=1)
        return mesh, 0, None
    takes = "a ProcessGroup, a DeviceMesh of one dimension, or a number of ranks to simulate"
    if dist.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(f"mesh: got {mesh.ndim} dimensions, takes one: mesh['name']")
            mesh = mesh.get_group()
        if isinstance(mesh, dist.ProcessGroup):
            return dist.get_world_size(mesh), dist.get_rank(mesh), mesh
    raise TypeError(f"mesh: got {type(mesh).__name__}, takes {takes}")


def _sizes(
    batch: int, query_heads: int, kv_heads: int, head_dim: int, value_dim: int | None,
    dtype: torch.dtype,
) -> Sizes:  # fmt: skip
    value_dim = head_dim if value_dim is None else value_dim
    numbers = {
        "batch": batch, "query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "value_dim": value_dim,
    }  # fmt: skip
    for name, number in numbers.items():
        check_whole_number(name, number, least=0 if name == "batch" else 1)
    if query_heads % kv_heads:
        raise ValueError(f"kv_heads: got {kv_heads}, takes a divisor of {query_heads} query heads")
    if dtype not in DTYPES:
        raise TypeError(f"dtype: got {dtype}, takes one of {', '.join(map(str, DTYPES))}")
    return Sizes(batch, query_heads, kv_heads, head_dim, value_dim, dtype.itemsize)


def _rows(length: int | Tensor) -> tuple[int, Tensor | None]:
    """How many rows there are, and the offsets of sequences."""
    if not isinstance(length, Tensor):
        check_whole_number("length", length, least=0)
        return length, None
    offsets = length.detach().to("cpu", torch.int32) if length.dtype == torch.int32 else length
    last = int(offsets.flatten()[-1]) if offsets.numel() else 0
    check_offsets("length", offsets, last, torch.device("cpu"))
    return last, offsets


def longest_of(length: int, offsets: Tensor | None) -> int:
    """Rows of the longest sequence."""
    if offsets is None:
        return length
    return int(offsets.diff().max()) if len(offsets) > 1 else 0


def _check_fits(mask: Mask, length: int, offsets: Tensor | None, sizes: Sizes) -> None:
    """Refuse a mask whose captured tensors do not fit the call of all ranks."""
    longest = longest_of(length, offsets)
    batch = sizes.batch if offsets is None else len(offsets) - 1
    extents = Extents(batch, sizes.query_heads, longest, longest, packed=offsets is not None)
    captured: Captured = expanded(mask.key, mask.captured)
    complaint = misfit(mask.key, captured, extents)
    if complaint is not None:
        raise ValueError(f"mask: {complaint}")
