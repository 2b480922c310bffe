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


OF_ATTENTION = ("dropout_p", "return_max_logit", "deterministic")
OF_FP8 = ("quantize", "smooth", "incoherent", "out_dtype", "query_scale", "key_scale", "config")
PACKED = [rows[0].transpose(0, 1) for rows in ROWS]
BETA = torch.rand(1, 2, 6)
TOKEN = [rows[:, :, :1] for rows in ROWS]
STATES = saccade.LinearState(torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8))
# Each public call that takes other names to answer them: its arguments, options that it has, and
# names of other operations that it has not.
ANSWERING = {
    "attention": (ROWS, OF_ATTENTION, OF_FP8[:-1]),
    "attention_varlen": (
        (*PACKED, OFFSETS), (*OF_ATTENTION, "cu_seqlens_k", "max_seqlen_q"), OF_FP8[:-1],
    ),
    "attention_fp8": ([rows.bfloat16() for rows in ROWS], OF_FP8, OF_ATTENTION),
    "attention_fp8_varlen": (
        (*[rows.bfloat16() for rows in PACKED], OFFSETS), (*OF_FP8, "max_seqlen_k"), OF_ATTENTION,
    ),
    "linear_attention": (ROWS, ("decay", "eps", "key_lengths", "return_state"), ("mask", "beta")),
    "linear_attention_varlen": (
        (*PACKED, OFFSETS), ("decay", "eps", "return_state"), ("key_lengths", "mask"),
    ),
    "gated_delta_rule": (
        (*ROWS, BETA), ("decay", "normalize_qk", "return_state", "config"), ("mask", "causal"),
    ),
    "gated_delta_rule_varlen": (
        (*PACKED, BETA[0].T, OFFSETS), ("decay", "normalize_qk", "config"), ("mask", "causal"),
    ),
    "gated_delta_rule_step": (
        (STATES.kv, *TOKEN, BETA[..., :1]),
        ("decay", "normalize_qk", "state_index"), ("mask", "causal", "initial_state"),
    ),
    "linear_attention_step": (
        (STATES, *TOKEN), ("decay", "feature_map", "state_index"), ("mask", "initial_state"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERING)
def test_a_call_lists_its_own_options(name):
    function = getattr(saccade, name)
    given, takes, lacks = ANSWERING[name]

    def refusals(**options):
        for call in (function, lambda *rows, **each: saccade.explain(function, *rows, **each)):
            with pytest.raises(TypeError) as error:
                call(*given, **options)
            yield str(error.value)

    for text in refusals(foo=1):
        assert text.startswith("foo: an unknown option; takes ")
        listed = text.partition("takes ")[2].split(", ")
        assert set(takes) <= set(listed) and not set(lacks) & set(listed)
        assert len(listed) == len(set(listed))
    for other in lacks:
        for text in refusals(**{other: None}):
            assert text.startswith(f"{other}: an unknown option")
            assert f"write {other}=" not in text
    for typed in takes:  # with a letter doubled
        for text in refusals(**{f"{typed}{typed[-1]}": None}):
            assert f"write {typed}=" in text


def test_advice_names_no_option_of_another_operation():
    rows = [each.bfloat16() for each in ROWS]
    for name in ("dropout", "dropout_rate"):  # which attention calls dropout_p
        with pytest.raises(TypeError, match="an unknown option") as error:
            saccade.attention_fp8(*rows, **{name: 0.1})
        assert "dropout_p" not in str(error.value)


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
