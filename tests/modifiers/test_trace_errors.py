"""What cannot be known while a function is traced is refused, with its line and what to write."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import saccade
from saccade.masks import as_mask
from saccade.scores import as_score

ids = torch.arange(13)
pairs = torch.arange(12).view(3, 4)
array = numpy.arange(13)
listed = [0, 1, 2]
ADVICE = "write & | ~ for and, or, not; torch.where for if; torch.minimum for min"


def branches(b: Any, h: Any, q: Any, k: Any) -> Any:
    if q > k:
        return k > 3
    return k > 5


def loops(b: Any, h: Any, q: Any, k: Any) -> Any:
    seen = False
    for row in range(q):
        seen = seen | (k == row)
    return seen


def stores(b: Any, h: Any, q: Any, k: Any) -> Any:
    q[0] = 1
    return q > k


def while_loop(b: Any, h: Any, q: Any, k: Any) -> Any:
    while q > k:
        q = q - 3
    return q == k


NO_BRANCH, NO_VALUE = "cannot branch on a row", "has no value of its own"
Case = tuple[Callable[..., Any], str]
MASKS: dict[str, Case] = {
    "if": (branches, NO_BRANCH),
    "while": (while_loop, NO_BRANCH),
    "and": (lambda b, h, q, k: q > k and k > 3, NO_BRANCH),
    "or": (lambda b, h, q, k: q > k or k > 3, NO_BRANCH),
    "not": (lambda b, h, q, k: not (q > k), NO_BRANCH),
    "chained": (lambda b, h, q, k: 0 <= q - k < 4, NO_BRANCH),
    "conditional": (lambda b, h, q, k: q if k > 3 else k, NO_BRANCH),
    "in": (lambda b, h, q, k: k in (1, 2, 3), NO_BRANCH),
    "in a tensor": (lambda b, h, q, k: q in ids, "__contains__ is not known"),
    "contains": (lambda b, h, q, k: 3 in q, NO_VALUE),
    "min": (lambda b, h, q, k: min(q, k) < 3, NO_BRANCH),
    "max": (lambda b, h, q, k: max(q, k) < 3, NO_BRANCH),
    "any": (lambda b, h, q, k: any([q == k, k == 0]), NO_BRANCH),
    "range": (loops, NO_VALUE),
    "int": (lambda b, h, q, k: int(q) > 3, NO_VALUE),
    "float": (lambda b, h, q, k: float(q) > 3, NO_VALUE),
    "bool": (lambda b, h, q, k: bool(q > k), NO_BRANCH),
    "math": (lambda b, h, q, k: math.sqrt(q) > k, NO_VALUE),
    "math.floor": (lambda b, h, q, k: math.floor(q / 2) > k, NO_VALUE),
    "round": (lambda b, h, q, k: round(q / 2) > k, NO_VALUE),
    "item": (lambda b, h, q, k: q.item() > 3, "item is not known"),
    "len": (lambda b, h, q, k: len(q) > 3, NO_VALUE),
    "iterated": (lambda b, h, q, k: [*q] == k, NO_VALUE),
    "indexed": (lambda b, h, q, k: q[0] > k, NO_VALUE),
    "stored": (stores, NO_VALUE),
    "product of matrices": (lambda b, h, q, k: q @ k > 3, NO_VALUE),
    "a list at a row": (lambda b, h, q, k: listed[q] > k, NO_VALUE),
    "random": (lambda b, h, q, k: torch.rand(()) > 0.5, "cannot draw random numbers (rand)"),
    "random beside a row": (lambda b, h, q, k: torch.rand_like(q) > 0.5, "rand_like"),
    "dropout": (lambda b, h, q, k: torch.bernoulli(ids / 13)[q] > 0, "random numbers"),
    "random in place": (lambda b, h, q, k: torch.empty(3).uniform_()[h] > 0.5, "random numbers"),
    "whole tensor": (lambda b, h, q, k: ids == q, "shape (13,) is used without an index"),
    "partial read": (lambda b, h, q, k: pairs[h] == q, "2 dimensions is read at 1 indices"),
    "partial truth": (lambda b, h, q, k: pairs[h] & pairs[b], "read at 1 indices"),
    "too many indices": (lambda b, h, q, k: pairs[b, h, q] > k, "is read at 3 indices"),
    "sliced": (lambda b, h, q, k: pairs[h, :2] > k, "is read at slice"),
    "read at None": (lambda b, h, q, k: ids[None, q] > k, "is read at"),
    "read at Ellipsis": (lambda b, h, q, k: pairs[..., q] > k, "is read at"),
    "real index": (lambda b, h, q, k: ids[q / 2] > k, "read at a real number"),
    "truth as an index": (lambda b, h, q, k: ids[q > k] > 1, "read at a truth"),
    "tensor as an index": (lambda b, h, q, k: pairs[ids, q] > k, "is read at"),
    "take of a row": (lambda b, h, q, k: saccade.masks.take(q, k) > 1, "reads Symbol"),
    "unknown": (lambda b, h, q, k: torch.sinh(q - k) > 0, "sinh is not known"),
    "unknown method": (lambda b, h, q, k: (q - k).sinh() > 0, "sinh is not known"),
    "reduction": (lambda b, h, q, k: ids[ids <= q].sum() > k, "without an index"),
    "option": (lambda b, h, q, k: torch.add(q, k, out=ids) > 3, "add with out is not known"),
    "too few operands": (lambda b, h, q, k: q.minimum() > 3, "min of 1 operands, takes 2"),
    "too many operands": (lambda b, h, q, k: q.abs(k) > 3, "abs of 2 operands, takes 1"),
    "where of one": (lambda b, h, q, k: torch.where(q > k) > 3, "where of 1 operands, takes 3"),  # pyright: ignore[reportOperatorIssue]
    "least of all": (lambda b, h, q, k: q.min() > 3, "min of one tensor looks at all rows"),
    "stacked": (lambda b, h, q, k: torch.stack([q, k]).sum() > 3, "stack is not known"),
    "made a tensor": (lambda b, h, q, k: torch.tensor([q, k])[0] > 3, "tensor is not known"),
    "part of a tensor": (lambda b, h, q, k: torch.abs(pairs[h]) > 3, "is read at 1 indices"),
    "method of a part": (lambda b, h, q, k: pairs[h].sum() > 3, "is read at 1 indices"),
    "list": (lambda b, h, q, k: q <= [1, 2], "meets list"),
    "tuple": (lambda b, h, q, k: q == (1, 2), "meets tuple"),
    "text": (lambda b, h, q, k: q == "3", "meets str"),
    "None": (lambda b, h, q, k: q == None, "meets NoneType"),  # noqa: E711
    "array": (lambda b, h, q, k: q <= array, "meets ndarray"),
    "array before a row": (lambda b, h, q, k: array <= q, "meets ndarray"),
    "complex number": (lambda b, h, q, k: q * 1j == k, "meets complex"),
    "wide number": (lambda b, h, q, k: q < 2**62, "more than 62 bits"),
    "divided by 0": (lambda b, h, q, k: q // 0 == k, "// divides by 0"),
    "rest by 0": (lambda b, h, q, k: q % 0 == k, "% divides by 0"),
    "rest by 0.0": (lambda b, h, q, k: q % 0.0 == k, "% divides by 0"),
    "rest by False": (lambda b, h, q, k: q % False == k, "% divides by 0"),
    "joined kinds": (lambda b, h, q, k: (q > k) & k, "& joins truth and whole"),
    "joined reals": (lambda b, h, q, k: q / 2 | k, "| joins real and whole"),
    "turned real": (lambda b, h, q, k: ~(q / 2) > k, "~ joins real"),
    "shifted truth": (lambda b, h, q, k: (q > k) << 1 > k, "<< joins"),
    "condition": (lambda b, h, q, k: torch.where(q, k, 3) > 1, "the condition is a number"),
    "power of a number": (lambda b, h, q, k: 3**q > k, "** a row: takes 2.0 ** x"),
    "whole power": (lambda b, h, q, k: 2 ** (q - 1) > k, "a real one, and 1 << x"),
    "negative power": (lambda b, h, q, k: q**-1 > k, "** -1: takes"),
    "power of rows": (lambda b, h, q, k: q**k > 3, "**"),
    "complex tensor": (lambda b, h, q, k: ids.to(torch.complex64)[q] == k, "complex64"),
    "unsigned tensor": (lambda b, h, q, k: ids.to(torch.uint16)[q] == k, "uint16"),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_refused_with_its_line(name):
    function, problem = MASKS[name]
    with pytest.raises(TypeError) as caught:
        as_mask(function)
    message = str(caught.value)
    assert problem in message
    at = re.search(rf"at {re.escape(Path(__file__).name)}:(\d+): (.*)", message)
    assert at, f"no line in {message!r}"
    first, last = function.__code__.co_firstlineno, max(line for *_, line in _lines(function))
    assert first <= int(at[1]) <= last
    assert ADVICE in message


def _lines(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    return [entry for entry in function.__code__.co_lines() if entry[2] is not None]


WITHOUT_A_LINE: dict[str, Case] = {
    "whole result": (lambda b, h, q, k: q - k, "gave whole numbers, takes a bool result"),
    "number as a result": (lambda b, h, q, k: 1, "gave whole numbers, takes a bool result"),
    "nothing": (lambda b, h, q, k: None, "gave no mask: it gave nothing; takes a bool result"),
    "list": (lambda b, h, q, k: [q > k], "gave no mask: a row meets list"),
    "tensor": (lambda b, h, q, k: ids, "gave no mask: a captured tensor of shape (13,)"),
    "part of a tensor": (lambda b, h, q, k: pairs[q], "gave no mask: a captured tensor of 2 dim"),
    "real result": (lambda b, h, q, k: q / 2, "gave real numbers, takes a bool result"),
    "too few parameters": (lambda q, k: q > k, "takes (batch, head, query_row, kv_row)"),
    "too many": (lambda s, b, h, q, k: q > k, "takes (batch, head, query_row, kv_row)"),
    "keyword only": (lambda b, h, q, k, *, size: q > k, "takes (batch, head, query_row, kv_row)"),
}


@pytest.mark.parametrize("name", WITHOUT_A_LINE)
def test_a_mask_is_refused_by_its_name(name):
    function, problem = WITHOUT_A_LINE[name]
    with pytest.raises(TypeError, match=re.escape(problem)) as caught:
        as_mask(function)
    line = f"{Path(__file__).name}:{function.__code__.co_firstlineno}"
    assert f"<lambda> ({line})" in str(caught.value)


SCORES: dict[str, Case] = {
    "if": (lambda s, b, h, q, k: s if s > 0 else 0, NO_BRANCH),
    "max": (lambda s, b, h, q, k: max(s, 0), NO_BRANCH),
    "math": (lambda s, b, h, q, k: math.tanh(s), NO_VALUE),
    "random": (lambda s, b, h, q, k: s + torch.randn(()), "random numbers"),
    "softmax": (lambda s, b, h, q, k: torch.softmax(s, -1), "softmax"),
    "in place": (lambda s, b, h, q, k: s + q.div_(2), "div_ would make a real number of a"),
    "whole tensor": (lambda s, b, h, q, k: s + ids, "shape (13,) is used without an index"),
    "score as an index": (lambda s, b, h, q, k: s + ids[s], "read at a real number"),
    "power": (lambda s, b, h, q, k: s**9, "** 9: takes"),
    "logical": (lambda s, b, h, q, k: s & 1, "& joins real and whole"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_refused_with_its_line(name):
    function, problem = SCORES[name]
    with pytest.raises(TypeError) as caught:
        as_score(function)
    message = str(caught.value)
    assert problem in message and ADVICE in message
    assert f"at {Path(__file__).name}:{function.__code__.co_firstlineno}: " in message


def test_a_mask_is_no_score_and_a_score_no_mask():
    with pytest.raises(TypeError, match=re.escape("takes (score, batch, head, query_row, kv_row)")):
        as_score(lambda b, h, q, k: q > k)
    with pytest.raises(TypeError, match="combine masks with"):
        _ = saccade.masks.causal() and saccade.masks.causal()


def test_rows_of_two_traces_do_not_meet():
    kept: list[Any] = []
    as_mask(lambda b, h, q, k: kept.append(q) or q > k)
    with pytest.raises(TypeError, match="a row of another trace"):
        as_mask(lambda b, h, q, k: kept[0] > k)


def test_errors_of_the_function_itself_stay_what_they_are():
    with pytest.raises(IndexError, match="only integers"):
        as_mask(lambda b, h, q, k: array[q] > k)
    with pytest.raises(TypeError, match="clamp"):
        as_mask(lambda b, h, q, k: torch.clamp(q, least=2) > 3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="gave no score: it gave nothing; takes a number"):
        as_score(lambda s, b, h, q, k: None)
    with pytest.raises(ZeroDivisionError):
        as_mask(lambda b, h, q, k: q > 1 // 0)
    with pytest.raises(KeyError, match="nowhere"):
        as_mask(lambda b, h, q, k: {}["nowhere"])


def test_nothing_is_left_behind_by_an_error():
    with pytest.raises(TypeError):
        as_mask(branches)
    assert torch.overrides._get_current_function_mode() is None
    assert torch.equal(ids + 1, torch.arange(1, 14))


def test_random_numbers_of_python_are_numbers():
    """They are drawn when the mask is made, as every other number is."""
    random.seed(0)
    mask = as_mask(lambda b, h, q, k: q - k < random.randint(3, 5))
    assert mask.captured.ints[0] in (2, 3, 4)
