"""Formulas for PyTorch's FlopCounterMode: the operations of each of our operators.

They count products as PyTorch counts those of its own attention: hidden pairs of a sequence count
like visible ones, so that numbers can be compared (`saccade.explain` gives the visible ones). Of
packed sequences and of pages, only pairs within a sequence count. To know them, lengths are read,
from a GPU too, as PyTorch's formulas do; where they have no values (fake tensors), all sequences
count as equally long, or as long as their page tables. Linear attention and the gated delta rule
count chunks of 64 rows.

The counter's module imports Triton, so formulas are registered once another program imports it.
"""

from __future__ import annotations

import importlib.util
import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from saccade.ops.attention.api import ATTENTION
from saccade.ops.attention_fp8.custom_op import ATTENTION_FP8
from saccade.ops.delta_rule import custom_op as delta_op
from saccade.ops.delta_rule import validation as delta_validation
from saccade.ops.linear_attention.custom_op import LINEAR
from saccade.ops.linear_attention.validation import problem_of
from saccade.ops.paged_attention.api import PAGED

COUNTER = "torch.utils.flop_counter"


def attention_flops(*arguments: Any, out_val: Any = None) -> int:
    """Scores and weighted values: two products."""
    inputs = ATTENTION.split(arguments).inputs
    pairs = _pairs(inputs.query, inputs.key, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return 2 * pairs * (inputs.query.shape[-1] + inputs.value.shape[-1])


def attention_backward_flops(*arguments: Any, out_val: Any = None) -> int:
    """Scores again, gradients of weights, values, queries and keys: five products."""
    inputs = ATTENTION.split(arguments[6:]).inputs
    pairs = _pairs(inputs.query, inputs.key, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return 2 * pairs * (3 * inputs.query.shape[-1] + 2 * inputs.value.shape[-1])


def fp8_flops(*arguments: Any, out_val: Any = None) -> int:
    """Scores and weighted values, whatever the numbers are made of."""
    inputs = ATTENTION_FP8.split(arguments).inputs
    pairs = _pairs(inputs.query, inputs.key, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return 2 * pairs * (inputs.query.shape[-1] + inputs.value.shape[-1])


def paged_flops(*arguments: Any, out_val: Any = None) -> int:
    """Two products for each pair of a query and a key in its sequence's pages."""
    inputs = PAGED.split(arguments).inputs
    slots = inputs.page_table.shape[1] * inputs.page_size
    kv_lens = _numbers(inputs.kv_lens) or [slots] * inputs.batch
    if inputs.cu_seqlens_q is None:
        pairs = inputs.query.shape[2] * sum(kv_lens)
    else:
        query_lens = _sequence_lengths(inputs.cu_seqlens_q, inputs.query.shape[0])
        pairs = sum(map(operator.mul, query_lens, kv_lens))
    channels = inputs.query.shape[-1] + inputs.value_pages.shape[-1]
    return 2 * inputs.query.shape[1] * int(pairs) * channels


def linear_flops(*arguments: Any, out_val: Any = None) -> int:
    """Products with the state and within chunks; see `LinearProblem.flops`."""
    inputs, tables, plain = LINEAR.split(arguments)
    return problem_of(inputs, LINEAR.variant_of(tables, plain), None).flops


def linear_backward_flops(*arguments: Any, out_val: Any = None) -> int:
    """The gradients' products; see `LinearProblem.backward_flops`."""
    inputs, tables, plain = LINEAR.split(arguments[5:])
    return problem_of(inputs, LINEAR.variant_of(tables, plain), None).backward_flops


def step_flops(*arguments: Any, out_val: Any = None) -> int:
    """A state takes each key in, and each query row reads it."""
    inputs = LINEAR.split(arguments[3:]).inputs
    batch, _, rows, dim = inputs.query.shape
    heads = inputs.heads + inputs.state_heads
    return 2 * batch * rows * heads * dim * inputs.value.shape[-1]


def delta_flops(*arguments: Any, out_val: Any = None) -> int:
    """Products with the state and within chunks; see `DeltaProblem.flops`."""
    inputs, tables, plain = delta_op.DELTA.split(arguments)
    return delta_validation.problem_of(inputs, delta_op.DELTA.variant_of(tables, plain), None).flops


def delta_backward_flops(*arguments: Any, out_val: Any = None) -> int:
    """The gradients' products; see `DeltaProblem.backward_flops`."""
    inputs, tables, plain = delta_op.DELTA.split(arguments[2:])
    variant = delta_op.DELTA.variant_of(tables, plain)
    return delta_validation.problem_of(inputs, variant, None).backward_flops


def delta_step_flops(*arguments: Any, out_val: Any = None) -> int:
    """A state is asked for a key's value, takes in what it lacks, and each query reads it."""
    inputs = delta_op.DELTA.split(arguments[2:]).inputs
    batch, heads, rows, value_dim = inputs.value.shape
    return 2 * batch * rows * heads * 3 * inputs.query.shape[-1] * value_dim


FORMULAS: dict[str, Callable[..., int]] = {
    "attention": attention_flops,
    "attention_backward": attention_backward_flops,
    "attention_fp8": fp8_flops,
    "attention_paged": paged_flops,
    "gated_delta_rule": delta_flops,
    "gated_delta_rule_backward": delta_backward_flops,
    "gated_delta_rule_step": delta_step_flops,
    "linear_attention": linear_flops,
    "linear_attention_backward": linear_backward_flops,
    "linear_attention_step": step_flops,
}


def _pairs(query: Tensor, key: Tensor, offsets_q: Tensor | None, offsets_k: Tensor | None) -> int:
    """Pairs of a query row and a key row of one sequence, over all heads."""
    if offsets_q is None or offsets_k is None:
        batch, heads, query_len = query.shape[:3]
        return batch * heads * query_len * key.shape[2]
    query_lens = _sequence_lengths(offsets_q, query.shape[0])
    kv_lens = _sequence_lengths(offsets_k, key.shape[0])
    return query.shape[1] * int(sum(map(operator.mul, query_lens, kv_lens)))


def _sequence_lengths(offsets: Tensor, tokens: int) -> Sequence[float]:
    """The lengths of packed sequences; equal parts of the tokens where they have no values."""
    known, sequences = _numbers(offsets), offsets.shape[0] - 1
    if known is None:
        return [tokens / max(sequences, 1)] * sequences
    return [end - start for start, end in itertools.pairwise(known)]


def _numbers(tensor: Tensor) -> list[int] | None:
    """The values of a tensor, read from a GPU too; None where it has none."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta:
        return None
    return tensor.tolist()


# ---- registering ------------------------------------------------------------------------------


def register_formulas() -> None:
    """Make the formulas known to PyTorch's counter, now or when its module is imported."""
    if COUNTER in sys.modules:
        add_formulas(sys.modules[COUNTER])
    elif not any(isinstance(finder, _CounterFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CounterFinder())


def add_formulas(counter: ModuleType) -> None:
    """Add the formulas to the registry in PyTorch's module."""
    for name, formula in FORMULAS.items():
        operator = getattr(torch.ops.saccade, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)


class _CounterFinder(MetaPathFinder):
    """Adds the formulas once the counter's module is imported, and then is gone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _CounterLoader(spec.loader)
        return spec


class _CounterLoader(Loader):
    """The loader that PyTorch's module has, and then the formulas."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        add_formulas(module)

    def __getattr__(self, name: str) -> Any:  # what inspect and tracebacks ask a loader for
        return getattr(self.loader, name)
