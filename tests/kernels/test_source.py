"""What no kernel can do is refused by name and line, and other implementations serve the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import saccade
from saccade.kernels.compose import mask_functions, score_functions
from saccade.kernels.source import CannotCompile
from saccade.masks import take

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

TEXT, TABLE = "3", torch.arange(30)
Body = Callable[..., Any]


def branches(batch, head, query_row, kv_row):
    answer = kv_row <= query_row
    if TEXT == "3":
        answer = answer & (kv_row > 2)
    return answer


def loops(batch, head, query_row, kv_row):
    answer = kv_row <= query_row
    for step in range(3):
        answer = answer | (kv_row == step)
    return answer


def chooses(batch, head, query_row, kv_row):
    return (kv_row if TEXT == "3" else query_row) > 2


def powers(batch, head, query_row, kv_row):
    distance = query_row - kv_row
    return distance**2 < 30


def powers_in_place(batch, head, query_row, kv_row):
    distance = query_row - kv_row
    distance **= 2
    return distance < 30


def chains_comparisons(batch, head, query_row, kv_row):
    width = 4

    return 0 < width < kv_row + 3


def says_not(batch, head, query_row, kv_row):
    return (kv_row <= query_row) & (not TEXT)


def says_or(batch, head, query_row, kv_row):
    return TEXT == "4" or kv_row <= query_row


def uses_text(batch, head, query_row, kv_row):
    return (kv_row <= query_row) | (TEXT == "3")


def uses_an_outer_tensor(batch, head, query_row, kv_row):
    return TABLE[kv_row] <= query_row


def takes_an_outer_tensor(batch, head, query_row, kv_row):
    return take(TABLE, kv_row) <= query_row


def calls_a_method(batch, head, query_row, kv_row):
    return (query_row - kv_row).abs() < 5


def calls_torch(batch, head, query_row, kv_row):
    return torch.bitwise_and(query_row, kv_row) == 0


def near(first, second, width=4):
    return first - second < width


def names_arguments(batch, head, query_row, kv_row):
    return near(first=query_row, second=kv_row)


def spreads_arguments(batch, head, query_row, kv_row):
    rows = query_row
    return near(*(rows, kv_row))


def squares(number):
    return number * number**1


def calls_a_helper_that_cannot(batch, head, query_row, kv_row):
    return squares(kv_row) < 50


def unpacks(batch, head, query_row, kv_row):
    first, second = query_row, kv_row
    return first >= second


def defines(batch, head, query_row, kv_row):
    def inner(row):
        return row > 2

    return inner(kv_row)


def has_keywords(batch, head, query_row, kv_row, *, width=3):
    return query_row - kv_row < width


REFUSED: dict[Body, tuple[str, str]] = {
    branches: ("line 3 of 'branches' uses", "if; takes operators"),
    loops: ("line 3 of 'loops' uses", "for; takes operators"),
    chooses: ("line 2 of 'chooses' uses", "choose with where"),
    powers: ("line 3 of 'powers' uses", "'distance ** 2'"),
    powers_in_place: ("line 3 of 'powers_in_place' uses", "'distance ** 2'"),
    chains_comparisons: ("line 4 of 'chains_comparisons' uses", "join two comparisons with &"),
    says_not: ("line 2 of 'says_not' uses", "'not', which has no meaning on tiles"),
    says_or: ("line 2 of 'says_or' uses", "choose with where"),
    uses_text: ("line 2 of 'uses_text' uses", "'TEXT', which is no number"),
    uses_an_outer_tensor: ("line 2 of 'uses_an_outer_tensor' uses", "'TABLE[kv_row]'"),
    takes_an_outer_tensor: ("line 2 of", "take of something else than a captured tensor"),
    calls_a_method: ("line 2 of 'calls_a_method' uses", "query_row - kv_row"),
    calls_torch: ("line 2 of 'calls_torch' uses", "'torch.bitwise_and'"),
    names_arguments: ("line 2 of 'names_arguments' uses", "takes plain positional arguments"),
    spreads_arguments: ("line 3 of", "takes plain positional arguments"),
    calls_a_helper_that_cannot: ("line 2 of 'squares' uses", "'number ** 1'"),
    unpacks: ("line 2 of 'unpacks' uses", "an assignment to something else than a name"),
    defines: ("line 2 of 'defines' uses", "functiondef"),
    has_keywords: ("line 1 of 'has_keywords' uses", "keyword-only parameters"),
}


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, 20, 16) for _ in range(3)]


def assert_refused(mask: saccade.masks.Mask, *messages: str) -> None:
    """Portable gives the reason; cpu and reference serve the call and agree."""
    given = tensors()
    reasons = saccade.explain(*given, mask=mask).reasons
    assert reasons["portable"] is not None and reasons["cpu"] is None
    with pytest.raises(NotImplementedError) as caught:
        saccade.attention(*given, mask=mask, implementation="portable")
    for message in ("no kernel can be made", *messages):
        assert message in reasons["portable"]
        assert message in str(caught.value)
    assert saccade.explain(*given, mask=mask).chosen == "cpu"
    torch.testing.assert_close(
        saccade.attention(*given, mask=mask),
        saccade.attention(*given, mask=mask, implementation="reference"),
    )


@pytest.mark.parametrize("body", list(REFUSED), ids=lambda body: body.__name__)
def test_what_cannot_be_compiled_is_named_with_its_line(body: Body) -> None:
    mask = saccade.masks.function(body)()
    with pytest.raises(CannotCompile) as caught:
        mask_functions(mask.key)
    for message in REFUSED[body]:
        assert message in str(caught.value)


WORKING = [branches, loops, powers, says_or, takes_an_outer_tensor, calls_a_method, names_arguments]


@pytest.mark.parametrize("body", WORKING, ids=lambda body: body.__name__)
def test_other_implementations_serve_what_portable_refuses(body: Body) -> None:
    assert_refused(saccade.masks.function(body)(), *REFUSED[body])
    combined = saccade.masks.causal() & ~saccade.masks.function(body)()
    assert_refused(combined, *REFUSED[body])


def test_a_lambda_is_refused() -> None:
    mask = saccade.masks.function(lambda batch, head, query_row, kv_row: kv_row <= query_row)()
    assert_refused(mask, "<lambda>", "is no function made by def")


def test_a_function_without_source_is_refused() -> None:
    scope: dict[str, Any] = {"__name__": "typed_in"}
    exec("def typed(batch, head, query_row, kv_row):\n    return kv_row <= query_row", scope)
    assert_refused(saccade.masks.function(scope["typed"])(), "'typed' is not in a file")


class Near:
    def visible(self, batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
        return kv_row <= query_row


def test_a_method_is_refused() -> None:
    assert_refused(saccade.masks.function(Near().visible)(), "is no plain function")


def squared(score, batch, head, query_row, kv_row):
    return score**2


def square(score, batch, head, query_row, kv_row):
    return score * score


def cubed_slope(score, batch, head, query_row, kv_row):
    return 3 * score**2


def test_a_score_and_a_derivative_are_refused_alike() -> None:
    for change in (squared, square):
        score = saccade.scores.function(change, derivative=cubed_slope)()
        with pytest.raises(CannotCompile, match=r"line 2 of '(squared|cubed_slope)' uses 'score"):
            score_functions(score.key)
        given = tensors()
        reason = saccade.explain(*given, score=score).reasons["portable"]
        assert reason is not None and "score ** 2" in reason
        assert saccade.attention(*given, score=score).isfinite().all()


def test_a_score_without_a_derivative_serves_forward_and_refuses_backward() -> None:
    score = saccade.scores.function(square)()
    given = tensors()
    found = saccade.attention(*given, score=score, implementation="portable")
    wanted = saccade.attention(*given, score=score, implementation="reference")
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    given[0].requires_grad_()
    output = saccade.attention(*given, score=score, implementation="portable")
    with pytest.raises(NotImplementedError, match="derivative"):
        output.sum().backward()


def test_a_wrong_number_of_indices_is_refused() -> None:
    @saccade.masks.function
    def too_few(batch: Any, head: Any, query_row: Any, kv_row: Any, table: Any) -> Any:
        return take(table, kv_row) > 0

    mask = too_few(torch.ones(3, 20))
    with pytest.raises(ValueError, match="take: a table of 2 dimensions needs as many indices"):
        saccade.attention(*tensors(), mask=mask, implementation="reference")
    with pytest.raises(Exception, match=r"take|indices|dimensions"):
        saccade.attention(*tensors(), mask=mask, implementation="portable")
