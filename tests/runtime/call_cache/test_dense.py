"""A call like one that was checked before is recalled, and never confused with another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade import masks, scores
from saccade.runtime import call_cache


def tensors(length: int = 24, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, length, 16, generator=generator).to(dtype) for h in (4, 2, 2)]


def exact(given: list[Tensor], **options: Any) -> Tensor:
    """The answer of the reference, which is asked by name and in float64."""
    options.pop("config", None)
    options["implementation"] = "reference"
    return saccade.attention(*(tensor.double() for tensor in given), **options)


@saccade.masks.function
def below(batch: Any, head: Any, query_row: Any, kv_row: Any, limit: Any) -> Any:
    return (kv_row * 1.0 < limit) | (kv_row == query_row)


def test_an_alike_call_is_not_checked_again_and_has_its_own_answer(checks: list[Any]) -> None:
    for seed in range(4):
        given = tensors(seed=seed)
        options: dict[str, Any] = {"mask": masks.window(3), "score": scores.softcap(2.0)}
        output, lse = saccade.attention(*given, **options, return_lse=True)
        alone = saccade.attention(*given, **options)
        wanted = exact(given, **options)  # is checked once itself
        torch.testing.assert_close(output.double(), wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(output, alone)
        assert lse.shape == output.shape[:3]
    assert len(checks) == 2


def test_a_remembered_call_still_gives_gradients() -> None:
    mask = masks.causal()
    saccade.attention(*tensors(), mask=mask)  # kept without gradients
    leaves = [tensor.requires_grad_() for tensor in tensors(seed=1)]
    found = torch.autograd.grad(saccade.attention(*leaves, mask=mask).sum(), leaves)
    again = [tensor.detach().double().requires_grad_() for tensor in leaves]
    wanted = torch.autograd.grad(
        saccade.attention(*again, mask=mask, implementation="reference").sum(), again
    )
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-4)


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask": ({"mask": masks.causal()}, {}),
    "align": ({"mask": masks.causal()}, {"mask": masks.causal("top_left")}),
    "int": ({"mask": masks.window(3)}, {"mask": masks.window(4)}),
    "zero and one": ({"mask": masks.window(0)}, {"mask": masks.window(1)}),
    "order of ints": ({"mask": masks.window(3, 1)}, {"mask": masks.window(1, 3)}),
    "float": ({"mask": below(3.5)}, {"mask": below(9.5)}),
    "combiner": (
        {"mask": masks.window(3) & masks.window(7)},
        {"mask": masks.window(3) | masks.window(7)},
    ),
    "score": ({"score": scores.softcap(1.0)}, {"score": scores.softcap(2.0)}),
    "scale": ({"scale": 0.3}, {"scale": -0.3}),
    "scale given": ({"scale": 1.0}, {}),
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_calls_that_differ_are_not_confused(name: str) -> None:
    given = tensors()
    given[0] = given[0][:, :, :17].contiguous()
    wanted = [exact(given, **options) for options in PAIRS[name]]
    assert not torch.allclose(wanted[0], wanted[1], atol=1e-3)
    for which in (0, 1, 0, 1):
        found = saccade.attention(*given, **PAIRS[name][which])
        torch.testing.assert_close(found.double(), wanted[which], atol=1e-5, rtol=1e-5)


def test_dtypes_shapes_and_strides_are_not_confused() -> None:
    plain = tensors()
    choices = [
        plain,
        tensors(dtype=torch.float64),
        tensors(dtype=torch.bfloat16),
        tensors(length=25),
        [plain[0], *(tensor[:, :1] for tensor in plain[1:])],
        [tensor.mT.contiguous().mT for tensor in plain],
        [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in plain],
        [plain[0], plain[1][..., :1, :].expand_as(plain[1]), plain[2]],
        [tensor[..., :9] for tensor in plain],
    ]
    for _ in range(2):
        for given in choices:
            found = saccade.attention(*given, mask=masks.causal())
            tolerance = 2e-2 if given[0].dtype == torch.bfloat16 else 1e-5
            assert found.dtype == given[0].dtype
            torch.testing.assert_close(
                found.double(), exact(given, mask=masks.causal()), atol=tolerance, rtol=tolerance
            )


def test_a_config_is_the_calls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.ops.attention.cpu import host as attention_host

    seen: list[Any] = []
    prepared = attention_host.prepared
    monkeypatch.setattr(
        attention_host,
        "prepared",
        lambda i, v, config: seen.append(config) or prepared(i, v, config),
    )
    configs = [None, saccade.KernelConfig(8, 8), saccade.KernelConfig(16, 8)]
    for config in (*configs, *configs):
        saccade.attention(*tensors(), mask=masks.causal(), config=config)
    assert seen == [saccade.KernelConfig(), *configs[1:]]


def test_an_implementation_is_the_calls_own() -> None:
    given = tensors()
    for _ in range(2):
        assert saccade.attention(*given, implementation="cpu").isfinite().all()
        with pytest.raises(ValueError, match="implementation: got 'gpu'"):
            saccade.attention(*given, implementation="gpu")
        with pytest.raises(NotImplementedError, match="it takes no config"):
            saccade.attention(
                *given, implementation="reference", config=saccade.KernelConfig(query_tile=8)
            )
    output = saccade.attention(*(t.requires_grad_() for t in given), implementation="reference")
    assert output.grad_fn is not None and "Attention" not in type(output.grad_fn).__name__


SPECIAL: dict[str, dict[str, Any]] = {
    "captured by the mask": {"mask": masks.key_lengths(torch.tensor([3, 9]))},
    "a tensor as the mask": {"mask": torch.ones(24, 24, dtype=torch.bool)},
    "captured by the score": {"score": scores.bias(torch.zeros(24, 24))},
    "dropout": {"dropout_p": 0.5},
    "sinks": {"sinks": torch.zeros(4)},
    "whole scale": {"scale": 1},
    "configs by capability": {"config": {(9, 0): saccade.KernelConfig()}},
}


@pytest.mark.parametrize("name", list(SPECIAL))
def test_what_is_out_of_the_ordinary_is_checked_every_time(name: str, checks: list[Any]) -> None:
    for count in range(1, 4):
        saccade.attention(*tensors(), **SPECIAL[name])
        assert len(checks) == count
    assert not call_cache._calls


def test_autocast_is_neither_kept_nor_remembered(checks: list[Any]) -> None:
    given = tensors()
    assert saccade.attention(*given).dtype == torch.float32
    for count in (2, 3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert saccade.attention(*given).dtype == torch.bfloat16
        assert len(checks) == count
    assert saccade.attention(*given).dtype == torch.float32
    assert len(checks) == 3 and len(call_cache._calls) == 1


class Subclass(Tensor):
    pass


def test_tensor_subclasses_are_checked_every_time(checks: list[Any]) -> None:
    given = tensors()
    saccade.attention(*given)
    saccade.attention(given[0].as_subclass(Subclass), *given[1:])
    assert len(checks) == 2 and len(call_cache._calls) == 1


def test_dropout_after_an_alike_call_without_it_drops() -> None:
    given = tensors()
    plain = saccade.attention(*given)
    dropped = [saccade.attention(*given, dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(dropped[0], plain)
    assert not torch.equal(*dropped)
    assert torch.equal(saccade.attention(*given), plain)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "scale=True": ({"scale": True}, TypeError, "scale: got True"),
    "scale=nan": ({"scale": float("nan")}, ValueError, "scale: got nan"),
    "scale=text": ({"scale": "1"}, TypeError, "scale: got '1'"),
    "return_lse=1": ({"return_lse": 1}, TypeError, "return_lse: got 1"),
    "deterministic=1": ({"deterministic": 1}, TypeError, "deterministic: got 1"),
    "dropout_p=False": ({"dropout_p": False}, TypeError, "dropout_p: got False"),
    "dropout_p=1.0": ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0"),
    "mask": ({"mask": below}, TypeError, "if it captures the others, call it with them"),
    "score": ({"score": torch.zeros(1)}, TypeError, "score: got"),
    "config": ({"config": 1}, TypeError, "config: got"),
    "implementation": ({"implementation": ["cpu"]}, ValueError, "implementation: got"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_arguments_still_raise_after_a_like_call(name: str) -> None:
    options, error, message = WRONG[name]
    alike = {"scale=True": {"scale": 1.0}, "mask": {"mask": below(1.0)}}.get(name, {})
    saccade.attention(*tensors(), **alike)
    for _ in range(2):
        with pytest.raises(error) as caught:
            saccade.attention(*tensors(), **options)
        assert message in str(caught.value)


def test_wrong_tensors_still_raise_after_a_like_call() -> None:
    query, key, value = tensors()
    saccade.attention(query, key, value)
    for _ in range(2):
        with pytest.raises(TypeError, match="key: got torch"):
            saccade.attention(query, key.double(), value)
        with pytest.raises(ValueError, match="value: got 23 rows"):
            saccade.attention(query, key, value[:, :, 1:])
        with pytest.raises(TypeError, match="query: got list"):
            saccade.attention(query.tolist(), key, value)  # type: ignore[arg-type]


def test_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_CALLS", 5)
    given = tensors()
    for left in range(23):
        found = saccade.attention(*given, mask=masks.window(left))
        assert 1 <= len(call_cache._calls) <= 5
        wanted = exact(given, mask=masks.window(left))
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


# ---- lengths -------------------------------------------------------------------------------------


def test_another_length_is_not_checked_again_and_has_its_own_answer(checks: list[Any]) -> None:
    options: dict[str, Any] = {"mask": masks.causal(), "score": scores.softcap(2.0)}
    saccade.attention(*tensors(7), **options)
    assert len(checks) == 1
    for length in (24, 7, 600, 24, 31, 600):
        leaves = [tensor.requires_grad_() for tensor in tensors(length, seed=length)]
        output = saccade.attention(*leaves, **options)
        found = [output, *torch.autograd.grad(output.square().sum(), leaves)]
        again = [leaf.detach().double().requires_grad_() for leaf in leaves]
        wanted_output = saccade.attention(*again, implementation="reference", **options)
        wanted = [wanted_output, *torch.autograd.grad(wanted_output.square().sum(), again)]
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=1e-4)
    # Of each implementation one of up to 511 rows, and one of more.
    assert len(checks) == 4 and len(call_cache._calls) == 4


def test_one_causal_row_is_of_another_kind_than_many() -> None:
    query, key, value = tensors()
    for length in (24, 1, 2, 24, 1):
        given = [query[:, :, :length], key, value]
        for align in ("bottom_right", "top_left"):
            found = saccade.attention(*given, mask=masks.causal(align))
            wanted = exact(given, mask=masks.causal(align))
            torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


MISFITS: dict[str, tuple[tuple[tuple[int, ...], ...], str]] = {
    "batch of key": (((2, 4, 5, 16), (3, 2, 5, 16), (3, 2, 5, 16)), "key: got batch 3"),
    "batch of value": (((2, 4, 5, 16), (2, 2, 5, 16), (3, 2, 5, 16)), "value: got batch 3"),
    "rows of value": (((2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 6, 16)), "value: got 6 rows"),
    "heads of value": (((2, 4, 5, 16), (2, 2, 7, 16), (2, 4, 7, 16)), "value: got 4 heads"),
    "heads of key": (((2, 4, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16)), "key: got 3 heads"),
    "channels of key": (((2, 4, 5, 16), (2, 2, 7, 24), (2, 2, 7, 16)), "key: got head_dim 24"),
    "dimensions": (((2, 4, 16), (2, 2, 7, 16), (2, 2, 7, 16)), "query: got shape (2, 4, 16)"),
}


@pytest.mark.parametrize("name", list(MISFITS))
def test_sizes_that_do_not_fit_are_refused_by_name_in_a_known_kind(name: str) -> None:
    for length in (5, 6, 7):
        saccade.attention(*tensors(length))
    shapes, message = MISFITS[name]
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            saccade.attention(*(torch.zeros(shape) for shape in shapes))
        assert message in str(caught.value)
    assert len(call_cache._calls) == 1


def test_what_does_not_lie_in_plain_memory_is_refused_in_a_known_kind() -> None:
    query, key, value = tensors()
    saccade.attention(query, key, value)
    with pytest.raises(TypeError, match=r"query: got torch\.sparse_coo"):
        saccade.attention(query.to_sparse(), key, value)
    nested = torch.nested.nested_tensor([query[0]], layout=torch.jagged)
    with pytest.raises(TypeError, match="query: got a nested tensor"):
        saccade.attention(nested, key, value)
