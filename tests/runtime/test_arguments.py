"""Every argument of the dense call, given wrongly: named, with what it got and what it takes."""

from typing import Any, NamedTuple

import jaxtyping
import pytest
import torch

import saccade
from saccade import KernelConfig, masks, scores

META = torch.device("meta")
EITHER = (TypeError, ValueError)


@pytest.fixture(autouse=True)
def unchecked_annotations(monkeypatch):
    """The complaints are the library's own, also when the annotations are checked in all tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def explode(*arguments: Any) -> Any:
        raise AssertionError("an implementation ran")

    monkeypatch.setattr("saccade.ops.attention.cpu.host.forward", explode)
    monkeypatch.setattr("saccade.ops.attention.reference.attention", explode)


class Refusal(NamedTuple):
    """One wrong value of one argument, and what the complaint must say."""

    label: str
    argument: str
    value: Any
    error: Any
    got: str
    takes: str
    name: str = ""  # of the argument that is complained about, where it is another one

    @property
    def id(self) -> str:
        return f"{self.argument}-{self.label}".replace(" ", "-")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def dense_call(**changes: Any) -> Any:
    """A call that fits, but for the changes. Query heads 4, kv heads 2, lengths 6 and 5."""
    arguments: dict[str, Any] = {
        "query": normal(2, 4, 6, 8),
        "key": normal(2, 2, 5, 8),
        "value": normal(2, 2, 5, 3),
        "dropout_p": 0.5,
    }
    arguments.update(changes)
    return saccade.attention(
        arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments
    )


QUERY = "[batch, query_heads, query_len, head_dim]"
KEY = "[batch, kv_heads, kv_len, head_dim]"
VALUE = "[batch, kv_heads, kv_len, value_dim]"
FLOATS = "takes float32, float64, bfloat16 or float16"

TENSORS = [
    Refusal("a list", "query", [1.0], TypeError, "got list", QUERY),
    Refusal("None", "query", None, TypeError, "got NoneType", QUERY),
    Refusal("sparse", "query", normal(2, 4, 6, 8).to_sparse(), TypeError, "sparse_coo", "dense"),
    Refusal(
        "nested",
        "query",
        torch.nested.nested_tensor([normal(4, 6, 8)], layout=torch.jagged),
        TypeError,
        "a nested tensor",
        QUERY,
    ),
    Refusal("3 dimensions", "query", normal(4, 6, 8), ValueError, "(4, 6, 8)", QUERY),
    Refusal("5 dimensions", "query", normal(1, 2, 4, 6, 8), ValueError, "(1, 2, 4, 6, 8)", QUERY),
    Refusal("int64", "query", torch.ones(2, 4, 6, 8).long(), TypeError, "torch.int64", FLOATS),
    Refusal("bool", "query", torch.ones(2, 4, 6, 8).bool(), TypeError, "torch.bool", FLOATS),
    Refusal(
        "complex",
        "query",
        normal(2, 4, 6, 8, dtype=torch.complex64),
        TypeError,
        "complex64",
        FLOATS,
    ),
    Refusal(
        "on meta", "query", normal(2, 4, 6, 8).to(META), ValueError, "cpu", "query's meta", "key"
    ),
    Refusal("a number", "key", 1.0, TypeError, "got float", KEY),
    Refusal("2 dimensions", "key", normal(5, 8), ValueError, "(5, 8)", KEY),
    Refusal("uint8", "key", normal(2, 2, 5, 8).byte(), TypeError, "torch.uint8", FLOATS),
    Refusal(
        "float64", "key", normal(2, 2, 5, 8).double(), TypeError, "torch.float64", "query's torch."
    ),
    Refusal("on meta", "key", normal(2, 2, 5, 8).to(META), ValueError, "got meta", "query's cpu"),
    Refusal("batch", "key", normal(3, 2, 5, 8), ValueError, "got batch 3", "takes query's 2"),
    Refusal("heads", "key", normal(2, 3, 5, 8), ValueError, "takes key's 3", "2 heads", "value"),
    Refusal("head dim", "key", normal(2, 2, 5, 7), ValueError, "head_dim 7", "query's head_dim 8"),
    Refusal("rows", "key", normal(2, 2, 4, 8), ValueError, "got 5 rows", "takes key's 4", "value"),
    Refusal("a str", "value", "value", TypeError, "got str", VALUE),
    Refusal("3 dimensions", "value", normal(2, 5, 3), ValueError, "(2, 5, 3)", VALUE),
    Refusal("int32", "value", normal(2, 2, 5, 3).int(), TypeError, "torch.int32", FLOATS),
    Refusal(
        "float16", "value", normal(2, 2, 5, 3).half(), TypeError, "torch.float16", "query's torch."
    ),
    Refusal("on meta", "value", normal(2, 2, 5, 3).to(META), ValueError, "meta", "query's cpu"),
    Refusal("batch", "value", normal(1, 2, 5, 3), ValueError, "got batch 1", "takes query's 2"),
    Refusal("heads", "value", normal(2, 4, 5, 3), ValueError, "got 4 heads", "takes key's 2"),
    Refusal("rows", "value", normal(2, 2, 6, 3), ValueError, "got 6 rows", "takes key's 5"),
]

NUMBER = "0 or a number of 1e-30 to 1e+30 in size or None"
SHARE, FLAG = "a number in [0, 1)", "takes True or False"
NUMBERS = [
    Refusal("a str", "scale", "0.5", TypeError, "got '0.5'", NUMBER),
    Refusal("a bool", "scale", True, TypeError, "got True", NUMBER),
    Refusal("a tensor", "scale", torch.tensor(0.5), TypeError, "got tensor(0.5", NUMBER),
    Refusal("complex", "scale", 1j, TypeError, "got 1j", NUMBER),
    Refusal("NaN", "scale", float("nan"), ValueError, "got nan", NUMBER),
    Refusal("inf", "scale", float("inf"), ValueError, "got inf", NUMBER),
    Refusal("minus inf", "scale", -float("inf"), ValueError, "got -inf", NUMBER),
    Refusal("beyond float32", "scale", 1e39, ValueError, "got 1e+39", NUMBER),
    Refusal("below float32", "scale", -1e-46, ValueError, "got -1e-46", NUMBER),
    Refusal("None", "dropout_p", None, TypeError, "got None", SHARE),
    Refusal("a str", "dropout_p", "0.1", TypeError, "got '0.1'", SHARE),
    Refusal("a bool", "dropout_p", False, TypeError, "got False", SHARE),
    Refusal("a tensor", "dropout_p", torch.tensor(0.1), TypeError, "got tensor(0.1", SHARE),
    Refusal("negative", "dropout_p", -0.1, ValueError, "got -0.1", SHARE),
    Refusal("1", "dropout_p", 1, ValueError, "got 1", SHARE),
    Refusal("above 1", "dropout_p", 1.5, ValueError, "got 1.5", SHARE),
    Refusal("NaN", "dropout_p", float("nan"), ValueError, "got nan", SHARE),
    Refusal("1", "return_lse", 1, TypeError, "got 1", FLAG),
    Refusal("None", "return_lse", None, TypeError, "got None", FLAG),
    Refusal("a str", "return_lse", "no", TypeError, "got 'no'", FLAG),
    Refusal("0", "deterministic", 0, TypeError, "got 0", FLAG),
    Refusal("None", "deterministic", None, TypeError, "got None", FLAG),
    Refusal("a tensor", "deterministic", torch.tensor(True), TypeError, "tensor(True)", FLAG),
]

SINKS = [
    Refusal("a list", "sinks", [0.0] * 4, TypeError, "got list", "a tensor [query_heads]"),
    Refusal("int64", "sinks", torch.zeros(4).long(), TypeError, "torch.int64", "floating-point"),
    Refusal("bool", "sinks", torch.zeros(4).bool(), TypeError, "torch.bool", "floating-point"),
    Refusal("kv heads", "sinks", torch.zeros(2), ValueError, "(2,)", "takes (4,)"),
    Refusal("2 dimensions", "sinks", torch.zeros(1, 4), ValueError, "(1, 4)", "takes (4,)"),
    Refusal("no dimension", "sinks", torch.tensor(0.0), ValueError, "()", "takes (4,)"),
    Refusal("on meta", "sinks", torch.zeros(4, device=META), ValueError, "meta", "query's cpu"),
]

A_MASK, A_SCORE, SIZES = "a saccade Mask", "a saccade Score", "[batch 2, query_heads 4, query_len 6"


@masks.function
def own_mask(batch, head, query_row, kv_row, table):
    return masks.take(table, batch) > 0


@scores.function
def own_score(score, batch, head, query_row, kv_row, table):
    return score + scores.take(table, head)


MASKS = [
    Refusal("a number", "mask", 3, TypeError, "got int", A_MASK),
    Refusal("a str", "mask", "causal", TypeError, "got str", A_MASK),
    Refusal("a score", "mask", scores.softcap(1.0), TypeError, "got Score", A_MASK),
    Refusal(
        "a constructor",
        "mask",
        masks.causal,
        TypeError,
        "got the function saccade.masks.causal",
        "write mask=",
    ),
    Refusal(
        "not called",
        "mask",
        own_mask,
        TypeError,
        ") has the parameters (batch, head, query_row, kv_row, table)",
        "call it",
    ),
    Refusal("float", "mask", normal(6, 5), TypeError, "torch.float32", "torch.bool"),
    Refusal("uint8", "mask", normal(6, 5).byte(), TypeError, "torch.uint8", "torch.bool"),
    Refusal(
        "5 dimensions", "mask", torch.ones(1, 2, 4, 6, 5).bool(), ValueError, "got 5", "most 4"
    ),
    Refusal("batch", "mask", torch.ones(3, 1, 6, 5).bool(), ValueError, "(3, 1, 6, 5)", SIZES),
    Refusal("heads", "mask", torch.ones(2, 6, 5).bool(), ValueError, "(1, 2, 6, 5)", SIZES),
    Refusal("rows", "mask", torch.ones(5, 5).bool(), ValueError, "(1, 1, 5, 5)", "query_len 6"),
    Refusal("keys", "mask", torch.ones(6).bool(), ValueError, "(1, 1, 1, 6)", "kv_len 5"),
    Refusal("on meta", "mask", torch.ones(6, 5, device=META).bool(), ValueError, "meta", "cpu"),
    Refusal(
        "captured on meta", "mask", own_mask(torch.ones(2, device=META)), ValueError, "meta", "cpu"
    ),
    Refusal(
        "lengths",
        "mask",
        masks.causal() & masks.key_lengths(torch.ones(3).int()),
        ValueError,
        "lengths: got shape (3,)",
        "[batch 2]",
    ),
    Refusal("prefix", "mask", masks.prefix(torch.ones(4).int()), ValueError, "(4,)", "[batch 2]"),
    Refusal(
        "query ids",
        "mask",
        ~masks.documents(torch.ones(1, 5).int()),
        ValueError,
        "query_ids: got shape (1, 5)",
        "query_len 6",
    ),
    Refusal(
        "kv ids",
        "mask",
        masks.documents(torch.ones(2, 6).int(), torch.ones(2, 6).int()),
        ValueError,
        "kv_ids: got shape (2, 6)",
        "[batch 2, kv_len 5]",
    ),
    Refusal(
        "layout",
        "mask",
        masks.blocks(torch.ones(3, 3).bool(), (2, 3)),
        ValueError,
        "layout: got shape (1, 1, 3, 3)",
        "query_len 3, kv_len 2]",
    ),
]

SCORES = [
    Refusal("a number", "score", 0.5, TypeError, "got float", A_SCORE),
    Refusal("a tensor", "score", normal(6, 5), TypeError, "got Tensor", A_SCORE),
    Refusal("a mask", "score", masks.causal(), TypeError, "got Mask", A_SCORE),
    Refusal(
        "not called",
        "score",
        own_score,
        TypeError,
        ") has the parameters (score, batch, head, ",
        "call it",
    ),
    Refusal(
        "slopes",
        "score",
        scores.softcap(1.0) >> scores.alibi(torch.ones(2)),
        ValueError,
        "slopes: got shape (2,)",
        "[query_heads 4]",
    ),
    Refusal("bias", "score", scores.bias(torch.ones(6, 6)), ValueError, "tensor: got", "kv_len 5"),
    Refusal(
        "bias on meta",
        "score",
        scores.bias(torch.ones(6, 5, device=META)),
        ValueError,
        "on meta",
        "takes cpu",
    ),
]

NAMES, A_CONFIG = (
    "takes one of ('cpu', 'hopper', 'triton', 'reference')",
    "a KernelConfig, or a mapping from (major, minor)",
)
CHOICES = [
    Refusal("unknown", "implementation", "flash", ValueError, "got 'flash'", NAMES),
    Refusal("upper case", "implementation", "CPU", ValueError, "got 'CPU'", NAMES),
    Refusal("empty", "implementation", "", ValueError, "got ''", NAMES),
    Refusal("a number", "implementation", 0, EITHER, "got 0", NAMES),
    Refusal("a list", "implementation", ["cpu"], EITHER, "got ['cpu']", NAMES),
    Refusal("a str", "config", "fast", TypeError, "got str", A_CONFIG),
    Refusal("a number", "config", 128, TypeError, "got int", A_CONFIG),
    Refusal("a list", "config", [KernelConfig()], TypeError, "got list", A_CONFIG),
    Refusal("str keys", "config", {"sm_90": KernelConfig()}, TypeError, "key 'sm_90'", A_CONFIG),
    Refusal("int keys", "config", {90: KernelConfig()}, TypeError, "key 90", A_CONFIG),
    Refusal("long keys", "config", {(9, 0, 0): KernelConfig()}, TypeError, "(9, 0, 0)", A_CONFIG),
    Refusal("float keys", "config", {(9, 0.0): KernelConfig()}, TypeError, "(9, 0.0)", A_CONFIG),
    Refusal("wrong entry", "config", {(9, 0): 128}, TypeError, "int for (9, 0)", A_CONFIG),
]


REFUSALS = [*TENSORS, *NUMBERS, *SINKS, *MASKS, *SCORES, *CHOICES]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_call_refuses(refusal):
    with pytest.raises(refusal.error) as caught:
        dense_call(**{refusal.argument: refusal.value})
    message = str(caught.value)
    assert message.startswith(f"{refusal.name or refusal.argument}: ")
    assert refusal.got in message
    assert refusal.takes in message


def test_refused_call_leaves_the_random_generator_alone():
    advanced = []
    for refusal in REFUSALS:
        state = torch.get_rng_state()
        with pytest.raises(refusal.error):
            dense_call(**{refusal.argument: refusal.value})
        if not torch.equal(torch.get_rng_state(), state):
            advanced.append(refusal.id)
    assert advanced == []


def test_every_argument_is_refused_when_wrong():
    names = {
        "query", "key", "value", "mask", "score", "scale", "sinks", "dropout_p", "return_lse",
        "deterministic", "implementation", "config",
    }  # fmt: skip
    assert {refusal.argument for refusal in REFUSALS} == names


def test_kv_heads_must_divide_query_heads():
    with pytest.raises(ValueError, match="key: got 3 heads, takes a number that divides query's 4"):
        dense_call(key=normal(2, 3, 5, 8), value=normal(2, 3, 5, 3))
    with pytest.raises(ValueError, match="key: got 0 heads, takes a number that divides query's 4"):
        dense_call(key=normal(2, 0, 5, 8), value=normal(2, 0, 5, 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0}, {"scale": -1.5}, {"dropout_p": 0}, {"dropout_p": 0.999}, {"config": {}},
        {"config": {(9, 0): KernelConfig()}}, {"config": KernelConfig(32, 64)},
        {"mask": torch.tensor(True)},
        {"mask": torch.ones(5).bool()}, {"sinks": torch.zeros(4).half()},
        {"implementation": "reference"},
    ],
    ids=lambda changes: "-".join(f"{name}-{type(v).__name__}" for name, v in changes.items()),
)  # fmt: skip
def test_what_fits_is_taken(changes):
    with pytest.raises(AssertionError, match="an implementation ran"):
        dense_call(**changes)
