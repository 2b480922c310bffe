"""Random attention problems, made from a short description that a failing test can print."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.deterministic as fresh_memory
from torch import Tensor

from saccade import masks, scores
from saccade.masks import Mask
from saccade.ops.attention import reference
from saccade.ops.attention.api import attention, attention_varlen
from saccade.runtime.spec import Inputs, Variant
from saccade.runtime.validation import prepare, with_seed
from saccade.scores import Score

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Description:
    """What a random case is made from.

    `lengths` are (query, key) lengths: one pair a sequence; a dense case uses the first. `mean` is
    the mean of values, and four times that of keys.

    Examples:
        >>> description = saccade.testing.Description(lengths=((5, 9),), mask="causal")
        >>> saccade.testing.make_case(description).tensors["query"].shape
        torch.Size([2, 4, 5, 16])
    """

    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    lengths: tuple[tuple[int, int], ...] = ((24, 24),)
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    packed: bool = False
    mask: str = "none"
    score: str = "none"
    sinks: bool = False
    dropout_p: float = 0.0
    layout: str = "contiguous"
    poison_hidden: bool = False
    scale: float | None = None
    mean: float = 0.0
    seed: int = 0
    device: str = "cpu"

    @property
    def query_heads(self) -> int:
        """Query heads in all."""
        return self.kv_heads * self.group

    @property
    def longest(self) -> tuple[int, int]:
        """The longest query length and key length."""
        used = self.lengths if self.packed else self.lengths[:1]
        return max(q for q, _ in used), max(k for _, k in used)

    @property
    def batch_size(self) -> int:
        """Batch entries, or sequences."""
        return len(self.lengths) if self.packed else self.batch


@masks.function
def _every_nth(batch: Any, head: Any, query_row: Any, kv_row: Any, step: Any) -> Any:
    return (query_row - kv_row) % step == 0


@masks.function(align="bottom_right")
def _not_my_twin(batch: Any, head: Any, query_row: Any, kv_row: Any, table: Any) -> Any:
    return (masks.take(table, head) <= query_row) & ((kv_row ^ 1) != query_row)


@scores.function
def _gain(score: Any, batch: Any, head: Any, query_row: Any, kv_row: Any, gain: Any) -> Any:
    return score * gain


def _random(d: Description, generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers from low to high - 1 (at least low), on the case's device."""
    return torch.randint(low, max(high, low + 1), shape, generator=generator).to(d.device)


def _document_mask(d: Description, generator: torch.Generator) -> Mask:
    query_len, kv_len = d.longest
    ids = [
        _random(d, generator, 0, 3, d.batch_size, n).sort(-1).values for n in (query_len, kv_len)
    ]
    return masks.documents(*ids)


def _block_mask(d: Description, generator: torch.Generator) -> Mask:
    query_len, kv_len = d.longest
    shape = (d.query_heads, -(-query_len // 5), -(-kv_len // 7))
    return masks.blocks(_random(d, generator, 0, 2, *shape).bool(), (5, 7))


def _tree_mask(d: Description, generator: torch.Generator) -> Mask:
    query_len = d.longest[0]
    ranks = torch.arange(query_len)
    parents = (torch.rand(d.batch_size, query_len, generator=generator) * (ranks + 1)).long() - 1
    lengths = d.lengths if d.packed else d.lengths * d.batch_size
    context_lens = [max(keys - rows, 0) for rows, keys in lengths[: d.batch_size]]
    bits = masks.tree_bits(parents).to(d.device)
    return masks.tree(bits, torch.tensor(context_lens, dtype=torch.int64).to(d.device))


def _dense_mask(d: Description, generator: torch.Generator) -> Tensor:
    return _random(d, generator, 0, 3, d.batch_size, 1, *d.longest).bool()


def _lengths(d: Description, generator: torch.Generator) -> Tensor:
    return _random(d, generator, 0, d.longest[1] + 1, d.batch_size)


def _slopes(d: Description) -> Tensor:
    return 2.0 ** -torch.arange(1.0, d.query_heads + 1, device=d.device)


def bias_shape(d: Description) -> tuple[int, ...]:
    """The shape of the bias of a case: 1 in the dimensions over which its kind broadcasts."""
    full = (d.batch_size, d.query_heads, *d.longest)
    broadcast = {"bias": (), "head_bias": (0, 2), "key_bias": (0, 1, 2), "batch_bias": (1,)}
    kind = next(kind for kind in d.score.split(" >> ") if "bias" in kind)
    return tuple(1 if dim in broadcast[kind] else size for dim, size in enumerate(full))


MASKS: dict[str, Callable[[Description, torch.Generator], Mask | Tensor | None]] = {
    "none": lambda d, g: None,
    "causal": lambda d, g: masks.causal(),
    "causal_top_left": lambda d, g: masks.causal(align="top_left"),
    "window": lambda d, g: masks.window(3, 2),
    "prefix": lambda d, g: masks.prefix(_lengths(d, g)),
    "key_lengths": lambda d, g: masks.key_lengths(_lengths(d, g)),
    "documents": _document_mask,
    "blocks": _block_mask,
    "tensor": _dense_mask,
    "tree": _tree_mask,
    "nothing": lambda d, g: ~(masks.causal() | ~masks.causal()),
    "own": lambda d, g: _every_nth(3),
    "own_table": lambda d, g: _not_my_twin(_random(d, g, 0, 9, d.query_heads)),
    "mixed": lambda d, g: (masks.causal() & masks.window(7)) | ~masks.key_lengths(_lengths(d, g)),
}

SCORES: dict[str, Callable[[Description, Tensor | None], Score | None]] = {
    "none": lambda d, b: None,
    "softcap": lambda d, b: scores.softcap(2.0),
    "alibi": lambda d, b: scores.alibi(_slopes(d)),
    "own": lambda d, b: _gain(0.5),
    **dict.fromkeys(
        ("bias", "head_bias", "key_bias", "batch_bias"),
        lambda d, b: scores.bias(b),  # type: ignore[arg-type]
    ),
    "bias >> softcap": lambda d, b: scores.bias(b) >> scores.softcap(1.5),  # type: ignore[arg-type]
}


class Differentiable:
    """A case with gradients: leaves in any dtype, and results beside their gradients.

    Attributes:
        tensors: those that can have gradients, by name.
        grads: float64 gradients of the results, by name.
    """

    tensors: dict[str, Tensor]
    grads: dict[str, Tensor]

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Fresh copies that record gradients, with the same strides, in another dtype if given."""
        return {
            name: like_strided(tensor, dtype or tensor.dtype).requires_grad_()
            for name, tensor in self.tensors.items()
        }

    def with_gradients(
        self, leaves: dict[str, Tensor], results: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Results beside the gradients that the case's gradients of them give."""
        # A state of no tokens and no state before is a constant in plain PyTorch.
        heads = {name: result for name, result in results.items() if result.requires_grad}
        grads = [self.grads[name].to(result.dtype) for name, result in heads.items()]
        found = torch.autograd.grad(
            list(heads.values()), list(leaves.values()), grads, allow_unused=True
        )
        every = {name: result.detach() for name, result in results.items()}
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            every[f"grad_{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
        return every


@dataclass
class Case(Differentiable):
    """A random problem: tensors that can have gradients, and everything else of the call.

    Examples:
        >>> case = saccade.testing.make_case(lengths=((5, 9),))
        >>> sorted(case.tensors), case.tensors["key"].shape
        (['key', 'query', 'value'], torch.Size([2, 2, 9, 16]))
    """

    description: Description
    tensors: dict[str, Tensor]  # query, key, value; sinks and bias where the case has them
    mask: Mask | Tensor | None
    score: Callable[[Tensor | None], Score | None]  # from the bias
    cu_seqlens: tuple[Tensor, Tensor] | None
    grads: dict[str, Tensor] = field(default_factory=dict)  # of output and lse

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
        return self.with_gradients(leaves, {"output": output, "lse": lse})

    def prepared(self, leaves: dict[str, Tensor]) -> tuple[Inputs, Variant]:
        """The inputs and variant that implementations take, with the case's seed of dropout."""
        positional, keywords = self.arguments(leaves)
        inputs, variant, _, _ = prepare(
            *padded(positional), return_lse=True, deterministic=False, config=None, **keywords
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.description.seed)
            return with_seed(inputs, variant), variant

    def run_plain(self) -> dict[str, Tensor]:
        """The results of plain PyTorch with every step in the case's own dtype, to compare with."""
        leaves = self.leaves()
        inputs, variant = self.prepared(leaves)
        output, lse = reference.attention(inputs, variant, sums=self.description.dtype)
        return self.with_gradients(leaves, {"output": output, "lse": lse})


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
    """A case from its description (or from keyword arguments that make one).

    Examples:
        >>> case = saccade.testing.make_case(lengths=((5, 9),), mask="window")
        >>> saccade.testing.assert_exact(case, "cpu")
    """
    d = description or Description(**changes)
    generator = torch.Generator().manual_seed(d.seed)
    normal = normal_of(generator, d.device, d.dtype)
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
    if d.mean:
        means = {"query": 0.0, "key": d.mean / 4, "value": d.mean}
        tensors = {name: rows + means[name] for name, rows in tensors.items()}
    if d.sinks:
        tensors["sinks"] = normal(d.query_heads, dtype=torch.float32)
    if "bias" in d.score:
        tensors["bias"] = normal(*bias_shape(d))
    case = Case(
        d,
        tensors,
        MASKS[d.mask](d, generator),
        lambda bias: SCORES[d.score](d, bias),
        offsets_of(d.lengths, d.device) if d.packed else None,
    )
    output_shape = (rows_q, d.query_heads) if d.packed else (d.batch, d.query_heads, rows_q)
    lse_shape = (d.query_heads, rows_q) if d.packed else output_shape
    case.grads["output"] = normal(*output_shape, d.value_dim).double()
    case.grads["lse"] = normal(*lse_shape, dtype=torch.float64)
    if d.poison_hidden:
        _poison_hidden(case)
    return case


def normal_of(
    generator: torch.Generator, device: str, default: torch.dtype
) -> Callable[..., Tensor]:
    """A function of a shape, and of a dtype if it is another one, that draws a normal tensor."""

    def normal(*shape: int, dtype: torch.dtype = default) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return normal


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


def offsets_of(lengths: Sequence[tuple[int, int]], device: str) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k of (query, key) lengths."""
    query, key = (torch.tensor([0, *each]).cumsum(0) for each in zip(*lengths, strict=True))
    return query.int().to(device), key.int().to(device)


def _poison_hidden(case: Case) -> None:
    """Put NaN and inf where no query row sees them: no result may show it."""
    inputs, variant = case.prepared(case.leaves(torch.float64))
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


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN (integers: the largest number) inside the block.

    PyTorch does it itself in its deterministic mode, also for memory that its own kernels take.

    Examples:
        >>> with saccade.testing.poisoned():
        ...     empty = torch.empty(3)
        >>> bool(empty.isnan().all())
        True
    """
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = fresh_memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    fresh_memory.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)
        fresh_memory.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


# ---- drawn by hypothesis, which users of the library need not have -------------------------------

LAYOUTS = ("contiguous", "permuted", "sliced", "strided_last", "expanded")


def descriptions(
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    longest: int = 40,
    masks: Sequence[str] = tuple(MASKS),
    dims: Sequence[int] = (16, 8, 1, 5, 33),
    layouts: Sequence[str] = LAYOUTS,
    dropouts: Sequence[float] = (0.0, 0.0, 0.3),
) -> SearchStrategy[Description]:
    """Descriptions of cases: any of these masks, any score, layout and length, zero included."""
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Any) -> Description:
        packed = draw(st.booleans())
        length = st.integers(0, longest)
        pairs = st.lists(st.tuples(length, length), min_size=1, max_size=4 if packed else 1)
        return Description(
            batch=draw(st.integers(0, 3)),
            kv_heads=draw(st.integers(1, 3)),
            group=draw(st.integers(1, 3)),
            lengths=tuple(draw(pairs)),
            head_dim=draw(st.sampled_from(list(dims))),
            value_dim=draw(st.sampled_from(list(dims))),
            dtype=draw(st.sampled_from(list(dtypes))),
            packed=packed,
            mask=draw(st.sampled_from(list(masks))),
            score=draw(st.sampled_from(list(SCORES))),
            sinks=draw(st.booleans()),
            dropout_p=draw(st.sampled_from(list(dropouts))),
            layout=draw(st.sampled_from(list(layouts))),
            poison_hidden=draw(st.booleans()),
            scale=draw(st.sampled_from([None, 0.3])),
            seed=draw(st.integers(0, 2**16)),
        )

    return drawn()


def problems(
    dtypes: Sequence[torch.dtype] = (torch.float32,), longest: int = 40
) -> SearchStrategy[Case]:
    """Random problems; see `saccade.testing.make_case`.

    Examples:
        >>> import hypothesis
        >>> @hypothesis.settings(max_examples=3, deadline=None)
        ... @hypothesis.given(saccade.testing.problems(longest=8))
        ... def test(case):
        ...     saccade.testing.assert_exact(case, "cpu")
        >>> test()
    """
    return descriptions(dtypes, longest).map(make_case)
