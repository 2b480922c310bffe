"""Rotary: `flash_attn.layers.rotary`, by saccade's rotation, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import saccade
from saccade.integrations.arguments import flag, whole

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair (a, b) of channels as (-b, a); pairs are of the two halves, or side by side.

    Examples:
        >>> from saccade.integrations.flash_attn.rotary import rotate_half
        >>> rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
        [-3.0, -4.0, 1.0, 2.0]
        >>> rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0]), interleaved=True).tolist()
        [-2.0, 1.0, -4.0, 3.0]
    """
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Turn the first channels of each row by angles of its own, in x's dtype.

    Args:
        x: (batch, seqlen, nheads, headdim).
        cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2).

    Examples:
        >>> from saccade.integrations.flash_attn.rotary import apply_rotary_emb_torch
        >>> angles = torch.arange(16)[:, None] * 10_000.0 ** (-torch.arange(8) / 8)
        >>> apply_rotary_emb_torch(torch.randn(2, 16, 4, 32), angles.cos(), angles.sin()).shape
        torch.Size([2, 16, 4, 32])
    """
    cos, sin = (
        (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)).unsqueeze(-2)
        for t in (cos, sin)
    )
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    return torch.cat((turned * cos + rotate_half(turned, interleaved) * sin, rest), -1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turn the first channels of each row by the angles of its position.

    Args:
        x: (batch, seqlen, nheads, headdim), or with cu_seqlens (total, nheads, headdim).
        cos, sin: (positions, rotary_dim / 2). Rows behind the last position are an error; on a
            GPU, whose tensors are not read, rows that offsets in tensors put there are not turned.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        inplace: whether x itself is turned.
        seqlen_offsets: the position of each sequence's first row, one for all or (batch,).
        cu_seqlens: (batch + 1,) offsets of packed sequences; rows behind the last stay.
        max_seqlen: the longest length; saccade does not need it.

    Returns:
        The turned rows, of x's shape and dtype.

    Examples:
        >>> from saccade.integrations.flash_attn import apply_rotary_emb
        >>> angles = torch.arange(16)[:, None] * 10_000.0 ** (-torch.arange(8) / 8)
        >>> apply_rotary_emb(torch.randn(2, 16, 4, 32), angles.cos(), angles.sin()).shape
        torch.Size([2, 16, 4, 32])
    """
    if max_seqlen is not None:
        whole("max_seqlen", max_seqlen)
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"cos, sin: got {list(cos.shape)} and {list(sin.shape)}, take (positions, pairs)"
        )
    position, real = _positions(x, seqlen_offsets, cu_seqlens)
    there = (position >= 0) & (position < len(cos))
    if cu_seqlens is None and not (isinstance(seqlen_offsets, Tensor) and seqlen_offsets.dim()):
        first = whole("seqlen_offsets", seqlen_offsets)
        _check_room(first, first + x.shape[1], len(cos))
    elif position.device.type == "cpu" and position.numel() and not torch.compiler.is_compiling():
        positions = position[real] if bool(real.any()) else position.new_zeros(1)
        _check_room(int(positions.min()), int(positions.max()) + 1, len(cos))
    turn, position = (there & real).unsqueeze(-1), position.clamp(0, max(len(cos) - 1, 0))
    angles: Any
    if len(cos):
        angles = torch.where(turn, cos[position], 1), torch.where(turn, sin[position], 0)
    else:
        angles = tuple(cos.new_full((len(position), cos.shape[1]), n) for n in (1, 0))
    turned = saccade.apply_rotary(
        x.flatten(0, -3), angles, interleaved=flag("interleaved", interleaved)
    ).view(x.shape)
    return x.copy_(turned) if flag("inplace", inplace) else turned


apply_rotary_emb_func = apply_rotary_emb
"""`apply_rotary_emb` by an older name of FlashAttention's.

Examples:
    >>> from saccade.integrations.flash_attn import rotary
    >>> rotary.apply_rotary_emb_func is rotary.apply_rotary_emb
    True
"""


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Turn queries and keys in place.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim), or with num_heads_q
            (batch, seqlen, num_heads_q + 2 * nheads_k, headdim).
        cos_k, sin_k: angles of keys; those of queries where None.
        others: as of `apply_rotary_emb`.

    Returns:
        qkv.

    Examples:
        >>> from saccade.integrations.flash_attn import apply_rotary_emb_qkv_
        >>> angles = torch.arange(16)[:, None] * 10_000.0 ** (-torch.arange(8) / 8)
        >>> qkv = torch.randn(2, 16, 3, 4, 32)
        >>> apply_rotary_emb_qkv_(qkv, angles.cos(), angles.sin()) is qkv
        True
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        query, key = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4 and num_heads_q is not None:
        heads = whole("num_heads_q", num_heads_q)
        num_keys, odd = divmod(qkv.shape[2] - heads, 2)
        if odd or num_keys < 0 or heads < 0:
            raise ValueError(
                f"num_heads_q: got {heads} for {qkv.shape[2]} heads, takes what leaves an even "
                "number"
            )
        query, key = qkv[:, :, :heads], qkv[:, :, heads : heads + num_keys]
    else:
        raise ValueError(
            f"qkv: got {list(qkv.shape)}, takes (batch, seqlen, 3, nheads, headdim), or with "
            "num_heads_q (batch, seqlen, nheads, headdim)"
        )
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    for rows, angles in ((query, (cos, sin)), (key, (cos_k, sin_k))):
        apply_rotary_emb(rows, *angles, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Turn keys in place.

    Args:
        kv: (batch, seqlen, 2, nheads, headdim).
        others: as of `apply_rotary_emb`.

    Returns:
        kv.

    Examples:
        >>> from saccade.integrations.flash_attn import apply_rotary_emb_kv_
        >>> angles = torch.arange(16)[:, None] * 10_000.0 ** (-torch.arange(8) / 8)
        >>> kv = torch.randn(2, 16, 2, 4, 32)
        >>> apply_rotary_emb_kv_(kv, angles.cos(), angles.sin()) is kv
        True
    """
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: got {list(kv.shape)}, takes (batch, seqlen, 2, nheads, headdim)")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(nn.Module):
    """Rotation by the angles of positions, in place; the angles are kept for later calls.

    Args:
        dim: channels that are turned.
        base: the slowest pair turns by about 1 / base from one position to the next.
        interleaved: as of `apply_rotary_emb`.
        scale_base: of xPos, which also scales queries up and keys down; None: no scale.
        device: of the frequencies.

    Source: Su et al. 2021, equation 15; Sun et al. 2022 (xPos), algorithm 1.

    Examples:
        >>> from saccade.integrations.flash_attn import RotaryEmbedding
        >>> qkv = torch.randn(2, 16, 3, 4, 32)
        >>> RotaryEmbedding(32)(qkv).shape
        torch.Size([2, 16, 3, 4, 32])
    """

    dim: int
    base: float
    interleaved: bool
    scale_base: float | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ):
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Any = None
        self._sin_cached: Any = None
        self._cos_k_cached: Any = None
        self._sin_k_cached: Any = None

    def _pairs(self, device: Any) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return 1.0 / self.base ** (self._pairs(device) / self.dim)

    def _compute_scale(self, device: Any = None) -> Tensor:
        return (self._pairs(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Make the tables anew if they are too short, on another device, or of another dtype."""
        cached = self._cos_cached
        if cached is not None and seqlen <= self._seq_len_cached:
            stale = self.training and cached.is_inference()
            if cached.device == device and cached.dtype == dtype and not stale:
                return
        self._seq_len_cached = seqlen
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        # In float32 even where the module was cast since: positions times frequencies are large.
        angles = torch.outer(position, self._compute_inv_freq(device))
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)
            return
        power = (position - seqlen // 2) / self.scale_base
        scale = self._compute_scale(device) ** power.unsqueeze(-1)
        self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = (
            table.to(dtype)
            for table in (
                angles.cos() * scale, angles.sin() * scale,
                angles.cos() / scale, angles.sin() / scale,
            )
        )  # fmt: skip

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Turn queries and keys in place.

        Args:
            qkv: as of `apply_rotary_emb_qkv_`; with kv queries alone, (batch, seqlen, nheads,
                headdim).
            kv: (batch, seqlen, 2, nheads, headdim).
            seqlen_offset: the position of each sequence's first row, one for all or (batch,).
            max_seqlen: how many positions the tables have; with a tensor for seqlen_offset it is
                needed once.

        Returns:
            qkv, or (queries, kv).
        """
        many = isinstance(seqlen_offset, Tensor) and seqlen_offset.dim() > 0
        if max_seqlen is not None:
            length = whole("max_seqlen", max_seqlen)
        elif not many:
            length = qkv.shape[1] + whole("seqlen_offset", seqlen_offset)
        elif self._cos_cached is None:
            raise ValueError("max_seqlen: got None with a tensor for seqlen_offset, takes a number")
        else:
            length = self._seq_len_cached
        self._update_cos_sin_cache(length, qkv.device, qkv.dtype)
        angles = self._cos_cached, self._sin_cached
        key_angles = (self._cos_k_cached, self._sin_k_cached) if self.scale_base else angles
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, *angles, *key_angles, self.interleaved, seqlen_offset, num_heads_q
            )
        query = apply_rotary_emb(qkv, *angles, self.interleaved, True, seqlen_offset)
        return query, apply_rotary_emb_kv_(kv, *key_angles, self.interleaved, seqlen_offset)


def _check_room(first: int, end: int, positions: int) -> None:
    """Refuse tables that are too short."""
    if first < 0:
        raise ValueError(f"seqlen_offsets: got {first}, takes no place before the first")
    if end > positions:
        raise ValueError(f"cos, sin: got {positions} positions, take at least {end}")


def _positions(x: Tensor, seqlen_offsets: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The position of each row, flat, and whether it belongs to a sequence."""
    many = isinstance(seqlen_offsets, Tensor) and seqlen_offsets.dim() > 0
    first: Any = seqlen_offsets if many else whole("seqlen_offsets", seqlen_offsets)
    takes = 4 if cu_seqlens is None else 3
    if x.dim() != takes:
        raise ValueError(f"x: got {x.dim()} dimensions, takes {takes}")
    batch = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    if many and tuple(first.shape) != (batch,):
        raise ValueError(f"seqlen_offsets: got {list(first.shape)}, takes a number or [{batch}]")
    if many and first.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"seqlen_offsets: got {first.dtype}, takes whole numbers")
    row = torch.arange(x.shape[-3], device=x.device)
    if cu_seqlens is None:
        position = (first[:, None] if many else first) + row.expand(batch, -1)
        return position.reshape(-1), torch.ones_like(position, dtype=torch.bool).reshape(-1)
    owner = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    real = (owner < batch) & (row >= cu_seqlens[0])
    owner = owner.clamp(max=max(batch - 1, 0))
    return row - cu_seqlens[owner] + (first[owner] if many else first), real
