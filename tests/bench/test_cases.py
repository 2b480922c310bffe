"""Cases are what their names say, and their counts agree with masks written out."""

import pytest
import torch

import saccade
from saccade.bench.case import (
    CAUSAL,
    FULL,
    MOST_BLOCKS,
    BenchCase,
    PagedBenchCase,
    Visibility,
    block_layout,
)
from saccade.bench.cases import (
    CASES,
    DEFAULT_CASES,
    choose_cases,
    choose_passes,
    listed_cases,
    passes_of,
)
from saccade.bench.command import split
from saccade.bench.peers import choose_peers

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_names_say_what_cases_are(case):
    machine, *_, dim, _ = case.name.split("-")
    assert machine in ("cpu", "gpu", "tiny")
    values = "" if case.value_dim == case.head_dim else f"x{case.value_dim}"
    assert dim == f"d{case.head_dim}{values}"
    heads = sorted(
        (case.query_heads, case.kv_heads)
    )  # value heads share key heads by the delta rule
    assert heads[1] % heads[0] == 0 and (case.attention == "delta" or heads[1] == case.query_heads)
    if case.attention == "delta":
        forward, backward = (case.flops(name) for name in ("forward", "backward"))
        assert case.flops("forward+backward") == forward + backward
        assert f"-h{case.query_heads}x{case.kv_heads}-" in case.name
    elif not case.decodes:
        assert case.flops("forward+backward") == pytest.approx(3.5 * case.flops("forward"))


def test_tensors_have_the_case_s_shapes_and_are_the_same_every_time():
    case = CASES["tiny-grouped-fp32-d16-48"]
    first, second = case.make(CPU), case.make(CPU)
    assert first.query.shape == (1, 4, 48, 16)
    assert first.key.shape == first.value.shape == (1, 2, 48, 16)
    assert first.grad_output.shape == (1, 4, 48, 16)
    assert all(torch.equal(one, two) for one, two in zip(first[:4], second[:4], strict=True))


def test_cases_of_fp8_have_rows_of_e4m3_numbers_and_a_forward_pass():
    case = CASES["tiny-causal-fp8-d16-2x48"]
    tensors = case.make(CPU)
    assert {rows.dtype for rows in tensors.inputs} == {torch.float8_e4m3fn}
    assert tensors.grad_output.dtype == torch.bfloat16
    assert passes_of(case, ("forward", "backward", "forward+backward")) == ("forward",)
    told = saccade.explain(saccade.attention_fp8, *tensors.inputs, mask=saccade.masks.causal())
    assert (case.flops("forward"), case.bytes) == (told.flops, told.bytes)
    assert CASES["gpu-full-fp8-d128-4x4k"].flops("forward") == 4 * 16384 * 4096 * 2048


def test_cases_of_the_delta_rule_have_beta_and_decay():
    channels = CASES["tiny-delta-channels-h2x2-fp32-d16-1x70"]
    beta, decay = channels.make(CPU).others
    assert beta.shape == (1, 2, 70) and decay.shape == (1, 2, 70, 16)
    assert beta.min() > 0 and beta.max() < 1 and decay.min() > -1 and decay.max() <= 0
    case = CASES["tiny-delta-h2x4-fp32-d16-2x70"]
    tensors = case.make(CPU)
    shapes = [tuple(each.shape) for each in (*tensors.inputs, tensors.grad_output)]
    of_keys, of_values = (2, 2, 70, 16), (2, 4, 70, 16)
    assert shapes == [of_keys, of_keys, of_values, (2, 4, 70), (2, 4, 70), of_values]
    assert torch.equal(tensors.others[1], case.make(CPU).others[1])
    query, key, value, beta, decay = tensors.inputs
    told = saccade.explain(saccade.gated_delta_rule, query, key, value, beta, decay=decay)
    assert (case.flops("forward"), case.bytes) == (told.flops, told.bytes)
    decode = CASES["tiny-delta-step-h2x4-fp32-d16-3"]
    assert passes_of(decode, ("forward", "backward")) == ("decode",)
    state, row = 4 * 16 * 16, 2 * 2 * 16 + 2 * 4 * 16 + 4 * 2  # numbers of float32
    assert decode.bytes == 3 * 4 * (2 * state + row)


def test_packed_sequences_of_the_delta_rule_have_as_many_tokens_as_the_dense_batch():
    dense, packed = (CASES[f"gpu-delta-{name}"] for name in (
        "h16x32-bf16-d128-8x8k", "packed-h16x32-bf16-d128-64k"
    ))  # fmt: skip
    assert packed.flops("forward") == dense.flops("forward")
    assert packed.mask.startswith("delta rule, decay of heads, sequences of 20480, 14080, 10240")


def test_a_mask_for_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="equal lengths"):
        BenchCase("bad", 1, 1, 1, 1, 8, 8, 8, "float32", CAUSAL)


def test_documents_must_add_up_and_packed_ones_are_there():
    cut = Visibility("full", documents=(4, 3))
    with pytest.raises(ValueError, match="do not add up to 8 rows"):
        BenchCase("bad", 1, 1, 1, 8, 8, 8, 8, "float32", cut)
    with pytest.raises(ValueError, match="a batch of 1"):
        BenchCase("bad", 2, 1, 1, 7, 7, 8, 8, "float32", cut, packed=True)
    with pytest.raises(ValueError, match="has documents"):
        BenchCase("bad", 1, 1, 1, 7, 7, 8, 8, "float32", packed=True)


def test_packed_cases_have_the_work_of_what_they_are_compared_with():
    for kind in ("", "causal-"):
        packed = CASES[f"gpu-packed-{kind}bf16-d128-16x1024"]
        dense = CASES[f"gpu-{kind or 'full-'}bf16-d128-1k"]
        assert packed.flops("forward") == dense.flops("forward")
        assert packed.packed and not dense.packed
    stem = "gpu-packed-causal-bf16-d128-"
    mix, *parts = (CASES[stem + end] for end in ("8192+64x128", "1x8192", "64x128"))
    assert mix.flops("forward") == sum(part.flops("forward") for part in parts)
    assert mix.tiles((128, 64)) == sum(part.tiles((128, 64)) for part in parts)


def test_the_same_documents_packed_and_under_a_mask():
    masked = CASES["gpu-documents-bf16-d128-16x1024"]
    packed = CASES["gpu-packed-bf16-d128-16x1024"]
    assert masked.visibility == packed.visibility
    assert (masked.packed, packed.packed) == (False, True)
    assert masked.mask == "documents 1024"


def test_the_acceptance_set_is_there():
    names = [case.name for case in listed_cases("cpu")]
    dense = [name for name in names if name.startswith(("cpu-full", "cpu-causal"))]
    assert len(dense) == 2 * 2 * 2 * 5  # masks, dtypes, dims, lengths
    assert "cpu-memory-fp32-d64-32k" in names
    assert not any("tiny" in name for name in names)


def test_globs_take_what_is_meant_for_the_device():
    assert {case.name.split("-")[0] for case in choose_cases(["*"], [], "cpu")} == {"cpu"}
    assert {case.name.split("-")[0] for case in choose_cases(["gpu-*"], [], "cpu")} == {"gpu"}
    for machine, device_type in (("cpu", "cpu"), ("gpu", "cuda")):
        assert DEFAULT_CASES[machine]
        assert choose_cases([], [], device_type)


def test_cases_are_filtered_by_dtype():
    chosen = choose_cases(["cpu-full-*"], ["bf16"], "cpu")
    assert {case.dtype for case in chosen} == {"bfloat16"}
    with pytest.raises(ValueError, match="no dtype is named 'fp7'; there are fp32"):
        choose_cases(["cpu-*"], ["fp7"], "cpu")
    with pytest.raises(ValueError, match="they have bfloat16"):
        choose_cases(["cpu-full-bf16-d64-1k"], ["fp32"], "cpu")


def test_unknown_names_are_answered_with_those_that_exist():
    message = r"no case is named 'cpu-ful-fp32-d64-1k'. Did you mean cpu-full-fp32-d64-1k.*There"
    with pytest.raises(ValueError, match=message):
        choose_cases(["cpu-ful-fp32-d64-1k"], [], "cpu")
    with pytest.raises(ValueError, match=r"no pass is named 'sideways'; there are forward"):
        choose_passes(["sideways"])
    with pytest.raises(ValueError, match=r"no peer is named 'spda'"):
        choose_peers(["spda"], [])


def test_passes():
    assert choose_passes([]) == choose_passes(["both"]) == ("forward", "forward+backward")
    assert choose_passes(["backward", "forward"]) == ("backward", "forward")
    assert choose_passes(["both", "backward", "forward"]) == (
        "forward", "forward+backward", "backward"
    )  # fmt: skip
    decode = CASES["tiny-decode-fp32-d16-64"]
    assert passes_of(decode, ("forward", "forward+backward")) == ("decode",)
    assert passes_of(decode, ("backward",)) == ()
    memory = CASES["cpu-memory-fp32-d64-32k"]
    assert passes_of(memory, ("forward", "forward+backward")) == ("forward+backward",)


def test_options_may_repeat_and_hold_commas():
    assert split(["a,b", " c ", ""]) == ["a", "b", "c"]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("tiny-pages")])
def test_pairs_over_pages_are_those_that_are_seen(name):
    case = CASES[name]
    assert isinstance(case, PagedBenchCase)
    seen = case.sees(torch.arange(case.query_len), torch.arange(case.kv_len))
    assert case.pairs == case.query_heads * int(seen.sum())
    tensors = case.make(CPU)
    assert tensors.query.shape == (1, 4, case.new * len(case.lens), 16)
    assert tensors.key.shape == (1, 2, sum(case.lens), 16)


def test_bytes_over_pages_are_those_of_their_dtype():
    wide, narrow = (CASES[f"gpu-pages-h32x8-{dtype}-d128-16x8k"] for dtype in ("bf16", "fp8"))
    rows = 16 * 8192 * 8
    assert wide.bytes - narrow.bytes == rows * (256 - 2 * 4)  # a byte a number, less the scales
    assert passes_of(wide, ("forward", "backward")) == ("decode",)
    chunk = CASES["gpu-pages-h32x8-new2k-bf16-d128-1x8k"]
    assert passes_of(chunk, ("forward", "backward")) == ("forward",)


def test_lengths_that_are_not_the_sequences_are_refused():
    with pytest.raises(ValueError, match="not those of its sequences"):
        PagedBenchCase("bad", 1, 1, 1, 2, 8, 8, 8, "float32", lens=(4, 5))


# ---- visible pairs and tiles, counted as a mask written out by hand has them ----

LENGTHS = (1, 7, 12)
KINDS = [
    FULL, CAUSAL, Visibility("window", 3), Visibility("window", 99), Visibility("prefix", 5),
    Visibility("prefix", 99), Visibility("blocks", 4), Visibility("blocks", 5),
]  # fmt: skip


def cut(length, kind, size=0):
    """Documents of 4 rows, and a shorter one at the end."""
    whole, rest = divmod(length, 4)
    return Visibility(kind, size, (4,) * whole + (rest,) * (rest > 0))


def everything():
    for length in LENGTHS:
        yield from ((visibility, length) for visibility in KINDS)
        yield from ((cut(length, kind), length) for kind in ("full", "causal"))
        yield cut(length, "window", 2), length
    yield Visibility("causal", documents=(5, 1, 1, 3, 2)), 12


def visible(visibility, query_row, kv_row):
    """One pair, by the words that describe the kind."""
    if visibility.documents:
        ids = [number for number, size in enumerate(visibility.documents) for _ in range(size)]
        if ids[query_row] != ids[kv_row]:
            return False
    size = visibility.size
    past = kv_row <= query_row
    if visibility.kind == "blocks":
        return bool(block_layout(MOST_BLOCKS)[query_row // size, kv_row // size])
    return {
        "full": True, "causal": past, "window": past and query_row - kv_row <= size,
        "prefix": past or kv_row < size,
    }[visibility.kind]  # fmt: skip


@pytest.mark.parametrize(("visibility", "length"), list(everything()), ids=str)
def test_masks_and_counts_agree_with_pairs_judged_one_by_one(visibility, length):
    rows = range(length)
    mask = torch.tensor([[visible(visibility, row, column) for column in rows] for row in rows])
    assert torch.equal(visibility.tensor(length, length, CPU), mask)
    assert visibility.pairs(length, length) == int(mask.sum())
    for tile in ((4, 2), (2, 4), (3, 5), (1, 1), (16, 16)):
        tiles = [part for strip in mask.split(tile[0]) for part in strip.split(tile[1], dim=1)]
        assert visibility.tiles(length, length, tile) == sum(bool(part.any()) for part in tiles)


def test_full_takes_unequal_lengths():
    assert FULL.pairs(3, 8) == 24
    assert FULL.tiles(3, 8, (2, 4)) == 4


def test_most_blocks_are_hidden_and_no_row_sees_nothing():
    layout = block_layout(128)
    assert layout.shape == (128, 128)
    assert 0.09 < layout.float().mean() < 0.11
    assert layout.any(1).all()
    assert torch.equal(layout[:6, :6], block_layout(6))


def test_documents_as_ids_and_as_offsets():
    visibility = Visibility("full", documents=(3, 1, 2))
    assert visibility.document_ids(CPU).tolist() == [0, 0, 0, 1, 2, 2]
    assert visibility.offsets(CPU).tolist() == [0, 3, 4, 6]
    assert visibility.offsets(CPU).dtype == visibility.document_ids(CPU).dtype == torch.int32


@pytest.mark.parametrize("kind", ["prefix", "blocks"])
def test_what_counts_from_the_start_has_no_documents(kind):
    with pytest.raises(ValueError, match="from the sequence's start"):
        Visibility(kind, 4, (4, 4))


def test_names_in_words():
    assert str(Visibility("prefix", 5)) == "prefix 5"
    assert str(Visibility("full", documents=(4, 4))) == "documents 4"
    assert str(Visibility("causal", documents=(4, 4))) == "causal documents 4"
    assert str(Visibility("causal", documents=(8, 4, 4))) == "causal documents 8+2x4"


def test_only_full_and_causal_need_no_table():
    alone = Visibility("causal", documents=(8,))
    assert [kind.needs_table for kind in (FULL, CAUSAL, alone)] == [False] * 3
    others = (*KINDS[2:], Visibility("full", documents=(4, 4)))
    assert all(kind.needs_table for kind in others)
