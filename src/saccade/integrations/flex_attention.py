"""flex_attention: PyTorch's FlexAttention, answered by saccade.

Change one import, or none: after `install()`, PyTorch's own module serves these calls. Functions of
masks and scores are taken as they are written; what they capture gets gradients, on a CPU too.

A mask made by `create_block_mask` is known by what its function computes: it is traced once, when
it is made, and its blocks are made only if somebody looks at them. A `BlockMask` from elsewhere
(`from_kv_blocks`, a slice, PyTorch's own) is taken as its blocks and its function, as kernels of
FlexAttention take it: a partial block is hidden where the function says so, a full one is not, and
others are hidden whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

import saccade
from saccade import masks, scores
from saccade.integrations.arguments import pair, whole

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "explain",
    "flex_attention",
    "install",
    "installed",
    "noop_mask",
    "or_masks",
    "uninstall",
]

BLOCK_SIZE = 128
BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")
# What kernel_options may hold: hints for kernels that are not ours, and are not needed.
HINTS = {
    "BACKEND", "BLOCKS_ARE_CONTIGUOUS", "BLOCK_M", "BLOCK_M1", "BLOCK_M2", "BLOCK_N", "BLOCK_N1",
    "BLOCK_N2", "FORCE_USE_FLEX_ATTENTION", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "USE_TMA",
    "WRITE_DQ", "kpack", "matrix_instr_nonkdim", "num_stages", "num_warps", "waves_per_eu",
}  # fmt: skip


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Attention as `torch.nn.attention.flex_attention.flex_attention` has it.

    Args:
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E); B may be 1 where block_mask was made for query's batch.
        value: (B, Hkv, S, Ev).
        score_mod: a function of (score, b, h, q_idx, kv_idx) that gives the new score, traced at
            every call; or a `saccade.scores.Score`, which torch.compile takes into its graph.
        block_mask: of `create_block_mask`, or made elsewhere. None: all pairs are visible.
        scale: 1 / sqrt(E) where None.
        enable_gqa: Hkv need only divide Hq.
        return_lse: also return the lse (B, Hq, L), natural logarithm.
        kernel_options: hints for PyTorch's kernels, which are not needed.
        return_aux: which of lse and max_scores to return; the latter is not served.

    Returns:
        (B, Hq, L, Ev); with return_lse a pair with the lse, with return_aux one with an
        `AuxOutput`. A row that sees nothing gives 0, and an lse of -inf.

    Raises:
        TypeError: naming the line of a function that does what cannot be known without its rows.
        ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: for max_scores, and where no implementation serves the call.

    Source: FlexAttention (Dong et al. 2024).

    Examples:
        >>> from saccade.integrations.flex_attention import create_block_mask, flex_attention
        >>> query, key, value = torch.randn(3, 1, 2, 64, 16)
        >>> block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64)
        >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
        >>> def alibi(score, b, h, q, kv):
        ...     return score + slopes[h] * (kv - q)
        >>> output = flex_attention(query, key, value, score_mod=alibi, block_mask=block_mask)
        >>> output.sum().backward()
    """
    _check_options(return_lse, return_aux, kernel_options)
    call = _translated(query, key, value, score_mod, block_mask, scale, enable_gqa)
    if not return_lse and (return_aux is None or not return_aux.lse):
        output = saccade.attention(*call.tensors, **call.options)
        return output if return_aux is None else (output, AuxOutput())
    output, lse = saccade.attention(*call.tensors, return_lse=True, **call.options)
    return output, lse if return_aux is None else AuxOutput(lse=lse)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What `saccade.explain` says of a call: its mask by name, and which implementation serves it.

    Args: as of `flex_attention`.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> query, key, value = torch.randn(3, 1, 2, 64, 16)
        >>> block_mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64)
        >>> "causal" in str(flex.explain(query, key, value, block_mask=block_mask))
        True
    """
    call = _translated(query, key, value, score_mod, block_mask, scale, enable_gqa)
    return saccade.explain(saccade.attention, *call.tensors, **call.options)


def create_block_mask(
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = BLOCK_SIZE,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """A mask as `torch.nn.attention.flex_attention.create_block_mask` makes it, without its cost.

    The function is traced here: numbers that it captures are those of this moment, tensors are read
    when a call is made. Nothing is written out, so it takes as long for any length.

    Args:
        mask_mod: a function of (b, h, q_idx, kv_idx) that gives True where a pair is visible.
        B, H: the batch entries and heads that blocks are made for; None: one for all. A call's
            pairs are those of the function for each of its batch entries and heads.
        Q_LEN, KV_LEN: rows of the calls.
        device: where blocks are made, if they are; None: the accelerator, if there is one.
        BLOCK_SIZE: rows of a block, or (query rows, key rows).
        _compile, compute_dq_write_order, dq_kv_order: hints that are not needed.
        separate_full_blocks: whether blocks without a hidden pair are listed apart.

    Raises:
        TypeError: naming the line of a function that does what cannot be known without its rows.
        TypeError, ValueError: naming a size, what it got and what it takes.

    Examples:
        >>> from saccade.integrations.flex_attention import create_block_mask, flex_attention
        >>> ids = torch.tensor([0] * 40 + [1] * 24)
        >>> packed = lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])
        >>> block_mask = create_block_mask(packed, None, None, 64, 64)
        >>> query, key, value = torch.randn(3, 1, 2, 64, 16)
        >>> flex_attention(query, key, value, block_mask=block_mask).shape
        torch.Size([1, 2, 64, 16])
    """
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    lengths = _size("Q_LEN", Q_LEN, 0), _size("KV_LEN", KV_LEN, 0)
    both = (
        (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else pair("BLOCK_SIZE", BLOCK_SIZE)
    )
    blocks = _size("BLOCK_SIZE", both[0], 1), _size("BLOCK_SIZE", both[1], 1)
    batch, heads = (
        1 if size is None else _size(name, size, 1) for name, size in (("B", B), ("H", H))
    )
    made = _Made(_traced_mask(mask_mod), batch, heads, device, separate_full_blocks)
    return _TracedBlockMask(made, mask_mod, lengths, blocks)


# ---- masks ---------------------------------------------------------------------------------------


OUTSIDE = (
    "functions of masks and scores are traced outside of graphs; with fullgraph=True give "
    "what is made before: create_block_mask(...), saccade.scores.function(score_mod)()"
)


@torch.compiler.disable(reason=OUTSIDE)
def _traced_mask(mask_mod: Any) -> masks.Mask:
    """The mask of a function."""
    return masks.as_mask(mask_mod)


@torch.compiler.disable(reason=OUTSIDE)
def _traced_score(score_mod: Any) -> scores.Score:
    """The score of a function."""
    return scores.as_score(score_mod)


def _size(name: str, size: Any, least: int) -> int:
    """A whole number of at least `least`."""
    number: int = whole(name, size)
    if number < least:
        raise ValueError(f"{name}: got {number}, takes a whole number of at least {least}")
    return number


class _Made(NamedTuple):
    """What `create_block_mask` was told, and the mask that it made of it."""

    mask: masks.Mask
    batch: int
    heads: int
    device: Any
    separate_full_blocks: bool


BLOCKS = {
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks",
    "q_indices", "full_q_num_blocks", "full_q_indices", "dq_write_order", "dq_write_order_full",
    "dq_kv_order", "dq_kv_order_spt",
}  # fmt: skip


class _TracedBlockMask(BlockMask):
    """A BlockMask that is its function alone; its blocks are made when they are looked at.

    Where its function, lengths or blocks are replaced, it is from then on what other BlockMasks
    are: its blocks and its function.
    """

    def __init__(  # not PyTorch's, which takes blocks
        self,
        made: _Made,
        mask_mod: Any,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, ...],
    ):
        vars(self).update(
            made=made, mask_mod=mask_mod, seq_lengths=seq_lengths, BLOCK_SIZE=block_size
        )

    def __getattr__(self, name: str) -> Any:
        if name not in BLOCKS or "made" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        made, (query_block, kv_block) = self.made, self.BLOCK_SIZE
        dense = made.mask.to_dense(made.batch, made.heads, *self.seq_lengths).to(made.device)
        blocks: Any = _blocks_of(dense, query_block, kv_block, made.separate_full_blocks)
        found = BlockMask.from_kv_blocks(
            *blocks, BLOCK_SIZE=(query_block, kv_block), seq_lengths=self.seq_lengths
        )
        for each in BLOCKS:  # older versions have fewer
            vars(self)[each] = getattr(found, each, None)
        return vars(self)[name]

    def __setattr__(self, name: str, value: Any) -> None:
        replaced = name in BLOCKS or name in ("mask_mod", "seq_lengths", "BLOCK_SIZE")
        if replaced and "made" in vars(self):
            _ = self.kv_num_blocks  # the blocks are those of what it was
            del vars(self)["made"]
        vars(self)[name] = value

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN), known without blocks."""
        if "made" not in vars(self):
            return super().shape
        return (self.made.batch, self.made.heads, *self.seq_lengths)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> Any:
        lengths = new_q_len, new_kv_len
        fewer = all(new <= old for new, old in zip(lengths, self.seq_lengths, strict=True))
        if "made" not in vars(self) or not fewer:
            return super()._adjust(new_q_len, new_kv_len)
        return _TracedBlockMask(self.made, self.mask_mod, lengths, self.BLOCK_SIZE)

    def to(self, device: torch.device | str) -> BlockMask:
        """This mask with what it captured on a device."""
        if "made" not in vars(self):
            return super().to(device)
        made = self.made._replace(mask=self.made.mask.to(device), device=device)
        return _TracedBlockMask(made, self.mask_mod, self.seq_lengths, self.BLOCK_SIZE)


def _blocks_of(
    dense: Tensor, query_block: int, kv_block: int, separate: bool
) -> tuple[Tensor | None, ...]:
    """What `BlockMask.from_kv_blocks` takes: numbers and indices of partial and of full blocks."""
    rows, columns = (
        -(-size // block)
        for size, block in zip(dense.shape[2:], (query_block, kv_block), strict=True)
    )
    padding = columns * kv_block - dense.shape[3], rows * query_block - dense.shape[2]
    padded = torch.nn.functional.pad(dense, (0, padding[0], 0, padding[1]))
    tiles = padded.unflatten(3, (columns, kv_block)).unflatten(2, (rows, query_block))
    some, all_of_it = tiles.any(5).any(3), tiles.all(5).all(3)
    if not separate:
        return *_ordered(some), None, None
    return *_ordered(some & ~all_of_it), *_ordered(all_of_it)


def _ordered(layout: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which; behind these come the others."""
    order = layout.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return layout.sum(-1, dtype=torch.int32), order.to(torch.int32)


@torch.compiler.disable(reason=OUTSIDE)
def _blocks_and_function(block_mask: BlockMask) -> masks.Mask:
    """The mask of a BlockMask that may have been made anyhow."""
    mask = masks.as_mask(block_mask.mask_mod)
    query_block, kv_block = block_mask.BLOCK_SIZE
    sizes = tuple(
        -(-length // block)
        for length, block in zip(block_mask.seq_lengths, (query_block, kv_block), strict=True)
    )
    partial = _layout(block_mask.kv_num_blocks, block_mask.kv_indices, sizes)
    found = masks.blocks(partial, (query_block, kv_block)) & mask
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return found
    full = _layout(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, sizes)
    return found | masks.blocks(full, (query_block, kv_block))


def _layout(num_blocks: Tensor, indices: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Which blocks are listed: bool [batch, heads, rows of blocks, columns of blocks]."""
    rows, columns = sizes
    missing = 4 - indices.dim()
    indices = indices.reshape((1,) * missing + tuple(indices.shape))[:, :, :rows].long()
    num_blocks = num_blocks.reshape((1,) * missing + tuple(num_blocks.shape))[:, :, :rows]
    if indices.shape[2] < rows:
        raise ValueError(
            f"block_mask: got {indices.shape[2]} rows of blocks, takes the {rows} of its lengths"
        )
    listed = torch.arange(indices.shape[3], device=indices.device) < num_blocks[..., None]
    known = listed & (indices >= 0) & (indices < columns)
    layout = indices.new_zeros((*indices.shape[:3], columns + 1), dtype=torch.bool)
    layout.scatter_(3, indices.masked_fill(~known, columns), True)  # the last one is none
    return layout[..., :columns].contiguous()


# ---- translation ---------------------------------------------------------------------------------


class _FlexCall(NamedTuple):
    """A call in saccade's terms."""

    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]


def _check_options(
    return_lse: bool, return_aux: AuxRequest | None, kernel_options: Mapping[str, Any] | None
) -> None:
    """Refuse by name what is not served or not known."""
    if return_aux is not None:
        if return_lse:
            raise ValueError("return_lse: got True with return_aux, takes one of the two")
        if getattr(return_aux, "max_scores", False):
            raise NotImplementedError("return_aux: got max_scores=True, takes lse alone")
    for name, option in (kernel_options or {}).items():
        hint = name[4:] if name.startswith(("fwd_", "bwd_")) else name
        if hint not in HINTS:
            raise ValueError(f"kernel_options: got {name!r}, takes {', '.join(sorted(HINTS))}")
        if hint == "BACKEND" and option not in BACKENDS:
            raise ValueError(f"kernel_options: got BACKEND {option!r}, takes {', '.join(BACKENDS)}")


def _translated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
) -> _FlexCall:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got {tensor.dim()} dimensions, takes 4: (B, H, length, E)")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key: got {key.shape[1]} heads for query's {query.shape[1]}, takes as many; with "
            "enable_gqa=True a divisor"
        )
    mask = None if block_mask is None else _mask_for(block_mask, query.shape[2], key.shape[2])
    batch = query.shape[0]
    if key.shape[0] == 1 != batch and block_mask is not None and block_mask.shape[0] == batch:
        key, value = (rows.expand(batch, -1, -1, -1) for rows in (key, value))
    score = score_mod
    if score is not None and not isinstance(score, scores.Score):
        score = _traced_score(score)
    return _FlexCall((query, key, value), {"mask": mask, "score": score, "scale": scale})


def _mask_for(block_mask: Any, query_len: int, kv_len: int) -> masks.Mask:
    """The mask of a BlockMask, which must have been made for these lengths.

    Raises:
        TypeError: for anything but a BlockMask.
        ValueError: for one of other lengths.
    """
    if not isinstance(block_mask, BlockMask):
        got = type(block_mask).__name__
        raise TypeError(
            f"block_mask: got {got}, takes a BlockMask: create_block_mask(mask_mod, B, H, "
            f"{query_len}, {kv_len})"
        )
    lengths = tuple(block_mask.seq_lengths)
    if lengths != (query_len, kv_len) and lengths != (1, 1):
        raise ValueError(
            f"block_mask: got one of {lengths[0]} x {lengths[1]} rows for a call of {query_len} x "
            f"{kv_len}, takes one of these; block_mask._adjust({query_len}, {kv_len}) cuts it"
        )
    made = getattr(block_mask, "made", None)
    return _blocks_and_function(block_mask) if made is None else made.mask


# ---- PyTorch's module ----------------------------------------------------------------------------


CALLS: dict[str, Callable[..., Any]] = {
    "flex_attention": flex_attention,
    "create_block_mask": create_block_mask,
}
_replaced: dict[str, Any] = {}  # what PyTorch's module had before `install`


def install() -> None:
    """Make `torch.nn.attention.flex_attention` serve these calls, until `uninstall`.

    Its `flex_attention` and `create_block_mask` are replaced; names that were imported from it
    before keep PyTorch's. What saccade cannot serve raises. Calling it twice changes nothing.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> flex.install()
        >>> torch.nn.attention.flex_attention.flex_attention is flex.flex_attention
        True
        >>> flex.uninstall()
    """
    if not _replaced:
        for name, call in CALLS.items():
            _replaced[name] = getattr(theirs, name)
            setattr(theirs, name, call)


def uninstall() -> None:
    """Give PyTorch its functions back, unless they have been replaced again since.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> flex.install()
        >>> flex.uninstall()
        >>> torch.nn.attention.flex_attention.flex_attention is flex.flex_attention
        False
    """
    for name, before in _replaced.items():
        if getattr(theirs, name) is CALLS[name]:
            setattr(theirs, name, before)
    _replaced.clear()


@contextmanager
def installed() -> Iterator[None]:
    """`install` on the way in, `uninstall` on the way out.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> with flex.installed():
        ...     torch.nn.attention.flex_attention.flex_attention is flex.flex_attention
        True
    """
    install()
    try:
        yield
    finally:
        uninstall()
