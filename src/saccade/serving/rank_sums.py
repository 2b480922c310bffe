"""Sums over ranks in compiled layers: small ones by memory that ranks read of one another.

A layer that is shared out ends each half with a sum over ranks, of few bytes where few tokens are
written. NCCL takes longer to begin one than to send it. Where all ranks are GPUs of one host that
reach each other's memory, a small sum is one kernel of PyTorch's symmetric memory instead: the
product is written where others read it, and each rank adds the parts of all. It adds them in the
order of ranks on every rank, so all have equal bits. Its multicast is never used.

NCCL's sums stay for what is large, for other dtypes, and for layers that are not compiled.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

MOST_BYTES = 256 * 1024  # of a sum that each rank adds for itself: others' parts come in whole
MOST_RANKS = 8
ALIGNED = 16  # bytes that the kernel reads at once
DTYPES = (torch.bfloat16, torch.float32)  # that the kernel adds
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

torch.library.define(
    "saccade::sum_over_ranks", "(Tensor rows, Tensor? weight, str group) -> Tensor"
)


class PeerMemory:
    """Memory of every rank of a group that all of them read.

    One sum at a time uses it: the kernel ends when all ranks have read, and calls follow one
    another on a stream.

    Args:
        group: of torch.distributed.
        nbytes: of the largest sum.
    """

    def __init__(self, group: Any, nbytes: int, device: torch.device):
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.group, self._name, self.nbytes = group, group.group_name, nbytes
        with torch.inference_mode(False), without_multicast():
            self._memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            self._handle = symmetric_memory.rendezvous(self._memory, self._name)

    def takes(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether a sum is small enough, and of numbers that are added here."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        return dtype in DTYPES and 0 < nbytes <= self.nbytes and nbytes % ALIGNED == 0

    def part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Where this rank writes its part."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        return self._memory[:nbytes].view(dtype).view(*shape)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in the order of ranks."""
        # Not the form that copies: it tells others before all threads of a block have copied.
        return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._name)


@contextlib.contextmanager
def without_multicast() -> Iterator[None]:
    """Have no memory bound to NVLink's multicast, which some hosts do not set up."""
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(NO_MULTICAST, None)
        else:
            os.environ[NO_MULTICAST] = before


_memory_of: dict[str, PeerMemory] = {}  # by the name of a group; graphs go on reading it


def _sum(rows: Tensor, weight: Tensor | None, group: str) -> Tensor:
    sizes = rows.shape if weight is None else (*rows.shape[:-1], weight.shape[0])
    memory = _memory_of.get(group)
    if memory is None or not memory.takes(sizes, rows.dtype):
        part = rows if weight is None else F.linear(rows, weight)
        return sum_by_messages(part, group)
    part = memory.part(sizes, rows.dtype)
    if weight is None:
        part.copy_(rows)
    else:
        torch.mm(rows.reshape(-1, rows.shape[-1]), weight.t(), out=part.view(-1, sizes[-1]))
    return memory.sum(part)


def sum_by_messages(part: Tensor, group: str) -> Tensor:
    """The sum of all ranks' parts as the group's own backend adds it."""
    messages = torch.ops._c10d_functional
    return messages.wait_tensor(messages.all_reduce(part, "sum", group))


def _empty(rows: Tensor, weight: Tensor | None, group: str) -> Tensor:
    size = rows.shape[-1] if weight is None else weight.shape[0]
    return rows.new_empty(*rows.shape[:-1], size)


torch.library.impl("saccade::sum_over_ranks", "CompositeExplicitAutograd", _sum)
torch.library.register_fake("saccade::sum_over_ranks", _empty)


# ---- which ranks have such memory ----------------------------------------------------------------


class Seat(NamedTuple):
    """Where a rank runs, and what it sees: compared before any memory is shared.

    Attributes:
        host: its name, and when it started. device: of the rank, by a number that no other has.
        reaches: such numbers of devices whose memory this one reads. reason: why there is none.
    """

    host: str
    device: str
    reaches: tuple[str, ...]
    reason: str


def make_peer_memory(ranks: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Have small sums of ranks go by memory that they read of one another: a collective.

    Args:
        ranks: of an engine (`Ranks`), which compare what they see.
        dtype: of what is added.

    Returns:
        Why they go by the group's own backend; "" where they do not.
    """
    group = ranks.group
    name, memory, reason = group.group_name, None, ""
    if dtype not in DTYPES:
        return f"{dtype} is not added by memory"
    reason = why_apart(ranks.gather(seat_of(device)))
    known = _memory_of.get(name)
    if reason or (known is not None and known.group is group):  # another may get an old name
        return reason
    try:
        memory = PeerMemory(group, MOST_BYTES, device)
    except Exception as error:  # whatever a driver refuses
        reason = (str(error) or type(error).__name__).splitlines()[0]
    # Before any rank adds: a kernel waits without end for a rank that has no such memory.
    reason = next(filter(None, ranks.gather(reason)), "")
    if not reason and memory is not None:
        reason = next(filter(None, ranks.gather(_why_wrong(memory, group, device))), "")
    if not reason and memory is not None:
        _memory_of[name] = memory
    return reason


def seat_of(device: torch.device) -> Seat:
    """Where this process runs, and whose memory its device reads."""
    if device.type != "cuda":
        return Seat("", "", (), f"the model is on {device}")
    if not _has_operator():
        return Seat("", "", (), "this PyTorch has no symmetric memory")
    here = torch.cuda.current_device() if device.index is None else device.index
    numbers = [
        str(torch.cuda.get_device_properties(each).uuid)
        for each in range(torch.cuda.device_count())
    ]
    reaches = tuple(
        number for each, number in enumerate(numbers)
        if each != here and torch.cuda.can_device_access_peer(here, each)
    )  # fmt: skip
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return Seat(f"{socket.gethostname()} {boot}", numbers[here], reaches, "")


def _has_operator() -> bool:
    try:  # the module defines what the library of kernels implements
        from torch.distributed import _symmetric_memory as symmetric_memory
    except ImportError:
        return False
    return hasattr(symmetric_memory, "rendezvous") and hasattr(
        torch.ops.symm_mem, "one_shot_all_reduce"
    )


def why_apart(seats: Sequence[Seat]) -> str:
    """Why ranks have no memory that all read; "" where they may."""
    for seat in seats:
        if seat.reason:
            return seat.reason
    if len(seats) > MOST_RANKS:
        return f"there are {len(seats)} ranks, of which at most {MOST_RANKS} add for themselves"
    if len({seat.host for seat in seats}) > 1:
        return "ranks are on several hosts"
    if len({seat.device for seat in seats}) < len(seats):
        return "ranks share a GPU"
    for rank, seat in enumerate(seats):
        for other, theirs in enumerate(seats):
            if other != rank and theirs.device not in seat.reaches:
                return f"the GPU of rank {rank} does not see, or read, that of rank {other}"
    return ""


def _why_wrong(memory: PeerMemory, group: Any, device: torch.device) -> str:
    """Why sums by this memory are not those of all parts in the order of ranks; "" if they are."""
    for dtype in DTYPES:
        for size in (ALIGNED // dtype.itemsize, 4096, memory.nbytes // dtype.itemsize):
            random = torch.Generator(device).manual_seed(group.rank() + size)
            own = torch.randn(size, generator=random, device=device).to(dtype)
            parts = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(parts, own, group=group)
            wanted = parts[0]
            for part in parts[1:]:
                wanted = wanted + part
            for _ in range(2):  # the second finds what the first has left
                found = memory.sum(memory.part((size,), dtype).copy_(own))
                if not torch.equal(found, wanted):
                    return f"{size} sums in {dtype} were not those of all ranks' parts"
    return ""


# ---- graphs --------------------------------------------------------------------------------------


def with_sums_by_memory(
    backend: Callable[..., Any], found: Callable[[int], None]
) -> Callable[..., Any]:
    """A backend of `torch.compile` whose graphs sum over ranks by `sum_over_ranks`.

    Args:
        found: is told how many sums a graph has.
    """

    def compiled(module: GraphModule, inputs: Any, **options: Any) -> Any:
        found(replace_sums(module.graph))
        module.recompile()
        return backend(module, inputs, **options)

    return compiled


def replace_sums(graph: Graph) -> int:
    """Have a graph's sums over ranks be `sum_over_ranks`, with the product before where it can be.

    Returns:
        How many there are.
    """
    count = 0
    for node in list(graph.nodes):
        wait = _wait_of(node)
        if wait is not None:
            _replace(graph, node, wait)
            count += 1
    return count


def _wait_of(node: Node) -> Node | None:
    """What waits for a sum over ranks; None of what is no such sum, or used before that."""
    messages = torch.ops._c10d_functional
    if node.op != "call_function" or node.target not in (
        messages.all_reduce, messages.all_reduce.default
    ):  # fmt: skip
        return None
    _, operation, group = node.args if len(node.args) == 3 else (None, None, None)
    users = list(node.users)
    if operation != "sum" or not isinstance(group, str) or len(users) != 1:
        return None
    waits = messages.wait_tensor, messages.wait_tensor.default
    return users[0] if users[0].target in waits else None


def _replace(graph: Graph, node: Node, wait: Node) -> None:
    part, _, group = node.args
    assert isinstance(part, Node)
    copies = [each for each in wait.users if _copies(each, part, wait)]
    product = len(copies) == 1 and _is_product(part) and _first_use(part, copies[0]) is node
    arguments: Mapping[bool, Sequence[Any]] = {True: part.args[:2], False: (part, None)}
    with graph.inserting_before(node):
        whole = graph.call_function(
            torch.ops.saccade.sum_over_ranks.default, (*arguments[product], group)
        )
    wait.replace_all_uses_with(whole)
    if product:
        copies[0].replace_all_uses_with(whole)
        graph.erase_node(copies[0])
    graph.erase_node(wait)
    graph.erase_node(node)
    if product:  # later uses read what was copied into it
        part.replace_all_uses_with(whole)
        graph.erase_node(part)


def _copies(node: Node, part: Node, whole: Node) -> bool:
    """Whether a node writes a sum over its part, in place."""
    return node.op == "call_method" and node.target == "copy_" and node.args == (part, whole)


def _is_product(node: Node) -> bool:
    """Whether a node multiplies rows by a weight, and adds nothing."""
    return (
        node.op == "call_function"
        and node.target is F.linear
        and not node.kwargs
        and (len(node.args) < 3 or node.args[2] is None)
    )


def _first_use(part: Node, copy: Node) -> Node | None:
    """The only use of a part before a sum is copied into it; None where there are several."""
    before: list[Node] = []
    for node in part.graph.nodes:
        if node is copy:
            break
        if node in part.users:
            before.append(node)
    return before[0] if len(before) == 1 else None
