"""Pairs: every two values meet, in few combinations."""

from itertools import combinations, product

import pytest
from pairs import covering

SIZES = ((2, 2), (3, 4), (2, 2, 2), (5, 2, 2, 3), (14, 9, 2, 2), (4, 4, 4, 4), (3, 1, 7))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_two_values_meet_in_few_combinations(sizes):
    parameters = [
        [f"{number}.{value}" for value in range(size)] for number, size in enumerate(sizes)
    ]
    rows = covering(*parameters)
    for one, other in combinations(range(len(sizes)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(parameters[one], parameters[other]))
    most = sorted(sizes)[-2:]
    assert len(set(rows)) == len(rows) <= 1.7 * most[0] * most[1]


def test_combinations_are_the_same_every_time():
    assert covering("abc", (1, 2), "xyz") == covering("abc", (1, 2), "xyz")


def test_one_parameter_has_all_its_values():
    assert covering("ab") == [("a",), ("b",)]
    assert covering() == [()]
    assert covering("ab", ()) == []
