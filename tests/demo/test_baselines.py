import math

import pytest
import torch

from saccade.demo.text import PRIOR_COUNT, bigram, bigram_bits, unigram, unigram_bits


def as_bytes(text):
    return torch.tensor(list(text), dtype=torch.uint8)


def test_unigram_counts_with_one_added():
    probabilities = unigram(as_bytes(b"aab"))
    assert float(probabilities[ord("a")]) == pytest.approx(3 / 259)
    assert float(probabilities[ord("b")]) == pytest.approx(2 / 259)
    assert float(probabilities[ord("z")]) == pytest.approx(1 / 259)
    assert float(probabilities.sum()) == pytest.approx(1)


def test_bigram_counts_pairs_and_leans_on_the_unigram():
    text = as_bytes(b"abac")
    probabilities = bigram(text)
    seen = (1 + PRIOR_COUNT * 2 / 260) / (2 + PRIOR_COUNT)
    assert float(probabilities[ord("a"), ord("b")]) == pytest.approx(seen)
    assert torch.allclose(probabilities[ord("z")], unigram(text))
    assert torch.allclose(probabilities.sum(1), torch.ones(256, dtype=torch.float64))


def test_both_are_judged_on_all_but_the_first_byte():
    training, windows = as_bytes(b"abac"), as_bytes(b"zab")[None]
    single = -math.log2(3 / 260) - math.log2(2 / 260)
    assert unigram_bits(training, windows) == pytest.approx(single / 2)
    after_z = -math.log2(3 / 260)
    after_a = -math.log2((1 + PRIOR_COUNT * 2 / 260) / (2 + PRIOR_COUNT))
    assert bigram_bits(training, windows) == pytest.approx((after_z + after_a) / 2)
