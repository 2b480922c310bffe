"""Cases of linear attention and the gated delta rule over ranks, beside those of attention.

Each compares a call over ranks, its last state and all gradients, with the float64 oracle of the
whole call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from saccade import masks, parallel
from saccade.testing import make_delta_case, make_linear_case
from saccade.testing.delta import expected as delta_expected
from saccade.testing.linear import LinearCase
from saccade.testing.linear import expected as linear_expected
from saccade.testing.oracle import assert_within

ROWS = 40
SEQUENCES = (9, 0, 30, 1, 8)
WHOLE = ("kv", "key_sum", "initial_state", "state")  # as every rank has them


CAUSAL = masks.causal()  # several pieces on a rank
TOGETHER = masks.window(0)  # one on each, as no row costs more than another


def plan_of(group: Any, packed: bool, rows: int, mask: Any = CAUSAL) -> parallel.Plan:
    """Rows dealt for attention under a mask."""
    offsets = torch.tensor([0, *SEQUENCES]).cumsum(0).int()
    return parallel.plan(mask, offsets if packed else rows, group)


def shard(plan: parallel.Plan, name: str, tensor: Tensor, packed: bool) -> Tensor:
    """This rank's rows of a tensor of a call; all of what has no rows."""
    if name in WHOLE or (name == "decay" and tensor.dim() == 1):
        return tensor
    return plan.shard(tensor, 0 if packed else 2)


def results(
    made: Any, group: Any, compiled: Any = None, mask: Any = CAUSAL, **options: Any
) -> dict[str, Tensor]:
    """Output, last state and gradients of the whole, from every rank's part of them.

    compiled: what makes a graph of a call. mask: by which rows are dealt.
    """
    packed = made.cu_seqlens is not None
    rows = 0 if packed else made.tensors["key"].shape[2]
    plan = plan_of(group, packed, rows, mask)
    leaves = {
        name: shard(plan, name, tensor, packed).clone().requires_grad_()
        for name, tensor in made.tensors.items()
    }
    positional, keywords = made.arguments(leaves)
    keywords = {
        name: each for name, each in keywords.items() if name not in ("align", "key_lengths")
    }
    kind = "linear" if isinstance(made, LinearCase) else "delta"
    name = "linear_attention" if kind == "linear" else "gated_delta_rule"
    call = getattr(parallel, name + "_varlen" * packed)
    call = call if compiled is None else compiled(call)
    positional = positional[: 3 if kind == "linear" else 4]
    keywords["return_state"] = True
    output, state = call(*positional, plan=plan, **keywords, **options)
    found = {"output": output, **(
        {"kv": state.kv, "key_sum": state.key_sum} if kind == "linear" else {"state": state}
    )}  # fmt: skip
    # The loss is the sum of ranks': the state's part of it is that of the first one.
    first = float(dist.get_rank(group) == 0)
    weights = [
        shard(plan, which, made.grads[which], packed).to(each.dtype)
        * (1.0 if which == "output" else first)
        for which, each in found.items()
    ]
    grads = torch.autograd.grad(list(found.values()), list(leaves.values()), weights)
    found = {which: each.detach() for which, each in found.items()}
    found |= {f"grad_{which}": each for which, each in zip(leaves, grads, strict=True)}
    whole = {}
    for which, each in found.items():
        leaf = which.removeprefix("grad_")
        alone = leaf in WHOLE or (leaf == "decay" and made.tensors["decay"].dim() == 1)
        whole[which] = each if alone else plan.unshard(each.double(), 0 if packed else 2)
    return whole


def compare(group: Any, kind: str, mask: Any = CAUSAL, **description: Any) -> None:
    """All results within the bound that one process has."""
    linear = kind == "linear"
    made: Any = (make_linear_case if linear else make_delta_case)(**description)
    found = results(made, group, mask=mask)
    if dist.get_rank(group) == len(str(made.description)) % dist.get_world_size(group):
        exact, allowed = (linear_expected if linear else delta_expected)(made)
        assert_within(found, exact, allowed, str(made.description))
