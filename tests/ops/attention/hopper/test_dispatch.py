"""Hopper kernels come before Triton's, and say what they do not serve."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade import masks, scores
from saccade.explain import answers
from saccade.runtime import backends
from saccade.runtime.validation import prepare

BF16 = torch.bfloat16


def problem(query: Tensor, key: Tensor | None = None, **more: Any) -> Any:
    options: dict[str, Any] = {
        "mask": None, "score": None, "scale": None, "sinks": None, "dropout_p": 0.0,
        "return_lse": False, "deterministic": False, "config": None, **more,
    }  # fmt: skip
    key = query if key is None else key
    return prepare(query, key, key, None, None, None, None, **options)[2]


def reason(*tensors: Tensor, **more: Any) -> str:
    return backends.explained(problem(*tensors, **more)).reasons["hopper"] or ""


PREFIX = masks.prefix(torch.tensor([7], dtype=torch.int32))
BY_ROW = scores.bias(torch.zeros(1, 1, 512, 512))
DISTANCES = torch.zeros(2, 1023)
BY_DISTANCE = scores.as_score(lambda s, b, h, q, k: s + DISTANCES[h, q - k + 511])
EVERY = masks.dense(torch.ones(512, 512, dtype=torch.bool))


def packed(*lengths: int) -> Any:
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    query = rows(sum(lengths), 2, 128)
    options: dict[str, Any] = {
        "mask": None, "score": None, "scale": None, "sinks": None, "dropout_p": 0.0,
        "return_lse": False, "deterministic": False, "config": None,
    }  # fmt: skip
    return prepare(query, query, query, ends, None, None, None, **options)[2]


def rows(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_it_comes_before_triton_kernels_and_wants_a_hopper():
    assert backends.NAMES.index("hopper") < backends.NAMES.index("triton")
    with pytest.raises(NotImplementedError, match="hopper: "):
        query = rows(1, 2, 8, 64)
        saccade.attention(query, query, query, implementation="hopper")


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("float32", lambda: reason(rows(1, 2, 8, 64, dtype=torch.float32))),
        ("multiples of 8", lambda: reason(rows(1, 2, 8, 60))),
        ("nothing to load", lambda: reason(rows(1, 2, 8, 64), rows(1, 2, 0, 64))),
        ("does not drop", lambda: reason(rows(1, 2, 8, 64), dropout_p=0.5)),
        (
            "takes no config",
            lambda: reason(rows(1, 2, 8, 64), config=saccade.KernelConfig(kv_tile=64)),
        ),
        ("strides", lambda: reason(rows(1, 2, 8, 65)[..., :64])),
        ("strides", lambda: reason(rows(1, 1, 8, 64).expand(1, 2, 8, 64))),
        ("strides", lambda: reason(rows(1, 2, 8, 128)[..., ::2])),
        ("GPU", lambda: reason(rows(1, 2, 8, 64, dtype=torch.float16), mask=masks.causal())),
    ],
)
def test_reasons(what, found):
    assert what in found()


@pytest.mark.parametrize("dim", [264, 512])
def test_wide_heads_are_refused_in_both_passes(dim: int) -> None:
    for of in ("forward", "backward"):
        choice = backends.explained(problem(rows(1, 2, 8, dim)), of=of)
        assert f"go up to 256, not {dim}" in (choice.reasons["hopper"] or "")


def test_projections_and_single_rows_are_taken_as_they_lie():
    assert problem(rows(2, 9, 4, 64).transpose(1, 2)).tma
    assert problem(rows(2, 9, 4, 192).transpose(1, 2)[..., 64:128]).tma
    assert problem(rows(1, 1, 1, 64).as_strided((1, 1, 1, 64), (3, 5, 7, 1))).tma


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU is a Hopper, as far as the choice looks at it."""
    monkeypatch.setattr(backends, "_hopper_device_unsupported", lambda device, index: None)
    monkeypatch.setattr(backends, "_triton_device_unsupported", lambda *device: None)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("found", "said", "named"),
    [
        (lambda: problem(rows(1, 2, 512, 128)), None, True),
        (lambda: problem(rows(1, 2, 512, 256)), None, True),
        (lambda: problem(rows(1, 2, 512, 256), mask=masks.causal(align="top_left")), None, True),
        (lambda: problem(rows(1, 2, 512, 256), mask=masks.window(64)), None, True),
        (lambda: problem(rows(1, 2, 512, 256), mask=EVERY), "lead is measured", True),
        (lambda: problem(rows(1, 2, 512, 256), score=scores.softcap(3.0)), None, True),
        (lambda: problem(rows(1, 2, 512, 256), score=BY_DISTANCE), "no tables", True),
        (lambda: problem(rows(1, 2, 513, 64), score=scores.softcap(3.0)), None, True),
        (lambda: problem(rows(1, 2, 512, 128), score=BY_ROW), "no tables", True),
        (lambda: problem(rows(1, 2, 512, 128), score=BY_DISTANCE), None, True),
        (lambda: problem(rows(1, 2, 513, 64), score=BY_DISTANCE), "no tables", True),
        (lambda: problem(rows(1, 2, 512, 256))._replace(value_dim=128), None, True),
        (lambda: problem(rows(1, 2, 512, 256))._replace(packed=True), None, True),
        (lambda: packed(128, 128), "wait for the host", True),
        (lambda: packed(192, 192), None, True),
        (lambda: packed(128, 128)._replace(batch=128, query_len=16384), None, True),
        (lambda: problem(rows(1, 2, 512, 64), mask=masks.causal()), "512 rows are slower", True),
        (lambda: problem(rows(1, 2, 513, 64), mask=masks.causal()), None, True),
        (lambda: problem(rows(1, 2, 512, 128))._replace(value_dim=64), "same memory", False),
        (lambda: problem(rows(1, 2, 0, 128), rows(1, 2, 512, 128)), "no queries", False),
    ],
)
def test_which_backward_passes_it_takes(found, said, named):
    asked = found()._replace(device="cuda")
    assert backends.choose(asked, of="backward") == ("hopper" if said is None else "triton")
    choice = backends.explained(asked, "hopper", "backward")
    assert choice.chosen == ("hopper" if named else None)
    if said is not None:
        assert said in (choice.not_preferred["hopper"] or choice.reasons["hopper"])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda: problem(rows(1, 2, 512, 128)), None),
        (lambda: problem(rows(1, 2, 512, 128), mask=masks.causal(align="top_left")), None),
        (lambda: problem(rows(1, 2, 512, 128), mask=masks.window(64)), None),
        (lambda: problem(rows(1, 2, 512, 128), mask=PREFIX & masks.window(64)), None),
        (lambda: problem(rows(1, 2, 512, 128), mask=~masks.window(64)), None),
        (lambda: problem(rows(1, 2, 512, 256), mask=~masks.window(64)), None),
        (lambda: problem(rows(1, 2, 512, 128), mask=EVERY), "measured for causal"),
        (lambda: problem(rows(1, 2, 512, 64), mask=EVERY), "no tables"),
        (lambda: problem(rows(1, 2, 512, 64), mask=masks.window(64)), None),
        (lambda: problem(rows(1, 2, 513, 64), mask=masks.causal()), None),
        (lambda: problem(rows(1, 2, 512, 64), mask=masks.causal()), None),
        (lambda: problem(rows(1, 2, 128, 64), mask=masks.causal()), None),
        (lambda: problem(rows(1, 2, 127, 64), mask=masks.causal()), "from 128 rows on"),
        (lambda: problem(rows(1, 2, 512, 64)), None),
        (lambda: packed(128, 128), None),
        (lambda: packed(127, 128), "fewer than 128 rows"),
        (lambda: packed(192, 192)._replace(head_dim=64, value_dim=64), None),
        (lambda: packed(191, 192)._replace(head_dim=64, value_dim=64), "fewer than 192 rows"),
        (lambda: problem(rows(1, 2, 512, 128), score=scores.softcap(30.0)), "by functions"),
        (lambda: problem(rows(1, 2, 512, 256), score=scores.softcap(30.0)), None),
        (lambda: problem(rows(1, 2, 512, 256), score=BY_ROW), "by tables"),
        (lambda: problem(rows(1, 2, 512, 128), score=BY_ROW), "by tables"),
        (lambda: problem(rows(1, 2, 512, 128), score=BY_DISTANCE), "by tables"),
        (lambda: problem(rows(1, 2, 512, 128), score=scores.alibi(torch.ones(2))), None),
        (lambda: problem(rows(1, 2, 512, 64), score=scores.alibi(torch.ones(2))), "too few"),
        (lambda: problem(rows(1, 2, 512, 32)), "64 channels"),
    ],
)
def test_what_was_not_measured_goes_to_triton_kernels_unless_it_is_named(found, said, hopper):
    asked = found()._replace(device="cuda")
    assert backends.choose(asked) == ("hopper" if said is None else "triton")
    assert backends.choose(asked, "hopper") == "hopper"
    choice = backends.explained(asked)
    why = choice.not_preferred["hopper"]
    assert (why is None) if said is None else (said in why)
    lines = [line.strip() for line in answers(choice)]
    taken = "hopper: yes, taken" if said is None else f"hopper: yes, not asked for, {why}"
    assert taken in lines
