"""FlashAttention's calls, against its documentation written out in float64."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saccade.integrations.flash_attn as shim

calls: Any = shim  # called with unpacked lists
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, a few hundred terms


def qkv(query_len: int = 7, kv_len: int = 9, *, kv_heads: int = 2, batch: int = 2) -> list[Tensor]:
    torch.manual_seed(query_len)
    lengths = ((query_len, 4), (kv_len, kv_heads), (kv_len, kv_heads))
    return [torch.randn(batch, n, heads, 8, dtype=torch.float64) for n, heads in lengths]


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and lse by the documentation's formulas; rows that see nothing give 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = (rows.repeat_interleave(group, 2) for rows in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    place = i + k.shape[1] - q.shape[1]
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        scores = scores - slopes[:, :, None, None] * (place - j).abs()
    left, right = window_size
    right = 0 if causal else right
    seen = torch.ones_like(place - j, dtype=torch.bool)
    if left >= 0:
        seen &= j >= place - left
    if right >= 0:
        seen &= j <= place + right
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), scores.logsumexp(-1)


written_out: Any = _written_out  # called with unpacked lists
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
HOW: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (3, -1)},
    {"window_size": (-1, 1)},
    {"window_size": (-1, 0)},
    {"window_size": (2, 5), "causal": True},
    {"softcap": 1.5, "causal": True},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": torch.stack((SLOPES, SLOPES * 3)), "softcap": 2.0, "causal": True},
    {"softmax_scale": 0.3},
]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("lengths", [(7, 9), (9, 7)])
def test_what_the_documentation_says(lengths: tuple[int, int], how: dict[str, Any]) -> None:
    tensors = [rows.requires_grad_() for rows in qkv(*lengths)]
    wanted, lse = written_out(*tensors, **how)
    found = calls.flash_attn_func(*tensors, **how)
    torch.testing.assert_close(found, wanted, **CLOSE)
    grad = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(found, tensors, grad, retain_graph=True),
        torch.autograd.grad(wanted, tensors, grad, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other.nan_to_num(0.0), **CLOSE)
    _, found_lse, weights = calls.flash_attn_func(*tensors, **how, return_attn_probs=True)
    torch.testing.assert_close(found_lse, lse, **CLOSE)
    assert weights.numel() == 0


@pytest.mark.parametrize(
    ("lengths", "mask"),
    [((2, 5), ["11110", "11111"]), ((5, 2), ["00", "00", "00", "10", "11"])],
)
def test_the_documented_causal_masks(lengths: tuple[int, int], mask: list[str]) -> None:
    q, k, _ = qkv(*lengths, batch=1)
    values = torch.eye(lengths[1], dtype=torch.float64)[None, :, None].repeat(1, 1, 2, 1)
    weights = calls.flash_attn_func(q, k, values, causal=True)[0, :, 0]
    assert [["01"[int(w > 0)] for w in row] for row in weights.tolist()] == [*map(list, mask)]


def test_tensors_in_one() -> None:
    q, k, v = qkv(7, 7, kv_heads=4)
    wanted = calls.flash_attn_func(q, k, v, 0.0, None, True)
    together = calls.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), 0.0, None, True)
    torch.testing.assert_close(together, wanted, rtol=0, atol=0)
    pair = calls.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True)
    torch.testing.assert_close(pair, wanted, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"qkv: got \[2, 7, 4, 8\], takes \(batch, seqlen, 3"):
        calls.flash_attn_qkvpacked_func(q)


OFFSETS = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
KV_OFFSETS = torch.tensor([0, 5, 6, 10], dtype=torch.int32)


@pytest.mark.parametrize("how", HOW[:-2], ids=str)
def test_packed_sequences(how: dict[str, Any]) -> None:
    q, k, v = (rows[0] for rows in qkv(10, 10, batch=1))
    sides = OFFSETS, KV_OFFSETS, 7, 5
    output, lse, _ = calls.flash_attn_varlen_func(q, k, v, *sides, **how, return_attn_probs=True)
    assert output.shape == q.shape and lse.shape == (4, 10)
    for b in range(3):
        rows, keys = (slice(*o[b : b + 2].tolist()) for o in (OFFSETS, KV_OFFSETS))
        wanted, wanted_lse = written_out(q[None, rows], k[None, keys], v[None, keys], **how)
        torch.testing.assert_close(output[rows], wanted[0], **CLOSE)
        torch.testing.assert_close(lse[:, rows], wanted_lse[0], **CLOSE)


def test_packed_tensors_in_one() -> None:
    q, k, v = (rows[0] for rows in qkv(10, 10, batch=1, kv_heads=4))
    wanted = calls.flash_attn_varlen_func(q, k, v, OFFSETS, OFFSETS, 7, 7, causal=True)
    both = torch.stack((k, v), 1)
    pair = calls.flash_attn_varlen_kvpacked_func(q, both, OFFSETS, OFFSETS, 7, 7, causal=True)
    three = torch.stack((q, k, v), 1)
    together = calls.flash_attn_varlen_qkvpacked_func(three, OFFSETS, 7, causal=True)
    torch.testing.assert_close(pair, wanted, rtol=0, atol=0)
    torch.testing.assert_close(together, wanted, rtol=0, atol=0)


def test_packed_queries_over_pages() -> None:
    q, k, v = (rows[0] for rows in qkv(10, 10, batch=1))
    table = torch.tensor([[4, 1], [3, 0], [2, 0]], dtype=torch.int32)
    pages = [torch.full((5, 4, 2, 8), torch.nan, dtype=torch.float64) for _ in range(2)]
    for b in range(3):
        first, end = KV_OFFSETS[b : b + 2].tolist()
        for slot in range(end - first):
            for pool, rows in zip(pages, (k, v), strict=True):
                pool[table[b, slot // 4], slot % 4] = rows[first + slot]
    sides = OFFSETS, KV_OFFSETS, 7, 5
    wanted = calls.flash_attn_varlen_func(q, k, v, *sides, causal=True)
    found = calls.flash_attn_varlen_func(q, *pages, *sides, causal=True, block_table=table)
    torch.testing.assert_close(found, wanted, **CLOSE)
    with pytest.raises(NotImplementedError, match=r"dropout_p: got 0\.1 with block_table"):
        calls.flash_attn_varlen_func(q, *pages, *sides, 0.1, block_table=table)


def test_dropout_keeps_the_mean_and_has_no_weights_to_show() -> None:
    q, k, v = (rows.float() for rows in qkv(64, 64))
    torch.manual_seed(0)
    dropped = torch.stack([calls.flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(200)])
    spread = dropped.std(0) / math.sqrt(200)
    off = (dropped.mean(0) - calls.flash_attn_func(q, k, v)).abs()
    assert spread.min() > 0 and (off < 6 * spread).all()
    with pytest.raises(NotImplementedError, match="return_attn_probs: got True with dropout_p"):
        calls.flash_attn_func(q, k, v, dropout_p=0.5, return_attn_probs=True)


@pytest.mark.parametrize("shape", [(1, 2, 4), (3, 4), (1, 4), (2, 3), (3,), (1,)], ids=str)
def test_wrong_slopes_are_named(shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    wrong: dict[str, Any] = {"alibi_slopes": torch.zeros(shape)}
    with pytest.raises(ValueError, match=r"alibi_slopes: got .* takes .* \[4\] or \[2, 4\]"):
        calls.flash_attn_func(q, k, v, **wrong)
    with pytest.raises(ValueError, match=r"alibi_slopes: got .* takes .* \[4\] or \[2, 4\]"):
        calls.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 4, 4, **wrong)
    with pytest.raises(ValueError, match=r"alibi_slopes: got .* takes .* \[4\] or \[2, 4\]"):
        calls.flash_attn_with_kvcache(q, k, v, **wrong)


def test_numbers_that_are_none_are_named() -> None:
    with pytest.raises(TypeError, match="alibi_slopes: got list, takes a tensor"):
        calls.flash_attn_func(*qkv(), alibi_slopes=[0.5] * 4)
    with pytest.raises(TypeError, match=r"alibi_slopes: got torch.int32, takes floating"):
        calls.flash_attn_func(*qkv(), alibi_slopes=torch.ones(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="softcap: got nan"):
        calls.flash_attn_func(*qkv(), softcap=math.nan)


# ---- the cache --------------------------------------------------------------------------------

BEFORE = [4, 0, 9]


def slabs(length: int, entries: int = 3) -> list[Tensor]:
    torch.manual_seed(length)
    return [torch.randn(entries, length, 2, 8, dtype=torch.float64) for _ in range(2)]


def asked(new: int) -> list[Tensor]:
    return [rows[:, :new] for rows in qkv(new, new, batch=3)]


@pytest.mark.parametrize("how", HOW[:7], ids=str)
@pytest.mark.parametrize("length", [13, 1025, 2048])
def test_what_is_new_is_appended_and_all_is_seen(length: int, how: dict[str, Any]) -> None:
    caches = slabs(length)
    before = torch.tensor(BEFORE, dtype=torch.int32)
    q, k, v = asked(3)
    kept = [cache.clone() for cache in caches]
    output, lse = calls.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=before, **how, return_softmax_lse=True
    )
    for b, n in enumerate(BEFORE):
        for cache, old, new in zip(caches, kept, (k, v), strict=True):
            torch.testing.assert_close(cache[b, n : n + 3], new[b], rtol=0, atol=0)
            torch.testing.assert_close(cache[b, :n], old[b, :n], rtol=0, atol=0)
            torch.testing.assert_close(cache[b, n + 3 :], old[b, n + 3 :], rtol=0, atol=0)
        seen = [cache[b : b + 1, : n + 3] for cache in caches]
        wanted, wanted_lse = written_out(q[b : b + 1], *seen, **how)
        torch.testing.assert_close(output[b : b + 1], wanted, **CLOSE)
        torch.testing.assert_close(lse[b : b + 1], wanted_lse, **CLOSE)


def test_entries_of_the_cache_by_number_and_from_their_start() -> None:
    caches = slabs(12, entries=5)
    q, k, v = asked(2)
    entries, start = torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor([1, 0, 3])
    output = calls.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=6, cache_batch_idx=entries,
        cache_leftpad=start.int(), causal=True,
    )  # fmt: skip
    for b in range(3):
        entry, first = int(entries[b]), int(start[b])
        torch.testing.assert_close(caches[0][entry, 6:8], k[b], rtol=0, atol=0)
        seen = [cache[entry : entry + 1, first:8] for cache in caches]
        wanted, _ = written_out(q[b : b + 1], *seen, causal=True)
        torch.testing.assert_close(output[b : b + 1], wanted, **CLOSE)


def test_a_whole_cache_without_anything_new() -> None:
    caches = slabs(12)
    q, _, _ = asked(1)
    output = calls.flash_attn_with_kvcache(q, *caches)
    torch.testing.assert_close(output, written_out(q, *caches)[0], **CLOSE)


def test_a_cache_is_read_in_its_own_dtype_under_autocast() -> None:
    q, *caches = (rows.float() for rows in (asked(1)[0], *slabs(12)))
    wanted = calls.flash_attn_with_kvcache(q, *caches)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(calls.flash_attn_with_kvcache(q, *caches), wanted)


def turned(rows: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rows [length, heads, dim] by complex numbers; angles [length, pairs]."""
    pairs = angles.shape[1]
    first, rest = rows[..., : 2 * pairs], rows[..., 2 * pairs :]
    split = first.unflatten(-1, (pairs, 2)) if interleaved else first.unflatten(-1, (2, pairs)).mT
    by = torch.polar(torch.ones_like(angles), angles)[:, None]
    done = torch.view_as_real(torch.view_as_complex(split.contiguous()) * by)
    return torch.cat(((done if interleaved else done.mT).flatten(-2), rest), -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_rotary(causal: bool, interleaved: bool) -> None:
    caches = slabs(16)
    q, k, v = asked(3)
    angles = torch.randn(20, 3, dtype=torch.float64)
    output = calls.flash_attn_with_kvcache(
        q, *caches, k, v, angles.cos(), angles.sin(), 5, causal=causal,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    for b in range(3):
        new = turned(k[b], angles[5:8], interleaved)
        torch.testing.assert_close(caches[0][b, 5:8], new, **CLOSE)
        of_query = angles[5:8] if causal else angles[5:6].expand(3, -1)
        row = turned(q[b], of_query, interleaved)[None]
        wanted, _ = written_out(row, *(c[b : b + 1, :8] for c in caches), causal=causal)
        torch.testing.assert_close(output[b : b + 1], wanted, **CLOSE)


def test_a_cache_of_pages() -> None:
    pages = [torch.full((6, 4, 2, 8), torch.nan, dtype=torch.float64) for _ in range(2)]
    table = torch.tensor([[3, 5], [0, 2], [4, 1]], dtype=torch.int32)
    q, k, v = asked(5)
    for before, part in ((0, slice(0, 3)), (3, slice(3, 5))):
        output = calls.flash_attn_with_kvcache(
            q[:, part], *pages, k[:, part], v[:, part], cache_seqlens=before, block_table=table,
            causal=True,
        )  # fmt: skip
    torch.testing.assert_close(output, written_out(q[:, 3:], k, v, causal=True)[0], **CLOSE)


def tables(*positions: int) -> dict[str, Tensor]:
    """Cosines and sines of two pairs."""
    return {"rotary_cos": torch.ones(*positions, 2), "rotary_sin": torch.zeros(*positions, 2)}


def test_what_cannot_be_is_refused_by_name() -> None:
    caches = slabs(8)
    q, k, v = asked(3)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("cache_seqlens: got None with k", {"k": k, "v": v}),
        ("cache_seqlens: got 6 and 3 new tokens, the cache holds 8",
         {"k": k, "v": v, "cache_seqlens": 6}),
        ("cache_seqlens: got -1, takes 0 to 8", {"cache_seqlens": -1}),
        ("cache_seqlens: got -2, takes 0 to 8", {"cache_seqlens": torch.tensor([4, -2, 3])}),
        ("cache_seqlens: got torch.float32", {"cache_seqlens": torch.ones(3)}),
        (r"cache_seqlens: got torch.int64 \(2,\)", {"cache_seqlens": torch.tensor([1, 2])}),
        ("k and v: got one of the two", {"k": k, "cache_seqlens": 1}),
        ("rotary_cos and rotary_sin: got one", {"rotary_cos": torch.ones(9, 2)}),
        (r"rotary_cos: got \[7, 2\], takes \[at least 8",
         {"k": k, "v": v, "cache_seqlens": 1, **tables(7)}),
        (r"rotary_cos: got \[1, 9, 2\]", {"k": k, "v": v, "cache_seqlens": 1, **tables(1, 9)}),
        ("rotary_cos, rotary_sin: got tables without k", {"cache_seqlens": 1, **tables(9)}),
        (r"k: got \[1, 3, 2, 8\], takes \(3, seqlen_new, 2, 8\)",
         {"k": k[:1], "v": v[:1], "cache_seqlens": 1}),
        (r"v: got \[3, 1, 2, 8\], takes \(3, 3, 2, 8\)",
         {"k": k, "v": v[:, :1], "cache_seqlens": 1}),
        (r"cache_leftpad: got torch.int32 \(1,\), takes int32 \(3,\)",
         {"cache_leftpad": torch.zeros(1).int()}),
        (r"cache_leftpad: got torch.int32 \(4,\)", {"cache_leftpad": torch.zeros(4).int()}),
        ("cache_leftpad: got torch.float32", {"cache_leftpad": torch.zeros(3)}),
        ("cache_batch_idx: got torch.float32", {"cache_batch_idx": torch.zeros(3)}),
        ("cache_batch_idx: got a tensor with block_table",
         {"block_table": torch.zeros(3, 1).int(), "cache_batch_idx": torch.zeros(3).int()}),
    ]  # fmt: skip
    for message, options in refused:
        with pytest.raises(ValueError, match=message):
            calls.flash_attn_with_kvcache(q, *caches, **options)
    for name in ("cache_leftpad", "cache_batch_idx"):
        with pytest.raises(TypeError, match=rf"{name}: got list, takes an int32 tensor \(3,\)"):
            calls.flash_attn_with_kvcache(q, *caches, **{name: [0, 1, 2]})
    with pytest.raises(ValueError, match=r"q: got \[3, 4, 8\], takes \(batch, seqlen_q"):
        calls.flash_attn_with_kvcache(q[0], *caches)
    with pytest.raises(ValueError, match="k_cache: got 2 entries, takes one for each of 3"):
        calls.flash_attn_with_kvcache(q, *slabs(8, entries=2))
    apart = [cache[::2] for cache in slabs(2048, entries=6)]
    with pytest.raises(ValueError, match="k_cache, v_cache: got strides"):
        calls.flash_attn_with_kvcache(q, *apart)


# ---- in other people's code ---------------------------------------------------------------------


def test_an_import_finds_the_calls_until_they_are_taken_away() -> None:
    absent = importlib.util.find_spec("flash_attn") is None
    with shim.installed():
        shim.install()  # once more changes nothing
        from flash_attn import flash_attn_func, flash_attn_interface
        from flash_attn.bert_padding import unpad_input

        assert flash_attn_func is flash_attn_interface.flash_attn_func is shim.flash_attn_func
        assert unpad_input is shim.unpad_input
        assert sys.modules["flash_attn"].__version__.startswith("2.8")
        with pytest.raises(ImportError):
            importlib.import_module("flash_attn.ops")
        with pytest.raises(AttributeError, match="no 'flash_attn_something'; it has __version__"):
            _ = sys.modules["flash_attn"].flash_attn_something
    shim.uninstall()  # once more changes nothing
    assert "flash_attn.bert_padding" not in sys.modules
    assert (importlib.util.find_spec("flash_attn") is None) == absent


def test_what_was_imported_before_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type(sys)("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", theirs)
    with shim.installed():
        assert sys.modules["flash_attn"] is not theirs
    assert sys.modules["flash_attn"] is theirs


def test_padding_there_and_back() -> None:
    rows = torch.randn(3, 5, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]])
    tokens, places, offsets, longest, used = shim.unpad_input(rows, mask)
    assert offsets.tolist() == [0, 2, 7, 9] and longest == 5 and used.tolist() == [2, 5, 2]
    assert offsets.dtype == torch.int32
    padded = shim.pad_input(tokens, places, 3, 5)
    torch.testing.assert_close(padded, rows * mask[..., None], rtol=0, atol=0)
    padded.sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, mask[..., None].expand(3, 5, 2).float())
    more = shim.unpad_input(rows, mask, torch.tensor([[0, 0, 1, 0, 0]] + [[0] * 5] * 2))
    assert more[2].tolist() == [0, 3, 8, 10] and more[4].tolist() == [2, 5, 2]


class Block(nn.Module):
    """A layer of a small GPT, its attention written against `flash_attn` or against SDPA."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash = flash
        self.norm, self.norm_mlp = nn.LayerNorm(32), nn.LayerNorm(32)
        self.project, self.combine = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, hidden: Tensor) -> Tensor:
        qkv = self.project(self.norm(hidden)).unflatten(-1, (3, 4, 8))
        if self.flash:
            from flash_attn import flash_attn_qkvpacked_func

            mixed = flash_attn_qkvpacked_func(qkv, dropout_p=0.0, causal=True)
        else:
            q, k, v = qkv.transpose(1, 3).unbind(2)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2)
        hidden = hidden + self.combine(mixed.flatten(2))
        return hidden + self.mlp(self.norm_mlp(hidden))


def losses(flash: bool, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 32), Block(flash), Block(flash), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(steps):
        tokens = torch.randint(16, (4, 1)) + torch.arange(33) * torch.randint(1, 4, (4, 1))
        logits = model(tokens[:, :-1] % 16)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), (tokens[:, 1:] % 16).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_gpt_written_against_flash_attn_trains_as_through_sdpa() -> None:
    with shim.installed():
        ours = losses(flash=True)
    theirs = losses(flash=False)
    assert theirs[-1] < 0.8 * theirs[0]  # it learns something
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-5)
