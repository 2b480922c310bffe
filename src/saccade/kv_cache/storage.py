"""Storage: the tensors of a paged cache, in eight bits where asked; what writes and moves pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from saccade.kv_cache.pool import at_once
from saccade.rotary import check_rotary, rotated
from saccade.runtime import backends, shards
from saccade.runtime.arguments import (
    INTEGERS,
    check_flag,
    check_pages,
    check_scales,
    check_tensor,
    refuse_recording,
    values_readable,
)
from saccade.runtime.call_cache import unobserved
from saccade.runtime.custom_op import EXACT_STRIDES
from saccade.runtime.spec import DTYPES, QUANTISED

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantised(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as numbers of eight bits, and the scale that each row is multiplied by when read.

    Args:
        rows: [..., dim], floating point.
        dtype: int8 or float8_e4m3fn.

    Returns:
        numbers of `rows`' shape, and float32 scales [...]. The largest number of a row takes the
        whole range. A row that holds NaN or inf is NaN when read.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1) if rows.shape[-1] else wide.new_zeros(rows.shape[:-1])
    scales = (largest / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)  # divides
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    numbers = (wide / scales.unsqueeze(-1)).nan_to_num(0, 0, 0)
    if dtype == torch.int8:
        numbers = numbers.round()
    return numbers.to(dtype), scales


class LayerPages(NamedTuple):
    """One layer's pages, by the names of `attention_paged`'s arguments."""

    key_pages: Tensor
    value_pages: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    @property
    def latent(self) -> bool:
        """Whether values are the first channels of keys, in the same memory."""
        return self.value_pages.data_ptr() == self.key_pages.data_ptr()


class LayerSizes(NamedTuple):
    """What a layer keeps for each token."""

    kv_heads: int
    head_dim: int
    value_dim: int


class StateSize(NamedTuple):
    """One tensor of what a layer keeps for a whole sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PageSizes(NamedTuple):
    """The sizes of a cache's tensors."""

    page_size: int
    layers: list[LayerSizes]
    dtype: torch.dtype
    latent: bool  # whether values are the first channels of keys, in the same memory


class Memory:
    """Tensors of the device by numbers of pages, and others on the host that pages are moved to."""

    num_pages: int
    host_pages: int
    pools: list[Tensor]
    host_pools: list[Tensor]
    layers: list[LayerPages]

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages on the device, reading all before any is written."""
        if source:
            move_pages(self.pools, _numbers(source), _numbers(target))

    def moves(self, source: Sequence[int], target: Sequence[int]) -> list[Callable[[], object]]:
        """The steps of `copy`, for `at_once`."""
        return moves(self.pools, _numbers(source), _numbers(target)) if source else []

    def to_host(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages from the device to the host."""
        if source:
            move_pages(self.pools, _numbers(source), _numbers(target), into=self.host_pools)

    def to_device(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages from the host to the device."""
        if source:
            move_pages(self.host_pools, _numbers(source), _numbers(target), into=self.pools)


class PageMemory(Memory):
    """Pages on the device, and as many as asked for on the host (page-locked beside a GPU).

    Heads lie outermost, so that neighbouring pages of a head are one piece of memory.
    """

    @torch.inference_mode(False)  # pages are written to outside of it, too
    def __init__(self, sizes: PageSizes, num_pages: int, host_pages: int, device: torch.device):
        self.num_pages, self.host_pages = num_pages, host_pages
        self.layers = [_layer(sizes, of, num_pages, device, False) for of in sizes.layers]
        on_host = torch.device("cpu")
        pinned = device.type == "cuda"
        host = [_layer(sizes, of, host_pages, on_host, pinned) for of in sizes.layers]
        self.pools, self.host_pools = (_pools(each, sizes.latent) for each in (self.layers, host))


class StateMemory(Memory):
    """States of whole sequences, each of which is one page of numbers in several tensors."""

    @torch.inference_mode(False)
    def __init__(
        self, sizes: Sequence[StateSize], num_states: int, host_states: int, device: torch.device
    ):
        self.num_pages, self.host_pages, self.layers = num_states, host_states, []
        self.pools = [
            torch.empty(num_states, *shape, dtype=dtype, device=device) for shape, dtype in sizes
        ]
        pinned = device.type == "cuda"
        self.host_pools = [
            torch.empty(host_states, *shape, dtype=dtype, device="cpu", pin_memory=pinned)
            for shape, dtype in sizes
        ]


def _layer(
    sizes: PageSizes, of: LayerSizes, num_pages: int, device: torch.device, pinned: bool
) -> LayerPages:
    shape = (of.kv_heads, num_pages, sizes.page_size)

    def empty(*dims: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(*shape, *dims, dtype=dtype, device=device, pin_memory=pinned)
        return tensor.transpose(0, 1)

    scales = [None, None]
    if sizes.dtype in QUANTISED:
        scales = [empty(dtype=torch.float32), empty(dtype=torch.float32)]
    keys = empty(of.head_dim, dtype=sizes.dtype)
    if sizes.latent:
        return LayerPages(keys, keys[..., : of.value_dim], None, None)
    return LayerPages(keys, empty(of.value_dim, dtype=sizes.dtype), *scales)


def _pools(layers: list[LayerPages], latent: bool) -> list[Tensor]:
    if latent:  # values move with keys
        return [layer.key_pages for layer in layers]
    return [tensor for layer in layers for tensor in layer if tensor is not None]


def on_device(
    numbers: Sequence[float] | bytearray, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Numbers of the host as a tensor; the host does not wait for what a GPU does before.

    numbers: one by one, or the bytes of all, which takes a quarter of the time.
    """
    on_gpu = device.type == "cuda"
    if isinstance(numbers, bytearray) and numbers:
        found = torch.frombuffer(numbers, dtype=dtype)
        found = found.pin_memory() if on_gpu else found
    else:
        found = torch.tensor(list(numbers), dtype=dtype, device="cpu", pin_memory=on_gpu)
    return found.to(device, non_blocking=on_gpu)


def _numbers(pages: Sequence[int]) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64, device="cpu")


# ---- moving pages --------------------------------------------------------------------------------

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

    Examples:
        >>> key_pages, value_pages = torch.randn(2, 6, 2, 4, 16)
        >>> source, target = torch.tensor([0, 1]), torch.tensor([4, 5])
        >>> saccade.move_pages([key_pages, value_pages], source, target)
        >>> torch.equal(key_pages[4:], key_pages[:2])
        True
    """
    written = pools = _checked_pools("pools", pools)
    if into is not None:
        written = _checked_pools("into", into)
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
    """No results: it changes tensors in place."""


def _across(old: Tensor, new: Tensor, source: Tensor, target: Tensor) -> None:
    read = _bits(old).index_select(0, source.to(old.device))
    _bits(new).index_copy_(0, target.to(new.device), read.to(new.device))


def _bits(pool: Tensor) -> Tensor:
    """Numbers of eight bits as whole ones, which PyTorch can index."""
    return pool.view(torch.int8) if pool.dtype == torch.float8_e4m3fn else pool


def _checked_pools(name: str, pools: Sequence[Tensor]) -> list[Tensor]:
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
    check_tensor(name, numbers, takes, dtypes=INTEGERS, num_dims=1)
    if not pools or not values_readable(numbers) or numbers.numel() == 0:
        return
    least, most, num_pages = int(numbers.min()), int(numbers.max()), pools[0].shape[0]
    if least < 0 or most >= num_pages:
        got = least if least < 0 else most
        raise ValueError(f"{name}: got page {got}, takes 0 to {num_pages - 1}")
    if name == "target" and numbers.unique().numel() != numbers.numel():
        raise ValueError("target: got a page twice, takes different pages")


torch.library.define(
    "saccade::write_kv_cache",
    "(Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, "
    "Tensor slot_mapping, Tensor(c!)? key_scales, Tensor(d!)? value_scales, Tensor? cos, "
    "Tensor? sin, bool interleaved) -> ()",
    tags=EXACT_STRIDES,
)


def write_kv_cache(  # breaks function-length: most of it is the docstring
    key: Tensor,
    value: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor | None,
    slot_mapping: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
) -> None:
    """Write the keys and values of new tokens into their slots of the pages.

    Args:
        key: [tokens, kv_heads, head_dim].
        value: [tokens, kv_heads, value_dim]; None where values are the first channels of keys,
            so that the pages of keys hold them.
        key_pages, value_pages: as in `attention_paged`; changed in place. value_pages is None where
            value is.
        slot_mapping: int32 or int64 [tokens]: page · page_size + slot of each token, all different;
            a token of -1 is not written.
        key_scales, value_scales: [num_pages, kv_heads, page_size], written beside pages of int8
            and float8_e4m3fn: each token of each head takes the whole range. float8_e4m3fn may go
            without: its numbers are then rounded as they are, NaN beyond 448.
        rotary: cosines and sines [tokens, pairs] of the angles by which pairs of key channels are
            turned first; 2 · pairs is at most head_dim. None turns nothing.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, i + pairs).

    DTensors are sharded by heads or not at all, pages and scales as key is.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: if key or value asks for a gradient.

    Sources: PagedAttention (Kwon et al. 2023), section 4.3; RoFormer (Su et al. 2021), section
    3.2.2.

    Examples:
        >>> key, value = torch.randn(2, 3, 2, 16)  # three tokens, 2 kv heads
        >>> key_pages, value_pages = torch.zeros(2, 6, 2, 4, 16)  # 6 pages of 4 slots
        >>> slot_mapping = torch.tensor([18, 19, 4])  # page · 4 + slot
        >>> saccade.write_kv_cache(key, value, key_pages, value_pages, slot_mapping)
        >>> torch.equal(key_pages[4, :, 2], key[0])
        True
    """
    if value is None or value_pages is None:
        if value is not value_pages or value_scales is not None:
            raise TypeError("value, value_pages, value_scales: takes all of them, or none")
        value, value_pages = key[..., :0], key_pages[..., :0]
    if shards.any_sharded(key, value, key_pages, value_pages):
        pages = {"key_pages": key_pages, "value_pages": value_pages, "key_scales": key_scales,
                 "value_scales": value_scales}  # fmt: skip
        rows = {"key": key, "value": value}
        shards.write_kv_cache(write_kv_cache, rows, pages, slot_mapping, rotary, interleaved)
        return
    check_flag("interleaved", interleaved)
    numbers = key, value, key_pages, value_pages, slot_mapping, key_scales, value_scales
    alone = not torch.compiler.is_compiling() and unobserved(numbers)
    if not (alone and _known_to_fit(numbers)):
        _check_tokens(key, value, key_pages, value_pages)
        check_scales(key_pages, value_pages, key_scales, value_scales, required=True)
        _check_slots(slot_mapping, key)
        if alone:
            _keep_layout(numbers)
    least = _least_slot(slot_mapping, key_pages)
    cos, sin = (None, None) if rotary is None else check_rotary(rotary, key, "key")
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise NotImplementedError(
            "saccade: a gradient through write_kv_cache is not implemented; call it under "
            "torch.no_grad()"
        )
    plain = alone and cos is None and least is not None and least >= 0
    if plain and key.device.type == "cpu" and not _profiler_enabled():
        _put_rows(*numbers)  # the dispatcher takes as long as a few rows do
    else:
        torch.ops.saccade.write_kv_cache.default(*numbers, cos, sin, interleaved)


def _write(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> None:
    """In plain PyTorch, on any device; it waits for the device to learn which slots are skipped."""
    if cos is not None and sin is not None:
        key = rotated(key, cos, sin, interleaved)
    if slot_mapping.numel() == 0:
        return
    if slot_mapping.min().item() < 0:
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    _put_rows(key, value, key_pages, value_pages, slot_mapping, key_scales, value_scales)


def _put_rows(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Write tokens, each of which has a slot."""
    for rows, pages, scales in (
        (key, key_pages, key_scales),
        (value, value_pages, value_scales),
    ):
        if scales is not None:
            rows, of_rows = quantised(rows, pages.dtype)
            _put(scales, slot_mapping, of_rows.to(scales.dtype))
        rows = rows.to(pages.dtype)
        if pages.dtype == torch.float8_e4m3fn:  # which PyTorch places only by their bits
            rows, pages = rows.view(torch.int8), pages.view(torch.int8)
        _put(pages, slot_mapping, rows)


def _put(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [tokens, heads, ...] into slots of pages [num_pages, heads, page_size, ...]."""
    of_heads = pages.transpose(0, 1)
    if of_heads.is_contiguous():  # as `PagedCache` has them: all slots of a head follow each other
        of_heads.flatten(1, 2).index_copy_(1, slots.long(), rows.transpose(0, 1))
        return
    page_size = pages.shape[2]
    pages.transpose(1, 2)[slots // page_size, slots % page_size] = rows


torch.library.impl("saccade::write_kv_cache", "CompositeExplicitAutograd", _write)


def _write_on_gpu(*arguments: Any) -> None:
    """By a kernel that waits for nothing, where there is one."""
    key, key_pages, value_pages = arguments[0], arguments[2], arguments[3]
    if backends.no_kernels(key.device) is None:
        from saccade.kv_cache import write_triton as kernels  # imports Triton

        if kernels.fits(key_pages, value_pages):
            kernels.write(*arguments)
            return
    _write(*arguments)


torch.library.impl("saccade::write_kv_cache", "CUDA", _write_on_gpu)


@torch.library.register_fake("saccade::write_kv_cache")
def _write_fake(*arguments: object) -> None:
    """No results: it changes tensors in place."""


_layouts: set[tuple[Any, ...]] = set()  # of calls whose tensors were found to fit together
MOST_LAYOUTS = 1024


def _layout_of(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(
        [None if each is None else (each.shape, each.dtype, each.device) for each in tensors]
    )


def _known_to_fit(tensors: Sequence[Tensor | None]) -> bool:
    """Whether tensors of these shapes, dtypes and devices were checked before."""
    return _layout_of(tensors) in _layouts


def _keep_layout(tensors: Sequence[Tensor | None]) -> None:
    if len(_layouts) >= MOST_LAYOUTS:
        _layouts.clear()
    _layouts.add(_layout_of(tensors))


def _check_tokens(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    refuse_recording("key")
    for name, rows, dim in (("key", key, "head_dim"), ("value", value, "value_dim")):
        takes = f"[tokens, kv_heads, {dim}]"
        check_tensor(name, rows, f"a tensor {takes}")
        if rows.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(rows.shape)}, takes {takes}")
        if rows.dtype not in DTYPES:
            raise TypeError(
                f"{name}: got {rows.dtype}, takes float32, float64, bfloat16 or float16"
            )
    if value.dtype != key.dtype or value.device != key.device:
        raise TypeError(
            f"value: got {value.dtype} on {value.device}, takes key's {key.dtype} on {key.device}"
        )
    check_pages(key_pages, value_pages, key.dtype, key.device)
    for name, rows, pages in (("key", key, key_pages), ("value", value, value_pages)):
        if rows.shape[0] != key.shape[0]:
            raise ValueError(f"{name}: got {rows.shape[0]} tokens, takes key's {key.shape[0]}")
        if (rows.shape[1], rows.shape[2]) != (pages.shape[1], pages.shape[3]):
            raise ValueError(
                f"{name}: got {tuple(rows.shape[1:])} heads and channels, takes those of its "
                f"pages, {(pages.shape[1], pages.shape[3])}"
            )


def _check_slots(slot_mapping: Tensor, key: Tensor) -> None:
    takes = "a tensor [tokens] of int32 or int64"
    check_tensor("slot_mapping", slot_mapping, takes, dtypes=INTEGERS)
    if tuple(slot_mapping.shape) != (key.shape[0],):
        raise ValueError(
            f"slot_mapping: got shape {tuple(slot_mapping.shape)}, takes ({key.shape[0]},)"
        )
    if slot_mapping.device != key.device:
        raise ValueError(f"slot_mapping: got {slot_mapping.device}, takes key's {key.device}")


def _least_slot(slot_mapping: Tensor, key_pages: Tensor) -> int | None:
    """The smallest slot, 0 where there are none; None where they cannot be read.

    Raises:
        ValueError: for what are no slots of the pages.
    """
    if not values_readable(slot_mapping):
        return None
    slots = key_pages.shape[0] * key_pages.shape[2]
    numbers = slot_mapping.tolist()
    if not numbers:
        return 0
    least, most = min(numbers), max(numbers)
    if least < -1 or most >= slots:
        got = least if least < -1 else most
        raise ValueError(f"slot_mapping: got slot {got}, takes -1 to {slots - 1}")
    return least
