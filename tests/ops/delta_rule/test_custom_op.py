"""What PyTorch users expect of the gated delta rule's operators: opcheck, compile, transforms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import saccade
from saccade.ops.delta_rule import custom_op
from saccade.runtime.call_cache import CheckedCall
from saccade.testing import make_delta_case

rule: Any = saccade.gated_delta_rule


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Dynamo does not trace through jaxtyping's checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch._dynamo.reset()
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def tensors(length: int = 12) -> list[Tensor]:
    """Query, key, value and beta."""
    torch.manual_seed(length)
    query, key = torch.randn(2, 2, 2, length, 8)
    return [query, key / 3, torch.randn(2, 4, length, 8), torch.rand(2, 4, length)]


OPERATOR_CASES: dict[str, dict[str, Any]] = {
    "dense": {"heads": (2, 2), "lengths": (9,)},
    "everything": {
        "decay": "channels", "state": True, "layout": "permuted", "normalize_qk": True,
    },
    "packed": {"packed": True, "lengths": (5, 0, 3), "decay": "heads", "dtype": torch.bfloat16},
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATOR_CASES)
def test_opcheck(name: str, unchecked_shapes: None) -> None:
    case = make_delta_case(**OPERATOR_CASES[name])

    def arguments(requires_grad: bool) -> tuple[Any, ...]:
        leaves = {key: leaf.detach() for key, leaf in case.leaves().items()}
        leaves = {key: leaf.requires_grad_(requires_grad) for key, leaf in leaves.items()}
        inputs, variant = case.prepared(leaves)[:2]
        return (*inputs, *custom_op.VALUES.flatten(CheckedCall(variant, None, "cpu", "cpu")))

    torch.library.opcheck(custom_op.DELTA.op, arguments(True))
    plain = arguments(False)
    output, state = custom_op.DELTA.op(*plain)
    grads = torch.randn_like(output), torch.randn_like(state)
    partly: dict[str, Any] = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(custom_op.DELTA.backward_op, (*grads, *plain), **partly)
    if "packed" not in name:
        stepped = (state, None, *plain[:5], None, None, *plain[7:])
        torch.library.opcheck(custom_op.delta_step_op, stepped, **partly)


class TestTransforms:
    def test_fullgraph_with_dynamic_shapes(self, unchecked_shapes: None) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> Tensor:
            decay = -(value[..., 0] ** 2)
            return rule(query * 2, key, value, beta, decay=decay, normalize_qk=True)

        counter = CompileCounterWithBackend("aot_eager")
        compiled: Any = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
        for length in (12, 31, 20):
            results = []
            for way in (compiled, function):
                leaves = [rows.requires_grad_() for rows in tensors(length)]
                output = way(*leaves)
                results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
            torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)
        assert counter.frame_count <= 2

    def test_packed_calls_and_steps_compile(self, unchecked_shapes: None) -> None:
        offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
        rows = [each[0].transpose(0, 1) for each in tensors()]
        packed: Any = saccade.gated_delta_rule_varlen

        def function(state: Tensor, token: list[Tensor], *rows: Tensor) -> Any:
            output = packed(*rows, offsets)
            return output, saccade.gated_delta_rule_step(state, *token)

        compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
        token, states = [each[:, :, :1] for each in tensors()], torch.zeros(2, 2, 4, 8, 8).unbind()
        ways = zip((compiled, function), states, strict=True)
        found = [way(state, token, *rows) for way, state in ways]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*states)

    def test_func_grad_and_vmap(self) -> None:
        def loss(*given: Tensor) -> Tensor:
            return rule(*(each[None] for each in given)).square().sum()

        given = tensors()
        found = torch.func.vmap(torch.func.grad(loss, (0, 1, 2, 3)))(*given)
        for index in range(2):
            leaves = [each[index].requires_grad_() for each in given]
            alone = torch.autograd.grad(loss(*leaves), leaves)
            torch.testing.assert_close([each[index] for each in found], list(alone))

    def test_a_step_refuses_vmap(self) -> None:
        with pytest.raises(NotImplementedError, match="got tensors under vmap"):
            torch.func.vmap(
                lambda state, *token: saccade.gated_delta_rule_step(state[None], *token)
            )(torch.zeros(2, 4, 8, 8), *(each[:, None, :, :1] for each in tensors()))

    def test_higher_derivatives_say_how(self) -> None:
        leaves = [rows.requires_grad_() for rows in tensors(5)]
        output = rule(*leaves)
        (grad,) = torch.autograd.grad(output.square().sum(), leaves[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match='implementation="reference"'):
            grad.sum().backward()
        query, *others = tensors(5)
        with pytest.raises(NotImplementedError, match='implementation="reference"'):
            torch.func.jvp(lambda rows: rule(rows, *others), (query,), (query,))

    def test_checkpointing(self) -> None:
        leaves = [rows.requires_grad_() for rows in tensors()]
        outputs = checkpoint(rule, *leaves, use_reentrant=False), rule(*leaves)
        found, wanted = (torch.autograd.grad(each.square().sum(), leaves) for each in outputs)
        torch.testing.assert_close(found, wanted)

    @pytest.mark.parametrize("implementation", ["cpu", "reference"])
    def test_autocast_casts_queries_keys_and_values(self, implementation: str) -> None:
        """Beta, decay and states stay as they are."""
        leaves = [rows.requires_grad_() for rows in tensors()]
        more = {"decay": -torch.rand(2, 4, 12), "return_state": True}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, state = rule(*leaves, **more, implementation=implementation)
        narrow = [rows.bfloat16() for rows in leaves[:3]]
        wanted, last = rule(*narrow, leaves[3], **more, implementation=implementation)
        assert torch.equal(output, wanted) and torch.equal(state, last)
        assert output.dtype == torch.bfloat16 and state.dtype == torch.float32

    def test_meta_tensors_have_shapes(self) -> None:
        output, state = rule(*(rows.to("meta") for rows in tensors()), return_state=True)
        assert (output.device.type, output.shape) == ("meta", (2, 4, 12, 8))
        assert state.shape == (2, 4, 8, 8)
