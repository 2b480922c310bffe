"""Names of functions, what may be one, and functions that change their arguments in place."""

import functools

import pytest
import torch

import saccade
from saccade import masks, scores
from saccade.functions import Function, changes_in_place, lookup, named, register

IMPLEMENTATIONS = ["reference", "cpu", "portable"]


def make_named(name: str) -> Function:
    return register(Function(name, lambda b, h, i, j: i == j))


def test_a_taken_name_gets_a_number():
    registered = [make_named("tests.taken") for _ in range(3)]
    names = [function.name for function in registered]
    assert names == ["tests.taken", "tests.taken-2", "tests.taken-3"]
    for function in registered:
        assert lookup(function.name) is function


def test_an_unknown_name_says_what_to_do():
    with pytest.raises(KeyError, match=r"'tests\.nowhere'.*import the module that defines it"):
        lookup("tests.nowhere")


def test_names_hold_nothing_that_keys_are_made_of():
    name = named(lambda: None)
    assert not set(name) & set("(): #<>&|~")
    assert name.startswith(f"{__name__}.") or "test_functions" in name


# ---- what may be a function -------------------------------------------------------------------


class Shift:
    def __call__(self, batch, head, query_row, kv_row):
        return kv_row <= query_row


def near(width, batch, head, query_row, kv_row):
    return query_row - kv_row < width


@pytest.mark.parametrize(
    "wrong", [Shift(), functools.partial(near, 3), "causal"], ids=["object", "partial", "text"]
)
def test_what_is_no_plain_function_is_refused(wrong):
    with pytest.raises(TypeError, match=r"body: got \w+, takes a plain function"):
        masks.function(wrong)
    with pytest.raises(TypeError, match=r"body: got \w+, takes a plain function"):
        scores.function(wrong)
    with pytest.raises(TypeError, match=r"derivative: got \w+, takes a plain function"):
        scores.function(near, derivative=wrong)


# ---- in place ---------------------------------------------------------------------------------


def add(rows):
    rows += 1


def add_by_method(rows):
    rows.add_(1)


def store(rows):
    rows[0] = 1


def compare(rows):
    return (rows + 1 <= 2) & (rows != 3)


def test_code_that_changes_its_arguments_is_told_apart():
    assert all(map(changes_in_place, (add, add_by_method, store)))
    assert not changes_in_place(compare)
    assert not changes_in_place(masks.take)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_mask_may_change_its_rows_in_place(implementation):
    @masks.function
    def later(batch, head, query_row, kv_row):
        kv_row += 3
        return kv_row <= query_row

    @masks.function
    def plain(batch, head, query_row, kv_row):
        return kv_row + 3 <= query_row

    query = torch.randn(1, 2, 24, 16, generator=torch.Generator().manual_seed(1))
    for both in (lambda own: own() & masks.causal(), lambda own: own() | own()):
        found, wanted = (
            saccade.attention(query, query, query, mask=both(own), implementation=implementation)
            for own in (later, plain)
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_score_may_change_scores_in_place(implementation):
    def slope(score, batch, head, query_row, kv_row, gain):
        score *= gain
        return gain + gain * score

    @scores.function(derivative=slope)
    def bent(score, batch, head, query_row, kv_row, gain):
        score *= gain
        return score + 0.5 * score * score

    def plain_slope(score, batch, head, query_row, kv_row, gain):
        return gain + gain * (score * gain)

    @scores.function(derivative=plain_slope)
    def plain(score, batch, head, query_row, kv_row, gain):
        return score * gain + 0.5 * (score * gain) * (score * gain)

    results = []
    for own in (bent, plain):
        query = torch.randn(1, 1, 20, 16, generator=torch.Generator().manual_seed(1))
        query.requires_grad_()
        output = saccade.attention(
            query, query, query, score=own(0.5) >> own(0.1), implementation=implementation
        )
        (grad,) = torch.autograd.grad(output.square().sum(), query)
        results.append((output, grad))
    torch.testing.assert_close(results[0], results[1])
