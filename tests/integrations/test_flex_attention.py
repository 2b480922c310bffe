"""FlexAttention's calls give what PyTorch's own give, with gradients, as functions are written."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from flex_cases import (
    BATCH,
    CASES,
    HEADS,
    LENGTH,
    FlexCase,
    causal,
    documents_by_batch,
    plain,
    rows,
    sliding,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as theirs

import saccade
from saccade.integrations import flex_attention as ours
from saccade.integrations.flex_attention import create_block_mask, flex_attention

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, some thousand terms
SIZES = BATCH, HEADS, LENGTH, LENGTH
BLOCK = 16


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Numbers that functions make of rows are float64, and PyTorch's call runs without Dynamo."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def called(
    case: FlexCase, tensors: Sequence[Tensor], learned: list[Tensor], by: Any = ours
) -> Tensor:
    block_mask = None
    if case.mask is not None:
        block_mask = by.create_block_mask(case.mask(), *SIZES, device="cpu", BLOCK_SIZE=BLOCK)
    score = None if case.score is None else case.score(*learned)
    return by.flex_attention(*tensors, score_mod=score, block_mask=block_mask)


@pytest.mark.parametrize("name", CASES)
def test_output_is_pytorchs(name: str) -> None:
    if name == "method of an object":
        pytest.skip("PyTorch's create_mask takes no bound methods")
    case = CASES[name]
    found = called(case, rows(), [*case.learned])
    wanted = called(case, rows(), [*case.learned], theirs)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_pytorch(name: str) -> None:
    case = CASES[name]
    results = []
    for call in (called, plain):
        tensors = [tensor.requires_grad_() for tensor in rows(1)]
        learned = [tensor.clone().requires_grad_() for tensor in case.learned]
        output = call(case, tensors, learned)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        results.append([output, *torch.autograd.grad(output, [*tensors, *learned], grad)])
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_same(name: str) -> None:
    case, largest = CASES[name], [1.0]
    tensors, learned = rows(3), [*case.learned]
    wanted = plain(case, tensors, learned, largest)
    options: dict[str, Any] = {"implementation": "triton"}
    if case.mask is not None:
        options["mask"] = saccade.masks.as_mask(case.mask())
    if case.score is not None:
        options["score"] = saccade.scores.as_score(case.score(*(x.float() for x in learned)))
    found = saccade.attention(*(tensor.float() for tensor in tensors), **options)
    # Six standard deviations of rounding: of a score, which changes a weight by as much twice (its
    # own and the sum's), and of the sum of values.
    unit = 6 * torch.finfo(torch.float32).eps / 2
    in_scores = unit * math.sqrt(tensors[0].shape[-1]) * max(largest)
    allowed = (2 * in_scores + unit * math.sqrt(LENGTH)) * tensors[2].abs().max()
    assert (found.double() - wanted).abs().max() <= allowed


# ---- BlockMask -----------------------------------------------------------------------------------

MASKS = [name for name, case in CASES.items() if case.mask is not None and case.score is None]


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("block", [16, (8, 20)])
def test_blocks_are_pytorchs(block: int | tuple[int, int], separate: bool) -> None:
    for mask_mod in (causal, sliding(7), documents_by_batch()):
        options: dict[str, Any] = {"BLOCK_SIZE": block}
        if "separate_full_blocks" in inspect.signature(theirs.create_block_mask).parameters:
            options["separate_full_blocks"] = separate
        elif not separate:
            pytest.skip("this PyTorch always separates them")
        found = create_block_mask(mask_mod, *SIZES, **options)
        wanted = theirs.create_block_mask(mask_mod, *SIZES, device="cpu", **options)
        assert isinstance(found, ours.BlockMask) and "kv_indices" not in vars(found)
        assert found.shape == wanted.shape
        for name in theirs.BlockMask._TENSOR_ATTRS:
            one, other = getattr(found, name), getattr(wanted, name)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other), name
        assert str(found) == str(wanted) and found.sparsity() == wanted.sparsity()


@pytest.mark.parametrize("name", MASKS)
def test_pytorchs_own_block_mask_is_taken(name: str) -> None:
    if name == "method of an object":
        pytest.skip("PyTorch's create_mask takes no bound methods")
    mask_mod, tensors = CASES[name].mask(), rows()  # type: ignore[misc]
    block_mask = theirs.create_block_mask(mask_mod, *SIZES, device="cpu", BLOCK_SIZE=BLOCK)
    found = flex_attention(*tensors, block_mask=block_mask)
    wanted = flex_attention(*tensors, block_mask=create_block_mask(mask_mod, *SIZES))
    torch.testing.assert_close(found, wanted, **CLOSE)


def blocks(seed: int, chance: float) -> tuple[Tensor, Tensor, Tensor]:
    """A layout of blocks, and the numbers and indices that list them."""
    generator = torch.Generator().manual_seed(seed)
    layout = torch.rand(BATCH, 1, LENGTH // BLOCK, LENGTH // BLOCK, generator=generator) < chance
    layout[0, 0, 0] = False
    order = layout.byte().argsort(dim=-1, descending=True, stable=True).int()
    return layout, layout.sum(-1).int(), order


@pytest.mark.parametrize("made_by", [ours.BlockMask, theirs.BlockMask])
def test_blocks_and_function(made_by: Any) -> None:
    partial, *listed = blocks(0, 0.5)
    full, *listed_full = blocks(1, 0.3)
    block_mask = made_by.from_kv_blocks(*listed, *listed_full, BLOCK_SIZE=BLOCK, mask_mod=causal)
    dense = (
        layout.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3) for layout in (partial, full)
    )
    within, whole = dense
    seen = (within & torch.ones(LENGTH, LENGTH).tril().bool()) | whole
    assert bool((~seen.any(-1)).any())  # rows that see nothing are among them
    tensors = rows()
    found = flex_attention(*tensors, block_mask=block_mask)
    torch.testing.assert_close(found, saccade.attention(*tensors, mask=seen), **CLOSE)
    without = made_by.from_kv_blocks(*listed, BLOCK_SIZE=BLOCK)
    found = flex_attention(*tensors, block_mask=without)
    torch.testing.assert_close(found, saccade.attention(*tensors, mask=within), **CLOSE)


@pytest.mark.parametrize("of", [create_block_mask, theirs.create_block_mask])
def test_a_slice_with_its_own_function(of: Any) -> None:
    """One block of query rows of a longer mask, as decoding does it."""
    base, tensors = of(sliding(20), *SIZES, device="cpu", BLOCK_SIZE=BLOCK), rows()
    wanted = flex_attention(*tensors, block_mask=create_block_mask(sliding(20), *SIZES))
    part = base[:, :, 1]
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        part.seq_lengths = (BLOCK, LENGTH)
        flex_attention(tensors[0][:, :, :BLOCK], *tensors[1:], block_mask=part)
    part.mask_mod = lambda b, h, q, kv: base.mask_mod(b, h, q + BLOCK, kv)
    found = flex_attention(tensors[0][:, :, BLOCK : 2 * BLOCK], *tensors[1:], block_mask=part)
    torch.testing.assert_close(found, wanted[:, :, BLOCK : 2 * BLOCK], **CLOSE)


@pytest.mark.parametrize("of", [create_block_mask, theirs.create_block_mask])
def test_adjusted(of: Any) -> None:
    block_mask = of(sliding(20), *SIZES, device="cpu", BLOCK_SIZE=BLOCK)
    query, key, value = rows()
    query, key, value = query[:, :, :23], key[:, :, :31], value[:, :, :31]
    with pytest.raises(ValueError, match=r"block_mask: got one of 48 x 48 rows for a call of 23 x"):
        flex_attention(query, key, value, block_mask=block_mask)
    adjusted = block_mask._adjust(23, 31)
    if of is theirs.create_block_mask and adjusted.seq_lengths == (32, 32):
        with pytest.raises(ValueError, match="got one of 32 x 32"):  # as by PyTorch 2.11
            flex_attention(query, key, value, block_mask=adjusted)
        adjusted.seq_lengths = 23, 31
    found = flex_attention(query, key, value, block_mask=adjusted)
    exact = create_block_mask(sliding(20), BATCH, HEADS, 23, 31)
    torch.testing.assert_close(found, flex_attention(query, key, value, block_mask=exact), **CLOSE)


def test_a_replaced_function_keeps_the_blocks() -> None:
    block_mask = create_block_mask(sliding(3), *SIZES, BLOCK_SIZE=BLOCK)
    block_mask.mask_mod = causal  # as PyTorch's kernels: in the blocks that the window touched
    row, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = (row >= key) & (row // BLOCK - key // BLOCK <= 1)
    tensors = rows()
    found = flex_attention(*tensors, block_mask=block_mask)
    torch.testing.assert_close(found, saccade.attention(*tensors, mask=seen), **CLOSE)


def test_numbers_are_those_of_the_construction_and_tensors_those_of_the_call() -> None:
    tensors, width, ids = rows(), 5, torch.zeros(LENGTH, dtype=torch.int32)
    mask_mod = lambda b, h, q, kv: ((q - kv).abs() <= width) & (ids[q] == ids[kv])  # noqa: E731
    block_mask = create_block_mask(mask_mod, *SIZES)
    wanted = flex_attention(*tensors, block_mask=create_block_mask(mask_mod, *SIZES))
    width = 9
    found = flex_attention(*tensors, block_mask=block_mask)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    ids[20:] = 1
    found = flex_attention(*tensors, block_mask=block_mask)
    width = 5
    wanted = flex_attention(*tensors, block_mask=create_block_mask(mask_mod, *SIZES))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_moved_and_copied() -> None:
    block_mask, tensors = create_block_mask(documents_by_batch(), *SIZES), rows()
    wanted = flex_attention(*tensors, block_mask=block_mask)
    for each in (block_mask.to("cpu"), copy.copy(block_mask)):
        assert torch.equal(flex_attention(*tensors, block_mask=each), wanted)
    moved: Any = block_mask.to("meta")
    assert {tensor.device.type for tensor in moved.made.mask.captured.tensors} == {"meta"}


# ---- names, options, errors ----------------------------------------------------------------------

NAMES = {
    "causal": "causal", "sliding window": "window", "documents, causal": "documents & causal",
    "documents by batch": "documents", "prefix": "prefix", "prefix by where": "prefix",
    "stochastic depth": "dense & causal", "natten": None,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_masks_are_known_by_what_they_compute(name: str) -> None:
    mask_mod = CASES[name].mask()  # type: ignore[misc]
    said = str(ours.explain(*rows(), block_mask=create_block_mask(mask_mod, *SIZES)))
    line = next(line for line in said.split("\n") if line.startswith("  mask "))
    known = NAMES[name]
    ending = f" ({known}), score none, sinks no, dropout no" if known else "i9), score none"
    assert line.partition(", sinks")[0].endswith(ending.partition(", sinks")[0])


def test_return_values() -> None:
    tensors, block_mask = rows(), create_block_mask(causal, *SIZES)
    output, lse = saccade.attention(*tensors, causal=True, return_lse=True)
    options: dict[str, Any] = {"block_mask": block_mask}
    pair = flex_attention(*tensors, return_lse=True, **options)
    assert torch.equal(pair[0], output) and torch.equal(pair[1], lse)
    found = flex_attention(*tensors, return_aux=ours.AuxRequest(lse=True), **options)
    assert torch.equal(found[1].lse, lse) and found[1].max_scores is None
    alone = flex_attention(*tensors, return_aux=ours.AuxRequest(), **options)
    assert torch.equal(alone[0], output) and alone[1] == ours.AuxOutput()
    scaled = flex_attention(*tensors, scale=0.25, kernel_options={"fwd_BLOCK_M": 64}, **options)
    assert torch.equal(scaled, output)  # a quarter is what 16 channels have


def test_grouped_heads_and_keys_of_one_batch_entry() -> None:
    query, key, value = rows(heads=1)
    with pytest.raises(ValueError, match="key: got 1 heads for query's 3, takes as many"):
        flex_attention(query, key, value)
    block_mask = create_block_mask(documents_by_batch(), *SIZES)
    found = flex_attention(query, key[:1], value[:1], block_mask=block_mask, enable_gqa=True)
    wanted = flex_attention(
        query,
        *(rows[:1].expand(BATCH, HEADS, -1, -1) for rows in (key, value)),
        block_mask=block_mask,
    )
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_what_does_nothing_is_nothing() -> None:
    block_mask = create_block_mask(ours.noop_mask, *SIZES)
    score = lambda score, b, h, q, kv: score  # noqa: E731
    found = ours.explain(*rows(), score_mod=score, block_mask=block_mask)
    assert "mask none, score none" in str(found)


def branching(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx if h > 0 else kv_idx < 4


def random_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.rand(())


def writing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    TABLE[q_idx] = 1.0
    return score


TABLE = torch.zeros(LENGTH)


def test_what_cannot_be_served_names_function_and_line() -> None:
    tensors, here = rows(), r"at test_flex_attention.py:\d+: "
    with pytest.raises(
        TypeError, match=f"cannot branch on a row, in branching, {here}return q_idx"
    ):
        create_block_mask(branching, *SIZES)
    with pytest.raises(TypeError, match=f"random numbers .rand., in random_score, {here}return sc"):
        flex_attention(*tensors, score_mod=random_score)
    with pytest.raises(TypeError, match=f"in writing, {here}"):
        flex_attention(*tensors, score_mod=writing)
    gave = r"<lambda> .test_flex_attention.py:\d+. gave whole numbers, takes a bool result"
    with pytest.raises(TypeError, match=gave):
        create_block_mask(lambda b, h, q, kv: q - kv, *SIZES)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel_options": {"BLOK_M": 3}}, ValueError, "kernel_options: got 'BLOK_M'"),
        ({"kernel_options": {"BACKEND": "CUDNN"}}, ValueError, "got BACKEND 'CUDNN', takes AUTO"),
        ({"return_aux": ours.AuxRequest(max_scores=True)}, NotImplementedError, "takes lse alone"),
        ({"return_aux": ours.AuxRequest(), "return_lse": True}, ValueError, "one of the two"),
        ({"block_mask": causal}, TypeError, "block_mask: got function, takes a BlockMask"),
    ],
)
def test_options_are_refused_by_name(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        flex_attention(*rows(), **options)
    with pytest.raises(ValueError, match="query: got 3 dimensions, takes 4"):
        query, key, value = rows()
        flex_attention(query[0], key[0], value[0])


@pytest.mark.parametrize(
    ("sizes", "options", "error", "message"),
    [
        ((1.5, 64), {}, TypeError, "Q_LEN: got 1.5"),
        ((64, -1), {}, ValueError, "KV_LEN: got -1, takes a whole number of at least 0"),
        ((64, 64), {"BLOCK_SIZE": 0}, ValueError, "BLOCK_SIZE: got 0, takes .* at least 1"),
        ((64, 64), {"BLOCK_SIZE": (16, 16, 16)}, TypeError, "BLOCK_SIZE: got .* takes two"),
        ((64, 64), {"B": 0}, ValueError, "B: got 0, takes a whole number of at least 1"),
        ((64, 64), {"H": "4"}, TypeError, "H: got '4'"),
    ],
)
def test_sizes_of_a_block_mask_are_refused_by_name(
    sizes: Any, options: Any, error: Any, message: str
) -> None:
    given = {"B": None, "H": None, "device": "cpu", **options}
    with pytest.raises(error, match=message):
        create_block_mask(lambda b, h, q, kv: q >= kv, Q_LEN=sizes[0], KV_LEN=sizes[1], **given)


# ---- PyTorch's module, torch.compile -------------------------------------------------------------


def test_install() -> None:
    before = theirs.flex_attention, theirs.create_block_mask
    tensors = [tensor.requires_grad_() for tensor in rows()]  # PyTorch's raises for these on a CPU
    with ours.installed():
        ours.install()
        block_mask = theirs.create_block_mask(causal, *SIZES)
        output: Any = theirs.flex_attention(*tensors, block_mask=block_mask)  # pyright: ignore
    assert (theirs.flex_attention, theirs.create_block_mask) == before
    assert torch.equal(output, saccade.attention(*tensors, mask=saccade.masks.causal()))
    output.sum().backward()
    ours.install()
    theirs.flex_attention = other = lambda *_: None
    ours.uninstall()
    assert theirs.flex_attention is other
    theirs.flex_attention = before[0]


def test_compiled() -> None:
    torch._dynamo.reset()
    call = torch.compile(flex_attention, backend="aot_eager")
    for number in (1.5, 3.0, 40.0):
        case = FlexCase(lambda: causal, CASES["alibi"].score, CASES["alibi"].learned)
        results = []
        for function in (call, flex_attention):
            slopes = (case.learned[0] * number).requires_grad_()
            tensors = [tensor.requires_grad_() for tensor in rows()]
            block_mask = create_block_mask(sliding(int(number)), *SIZES)
            score_mod = case.score(slopes)  # type: ignore[misc]
            output = function(*tensors, score_mod=score_mod, block_mask=block_mask)
            results.append(
                [output, *torch.autograd.grad(output.square().sum(), [*tensors, slopes])]
            )
        torch.testing.assert_close(*results, **CLOSE)


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    call = torch.compile(flex_attention, backend=counter, fullgraph=True)
    for amount, width in ((5.0, 4), (6.0, 9), (7.0, 11), (8.0, 12)):
        block_mask = create_block_mask(sliding(width), *SIZES)
        score = saccade.scores.alibi(torch.full((HEADS,), amount))
        found = call(*rows(), score_mod=score, block_mask=block_mask)
        wanted = flex_attention(*rows(), score_mod=score, block_mask=block_mask)
        torch.testing.assert_close(found, wanted, **CLOSE)
    assert counter.frame_count <= 2  # numbers become symbols once
    with pytest.raises(Exception, match="traced outside of graphs"):
        call(*rows(), score_mod=lambda score, b, h, q, kv: score * 2)


def test_a_block_mask_of_a_compiled_function() -> None:
    torch._dynamo.reset()
    made = torch.compile(create_block_mask, backend="eager")(causal, *SIZES)
    found = flex_attention(*rows(), block_mask=made)
    assert torch.equal(found, saccade.attention(*rows(), mask=saccade.masks.causal()))
