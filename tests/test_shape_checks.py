"""Shape checks: a nested function is checked each time that it is made, by a check made once."""

from collections.abc import Callable
from typing import Any

import pytest
import shape_checks
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from shape_checks import typechecked
from torch import Tensor


def outer(number: int) -> Callable[..., Tensor]:
    @jaxtyped(typechecker=typechecked)
    def inner(
        rows: Float[Tensor, "rows dim"], other: Float[Tensor, " dim"]
    ) -> Float[Tensor, "rows dim"]:
        return (rows + other)[number:]

    return inner


def test_nested_functions_are_checked_by_one_check() -> None:
    rows, other = torch.zeros(3, 4), torch.zeros(4)
    known = len(shape_checks._NESTED)
    for number in (0, 1, 0, 1):
        inner = outer(number)
        with pytest.raises(TypeCheckError, match="parameters"):
            inner(rows, torch.zeros(3))
        if number:  # the function is its own, and so is what it gives
            with pytest.raises(TypeCheckError, match="return value"):
                inner(rows, other)
        else:
            assert torch.equal(inner(rows, other), rows)
    assert len(shape_checks._NESTED) == known + 2  # of arguments, and of arguments and result


def test_functions_of_one_name_with_other_shapes_have_checks_of_their_own() -> None:
    def of(kind: Any) -> Callable[..., Tensor]:
        def inner(rows: Any) -> Tensor:
            return rows

        inner.__annotations__["rows"] = kind
        return jaxtyped(inner, typechecker=typechecked)

    rows = torch.zeros(3, 4)
    for shape, fits in (("a b", True), ("a", False), ("a b", True)):
        inner = of(Float[Tensor, shape])
        if fits:
            inner(rows)
            continue
        with pytest.raises(TypeCheckError):
            inner(rows)
