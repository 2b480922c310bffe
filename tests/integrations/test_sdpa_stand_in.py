"""What looks at calls of PyTorch's function, or knows it by identity, works on after `enable`."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade.integrations import sdpa

F: Any = torch.nn.functional  # called with unpacked lists
OURS: Any = saccade.scaled_dot_product_attention
EXPLAIN: Any = sdpa.explain
THEIRS: Any = F.scaled_dot_product_attention  # as a program keeps it that imported it earlier
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, a dozen terms


def inputs(query_len: int = 5, kv_len: int = 7) -> list[Tensor]:
    torch.manual_seed(query_len)
    return [
        torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True)
        for length in (query_len, kv_len, kv_len)
    ]


class Seen:
    """How often saccade was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, original = 0, saccade.attention

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return original(*arguments, **options)

        monkeypatch.setattr(saccade, "attention", counted)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


# ---- PyTorch's own bias -----------------------------------------------------------------------


@pytest.mark.parametrize("around", ["enable", "compiled", "ours"])
@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (7, 5)])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")
def test_causal_bias(bias: Any, lengths: tuple[int, int], around: str, seen: Seen) -> None:
    tensors = inputs(*lengths)
    mask = bias(*lengths)._materialize()
    wanted = THEIRS(*tensors, mask)
    if around == "ours":
        found = OURS(*tensors, bias(*lengths))
    else:
        with sdpa.enabled():
            call = F.scaled_dot_product_attention
            if around == "compiled":
                call = torch.compile(call, backend="eager", fullgraph=True)
            found = call(*tensors, bias(*lengths))
    assert seen.calls == 1
    sees = mask.any(-1)
    torch.testing.assert_close(found[..., sees, :], wanted[..., sees, :], **CLOSE)
    assert not bool(found[..., ~sees, :].any())
    grad = torch.randn_like(found) * sees[:, None]  # theirs of a row that sees nothing may be NaN
    gradients = torch.autograd.grad(found, tensors, grad)
    rows = tensors[0][..., sees, :], *tensors[1:]
    again = THEIRS(*rows, mask[sees])
    for one, other in zip(
        gradients, torch.autograd.grad(again, tensors, grad[..., sees, :]), strict=True
    ):
        torch.testing.assert_close(one, other, **CLOSE)


def test_causal_bias_that_does_not_fit_is_pytorchs_to_refuse() -> None:
    tensors = inputs()
    with pytest.raises(ValueError, match=r"attn_mask: got \[4, 7\], takes the call's \[5, 7\]"):
        OURS(*tensors, causal_lower_right(4, 7))
    with sdpa.enabled():
        with pytest.raises(RuntimeError, match="must match"):
            F.scaled_dot_product_attention(*tensors, causal_lower_right(4, 7))
        with pytest.raises(ValueError, match="should not be used with causal=True"):
            F.scaled_dot_product_attention(*tensors, causal_lower_right(5, 7), is_causal=True)
    route = EXPLAIN(*tensors, causal_lower_right(5, 7))
    assert route.reason is None and "cpu: yes, taken" in str(route)


# ---- handlers of calls ------------------------------------------------------------------------


def by_name_now(function: Any) -> bool:
    return function is torch.nn.functional.scaled_dot_product_attention


def by_name_then(function: Any) -> bool:
    return function is THEIRS


def by_dictionary(function: Any) -> bool:
    return function in {THEIRS: 1}


def by_operator(function: Any) -> bool:
    return function is vars(torch._C)["_nn"].scaled_dot_product_attention


def by_public_name(function: Any) -> bool:
    return resolve_name(function) == "torch.nn.functional.scaled_dot_product_attention"


RECOGNISED = [by_name_now, by_name_then, by_dictionary, by_operator, by_public_name]
Recognises = Callable[[Any], bool]


def subclass(recognises: Recognises) -> type[Tensor]:
    """A type of masks that a handler understands: a number, the mask's sliding window."""

    class Mask(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if recognises(func):
                query, key, value, mask = args
                place = torch.arange(query.shape[-2])[:, None] - torch.arange(key.shape[-2])
                seen = place.abs() <= int(mask.as_subclass(Tensor))
                return F.scaled_dot_product_attention(query, key, value, seen)
            return super().__torch_function__(func, types, args, kwargs or {})

    return Mask


@pytest.mark.parametrize("recognises", RECOGNISED)
def test_a_handler_of_a_tensor_knows_the_function(recognises: Recognises) -> None:
    tensors = inputs(5, 5)
    mask = torch.tensor(1).as_subclass(subclass(recognises))
    wanted = F.scaled_dot_product_attention(*tensors, mask)
    with sdpa.enabled():
        found = F.scaled_dot_product_attention(*tensors, mask)
        assert F.scaled_dot_product_attention is not THEIRS  # ours is back
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert F.scaled_dot_product_attention is THEIRS


def test_a_handler_that_was_registered_meanwhile_knows_it_too() -> None:
    with sdpa.enabled():
        table = {F.scaled_dot_product_attention: 1}
        mask = torch.tensor(1).as_subclass(subclass(lambda function: function in table))
        found = F.scaled_dot_product_attention(*inputs(5, 5), mask)
    wanted = F.scaled_dot_product_attention(*inputs(5, 5), mask)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_mask_with_a_handler_is_refused_by_name() -> None:
    mask = torch.tensor(1).as_subclass(subclass(by_name_now))
    with pytest.raises(TypeError, match="attn_mask: got a Mask, takes a plain tensor"):
        OURS(*inputs(5, 5), mask)


class Mode(TorchFunctionMode):
    """Counts the calls that it recognises, and doubles what they give."""

    def __init__(self, recognises: Recognises) -> None:
        super().__init__()
        self.recognises, self.calls = recognises, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self.recognises(func):
            return output
        self.calls += 1
        return 2 * output


@pytest.mark.parametrize("recognises", RECOGNISED)
def test_modes_see_one_call_each_and_then_we_do(recognises: Recognises, seen: Seen) -> None:
    tensors = inputs()
    wanted = 4 * THEIRS(*tensors, is_causal=True)
    with sdpa.enabled(), Mode(recognises) as outer, Mode(recognises) as inner:
        found = F.scaled_dot_product_attention(*tensors, is_causal=True)
        assert torch.overrides._get_current_function_mode_stack() == [outer, inner]
    assert (outer.calls, inner.calls, seen.calls) == (1, 1, 1)
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_mode_may_raise() -> None:
    class Strict(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            raise KeyError(func)

    with sdpa.enabled():
        with Strict(), pytest.raises(KeyError):
            F.scaled_dot_product_attention(*inputs())
        assert F.scaled_dot_product_attention is not THEIRS
    assert F.scaled_dot_product_attention is THEIRS


def test_a_handler_may_disable() -> None:
    class Last(Mode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            sdpa.disable()
            return super().__torch_function__(func, types, args, kwargs)

    with sdpa.enabled():
        with Last(by_name_then) as mode:
            F.scaled_dot_product_attention(*inputs())
        assert F.scaled_dot_product_attention is THEIRS and mode.calls == 1


@pytest.mark.parametrize("recognises", [by_name_now, by_name_then, by_dictionary])
def test_compiled_code_shows_modes_the_call(recognises: Recognises) -> None:
    tensors = inputs()

    def twice(*tensors: Tensor) -> Tensor:
        with Mode(recognises):
            return F.scaled_dot_product_attention(*tensors)

    with sdpa.enabled():
        found = torch.compile(twice, backend="eager", fullgraph=True)(*tensors)
    torch.testing.assert_close(found, 2 * THEIRS(*tensors), **CLOSE)
    assert F.scaled_dot_product_attention is THEIRS


def test_a_default_device_hides_nothing_from_us(seen: Seen) -> None:
    with sdpa.enabled(), torch.device("cpu"):
        F.scaled_dot_product_attention(*inputs())
    assert seen.calls == 1


def test_a_dispatch_mode_sees_our_operator() -> None:
    class Met(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with sdpa.enabled(), Met() as met:
        F.scaled_dot_product_attention(*inputs())
    assert "saccade.attention.default" in met.names


def test_other_threads_go_to_pytorch_while_one_is_asking(seen: Seen) -> None:
    """A handler runs with PyTorch's function in its place; afterwards ours is there for all."""
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Mode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if self.recognises(func):
                asked.set()
                assert go_on.wait(60)
            return super().__torch_function__(func, types, args, kwargs)

    def ask() -> None:
        with Slow(by_name_now):
            F.scaled_dot_product_attention(*inputs())

    wanted = THEIRS(*inputs())
    with sdpa.enabled():
        thread = threading.Thread(target=ask)
        thread.start()
        assert asked.wait(60)
        found = F.scaled_dot_product_attention(*inputs())
        go_on.set()
        thread.join()
        assert F.scaled_dot_product_attention is not THEIRS
        assert seen.calls == 1  # the slow one's
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# ---- the object itself ------------------------------------------------------------------------


def test_what_was_imported_meanwhile_goes_on_to_pytorch(seen: Seen) -> None:
    with sdpa.enabled():
        from torch.nn.functional import scaled_dot_product_attention
    kept: Any = scaled_dot_product_attention
    assert kept is not THEIRS
    tensors = inputs()
    torch.testing.assert_close(kept(*tensors), THEIRS(*tensors), rtol=0, atol=0)
    with Mode(by_name_now) as mode:
        kept(*tensors)
    assert mode.calls == 1 and seen.calls == 0


def test_it_equals_the_function_and_travels_by_name() -> None:
    with sdpa.enabled():
        ours = F.scaled_dot_product_attention
        assert ours == THEIRS and ours in [THEIRS] and hash(ours) == hash(THEIRS)
        assert ours != F.softmax
        assert copy.deepcopy(ours) is ours and pickle.loads(pickle.dumps(ours)) is ours
        packed = pickle.dumps(ours)
        assert ours.__name__ == THEIRS.__name__ and ours.__doc__ == THEIRS.__doc__
    assert pickle.loads(packed) is THEIRS


def test_who_comes_after_us_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", THEIRS)  # puts it back at the end
    with sdpa.enabled():
        ours = F.scaled_dot_product_attention

        def wrapper(*arguments: Any, **options: Any) -> Any:
            return 3 * ours(*arguments, **options)

        F.scaled_dot_product_attention = wrapper
    assert F.scaled_dot_product_attention is wrapper
    tensors = inputs()
    torch.testing.assert_close(wrapper(*tensors), 3 * THEIRS(*tensors), rtol=0, atol=0)


def test_who_came_before_us_is_asked_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *arguments: "theirs")
    mask = torch.tensor(1).as_subclass(subclass(by_name_now))
    with sdpa.enabled():
        assert F.scaled_dot_product_attention(*inputs(), mask) == "theirs"


def test_a_bias_of_a_subclass_of_pytorchs_is_its_own() -> None:
    class Twice(CausalBias):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return 2 * super().__torch_function__(func, types, args, kwargs)

    tensors = inputs()
    bias = causal_upper_left(5, 7).as_subclass(Twice)
    bias.variant, bias.seq_len_q, bias.seq_len_kv = causal_upper_left(5, 7).variant, 5, 7
    with sdpa.enabled():
        found = F.scaled_dot_product_attention(*tensors, bias)
    torch.testing.assert_close(found, 2 * THEIRS(*tensors, is_causal=True), **CLOSE)
