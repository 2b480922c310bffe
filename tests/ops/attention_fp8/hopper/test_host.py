"""What the Hopper kernel of fp8 attention is chosen and scheduled for, and its tiles of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from fp8_cases import make_case

import saccade
from saccade import masks, scores
from saccade.gpu import language
from saccade.ops.attention.hopper.configs import REGISTERS, SHARED_MEMORY
from saccade.ops.attention.hopper.softmax import LAZY_RESCALE
from saccade.ops.attention_fp8.hopper import configs
from saccade.ops.attention_fp8.hopper.configs import Fp8Problem
from saccade.ops.attention_fp8.hopper.softmax import with_limit
from saccade.ops.attention_fp8.triton import host
from saccade.ops.attention_fp8.validation import Fp8Options, prepare
from saccade.runtime import backends
from saccade.runtime.fp8_spec import BLOCK_ROWS
from saccade.runtime.spec import KernelConfig

WIDTHS = [(64, 64), (64, 128), (128, 128), (256, 128), (128, 256), (256, 256)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_schedules_fit(widths: tuple[int, int], masked: bool) -> None:
    for causal in (False, masked):
        for aligned in (False, True):
            for long_and_bare in (False, True):
                problem = Fp8Problem(*widths, masked, False, causal, aligned, long_and_bare)
                chosen = configs.choose(problem)
                assert chosen.shared_memory(*widths) <= SHARED_MEMORY
                assert BLOCK_ROWS % chosen.kv_tile == 0  # a tile has one scale
                registers = 128 * chosen.consumers * chosen.consumer_registers
                assert registers + 128 * chosen.producer_registers <= REGISTERS


def test_references_are_raised_ahead_where_rows_may_have_seen_nothing() -> None:
    def max_of(**how: Any) -> str:
        return configs.choose(Fp8Problem(128, 128, **how)).max_of

    assert max_of(masked=False) == "first"
    assert max_of(masked=True, causal=True, aligned=True) == "first"
    assert max_of(masked=True, causal=True, aligned=False) == "unseen"
    assert max_of(masked=True) == "unseen"
    assert max_of(masked=False, scored=True) == "unseen"  # the kernel makes it "all"


def test_three_consumers_where_they_were_timed() -> None:
    """And where each of their rows sees a key of the first tile that it visits."""

    def consumers(
        query_len: int = 4096, kv_len: int = 4096, dim: int = 64, scaled: bool = False,
        half: bool = False, causal: bool = True, mask: Any = None,
    ) -> int:  # fmt: skip
        rows = [torch.zeros(1, 1, length, dim) for length in (query_len, kv_len, kv_len)]
        rows = [each.half() if half else each.to(torch.float8_e4m3fn) for each in rows]
        scale = torch.ones(()) if scaled else None
        fp8 = Fp8Options(None, scale, None, None, None, None, None)
        mask = masks.causal() if causal else mask
        found = prepare(
            rows[0], rows[1], rows[2], None, None, None, None, fp8=fp8, mask=mask, score=None,
            scale=None, sinks=None, return_lse=False, config=None,
        )  # fmt: skip
        problem = configs.problem_of(found.inputs, found.variant, causal)
        chosen = configs.choose(problem)
        assert not chosen.skip_masked_tile or causal
        return chosen.consumers

    assert consumers() == consumers(causal=False) == consumers(kv_len=4096 + 256) == 3
    assert consumers(causal=False, kv_len=5000) == 3
    others = [
        consumers(1024, 1024), consumers(kv_len=4096 + 64), consumers(4096, 2048),
        consumers(dim=128), consumers(scaled=True), consumers(half=True),
        consumers(causal=False, mask=masks.window(200)),
    ]  # fmt: skip
    assert set(others) == {2}


def problem(rows: list[torch.Tensor], **options: Any) -> Any:
    """The problem of a call, as if its tensors lay on a GPU."""
    given = {"mask": None, "score": None, "scale": None, "sinks": None, "config": None, **options}
    fp8 = Fp8Options(None, None, None, None, None, None, None)
    query, key, value = rows
    found = prepare(query, key, value, None, None, None, None, fp8=fp8, return_lse=False, **given)
    return found.problem


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 2, 40, 128), "e4m3", None),
        ((1, 2, 40, 72), "e4m3", "head_dim must be a multiple of 16"),
        ((1, 2, 40, 72), "bf16", "head_dim must be a multiple of 16"),
        ((1, 2, 0, 64), "e4m3", "there is nothing to load"),
        ((1, 2, 40, 512), "e4m3", "go up to 256"),
    ],
)
def test_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str, reason: str | None
) -> None:
    for name in ("_triton_device_unsupported", "_hopper_device_unsupported"):
        monkeypatch.setattr(backends, name, lambda *device: None)
    rows = [torch.zeros(shape, dtype=torch.bfloat16)] * 3
    if dtype == "e4m3":
        rows = [each.to(torch.float8_e4m3fn) for each in rows]
    found = backends._fp8_hopper_unsupported(problem(rows))
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("score", "taken"),
    [
        (scores.softcap(30.0), True),
        (lambda score, b, h, i, j: 20 * (score / 20).tanh(), True),
        (scores.softcap(30.0) >> scores.bias(torch.zeros(40, 40)), False),
        (scores.alibi(torch.ones(2)), False),
        (lambda score, b, h, i, j: torch.where(i >= j, score, score - 1e9), False),
    ],
    ids=["softcap", "written softcap", "bias", "alibi", "added mask"],
)
def test_leaves_scores_that_may_be_large(
    monkeypatch: pytest.MonkeyPatch, score: Any, taken: bool
) -> None:
    """It multiplies them by log2 e before it compares them."""
    for name in ("_triton_device_unsupported", "_hopper_device_unsupported"):
        monkeypatch.setattr(backends, name, lambda *device: None)
    rows = [torch.zeros(1, 2, 40, 64).to(torch.float8_e4m3fn)] * 3
    found = backends._fp8_hopper_unsupported(problem(rows, score=score))
    assert found is None if taken else "a softcap alone" in str(found)


@pytest.mark.parametrize(
    ("dims", "preferred"), [((128, 128), True), ((64, 64), True), ((32, 32), False)]
)
def test_goes_first_where_it_was_timed(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], preferred: bool
) -> None:
    for name in ("_triton_device_unsupported", "_hopper_device_unsupported"):
        monkeypatch.setattr(backends, name, lambda *device: None)
    entries = [entry for entry in backends.BACKENDS if entry.name != "cpu"]
    monkeypatch.setattr(backends, "BACKENDS", tuple(entries))
    rows = [torch.zeros(1, 2, 40, dim).to(torch.float8_e4m3fn) for dim in (dims[0], *dims)]
    chosen = backends.choose(problem(rows))
    assert chosen == ("hopper" if preferred else "triton")
    assert backends.choose(problem(rows), "hopper") == "hopper"


def test_takes_rows_of_sixteen_bytes_and_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_triton_device_unsupported", "_hopper_device_unsupported"):
        monkeypatch.setattr(backends, name, lambda *device: None)
    wide = torch.zeros(1, 2, 40, 72).to(torch.float8_e4m3fn)[..., :64]
    assert "multiples of 16" in str(backends._fp8_hopper_unsupported(problem([wide] * 3)))
    rows = [torch.zeros(1, 2, 40, 64).to(torch.float8_e4m3fn)] * 3
    asked = problem(rows, config=KernelConfig(query_tile=64))
    assert "takes no config" in str(backends._fp8_hopper_unsupported(asked))


def test_is_refused_by_name_where_there_is_no_hopper() -> None:
    rows = [torch.zeros(1, 1, 16, 64).to(torch.float8_e4m3fn)] * 3
    with pytest.raises(NotImplementedError, match="hopper"):
        saccade.attention_fp8(*rows, implementation="hopper")


def test_the_limit_of_e4m3_is_in_the_assembly() -> None:
    made = with_limit.fn(LAZY_RESCALE.value)
    assert "0f43800000" not in made  # 256, of 16 bits
    assert made.count("0f43E00000") == 3  # 448


@pytest.mark.skipif(not language.INTERPRETED, reason="CPU tensors take kernels interpreted only")
def test_keys_of_values_stand_as_an_operand_has_them() -> None:
    """A thread of four has keys 2t, 2t + 1, 2t + 8 and 2t + 9 of a product's 16, and takes places
    4t to 4t + 3 of an operand."""

    class AsOperand(host.Fp8Call):
        as_operand = True

    case = make_case("none", (16, 150), (1, 1), (32, 16), batch=1)
    fp8 = Fp8Options(None, None, None, None, None, None, None)
    found = prepare(
        *case.rows, None, None, None, None, fp8=fp8, mask=None, score=None, scale=None, sinks=None,
        return_lse=False, config=None,
    )  # fmt: skip
    plain, moved = (
        kind(found.inputs, found.variant, KernelConfig(), found.quantisation)._values(
            found.inputs, "none", None, (None, None)
        )
        for kind in (host.Fp8Call, AsOperand)
    )
    for place in range(BLOCK_ROWS):
        thread, number = place % 16 // 4, place % 4
        key = place // 16 * 16 + 2 * thread + number % 2 + 8 * (number // 2)
        assert torch.equal(moved[..., place].view(torch.uint8), plain[..., key].view(torch.uint8))
