"""FLOPs: PyTorch's counter counts our operators as it counts its own attention."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade import masks

attention_varlen: Any = saccade.attention_varlen
attention_paged: Any = saccade.attention_paged
OFFSETS = torch.tensor([0, 5, 5, 12], dtype=torch.int32)


def counted(call, *tensors):
    """Operations of a call and of its gradients."""
    with FlopCounterMode(display=False) as counter:
        call(*tensors).sum().backward()
    return counter.get_total_flops()


def drawn(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_attention_counts_as_sdpa(causal, kv_heads):
    tensors = [drawn(2, heads, 24, 8) for heads in (4, kv_heads, kv_heads)]
    mask = masks.causal() if causal else None

    def plain(query, key, value):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=kv_heads < 4
            )

    found = counted(lambda *rows: saccade.attention(*rows, mask=mask), *tensors)
    pairs = 2 * 4 * 24 * 24
    assert found == 2 * pairs * 16 + 2 * pairs * 40
    # SDPA written out keeps the weights, so that its backward pass lacks one product of the five.
    assert found - 2 * pairs * 8 == counted(plain, *tensors)


def test_formulas_are_those_that_pytorch_has_for_its_kernels():
    from torch.utils import flop_counter

    query, key, value = (torch.empty(2, 6, rows, dim) for rows, dim in ((5, 8), (7, 8), (7, 12)))
    output = torch.empty(2, 6, 5, 12)
    inputs = (query, key, value, *[None] * 5, [])
    shapes = [tensor.shape for tensor in (query, key, value)]
    registry = flop_counter.flop_registry
    forward = registry[torch.ops.saccade.attention]
    backward = registry[torch.ops.saccade.attention_backward]
    assert forward(*inputs) == flop_counter.sdpa_flop_count(*shapes)
    assert backward(output, None, output, None, None, [], *inputs) == (
        flop_counter.sdpa_backward_flop_count(output.shape, *shapes)
    )


def test_packed_sequences_count_pairs_within_them():
    tensors = [drawn(14, heads, 8) for heads in (4, 2, 2)]  # two rows of padding
    found = counted(lambda *rows: attention_varlen(*rows, OFFSETS), *tensors)
    pairs = 4 * (5 * 5 + 7 * 7)
    assert found == 2 * pairs * 16 + 2 * pairs * 40


def test_where_offsets_have_no_values_sequences_are_taken_as_equally_long():
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        rows = [mode.from_tensor(torch.empty(12, 4, 8)) for _ in range(3)]
        attention_varlen(*rows, mode.from_tensor(OFFSETS))
    assert counter.get_total_flops() == 2 * 4 * (3 * 4 * 4) * 16


def test_pages_count_up_to_the_lengths():
    pages = torch.randn(2, 9, 2, 4, 8).unbind()
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    lens = torch.tensor([3, 10], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attention_paged(torch.randn(2, 4, 1, 8), *pages, table, lens)
    assert counter.get_total_flops() == 2 * 4 * 13 * 16
    offsets = torch.tensor([0, 2, 3], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        query = torch.randn(3, 4, 8)
        attention_paged(query, *pages, table, lens, cu_seqlens_q=offsets)
    assert counter.get_total_flops() == 2 * 4 * (2 * 3 + 1 * 10) * 16


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_counts_products_with_its_state(causal):
    tensors = [drawn(2, heads, 40, 8) for heads in (4, 2, 2)]
    found = counted(lambda *rows: saccade.linear_attention(*rows, causal=causal), *tensors)
    product, rows = 2 * 8 * 8, 2 * 40
    inside = 2 * 64 * 16 + 2 * 64 * 40 if causal else 0
    assert found == rows * (4 * (3 * product + inside) + 2 * 4 * product)


def test_a_step_counts_what_the_state_takes_in_and_gives():
    state = saccade.LinearState(torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8))
    token = [torch.randn(2, heads, 1, 8) for heads in (4, 2, 2)]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        saccade.linear_attention_step(state, *token)
    assert counter.get_total_flops() == 2 * (4 + 2) * 2 * 8 * 8


def test_compiled_calls_count_alike():
    torch.compiler.reset()
    tensors = [drawn(2, 4, 24, 8) for _ in range(3)]
    compiled = torch.compile(saccade.attention, backend="aot_eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        compiled(*tensors)
    assert counter.get_total_flops() == 2 * (2 * 4 * 24 * 24) * 16


@pytest.mark.parametrize("first", ["saccade", "torch.utils.flop_counter"])
def test_the_order_of_imports_does_not_matter(first):
    code = f"""
import torch, sys, {first}, saccade
assert ("torch.utils.flop_counter" in sys.modules) == ({first!r} != "saccade")
assert "triton" not in sys.modules or {first!r} != "saccade"
import inspect, torch.utils.flop_counter as counter
assert "class FlopCounterMode" in inspect.getsource(counter)
assert not [finder for finder in sys.meta_path if "Counter" in type(finder).__name__]
with counter.FlopCounterMode(display=False) as mode:
    saccade.attention(*torch.randn(3, 1, 2, 4, 8))
print(mode.get_total_flops())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == str(2 * 2 * 16 * 16), found.stderr
