"""Peers answer every case with a call or a reason, and a wrong one is caught before it is timed."""

import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade.bench import peers
from saccade.bench.case import INT8_SCALE, BenchCase, Visibility
from saccade.bench.cases import CASES
from saccade.bench.exact import exact
from saccade.bench.measure import GRADIENT_LIMITS, OUTPUT_LIMITS, check, fit
from saccade.bench.peers import Call, Peer, all_peers, delta, from_layout, ours, pytorch, to_layout
from saccade.bench.peers.pytorch import COPY_BYTES
from saccade.integrations import fla

CPU = torch.device("cpu")
EVERY_TINY = [case for name, case in CASES.items() if name.startswith("tiny-")]
TINY = [case for case in EVERY_TINY if case.attention == "softmax"]
PAGED = [case for case in EVERY_TINY if case.attention == "paged"]
LINEAR = CASES["tiny-linear-fp32-d16-48"]
STEP = CASES["tiny-linear-step-fp32-d16-2x2"]
DELTA = [case for case in EVERY_TINY if case.attention == "delta"]
FP8 = [case for case in EVERY_TINY if case.attention == "fp8"]
PEERS = {peer.who: peer for peer in all_peers()}
CHECKED = ("saccade/cpu", "saccade/reference", "plain", "sdpa", "sdpa/math")


def found_fault(case, call, gradients=True):
    tensors = case.make(CPU)
    return check(call, exact(case, tensors), tensors, gradients=gradients).fault


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
@pytest.mark.parametrize("who", CHECKED)
def test_peers_agree_with_float64(who, case):
    call = PEERS[who].prepare(case, CPU)
    assert isinstance(call, Call)
    assert found_fault(case, call, gradients=not case.decodes) is None


@pytest.mark.parametrize("who", ["saccade/cpu", "saccade/reference"])
def test_linear_attention_agrees_with_float64(who):
    assert found_fault(LINEAR, PEERS[who].prepare(LINEAR, CPU)) is None
    softmax = PEERS["plain"].prepare(TINY[1], CPU)
    assert "wrong" in str(found_fault(LINEAR, softmax))


@pytest.mark.parametrize("case", FP8, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "who", ["saccade/cpu", "saccade/reference", "saccade/inside", "saccade/bf16"]
)
def test_fp8_attention_agrees_with_float64(who, case):
    call = PEERS[who].prepare(case, CPU)
    assert isinstance(call, Call)
    assert found_fault(case, call, gradients=False) is None
    # Other rows of the same call are converted anew.
    other = case.make(CPU)
    other = other._replace(value=(-other.value.float()).to(other.value.dtype))
    turned = call.run(*other.inputs)
    torch.testing.assert_close(turned, -call.run(*case.make(CPU).inputs))


def test_fp8_rows_that_others_were_given_are_found_wrong():
    case = FP8[0]
    call = PEERS["saccade/cpu"].prepare(case, CPU)
    assert isinstance(call, Call)
    halved = Call(lambda *rows: call.run(*rows) * 0.5)
    assert "wrong: output" in str(found_fault(case, halved, gradients=False))


def test_a_step_agrees_with_float64_and_changes_its_states():
    call = PEERS["saccade/cpu"].prepare(STEP, CPU)
    assert isinstance(call, Call)
    assert found_fault(STEP, call, gradients=False) is None
    assert "wrong" in str(found_fault(STEP, call, gradients=False))  # the token counts twice now
    assert "in place" in str(PEERS["saccade/reference"].prepare(STEP, CPU))


def test_a_step_has_memory_as_its_yardstick_and_a_call_has_products():
    state, row = 16 * 16 + 16, 2 * (16 + 16)  # float32 numbers: read and written, or once
    assert STEP.bytes == 4 * 4 * (2 * state + row)
    for who, case in (("copy", LINEAR), ("read", LINEAR), ("bmm", STEP), ("fla", STEP)):
        assert isinstance(PEERS[who].prepare(case, CPU), str)
    assert isinstance(PEERS["copy"].prepare(STEP, CPU), Call)


@pytest.mark.parametrize("case", DELTA, ids=lambda case: case.name)
@pytest.mark.parametrize("who", ["saccade/cpu", "saccade/reference"])
def test_the_gated_delta_rule_agrees_with_float64(who, case):
    call = PEERS[who].prepare(case, CPU)
    if who == "saccade/reference" and case.decodes:
        assert call == "it changes no states in place"
        return
    assert isinstance(call, Call)
    assert found_fault(case, call, gradients=not case.decodes) is None
    if case.decodes:
        assert "wrong" in str(found_fault(case, call, gradients=False))  # the state has moved on


@pytest.mark.parametrize("case", DELTA, ids=lambda case: case.name)
def test_fla_is_asked_for_the_gated_delta_rule(case, monkeypatch):
    """By calls of its names and signatures, which saccade has."""
    tuned = []
    monkeypatch.setattr(delta, "tune_quickly", lambda module: tuned.append(module.__name__))
    monkeypatch.setitem(sys.modules, "fla.ops.kda.chunk", SimpleNamespace(__name__="kda"))
    call = delta.of_fla(fla, case, CPU)
    assert found_fault(case, call, gradients=not case.decodes) is None
    if case.decodes:
        assert found_fault(case, call, gradients=False) is None  # from the same state again
    assert tuned == ["kda"]


def beta_is_left_out(query, key, value, beta, decay):
    rows = (each.transpose(1, 2) for each in (query, key, value, beta.clamp(min=1), decay))
    query, key, value, beta, decay = rows
    found = saccade.gated_delta_rule(query, key, value, beta, decay=decay, normalize_qk=True)
    return found.transpose(1, 2)


def a_gradient_too_large(query, key, value, beta, decay):
    rows = [each.transpose(1, 2) for each in (query, key, value, beta, WrongBackward.apply(decay))]
    found = saccade.gated_delta_rule(*rows[:4], decay=rows[4], normalize_qk=True)
    return found.transpose(1, 2)


@pytest.mark.parametrize(
    ("run", "message"),
    [(beta_is_left_out, "wrong: output"), (a_gradient_too_large, "wrong: grad_decay")],
)
def test_a_wrong_delta_rule_is_caught(run, message):
    assert str(found_fault(DELTA[0], Call(run, "rows first"))).startswith(message)


def test_gradients_of_packed_sequences_come_from_the_first_one():
    case = next(case for case in DELTA if case.packed)
    truth = exact(case, case.make(CPU))
    assert truth.grad_output[0, :, :23].abs().sum(-1).min() > 0
    assert truth.grad_output[0, :, 23:].abs().max() == 0
    assert truth.rows.tolist() == list(range(48))


def test_the_reference_refuses_to_go_through_many_tokens():
    found = PEERS["saccade/reference"].prepare(CASES["gpu-delta-h2x8-bf16-d128-1x64k"], CPU)
    assert found == "it would go through 65536 tokens one by one"


def test_who_has_no_gated_delta_rule_says_so():
    case = DELTA[0]
    calls, absences, _ = fit(case, all_peers(), case.make(CPU), CPU, gradients=True)
    assert set(calls) - {"saccade/triton"} == {"saccade/cpu", "saccade/reference", "bmm"}
    reasons = {absence.who: absence.reason for absence in absences}
    assert reasons["sdpa"] == reasons["saccade/deterministic"] == "it has no gated delta rule"
    assert reasons["copy"] == "memory does not bound it"


def test_who_has_no_linear_attention_says_so():
    calls, absences, errors = fit(LINEAR, all_peers(), LINEAR.make(CPU), CPU, gradients=True)
    # Whether kernels serve CPU tensors depends on Triton's interpreter.
    assert set(calls) - {"saccade/triton"} == {"saccade/cpu", "saccade/reference", "bmm"}
    reasons = {absence.who: absence.reason for absence in absences}
    assert reasons["sdpa"] == reasons["flex"] == "it has no linear attention"
    assert "bmm" not in errors
    found = errors["saccade/cpu"]
    assert 0 < found["forward"] < OUTPUT_LIMITS["float32"]
    assert 0 < found["backward"] < GRADIENT_LIMITS["float32"]


@pytest.mark.parametrize("case", [LINEAR, DELTA[0]], ids=lambda case: case.name)
def test_bmm_does_as_many_operations_as_the_case(case):
    call = PEERS["bmm"].prepare(case, CPU)
    assert isinstance(call, Call)
    leaves = [rows.requires_grad_() for rows in case.make(CPU).inputs]
    with FlopCounterMode(display=False) as forward:
        output = call.run(*leaves)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert output.shape == (case.batch, case.output_heads, case.query_len, 16)
    counted = [counter.get_total_flops() for counter in (forward, backward)]
    row = 2 * case.batch * case.output_heads * 16 * 16  # whole rows are multiplied
    wanted = [case.flops("forward"), case.flops("backward")]
    assert counted == [flops // row * row for flops in wanted]


@pytest.mark.parametrize("who", ["sdpa/cudnn", "sdpa/efficient"])
def test_backends_that_a_cpu_lacks_say_so(who):
    assert "No viable backend" in str(PEERS[who].prepare(TINY[0], CPU))


def test_packages_that_are_absent_say_so():
    reasons = {who: PEERS[who].prepare(TINY[0], CPU) for who in ("flash_attn", "xformers")}
    assert all(isinstance(reason, str) for reason in reasons.values())


@pytest.mark.parametrize("who", ["plain", "sdpa/math", "saccade/reference"])
def test_peers_that_write_scores_out_refuse_large_cases(who):
    assert "GB" in str(PEERS[who].prepare(CASES["cpu-memory-fp32-d64-32k"], CPU))


def test_flex_gives_the_reason_when_nothing_can_be_compiled(monkeypatch):
    def fails(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nError: no compiler\n")

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, 1)

    for run, reason in ((fails, "no compiler"), (hangs, "did not finish")):
        pytorch.why_not.cache_clear()
        monkeypatch.setattr(subprocess, "run", run)
        assert reason in str(PEERS["flex"].prepare(TINY[0], CPU))
    pytorch.why_not.cache_clear()


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_flex_s_mask_function_is_the_case_s_mask(case):
    zero = torch.tensor(0)
    rows = torch.arange(case.query_len)[:, None], torch.arange(case.kv_len)
    visible = pytorch.mask_function(case, CPU)
    true = case.visibility.tensor(case.query_len, case.kv_len, CPU)
    if visible is None:
        assert true.all()
    else:
        found = visible(zero, zero, *rows)
        assert torch.equal(found.broadcast_to(true.shape), true)


def test_sdpa_refuses_a_mask_that_would_fill_the_memory():
    visibility = Visibility("prefix", 5)
    case = BenchCase("huge", 1, 1, 1, 2**16, 2**16, 8, 8, "float32", visibility)
    assert "its mask alone would take 4.3 GB" in str(PEERS["sdpa"].prepare(case, CPU))


class FlashStandIn:
    """The two calls of FlashAttention, computed by plain PyTorch; layouts and masks as theirs."""

    @staticmethod
    def flash_attn_func(query, key, value, causal, window_size):
        rows = torch.arange(query.shape[1])[:, None], torch.arange(key.shape[1])
        past = rows[0] - rows[1]
        seen = (past >= 0) if causal else torch.ones_like(past, dtype=torch.bool)
        if window_size[0] >= 0:
            seen &= past <= window_size[0]
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=seen, enable_gqa=True
        )
        return output.transpose(1, 2)

    @staticmethod
    def flash_attn_varlen_func(query, key, value, offsets, kv_offsets, longest, kv_longest, **how):
        assert torch.equal(offsets, kv_offsets)
        assert longest == kv_longest == int(offsets.diff().max())
        parts = [
            FlashStandIn.flash_attn_func(*(t[None, first:end] for t in (query, key, value)), **how)
            for first, end in itertools.pairwise(offsets.tolist())
        ]
        return torch.cat(parts, 1)[0]


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_flash_attn_is_asked_for_the_case_s_mask(case):
    call = peers.flash_attn(FlashStandIn, case, CPU)
    told = case.visibility.kind in ("prefix", "blocks") or case.name.startswith("tiny-documents")
    if told:
        assert "mask" in str(call)
    else:
        assert isinstance(call, Call)
        assert found_fault(case, call, gradients=False) is None


def test_a_missing_dependency_is_not_taken_for_a_missing_package(monkeypatch):
    def fails(name):
        raise ModuleNotFoundError("No module named 'packaging'", name="packaging")

    monkeypatch.setattr("importlib.import_module", fails)
    assert "No module named 'packaging'" in str(PEERS["flash_attn"].prepare(TINY[0], CPU))


def test_saccade_s_choice_is_a_peer():
    for case in TINY:
        assert ours.chosen(case, CPU) in PEERS


def one_key_too_many(query, key, value):
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril(1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class WrongBackward(torch.autograd.Function):
    """The right number with the wrong gradient."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0] * 1.5


def wrong_gradient(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(
        query, WrongBackward.apply(key), value, is_causal=True
    )


def nothing(query, key, value):
    return torch.full_like(query, torch.nan).requires_grad_()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (one_key_too_many, "wrong: output"),
        (wrong_gradient, "wrong: grad_key"),
        (lambda query, key, value: query[:, :, 1:], "wrong: its output is"),
    ],
)
def test_a_wrong_peer_is_caught(run, message):
    case = CASES["tiny-causal-fp32-d16-48"]
    gradients = run is wrong_gradient
    assert str(found_fault(case, Call(run), gradients)).startswith(message)


def test_the_error_of_a_result_is_that_of_its_worst_row():
    case = CASES["tiny-full-fp32-d16-48"]
    tensors = case.make(CPU)
    truth = exact(case, tensors)

    def off_by_a_hundredth(query, key, value):
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        output[:, 0, 7] *= 1.01
        return output

    checked = check(Call(off_by_a_hundredth), truth, tensors, gradients=False)
    assert checked.errors["forward"] == pytest.approx(0.01, rel=1e-3)
    assert "1.0e-02 away" in str(checked.fault)
    narrower = Call(lambda query, key, value: query[..., 1:])
    assert check(narrower, truth, tensors, gradients=False).errors == {}


class OutputOffByAFewBits(torch.autograd.Function):
    """Linear attention whose backward pass takes δ from an output that was rounded."""

    @staticmethod
    def forward(ctx, query, key, value, off):
        ctx.off = off
        ctx.save_for_backward(query, key, value)
        return linear_attention(query, key, value)[0]

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad,) = grad_outputs
        query, key, value = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            output, divisor = linear_attention(query, key, value)
            sizes = (output.detach() * grad).norm(dim=-1, keepdim=True)
            signs = 1 - 2 * (torch.arange(grad.shape[2]) % 2).unsqueeze(-1)
            off = ctx.off * signs * sizes / grad.square().sum(-1, keepdim=True)
            rounded = output.detach() + off * grad  # δ is off by ctx.off of its size
            whole = linear_attention(query, key, value, whole=True)
            flow = (whole - rounded * divisor) / divisor.detach()
        return (*torch.autograd.grad(flow, (query, key, value), grad), None)


def linear_attention(query, key, value, whole=False):
    of_query, of_key = (torch.nn.functional.elu(rows) + 1 for rows in (query, key))
    scores = (of_query @ of_key.mT).tril()
    divisor = scores.sum(-1, keepdim=True) + 1e-6
    return scores @ value if whole else (scores @ value / divisor, divisor)


def test_what_is_left_of_a_difference_is_judged_by_what_it_is_a_difference_of():
    tensors = LINEAR.make(CPU)
    truth = exact(LINEAR, tensors)

    def rounded(off):
        call = Call(lambda *rows: OutputOffByAFewBits.apply(*rows, off))
        return check(call, truth, tensors, gradients=True)

    assert rounded(0.0).fault is None
    fine = rounded(GRADIENT_LIMITS["float32"])
    assert fine.fault is None and fine.errors["backward"] > rounded(0.0).errors["backward"]
    assert "grad_query" in str(rounded(100 * GRADIENT_LIMITS["float32"]).fault)


def test_nan_is_no_result():
    case = CASES["tiny-causal-fp32-d16-48"]
    assert "nan" in str(found_fault(case, Call(nothing), gradients=False))


@pytest.mark.parametrize("layout", ["heads first", "rows first", "packed"])
def test_layouts_there_and_back(layout):
    tensor = torch.randn(2, 3, 4, 5)
    there = to_layout(tensor, layout)
    assert there.is_contiguous()
    assert torch.equal(from_layout(there, layout, 2), tensor)


def test_only_the_reference_and_the_narrow_peers_wait_to_be_named():
    by_default = {peer.who for peer in PEERS.values() if peer.by_default}
    assert {"saccade/cpu", "plain", "sdpa"} <= by_default
    assert "saccade/reference" not in by_default
    assert all(isinstance(peer, Peer) and peer.about for peer in PEERS.values())


@pytest.mark.parametrize("who", [name for name in PEERS if "paged" in name or "-16" in name])
def test_pages_hold_the_case(who):
    case = CASES["tiny-decode-fp32-d16-64"]
    call = PEERS[who].prepare(case, CPU)
    if who.endswith("256"):
        assert call == "it takes new tokens of sequences of whole pages of 256"
        return
    if who.startswith("hopper/"):
        assert call == "it takes bfloat16 and float16, not float32"
        return
    assert isinstance(call, Call)
    assert found_fault(case, call, gradients=False) is None
    assert isinstance(PEERS[who].prepare(CASES["tiny-full-fp32-d16-48"], CPU), str)


@pytest.mark.parametrize("case", PAGED, ids=lambda case: case.name)
@pytest.mark.parametrize("who", ["saccade/paged-16", "saccade/scattered-16"])
def test_sequences_in_pages_agree_with_float64(who, case):
    call = PEERS[who].prepare(case, CPU)
    assert isinstance(call, Call)
    assert found_fault(case, call, gradients=False) is None


def test_one_sequence_in_pages_is_a_dense_call_and_many_are_none():
    calls = {case.name: PEERS["saccade/cpu"].prepare(case, CPU) for case in PAGED}
    chunk = CASES["tiny-pages-h4x2-new20-fp32-d16-1x48"]
    dense = calls.pop(chunk.name)
    assert isinstance(dense, Call)
    assert found_fault(chunk, dense, gradients=False) is None
    assert set(calls.values()) == {"this call has no pages: it takes one sequence"}


def test_pages_of_eight_bits_are_kept_in_them(monkeypatch):
    case = CASES["tiny-pages-h4x2-int8-d16-2x32"]
    stored = []
    original = saccade.attention_paged

    def look(query, **pages):
        stored.append((pages["key_pages"].dtype, pages["key_scales"].unique().tolist()))
        return original(query, **pages)

    monkeypatch.setattr(saccade, "attention_paged", look)
    call = PEERS["saccade/paged-16"].prepare(case, CPU)
    assert isinstance(call, Call)
    call.run(*(to_layout(rows, "packed") for rows in case.make(CPU)[:3]))
    assert stored == [(torch.int8, [INT8_SCALE])]


def test_traffic_moves_what_it_says():
    inputs = PAGED[0].make(CPU)[:3]
    read, copy = (PEERS[who].prepare(PAGED[0], CPU) for who in ("read", "copy"))
    assert isinstance(read, Call) and isinstance(copy, Call)
    assert float(read.run(*inputs)) == PAGED[0].bytes // 4
    assert 2 * copy.run(*inputs).nbytes == COPY_BYTES == PEERS["copy"].moves
    assert PEERS["read"].moves is None


def test_pages_lie_with_heads_outermost(monkeypatch):
    seen = []

    def look(query, **pages):
        seen.append(pages)
        return torch.zeros_like(query)

    monkeypatch.setattr(saccade, "attention_paged", look)
    case = CASES["tiny-pages-h4x2-int8-d16-2x32"]
    call = PEERS["saccade/scattered-16"].prepare(case, CPU)
    assert isinstance(call, Call)
    call.run(*(to_layout(rows, "packed") for rows in case.make(CPU)[:3]))
    for name in ("key_pages", "value_pages", "key_scales", "value_scales"):
        assert seen[0][name].transpose(0, 1).is_contiguous(), name


# ---- fla's kernels, tuned among the configs that may win, which are compiled side by side ----


def config(num_warps: int = 4, num_stages: int = 2, **tiles: int) -> Any:
    numbers = {**tiles, "num_warps": num_warps, "num_stages": num_stages}
    return SimpleNamespace(
        kwargs=tiles, num_warps=num_warps, num_stages=num_stages, all_kwargs=lambda: numbers
    )


class Tuner:
    """As much of a kernel of Triton that is tuned as the peer touches."""

    def __init__(self, configs: list[Any]) -> None:
        self.configs, self.nargs = configs, {"rows": "of a call"}
        self.asked: list[dict[str, Any]] = []
        self.fn = SimpleNamespace(run=self.run)

    def prune_configs(self, meta: dict[str, Any]) -> list[Any]:
        return self.configs

    def run(self, **asked: Any) -> None:
        self.asked.append(asked)
        if asked["num_warps"] == 8:
            raise RuntimeError("out of registers")


def test_what_may_win_is_compiled_before_it_is_timed():
    pytest.importorskip("triton")
    configs = [config(BK=64, BV=64), config(8, BK=64, BV=64), config(BK=32, BV=64), config(1)]
    tuner = Tuner(configs)
    module: Any = SimpleNamespace(kernel=SimpleNamespace(fn=tuner), other=3)
    peers.tune_quickly(module, peers.is_plausible)
    peers.tune_quickly(module)  # once is enough
    assert tuner.prune_configs({"T": 8}) == configs[:2]
    assert len(tuner.asked) == 2
    assert all(
        asked["warmup"] and asked["T"] == 8 and asked["rows"] == "of a call"
        for asked in tuner.asked
    )


def test_a_kernel_without_plausible_configs_keeps_all():
    pytest.importorskip("triton")
    tuner = Tuner([config(1), config(1, BK=16)])
    peers.tune_quickly(SimpleNamespace(kernel=tuner), peers.is_plausible)  # type: ignore[arg-type]
    assert len(tuner.prune_configs({})) == 2


def test_all_configs_are_tuned_where_nothing_is_said_of_them():
    pytest.importorskip("triton")
    tuner = Tuner([config(BK=64, BV=64), config(1), config(1, BK=16)])
    peers.tune_quickly(SimpleNamespace(kernel=tuner))  # type: ignore[arg-type]
    assert tuner.prune_configs({}) == tuner.configs
    assert len(tuner.asked) == 3


@pytest.mark.parametrize(
    "plausible, one",
    [
        (True, config(BT=64, num_stages=3)),
        (False, config(BT=32, num_stages=3)),
        (False, config(2, BT=128, num_stages=3)),
        (False, config(num_stages=4, BK=64)),
        (True, config(num_stages=4)),
    ],
)
def test_small_tiles_and_few_warps_are_left_out(plausible: bool, one: Any):
    assert peers.is_plausible(one) is plausible
