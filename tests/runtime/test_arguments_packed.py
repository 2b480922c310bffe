"""Every argument that only varlen calls and `merge_states` have, given wrongly; `KernelConfig`."""

from typing import Any

import jaxtyping
import pytest
import torch

import saccade
from saccade import KernelConfig, masks, scores
from saccade.runtime.arguments import values_readable
from saccade.testing import checked

META = torch.device("meta")


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


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def packed_call(**changes: Any) -> Any:
    """A call that fits, but for the changes: queries of 3 and 4 rows, keys of 4 and 5."""
    arguments: dict[str, Any] = {
        "query": torch.ones(7, 4, 8),
        "key": torch.ones(9, 2, 8),
        "value": torch.ones(9, 2, 3),
        "cu_seqlens_q": offsets(0, 3, 7),
        "cu_seqlens_k": offsets(0, 4, 9),
        "dropout_p": 0.5,
    }
    arguments.update(changes)
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    positional = [arguments.pop(name) for name in names]
    return saccade.attention_varlen(*positional, **arguments)


def check_refused(call: Any, changes: dict[str, Any], error: Any, *said: str) -> None:
    """`said`: how the complaint starts, then what else it holds (what it got, what it takes)."""
    with pytest.raises(error) as caught:
        call(**changes)
    message = str(caught.value)
    assert message.startswith(said[0])
    for words in said[1:]:
        assert words in message


OFFSETS = "takes an int32 tensor [batch + 1] that starts at 0, ascends, and ends at the token count"
QUERY, KEY, VALUE = (
    "[tokens, query_heads, head_dim]",
    "[kv_tokens, kv_heads, head_dim]",
    "[kv_tokens, kv_heads, value_dim]",
)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(
    ("value", "error", "got", "takes"),
    [
        ([0, 3, 7], TypeError, "got list", OFFSETS),
        (7, TypeError, "got int", OFFSETS),
        (offsets(0, 3, 7, dtype=torch.int64), TypeError, "got torch.int64", OFFSETS),
        (torch.tensor([0.0, 3.0, 7.0]), TypeError, "got torch.float32", OFFSETS),
        (torch.tensor([False, True]), TypeError, "got torch.bool", OFFSETS),
        (offsets(0, 7)[None], ValueError, "got shape (1, 2)", OFFSETS),
        (offsets(), ValueError, "got shape (0,)", OFFSETS),
        (torch.tensor(0, dtype=torch.int32), ValueError, "got shape ()", OFFSETS),
        (offsets(0, 3, 7).to(META), ValueError, "got meta", "takes query's cpu"),
        (offsets(1, 3, 7), ValueError, "got a first offset of 1", OFFSETS),
        (offsets(-1, 3, 7), ValueError, "got a first offset of -1", OFFSETS),
        (offsets(0, 5, 3, 7), ValueError, "got offsets that descend", OFFSETS),
        (offsets(0), ValueError, "got no sequence for", OFFSETS),
        (offsets(0, 3, 10), ValueError, "got a last offset of 10", OFFSETS),
    ],
    ids=[
        "list", "int", "int64", "float", "bool", "2-dims", "empty", "0-dims", "meta", "starts-at-1",
        "starts-below-0", "descends", "no-sequence", "ends-late",
    ],
)  # fmt: skip
def test_offsets_are_refused(name, value, error, got, takes):
    check_refused(packed_call, {name: value}, error, f"{name}: ", got, takes)


def test_offsets_of_queries_must_be_given():
    check_refused(packed_call, {"cu_seqlens_q": None}, TypeError, "cu_seqlens_q: ", "None", OFFSETS)
    dense = {name: torch.ones(1, 2, 3, 4) for name in ("query", "key", "value")}
    missing = {"cu_seqlens_q": None, "cu_seqlens_k": None}
    check_refused(packed_call, dense | missing, (TypeError, ValueError), "")


def test_offsets_of_keys_are_those_of_queries_where_left_out():
    got, fewer = "got a last offset of 7 for 6 tokens", torch.ones(6, 2, 8)
    changes = {"cu_seqlens_k": None, "key": fewer, "value": fewer}
    check_refused(packed_call, changes, ValueError, "cu_seqlens_k: ", got, OFFSETS)


def test_offsets_must_count_the_same_sequences():
    changes = {"cu_seqlens_k": offsets(0, 2, 4, 9)}
    check_refused(packed_call, changes, ValueError, "cu_seqlens_k: ", "(4,)", "cu_seqlens_q's (3,)")


def test_offsets_are_also_refused_under_checked():
    with checked():
        check_refused(packed_call, {"cu_seqlens_q": offsets(1, 7)}, ValueError, "cu_seqlens_q: ")


@pytest.mark.parametrize(("name", "longest"), [("max_seqlen_q", 4), ("max_seqlen_k", 5)])
def test_longest_lengths_are_refused(name, longest):
    kind, least = "takes a whole number or None", f"takes at least the longest sequence, {longest}"
    for value in ("4", 4.0, True, torch.tensor(9)):
        check_refused(packed_call, {name: value}, TypeError, f"{name}: got {value!r}", kind)
    for value in (longest - 1, 0, -1):
        check_refused(packed_call, {name: value}, ValueError, f"{name}: got {value}", least)
    for value in (longest, 1000):
        with pytest.raises(AssertionError, match="an implementation ran"):
            packed_call(**{name: value})


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"query": None}, TypeError, ("query: ", "NoneType", QUERY)),
        ({"query": torch.ones(1, 7, 4, 8)}, ValueError, ("query: ", "(1, 7, 4, 8)", QUERY)),
        ({"query": torch.ones(7, 4, 8).int()}, TypeError, ("query: ", "int32", "takes float32")),
        ({"query": torch.ones(7, 3, 8)}, ValueError, ("key: ", "got 2 heads", "query's 3")),
        ({"key": torch.ones(9, 8)}, ValueError, ("key: ", "(9, 8)", KEY)),
        ({"key": torch.ones(9, 2, 7)}, ValueError, ("key: ", "head_dim 7", "head_dim 8")),
        ({"key": torch.ones(9, 2, 8).half()}, TypeError, ("key: ", "float16", "query's")),
        ({"key": torch.ones(8, 2, 8)}, ValueError, ("value: ", "got 9 rows", "key's 8")),
        ({"value": "v"}, TypeError, ("value: ", "got str", VALUE)),
        ({"value": torch.ones(9, 1, 3)}, ValueError, ("value: ", "got 1 heads", "key's 2")),
        ({"value": torch.ones(9, 2, 3).to(META)}, ValueError, ("value: ", "got meta", "cpu")),
        ({"scale": float("nan")}, ValueError, ("scale: ", "got nan", "0 or a number of")),
        ({"dropout_p": 1.0}, ValueError, ("dropout_p: ", "got 1.0", "[0, 1)")),
        ({"sinks": torch.ones(2)}, ValueError, ("sinks: ", "(2,)", "takes (4,)")),
        ({"sinks": torch.ones(4).int()}, TypeError, ("sinks: ", "int32", "floating-point")),
        ({"return_lse": 1}, TypeError, ("return_lse: ", "got 1", "True or False")),
        ({"deterministic": None}, TypeError, ("deterministic: ", "None", "True or False")),
        ({"mask": 5}, TypeError, ("mask: ", "got int", "a saccade Mask")),
        ({"score": 5}, TypeError, ("score: ", "got int", "a saccade Score")),
        (
            {"implementation": "x"},
            ValueError,
            ("implementation: ", "'cpu', 'hopper', 'triton'"),
        ),
        ({"config": 1}, TypeError, ("config: ", "got int", "takes a KernelConfig")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_packed_call_refuses(changes, error, said):
    check_refused(packed_call, changes, error, *said)


def test_refused_call_leaves_the_random_generator_alone():
    wrong = {"cu_seqlens_q": offsets(0, 6), "max_seqlen_k": 1, "mask": 5, "implementation": "x"}
    advanced = []
    for name, value in wrong.items():
        state = torch.get_rng_state()
        with pytest.raises((TypeError, ValueError)):
            packed_call(**{name: value})
        if not torch.equal(torch.get_rng_state(), state):
            advanced.append(name)
    assert advanced == []


TOO_SHORT = {
    "lengths": ("mask", masks.key_lengths(torch.ones(3).int()), "[batch 2]"),
    "query_ids": ("mask", masks.documents(torch.ones(2, 3).int()), "[batch 2, query_len 4]"),
    "kv_ids": (
        "mask",
        masks.documents(torch.ones(2, 4).int(), torch.ones(2, 4).int()),
        "[batch 2, kv_len 5]",
    ),
    "layout": ("mask", masks.blocks(torch.ones(2, 2).bool(), 2), "query_len 2, kv_len 3]"),
    "tensor": ("score", scores.bias(torch.ones(3, 5)), "query_len 4, kv_len 5]"),
    "slopes": ("score", scores.alibi(torch.ones(2)), "[query_heads 4]"),
}


@pytest.mark.parametrize("name", TOO_SHORT)
def test_captured_tensors_must_reach_the_longest_sequence(name):
    argument, value, takes = TOO_SHORT[name]
    got = f"{name}: got shape"
    check_refused(packed_call, {argument: value}, ValueError, f"{argument}: ", got, takes)


def test_captured_tensors_may_be_longer_than_the_longest_sequence():
    mask = masks.documents(torch.ones(2, 50).int()) & masks.blocks(torch.ones(9, 9).bool(), 2)
    with pytest.raises(AssertionError, match="an implementation ran"):
        packed_call(mask=mask, score=scores.bias(torch.ones(40, 50)))


# ---- merge ------------------------------------------------------------------------------------

OUTPUT, LSE = torch.ones(2, 4, 6, 3), torch.ones(2, 4, 6)


@pytest.mark.parametrize(
    ("outputs", "lses", "error", "said"),
    [
        (5, [LSE], TypeError, ("outputs: ", "got int", "takes")),
        (None, [LSE], TypeError, ("outputs: ", "got NoneType", "takes")),
        (torch.tensor(1.0), [LSE], (TypeError, ValueError), ("outputs: ", "got", "takes")),
        ([], [LSE], ValueError, ("outputs: ", "got no parts", "at least one")),
        ([3.0], [LSE], TypeError, ("outputs: ", "got float", "floating-point tensors")),
        ([OUTPUT.int()], [LSE], TypeError, ("outputs: ", "int32", "floating-point tensors")),
        ([OUTPUT, OUTPUT[:1]], [LSE] * 2, ValueError, ("outputs: ", "(1, 4, 6, 3)", "one shape")),
        ([OUTPUT, OUTPUT.to(META)], [LSE] * 2, ValueError, ("outputs: ", "got meta", "cpu")),
        (
            [OUTPUT, OUTPUT.double()],
            [LSE] * 2,
            (TypeError, ValueError),
            ("outputs: ", "float64", "takes"),
        ),
        ([OUTPUT[0, 0]], [LSE[0, 0]], ValueError, ("outputs: ", "(6, 3)", "takes")),
        ([OUTPUT], 5, TypeError, ("lses: ", "got int", "takes")),
        ([OUTPUT], [], ValueError, ("lses: ", "got no parts", "at least one")),
        ([OUTPUT], [2.0], TypeError, ("lses: ", "got float", "floating-point tensors")),
        ([OUTPUT], [LSE.long()], TypeError, ("lses: ", "int64", "floating-point tensors")),
        ([OUTPUT], [LSE] * 2, ValueError, ("lses: ", "got 2 parts", "each of 1 outputs")),
        ([OUTPUT] * 2, [LSE, LSE[:1]], ValueError, ("lses: ", "(1, 4, 6)", "one shape")),
        ([OUTPUT], [LSE.to(META)], ValueError, ("lses: ", "got meta", "takes cpu")),
        ([OUTPUT], [LSE[..., None]], ValueError, ("lses: ", "(2, 4, 6, 1)", "takes (2, 4, 6)")),
        ([OUTPUT], [LSE.mT], ValueError, ("lses: ", "(2, 6, 4)", "takes (2, 4, 6)")),
        ([OUTPUT[0]], [LSE[0]], ValueError, ("lses: ", "got shape (4, 6)", "takes (6, 4)")),
    ],
    ids=[
        "outputs-int", "outputs-None", "outputs-0-dims", "outputs-empty", "outputs-of-numbers",
        "outputs-int32", "outputs-shapes", "outputs-meta", "outputs-dtypes", "outputs-2-dims",
        "lses-int", "lses-empty", "lses-of-numbers", "lses-int64", "lses-count", "lses-shapes",
        "lses-meta", "lses-dims", "lses-transposed", "lses-packed",
    ],
)  # fmt: skip
def test_merge_refuses(outputs, lses, error, said):
    check_refused(saccade.merge_states, {"outputs": outputs, "lses": lses}, error, *said)


# ---- KernelConfig -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["query_tile", "kv_tile"])
@pytest.mark.parametrize("value", [-1, 1.5, 64.0, True, "64", None, torch.tensor(64)], ids=repr)
def test_config_refuses(name, value):
    takes = "takes a whole number from 0 to 2147483647"
    got = f"{name}: got {value!r}"
    check_refused(KernelConfig, {name: value}, (TypeError, ValueError), got, takes)


def test_config_is_a_value():
    assert KernelConfig(64, 128) == KernelConfig(query_tile=64, kv_tile=128)
    assert len({KernelConfig(64), KernelConfig(64), KernelConfig(0, 64)}) == 2
    with pytest.raises(AttributeError):
        KernelConfig().query_tile = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_values_that_are_not_read_leave_no_break_in_a_graph() -> None:
    """A tensor on a GPU: what decides whether its values are checked is not asked in a graph."""

    def function(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + values_readable(tensor)

    compiled: Any = torch.compile(function, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(3, dtype=torch.int32, device=META)).device == META
