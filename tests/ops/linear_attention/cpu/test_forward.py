"""What only the CPU path of linear attention promises: steps, memory, NaN that arrives."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch

import saccade
from saccade.ops.linear_attention.cpu import host as linear_host
from saccade.ops.linear_attention.cpu.forward import RowStep, steps_of
from saccade.runtime.spec import LinearInputs, LinearVariant
from saccade.testing import make_linear_case

ALIGNMENTS = ("bottom_right", "top_left")


def variant(causal: bool, align: str) -> LinearVariant:
    return LinearVariant(causal, align, "elu+1", "sum", 1e-6, 1.0)


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize("causal", [True, False])
def test_each_row_is_visited_once_after_the_keys_that_it_sees(causal: bool, align: str) -> None:
    for query_len, kv_len in itertools.product(range(7), repeat=2):
        steps = steps_of(query_len, kv_len, variant(causal, align), 2)
        shift = kv_len - query_len if align == "bottom_right" else 0
        num_keys, rows = 0, []
        for queries, keys in steps:
            if queries is not None:
                for position, row in enumerate(range(queries.start, queries.stop)):
                    beside = 0 if keys is None else position + 1
                    wanted = min(max(row + 1 + shift, 0), kv_len) if causal else kv_len
                    assert num_keys + beside == wanted
                    rows.append(row)
            if keys is not None:
                assert keys.start == num_keys
                num_keys = keys.stop
        assert (rows, num_keys) == (list(range(query_len)), kv_len)


def test_steps_side_by_side() -> None:
    assert steps_of(3, 5, variant(True, "bottom_right"), 2) == [
        RowStep(None, slice(0, 2)),
        RowStep(slice(0, 2), slice(2, 4)),
        RowStep(slice(2, 3), slice(4, 5)),
    ]


@pytest.mark.parametrize("chunk", [5, 64])
def test_nan_that_arrives_does_not_reach_later_keys(chunk: int) -> None:
    case = make_linear_case(heads=(4, 2, 2))
    case.grads["output"][:, :, 7] = torch.nan
    results = case.run("cpu", config=saccade.KernelConfig(kv_tile=chunk))
    assert bool(results["output"].isfinite().all())
    for name in ("grad_key", "grad_value"):
        assert bool(results[name][:, :, :8].isnan().any()), name
        assert bool(results[name][:, :, 8:].isfinite().all()), name


def test_a_strong_decay_does_not_round_away_weak_ones() -> None:
    case = make_linear_case(decay="rows", lengths=((96, 96),), batch=1)
    case.tensors["decay"][:, :, 3] = -3e4  # as good as a new start
    case.tensors["decay"][:, :, 4:] = -1e-3
    ours = case.run("cpu")["output"].double()
    truth = case.run("reference", torch.float64)["output"]
    torch.testing.assert_close(ours, truth, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_do_not_grow_with_the_length(dtype: torch.dtype) -> None:
    """The gates of the relative RMS error: float32 2e-6, float16 4e-4, bfloat16 2.5e-3."""
    gate = {torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 2.5e-3}[dtype]
    for length in (256, 32768):
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, 1, length, 32).to(dtype) for _ in range(3))
        output = saccade.linear_attention(query, key, value).double()
        wide = (rows.double() for rows in (query, key, value))
        exact = saccade.linear_attention(*wide)
        assert bool(output.isfinite().all())
        assert float((output - exact).norm() / exact.norm()) < gate


@pytest.mark.parametrize("tokens", [1, 3, 200])  # one key, one chunk, two
@pytest.mark.parametrize(
    ("entries", "large"),
    [
        (slice(0, 5), 64),  # where they lie
        ([6, 0, 3, 1, 4], 64),  # there, one after the other
        ([6, 0, 3, 1, 4], 65),  # copies
    ],
)
def test_states_of_a_step_are_changed_and_no_others(
    entries: Any, tokens: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_host, "LARGE_STATE", large)
    torch.manual_seed(0)
    query, key, value = (torch.randn(5, heads, tokens, 4) for heads in (8, 4, 2))
    sums = torch.rand(7, 4, 4, 4), torch.rand(7, 4, 4)
    before = [part[entries].clone() for part in sums]
    options: dict[str, Any] = {"decay": -torch.rand(4), "normalize": "clamp"}
    index = None if isinstance(entries, slice) else torch.tensor(entries)
    given = saccade.LinearState(*(part[entries] if index is None else part for part in sums))
    untouched = [part.clone() for part in sums]
    found = saccade.linear_attention_step(given, query, key, value, state_index=index, **options)
    options |= {"initial_state": saccade.LinearState(*before), "return_state": True}
    wanted, last = saccade.linear_attention(query, key, value, **options)
    torch.testing.assert_close(found, wanted)
    for part, new, old in zip(sums, last[:2], untouched, strict=True):
        torch.testing.assert_close(part[entries], new)
        old[entries] = part[entries]
        assert torch.equal(part, old)


@pytest.mark.parametrize("decay", [None, -0.01])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_rounded_once(dtype: torch.dtype, decay: float | None) -> None:
    """Values have much in common: of sums near 1 gradients of queries keep differences near 0."""
    torch.manual_seed(0)
    rows = [torch.randn(1, 2, 1000, 32).to(dtype) for _ in range(4)]
    rows[2] += 1
    decay_factors = None if decay is None else torch.full((2,), decay)
    found, exact = [], []
    for into, wide in ((found, dtype), (exact, torch.float64)):
        leaves = [part.to(wide).requires_grad_() for part in rows[:3]]
        output = saccade.linear_attention(*leaves, decay=decay_factors)
        into += torch.autograd.grad(output, leaves, rows[3].to(wide))
    for got, true in zip(found, exact, strict=True):
        assert (got.double() - true).norm() <= torch.finfo(dtype).eps / 2 * true.norm()


def test_threads_keep_their_own_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes in later, and leaves later, must not undo what another asked for."""
    tensors = [torch.randn(1, 1, 4, 8) for _ in range(3)]
    entered, left = threading.Event(), threading.Event()
    contributions = linear_host._head_slices

    def interleaved(inputs: LinearInputs) -> object:
        if threading.current_thread() is other:
            entered.set()
            left.wait(10)
        else:
            other.start()
            entered.wait(10)
        return contributions(inputs)

    monkeypatch.setattr(linear_host, "_head_slices", interleaved)
    other = threading.Thread(target=saccade.linear_attention, args=tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        saccade.linear_attention(*tensors)
        kept = torch.is_autocast_enabled("cpu")
    left.set()
    other.join()
    assert kept
    assert not torch.is_autocast_enabled("cpu")


def test_the_default_device_is_not_asked() -> None:
    case = make_linear_case(lengths=((9, 4),), padded=True, decay="heads")
    with torch.device("meta"):
        case.run("cpu")
