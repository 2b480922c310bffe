"""The specification against attention written by hand, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import saccade
from saccade import masks, scores


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: list[list[bool]]
) -> tuple[list[list[float]], list[float]]:
    """One head in Python floats: rows of output, and their lse."""
    outputs, lses = [], []
    for i, row in enumerate(query.tolist()):
        terms = []
        for j, other in enumerate(key.tolist()):
            if visible[i][j]:
                score = scale * math.fsum(a * b for a, b in zip(row, other, strict=True))
                terms.append((math.exp(score), value[j].tolist()))
        total = math.fsum(weight for weight, _ in terms)
        lses.append(math.log(total) if terms else -math.inf)
        channels = range(value.shape[1])
        outputs.append(
            [math.fsum(w * v[c] for w, v in terms) / total if terms else 0.0 for c in channels]
        )
    return outputs, lses


def random_heads(*lengths: int, dim: int = 4) -> list[Tensor]:
    torch.manual_seed(len(lengths))
    return [torch.randn(1, 2, length, dim, dtype=torch.float64) for length in lengths]


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 6), (6, 3)])
def test_causal_attention_by_hand(lengths: tuple[int, int], align: str) -> None:
    query, key, value = random_heads(lengths[0], lengths[1], lengths[1])
    output, lse = saccade.attention(
        query, key, value, mask=masks.causal(align), scale=0.7, return_lse=True,
        implementation="reference",
    )  # fmt: skip
    shift = lengths[1] - lengths[0] if align == "bottom_right" else 0
    visible = [[j <= i + shift for j in range(lengths[1])] for i in range(lengths[0])]
    for head in range(2):
        expected = by_hand(query[0, head], key[0, head], value[0, head], 0.7, visible)
        torch.testing.assert_close(output[0, head], torch.tensor(expected[0]).double())
        torch.testing.assert_close(lse[0, head], torch.tensor(expected[1]).double())


def test_grouped_heads_share_their_kv_head() -> None:
    query = torch.randn(2, 6, 5, 4).double()
    key, value = torch.randn(2, 2, 7, 4).double(), torch.randn(2, 2, 7, 3).double()
    grouped = saccade.attention(query, key, value, implementation="reference")
    for head in range(6):
        alone = saccade.attention(
            query[:, head : head + 1], key[:, head // 3, None], value[:, head // 3, None],
            implementation="reference",
        )  # fmt: skip
        torch.testing.assert_close(grouped[:, head : head + 1], alone)


def test_the_default_scale() -> None:
    query, key, value = random_heads(4, 4, 4, dim=9)
    plain = (query @ key.mT / 3).softmax(-1) @ value
    torch.testing.assert_close(
        saccade.attention(query, key, value, implementation="reference"), plain
    )


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    query, key, value = random_heads(3, 4, 4)
    sinks = torch.tensor([0.5, -1.0]).double()
    output, lse = saccade.attention(
        query, key, value, sinks=sinks, return_lse=True, implementation="reference"
    )
    logits = torch.cat([query @ key.mT / 2, sinks.view(1, 2, 1, 1).expand(1, 2, 3, 1)], -1)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    torch.testing.assert_close(output, logits.softmax(-1)[..., :-1] @ value)


def test_a_score_change_comes_before_the_softmax() -> None:
    query, key, value = random_heads(3, 4, 4)
    bias = torch.randn(2, 3, 4).double()
    change = scores.bias(bias) >> scores.softcap(1.5)
    expected = 1.5 * torch.tanh((query @ key.mT / 2 + bias) / 1.5)
    output = saccade.attention(query, key, value, score=change, implementation="reference")
    torch.testing.assert_close(output, expected.softmax(-1) @ value)


def test_packed_sequences_are_separate_calls() -> None:
    lengths = [(3, 5), (0, 2), (4, 4), (2, 0)]
    query, key, value = torch.randn(9, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 6)
    query, key, value = query.double(), key.double(), value.double()
    ends = [torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths, strict=True)]
    mask = masks.window(2, 1)
    output, lse = saccade.attention_varlen(
        query, key, value, *ends, mask=mask, return_lse=True, implementation="reference"
    )
    first_q = first_k = 0
    for query_len, kv_len in lengths:
        q, k = slice(first_q, first_q + query_len), slice(first_k, first_k + kv_len)
        parts = [rows.transpose(0, 1)[None] for rows in (query[q], key[k], value[k])]
        alone, alone_lse = saccade.attention(
            parts[0], parts[1], parts[2], mask=mask, return_lse=True, implementation="reference"
        )
        torch.testing.assert_close(output[q].transpose(0, 1), alone[0])
        torch.testing.assert_close(lse[:, q], alone_lse[0])
        first_q, first_k = first_q + query_len, first_k + kv_len


def test_dropped_weights_grow_to_make_up() -> None:
    query = torch.zeros(1, 1, 500, 2)
    key, value = torch.zeros(1, 1, 400, 2), torch.ones(1, 1, 400, 1)
    torch.manual_seed(0)
    output = saccade.attention(query, key, value, dropout_p=0.25, implementation="reference")
    # each output is the kept share over 0.75: mean 1, deviation sqrt(0.25 / 0.75 / 400)
    assert abs(float(output.mean()) - 1) < 5 * math.sqrt(1 / 3 / 400 / 500)
    assert 0.8 < float(output.std()) / math.sqrt(1 / 3 / 400) < 1.2
