"""Linear cases: random problems of linear attention, made from a short description."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.ops.linear_attention import reference
from saccade.ops.linear_attention.api import linear_attention, linear_attention_varlen
from saccade.ops.linear_attention.validation import Prepared, prepare
from saccade.runtime.spec import LinearState, accumulate_dtype
from saccade.testing.cases import laid_out, like_strided

DECAYS = ("none", "heads", "rows")


@dataclass(frozen=True)
class LinearDescription:
    """All that a linear case is made from.

    `lengths` are (query, key) lengths: one pair a sequence; a dense case uses the first. `heads`
    are those of query, key and value. `padded`: key lengths are drawn, and what lies behind them
    is NaN.
    """

    batch: int = 2
    heads: tuple[int, int, int] = (2, 2, 2)
    lengths: tuple[tuple[int, int], ...] = ((24, 24),)
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    packed: bool = False
    causal: bool = True
    align: str = "bottom_right"
    feature_map: str = "elu+1"
    normalize: str = "sum"
    eps: float = 1e-3
    scale: float = 1.0
    decay: str = "none"
    state: bool = False
    padded: bool = False
    layout: str = "contiguous"
    seed: int = 0
    device: str = "cpu"

    @property
    def state_heads(self) -> int:
        """Heads of the state."""
        return max(self.heads[1:])

    @property
    def rows(self) -> tuple[int, int]:
        """Query rows and key rows, of all sequences if packed."""
        used = self.lengths if self.packed else self.lengths[:1]
        return sum(q for q, _ in used), sum(k for _, k in used)


@dataclass
class LinearCase:
    """A random problem: tensors that can have gradients, and everything else of the call."""

    description: LinearDescription
    tensors: dict[str, Tensor]  # query, key, value; decay, kv and key_sum where the case has them
    key_lengths: Tensor | None
    cu_seqlens: tuple[Tensor, Tensor] | None
    grads: dict[str, Tensor] = field(default_factory=dict)  # of output, last kv, last key_sum

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Fresh copies that record gradients, with the same strides, in another dtype if given."""
        return {
            name: like_strided(tensor, dtype or tensor.dtype).requires_grad_()
            for name, tensor in self.tensors.items()
        }

    def arguments(self, leaves: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
        """Positional and keyword arguments of the public call."""
        d = self.description
        keywords: dict[str, Any] = {
            name: getattr(d, name)
            for name in ("causal", "align", "feature_map", "normalize", "eps", "scale")
        }
        if d.state:
            keywords["initial_state"] = LinearState(leaves["kv"], leaves["key_sum"])
        if self.key_lengths is not None:
            keywords["key_lengths"] = self.key_lengths
        keywords["decay"] = leaves.get("decay")
        positional = [leaves["query"], leaves["key"], leaves["value"], *(self.cu_seqlens or ())]
        return positional, keywords

    def call(self, leaves: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
        """Output and last state by the public call."""
        positional, keywords = self.arguments(leaves)
        function: Any = linear_attention_varlen if self.cu_seqlens else linear_attention
        output, state = function(*positional, return_state=True, **keywords, **more)
        return {"output": output, "kv": state.kv, "key_sum": state.key_sum}

    def run(
        self, implementation: str, dtype: torch.dtype | None = None, **more: Any
    ) -> dict[str, Tensor]:
        """Output, last state and every gradient, by name."""
        leaves = self.leaves(dtype)
        return self.with_gradients(leaves, self.call(leaves, implementation=implementation, **more))

    def prepared(self, leaves: dict[str, Tensor]) -> Prepared:
        """The checked call."""
        positional, keywords = self.arguments(leaves)
        return prepare(*positional, return_state=True, **keywords)

    def run_plain(self) -> dict[str, Tensor]:
        """The same in plain PyTorch with every step in the case's own dtype: the yardstick."""
        leaves = self.leaves()
        prepared = self.prepared(leaves)
        found = reference.attention(*prepared[:2], sums=self.description.dtype)
        results = {"output": found.output, "kv": found.kv, "key_sum": found.key_sum}
        return self.with_gradients(leaves, results)

    def with_gradients(
        self, leaves: dict[str, Tensor], results: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Results beside the gradients that the case's gradients of them give."""
        grads = [self.grads[name].to(result.dtype) for name, result in results.items()]
        outputs, inputs = list(results.values()), list(leaves.values())
        found = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
        every = {name: result.detach() for name, result in results.items()}
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            every[f"grad_{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
        return every


def make_linear_case(description: LinearDescription | None = None, **changes: Any) -> LinearCase:
    """A linear case from its description (or from keyword arguments that make one)."""
    d = description or LinearDescription(**changes)
    generator = torch.Generator().manual_seed(d.seed)

    def normal(*shape: int, dtype: torch.dtype = d.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(d.device, dtype)

    rows_q, rows_k = d.rows
    batches = () if d.packed else (d.batch,)
    sequences = len(d.lengths) if d.packed else d.batch
    shapes = {
        "query": (d.heads[0], rows_q, d.head_dim),
        "key": (d.heads[1], rows_k, d.head_dim),
        "value": (d.heads[2], rows_k, d.value_dim),
    }
    tensors = {
        name: laid_out(normal, (*batches, *shape), d.layout, d.packed)
        for name, shape in shapes.items()
    }
    wide = accumulate_dtype(d.dtype)
    if d.decay != "none":
        shape = (d.state_heads,)
        if d.decay == "rows":
            shape = (rows_k, *shape) if d.packed else (*batches, *shape, rows_k)
        tensors["decay"] = -normal(*shape, dtype=wide).abs() / 8
    states = (sequences, d.state_heads, d.head_dim)
    if d.state:  # as if keys with positive features had come before
        tensors["kv"] = normal(*states, d.value_dim, dtype=wide)
        tensors["key_sum"] = normal(*states, dtype=wide).abs() + 1
    case = LinearCase(d, tensors, None, _offsets(d) if d.packed else None)
    if d.padded and not d.packed:
        case.key_lengths = _pad(case, generator)
    heads = max(d.heads)
    shape = (rows_q, heads) if d.packed else (*batches, heads, rows_q)
    case.grads = {
        "output": normal(*shape, d.value_dim).double(),
        "kv": normal(*states, d.value_dim, dtype=wide).double(),
        "key_sum": normal(*states, dtype=wide).double(),
    }
    return case


def _offsets(d: LinearDescription) -> tuple[Tensor, Tensor]:
    ends = [torch.tensor([0, *lengths]).cumsum(0) for lengths in zip(*d.lengths, strict=True)]
    return ends[0].int().to(d.device), ends[1].int().to(d.device)


def _pad(case: LinearCase, generator: torch.Generator) -> Tensor:
    """Draw key lengths, and put NaN behind them: no result may show it."""
    d = case.description
    kv_len = d.rows[1]
    lengths = torch.randint(0, kv_len + 1, (d.batch,), generator=generator).to(d.device)
    hidden = torch.arange(kv_len, device=d.device) >= lengths.view(-1, 1, 1)
    for name in ("key", "value", "decay"):
        if name == "decay" and d.decay != "rows":
            continue
        tensor = case.tensors[name].clone(memory_format=torch.contiguous_format)
        where = hidden if name == "decay" else hidden.unsqueeze(-1)
        case.tensors[name] = tensor.masked_fill(where, torch.nan)
    return lengths
