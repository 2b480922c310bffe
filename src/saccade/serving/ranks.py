"""Ranks: one engine over several processes, each of which holds a part of every layer's heads.

transformers shares a model out (`DistributedConfig(tp_size=…)`, or `tp_plan="auto"`); its layers
bring partial sums together, so that logits are whole on every rank. Requests come in at rank 0.
Before each step it tells the others, in one message, what came in or was cancelled since the last
one; every rank then plans the same step from the same requests, computes its heads' part of it in
pages of its own, and draws the same tokens from the same logits. The message says, too, where rank
0 stands, and a rank that stands elsewhere ends with an error instead of going on with other tokens.

Messages go by gloo, whatever the model's own go by: a rank that has ended closes its connections,
and the others learn of it at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from textwrap import shorten
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from saccade import integrations
from saccade.serving.decoding import Sampling, check_real
from saccade.serving.rank_sums import MOST_BYTES
from saccade.serving.request import Limits, Request

T = TypeVar("T")

# Projections whose output has the heads of keys, beside others or not, as models name them.
KEYS_OF = ("k_proj", "qkv_proj", "query_key_value", "Wqkv")
END_SECONDS = 10.0  # that the last word may take: ranks that do not follow never hear it
MOST_LETTERS = 200  # of an error that another library raised
ADVICE = "a rank that ends, or hangs, ends the engine on all: start all of them again"


class Arrival(NamedTuple):
    """A request, and those that follow it, as rank 0 got them.

    Attributes:
        samplings: of each, by its number.
    """

    samplings: dict[int, Sampling]
    prompt: list[int]
    limits: Limits

    @staticmethod
    def of(leader: Request) -> Arrival:
        """What is told of a request."""
        samplings = {each.number: each.sampling for each in (leader, *leader.followers)}
        return Arrival(samplings, leader.prompt, leader.limits)


class Told(NamedTuple):
    """What all ranks do next.

    Attributes:
        kind: "step", "cancel", "wait" (nothing, for now) or "end".
        stands: a number for all that a rank has done so far.
        arrivals: that came in since the last message. cancelled: the number of a request.
    """

    kind: str
    stands: int = 0
    arrivals: Sequence[Arrival] = ()
    cancelled: int = -1


class Ranks:
    """The processes that share a model.

    Args:
        group: of these processes, of torch.distributed.
        seconds: that ranks wait for one another.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float):
        self.rank, self.count, self.group = group.rank(), group.size(), group
        members = dist.get_process_group_ranks(group)
        self._first = members[0]
        # Only these processes call this, whatever others there are.
        self._group: Any = dist.new_group(
            members, timedelta(seconds=seconds), backend="gloo", use_local_synchronization=True
        )
        self._lock, self.seconds = threading.Lock(), seconds
        self._last = time.monotonic()
        self.failure = ""
        self.sums = ""  # why none go by memory that ranks read of one another
        self._end: Any = None

    @staticmethod
    def of(model: Any, seconds: float) -> Ranks | None:
        """Those of a model that transformers has shared out; None of one that is whole.

        Raises:
            ValueError: by name, for a model whose ranks an engine cannot serve.
        """
        found = {
            name: parameter
            for name, parameter in getattr(model, "named_parameters", dict)()
            if type(parameter).__name__ == "DTensor"
        } if dist.is_available() and dist.is_initialized() else {}  # fmt: skip
        if not found:
            return None
        got = f"model: got {type(model).__name__}"
        meshes = {parameter.device_mesh for parameter in found.values()}
        dims = {name for mesh in meshes for name in (mesh.mesh_dim_names or ())}
        if len(meshes) > 1 or next(iter(meshes)).ndim > 1 or dims - {"tp"}:
            said = ", ".join(sorted(dims)) or "several meshes"
            raise ValueError(
                f"{got} shared out over {said}, takes one of tensor parallelism alone "
                "(DistributedConfig(tp_size=…))"
            )
        group = next(iter(meshes)).get_group()
        _check_heads(model, found, group.size(), got)
        return Ranks(group, seconds)

    # ---- what all say ----------------------------------------------------------------------------

    def gather(self, said: T) -> list[T]:
        """What each rank says: a collective."""
        everyone: list[Any] = [None] * self.count
        with self._lock, self._reporting("comparing what ranks were given"):
            dist.all_gather_object(everyone, said, group=self._group)
            self._last = time.monotonic()
        return everyone

    def agree(self, facts: Mapping[str, object]) -> None:
        """Compare what must be equal on all ranks.

        Raises:
            ValueError: on every rank, naming what differs and who has what.
        """
        everyone = self.gather({name: str(value) for name, value in facts.items()})
        lines = []
        for name in facts:
            said = [each[name] for each in everyone]
            if len(set(said)) > 1:
                got = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(said))
                lines.append(f"{name}: got {got}")
        if lines:
            raise ValueError("; ".join(lines) + "; takes the same on every rank")

    # ---- what rank 0 tells -----------------------------------------------------------------------

    def tell(self, told: Told) -> None:
        """Tell all other ranks what they do next."""
        with self._lock:
            self._check()
            with self._reporting(f"telling of a {told.kind}"):
                _send(told, self._group, self._first)
            self._last = time.monotonic()

    def hear(self) -> Told:
        """Wait for what rank 0 tells."""
        self._check()
        with self._reporting("waiting for rank 0"):
            return _receive(self._group, self._first)

    def lead(self) -> None:
        """Tell others from now on, from a thread, that rank 0 is there where nothing else is told;
        and in the end that this is the end."""
        self._end = weakref.finalize(self, _say_end, self._group, self._first)
        every = self.seconds / 4
        here = weakref.ref(self)

        def run() -> None:
            while (ranks := here()) is not None and not ranks.failure:
                rest = ranks._last + every - time.monotonic()
                if rest <= 0:
                    try:
                        ranks.tell(Told("wait"))
                    except RuntimeError:
                        return  # the next step says so
                    rest = every
                ranks = None  # so that it may end meanwhile
                time.sleep(max(rest, every / 8))

        threading.Thread(target=run, name="saccade-ranks", daemon=True).start()

    def close(self) -> None:
        """Tell the others that this is the end."""
        with self._lock:
            self.failure = self.failure or "ranks: the engine is closed"
            if self._end is not None:
                self._end()

    # ---- what goes wrong -------------------------------------------------------------------------

    def fail(self, error: BaseException, doing: str) -> NoReturn:
        """Note that this engine cannot go on: others wait elsewhere than this rank.

        Raises:
            RuntimeError: from the error, which says so.
        """
        said = shorten(str(error) or type(error).__name__, MOST_LETTERS)
        if self._end is not None:
            self._end.detach()  # which others would take for a good one
        self.failure = f"ranks: rank {self.rank} of {self.count} failed while {doing}: {said}"
        if not isinstance(error, Exception):
            raise error
        raise RuntimeError(f"{self.failure}; {ADVICE}") from error

    def _check(self) -> None:
        if self.failure:
            raise RuntimeError(f"{self.failure}; {ADVICE}")

    def _reporting(self, doing: str) -> _Reporting:
        return _Reporting(self, doing)

    def differ(self, stands: int, told: Told) -> NoReturn:
        """Refuse to go on from elsewhere than rank 0 does."""
        self.failure = (
            f"ranks: rank {self.rank} has come to other tokens or pages than rank 0 ({stands:08x}, "
            f"not {told.stands:08x})"
        )
        raise RuntimeError(f"{self.failure}; {ADVICE}")

    def explain(self, kv_heads: Sequence[int]) -> str:
        """How the model is shared out."""
        heads = ", ".join(map(str, sorted(set(kv_heads))))
        backend = dist.get_backend(self.group)
        if self.sums:
            sums = f"their sums go by {backend}: {self.sums}"
        else:
            sums = (
                f"sums of at most {MOST_BYTES // 1024} KiB in their layers go by memory that all "
                f"of them read, in the order of ranks, others by {backend}"
            )
        return (
            f"{self.count} ranks, each with {heads} kv heads of every layer; requests come in at "
            f"rank 0; {sums}"
        )


class _Reporting:
    """Says of a failed message which rank waited for what."""

    def __init__(self, ranks: Ranks, doing: str):
        self._ranks, self._doing = ranks, doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            self._ranks.fail(error, self._doing)


def read_ranks(model: Any, seconds: object) -> Ranks | None:
    """The ranks of a model that is shared out, for an engine.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """
    check_real("rank_timeout", seconds)
    if not (isinstance(seconds, (int, float)) and 0 < seconds < 1e9):
        raise ValueError(f"rank_timeout: got {seconds}, takes a positive number of seconds")
    return Ranks.of(model, float(seconds))


def _check_heads(model: Any, found: Mapping[str, Any], ranks: int, got: str) -> None:
    """Refuse what ranks cannot share: heads that they do not divide, and states."""
    from torch.distributed.tensor import Shard

    if integrations.transformers.StateLayers.of(model) is not None:
        raise ValueError(
            f"{got}, whose layers keep states of sequences, over {ranks} ranks; takes layers that "
            "keep keys and values alone, or one process"
        )
    shared = any(
        name.split(".")[-2] in KEYS_OF and isinstance(parameter.placements[0], Shard)
        for name, parameter in found.items()
    )
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for number in set(heads if isinstance(heads, (list, tuple)) else [heads]):
        if shared and number % ranks:
            raise ValueError(
                f"{got} with {number} kv heads over {ranks} ranks, takes kv heads that the ranks "
                "divide"
            )


# ---- messages ------------------------------------------------------------------------------------

KINDS = ("step", "cancel", "wait", "end")


def _send(told: Told, group: Any, first: int) -> None:
    """One short message, and another one where requests came in."""
    dist.broadcast(_written(told), first, group=group)
    if told.arrivals:
        dist.broadcast_object_list([list(told.arrivals)], first, group=group)


def _written(told: Told) -> torch.Tensor:
    number = KINDS.index(told.kind)
    return torch.tensor([number, told.stands, told.cancelled, len(told.arrivals)])


def _receive(group: Any, first: int) -> Told:
    said = torch.empty(4, dtype=torch.int64)
    dist.broadcast(said, first, group=group)
    number, stands, cancelled, count = said.tolist()
    arrivals: list[Any] = [[]]
    if count:
        dist.broadcast_object_list(arrivals, first, group=group)
    return Told(KINDS[number], stands, arrivals[0], cancelled)


def _say_end(group: Any, first: int) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # the others, or the group, have ended
        work: Any = dist.broadcast(_written(Told("end")), first, group=group, async_op=True)
        work.wait(timedelta(seconds=END_SECONDS))
