"""Cases: random attention problems, made from a short description that a failing test can print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.masks import Mask
from saccade.ops.attention import reference
from saccade.ops.attention.api import attention, attention_varlen
from saccade.runtime.validation import prepare, with_seed
from saccade.scores import Score
from saccade.testing.kinds import MASKS, SCORES, Description, bias_shape


@dataclass
class Case:
    """A random problem: tensors that can have gradients, and everything else of the call."""

    description: Description
    tensors: dict[str, Tensor]  # query, key, value; sinks and bias where the case has them
    mask: Mask | Tensor | None
    score: Callable[[Tensor | None], Score | None]  # from the bias
    cu_seqlens: tuple[Tensor, Tensor] | None
    grads: dict[str, Tensor] = field(default_factory=dict)  # of output and lse

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Fresh copies that record gradients, with the same strides, in another dtype if given."""
        return {
            name: like_strided(tensor, dtype or tensor.dtype).requires_grad_()
            for name, tensor in self.tensors.items()
        }

    def arguments(self, leaves: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
        """Positional and keyword arguments of the public call."""
        positional = [leaves["query"], leaves["key"], leaves["value"], *(self.cu_seqlens or ())]
        keywords: dict[str, Any] = {
            "mask": self.mask,
            "score": self.score(leaves.get("bias")),
            "scale": self.description.scale,
            "sinks": leaves.get("sinks"),
            "dropout_p": self.description.dropout_p,
        }
        return positional, keywords

    def call(self, leaves: dict[str, Tensor], **more: Any) -> tuple[Tensor, Tensor]:
        """Output and lse by the public call. The seed of dropout is the case's."""
        positional, keywords = self.arguments(leaves)
        torch.manual_seed(self.description.seed)
        function: Any = attention_varlen if self.cu_seqlens else attention
        return function(*positional, return_lse=True, **keywords, **more)

    def run(
        self, implementation: str, dtype: torch.dtype | None = None, **more: Any
    ) -> dict[str, Tensor]:
        """Output, lse and every gradient, by name."""
        leaves = self.leaves(dtype)
        output, lse = self.call(leaves, implementation=implementation, **more)
        return self.with_gradients(leaves, output, lse)

    def run_plain(self) -> dict[str, Tensor]:
        """The same in plain PyTorch with every step in the case's own dtype: the yardstick."""
        leaves = self.leaves()
        positional, keywords = self.arguments(leaves)
        torch.manual_seed(self.description.seed)
        inputs, variant, _, _ = prepare(
            *padded(positional), return_lse=True, deterministic=False, config=None, **keywords
        )
        inputs = with_seed(inputs, variant)
        output, lse = reference.attention(inputs, variant, sums=self.description.dtype)
        return self.with_gradients(leaves, output, lse)

    def with_gradients(
        self, leaves: dict[str, Tensor], output: Tensor, lse: Tensor
    ) -> dict[str, Tensor]:
        """Results beside the gradients that the case's gradients of them give."""
        grads = [self.grads["output"].to(output.dtype), self.grads["lse"].to(lse.dtype)]
        found = torch.autograd.grad([output, lse], list(leaves.values()), grads, allow_unused=True)
        results = {"output": output.detach(), "lse": lse.detach()}
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            results[f"grad_{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
        return results


def padded(positional: list[Tensor]) -> list[Any]:
    """The positional arguments of `validation.prepare`, None where the call has none."""
    return [*positional, *[None] * (7 - len(positional))]


def like_strided(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A detached copy with the same strides (expanded dimensions stay expanded)."""
    if tensor.numel() == 0:
        return tensor.detach().to(dtype).clone()
    base = tensor.detach()
    extent = sum(
        (size - 1) * stride for size, stride in zip(base.shape, base.stride(), strict=True)
    )
    flat = torch.as_strided(base, (extent + 1,), (1,)).to(dtype).clone()
    return torch.as_strided(flat, base.shape, base.stride())


def make_case(description: Description | None = None, **changes: Any) -> Case:
    """A case from its description (or from keyword arguments that make one)."""
    d = description or Description(**changes)
    generator = torch.Generator().manual_seed(d.seed)

    def normal(*shape: int, dtype: torch.dtype = d.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(d.device, dtype)

    rows_q, rows_k = d.longest
    if d.packed:
        rows_q, rows_k = (sum(lengths) for lengths in zip(*d.lengths, strict=True))
    shapes = {
        "query": (d.query_heads, rows_q, d.head_dim),
        "key": (d.kv_heads, rows_k, d.head_dim),
        "value": (d.kv_heads, rows_k, d.value_dim),
    }
    batches = () if d.packed else (d.batch,)
    tensors = {
        name: laid_out(normal, (*batches, *shape), d.layout, d.packed)
        for name, shape in shapes.items()
    }
    if d.sinks:
        tensors["sinks"] = normal(d.query_heads, dtype=torch.float32)
    if "bias" in d.score:
        tensors["bias"] = normal(*bias_shape(d))
    case = Case(
        d,
        tensors,
        MASKS[d.mask](d, generator),
        lambda bias: SCORES[d.score](d, bias),
        _offsets(d) if d.packed else None,
    )
    wide = torch.float64
    output_shape = (rows_q, d.query_heads) if d.packed else (d.batch, d.query_heads, rows_q)
    lse_shape = (d.query_heads, rows_q) if d.packed else output_shape
    case.grads["output"] = normal(*output_shape, d.value_dim).to(wide)
    case.grads["lse"] = normal(*lse_shape, dtype=wide)
    if d.poison_hidden:
        _poison_hidden(case)
    return case


def laid_out(
    normal: Callable[..., Tensor], shape: tuple[int, ...], layout: str, packed: bool
) -> Tensor:
    """A random tensor [batch, heads, rows, dim] ([rows, heads, dim] if packed) with odd strides."""
    *lead, heads, rows, dim = shape
    if packed:
        return normal(rows, heads, dim)
    if layout == "permuted":  # [batch, rows, heads, dim] in memory
        return normal(*lead, rows, heads, dim).transpose(-2, -3)
    if layout == "sliced":  # rows and channels cut out of something larger
        return normal(*lead, heads, rows + 3, dim + 5)[..., 2 : rows + 2, :dim]
    if layout == "strided_last":  # the last stride is not 1
        return normal(*lead, heads, dim, rows).transpose(-1, -2)
    if layout == "expanded":  # every head reads the same memory
        return normal(*lead, 1, rows, dim).expand(*lead, heads, rows, dim)
    return normal(*lead, heads, rows, dim)


def _offsets(d: Description) -> tuple[Tensor, Tensor]:
    ends = [torch.tensor([0, *lengths]).cumsum(0) for lengths in zip(*d.lengths, strict=True)]
    return ends[0].int().to(d.device), ends[1].int().to(d.device)


def _poison_hidden(case: Case) -> None:
    """Put NaN and inf where no query row sees them: no result may show it."""
    leaves = case.leaves(torch.float64)
    positional, keywords = case.arguments(leaves)
    inputs, variant, _, _ = prepare(
        *padded(positional), return_lse=True, deterministic=False, config=None, **keywords
    )
    dense, at, reachable = reference.lay_out(inputs)
    _, visible, _ = reference.score_pairs(dense, variant, at, reachable)
    d = case.description
    batch, _, rows, keys = (*dense.query.shape[:3], dense.key.shape[2])
    visible = visible.expand(batch, d.query_heads, rows, keys)
    seen = visible.unflatten(1, (d.kv_heads, d.group)).any(3).any(2)  # [batch, kv_heads, keys]
    hidden = ~seen.squeeze(0).transpose(0, 1) if d.packed else ~seen
    for name, trash in (("key", torch.nan), ("value", torch.inf)):
        tensor = case.tensors[name].clone(memory_format=torch.contiguous_format)
        case.tensors[name] = tensor.masked_fill(hidden.unsqueeze(-1), trash)
