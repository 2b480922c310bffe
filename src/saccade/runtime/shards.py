"""Shards: calls on DTensors, each rank computing the batch entries or heads that it holds.

No rank needs another's rows for that, so a call takes each rank's local tensors, and its result is
sharded as its query is. Masks and scores see the numbers of the whole call. Gradients of what is
whole on every rank, though each computed a part, are partial sums, which DTensor adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.masks import Mask, as_mask
from saccade.modifiers.modifier import ShardRange, restricted
from saccade.runtime.arguments import check_flag
from saccade.scores import Score, as_score

BATCH, HEADS = "batch", "heads"
Modified = TypeVar("Modified", Mask, Score)


def any_sharded(*tensors: Any) -> bool:
    """Whether a DTensor is among them, of which nothing is imported to see it."""
    return any([type(tensor).__name__ == "DTensor" for tensor in tensors])


class Where(NamedTuple):
    """Which dimension of a tensor counts batch entries, and which counts heads."""

    batch: int | None
    heads: int | None


DENSE = Where(0, 1)
PACKED = Where(None, 1)
OF_HEADS = Where(None, 0)
OF_BATCH = Where(0, None)
OF_NEITHER = Where(None, None)


class Split:
    """How a call is split along each dimension of a mesh: by batch, by heads or not at all."""

    def __init__(self, query: Any, where: Where, name: str = "query") -> None:
        """name: the argument whose placement says it."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not isinstance(query, DTensor):
            raise TypeError(
                f"{name}: got {type(query).__name__} beside DTensors, takes a DTensor as well"
            )
        self.name = name
        self.mesh, self.placements = query.device_mesh, query.placements
        self.split_by: list[str | None] = []  # for each dimension of the mesh
        for placement in self.placements:
            if isinstance(placement, Shard) and placement.dim % query.dim() == where.batch:
                self.split_by.append(BATCH)
            elif isinstance(placement, Shard) and placement.dim % query.dim() == where.heads:
                self.split_by.append(HEADS)
            elif isinstance(placement, Replicate):
                self.split_by.append(None)
            else:
                takes = "Shard(0) (batch), " * (where.batch == 0) + "Shard(1) (heads)"
                raise ValueError(
                    f"{name}: got the placement {placement}, takes {takes} or Replicate(); "
                    "redistribute it"
                )
        # Asked one by one: torch 2.11 does not trace a mesh's shape.
        self.sizes = [self.mesh.size(dim) for dim in range(self.mesh.ndim)]
        by_heads = [size for size, by in zip(self.sizes, self.split_by, strict=True) if by == HEADS]
        self.head_shards = math.prod(by_heads)
        if query.shape[1] % self.head_shards:
            raise ValueError(
                f"{name}: got {query.shape[1]} heads on {self.head_shards} shards, takes a number "
                f"of heads that {self.head_shards} divides"
            )
        self.heads = self.range_of(HEADS, query.shape[1])

    @property
    def by_batch(self) -> bool:
        """Whether ranks have different batch entries."""
        return BATCH in self.split_by

    def range_of(self, what: str, size: int) -> ShardRange:
        """Which of so many batch entries or heads this rank has, as DTensor splits them."""
        start, here = 0, size
        for dim, (ranks, by) in enumerate(zip(self.sizes, self.split_by, strict=True)):
            if by == what:
                chunk = -(-here // ranks)
                first = min(chunk * self.mesh.get_local_rank(dim), here)
                start, here = start + first, min(chunk, here - first)
        return ShardRange(start, here, size)

    def placements_of(self, where: Where) -> list[Any]:
        """How a tensor with these dimensions lies on the mesh where it is split as the query is."""
        from torch.distributed.tensor import Replicate, Shard

        dims = [where.batch if by == BATCH else where.heads if by else None for by in self.split_by]
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def local(self, name: str, tensor: Any, where: Where, *, whole_heads: bool = False) -> Any:
        """This rank's part of a tensor, wherever its other parts are; None of None.

        A plain tensor is one that every rank has.
        """
        from torch.distributed.tensor import Partial

        if tensor is None:
            return None
        tensor = distributed(name, tensor, self.name, self.mesh)
        wanted = self.placements_of(where._replace(heads=None) if whole_heads else where)
        gradients = [  # of what is whole on ranks that each computed a part
            Partial() if by is not None and placement.is_replicate() else placement
            for by, placement in zip(self.split_by, wanted, strict=True)
        ]
        if tensor.requires_grad or tensor.placements != tuple(wanted):  # adds up partial sums, too
            tensor = tensor.redistribute(self.mesh, wanted)
        return tensor.to_local(grad_placements=tuple(gradients))

    def rows(self, name: str, tensor: Any, where: Where) -> Any:
        """This rank's keys or values: those of its heads, or the one that its heads share."""
        if self.head_shards == 1 or tensor.shape[1] % self.head_shards == 0:
            return self.local(name, tensor, where)
        queries, heads = self.heads, tensor.shape[1]
        shared = queries.of // heads if heads and queries.of % heads == 0 else 0
        if not (shared and shared % queries.size == 0):
            raise ValueError(
                f"{name}: got {heads} heads on {self.head_shards} shards, takes a number that "
                f"{self.head_shards} divides, or that divides {self.head_shards}"
            )
        whole = self.local(name, tensor, where, whole_heads=True)
        return whole.narrow(1, queries.start // shared, 1)

    def entries(self, state_index: Any) -> Any:
        """Which entries of a pool of states belong to this rank's part of the batch."""
        if state_index is not None and self.by_batch:
            raise ValueError(
                f"state_index: got entries of a pool for a {self.name} that is sharded by batch, "
                "takes None: another rank may hold them"
            )
        return self.local("state_index", state_index, OF_NEITHER)

    def in_place(self, name: str, tensor: Any, where: Where) -> Any:
        """This rank's part of a tensor whose memory is used as it is: nothing may be moved."""
        from torch.distributed.tensor import DTensor

        if tensor is None:
            return None
        wanted = self.placements_of(where)
        placed = tensor.placements if isinstance(tensor, DTensor) else None
        if placed is None and all(placement.is_replicate() for placement in wanted):
            return tensor
        if placed != tuple(wanted) or tensor.device_mesh != self.mesh:
            got = "a plain tensor" if placed is None else f"the placements {list(placed)}"
            raise ValueError(
                f"{name}: got {got}, takes {wanted} on {self.name}'s mesh, to be used there"
            )
        return tensor.to_local()

    def modified(self, name: str, modifier: Modified, batch: int) -> Modified:
        """A mask or score as this rank's part of the call sees it."""
        tensors = tuple(self.local(name, each, OF_NEITHER) for each in modifier.captured.tensors)
        captured, batches = modifier.captured._replace(tensors=tensors), self.range_of(BATCH, batch)
        return type(modifier)(*restricted(modifier.key, captured, batches, self.heads))

    def joined(self, tensor: Tensor, where: Where, batch: int, heads: int) -> Any:
        """This rank's part of a result as the DTensor that all ranks have."""
        from torch.distributed.tensor import DTensor

        shape = list(tensor.shape)
        for dim, size in ((where.batch, batch), (where.heads, heads)):
            if dim is not None:
                shape[dim] = size
        return DTensor.from_local(
            tensor, self.mesh, self.placements_of(where), run_check=False,
            shape=torch.Size(shape), stride=_strides(shape, tensor.stride()),
        )  # fmt: skip


def distributed(name: str, tensor: Any, beside: str, mesh: Any) -> Any:
    """A tensor as a DTensor of a mesh, that of the argument `beside`; a plain one is whole on it.

    Raises:
        TypeError: if it is no tensor, or a plain one that requires gradients.
        ValueError: if it lies on another mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, takes a DTensor")
        if tensor.requires_grad:
            raise TypeError(
                f"{name}: got a plain tensor that requires gradients beside DTensors, takes a "
                "DTensor: each rank would have a part of its gradient"
            )
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tensor.device_mesh != mesh:
        raise ValueError(f"{name}: got a DTensor of another mesh, takes {beside}'s")
    return tensor


def _strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, the dimensions in the order of others."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)


# ---- calls ------------------------------------------------------------------------------------


def attention(
    call: Callable[..., Any], query: Any, key: Any, value: Any, offsets: Sequence[Any],
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """`attention`, or with offsets `attention_varlen`, each rank on its part."""
    if options.get("dropout_p"):
        raise NotImplementedError(
            f"dropout_p: got {options['dropout_p']} with DTensors, takes 0: ranks would not drop "
            "what the whole call drops"
        )
    check_flag("return_lse", options["return_lse"])
    check_flag("return_max_logit", options["return_max_logit"])
    where = PACKED if offsets else DENSE
    split = Split(query, where)
    batch = (offsets[0].shape[0] - 1) if offsets else query.shape[0]
    local = [split.local("query", query, where)]
    local += [split.rows(*named, where) for named in (("key", key), ("value", value))]
    names = "cu_seqlens_q", "cu_seqlens_k"
    local += [split.local(*named, OF_NEITHER) for named in zip(names, offsets, strict=False)]
    results = call(*local, **_prepared(split, batch, options))
    found = [split.joined(results[0], where, query.shape[0], query.shape[1])]
    if options["return_lse"]:
        of_rows = OF_HEADS if offsets else DENSE
        found.append(split.joined(results[1], of_rows, batch, query.shape[1]))
    if options["return_max_logit"]:
        found.append(split.joined(results[2], where, batch, query.shape[1]))
    return tuple(found) if len(found) > 1 else found[0]


def attention_paged(call: Callable[..., Any], inputs: Any, options: dict[str, Any]) -> Any:
    """`attention_paged`, each rank on its part; pages stay where they lie."""
    if inputs.query_scale is not None:
        raise NotImplementedError("query_scale: got a scale with DTensors, takes None")
    packed = inputs.cu_seqlens_q is not None
    where = PACKED if packed else DENSE
    split = Split(inputs.query, where)
    batch, heads = inputs.page_table.shape[0], inputs.query.shape[1]
    pages = [
        split.in_place(name, getattr(inputs, name), PACKED)
        for name in ("key_pages", "value_pages", "key_scales", "value_scales")
    ]
    query = split.local("query", inputs.query, where)
    table = split.local("page_table", inputs.page_table, OF_BATCH)
    lens = split.local("kv_lens", inputs.kv_lens, OF_BATCH)
    output, lse = call(
        query, pages[0], pages[1], table, lens, key_scales=pages[2], value_scales=pages[3],
        cu_seqlens_q=split.local("cu_seqlens_q", inputs.cu_seqlens_q, OF_NEITHER),
        **_prepared(split, batch, options | {"sinks": inputs.sinks}),
    )  # fmt: skip
    found = split.joined(output, where, batch, heads)
    if not options["return_lse"]:
        return found
    return found, split.joined(lse, OF_HEADS if packed else DENSE, batch, heads)


def write_kv_cache(call: Callable[..., None], rows: dict[str, Any], pages: dict[str, Any],
                   slot_mapping: Any, rotary: Any, interleaved: bool) -> None:  # fmt: skip
    """`write_kv_cache`, each rank into its part of the pages."""
    split = Split(rows["key"], PACKED, "key")
    if isinstance(rotary, (tuple, list)):
        rotary = [split.local("rotary", angle, OF_NEITHER) for angle in rotary]
    call(
        **{name: split.local(name, each, PACKED) for name, each in rows.items()},
        **{name: split.in_place(name, each, PACKED) for name, each in pages.items()},
        slot_mapping=split.local("slot_mapping", slot_mapping, OF_NEITHER),
        rotary=rotary, interleaved=interleaved,
    )  # fmt: skip


def _prepared(split: Split, batch: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a part of a call, which gives its lse as well."""
    mask, score = as_mask(options["mask"]), as_score(options["score"])
    return options | {
        "mask": split.modified("mask", mask, batch),
        "score": split.modified("score", score, batch),
        "sinks": split.local("sinks", options["sinks"], OF_HEADS),
        "return_lse": True,
    }
