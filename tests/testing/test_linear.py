"""The bound of linear attention is tight enough to notice what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.testing import LinearCase, assert_linear_exact, make_linear_case


class Wrong(LinearCase):
    """A case whose results are nonfinite on the way."""

    poison: Callable[[dict[str, Tensor]], None]

    def run(self, implementation: str, dtype: Any = None, **more: Any) -> dict[str, Tensor]:
        results = super().run(implementation, dtype, **more)
        if implementation == "cpu":
            self.poison(results)
        return results


def wrong(case: LinearCase, poison: Callable[[dict[str, Tensor]], None]) -> Wrong:
    fields = (case.description, case.tensors, case.key_lengths, case.cu_seqlens, case.grads)
    made = Wrong(*fields)
    made.poison = poison
    return made


NAMES = ("output", "kv", "key_sum", "grad_query", "grad_key", "grad_value", "grad_decay", "grad_kv")


@pytest.mark.parametrize("name", [*NAMES, "grad_key_sum"])
def test_a_relative_error_of_a_thousandth_is_noticed(name: str) -> None:
    case = make_linear_case(decay="rows", state=True)
    assert_linear_exact(wrong(case, lambda results: None), "cpu")

    def poison(results: dict[str, Tensor]) -> None:
        results[name] *= 1.001

    with pytest.raises(AssertionError, match=name):
        assert_linear_exact(wrong(case, poison), "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_key_that_is_left_out_is_noticed(dtype: torch.dtype) -> None:
    case = make_linear_case(dtype=dtype)

    class Forgetful(LinearCase):
        def run(self, implementation: str, dtype: Any = None, **more: Any) -> dict[str, Tensor]:
            everything = self.tensors
            if implementation == "cpu":
                self.tensors = {**everything, "key": everything["key"].clone()}
                self.tensors["key"][:, :, 11] = -30.0  # its features are next to nothing
            results = super().run(implementation, dtype, **more)
            self.tensors = everything
            return results

    forgetful = Forgetful(case.description, case.tensors, None, None, case.grads)
    with pytest.raises(AssertionError, match="output"):
        assert_linear_exact(forgetful, "cpu")


def test_nan_is_noticed() -> None:
    def poison(results: dict[str, Tensor]) -> None:
        results["grad_value"][0, 0, 0, 0] = torch.nan

    with pytest.raises(AssertionError, match="grad_value"):
        assert_linear_exact(wrong(make_linear_case(), poison), "cpu")
