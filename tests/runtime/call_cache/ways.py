"""Each way of using a call, three times in one process: cold, again, and after plain calls.

Run as a program, it prints a line of JSON for each operation: what each way computed and saw. Each
operation has a process of its own, forked once all is imported, which takes longer than the calls.
The first way of all runs before any other call of the process; what the others start with is
cleared by `call_cache.forget`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.export
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import saccade
from saccade import masks
from saccade.runtime import arguments, call_cache, validation

# ---- operations ------------------------------------------------------------------------------


class Operation(NamedTuple):
    """A call of tensors alone, all of whose results are tensors."""

    call: Callable[..., tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    differentiable: bool = True

    def leaves(self, gradients: bool | None = None) -> list[Tensor]:
        """The same numbers every time."""
        generator = torch.Generator().manual_seed(0)
        wanted = self.differentiable if gradients is None else gradients
        made = [torch.randn(shape, generator=generator) for shape in self.shapes]
        return [tensor.requires_grad_(wanted) for tensor in made]


CAUSAL = masks.causal()
OFFSETS = torch.tensor([0, 3, 12], dtype=torch.int32)
TABLE = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
LENGTHS = torch.tensor([5, 8], dtype=torch.int32)


def dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    return saccade.attention(*tensors, mask=CAUSAL, return_lse=True)  # type: ignore[call-overload]


def half(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Every result: the residual of the output too, which only the backward pass sees."""
    call: Any = saccade.attention
    options = {"return_lse": True, "return_max_logit": True}
    found = call(*(tensor.half() for tensor in tensors), mask=CAUSAL, **options)
    return tuple(result.float() for result in found)


def packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    call: Any = saccade.attention_varlen
    return call(*tensors, OFFSETS, mask=CAUSAL, return_lse=True)


def paged(*tensors: Tensor, implementation: str = "cpu") -> tuple[Tensor, ...]:
    call: Any = saccade.attention_paged
    options = {"return_lse": True, "implementation": implementation}
    return call(*tensors, TABLE, LENGTHS, mask=CAUSAL, **options)


def linear(*tensors: Tensor) -> tuple[Tensor, ...]:
    output, state = saccade.linear_attention(*tensors, return_state=True)
    return output, state.kv, state.key_sum


def linear_packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    call: Any = saccade.linear_attention_varlen
    output, state = call(*tensors, OFFSETS, return_state=True)
    return output, state.kv, state.key_sum


DENSE = ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
PACKED = ((12, 4, 8), (12, 2, 8), (12, 2, 8))
PAGED = ((2, 4, 3, 8), (4, 2, 4, 8), (4, 2, 4, 8))
OPERATIONS = {
    "dense": Operation(dense, DENSE),
    "float16": Operation(half, DENSE),
    "packed": Operation(packed, PACKED),
    "paged": Operation(paged, PAGED, differentiable=False),
    "paged reference": Operation(functools.partial(paged, implementation="reference"), PAGED),
    "linear": Operation(linear, DENSE),
    "linear packed": Operation(linear_packed, PACKED),
}


# ---- ways ------------------------------------------------------------------------------------

Seen = list[Any]
Way = Callable[[Operation, Seen], list[Tensor]]
WAYS: dict[str, Way] = {}
COMPUTES_ELSE = {"autocast", "FakeTensor", "requires_grad toggled"}  # than plain calls


def way(name: str) -> Callable[[Way], Way]:
    return lambda function: WAYS.setdefault(name, function)


def differentiated(operation: Operation, results: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Results, and the gradients of a sum of them all where there are gradients."""
    found = [result.detach() for result in results]
    if not any(leaf.requires_grad for leaf in leaves):
        return found
    total = sum(result.square().sum() for result in results)
    return [*found, *torch.autograd.grad(total, leaves)]  # pyright: ignore[reportArgumentType, reportCallIssue]


def plainly(operation: Operation, leaves: list[Tensor] | None = None) -> list[Tensor]:
    leaves = operation.leaves() if leaves is None else leaves
    return differentiated(operation, operation.call(*leaves), leaves)


@way("checkpoint")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    leaves = operation.leaves()
    results = checkpoint(operation.call, *leaves, use_reentrant=False)
    return differentiated(operation, results, leaves)


@way("reentrant checkpoint")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    leaves = operation.leaves()
    results = checkpoint(operation.call, *leaves, use_reentrant=True)
    for result in results:
        if operation.differentiable:
            seen.append(type(result.grad_fn).__name__)
    found = [result.detach() for result in results]
    if not operation.differentiable:
        return found
    total: Any = sum(result.square().sum() for result in results)
    total.backward()
    return [*found, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@way("selective checkpoint")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Policy:
        seen.append((str(op), context.is_recompute))
        return Policy.MUST_SAVE if "saccade" in str(op) else Policy.PREFER_RECOMPUTE

    leaves = operation.leaves()
    results = checkpoint(
        operation.call, *leaves, use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
    )  # fmt: skip
    return differentiated(operation, results, leaves)


@way("save_on_cpu")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    with save_on_cpu():
        return plainly(operation)


@way("saved-tensor hooks")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    def noted(what: str, tensor: Tensor) -> Tensor:
        seen.append((what, tuple(tensor.shape), str(tensor.dtype), float(tensor.sum())))
        return tensor

    pack, unpack = functools.partial(noted, "pack"), functools.partial(noted, "unpack")
    with saved_tensors_hooks(pack, unpack):
        return plainly(operation)


@way("dispatch mode")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    leaves = operation.leaves()
    with Mode():
        return plainly(operation, leaves)


def name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or str(function)


@way("function mode")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
            seen.append(name_of(func))
            return func(*args, **(kwargs or {}))

    leaves = operation.leaves()
    with Mode():
        return plainly(operation, leaves)


@way("FakeTensor")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(leaf) for leaf in operation.leaves()]
        found = plainly(operation, leaves)  # pyright: ignore[reportArgumentType]
    seen.extend((tuple(rows.shape), rows.stride(), str(rows.dtype)) for rows in found)
    return []


@way("make_fx")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    traced: Any = make_fx(lambda *leaves: plainly(operation, list(leaves)))
    leaves = operation.leaves()
    graph = traced(*leaves)
    seen.extend(str(node.target) for node in graph.graph.nodes)
    return [result.detach() for result in graph(*leaves)]


class Module(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return self.call(query, key, value)


@way("export")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    leaves = operation.leaves()
    program = torch.export.export(Module(operation.call), tuple(leaves), strict=False)
    seen.extend(str(node.target) for node in program.graph.nodes)
    return differentiated(operation, program.module()(*leaves), leaves)


@way("vmap")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    leaves = operation.leaves()
    stacked = [torch.stack([leaf, leaf * 0.5]).detach() for leaf in leaves]
    stacked = [leaf.requires_grad_(operation.differentiable) for leaf in stacked]
    results = torch.func.vmap(operation.call)(*stacked)
    found = differentiated(operation, results, stacked)
    seen.extend(digest(one[1]) for one in found)
    return [one[0] for one in found]


@way("func.grad")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    def total(*leaves: Tensor) -> Any:
        results = operation.call(*leaves)
        return sum(result.square().sum() for result in results), results

    leaves = operation.leaves(gradients=False)
    gradients, results = torch.func.grad(total, argnums=(0, 1, 2), has_aux=True)(*leaves)
    return [*results, *gradients]


@way("inference mode")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    with torch.inference_mode():
        leaves = operation.leaves(gradients=False)
        results = operation.call(*leaves)
        seen.extend(result.is_inference() for result in results)
        return [result.clone() for result in results]


@way("autocast")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plainly(operation)


@way("anomaly mode")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    with torch.autograd.detect_anomaly():
        return plainly(operation)


def graph_of(node: Any) -> Any:
    """The nodes behind a node, by name."""
    return [node.name(), *(graph_of(one) if one else None for one, _ in node.next_functions)]


@way("hooks")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    def noted(what: str, *tensors: Any) -> None:
        sums = [None if t is None else float(t.sum()) for part in tensors for t in part]
        seen.append((what, sums))

    leaves = operation.leaves()
    results = operation.call(*leaves)
    if operation.differentiable:
        node: Any = results[0].grad_fn
        seen.append(graph_of(node))
        node.register_prehook(lambda grads: noted("before", grads))
        node.register_hook(lambda found, grads: noted("after", found, grads))
        leaves[0].register_hook(lambda grad: noted("leaf", [grad]))
        results[0].register_hook(lambda grad: noted("output", [grad]))
    return differentiated(operation, results, leaves)


@way("subclass")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None) -> Any:
            seen.append(name_of(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    leaves = operation.leaves()
    results = operation.call(leaves[0].as_subclass(Own), *leaves[1:])
    seen.extend(type(result).__name__ for result in results)
    return [found.as_subclass(Tensor) for found in differentiated(operation, results, leaves)]


@way("requires_grad toggled")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    found: list[Tensor] = []
    for which in (None, 0, 1, 2):
        leaves = operation.leaves(gradients=False)
        if which is not None and operation.differentiable:
            leaves[which].requires_grad_()
        results = operation.call(*leaves)
        seen.extend(result.requires_grad for result in results)
        found += [result.detach() for result in results]
        if results[0].requires_grad:
            found += torch.autograd.grad(results[0].sum(), [leaves[which or 0]])
    return found


@way("profiler")
def _(operation: Operation, seen: Seen) -> list[Tensor]:
    leaves = operation.leaves()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = plainly(operation, leaves)
    seen.extend(event.name for event in profile.events())  # pyright: ignore[reportOptionalIterable]
    return found


# ---- three times -----------------------------------------------------------------------------


def digest(tensor: Tensor) -> str:
    """What tells a tensor's bits, shape and dtype from others'."""
    numbers = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    kind = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    return hashlib.sha256(kind + numbers).hexdigest()[:16]


def once(name: str, operation: Operation) -> dict[str, Any]:
    """What a way computed and saw, or how it failed."""
    seen: Seen = []
    try:
        found = WAYS[name](operation, seen)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"results": [digest(one) for one in found], "seen": seen, "_found": found}


def beside_plain(name: str, operation: Operation, found: list[Tensor]) -> float:
    """The farthest that results lie from those of a plain call; 0 where they are others."""
    if name in COMPUTES_ELSE:
        return 0.0
    plain = plainly(operation)[: len(found)]
    return max((float((a - b).abs().max()) for a, b in zip(found, plain, strict=True)), default=0.0)


def observe(operation: Operation) -> dict[str, Any]:
    """All ways, in all three states of the memory of calls."""
    report: dict[str, Any] = {}
    for name in WAYS:
        runs = {"cold": once(name, operation), "again": once(name, operation)}
        call_cache.forget()
        for gradients in (False, operation.differentiable):
            operation.call(*operation.leaves(gradients))
        runs["after plain calls"] = once(name, operation)
        far = [beside_plain(name, operation, run.pop("_found", [])) for run in runs.values()]
        report[name] = {"runs": runs, "far": max(far)}
        call_cache.forget()
    return report


def main() -> None:
    """Print what is observed of each operation."""
    torch.set_num_threads(1)
    for module in (arguments, validation, call_cache):
        # As on a GPU: else calls with offsets would be checked every time.
        module.values_readable = lambda tensor: False  # type: ignore[attr-defined]
    # An export imports for a second, which each process would do anew.
    torch.export.export(torch.nn.Identity(), (torch.zeros(1),), strict=False)
    for operation in OPERATIONS.values():
        if process := os.fork():
            _, status = os.waitpid(process, 0)
            if status:
                sys.exit(os.waitstatus_to_exitcode(status))
        else:
            print(json.dumps(observe(operation)), flush=True)
            return


if __name__ == "__main__":
    main()
