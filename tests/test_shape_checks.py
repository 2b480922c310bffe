"""Shape checks: a nested function is checked each time that it is made, by a check made once."""

from collections.abc import Callable
from typing import Any

import pytest
import shape_checks
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from shape_checks import names_shapes, typechecked
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


class Annotated:
    """Functions that name shapes, and such that do not."""

    def rows(self, rows: Float[Tensor, "rows dim"]) -> None: ...

    def rows_among_others(self, rows: "tuple[int, Float[Tensor, ' dim'] | None]") -> None: ...

    def function_of_rows(self, call: Callable[[Float[Tensor, " dim"]], int]) -> None: ...

    def result(self, count: int) -> Float[Tensor, " dim"]:
        return torch.zeros(count)

    def other_types(self, count: int, rows: "dict[str, list[Tensor]] | None") -> None: ...


def test_functions_that_name_no_shape_are_told() -> None:
    functions = {name: each for name, each in vars(Annotated).items() if callable(each)}
    named = {name: names_shapes(function) for name, function in functions.items()}
    assert [name for name, found in named.items() if not found] == ["other_types"]

    def unknown(count: Any) -> None: ...

    unknown.__annotations__["count"] = "Nowhere"
    assert not names_shapes(unknown)


def test_operations_are_checked_where_they_name_shapes(pytestconfig: pytest.Config) -> None:
    """By `make test`, whose options say which."""
    if not pytestconfig.getoption("jaxtyping_packages", None):
        pytest.skip("no shapes are checked in this run")
    from saccade.ops.attention import reference

    wrong: Any = torch.zeros(2, 2)
    with pytest.raises(TypeCheckError, match="parameters"):
        reference.attend(wrong, wrong, wrong, None)
    assert hasattr(reference.attend, "__wrapped__") and not hasattr(
        reference.lay_out, "__wrapped__"
    )
