"""`flash_attn.layers.rotary`, against complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.integrations.flash_attn import rotary

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64
ANGLES = torch.linspace(0, 7, 20 * 3, dtype=torch.float64).view(20, 3)


def turned(rows: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rows [..., length, heads, dim] by complex numbers; angles [..., length, pairs]."""
    pairs = angles.shape[-1]
    first, rest = rows[..., : 2 * pairs], rows[..., 2 * pairs :]
    split = first.unflatten(-1, (pairs, 2)) if interleaved else first.unflatten(-1, (2, pairs)).mT
    by = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    done = torch.view_as_real(torch.view_as_complex(split.contiguous()) * by)
    return torch.cat(((done if interleaved else done.mT).flatten(-2), rest), -1)


def rows(*shape: int) -> Tensor:
    torch.manual_seed(len(shape))
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 4, torch.tensor(4), torch.tensor([1, 9])], ids=str)
def test_rows_are_turned_by_their_places(offset: Any, interleaved: bool) -> None:
    x = rows(2, 5, 3, 8).requires_grad_()
    start = torch.as_tensor(offset).expand(2)
    angles = torch.stack([ANGLES[n : n + 5] for n in start.tolist()])
    wanted = turned(x, angles, interleaved)
    options: dict[str, Any] = {"interleaved": interleaved, "seqlen_offsets": offset}
    found = rotary.apply_rotary_emb(x, ANGLES.cos(), ANGLES.sin(), **options)
    torch.testing.assert_close(found, wanted, **CLOSE)
    plain = rotary.apply_rotary_emb_torch(x, angles.cos(), angles.sin(), interleaved)
    torch.testing.assert_close(plain, wanted, **CLOSE)
    grad = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, x, grad), torch.autograd.grad(wanted, x, grad), **CLOSE
    )
    again = x.detach().clone()
    same = rotary.apply_rotary_emb(again, ANGLES.cos(), ANGLES.sin(), inplace=True, **options)
    assert same is again
    torch.testing.assert_close(again, wanted.detach(), **CLOSE)


@pytest.mark.parametrize("offset", [2, torch.tensor([1, 0, 9])], ids=str)
def test_packed_rows_and_those_behind_them(offset: Any) -> None:
    x, offsets = rows(12, 3, 8), torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    found = rotary.apply_rotary_emb(
        x, ANGLES.cos(), ANGLES.sin(), seqlen_offsets=offset, cu_seqlens=offsets, max_seqlen=7
    )
    start = torch.as_tensor(offset).expand(3).tolist()
    for b in (0, 2):  # the other has no rows
        own = slice(*offsets[b : b + 2].tolist())
        length = own.stop - own.start
        wanted = turned(x[own], ANGLES[start[b] : start[b] + length])
        torch.testing.assert_close(found[own], wanted, **CLOSE)
    torch.testing.assert_close(found[10:], x[10:], rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_in_place(interleaved: bool) -> None:
    table, other = (ANGLES.cos(), ANGLES.sin()), ((ANGLES * 2).cos(), (ANGLES * 2).sin())
    for key_angles in ((), other):
        by_key = ANGLES[2:7] * (2 if key_angles else 1)
        for together, query, key, options in (
            (rows(2, 5, 3, 4, 8), lambda t: t[:, :, 0], lambda t: t[:, :, 1], {}),
            (rows(2, 5, 8, 8), lambda t: t[:, :, :4], lambda t: t[:, :, 4:6], {"num_heads_q": 4}),
        ):
            leaf = together.requires_grad_()
            found = rotary.apply_rotary_emb_qkv_(
                leaf * 1, *table, *key_angles, interleaved=interleaved, seqlen_offsets=2,
                **options,  # type: ignore[arg-type]
            )  # fmt: skip
            wanted = leaf * 1
            query(wanted)[:] = turned(query(leaf), ANGLES[2:7], interleaved)
            key(wanted)[:] = turned(key(leaf), by_key, interleaved)
            torch.testing.assert_close(found, wanted, **CLOSE)
            grad = torch.randn_like(found)
            torch.testing.assert_close(
                torch.autograd.grad(found, leaf, grad),
                torch.autograd.grad(wanted, leaf, grad),
                **CLOSE,
            )
    kv = rows(2, 5, 2, 4, 8)
    before = kv.clone()
    assert rotary.apply_rotary_emb_kv_(kv, *table, interleaved=interleaved) is kv
    torch.testing.assert_close(kv[:, :, 0], turned(before[:, :, 0], ANGLES[:5], interleaved))
    torch.testing.assert_close(kv[:, :, 1], before[:, :, 1], rtol=0, atol=0)


def test_the_module_and_its_tables() -> None:
    module = rotary.RotaryEmbedding(6, base=100.0)
    place = torch.arange(40.0)
    angles = torch.outer(place, 100.0 ** -(torch.arange(0, 6, 2) / 6)).double()
    qkv = rows(2, 5, 3, 4, 8)
    before = qkv.clone()
    assert module(qkv, seqlen_offset=3) is qkv and module._cos_cached.shape == (8, 3)
    wanted = turned(before[:, :, :2].flatten(2, 3), angles[3:8]).unflatten(2, (2, 4))
    torch.testing.assert_close(qkv[:, :, :2], wanted, rtol=1e-5, atol=1e-5)
    kept = module._cos_cached
    q, kv = rows(2, 5, 4, 8), rows(2, 5, 2, 4, 8)
    old = q.clone(), kv.clone()
    found = module(q, kv, seqlen_offset=torch.tensor([0, 3]))
    assert found[0] is q and found[1] is kv and module._cos_cached is kept
    by = torch.stack((angles[:5], angles[3:8]))
    torch.testing.assert_close(q, turned(old[0], by), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv[:, :, 0], turned(old[1][:, :, 0], by), rtol=1e-5, atol=1e-5)
    module(rows(2, 5, 3, 4, 8), max_seqlen=40)
    assert module._cos_cached.shape == (40, 3)
    assert not module.state_dict()
    module.half()
    module._cos_cached = None
    module(rows(1, 30, 3, 4, 8).float())
    torch.testing.assert_close(module._cos_cached.double(), angles[:30].cos(), rtol=0, atol=1e-5)


def test_the_scale_of_xpos() -> None:
    module = rotary.RotaryEmbedding(8, scale_base=512)
    qkv = rows(1, 6, 3, 2, 8)
    before = qkv.clone()
    module(qkv)
    scale = ((torch.arange(0, 8, 2) + 0.4 * 8) / (1.4 * 8)) ** ((torch.arange(6) - 3) / 512)[
        :, None
    ]
    angles = torch.outer(torch.arange(6.0), 10000.0 ** -(torch.arange(0, 8, 2) / 8)).double()
    by = torch.cat((scale, scale), -1).unsqueeze(1)
    torch.testing.assert_close(
        qkv[0, :, 0], turned(before[0, :, 0], angles) * by, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        qkv[0, :, 1], turned(before[0, :, 1], angles) / by, rtol=1e-5, atol=1e-5
    )


def test_what_does_not_fit_is_named() -> None:
    x, table = rows(2, 5, 3, 8), (ANGLES.cos(), ANGLES.sin())
    call: Any = rotary.apply_rotary_emb
    refused: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "cos, sin: got 20 positions, take at least 23",
         lambda: call(x, *table, seqlen_offsets=18)),
        (ValueError, "seqlen_offsets: got -1", lambda: call(x, *table, seqlen_offsets=-1)),
        (ValueError, "cos, sin: got 20 positions, take at least 23",
         lambda: call(x, *table, seqlen_offsets=torch.tensor([0, 18]))),
        (ValueError, "seqlen_offsets: got -2, takes no place before the first",
         lambda: call(x, *table, seqlen_offsets=torch.tensor([0, -2]))),
        (ValueError, "cos, sin: got .* take", lambda: call(x, table[0], table[1][:, :2])),
        (ValueError, "x: got 3 dimensions, takes 4", lambda: call(x[0], *table)),
        (ValueError, r"seqlen_offsets: got \[3\], takes a number or \[2\]",
         lambda: call(x, *table, seqlen_offsets=torch.zeros(3, dtype=torch.int64))),
        (TypeError, r"seqlen_offsets: got torch\.float32, takes whole numbers",
         lambda: call(x, *table, seqlen_offsets=torch.tensor([0.0, 1.5]))),
        (TypeError, "seqlen_offsets: got 1.5", lambda: call(x, *table, seqlen_offsets=1.5)),
        (TypeError, "interleaved: got", lambda: call(x, *table, "no")),
        (TypeError, "inplace: got", lambda: call(x, *table, False, 2)),
        (TypeError, "max_seqlen: got", lambda: call(x, *table, max_seqlen=1.5)),
        (ValueError, "qkv: got", lambda: rotary.apply_rotary_emb_qkv_(x, *table)),
        (ValueError, "num_heads_q: got 2 for 3 heads",
         lambda: rotary.apply_rotary_emb_qkv_(x, *table, num_heads_q=2)),
        (ValueError, "kv: got", lambda: rotary.apply_rotary_emb_kv_(x, *table)),
        (ValueError, "max_seqlen: got None with a tensor",
         lambda: rotary.RotaryEmbedding(6)(rows(2, 5, 3, 4, 8), seqlen_offset=torch.zeros(2))),
    ]  # fmt: skip
    for kind, message, run in refused:
        with pytest.raises(kind, match=message):
            run()


@pytest.mark.parametrize("offset", [4, torch.tensor([1, 9])], ids=str)
def test_compiled(offset: Any) -> None:
    x, table = rows(2, 5, 3, 8), (ANGLES.cos(), ANGLES.sin())
    wanted = rotary.apply_rotary_emb(x, *table, seqlen_offsets=offset)
    call = torch.compile(rotary.apply_rotary_emb, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(x, *table, seqlen_offsets=offset), wanted, **CLOSE)
    with pytest.raises(ValueError, match="cos, sin: got 20 positions, take at least 23"):
        torch.compile(rotary.apply_rotary_emb, backend="eager")(x, *table, seqlen_offsets=18)
