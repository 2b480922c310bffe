"""Models with Mamba-2 layers: prompts, training and tokens by saccade's linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

transformers: Any = pytest.importorskip("transformers")

from tiny_families import DECODERS, HYBRIDS  # noqa: E402

import saccade  # noqa: E402
from saccade.integrations.transformers import layer_functions, mamba2, register  # noqa: E402

FAMILIES = {family.name: family for family in (*DECODERS, *HYBRIDS)}
# Layers of Mamba-2 in the tiny model, and whether their single tokens come to saccade: Falcon-H1
# hands on nothing that could mark them.
LAYERS = {
    "Mamba-2": (2, True), "Bamba": (1, True), "Granite 4": (1, True), "Nemotron-H": (1, True),
    "Zamba2": (4, True), "Falcon-H1": (2, False),
}  # fmt: skip
# transformers computes its scan in float32, as saccade does, and both sum up a few hundred terms a
# number; up to four layers come behind them, and gradients come through twice as many.
OUTPUTS, GRADIENTS = 1e-5, 1e-4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The function, and the tokens of a sequence, of every call that came to saccade."""
    seen: list[tuple[str, int]] = []

    def counted(name: str, tokens: Callable[..., int]) -> Callable[..., Any]:
        def call(theirs: Any, *arguments: Any, **options: Any) -> Any:
            seen.append((name, tokens(*arguments)))
            return getattr(mamba2, name)(theirs, *arguments, **options)

        return call

    functions = layer_functions.FUNCTIONS
    scan = counted("chunk_scan", lambda rows, *_: rows.shape[1])
    monkeypatch.setitem(functions, "mamba2_chunk_scan", scan)
    step = counted("step", lambda *_: 1)
    monkeypatch.setitem(functions, "mamba2_selective_state_update", step)
    return seen


def tiny(family: str, name: str = "saccade") -> Any:
    register()
    return FAMILIES[family].make(name)


def trained(model: Any, ids: Tensor, padding: Tensor) -> list[Tensor]:
    """Logits of what is no padding, and gradients of all weights, as in training."""
    logits = model.train()(ids, attention_mask=padding, use_cache=False).logits[padding.bool()]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(logits.square().mean(), weights, allow_unused=True)
    model.eval()
    return [logits.detach(), *(grad for grad in grads if grad is not None)]


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for bound, one, two in zip([OUTPUTS, *[GRADIENTS] * len(ours)], ours, theirs, strict=False):
        size = float(two.abs().max())
        torch.testing.assert_close(one, two, atol=bound * size + 1e-9, rtol=0)


@pytest.mark.parametrize("family", LAYERS)
def test_prompts_training_and_generation(family: str, calls: list[Any]) -> None:
    layers, steps = LAYERS[family]
    model, ids = tiny(family), torch.randint(1, 97, (2, 41))
    padding = torch.ones_like(ids)
    padding[1, :7] = 0
    prompt = {"input_ids": ids[:, :9], "attention_mask": padding[:, :9]}
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    ours = trained(model, ids, padding)
    assert calls == [("chunk_scan", 41)] * layers
    calls.clear()
    written = model.generate(**prompt, **options)
    assert calls == [("chunk_scan", 9)] * layers + [("step", 1)] * (4 * layers * steps)
    model.set_attn_implementation("eager")
    calls.clear()
    close(ours, trained(model, ids, padding))
    assert torch.equal(model.generate(**prompt, **options), written)
    assert calls == []


def test_a_prompt_in_parts_and_steps_in_place(calls: list[Any]) -> None:
    """The cache's states lie as saccade's do, of which a step is no copy."""
    model, ids = tiny("Mamba-2"), torch.randint(1, 97, (2, 24))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = transformers.DynamicCache(config=model.config)
        parts = [
            model(ids[:, part], cache_params=cache, use_cache=True).logits
            for part in (slice(0, 13), slice(13, 22), slice(22, 23), slice(23, 24))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)
    assert calls[2:] == [(name, n) for name, n in (
        ("chunk_scan", 13), ("chunk_scan", 9), ("step", 1), ("step", 1)
    ) for _ in range(2)]  # fmt: skip
    for layer in cache.layers:
        state = layer.recurrent_states[0]
        assert state.dtype == torch.float32 and state.mT.is_contiguous()


def test_the_engine_s_layers_take_it(calls: list[Any]) -> None:
    """tests/serving/test_hybrid.py compares the tokens of all families."""
    served = saccade.Engine(tiny("Mamba-2"), max_sequences=2, max_batch_tokens=16)
    calls.clear()
    served.generate([[5, 9, 20, 33, 41], [7, 8]], max_new_tokens=3, stop_tokens=())
    assert sorted(calls) == sorted([("chunk_scan", 5), ("chunk_scan", 2), *[("step", 1)] * 2] * 2)


# ---- the functions -------------------------------------------------------------------------------


class Scan(NamedTuple):
    """What a layer asks for, by the names of the function's arguments."""

    hidden_states: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor
    initial_states: Tensor

    def call(self, **options: Any) -> Any:
        """The scan, where nothing is left to others."""
        return mamba2.chunk_scan(
            refuses, chunk_size=8, dt_softplus=True, **{**self._asdict(), **options}
        )


def refuses(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("left to transformers")


def scan(length: int = 21, state_size: int = 6, dtype: torch.dtype = torch.float64) -> Scan:
    """Two sequences, four heads that share two groups, a state of each to begin with."""
    torch.manual_seed(0)
    batch, heads, groups, head_dim = 2, 4, 2, 5
    return Scan(
        torch.randn(batch, length, heads, head_dim, dtype=dtype),
        torch.randn(batch, length, heads, dtype=dtype),
        -torch.rand(heads, dtype=dtype).mul(3).exp(),
        torch.randn(batch, length, groups, state_size, dtype=dtype),
        torch.randn(batch, length, groups, state_size, dtype=dtype),
        torch.randn(heads, dtype=dtype),
        torch.randn(heads, dtype=dtype),
        torch.randn(batch, heads, head_dim, state_size, dtype=dtype),
    )


def token_by_token(
    given: Scan, limit: tuple[float, float] = (0.0, float("inf"))
) -> tuple[Tensor, Tensor]:
    """The recurrence as the paper writes it: outputs, and the last state."""
    heads = given.hidden_states.shape[2]
    rate = torch.nn.functional.softplus(given.dt + given.dt_bias).clamp(*limit)
    B, C = (rows.repeat_interleave(heads // rows.shape[2], 2) for rows in (given.B, given.C))
    state, outputs = given.initial_states, []
    for t in range(given.dt.shape[1]):
        x, now = given.hidden_states[:, t], rate[:, t, :, None]
        left = (now * given.A[:, None]).exp().unsqueeze(-1)
        state = left * state + (now * x).unsqueeze(-1) * B[:, t].unsqueeze(-2)
        read = (state @ C[:, t].unsqueeze(-1)).squeeze(-1)
        outputs.append(read + given.D[:, None] * x)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.4, 1.5)])
def test_scan_and_gradients_are_the_recurrence(limit: tuple[float, float]) -> None:
    given = Scan(*(each.requires_grad_() for each in scan()))
    ours = given.call(return_final_states=True, dt_limit=limit)
    wanted = token_by_token(given, limit)
    towards = [torch.randn_like(each) for each in wanted]
    for one, two in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=1e-12)
    assert ours[0].is_contiguous()  # layers make views of it
    found, true = (torch.autograd.grad(both, given, towards) for both in (ours, wanted))
    for name, one, two in zip(Scan._fields, found, true, strict=True):
        torch.testing.assert_close(
            one, two, atol=1e-11, rtol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_scan_in_bfloat16_errs_as_bfloat16_does() -> None:
    exact = Scan(*(each.bfloat16().double() for each in scan(200, 16)))
    given = Scan(*(each.bfloat16() for each in exact))._replace(
        A=exact.A.float(), initial_states=exact.initial_states.float()
    )
    output, state = given.call(return_final_states=True)
    assert (output.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    for found, true in zip((output, state), token_by_token(exact), strict=True):
        assert (found - true).norm() < 2**-8 * true.norm()


def asked_for_a_token(given: Scan, t: int = 0) -> dict[str, Any]:
    """A step's arguments as layers give them: one number a head, expanded."""
    head_dim, state_size = given.initial_states.shape[2:]
    return {
        "hidden_states": given.hidden_states[:, t],
        "dt": given.dt[:, t, :, None].expand(-1, -1, head_dim),
        "A": given.A[:, None, None].expand(-1, head_dim, state_size),
        "B": given.B[:, t],
        "C": given.C[:, t],
        "D": given.D[:, None].expand(-1, head_dim),
        "dt_bias": given.dt_bias[:, None].expand(-1, head_dim),
        "dt_softplus": True,
    }


@pytest.mark.parametrize("as_saccade_s", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_steps_are_the_recurrence(as_saccade_s: bool, trains: bool) -> None:
    given = scan(3)
    state = given.initial_states.clone()
    if as_saccade_s:
        state = state.mT.contiguous().mT
    at = state.data_ptr()
    if trains:
        given.B.requires_grad_()
    outputs = [mamba2.step(refuses, state, **asked_for_a_token(given, t)) for t in range(3)]
    output, last = token_by_token(given)
    torch.testing.assert_close(torch.stack(outputs, 1), output, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, last, atol=1e-12, rtol=1e-12)
    assert state.data_ptr() == at and outputs[0].requires_grad is trains
    if trains:
        (grad,) = torch.autograd.grad(outputs[-1].sum(), given.B)
        (true,) = torch.autograd.grad(output[:, -1].sum(), given.B)
        torch.testing.assert_close(grad, true, atol=1e-12, rtol=1e-12)


def test_sequences_packed_in_rows_are_apart() -> None:
    given = scan(12)
    numbers = torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 4 + [2] * 7])
    found = given.call(seq_idx=numbers, initial_states=None)
    nothing = torch.zeros_like(given.initial_states)[:1]
    for b, begin, end in ((0, 0, 5), (0, 5, 12), (1, 0, 1), (1, 1, 5), (1, 5, 12)):
        rows = [each[b : b + 1, begin:end] for each in given[:2]]
        B, C = (each[b : b + 1, begin:end] for each in given[3:5])
        alone = Scan(rows[0], rows[1], given.A, B, C, given.D, given.dt_bias, nothing)
        torch.testing.assert_close(
            found[b : b + 1, begin:end], token_by_token(alone)[0], atol=1e-12, rtol=1e-12
        )


@pytest.mark.parametrize("strong", [-1e3, -1e30, -torch.inf])
def test_decay_that_leaves_nothing(strong: float) -> None:
    """A token then sees itself alone; a fallback that subtracts sums gives NaN for -inf."""
    given = scan()._replace(A=torch.full((4,), strong, dtype=torch.float64))
    output, state = given.call(return_final_states=True, dt_limit=(1.0, 2.0))
    wanted = token_by_token(given, (1.0, 2.0))
    torch.testing.assert_close(output, wanted[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, wanted[1], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["dt", "A", "hidden_states"])
def test_nan_reaches_the_rows_behind_it(name: str) -> None:
    given = scan()
    getattr(given, name)[(1, 7, 2) if name != "A" else 2] = torch.nan
    output, state = given.call(return_final_states=True)
    wanted = token_by_token(given)
    assert torch.equal(output.isnan(), wanted[0].isnan())
    assert torch.equal(state.isnan(), wanted[1].isnan())


# ---- what is left to transformers ----------------------------------------------------------------


WIDE = scan(4, mamba2.WIDEST + 1)
CHANNELS = torch.ones(4, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (WIDE, {}),
        (scan(), {"D": CHANNELS}),
        (scan(), {"z": torch.ones(2, 21, 4, 5)}),
        (scan(), {"cu_seqlens": torch.tensor([0, 21])}),
        (scan(), {"seq_idx": torch.zeros(2, 21, dtype=torch.int32)}),
    ],
    ids=["wide state", "a D for each channel", "gate", "offsets", "packed with states"],
)
def test_scans_that_are_left(given: Scan, options: dict[str, Any]) -> None:
    asked = {**given._asdict(), "chunk_size": 8, "dt_softplus": True, **options}
    asked |= {"dt_limit": (0.0, 1.0), "return_final_states": True}
    got: dict[str, Any] = {}

    def theirs(*rows: Any, **named: Any) -> str:
        got.update(zip(Scan._fields, rows, strict=False), **named)
        return "theirs"

    assert mamba2.chunk_scan(theirs, **asked) == "theirs"
    assert {name: got.pop(name) for name in asked} == asked
    assert not [name for name, value in got.items() if value is not None]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (WIDE, {}),
        (scan(1), {"z": torch.ones(2, 4, 5)}),
        (scan(1), {"dt": torch.ones(2, 4, 5, dtype=torch.float64)}),
        (scan(1), {"D": CHANNELS}),
        (scan(1), {"A": -torch.ones(4, 5, 6, dtype=torch.float64)}),
    ],
    ids=["wide state", "gate", "a dt for each channel", "a D for each channel", "A of entries"],
)
def test_steps_that_are_left(given: Scan, options: dict[str, Any]) -> None:
    asked = {**asked_for_a_token(given), **options}
    got: dict[str, Any] = {}
    names = ("state", "hidden_states", "dt", "A", "B", "C", "D")

    def theirs(*rows: Any, **named: Any) -> str:
        got.update(zip(names, rows, strict=False), **named)
        return "theirs"

    assert mamba2.step(theirs, given.initial_states, **asked) == "theirs"
    assert all(got[name] is asked[name] for name in asked)


def test_a_package_s_training_in_one_call_is_left_where_the_scan_would_be() -> None:
    heads, head_dim, groups = 4, 8, 2

    def ask(state_size: int) -> Any:
        channels = heads * head_dim + 2 * groups * state_size
        return mamba2.split_conv_scan(
            lambda *arguments, **options: (arguments, options), torch.ones(1, 3, 2 * channels),
            torch.ones(channels, 4), None, torch.ones(heads), -torch.ones(heads),
            D=torch.ones(heads), chunk_size=8, headdim=head_dim, ngroups=groups, activation="silu",
        )  # fmt: skip

    assert ask(mamba2.WIDEST) is None
    arguments, options = ask(mamba2.WIDEST + 1)
    assert len(arguments) == 5 and options["activation"] == "silu" and options["headdim"] == 8
