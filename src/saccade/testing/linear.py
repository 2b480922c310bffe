"""Linear attention: random problems, their answer in float64, and how far from it one may be.

The bound is that of `oracle.py`: 1.1 · (the worst error of plain PyTorch in the same dtype) plus
six standard deviations of rounding in each number's own sum of terms.

For the second part a call is seen as one plain product. The initial state is as many keys as
there are features: key m has a 1 in channel m and nothing else, and the state's row m as its
value. The last state is as many queries, read likewise. The normaliser is one more channel of the
values, which holds 1. Then, with `log_decay` the factor between a row and a key (0 where hidden),

    weights = scale · (query · keyᵀ) ∘ fade
    sums = weights · [value, 1]
    grad_weights = [ĝ, −δ] · [value, 1]ᵀ
    grad_query = scale · (grad_weights ∘ fade) · key

and so on; rounding errors of each product's terms travel on to the next product.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.ops.linear_attention import reference
from saccade.ops.linear_attention.api import linear_attention, linear_attention_varlen
from saccade.ops.linear_attention.reference import ReferenceRows
from saccade.ops.linear_attention.validation import Prepared, prepare
from saccade.runtime.spec import LinearState, LinearVariant, accumulate_dtype
from saccade.testing.cases import Differentiable, laid_out, normal_of, offsets_of
from saccade.testing.oracle import assert_within, bounds, grouped, root

DECAYS = ("none", "heads", "rows")


@dataclass(frozen=True)
class LinearDescription:
    """What a random case of linear attention is made from.

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
class LinearCase(Differentiable):
    """A random problem: tensors that can have gradients, and everything else of the call.

    Examples:
        >>> case = saccade.testing.make_linear_case(lengths=((7, 7),))
        >>> case.tensors["query"].shape
        torch.Size([2, 2, 7, 16])
    """

    description: LinearDescription
    tensors: dict[str, Tensor]  # query, key, value; decay, kv and key_sum where the case has them
    key_lengths: Tensor | None
    cu_seqlens: tuple[Tensor, Tensor] | None
    grads: dict[str, Tensor] = field(default_factory=dict)  # of output, last kv, last key_sum

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
        """The results of plain PyTorch with every step in the case's own dtype, to compare with."""
        leaves = self.leaves()
        prepared = self.prepared(leaves)
        found = reference.attention(*prepared[:2], sums=self.description.dtype)
        results = {"output": found.output, "kv": found.kv, "key_sum": found.key_sum}
        return self.with_gradients(leaves, results)


def make_linear_case(description: LinearDescription | None = None, **changes: Any) -> LinearCase:
    """A linear case from its description (or from keyword arguments that make one).

    Examples:
        >>> case = saccade.testing.make_linear_case(lengths=((7, 7),))
        >>> saccade.testing.assert_linear_exact(case, "cpu")
    """
    d = description or LinearDescription(**changes)
    generator = torch.Generator().manual_seed(d.seed)
    normal = normal_of(generator, d.device, d.dtype)
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
    case = LinearCase(d, tensors, None, offsets_of(d.lengths, d.device) if d.packed else None)
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


def linear_oracle(case: LinearCase) -> dict[str, Tensor]:
    """Output, last state and gradients of a case by the reference in float64.

    Examples:
        >>> case = saccade.testing.make_linear_case(lengths=((7, 7),))
        >>> "output" in saccade.testing.linear_oracle(case)
        True
    """
    return case.run("reference", torch.float64)


def assert_linear_exact(case: LinearCase, implementation: str, **more: Any) -> None:
    """Compare an implementation with the oracle on every result of a linear case.

    Raises:
        AssertionError: naming the result, the worst error and what was allowed.

    Examples:
        >>> case = saccade.testing.make_linear_case(lengths=((7, 7),))
        >>> saccade.testing.assert_linear_exact(case, "cpu")
    """
    assert_within(case.run(implementation, **more), *expected(case), str(case.description))


def expected(case: LinearCase) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The exact results of a case, and the error that is allowed to each of their numbers."""
    exact = linear_oracle(case)
    return exact, bounds(exact, case.run_plain(), _spread(case), case.description.dtype)


class _Units(NamedTuple):
    """Unit roundoff of the inputs' dtype, and of a sum in the accumulation dtype."""

    inputs: float
    sums: float


def _spread(case: LinearCase) -> dict[str, Tensor]:
    """For each result, the standard deviation (at most) of its rounding errors."""
    leaves = {name: leaf.detach() for name, leaf in case.leaves(torch.float64).items()}
    prepared = case.prepared(leaves)
    inputs, variant = prepared.inputs, prepared.variant
    if inputs.cu_seqlens_q is None:
        return _spread_dense(case, inputs, variant, case.grads)
    found: list[dict[str, Tensor]] = []
    ends = inputs.cu_seqlens_q.tolist()
    for b, one in enumerate(reference.sequences(inputs)):
        grads = {name: case.grads[name][b : b + 1] for name in ("kv", "key_sum")}
        rows = case.grads["output"][ends[b] : ends[b + 1]]
        found.append(
            _spread_dense(case, one, variant, {**grads, "output": rows.transpose(0, 1)[None]})
        )
    joined = {}
    for name in found[0]:
        parts = [part[name] for part in found]
        if name in ("kv", "key_sum", "grad_kv", "grad_key_sum"):
            joined[name] = torch.cat(parts)
        elif name == "grad_decay" and case.description.decay == "heads":
            joined[name] = torch.stack(parts).square().sum(0).sqrt()
        else:
            joined[name] = torch.cat([part.squeeze(0).transpose(0, 1) for part in parts])
    return joined


def _spread_dense(
    case: LinearCase, inputs: Any, variant: LinearVariant, grads: dict[str, Tensor]
) -> dict[str, Tensor]:
    """`_spread` of dense inputs in float64, by a plain product with virtual keys and queries."""
    rows = reference.lay_out(inputs, variant, torch.float64)
    query, key, value, log_decay = _as_product(rows)
    length = query.shape[-1] + value.shape[-1] + query.shape[2] + key.shape[2]
    one = torch.finfo(accumulate_dtype(case.description.dtype)).eps / 2
    unit = _Units(torch.finfo(case.description.dtype).eps / 2, one * length**0.5)

    # query already holds the scale
    weights = query @ key.mT * log_decay
    exponents = log_decay.clamp(min=1e-300).log().abs().masked_fill(log_decay == 0, 0)
    of_weights = (unit.inputs + one * (2 + exponents)) * weights.abs()
    of_weights = of_weights + unit.sums * root(query, key.mT) * log_decay
    sums = weights @ value
    of_sums = root(of_weights, value) + (unit.inputs + unit.sums) * root(weights, value)
    real = rows.query.shape[2]
    found = {
        "kv": of_sums[:, :, real:, :-1],
        "key_sum": of_sums[:, :, real:, -1],
    }
    arriving, of_arriving = _arriving(
        variant, unit, sums[:, :, :real], of_sums[:, :, :real], grads["output"], found
    )
    last = torch.cat([grads["kv"], grads["key_sum"].unsqueeze(-1)], -1)
    last = _first_of_group(last, rows.query.shape[1])
    arriving = torch.cat([arriving, last], 2)
    of_arriving = torch.cat([of_arriving, unit.sums * last.abs()], 2)
    product = (query, key, value, log_decay, weights)
    terms = _gradients(product, of_weights, arriving, of_arriving, unit, found, real)
    found["grad_decay"] = _of_decay(*terms, query.shape[-1], variant.causal)
    return _narrowed(case, inputs, variant, found)


def _as_product(rows: ReferenceRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, [value, 1] and fades of all pairs, with the states as rows of them."""
    batch, heads, _, channels = rows.query.shape
    one_each = torch.eye(channels, dtype=torch.float64, device=rows.query.device)
    one_each = one_each.expand(batch, heads, channels, channels)
    query = torch.cat([rows.query, one_each], 2)
    key = torch.cat([one_each, rows.key], 2)
    ones = rows.value.new_ones(*rows.value.shape[:-1], 1)
    value = torch.cat([rows.value, ones], -1)
    value = torch.cat([torch.cat([rows.kv, rows.key_sum.unsqueeze(-1)], -1), value], 2)
    kv_len = rows.key.shape[2]
    last = rows.seen.new_full((channels,), kv_len)
    seen = torch.cat([rows.seen, last])
    decayed = torch.nn.functional.pad(rows.log_decay.cumsum(-1), (1, 0))
    comes = torch.arange(1, kv_len + 1, device=seen.device)
    comes = torch.cat([comes.new_zeros(channels), comes])  # the initial state is there at once
    gap = decayed[..., seen].unsqueeze(-1) - decayed[..., comes].unsqueeze(-2)
    visible = comes <= seen.unsqueeze(-1)
    return query, key, value, gap.masked_fill(~visible, -torch.inf).exp()


def _arriving(
    variant: LinearVariant,
    unit: _Units,
    sums: Tensor,
    of_sums: Tensor,
    grad_output: Tensor,
    found: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """[ĝ, −δ] and their errors; adds those of the output to `found`."""
    weighted, total = sums[..., :-1], sums[..., -1:]
    of_weighted, of_total = of_sums[..., :-1], of_sums[..., -1:]
    if variant.normalize == "none":
        found["output"] = of_weighted
        nothing = torch.zeros_like(total)
        both = torch.cat([grad_output, nothing], -1)
        return both, unit.sums * both.abs()
    divisor = {
        "sum": total + variant.eps,
        "clamp": total.clamp(min=variant.eps),
        "abs": total.abs().clamp(min=variant.eps),
    }[variant.normalize]
    divisor = divisor.masked_fill(divisor == 0, torch.inf)
    output = weighted / divisor
    found["output"] = of_weighted / divisor + output.abs() * of_total / divisor
    grad = grad_output / divisor
    of_grad = grad.abs() * (of_total / divisor + unit.sums)
    dot = (grad * output).sum(-1, keepdim=True)
    of_dot = _root_sum(grad * found["output"]) + _root_sum(of_grad * output)
    of_dot = of_dot + (unit.inputs + unit.sums) * _root_sum(grad * output)
    active = torch.ones_like(total)
    if variant.normalize != "sum":
        size = total.abs() if variant.normalize == "abs" else total
        active = (size >= variant.eps).to(total.dtype)
    return torch.cat([grad, -dot * active], -1), torch.cat([of_grad, of_dot * active], -1)


def _gradients(
    product: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    of_weights: Tensor,
    arriving: Tensor,
    of_arriving: Tensor,
    unit: _Units,
    found: dict[str, Tensor],
    real: int,
) -> tuple[Tensor, Tensor]:
    """Errors of the gradients of features, values and states, added to `found`.

    Returns:
        The squared errors of query · grad_query, for each row, and of key · grad_key.
    """
    query, key, value, log_decay, weights = product
    channels = key.shape[-1]
    pairs = arriving @ value.mT
    of_pairs = root(of_arriving, value.mT) + (unit.inputs + unit.sums) * root(arriving, value.mT)
    pairs, of_pairs = pairs * log_decay, of_pairs * log_decay
    products = unit.inputs + unit.sums
    of_query = root(of_pairs, key) + products * root(pairs, key)
    of_key = root(of_pairs.mT, query) + products * root(pairs.mT, query)
    of_value = root(of_weights.mT, arriving) + root(weights.mT, of_arriving)
    of_value = of_value + products * root(weights.mT, arriving)
    found["grad_query"], found["grad_key"] = of_query[:, :, :real], of_key[:, :, channels:]
    found["grad_value"] = of_value[:, :, channels:, :-1]
    found["grad_kv"] = of_value[:, :, :channels, :-1]
    found["grad_key_sum"] = of_value[:, :, :channels, -1]
    dots = [(of_query * query, query * (pairs @ key)), (of_key * key, key * (pairs.mT @ query))]
    of_rows, of_keys = (
        (errors.square() + (unit.sums * terms).square()).sum(-1) for errors, terms in dots
    )
    return of_rows, of_keys


def _of_decay(of_rows: Tensor, of_keys: Tensor, channels: int, causal: bool) -> Tensor:
    """Errors of the gradient of decay: a sum over keys before each one, the states' rows first.

    Where rows see a part of the keys it may be a sum from the end over rows less keys, and then
    all their errors may show.
    """
    if not causal:
        before = torch.nn.functional.pad(of_keys, (1, 0))[..., :-1].cumsum(-1)
        return before[..., channels:].sqrt()
    total = of_rows.sum(-1, keepdim=True) + of_keys.sum(-1, keepdim=True)
    return total.sqrt().expand(*total.shape[:-1], of_keys.shape[-1] - channels)


def _narrowed(
    case: LinearCase, inputs: Any, variant: LinearVariant, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """From features and heads of the output back to what the call was given."""
    unit = torch.finfo(case.description.dtype).eps / 2
    heads = {
        "query": inputs.query.shape[1],
        "key": inputs.key.shape[1],
        "value": inputs.value.shape[1],
    }
    for name, of_heads in heads.items():
        spread = found[f"grad_{name}"]
        if name != "value":
            with torch.enable_grad():
                rows = getattr(inputs, name).nan_to_num().detach().requires_grad_()
                mapped = reference.features(variant.feature_map, rows)
                (slope,) = torch.autograd.grad(mapped.sum(), rows)
            slope = slope.abs().repeat_interleave(spread.shape[1] // max(of_heads, 1), 1)
            factor = abs(variant.scale) if name == "query" else 1.0
            spread = spread * slope * factor * (1 + unit)
        found[f"grad_{name}"] = grouped(spread, of_heads)
    state_heads = inputs.state_heads
    for name in ("grad_kv", "grad_key_sum", "grad_decay"):
        found[name] = grouped(found[name], state_heads)
    for name in ("kv", "key_sum"):
        group = found[name].shape[1] // max(state_heads, 1)
        found[name] = found[name][:, :: max(group, 1)]
    if case.description.decay == "heads":
        found["grad_decay"] = _root_sum(found["grad_decay"].transpose(0, 1).flatten(1)).squeeze(-1)
        # every row's own error is one of the same sums, so they may add up in step
        found["grad_decay"] = found["grad_decay"] * max(inputs.key.shape[2], 1) ** 0.5
    return found


def _first_of_group(states: Tensor, heads: int) -> Tensor:
    """Gradients of states by head of the output: each state is read once, by the first head."""
    group = heads // max(states.shape[1], 1)
    spread = states.new_zeros(states.shape[0], heads, *states.shape[2:])
    spread[:, :: max(group, 1)] = states
    return spread


def _root_sum(terms: Tensor) -> Tensor:
    """Root of the sum of squares over the last dimension, which stays."""
    return terms.square().sum(-1, keepdim=True).sqrt()
