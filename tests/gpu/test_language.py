"""Triton's names, noted: what they resolve to is one object, whoever asks for it first."""

import pytest

pytest.importorskip("triton")
from saccade.gpu.language import aggregate, resolved, tl, triton


@aggregate
class Pair:
    first: tl.tensor
    second: tl.tensor

    def __init__(self, first, second):
        self.first, self.second = first, second

    @triton.jit
    def swapped(self):
        return Pair(self.second, self.first)


@triton.jit
def pair_of(first, second):
    return Pair(first, second)


def test_a_class_that_its_own_methods_name_is_resolved_once() -> None:
    # Its methods' module is resolved while the class is, and the class with it.
    assert resolved(Pair) is resolved(pair_of).fn.__globals__["Pair"]
