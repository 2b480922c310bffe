"""DTensors in and out: rows that lie along a mesh's ranks as a plan deals them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.parallel.planner import Plan
from saccade.runtime.shards import any_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Rows = tuple[Tensor, Tensor, Tensor]


def local_rows(plan: Plan, rows: Rows, dim: int) -> tuple[Rows, DeviceMesh | None]:
    """This rank's rows of query, key and value, and the mesh where they are DTensors.

    Args:
        dim: along which rows lie.

    Raises:
        TypeError, ValueError: for DTensors beside plain tensors, of other ranks than the plan's, or
            that are not dealt along their rows.
    """
    if not any_sharded(*rows):
        return rows, None
    found: list[Any] = []
    for name, tensor in zip(("query", "key", "value"), rows, strict=True):
        if not any_sharded(tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__} beside DTensors, takes a DTensor")
        found.append(_local(plan, name, tensor, dim))
    mesh: DeviceMesh = found[0].device_mesh
    query, key, value = (each.to_local() for each in found)
    return (query, key, value), mesh


def _local(plan: Plan, name: str, tensor: Any, dim: int) -> Any:
    """A DTensor that is dealt as the plan's rows are; its parts may be of unequal length."""
    from torch.distributed.tensor import Shard

    mesh, takes = tensor.device_mesh, f"takes one dealt to the plan's ranks, placed as Shard({dim})"
    if plan.group is None or mesh.ndim != 1:
        raise ValueError(f"{name}: got a DTensor of a mesh of {mesh.ndim} dimensions, {takes}")
    ranks, of_plan = map(dist.get_process_group_ranks, (mesh.get_group(), plan.group))
    if ranks != of_plan:
        raise ValueError(f"{name}: got a DTensor of ranks {ranks}, {takes}, {of_plan}")
    (placement,) = tensor.placements
    if not isinstance(placement, Shard) or placement.dim % tensor.dim() != dim:
        raise ValueError(f"{name}: got a DTensor placed as {placement}, {takes}")
    if tensor.shape[dim] != plan.length:
        raise ValueError(
            f"{name}: got a DTensor of {tensor.shape[dim]} rows, takes the plan's {plan.length}"
        )
    return tensor


def as_dtensor(plan: Plan, rows: Tensor, mesh: DeviceMesh, dim: int) -> Any:
    """This rank's rows of a result, as the DTensor that all ranks have."""
    from torch.distributed.tensor import DTensor, Shard

    shape = list(rows.shape)
    shape[dim] = plan.length
    stride = [prod(shape[at + 1 :]) for at in range(len(shape))]
    return DTensor.from_local(
        rows.contiguous(), mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape),
        stride=tuple(stride),
    )  # fmt: skip
