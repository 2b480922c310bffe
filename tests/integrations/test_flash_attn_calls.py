"""FlashAttention's calls as its users write them: kinds of numbers, names, modules, version 3."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import saccade
import saccade.integrations.flash_attn as shim
from saccade.integrations.flash_attn import rotary, version_3

calls: Any = shim  # called with unpacked lists
third: Any = version_3
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, a few hundred terms
SAME: dict[str, Any] = {"rtol": 0, "atol": 0}
OFFSETS = torch.tensor([0, 3, 3, 10], dtype=torch.int32)


def qkv(query_len: int = 7, kv_len: int = 9) -> list[Tensor]:
    torch.manual_seed(query_len)
    lengths = ((query_len, 4), (kv_len, 2), (kv_len, 2))
    return [torch.randn(2, n, heads, 8, dtype=torch.float64) for n, heads in lengths]


def packed() -> list[Tensor]:
    return [rows[0] for rows in qkv(10, 10)]


def pages(k: Tensor, v: Tensor) -> tuple[list[Tensor], Tensor]:
    """Keys and values of OFFSETS' sequences in pages of four, and their table."""
    table = torch.tensor([[4, 1], [3, 0], [2, 0]], dtype=torch.int32)
    pools = [torch.zeros(5, 4, 2, 8, dtype=torch.float64) for _ in range(2)]
    for b in range(3):
        first, end = OFFSETS[b : b + 2].tolist()
        for slot in range(end - first):
            for pool, rows in zip(pools, (k, v), strict=True):
                pool[table[b, slot // 4], slot % 4] = rows[first + slot]
    return pools, table


# ---- numbers ----------------------------------------------------------------------------------

NUMBERS: list[dict[str, Any]] = [
    {"window_size": torch.tensor([3, 2])},
    {"window_size": [3, 2]},
    {"window_size": np.array([3, 2])},
    {"window_size": (np.int64(3), np.int32(2))},
    {"window_size": (torch.tensor(3), 2)},
    {"softmax_scale": torch.tensor(0.3, dtype=torch.float64)},
    {"softmax_scale": np.float64(0.3)},
    {"softmax_scale": torch.tensor([0.3], dtype=torch.float64)},
    {"softcap": torch.tensor(1.5)},
    {"softcap": 2},
    {"causal": torch.tensor(True)},
    {"causal": np.bool_(True)},
    {"causal": 1},
    {"dropout_p": np.float32(0)},
    {"deterministic": np.True_},
    {"return_attn_probs": torch.tensor(False)},
]


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """The same in Python's numbers."""
    name, value = next(iter(options.items()))
    if name == "window_size":
        return {name: (3, 2)}
    kind = {"causal": bool, "deterministic": bool, "return_attn_probs": bool}.get(name, float)
    return {name: kind(value)}


@pytest.mark.parametrize("options", NUMBERS, ids=str)
def test_numbers_of_any_kind(options: dict[str, Any]) -> None:
    tensors = qkv()
    wanted = calls.flash_attn_func(*tensors, **plain(options))
    torch.testing.assert_close(calls.flash_attn_func(*tensors, **options), wanted, **SAME)
    flat = packed()
    for longest in (7, torch.tensor(7), np.int64(7), torch.tensor([7], dtype=torch.int32)):
        found = calls.flash_attn_varlen_func(*flat, OFFSETS, OFFSETS, longest, longest, **options)
        wanted = calls.flash_attn_varlen_func(*flat, OFFSETS, OFFSETS, 7, 7, **plain(options))
        torch.testing.assert_close(found, wanted, **SAME)
    if not {"dropout_p", "deterministic", "return_attn_probs"} & set(options):
        cache = [rows.clone() for rows in tensors[1:]]
        wanted = calls.flash_attn_with_kvcache(
            tensors[0], *cache, cache_seqlens=8, **plain(options)
        )
        for length in (np.int64(8), torch.tensor(8), torch.tensor([8, 8])):
            found = calls.flash_attn_with_kvcache(
                tensors[0], *cache, cache_seqlens=length, **options
            )
            torch.testing.assert_close(found, wanted, **SAME)


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "window_size: got 3 ", {"window_size": 3}),
    (TypeError, "window_size: got .* takes two", {"window_size": (1, 2, 3)}),
    (TypeError, "window_size: got 1.5", {"window_size": (1.5, 2)}),
    (TypeError, "window_size: got None", {"window_size": (None, None)}),
    (TypeError, "window_size: got True", {"window_size": (True, 2)}),
    (TypeError, r"window_size: got a tensor \[2\]", {"window_size": (torch.zeros(2), 2)}),
    (TypeError, r"softmax_scale: got a tensor \[2\]", {"softmax_scale": torch.ones(2)}),
    (TypeError, "softmax_scale: got '0.3'", {"softmax_scale": "0.3"}),
    (TypeError, "softmax_scale: got True", {"softmax_scale": True}),
    (ValueError, "softmax_scale: got a tensor that requires a gradient",
     {"softmax_scale": torch.ones((), requires_grad=True)}),
    (TypeError, "softcap: got None", {"softcap": None}),
    (TypeError, "causal: got 2 ", {"causal": 2}),
    (TypeError, "causal: got a tensor", {"causal": torch.ones(2)}),
    (TypeError, "causal: got None", {"causal": None}),
    (TypeError, "dropout_p: got None", {"dropout_p": None}),
    (TypeError, "deterministic: got 'yes'", {"deterministic": "yes"}),
    (TypeError, "return_attn_probs: got 3", {"return_attn_probs": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "options"), WRONG, ids=str)
def test_what_is_no_number_is_named(
    kind: type[Exception], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=message):
        calls.flash_attn_func(*qkv(), **options)
    with pytest.raises(kind, match=message):
        calls.flash_attn_varlen_func(*packed(), OFFSETS, OFFSETS, 7, 7, **options)


def test_lengths_that_are_no_numbers_are_named() -> None:
    for sides, name in (((7.5, 7), "max_seqlen_q"), ((7, None), "max_seqlen_k")):
        with pytest.raises(TypeError, match=f"{name}: got"):
            calls.flash_attn_varlen_func(*packed(), OFFSETS, OFFSETS, *sides)
    q, k, v = qkv()
    for options in ({"cache_seqlens": 1.5}, {"num_splits": "many"}, {"return_softmax_lse": 7}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}: got"):
            calls.flash_attn_with_kvcache(q, k, v, **options)


# ---- signatures -------------------------------------------------------------------------------

COMMON = (
    "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
    "deterministic", "return_attn_probs",
)  # fmt: skip
SIDES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {
    "flash_attn_func": ("q", "k", "v", *COMMON),
    "flash_attn_kvpacked_func": ("q", "kv", *COMMON),
    "flash_attn_qkvpacked_func": ("qkv", *COMMON),
    "flash_attn_varlen_func": ("q", "k", "v", *SIDES, *COMMON, "block_table"),
    "flash_attn_varlen_kvpacked_func": ("q", "kv", *SIDES, *COMMON),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen", *COMMON),
}


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_signatures_can_be_read(name: str) -> None:
    parameters = inspect.signature(getattr(shim, name)).parameters
    assert tuple(parameters) == SIGNATURES[name]
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters.values())
    assert parameters["window_size"].default == (-1, -1)


# ---- gradients over pages ---------------------------------------------------------------------


def test_a_query_over_pages_may_wait_for_a_gradient() -> None:
    q, k, v = packed()
    pools, table = pages(k, v)
    sides = OFFSETS, OFFSETS, 7, 7
    wanted = calls.flash_attn_varlen_func(q, *pools, *sides, causal=True, block_table=table)
    waiting = q.clone().requires_grad_()
    output, lse, _ = calls.flash_attn_varlen_func(
        waiting, *pools, *sides, causal=True, block_table=table, return_attn_probs=True
    )
    torch.testing.assert_close(output, wanted, **SAME)
    for found in (output, lse):
        with pytest.raises(NotImplementedError, match="with block_table: got a gradient"):
            found.sum().backward(retain_graph=True)
    with torch.no_grad():
        found = calls.flash_attn_varlen_func(waiting, *pools, *sides, block_table=table)
    assert not found.requires_grad


@pytest.mark.parametrize("who", ["q", "k", "k_cache"])
def test_a_cache_may_wait_for_a_gradient(who: str) -> None:
    q, k, v = qkv(2, 2)
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {name: torch.zeros(2, 8, 2, 8, dtype=q.dtype) for name in ("k_cache", "v_cache")}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    wanted = calls.flash_attn_with_kvcache(**tensors, cache_seqlens=0, causal=True)
    copies[who].requires_grad_()
    found = calls.flash_attn_with_kvcache(**copies, cache_seqlens=0, causal=True)
    torch.testing.assert_close(found, wanted, **SAME)
    torch.testing.assert_close(copies["k_cache"].detach(), tensors["k_cache"], **SAME)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache: got a gradient"):
        found.sum().backward()


# ---- bert_padding -----------------------------------------------------------------------------


def test_rows_by_number_and_back() -> None:
    rows = torch.randn(6, 2, 3, requires_grad=True)
    places = torch.tensor([4, 0, 3])
    for take in (shim.index_first_axis, shim.IndexFirstAxis.apply):
        assert torch.equal(take(rows, places), rows[places])
    for put in (shim.index_put_first_axis, shim.IndexPutFirstAxis.apply):
        back = put(rows[places], places.int(), 6)
        assert torch.equal(back[places], rows[places]) and not bool(back[[1, 2, 5]].any())
    (grad,) = torch.autograd.grad(back.sum(), rows)
    assert torch.equal(grad[:, 0, 0], torch.tensor([1.0, 0, 0, 1, 1, 0]))
    for residual in (shim.index_first_axis_residual, shim.IndexFirstAxisResidual.apply):
        some, everything = residual(rows, places)
        assert torch.equal(some, rows[places]) and torch.equal(everything, rows)
        (grad,) = torch.autograd.grad(some.sum() + everything.sum(), rows)
        assert torch.equal(grad[:, 0, 0], torch.tensor([2.0, 1, 1, 2, 2, 1]))


def test_several_sequences_in_a_row() -> None:
    rows = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    found, places, offsets, longest = shim.unpad_input_for_concatenated_sequences(rows, lengths)
    assert offsets.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert offsets.dtype == torch.int32
    wanted = torch.cat((rows[0, :5], rows[1, :5], rows[2]))
    assert torch.equal(found, wanted) and torch.equal(rows.flatten(0, 1)[places], wanted)


def test_masks_of_other_rows_are_refused_by_name() -> None:
    rows, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    for wrong in (mask[:, :2], mask[:1], mask[:, None, None]):
        with pytest.raises(ValueError, match=r"attention_mask: got .*, takes \[2, 3\], as hidden"):
            shim.unpad_input(rows, wrong)
        with pytest.raises(ValueError, match=r"unused_mask: got .*, takes \[2, 3\], as hidden"):
            shim.unpad_input(rows, mask, wrong)
        with pytest.raises(ValueError, match=r"attention_mask_in_length: got .*, takes \[2, 3\]"):
            shim.unpad_input_for_concatenated_sequences(rows, wrong)
    for wrong in (mask * 2, (mask - 1) * 1e4):  # one that is added to scores
        with pytest.raises(ValueError, match=r"attention_mask: got .* takes ones and zeros"):
            shim.unpad_input(rows, wrong)
    with pytest.raises(ValueError, match=r"attention_mask \+ unused_mask: got 6 in sum for 3 tok"):
        shim.unpad_input(rows, mask, mask)
    with pytest.raises(ValueError, match="attention_mask_in_length: got 5 in sum for 4 tokens"):
        shim.unpad_input_for_concatenated_sequences(rows, torch.tensor([[2, 2, 0], [1, 0, 0]]))
    with pytest.raises(ValueError, match=r"indices: got \[2\], takes \[3\]"):
        shim.pad_input(rows[0], torch.tensor([0, 1]), 2, 3)


# ---- version 3 --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": [3, 2]}], ids=str)
def test_version_3(options: dict[str, Any]) -> None:
    tensors = qkv()
    wanted, lse, _ = calls.flash_attn_func(*tensors, **options, return_attn_probs=True)
    torch.testing.assert_close(third.flash_attn_func(*tensors, None, **options), wanted, **SAME)
    found = third.flash_attn_func(*tensors, **options, return_attn_probs=True, num_splits=3)
    torch.testing.assert_close(found, (wanted, lse), **SAME)
    q, k, v = packed()
    wanted, lse, _ = calls.flash_attn_varlen_func(
        q, k, v, OFFSETS, OFFSETS, 7, 7, **options, return_attn_probs=True
    )
    found = third.flash_attn_varlen_func(
        q, k, v, OFFSETS, OFFSETS, 7, 7, **options, return_attn_probs=True
    )
    torch.testing.assert_close(found, (wanted, lse), **SAME)
    pools, table = pages(k, v)
    found = third.flash_attn_with_kvcache(
        q, *pools, cache_seqlens=OFFSETS.diff(), page_table=table, cu_seqlens_q=OFFSETS,
        max_seqlen_q=7, cu_seqlens_k_new=OFFSETS, **options, return_softmax_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(found, (wanted, lse), **CLOSE)


def test_version_3_with_tensors_in_one_and_with_a_cache() -> None:
    q, k, v = qkv(7, 7)
    wanted = calls.flash_attn_func(q, k, v, causal=True)
    grouped = torch.cat((q, k, v), 2)
    found = third.flash_attn_qkvpacked_func(grouped, causal=True, num_heads_q=4)
    torch.testing.assert_close(found, wanted, **SAME)
    three = torch.stack((q, q, q), 2)
    torch.testing.assert_close(
        third.flash_attn_qkvpacked_func(three), calls.flash_attn_func(q, q, q), **SAME
    )
    with pytest.raises(ValueError, match="num_heads_q: got 3 for 8 heads"):
        third.flash_attn_qkvpacked_func(grouped, num_heads_q=3)
    for none in (-2, 0, 8):
        with pytest.raises(ValueError, match=f"num_heads_q: got {none} for 8 heads"):
            third.flash_attn_qkvpacked_func(grouped, num_heads_q=none)
    cache = [torch.zeros(2, 12, 2, 8, dtype=q.dtype) for _ in range(2)]
    found, lse = third.flash_attn_with_kvcache(
        q, *cache, k, v, cache_seqlens=0, causal=True, return_softmax_lse=True,
        scheduler_metadata=third.get_scheduler_metadata(2, 7, 7, 4, 2, 8, None),
    )  # fmt: skip
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert lse.shape == (2, 4, 7) and torch.equal(cache[0][:, :7], k)


def test_version_3_in_fp8() -> None:
    q, k, v = (rows.to(torch.float8_e4m3fn) for rows in qkv())
    scale = torch.tensor([[0.5, 2.0], [1.0, 1.5]])
    options: dict[str, Any] = {"causal": True, "return_attn_probs": True}
    output, lse = third.flash_attn_func(q, k, v, None, k_descale=scale, **options)
    rows = [each.transpose(1, 2) for each in (q, k, v)]
    wanted = saccade.attention_fp8(*rows, key_scale=scale, causal=True, return_lse=True)
    torch.testing.assert_close((output.transpose(1, 2), lse), wanted, **SAME)
    q, k, v = (rows.to(torch.float8_e4m3fn) for rows in packed())
    found = third.flash_attn_varlen_func(
        q, k, v, OFFSETS, OFFSETS, 7, 7, v_descale=torch.tensor(2.0), **options
    )
    wanted = saccade.attention_fp8_varlen(
        q, k, v, OFFSETS, value_scale=torch.tensor(2.0), causal=True, return_lse=True
    )
    torch.testing.assert_close(found, wanted, **SAME)


def test_version_3_refuses_by_name_what_would_change_the_result() -> None:
    q, k, v = qkv()
    one: Any = torch.ones(1)
    dense: list[tuple[str, Any]] = [
        ("qv", q), ("q_descale", one), ("k_descale", one), ("v_descale", one),
        ("attention_chunk", 4),
    ]  # fmt: skip
    for name, value in dense:
        with pytest.raises(NotImplementedError, match=f"{name}: got"):
            third.flash_attn_func(q, k, v, **{name: value})
        with pytest.raises(NotImplementedError, match=f"{name}: got"):
            third.flash_attn_with_kvcache(q, k, v, **{name: value})
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(NotImplementedError, match=f"{name}: got Tensor"):
            third.flash_attn_varlen_func(*packed(), OFFSETS, OFFSETS, 7, 7, **{name: one})
    for options, message in (
        ({"rotary_seqlens": one}, "rotary_seqlens: got"),
        ({"k": k, "v": v, "cu_seqlens_k_new": OFFSETS, "cache_seqlens": 0}, "cu_seqlens_k_new"),
        ({"cu_seqlens_q": OFFSETS, "k": k}, "k: got Tensor with cu_seqlens_q"),
        ({"cu_seqlens_q": OFFSETS}, "page_table, cache_seqlens: take tensors"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            third.flash_attn_with_kvcache(q, k, v, **options)
    for name, value in (("pack_gqa", 3), ("sm_margin", "x"), ("num_splits", 1.5)):
        with pytest.raises(TypeError, match=f"{name}: got"):
            third.flash_attn_func(q, k, v, **{name: value})


def test_partial_results_as_one() -> None:
    q, k, v = qkv()
    wanted, lse, _ = calls.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [
        calls.flash_attn_func(q, k[:, rows], v[:, rows], return_attn_probs=True)
        for rows in (slice(0, 4), slice(4, 9))
    ]
    nothing = torch.full_like(wanted, torch.nan), torch.full_like(lse, -torch.inf), None
    outputs = torch.stack([part[0] for part in (*parts, nothing)])
    lses = torch.stack([part[1].transpose(1, 2) for part in (*parts, nothing)])
    found, found_lse = version_3.flash_attn_combine(outputs, lses)
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(found_lse.transpose(1, 2), lse, **CLOSE)
    place = torch.empty_like(wanted, dtype=torch.float32)
    found, _ = version_3.flash_attn_combine(outputs, lses, place, torch.float32)
    assert found is place
    empty, _ = version_3.flash_attn_combine(outputs[2:], lses[2:])
    assert not bool(empty.any())
    for wrong in (lses[:, :1], lses[:1], lses.transpose(-1, -2)):
        with pytest.raises(ValueError, match=r"lse_partial: got .*, takes out_partial's"):
            version_3.flash_attn_combine(outputs, wrong)
    with pytest.raises(ValueError, match="out: got"):
        version_3.flash_attn_combine(outputs, lses, torch.empty_like(outputs))


# ---- modules ----------------------------------------------------------------------------------

NAMES = {
    "flash_attn": SIGNATURES,
    "flash_attn.flash_attn_interface": [*SIGNATURES, "flash_attn_with_kvcache"],
    "flash_attn.bert_padding": [
        "IndexFirstAxis", "IndexFirstAxisResidual", "IndexPutFirstAxis", "index_first_axis",
        "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
        "unpad_input_for_concatenated_sequences",
    ],
    "flash_attn.layers.rotary": [
        "RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_",
        "apply_rotary_emb_qkv_", "apply_rotary_emb_torch", "rotate_half",
    ],
    "flash_attn_interface": [
        "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata",
    ],
}  # fmt: skip


@pytest.mark.parametrize("module", list(NAMES))
def test_modules_have_the_names_that_are_imported(module: str) -> None:
    with shim.installed():
        found = importlib.import_module(module)
        for name in NAMES[module]:
            assert callable(getattr(found, name, None)) or getattr(found, name).apply
        with pytest.raises(AttributeError, match=f"saccade's {module} has no 'other'"):
            _ = found.other
    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb
