"""What PyTorch users expect of an operator: opcheck, compile, transforms, checkpoints, autocast."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import saccade
from saccade import masks, scores
from saccade.ops.attention import api as attention_custom_op
from saccade.ops.attention.cpu import host as cpu_host
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.validation import prepare
from saccade.testing import Case, Description, make_case
from saccade.testing.cases import padded


@pytest.fixture(autouse=True)
def _unchecked_shapes() -> Iterator[None]:
    """Dynamo does not trace through jaxtyping's checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch._dynamo.reset()
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def inputs_are_half(case: Case) -> bool:
    """Whether a case has float16 inputs, which stands for calls with every result."""
    return case.tensors["query"].dtype == torch.float16


def op_arguments(case: Case, requires_grad: bool = True) -> tuple[Any, ...]:
    """What the operator itself is called with for a case."""
    leaves = case.leaves()
    if not requires_grad:
        leaves = {name: leaf.detach() for name, leaf in leaves.items()}
    positional, keywords = case.arguments(leaves)
    everything: list[Any] = padded(positional)
    torch.manual_seed(0)
    inputs, variant, _, config = prepare(
        *everything, return_lse=True, return_max_logit=inputs_are_half(case), deterministic=False,
        config=None, **keywords,
    )  # fmt: skip
    checked = CheckedCall(variant, config, "cpu", "cpu").differentiated(inputs.query.dtype)
    tables, plain = list(checked.tables), attention_custom_op.flatten(checked, False)
    tables = [t.detach().requires_grad_(t.requires_grad and requires_grad) for t in tables]
    return (*inputs, tables, *plain)


OPERATOR_CASES = {
    "dense": Description(mask="causal"),
    "packed": Description(packed=True, lengths=((5, 7), (0, 3), (9, 4)), mask="window"),
    "everything": Description(mask="mixed", score="bias >> softcap", sinks=True, dropout_p=0.2),
    "bfloat16": Description(dtype=torch.bfloat16, mask="documents"),
    "float16": Description(dtype=torch.float16),
    "empty": Description(lengths=((0, 5),), sinks=True),
}


@pytest.mark.parametrize("name", list(OPERATOR_CASES))
def test_opcheck_forward(name: str) -> None:
    arguments = op_arguments(make_case(OPERATOR_CASES[name]))
    torch.library.opcheck(torch.ops.saccade.attention.default, arguments)


@pytest.mark.parametrize("name", list(OPERATOR_CASES))
def test_opcheck_backward(name: str) -> None:
    arguments = op_arguments(make_case(OPERATOR_CASES[name]), requires_grad=False)
    output, lse, residual, max_logit = torch.ops.saccade.attention.default(*arguments)
    assert (residual.shape == output.shape) == (output.dtype.itemsize == 2)
    assert bool(max_logit.numel()) == (output.dtype == torch.float16)
    wanted = [len(arguments[8]) - 1] if "bias" in OPERATOR_CASES[name].score else []
    grads = (torch.randn_like(output), torch.randn_like(lse), output, lse)
    grads = (*grads, residual if residual.numel() else None, wanted)
    torch.library.opcheck(
        torch.ops.saccade.attention_backward.default,
        (*grads, *arguments),
        test_utils=("test_schema", "test_faketensor"),
    )


def run(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """The function's value and its gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def assert_alike(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def qkv(length: int, batch: int = 2, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(length)
    return [torch.randn(batch, h, length, 16) for h in (heads, kv_heads, kv_heads)]


class TestCompile:
    @pytest.mark.parametrize(
        "implementation", ["cpu", pytest.param("reference", marks=pytest.mark.slow)]
    )
    def test_fullgraph_with_dynamic_shapes(self, implementation: str) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mask = masks.causal() & masks.window(9, 2)
            return saccade.attention(
                query * 2, key, value, mask=mask, score=scores.softcap(3.0),
                implementation=implementation,
            )  # fmt: skip

        counter = CompileCounterWithBackend("aot_eager")
        compiled: Any = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
        for length in (12, 31, 64, 50):
            assert_alike(run(compiled, *qkv(length)), run(function, *qkv(length)))
        assert counter.frame_count <= 2  # with and without a need for gradients at most

    def test_nothing_compiles_anew_when_a_captured_value_changes(self) -> None:
        def function(
            query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, bias: Tensor, left: int
        ) -> Tensor:
            mask = masks.key_lengths(lengths) & masks.window(left)
            return saccade.attention(query, key, value, mask=mask, score=scores.bias(bias))

        counter = CompileCounterWithBackend("aot_eager")
        compiled: Any = torch.compile(function, fullgraph=True, backend=counter)
        tensors = qkv(16)
        compiled(*tensors, torch.tensor([3, 9]), torch.randn(16, 16), 4)
        compiled(*tensors, torch.tensor([3, 9]), torch.randn(16, 16), 5)  # int becomes dynamic
        before = counter.frame_count
        for seed in range(4):
            torch.manual_seed(seed)
            lengths, bias = torch.randint(0, 16, (2,)), torch.randn(16, 16)
            arguments: list[Any] = [*tensors, lengths, bias, 6 + seed]
            torch.testing.assert_close(compiled(*arguments), function(*arguments))
        assert counter.frame_count == before

    def test_packed(self) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return saccade.attention_varlen(query, key, value, offsets, mask=masks.causal())

        offsets = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
        tensors = [torch.randn(12, heads, 8) for heads in (4, 2, 2)]
        compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_alike(run(compiled, *tensors), run(function, *tensors))

    def test_dropout_and_sinks(self) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
            return saccade.attention(query, key, value, sinks=sinks, dropout_p=0.4)

        tensors = [*qkv(20), torch.randn(4)]
        compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.manual_seed(3)
        expected = run(function, *tensors)
        torch.manual_seed(3)
        assert_alike(run(compiled, *tensors), expected)

    @pytest.mark.slow  # a C++ compiler's minute; transformers' models are compiled so in every run
    @pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor on a CPU needs a compiler")
    @torch._inductor.config.patch(fx_graph_cache=False)  # the cache does not know operators' code
    def test_inductor(self) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output = saccade.attention(query.sin(), key, value, mask=masks.causal())
            return output.transpose(1, 2).flatten(2).cos()

        compiled: Any = torch.compile(function, fullgraph=True)
        assert_alike(run(compiled, *qkv(33)), run(function, *qkv(33)))


class TestTransforms:
    def test_grad(self) -> None:
        def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return saccade.attention(query, key, value, mask=masks.causal()).square().sum()

        tensors = qkv(11)
        found = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
        leaves = [tensor.requires_grad_() for tensor in tensors]
        assert_alike(list(found), list(torch.autograd.grad(loss(*leaves), leaves)))

    @pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, 2)])
    def test_vmap(self, in_dims: tuple[int | None, ...]) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return saccade.attention(query, key, value, mask=masks.window(4))

        tensors = qkv(9)
        mapped = [
            t if dim is None else torch.stack([t, t * 0.5, -t], dim=dim)
            for t, dim in zip(tensors, in_dims, strict=True)
        ]
        found = torch.func.vmap(function, in_dims=in_dims)(*mapped)
        for index in range(3):
            single = [
                m if dim is None else m.select(dim, index)
                for m, dim in zip(mapped, in_dims, strict=True)
            ]
            torch.testing.assert_close(found[index], function(*single))

    def test_vmap_over_a_bias(self) -> None:
        def function(bias: Tensor) -> Tensor:
            return saccade.attention(*tensors, score=scores.bias(bias), sinks=torch.zeros(4))

        tensors, biases = qkv(9), torch.randn(3, 9, 9)
        expected = torch.stack([function(bias) for bias in biases])
        torch.testing.assert_close(torch.func.vmap(function)(biases), expected)

    def test_gradients_for_each_sample(self) -> None:
        def loss(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
            score = scores.bias(bias)
            output = saccade.attention(query[None], key[None], value[None], score=score)
            return output.square().sum()

        query, key, value = qkv(7, batch=3)
        bias = torch.randn(7, 7)
        argnums = (0, 1, 3)
        per_sample = torch.func.vmap(torch.func.grad(loss, argnums), in_dims=(0, 0, 0, None))
        found = per_sample(query, key, value, bias)
        for index in range(3):
            alone = torch.func.grad(loss, argnums)(query[index], key[index], value[index], bias)
            assert_alike([tensor[index] for tensor in found], list(alone))

    def test_vmap_of_the_registered_operator(self) -> None:
        arguments = op_arguments(make_case(mask="causal"), requires_grad=False)
        queries = torch.stack([arguments[0], arguments[0] * 2])
        call = torch.ops.saccade.attention.default
        results = torch.func.vmap(lambda query: call(query, *arguments[1:]))(queries)
        for index in range(2):
            alone = call(queries[index], *arguments[1:])
            torch.testing.assert_close(tuple(each[index] for each in results), alone)


class TestHigherDerivatives:
    def test_double_backward_says_how(self) -> None:
        query, key, value = (tensor.requires_grad_() for tensor in qkv(6))
        output = saccade.attention(query, key, value)
        (grad,) = torch.autograd.grad(output.square().sum(), [query], create_graph=True)
        with pytest.raises(NotImplementedError, match='implementation="reference"'):
            grad.sum().backward()

    @pytest.mark.parametrize("way", ["torch.func", "dual numbers"])
    def test_forward_mode_says_how(self, way: str) -> None:
        query, key, value = qkv(6)
        with pytest.raises(NotImplementedError, match='implementation="reference"'):
            if way == "torch.func":
                torch.func.jvp(lambda q: saccade.attention(q, key, value), (query,), (query,))
            else:
                with torch.autograd.forward_ad.dual_level():
                    dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
                    saccade.attention(dual, key, value)

    def test_the_reference_differentiates_to_any_order(self) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return saccade.attention(
                query, key, value, mask=masks.causal(), score=scores.softcap(2.0),
                implementation="reference",
            )  # fmt: skip

        tensors = [t.double().requires_grad_() for t in qkv(4, batch=1, heads=2, kv_heads=1)]
        assert torch.autograd.gradgradcheck(function, tensors)
        assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True)

    def test_gradcheck_on_cpu(self) -> None:
        def function(
            query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor
        ) -> tuple[Tensor, Tensor]:
            score = scores.bias(bias) >> scores.softcap(2.0)
            mask = masks.causal()
            return saccade.attention(
                query, key, value, mask=mask, score=score, sinks=sinks, return_lse=True
            )

        tensors = [t.double() for t in qkv(5, batch=1, heads=2, kv_heads=1)]
        tensors += [torch.randn(2, 1, 5, dtype=torch.float64), torch.randn(2).double()]
        assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in tensors])


class TestTraining:
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_activation_checkpointing(self, use_reentrant: bool) -> None:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return saccade.attention(query, key, value, dropout_p=0.5)

        def checkpointed(*tensors: Tensor) -> Tensor:
            return checkpoint(function, *tensors, use_reentrant=use_reentrant)

        torch.manual_seed(5)
        leaves = [tensor.requires_grad_() for tensor in qkv(16)]
        results = []
        for way in (function, checkpointed):
            torch.manual_seed(5)
            output = way(*leaves)
            output.square().sum().backward()
            results.append([output.detach(), *(leaf.grad for leaf in leaves)])
            for leaf in leaves:
                leaf.grad = None
        assert_alike(*results)

    def test_autocast(self) -> None:
        tensors = qkv(16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = saccade.attention(*tensors)
            wide = saccade.attention(*(tensor.double() for tensor in tensors))
        assert output.dtype == torch.bfloat16
        assert wide.dtype == torch.float64
        expected = saccade.attention(*(tensor.bfloat16() for tensor in tensors))
        assert torch.equal(output, expected)

    @pytest.mark.parametrize("implementation", ["cpu", "reference"])
    @pytest.mark.parametrize("mask", [masks.causal(), masks.window(3)], ids=["causal", "window"])
    @pytest.mark.parametrize("score", [None, scores.softcap(2.0)], ids=["plain", "softcap"])
    def test_autocast_casts_inputs_and_nothing_else(self, implementation, mask, score) -> None:
        leaves = [rows.requires_grad_() for rows in qkv(16)]
        options = {"mask": mask, "score": score, "implementation": implementation}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = saccade.attention(*leaves, **options)
            gradients = torch.autograd.grad(output.square().sum(), leaves)
        cast = [rows.bfloat16() for rows in leaves]
        wanted = saccade.attention(*cast, **options)
        assert torch.equal(output, wanted)
        if implementation == "cpu":  # PyTorch differentiates the reference, under what is on then
            wanted = torch.autograd.grad(wanted.square().sum(), leaves)
            assert all(map(torch.equal, gradients, wanted))

    def test_autocast_mixed_inputs(self) -> None:
        query, key, value = qkv(16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = saccade.attention(query.bfloat16(), key, value)
        assert output.dtype == torch.bfloat16

    def test_dropout_follows_the_generator(self) -> None:
        tensors = qkv(16)
        torch.manual_seed(1)
        first, second = (saccade.attention(*tensors, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(saccade.attention(*tensors, dropout_p=0.5), first)
        assert not torch.equal(first, second)

    def test_no_dropout_draws_nothing(self) -> None:
        before = torch.get_rng_state()
        saccade.attention(*qkv(8))
        qkv(8)
        torch.set_rng_state(before)
        saccade.attention(*qkv(8))

    def test_deterministic_algorithms_flag(self) -> None:
        case = make_case(mask="window", score="bias", lengths=((200, 200),))
        torch.use_deterministic_algorithms(True)
        try:
            runs = [case.run("cpu") for _ in range(2)]
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])

    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    def test_deterministic_algorithms_flag_holds_for_calls_that_were_kept_without_it(
        self, packed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[bool] = []
        backward = cpu_host.backward

        def noted(*arguments: Any) -> Any:
            asked.append(arguments[-1])
            return backward(*arguments)

        monkeypatch.setattr(cpu_host, "backward", noted)
        case = make_case(mask="causal", packed=packed)
        for enabled in (False, True, False, True):
            torch.use_deterministic_algorithms(enabled)
            try:
                case.run("cpu")
            finally:
                torch.use_deterministic_algorithms(False)
        assert asked == [False, True, False, True]
