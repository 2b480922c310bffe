"""Attention over pages as PyTorch's operators: schema, fakes, compilation, no gradient."""

from typing import Any

import pytest
import torch

import saccade
from saccade.ops.paged_attention.api import PAGED
from saccade.testing import make_paged_case


def flat(**description: Any) -> tuple[Any, ...]:
    """The operator's own arguments for a case."""
    inputs, variant = make_paged_case(**description).prepared()
    tables = [*variant.mask_captured.tensors, *variant.score_captured.tensors]
    ints = [*variant.mask_captured.ints, *variant.score_captured.ints]
    floats = [*variant.mask_captured.floats, *variant.score_captured.floats]
    plain = (ints, floats, variant.mask, variant.score, variant.scale, 0.0, [], False, "cpu")
    return (*inputs, tables, *plain)


CASES: list[dict[str, Any]] = [
    {},
    {"mask": "window", "score": "alibi", "sinks": True},
    {"packed": True, "lengths": ((3, 9), (1, 20)), "mask": "tree", "page_dtype": torch.int8},
]


@pytest.mark.parametrize("description", CASES, ids=str)
def test_opcheck(description):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(PAGED.op, flat(**description), test_utils=tests)


@pytest.mark.parametrize("description", CASES, ids=str)
def test_compiles_whole(description):
    case = make_paged_case(**description)
    arguments = case.arguments()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(query, key_pages):
        given = {**arguments, "query": query * 1, "key_pages": key_pages}
        return saccade.attention_paged(**given, return_lse=True)

    with torch.no_grad():
        found = call(arguments["query"], arguments["key_pages"])
    for mine, theirs in zip(found, case.run("cpu").values(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_autocast_casts_queries_and_nothing_else(implementation: str) -> None:
    lengths = ((3, 40), (3, 9))
    case = make_paged_case(mask="window", score="softcap", lengths=lengths, dtype=torch.bfloat16)
    given: dict[str, Any] = {**case.arguments(), "implementation": implementation}
    wide = {**given, "query": given["query"].float()}
    with torch.no_grad():
        wanted = saccade.attention_paged(**given, return_lse=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = saccade.attention_paged(**wide, return_lse=True)
    assert all(map(torch.equal, found, wanted))


def test_lengths_that_change_do_not_compile_anew():
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def call(query, key_pages, value_pages, page_table, kv_lens):
        return saccade.attention_paged(query, key_pages, value_pages, page_table, kv_lens)

    with torch.no_grad():
        for length in (17, 18, 30):
            # no two sizes are equal that need not be: a trace would take them for one
            case = make_paged_case(lengths=((1, length), (1, 9)), page_size=5)
            given = {name: case.arguments()[name] for name in ("query", "key_pages", "value_pages")}
            given |= {"page_table": torch.nn.functional.pad(case.table["page_table"], (0, 9))}
            given |= {"kv_lens": case.table["kv_lens"]}
            torch.testing.assert_close(call(**given), case.run("cpu")["output"])
    assert count == 1


def test_the_operator_itself_has_no_gradient():
    arguments = list(flat())
    arguments[0] = arguments[0].clone().requires_grad_()
    output, _ = PAGED.op(*arguments)
    with pytest.raises(NotImplementedError, match="gradient of attention over pages"):
        output.sum().backward()
