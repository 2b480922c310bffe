"""What PyTorch users expect of the operators of linear attention: opcheck, compile, transforms."""

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
from saccade.ops.linear_attention import custom_op as linear_custom_op
from saccade.runtime.call_cache import CheckedCall
from saccade.testing import make_linear_case


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Dynamo does not trace through jaxtyping's checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch._dynamo.reset()
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def qkv(length: int = 12, heads: int = 2, dim: int = 8, dtype: Any = None) -> list[Tensor]:
    torch.manual_seed(length)
    return [torch.randn(2, heads, length, dim, dtype=dtype) for _ in range(3)]


OPERATOR_CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "everything": {"decay": "rows", "state": True, "heads": (4, 1, 2), "layout": "permuted"},
    "packed": {"packed": True, "lengths": ((5, 7), (0, 3)), "decay": "heads", "state": True},
    "padded": {"padded": True, "causal": False, "normalize": "none"},
    "bfloat16": {"dtype": torch.bfloat16},
    "empty": {"lengths": ((0, 5),)},
}


def operator_arguments(name: str, requires_grad: bool) -> tuple[Any, ...]:
    case = make_linear_case(**OPERATOR_CASES[name])
    leaves = {key: leaf.detach().nan_to_num() for key, leaf in case.leaves().items()}
    leaves = {key: leaf.requires_grad_(requires_grad) for key, leaf in leaves.items()}
    prepared = case.prepared(leaves)
    return (
        *prepared.inputs,
        *linear_custom_op.VALUES.flatten(CheckedCall(prepared.variant, None, "cpu", "cpu")),
    )


@pytest.mark.parametrize("name", list(OPERATOR_CASES))
def test_opcheck(name: str, unchecked_shapes: None) -> None:
    torch.library.opcheck(linear_custom_op.LINEAR.op, operator_arguments(name, True))
    arguments = operator_arguments(name, False)
    output, normaliser, kv, key_sum = linear_custom_op.LINEAR.op(*arguments)
    grads = [torch.randn_like(result) for result in (output, kv, key_sum)]
    torch.library.opcheck(
        linear_custom_op.LINEAR.backward_op,
        (*grads, output, normaliser, *arguments),
        test_utils=("test_schema", "test_faketensor"),
    )
    if "packed" not in name and arguments[0].shape[2] == arguments[1].shape[2]:
        torch.library.opcheck(
            linear_custom_op.linear_step_op,
            (kv, key_sum, None, *arguments[:5], None, None, None, None, *arguments[9:]),
            test_utils=("test_schema", "test_faketensor"),
        )


class TestTransforms:
    @pytest.mark.parametrize(
        ("implementation", "decay"),
        [
            *(("cpu", decay) for decay in ("none", "heads", "rows")),
            ("reference", "rows"),
            # The graph of the reference takes a quarter of a minute, and that of rows holds these.
            pytest.param("reference", "none", marks=pytest.mark.slow),
            pytest.param("reference", "heads", marks=pytest.mark.slow),
        ],
    )
    def test_fullgraph_with_dynamic_shapes(
        self, implementation: str, decay: str, unchecked_shapes: None
    ) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            decays = {
                "none": None,
                "heads": -(value[0, :, 0, 0] ** 2),
                "rows": -(value[..., 0] ** 2),
            }
            return saccade.linear_attention(
                query * 2, key, value, decay=decays[decay], implementation=implementation
            )

        # The reference's graph is of PyTorch's own operations, which need no second tracing.
        counter = CompileCounterWithBackend("aot_eager" if implementation == "cpu" else "eager")
        compiled: Any = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
        for length in (12, 31, 20):
            results = []
            for way in (compiled, function):
                leaves = [rows.requires_grad_() for rows in qkv(length)]
                output = way(*leaves)
                results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
            torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)
        assert counter.frame_count <= 2

    def test_packed_compiles(self, unchecked_shapes: None) -> None:
        offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
        rows = [tensor[0].transpose(0, 1) for tensor in qkv()]

        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return saccade.linear_attention_varlen(query, key, value, offsets)

        compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*rows), function(*rows))

    def test_func_grad_and_vmap(self) -> None:
        def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return saccade.linear_attention(query[None], key[None], value[None]).square().sum()

        tensors = qkv()
        found = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*tensors)
        for index in range(2):
            leaves = [tensor[index].requires_grad_() for tensor in tensors]
            alone = torch.autograd.grad(loss(*leaves), leaves)
            torch.testing.assert_close([tensor[index] for tensor in found], list(alone))

    def test_higher_derivatives_say_how(self) -> None:
        tensors = [rows.requires_grad_() for rows in qkv(5)]
        output = saccade.linear_attention(*tensors)
        (grad,) = torch.autograd.grad(output.square().sum(), tensors[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match='implementation="reference"'):
            grad.sum().backward()
        query, key, value = qkv(5)
        with pytest.raises(NotImplementedError, match='implementation="reference"'):
            torch.func.jvp(lambda q: saccade.linear_attention(q, key, value), (query,), (query,))

    def test_checkpointing(self) -> None:
        leaves = [rows.requires_grad_() for rows in qkv()]
        output = checkpoint(saccade.linear_attention, *leaves, use_reentrant=False)
        assert isinstance(output, Tensor)
        again = saccade.linear_attention(*leaves)
        found, wanted = (torch.autograd.grad(o.square().sum(), leaves) for o in (output, again))
        torch.testing.assert_close(found, wanted)

    @pytest.mark.parametrize("implementation", ["cpu", "reference"])
    def test_autocast_casts_inputs_and_nothing_else(self, implementation: str) -> None:
        leaves = [rows.requires_grad_() for rows in qkv()]
        arguments: dict[str, Any] = {"return_state": True, "implementation": implementation}
        call: Any = saccade.linear_attention
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, state = call(*leaves, **arguments)
        cast = (rows.bfloat16() for rows in leaves)
        wanted, last = call(*cast, **arguments)
        assert torch.equal(output, wanted) and torch.equal(state.kv, last.kv)
        assert output.dtype == torch.bfloat16 and state.kv.dtype == torch.float32

    def test_meta_tensors_have_shapes(self) -> None:
        meta: Any = [rows.to("meta") for rows in qkv()]
        output, state = saccade.linear_attention(*meta, return_state=True)
        assert (output.device.type, output.shape) == ("meta", (2, 2, 12, 8))
        assert state.kv.shape == (2, 2, 8, 8)
