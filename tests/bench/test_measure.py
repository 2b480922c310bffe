"""The host's time and first calls are measured, and those that cannot be are told apart."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from saccade.bench import measure, processes
from saccade.bench.cases import CASES, HOST_CASES
from saccade.bench.command import bench
from saccade.bench.peers import all_peers, ours
from saccade.bench.results import read
from saccade.bench.timing import HostClock, Runnable, TimingPlan

CPU = torch.device("cpu")
PEERS = {peer.who: peer for peer in all_peers()}
SHORT = TimingPlan(rounds=3, sample_seconds=0.0)

app = typer.Typer()
app.command()(bench)


def test_the_host_is_timed_without_and_with_gradients():
    case = CASES["tiny-full-fp32-d16-48"]
    peers = [PEERS[who] for who in ("saccade/cpu", "sdpa", "sdpa/cudnn")]
    results, absences = measure.measure_host(case, peers, CPU, SHORT, calls=2)
    assert {(item.which_pass, item.who) for item in results} == {
        (which_pass, who) for which_pass in measure.HOST_PASSES for who in ("saccade/cpu", "sdpa")
    }
    assert [absence.who for absence in absences] == ["sdpa/cudnn"]
    assert all(item.rounds == 3 and item.tflops is None for item in results)


def test_decoding_has_no_gradients():
    case = CASES["tiny-decode-fp32-d16-64"]
    results, _ = measure.measure_host(case, [PEERS["sdpa"]], CPU, SHORT, calls=2)
    assert [item.which_pass for item in results] == ["host"]


def test_the_host_s_clock_makes_its_calls():
    calls = []
    clock = HostClock(CPU, calls=5)
    clock.ready(Runnable(lambda: calls.append(1)))
    assert clock.seconds(lambda: calls.append(1), 2) > 0
    assert len(calls) == 15


def test_the_host_s_cases_are_tiny():
    for machine, cases in HOST_CASES.items():
        for case in cases:
            assert case.name.startswith(f"{machine}-host-")
            assert case.name not in CASES
            assert max(case.query_len, case.kv_len) <= 512
    kinds = {(case.attention, case.packed, case.decodes) for case in HOST_CASES["gpu"]}
    assert len(kinds) == 4  # dense, packed, over pages, linear


def test_first_calls_in_fresh_processes(tmp_path):
    file = tmp_path / "results.jsonl"
    arguments = ["--first-call", "-c", "tiny-causal-fp32-d16-48", "--json", str(file)]
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert [(item.which_pass, item.who) for item in read(file)] == [
        (f"first {which_pass}{suffix}", ours.chosen(CASES["tiny-causal-fp32-d16-48"], CPU))
        for suffix in processes.SUFFIXES
        for which_pass in ("forward", "backward")
    ]
    assert "first backward, cached" in done.output


def test_a_peer_without_a_first_call_says_why():
    case = CASES["tiny-causal-fp32-d16-48"]
    results, absences = processes.measure_first_calls(case, [PEERS["flash_attn_3"]], CPU)
    assert results == []
    assert "not installed" in absences[0].reason


@pytest.mark.parametrize(
    ("case", "who"),
    [
        ("tiny-pages-h4x2-fp32-d16-64+32+16", "saccade/paged-16"),  # of unlike lengths
        ("cpu-decode-fp32-d128-16k", "saccade/paged-256"),  # which takes whole pages
    ],
)
def test_memory_of_a_call_over_pages(case, who):
    assert isinstance(processes.peak_on_cpu(CASES[case], who, "decode"), float)


def test_a_process_that_fails_or_hangs_gives_the_reason():
    assert "No module named" in str(processes.fresh("saccade.bench.nothing", (), {}, 60.0))
    assert "not finished" in str(processes.fresh("this", (), {}, 0.001))


@pytest.mark.parametrize("option", ["--host", "--first-call"])
def test_mistakes_are_answered(option):
    done = CliRunner().invoke(app, [option, "--who", "spda", "--device", "cpu"])
    assert done.exit_code == 2
    assert "Did you mean sdpa" in done.output


def test_the_command_shows_microseconds(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "measure_host", quickly(measure.measure_host))
    file = tmp_path / "results.jsonl"
    arguments = ["--host", "--json", str(file), "--device", "cpu"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "median µs" in done.output
    assert {item.who for item in read(file)} == {ours.chosen(HOST_CASES["cpu"][0], CPU), "sdpa"}
    assert {item.case["name"] for item in read(file)} == {"cpu-host-fp32-d64-128"}


def quickly(measured):
    return lambda case, peers, device: measured(case, peers, device, SHORT, 2)


def test_gradients_of_a_long_delta_case_are_asked_of_its_first_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from saccade.bench import exact as exact_module
    from saccade.bench.delta_case import delta_cases

    monkeypatch.setattr(exact_module, "GRADIENT_TOKENS", 8)
    monkeypatch.setattr(exact_module, "MOST_ROWS", 4)  # of 70, so that one lies among these
    case = next(case for case in delta_cases() if case.name.startswith("tiny-delta-h2x4"))
    truth = exact_module.exact(case, case.make(torch.device("cpu")))
    parts = [gradient.part for head in truth.heads for gradient in head.gradients]
    assert parts
    assert all(part.norm() > 0 for part in parts)
