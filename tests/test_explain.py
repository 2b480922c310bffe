"""What `explain` says about a call: who serves it and why, how many pairs, what it costs."""

from dataclasses import replace
from functools import partial, wraps
from typing import Any

import jaxtyping
import pytest
import torch

import saccade
from saccade import KernelConfig, LinearState, masks, scores
from saccade.explain import costs
from saccade.modifiers import evaluate
from saccade.modifiers.evaluate import index_range
from saccade.modifiers.expression import Coordinates
from saccade.runtime import backends
from saccade.testing import make_paged_case

BATCH, HEADS, KV_HEADS, QUERY_LEN, KV_LEN, HEAD_DIM, VALUE_DIM = 2, 4, 2, 6, 9, 8, 3
PAIRS = BATCH * HEADS * QUERY_LEN * KV_LEN


def dense(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [
        torch.ones(BATCH, HEADS, QUERY_LEN, HEAD_DIM, dtype=dtype),
        torch.ones(BATCH, KV_HEADS, KV_LEN, HEAD_DIM, dtype=dtype),
        torch.ones(BATCH, KV_HEADS, KV_LEN, VALUE_DIM, dtype=dtype),
    ]


def explain_dense(**options: Any) -> Any:
    return saccade.explain(saccade.attention, *dense(), **options)


def packed() -> list[torch.Tensor]:
    """Three sequences: 3 x 4, 0 x 2 and 4 x 5 pairs a head."""
    counts = torch.tensor([0, 3, 3, 7]).int(), torch.tensor([0, 4, 6, 11]).int()
    return [torch.ones(7, 4, 8), torch.ones(11, 2, 8), torch.ones(11, 2, 3), *counts]


def visible_pairs(mask: masks.Mask, *sizes: int) -> int:
    at = Coordinates(
        *(index_range(0, n, dim) for dim, n in enumerate(sizes)), shift=sizes[3] - sizes[2]
    )
    return int(evaluate.visible(mask.key, mask.captured, at).expand(sizes).sum())


# ---- the text ---------------------------------------------------------------------------------


def test_text_tells_the_whole_call():
    found = saccade.explain(
        saccade.attention, *dense(torch.bfloat16), mask=masks.window(2),
        score=scores.softcap(3.0), dropout_p=0.1, sinks=torch.zeros(HEADS),
    )  # fmt: skip
    text = str(found)
    for words in (
        "batch 2, 6 x 9", "heads 4/2", "dim 8/3", "bfloat16 on cpu",
        "mask (query_row + shift - i0 <= kv_row)", "score f0 * tanh(score / f0)",
        "sinks yes", "dropout yes",
        f"{found.visible_pairs:,} of {PAIRS:,} pairs visible",
        f"{found.flops / 1e3:.4g} kFLOP forward", f"at least {found.bytes / 2**10:.4g} KiB moved",
    ):  # fmt: skip
        assert words in text
    plain = str(explain_dense())
    for words in ("mask none", "score none", "sinks no", "dropout no", "float32 on cpu"):
        assert words in plain
    assert "3 sequences, 7 x 11 tokens" in str(saccade.explain(saccade.attention_varlen, *packed()))


def test_costs_have_units_that_fit_them():
    assert costs(0, 0) == "0 FLOP forward, at least 0 B moved"
    assert costs(999, 1023) == "999 FLOP forward, at least 1023 B moved"
    assert costs(1000, 1024) == "1 kFLOP forward, at least 1 KiB moved"
    assert costs(2_150_400_000, 10 * 2**20) == "2.15 GFLOP forward, at least 10 MiB moved"
    assert costs(10**20, 2**60) == "1e+05 PFLOP forward, at least 1.049e+06 TiB moved"


def lines_of(text: str) -> dict[str, str]:
    """What the text says about each implementation."""
    lines = (line.strip().split(": ", 1) for line in text.splitlines())
    return {line[0]: line[1] for line in lines if line[0] in backends.NAMES}


# Triton's interpreter takes CPU tensors in these tests (conftest.py).
INTERPRETED = {"triton": "yes, not asked for"}
HOPPER = {"hopper": "no, it takes bfloat16 and float16, not float32"}


def test_text_names_every_implementation_with_its_reason():
    found = explain_dense(config=KernelConfig(32, 64))
    assert lines_of(str(found)) == {
        "cpu": "yes, taken, KernelConfig(query_tile=32, kv_tile=64)",
        **INTERPRETED,
        "reference": "no, it has no tiles, so it takes no config",
        **HOPPER,
    }
    named = explain_dense(implementation="reference")
    expected = {"cpu": "yes, not asked for", **INTERPRETED, "reference": "yes, taken", **HOPPER}
    assert lines_of(str(named)) == expected
    assert list(found.reasons) == list(backends.NAMES)


def test_text_gives_the_reasons_of_all_that_cannot(monkeypatch):
    refusing = [
        entry._replace(unsupported=lambda problem, name=entry.name: f"{name} is asleep")
        for entry in backends.BACKENDS
    ]
    monkeypatch.setattr(backends, "BACKENDS", refusing)
    found = explain_dense()
    assert found.chosen is None
    assert lines_of(str(found)) == {name: f"no, {name} is asleep" for name in backends.NAMES}


def test_a_named_one_that_cannot_is_not_replaced():
    found = saccade.explain(
        saccade.attention, *dense(), implementation="reference", config=KernelConfig(32)
    )
    assert found.chosen is None
    assert "taken" not in str(found)


@pytest.mark.parametrize("implementation", [None, "cpu", "reference"])
def test_chosen_is_what_the_call_takes(implementation, monkeypatch):
    explained = explain_dense(implementation=implementation).chosen
    ran = []
    for name, target in (
        ("cpu", "saccade.ops.attention.cpu.host.forward"),
        ("reference", REFERENCE),
    ):
        monkeypatch.setattr(target, _remembering(ran, name))
    with pytest.raises(RuntimeError, match="enough seen"):
        saccade.attention(*dense(), implementation=implementation)
    assert ran == [explained]


REFERENCE = "saccade.ops.attention.reference.attention"


def _remembering(names: list[str], name: str) -> Any:
    def remember(*arguments: Any) -> Any:
        names.append(name)
        raise RuntimeError("enough seen")

    return remember


# ---- the numbers ------------------------------------------------------------------------------

MASKS = {
    "causal": masks.causal(),
    "causal at the top left": masks.causal("top_left"),
    "window": masks.window(1, 2),
    "lengths": masks.key_lengths(torch.tensor([0, 5])),
    "per head": masks.dense(torch.arange(HEADS * KV_LEN).view(HEADS, 1, KV_LEN) % 3 == 0),
    "documents": masks.documents(torch.arange(6)[None] // 4, torch.arange(9)[None] // 3),
    "nothing": ~(masks.causal() | ~masks.causal()),
}


@pytest.mark.parametrize("name", MASKS)
def test_visible_pairs_are_counted(name):
    mask = MASKS[name]
    found = explain_dense(mask=mask)
    assert found.visible_pairs == visible_pairs(mask, BATCH, HEADS, QUERY_LEN, KV_LEN)
    assert found.flops == 2 * found.visible_pairs * (HEAD_DIM + VALUE_DIM)


def test_visible_pairs_of_a_bool_tensor_are_counted():
    table = torch.randint(0, 2, (QUERY_LEN, KV_LEN)).bool()
    found = explain_dense(mask=table)
    assert found.visible_pairs == BATCH * HEADS * int(table.sum())


def test_visible_pairs_of_packed_sequences_are_counted():
    sizes = [(3, 4), (0, 2), (4, 5)]
    assert saccade.explain(saccade.attention_varlen, *packed()).visible_pairs == HEADS * sum(
        q * k for q, k in sizes
    )
    causal = masks.causal()
    wanted = sum(visible_pairs(causal, 1, HEADS, q, k) for q, k in sizes)
    assert saccade.explain(saccade.attention_varlen, *packed(), mask=causal).visible_pairs == wanted


def test_very_many_pairs_are_counted_on_evenly_spaced_rows(monkeypatch):
    rows, wanted = torch.ones(1, 2, 400, 4), visible_pairs(masks.causal(), 1, 2, 400, 400)
    monkeypatch.setitem(saccade.explain.__globals__, "COUNTED_PAIRS", 2 * 100 * 400)
    found = saccade.explain(saccade.attention, rows, rows, rows, mask=masks.causal()).visible_pairs
    assert found != wanted  # every fourth row was counted
    assert found == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flops_and_bytes_of_a_dense_call(dtype):
    found = saccade.explain(saccade.attention, *dense(dtype))
    assert found.visible_pairs == found.problem.pairs == PAIRS
    assert found.flops == PAIRS * (2 * HEAD_DIM + 2 * VALUE_DIM)
    query, key, value = dense(dtype)
    output = saccade.attention(query, key, value)
    assert isinstance(output, torch.Tensor)
    assert found.bytes == sum(t.numel() * t.element_size() for t in (query, key, value, output))


def test_flops_and_bytes_of_a_packed_call():
    found, tensors = saccade.explain(saccade.attention_varlen, *packed()), packed()
    output = saccade.attention_varlen(*tensors)
    assert isinstance(output, torch.Tensor)
    assert found.bytes == sum(t.numel() * t.element_size() for t in (*tensors[:3], output))
    assert found.problem.pairs == HEADS * 7 * 11
    assert found.flops == 2 * HEADS * (12 + 20) * (8 + 3)


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_costs_nothing(rows, keys):
    query, key = torch.ones(1, 2, rows, 4), torch.ones(1, 2, keys, 4)
    found = saccade.explain(saccade.attention, query, key, key, mask=masks.causal())
    assert (found.visible_pairs, found.flops) == (0, 0)
    assert found.bytes == (rows + keys) * 2 * 8 * 4


# ---- nothing runs, and what is wrong is refused -----------------------------------------------


def test_nothing_runs_and_no_random_number_is_drawn(monkeypatch):
    def explode(*arguments: Any) -> Any:
        raise AssertionError("an implementation ran")

    monkeypatch.setattr("saccade.ops.attention.cpu.host.forward", explode)
    monkeypatch.setattr("saccade.ops.attention.reference.attention", explode)
    state = torch.get_rng_state()
    explain_dense(dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"scale": "x"}, TypeError, "scale: got 'x'"),
        ({"dropout_p": 2.0}, ValueError, "dropout_p: got 2.0"),
        ({"mask": torch.ones(5, 5)}, TypeError, "mask: got a tensor of torch.float32"),
        ({"mask": masks.key_lengths(torch.ones(7).int())}, ValueError, "mask: lengths"),
        ({"implementation": "flash"}, ValueError, "implementation: got 'flash'"),
        ({"config": 3}, TypeError, "config: got int"),
        ({"return_lse": 1}, TypeError, "return_lse: got 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_what_the_call_refuses(changes, error, said, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for call in (saccade.attention, partial(saccade.explain, saccade.attention)):
        with pytest.raises(error) as caught:
            call(*dense(), **changes)
        assert str(caught.value).startswith(said)


@pytest.mark.parametrize("function", [3, torch.softmax, saccade.merge_states, dense])
def test_refuses_other_functions(function):
    with pytest.raises(TypeError, match=r"^function: got \w+, takes one of saccade.attention, "):
        saccade.explain(function, *dense())


def test_refuses_a_namesake():
    def attention(query: Any, key: Any, value: Any, implementation: str = "cpu") -> Any:
        return saccade.attention(query, key, value, implementation=implementation)

    with pytest.raises(TypeError, match=r"^function: got attention, takes one of saccade"):
        saccade.explain(attention, *dense())


def test_looks_behind_wrappers():
    @wraps(saccade.attention)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return saccade.attention(*arguments, **options)

    assert str(saccade.explain(wrapped, *dense())) == str(explain_dense())


def test_refuses_a_call_without_its_arguments():
    with pytest.raises(TypeError, match="value"):
        saccade.explain(saccade.attention, *dense()[:2])
    with pytest.raises(TypeError, match="cu_seqlens_q: got None"):
        saccade.explain(saccade.attention_varlen, *packed()[:3], None)


def test_refuses_unknown_arguments():
    with pytest.raises(TypeError, match="window_size"):
        explain_dense(window_size=3)
    with pytest.raises(TypeError, match="window_size"):
        saccade.attention(*dense(), window_size=3)  # pyright: ignore[reportCallIssue]


def test_pages():
    case = make_paged_case(
        lengths=((3, 20), (1, 9)), packed=True, mask="causal", page_dtype=torch.int8, sinks=True
    )
    given = case.arguments()
    explanation = saccade.explain(saccade.attention_paged, **given)
    assert explanation.backward is None
    assert explanation.chosen == "cpu"
    elsewhere = explanation.problem._replace(device="meta")
    assert "takes tensors on a GPU" in (backends.explained(elsewhere).reasons["triton"] or "")
    assert explanation.visible_pairs == 4 * (18 + 19 + 20 + 9)
    # rows of 16 + 16 channels: queries and outputs of 4 bytes, keys and values of 1
    assert explanation.bytes == 32 * (4 * 4 * 4 + 2 * 29 * 1)
    assert "2 sequences, 4 x 29 tokens in pages of 8 (int8)" in str(explanation)
    invariant = saccade.explain(saccade.attention_paged, **given, batch_invariant=True)
    assert invariant.reasons["reference"]
    with pytest.raises(TypeError, match="dropout_p: an unknown option"):
        saccade.explain(saccade.attention_paged, **given, dropout_p=0.5)


SLOPES = torch.ones(2, requires_grad=True)
ASKED_FOR: dict[str, Any] = {
    "query": lambda query: ([query.requires_grad_(), query.detach(), query.detach()], {}),
    "score": lambda query: ([query] * 3, {"score": scores.alibi(SLOPES)}),
    "sinks": lambda query: ([query] * 3, {"sinks": torch.ones(2, requires_grad=True)}),
}


@pytest.mark.parametrize("name", ASKED_FOR)
def test_a_call_without_a_gradient_is_refused_where_one_may_be_asked(name):
    rows, options = ASKED_FOR[name](torch.randn(1, 2, 8, 16, dtype=torch.bfloat16))
    with pytest.raises(NotImplementedError, match="a gradient of fp8 attention"):
        saccade.attention_fp8(*rows, **options)
    found = saccade.explain(saccade.attention_fp8, *rows, **options)
    assert found.chosen is None and None not in found.reasons.values()
    assert "cpu: no, a gradient of fp8 attention may be asked for, which it does not" in str(found)
    assert "saccade.attention, which has gradients" in str(found) and "taken" not in str(found)
    with torch.no_grad():
        assert saccade.explain(saccade.attention_fp8, *rows, **options).chosen == "cpu"
    packed = [each[0].transpose(0, 1) for each in rows]
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    varlen = saccade.explain(saccade.attention_fp8_varlen, *packed, offsets, **options)
    assert varlen.chosen is None


def test_pages_have_a_gradient_by_the_reference_alone():
    query, pages = torch.randn(1, 2, 1, 16, requires_grad=True), torch.randn(2, 2, 4, 16)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    given = query, pages, pages, table, lens
    with pytest.raises(NotImplementedError, match="a gradient of attention over pages"):
        saccade.attention_paged(*given)
    found = saccade.explain(saccade.attention_paged, *given)
    assert found.chosen is None and found.reasons["reference"] is None
    assert "a gradient of attention over pages" in (found.reasons["cpu"] or "")
    assert saccade.attention_paged(*given, implementation="reference").requires_grad
    named = saccade.explain(saccade.attention_paged, *given, implementation="reference")
    assert named.chosen == "reference" and "reference: yes, taken" in str(named)


def test_a_single_row_under_a_causal_mask_has_none():
    query, key = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 9, 16)
    assert (
        saccade.explain(saccade.attention, query, key, key, mask=masks.causal()).problem.mask == ""
    )
    assert (
        saccade.explain(
            saccade.attention, query, key, key, mask=masks.causal(align="top_left")
        ).problem.mask
        != ""
    )
    assert saccade.explain(saccade.attention, key, key, key, mask=masks.causal()).problem.mask != ""


# ---- linear attention, and passes ---------------------------------------------------------------


def linear(**more: Any) -> Any:
    return saccade.explain(saccade.linear_attention, *[torch.randn(2, 2, 12, 8)] * 3, **more)


def test_linear_attention():
    found = linear(normalize="abs")
    assert found.chosen == "cpu" and found.visible_pairs is None
    assert list(found.reasons) == list(backends.NAMES)
    assert found.reasons["hopper"] == "it takes bfloat16, not float32"
    assert found.reasons["cpu"] is None and found.reasons["reference"] is None
    assert found.flops == 2 * 2 * 12 * (2 * 2 * 8 * 8 + 2 * 64 * 16)
    assert found.bytes == 4 * 2 * 2 * 12 * 8 * 4
    assert "normaliser abs" in str(found) and "cpu: yes, taken" in str(found)


def test_linear_attention_refuses_what_the_calls_refuse():
    offsets, rows = torch.tensor([0, 2]).int(), [torch.randn(2, 2, 8)] * 3
    varlen = partial(saccade.explain, saccade.linear_attention_varlen)
    with pytest.raises(TypeError, match="colour"):
        linear(colour=1)
    with pytest.raises(TypeError, match="key_lengths: an unknown option; takes causal, align"):
        varlen(*rows, offsets, key_lengths=offsets)
    with pytest.raises(TypeError, match="cu_seqlens_q: got None"):
        varlen(*rows, None, offsets)
    assert varlen(*rows, offsets).problem.packed


STATES = torch.zeros(16, 4, 32, 32, dtype=torch.bfloat16)
ROW = [torch.zeros(2, 4, 1, 32)] * 3
BYTES_OF_STATES: dict[str, Any] = {
    # All entries of the pool that the step changes, read and written.
    "delta step": (
        lambda: saccade.explain(
            saccade.gated_delta_rule_step, STATES[:2], *ROW, torch.rand(2, 4, 1)
        ),
        2 * 2 * 4 * 32 * 32 * 2,
    ),
    "delta step in a pool": (
        lambda: saccade.explain(
            saccade.gated_delta_rule_step, STATES.float(), *ROW, torch.rand(2, 4, 1),
            state_index=torch.tensor([9, 3]),
        ),
        2 * 2 * 4 * 32 * 32 * 4,
    ),
    "linear step": (
        lambda: saccade.explain(
            saccade.linear_attention_step, LinearState(STATES[:2].float(), STATES[:2, ..., 0]), *ROW
        ),
        2 * 2 * 4 * 32 * (32 * 4 + 2),
    ),
    "delta rule": (
        lambda: saccade.explain(
            saccade.gated_delta_rule, *ROW, torch.rand(2, 4, 1), initial_state=STATES[:2],
            return_state=True,
        ),
        2 * 4 * 32 * 32 * (2 + 4),
    ),
    "packed delta rule": (
        lambda: saccade.explain(
            saccade.gated_delta_rule_varlen, *[each[:, :, 0] for each in ROW], torch.rand(2, 4),
            torch.tensor([0, 1, 2], dtype=torch.int32), initial_state=STATES[:2],
        ),
        2 * 4 * 32 * 32 * 2,
    ),
    "linear attention": (
        lambda: saccade.explain(
            saccade.linear_attention, *ROW, return_state=True,
            initial_state=LinearState(STATES[:2].double(), STATES[:2, ..., 0].float()),
        ),
        2 * 4 * 32 * (32 * 8 + 4 + 33 * 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES_OF_STATES)
def test_states_are_bytes_that_are_moved(name):
    found, states = BYTES_OF_STATES[name]
    explanation = found()
    assert explanation.bytes == explanation.problem.bytes + states


def test_a_step_is_explained_as_it_would_be_refused():
    with pytest.raises(TypeError, match="state: got NoneType, takes a floating-point tensor"):
        saccade.explain(saccade.gated_delta_rule_step, None, *ROW, torch.rand(2, 4, 1))
    with pytest.raises(ValueError, match="state_index: got an entry twice"):
        state = LinearState(STATES, STATES[..., 0])
        index = torch.tensor([1, 1])
        saccade.explain(saccade.linear_attention_step, state, *ROW, state_index=index)


def test_a_step_has_one_pass():
    rows = [torch.randn(2, 2, 1, 8)] * 3
    state = saccade.linear_attention(*rows, return_state=True)[1]
    found = saccade.explain(saccade.linear_attention_step, state, *rows)
    assert found.chosen == "cpu" and found.backward is None
    assert list(found.reasons) == ["cpu", "triton"]


def test_passes_that_differ_are_told_apart(monkeypatch):
    monkeypatch.setattr(backends, "_hopper_device_unsupported", lambda device, index: None)
    monkeypatch.setattr(backends, "_triton_device_unsupported", lambda *device: None)
    problem = saccade.explain(saccade.attention, *[torch.zeros(1, 2, 512, 64).bfloat16()] * 3,
                              causal=True).problem._replace(device="cuda")  # fmt: skip
    monkeypatch.setattr(backends, "_launch_note", lambda problem: None)
    choices = [backends.explained(problem, of=of) for of in ("forward", "backward")]
    assert [choice.chosen for choice in choices] == ["hopper", "triton"]
    found = explain_dense()
    text = str(replace(found, forward=choices[0], backward=choices[1]))
    forward, backward = text.split("  backward pass:\n")
    assert "  hopper: yes, taken" in forward and "  triton: yes, not asked for" in forward
    assert "  hopper: yes, not asked for, up to 64 channels causal calls of 512 rows" in backward
    assert "  triton: yes, taken" in backward
    assert "backward pass" not in str(found)
