"""Options and calls as users of other libraries write them, and the errors that help."""

import pytest
import torch

import saccade
from saccade import masks, scores

ROWS = [torch.randn(1, 2, 6, 8) for _ in "qkv"]
OFFSETS = torch.tensor([0, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"casual": True}, r"casual: an unknown option; write causal="),
        ({"is_causal": True}, r"is_causal: .*causal\(\"top_left\"\)"),
        ({"attn_mask": None}, r"attn_mask: .*scores\.bias\(tensor\).*mask=tensor"),
        ({"softmax_scale": 1.0}, r"softmax_scale: .*write scale="),
        ({"sclae": 1.0}, r"sclae: an unknown option; write scale="),
        ({"whatever": 1}, r"whatever: an unknown option; takes mask, causal, score, scale"),
    ],
)
def test_options_of_others_are_answered(options, said):
    packed = [rows[0].transpose(0, 1) for rows in ROWS]
    pages = [rows[:, :, :4] for rows in ROWS[1:]]
    table = torch.zeros(1, 1, dtype=torch.int32)
    for call in (
        lambda: saccade.attention(*ROWS, **options),
        lambda: saccade.attention_varlen(*packed, OFFSETS, **options),  # pyright: ignore[reportCallIssue]
        lambda: saccade.attention_paged(ROWS[0], *pages, table, OFFSETS[1:] - 2, **options),  # pyright: ignore[reportCallIssue]
    ):
        with pytest.raises(TypeError, match=said):
            call()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"mask": "causal"},
            r"mask: got str \('causal'\), takes .*write mask=saccade\.masks\.causal\(\)",
        ),
        ({"mask": masks.causal}, r"mask: got the function saccade\.masks\.causal.*write mask="),
        ({"mask": True}, r"mask: got bool \(True\), takes a saccade Mask"),
        ({"score": scores.softcap}, r"score: got the function saccade\.scores\.softcap.*write"),
        ({"score": torch.ones(6, 6)}, r"score: got Tensor, .*saccade\.scores\.bias\(tensor\)"),
        (
            {"mask": lambda q, k: q >= k},
            r"mask: .*has the parameters \(q, k\), takes \(batch",
        ),
        (
            {"mask": lambda b, h, q, k: q >= k and k > 2},
            r"branch on a row, in <lambda>, at test_other_libraries\.py:\d+: .*write & \| ~ for",
        ),
    ],
)
def test_masks_and_scores_that_are_none_are_answered(options, said):
    with pytest.raises(TypeError, match=said):
        saccade.attention(*ROWS, **options)


def test_functions_are_taken_as_they_are():
    wanted = saccade.attention(*ROWS, mask=masks.causal(), score=scores.softcap(2.0))
    found = saccade.attention(
        *ROWS,
        mask=lambda b, h, q, k: q >= k,
        score=lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
    )
    torch.testing.assert_close(found, wanted)
