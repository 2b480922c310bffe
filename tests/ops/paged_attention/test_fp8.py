"""e4m3 queries over e4m3 pages: products of e4m3 numbers, against float64 with exact weights.

A weight times the scale of its value is rounded to an e4m3 number: it is off by at most 2^-4 of
itself, or by half of the smallest one, 2^-10, over 2^8 and in units of the largest scale.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade import masks
from saccade.gpu import language
from saccade.ops.attention.reference import attend, score_pairs
from saccade.ops.paged_attention import reference
from saccade.runtime.spec import PagedInputs
from saccade.runtime.validation import prepare_paged
from saccade.testing import make_paged_case, poisoned

F8, BF16, F64 = torch.float8_e4m3fn, torch.bfloat16, torch.float64
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-18
OF_FLOAT32 = 2.0**-14  # products, exponentials and sums of a few hundred terms
IMPLEMENTATIONS = ("reference", "cpu", *(["triton"] if language.INTERPRETED else []))

DECODE = ((1, 40), (1, 0), (1, 17), (1, 300))
MIXED = ((1, 33), (12, 12), (9, 150), (0, 5), (4, 61), (3, 0), (5, 2))
CASES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": DECODE},
    "one head of keys": {"lengths": DECODE, "kv_heads": 1, "group": 5, "page_size": 3},
    "chunks": {"lengths": MIXED, "packed": True, "mask": "causal"},
    "window, softcap, sinks": {
        "lengths": MIXED, "packed": True, "mask": "window", "score": "softcap", "sinks": True,
    },
    "hidden NaN": {"lengths": MIXED, "packed": True, "mask": "causal", "poison_hidden": True},
    "wide values": {"lengths": ((3, 40), (3, 17)), "head_dim": 32, "value_dim": 64},
}  # fmt: skip


def arguments(scales: bool = True, scale_of_query: str = "heads", **description: Any) -> Any:
    """A call's arguments, with e4m3 queries."""
    case = make_paged_case(page_dtype=F8, **description)
    given = case.arguments()
    given["query"] = given["query"].to(F8)
    if not scales:
        for name in ("key_scales", "value_scales"):
            del given[name]
    batch, heads = given["kv_lens"].shape[0], given["query"].shape[1]
    sizes = {"none": None, "number": (), "heads": (batch, heads)}[scale_of_query]
    if sizes is not None:
        generator = torch.Generator().manual_seed(1)
        scale = torch.rand(sizes, generator=generator) + 0.5
        given["query_scale"] = scale.to(given["query"].device)
    return given


def wanted(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Output and lse in float64 with exact weights, and how far rounded ones may lead away."""
    options = {name: given[name] for name in ("mask", "score", "scale")}
    tensors = {name: given[name] for name in PagedInputs._fields if name in given}
    inputs, variant, _, _ = prepare_paged(
        PagedInputs(**tensors), **options, batch_invariant=False, return_lse=True, config=None
    )
    dense, at, reachable = reference.lay_out(inputs, F64)
    output, lse = attend(dense, variant, at, reachable)
    scores, _, value = score_pairs(dense, variant, at, reachable)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0)
    largest = (scores.amax(-1) - lse).exp().nan_to_num(0).unsqueeze(-1)
    numbers, _, top = reference._value_numbers(inputs, value, at)
    sizes = numbers.abs().sum(2, keepdim=True) * top * largest
    allowed = RELATIVE * (weights @ value.abs()) + ABSOLUTE * sizes
    allowed = allowed + OF_FLOAT32 * (1 + output.abs()) + torch.finfo(BF16).eps * output.abs()
    if inputs.cu_seqlens_q is not None:
        output, allowed = (reference.unpadded(rows, inputs, 0.0) for rows in (output, allowed))
        lse = reference.unpadded(lse, inputs, -torch.inf).transpose(0, 1)
    return output, lse, allowed


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_is_off_by_rounded_weights_alone(name: str, implementation: str) -> None:
    for scales, of_query in ((True, "heads"), (False, "number"), (False, "none")):
        given = arguments(scales, of_query, **CASES[name])
        output, lse, allowed = wanted(given)
        with poisoned():
            found = saccade.attention_paged(**given, return_lse=True, implementation=implementation)
        assert found[0].dtype == BF16 and not found[0].isnan().any()
        assert bool(((found[0].double() - output).abs() <= allowed).all())
        torch.testing.assert_close(found[1].double(), lse, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_is_off_by_little_more_on_a_gpu(name: str, dim: int) -> None:
    """Hopper's products keep 13 bits of their sums: scores of up to 20 are off by 5e-3 at most."""
    description = {**CASES[name], "head_dim": dim, "value_dim": dim, "page_size": 16}
    output, lse, allowed = wanted(arguments(**description))
    there = arguments(**description, device="cuda")
    found, of_rows = saccade.attention_paged(**there, return_lse=True, implementation="triton")
    assert bool(((found.cpu().double() - output).abs() <= 1.25 * allowed + 0.01).all())
    torch.testing.assert_close(of_rows.cpu().double(), lse, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_visible_nan_is_seen_where_it_is(implementation: str) -> None:
    given = arguments(scales=False, lengths=((2, 40), (2, 17)), mask="causal")
    page = given["page_table"][0, 0]
    given["value_pages"] = given["value_pages"].clone()
    given["value_pages"].view(torch.uint8)[page, 1, 0, 3] = 0x7F  # NaN
    output = saccade.attention_paged(**given, implementation=implementation)
    assert bool(output[0, 2:, :, 3].isnan().all()) and not output[0, :2].isnan().any()
    assert not output[1].isnan().any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_calls_alike_are_computed_and_refused_alike(implementation: str) -> None:
    """A call after one like it is not checked less where its scale is one number."""
    given = arguments(lengths=DECODE, scale_of_query="number") | {"implementation": implementation}
    first = saccade.attention_paged(**given)
    assert torch.equal(saccade.attention_paged(**given), first)
    doubled = saccade.attention_paged(**given | {"query_scale": 2 * given["query_scale"]})
    by_heads = (2 * given["query_scale"]).expand(4, given["query"].shape[1])
    assert torch.equal(saccade.attention_paged(**given | {"query_scale": by_heads}), doubled)
    for wrong in (0.0, -1.0, torch.nan, torch.inf, 3e38, 1e-44):
        with pytest.raises(ValueError, match=r"query_scale: got .*, takes finite numbers above 0"):
            saccade.attention_paged(**given | {"query_scale": torch.tensor(wrong)})


def test_operator_and_empty_calls() -> None:
    given = arguments(lengths=((1, 0), (1, 0)))
    output, lse = saccade.attention_paged(**given, return_lse=True)
    assert not output.any() and bool((lse == -torch.inf).all())
    compiled = torch.compile(saccade.attention_paged, backend="eager", fullgraph=True)
    given = arguments(lengths=DECODE)
    assert torch.equal(compiled(**given), saccade.attention_paged(**given))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pages of another dtype": ({"pages": torch.int8}, "query: got torch.float8_e4m3fn over pages"),
    "a scale of 0": ({"query_scale": torch.tensor(0.0)}, "query_scale: got 0.0, takes finite"),
    "infinite scores": (
        {"query_scale": torch.tensor(1e34)},
        "query_scale: got up to 1e.34, which times scale, .* makes scores of",
    ),
    "NaN": ({"query_scale": torch.tensor(torch.nan)}, "query_scale: got nan, takes finite"),
    "another shape": ({"query_scale": torch.ones(3)}, r"query_scale: got shape \(3,\), takes a"),
    "another dtype": ({"query_scale": torch.ones((), dtype=F64)}, "query_scale: got torch.float64"),
    "16-bit queries": (
        {"query": torch.zeros(2, 4, 1, 16), "query_scale": torch.ones(())},
        "query_scale: got a scale for torch.float32, takes None",
    ),
    "a kernel": ({"implementation": "hopper"}, "hopper.*float8_e4m3fn"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    changes = dict(changes)
    given = arguments(scale_of_query="none", lengths=((1, 9), (1, 4)))
    if dtype := changes.pop("pages", None):
        for pages in ("key_pages", "value_pages"):
            given[pages] = given[pages].view(dtype)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        saccade.attention_paged(**{**given, **changes})


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("reference", BF16), *((name, torch.float16) for name in IMPLEMENTATIONS if name != "cpu")],
    ids=str,
)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["none", "causal"])
def test_queries_of_16_bits_see_pages_as_if_they_were_dequantised(
    implementation: str, dtype: torch.dtype, mask: Any
) -> None:
    """Scales that are powers of two make no number of a page longer than 16 bits.

    The kernel reads these pages one number at a time, and by the same tiles as pages of 16 bits.
    """
    case = make_paged_case(page_dtype=F8, dtype=dtype, lengths=((3, 40), (3, 5), (3, 130)))
    given = {**case.arguments(), "mask": mask, "implementation": implementation}
    if implementation == "triton":
        given["config"] = saccade.KernelConfig(query_tile=64, kv_tile=32)
    plain = dict(given)
    for name in ("key", "value"):
        scales = given[f"{name}_scales"].nan_to_num(1).log2().round().exp2()
        given[f"{name}_scales"] = scales
        del plain[f"{name}_scales"]
        pages = given[f"{name}_pages"].float() * scales.unsqueeze(-1)
        plain[f"{name}_pages"] = pages.to(dtype)
        assert torch.equal(plain[f"{name}_pages"].float().nan_to_num(), pages.nan_to_num())
    for one, other in zip(
        saccade.attention_paged(**given, return_lse=True),
        saccade.attention_paged(**plain, return_lse=True),
        strict=True,
    ):
        assert torch.equal(one, other)
