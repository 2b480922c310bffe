"""Move: copy whole pages, within pools or from one set of pools to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from saccade.kv_cache.pool import at_once
from saccade.runtime.arguments import values_readable

torch.library.define(
    "saccade::move_pages", "(Tensor(a!)[] pools, Tensor source, Tensor target) -> ()"
)


def move_pages(
    pools: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    *,
    into: Sequence[Tensor] | None = None,
) -> None:
    """Copy pages to other places, in every pool alike: for copy-on-write, swapping, compaction.

    Every page is read before any is written, so source and target may overlap.

    Args:
        pools: tensors [num_pages, ...]: the key and value pages (and scales) of every layer.
        source: int32 or int64 [moves]: the pages to read.
        target: as many, all different: the pages to write.
        into: the pools that are written, where they are others than `pools` (on another device,
            say): of the same shapes but for the number of pages.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    >>> saccade.move_pages([key_pages, value_pages], source, target)
    """
    written = pools = _pools("pools", pools)
    if into is not None:
        written = _pools("into", into)
        if [pool.shape[1:] for pool in written] != [pool.shape[1:] for pool in pools]:
            raise ValueError("into: got pools of other shapes, takes those of `pools`")
    _check_numbers("source", source, pools)
    _check_numbers("target", target, written)
    if source.shape != target.shape:
        raise ValueError(f"target: got {target.shape[0]} pages, takes {source.shape[0]}")
    if into is None:
        if pools:
            torch.ops.saccade.move_pages.default(list(pools), source, target)
        return
    for old, new in zip(pools, written, strict=True):
        _across(old, new, source, target)


def moves(pools: Sequence[Tensor], source: Tensor, target: Tensor) -> list[Callable[[], object]]:
    """The steps of `move_pages`, none of which can fail: what wants memory has it by now."""
    numbers = [(source.to(pool.device), target.to(pool.device)) for pool in pools]
    kinds = {(pool.dtype, pool.device, pool.shape[1:]) for pool in pools}
    read = {
        (dtype, device, shape): torch.empty((len(source), *shape), dtype=dtype, device=device)
        for dtype, device, shape in kinds
    }
    steps: list[Callable[[], object]] = []
    for pool, (old, new) in zip(pools, numbers, strict=True):
        bits, memory = _bits(pool), _bits(read[pool.dtype, pool.device, pool.shape[1:]])
        steps.append(partial(torch.index_select, bits, 0, old, out=memory))
        steps.append(partial(bits.index_copy_, 0, new, memory))
    return steps


def _move(pools: list[Tensor], source: Tensor, target: Tensor) -> None:
    at_once(moves(pools, source, target))


torch.library.impl("saccade::move_pages", "CompositeExplicitAutograd", _move)


@torch.library.register_fake("saccade::move_pages")
def _move_fake(pools: list[Tensor], source: Tensor, target: Tensor) -> None:
    """Changes in place only: nothing to say of results."""


def _across(old: Tensor, new: Tensor, source: Tensor, target: Tensor) -> None:
    read = _bits(old).index_select(0, source.to(old.device))
    _bits(new).index_copy_(0, target.to(new.device), read.to(new.device))


def _bits(pool: Tensor) -> Tensor:
    """Numbers of eight bits as whole ones, which PyTorch can index."""
    return pool.view(torch.int8) if pool.dtype == torch.float8_e4m3fn else pool


def _pools(name: str, pools: Sequence[Tensor]) -> list[Tensor]:
    takes = "a sequence of tensors [num_pages, ...]"
    if isinstance(pools, Tensor) or not isinstance(pools, Sequence):
        raise TypeError(f"{name}: got {type(pools).__name__}, takes {takes}")
    for pool in pools:
        if not isinstance(pool, Tensor) or pool.dim() < 1:
            raise TypeError(f"{name}: got {type(pool).__name__}, takes {takes}")
    if any(pool.shape[0] != pools[0].shape[0] for pool in pools):
        raise ValueError(f"{name}: got pools of different numbers of pages, takes one number")
    return list(pools)


def _check_numbers(name: str, numbers: Tensor, pools: Sequence[Tensor]) -> None:
    takes = "a tensor [moves] of int32 or int64"
    if not isinstance(numbers, Tensor) or numbers.dtype not in (torch.int32, torch.int64):
        got = numbers.dtype if isinstance(numbers, Tensor) else type(numbers).__name__
        raise TypeError(f"{name}: got {got}, takes {takes}")
    if numbers.dim() != 1:
        raise ValueError(f"{name}: got shape {tuple(numbers.shape)}, takes {takes}")
    if not pools or not values_readable(numbers) or numbers.numel() == 0:
        return
    least, most, num_pages = int(numbers.min()), int(numbers.max()), pools[0].shape[0]
    if least < 0 or most >= num_pages:
        got = least if least < 0 else most
        raise ValueError(f"{name}: got page {got}, takes 0 to {num_pages - 1}")
    if name == "target" and numbers.unique().numel() != numbers.numel():
        raise ValueError("target: got a page twice, takes different pages")
