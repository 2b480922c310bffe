"""Agreement: ranks say what they are about to do, and learn of differences before they wait.

A collective that ranks enter with different sizes hangs or mixes numbers up. So a call first
exchanges one number that stands for all that must be equal; where it differs, ranks exchange the
words behind it, and each raises the same error. What a rank could not even begin counts as a
difference too.

Each rank also notes in the group's store where it is. An error of a collective, a time-out above
all, then says where the others were last.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.modifiers.expression import Captured
from saccade.modifiers.graph_constants import outside_graph
from saccade.modifiers.modifier import written

LOOK = timedelta(seconds=0.5)  # how long a note of another rank is waited for
MOST_RANKS_NAMED = 8


def digest_of(tensor: Tensor) -> str:
    """A tensor's shape, dtype and contents in a few letters."""
    held = tensor.detach().cpu().contiguous()
    content = held.view(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    said = f"{tuple(held.shape)} {held.dtype} ".encode()
    return hashlib.sha256(said + content).hexdigest()[:12]


def described(key: str, captured: Captured, contents: bool) -> str:
    """A mask or score in words that are equal where it computes the same."""
    tensors = [
        digest_of(tensor) if contents else f"{tuple(tensor.shape)} {tensor.dtype}"
        for tensor in captured.tensors
    ]
    return " ".join([written(key, captured) or "none", *tensors])


def whole_tensors(
    sinks: Tensor | None, mask: Captured | None, score: Captured
) -> dict[str, Tensor]:
    """Tensors of a call that every rank has whole, by name."""
    named = {} if sinks is None else {"sinks": sinks}
    for name, captured in ("mask", mask), ("score", score):
        tensors = () if captured is None else captured.tensors
        named |= {f"{name}'s tensor {place}": each for place, each in enumerate(tensors)}
    return {name: tensor.detach() for name, tensor in named.items()}


def checked_plan(plan: Any) -> None:
    """Refuse what is no plan, or one of simulated ranks, which cannot send."""
    from saccade.parallel.planner import Plan

    if not isinstance(plan, Plan):
        raise TypeError(f"plan: got {type(plan).__name__}, takes a saccade.parallel.Plan")
    if plan.ranks > 1 and plan.group is None:
        raise ValueError(
            f"plan: got one of {plan.ranks} simulated ranks, takes one of a process group"
        )


@outside_graph
def dealt_facts(plan: Any) -> dict[str, str]:
    """How many rows there are and where they lie, in words."""
    known = plan.memory.get("dealt facts")
    if known is None:
        offsets = "" if plan.cu_seqlens is None else f" in sequences {digest_of(plan.cu_seqlens)}"
        dealt = digest_of(torch.cat([plan.dealt.edges, plan.dealt.owners]))
        known = {"length": f"{plan.length}{offsets}", "rows dealt": dealt}
        plan.memory["dealt facts"] = known
    return known


def agree(
    plan: Any,
    facts: Mapping[str, str],
    fault: BaseException | None,
    device: torch.device,
    seed: Tensor | None = None,
    whole: Mapping[str, Tensor] | None = None,
) -> None:
    """Compare with all ranks what this one is about to do.

    Args:
        plan: the call's plan.
        facts: what must be equal, by the names of arguments.
        fault: why this rank cannot begin.
        device: where this rank's rows lie.
        seed: of dropout, another one in each call; it must be equal, too.
        whole: tensors that every rank has, by name: equal in every number, which is read only where
            ranks compare.

    Raises:
        ValueError: on every rank, naming what differs and who has what.
    """
    words = {**facts, "error": "" if fault is None else f"{type(fault).__name__}: {fault}"}
    kind = number = _number_of(words)
    known: set[int] = plan.memory.setdefault("agreed", set())
    device = _device(plan.group, device)
    if fault is None and kind in known and not _always(plan, device):
        return
    if seed is not None:
        words["seed of dropout, which torch.manual_seed sets"] = str(int(seed))
    for name, tensor in (whole or {}).items():
        words[f"{name}, whole on every rank"] = f"numbers {digest_of(tensor)}"
    number = _number_of(words)
    own = torch.tensor([number], dtype=torch.int64, device=device)
    numbers = [torch.empty_like(own) for _ in range(plan.ranks)]
    # NCCL sends objects from the current device, which a program may have left at the first GPU.
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current, reporting(plan, "comparing what ranks are about to do"):
        dist.all_gather(numbers, own, group=plan.group)
        if torch.cat(numbers).eq(number).all() and fault is None:
            known.add(kind)
            return
        everyone: list[Any] = [None] * plan.ranks
        dist.all_gather_object(everyone, words, group=plan.group)
    if fault is not None:
        raise fault
    raise ValueError(differences(everyone))


def _number_of(words: Mapping[str, str]) -> int:
    """One number that stands for words."""
    text = repr(sorted(words.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def differences(everyone: list[dict[str, str]]) -> str:
    """What differs among ranks' words, by name."""
    failed = [(rank, words["error"]) for rank, words in enumerate(everyone) if words["error"]]
    if failed:
        said = "; ".join(f"rank {rank}: {error}" for rank, error in failed[:MOST_RANKS_NAMED])
        return f"parallel: another rank could not begin this call: {said}"
    lines = []
    for name in dict.fromkeys(name for words in everyone for name in words):
        ranks_of: dict[str, list[int]] = {}
        for rank, words in enumerate(everyone):
            ranks_of.setdefault(words.get(name, "nothing"), []).append(rank)
        if len(ranks_of) > 1:
            parts = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items()]
            lines.append(f"{name}: got {', '.join(parts[:MOST_RANKS_NAMED])}")
    return "; ".join(lines) + "; takes the same on every rank"


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:MOST_RANKS_NAMED]))
    more = " ..." if len(ranks) > MOST_RANKS_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"


def _device(group: Any, rows: torch.device) -> torch.device:
    """Where a group compares numbers: beside the rows by NCCL, else on the CPU."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    return rows if rows.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _always(plan: Any, device: torch.device) -> bool:
    return plan.verify == "always" or (plan.verify == "auto" and device.type == "cpu")


# ---- where ranks are ----------------------------------------------------------------------------


@contextlib.contextmanager
def reporting(plan: Any, what: str) -> Iterator[None]:
    """Add to the error of a collective where each rank was last.

    Raises:
        RuntimeError: from the collective's own.
    """
    note(plan, what)
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(_where(plan, what)) from error


def note(plan: Any, what: str) -> None:
    """Note where this rank is, for others to read."""
    place = plan.memory.setdefault("place", [0, ""])
    if place[1] == what:
        return
    place[1] = what
    if dist.get_backend(plan.group) == "nccl":  # whose watchdog ends the process by itself
        return
    store = _store(plan.group)
    if store is not None:
        with contextlib.suppress(RuntimeError):
            store.set(f"saccade.parallel/{plan.rank}", f"call {place[0]}, {what}")


def begin(plan: Any, call: str) -> None:
    """Note that this rank begins a call."""
    place = plan.memory.setdefault("place", [0, ""])
    place[0] += 1
    note(plan, f"{call} begins")


def _where(plan: Any, what: str) -> str:
    store, places = _store(plan.group), []
    for rank in range(plan.ranks):
        if rank == plan.rank or store is None:
            continue
        said = "nowhere that it told"
        with contextlib.suppress(RuntimeError, ValueError):
            name = f"saccade.parallel/{rank}"
            store.wait([name], LOOK)
            said = store.get(name).decode()
        places.append(f"rank {rank} was last at {said}")
        if len(places) == MOST_RANKS_NAMED:
            break
    call = plan.memory.get("place", [0])[0]
    return (
        f"parallel: rank {plan.rank} failed at call {call}, {what}; " + "; ".join(places)
        + "; a rank that has ended, or that makes other calls, keeps the others waiting"
    )  # fmt: skip


def _store(group: Any) -> Any:
    """The store by which a group's ranks found each other; None where PyTorch does not say."""
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if find is None:
        return None
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        return find(group)
    return None
