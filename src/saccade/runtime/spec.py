"""Call specification: the values that describe a call of softmax or linear attention.

`Inputs` are its tensors, `Variant` is the function that it computes, `Problem` its sizes, dtype and
device without tensors, `KernelConfig` tile sizes, warps and stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.modifiers.expression import Captured

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
QUANTISED = (torch.float8_e4m3fn, torch.int8)  # dtypes of pages beside the query's own


_precision_of = torch._C._get_fp32_precision_getter


def precision(dtype: torch.dtype) -> str:
    """How products of a dtype are computed: "ieee" unless PyTorch was told that less will do.

    Both of PyTorch's interfaces count: `torch.set_float32_matmul_precision` ("high": "tf32x3",
    "medium": "tf32"), which sets a precision for each backend, and `torch.backends...matmul
    .fp32_precision`, which is that precision. "tf32" for CUDA alone is what "high" makes of it.

    The older interface is not asked: it raises once the newer one was used, or does not follow.
    """
    if dtype is not torch.float32 or _precision_of("cuda", "matmul") != "tf32":
        return "ieee"
    return "tf32" if _precision_of("mkldnn", "matmul") == "bf16" else "tf32x3"


# e^-1000 is 0 in float64, too, so no factor changes where less is taken for it; but in a sum with
# -1e30 the decay of all later tokens would be lost, and -inf would make differences of sums NaN.
LEAST_DECAY = -1000.0
LEAST_DECAY_OF_FLOAT32 = -104.0  # e to it is 0 there


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an output: the query's; bfloat16 of e4m3 queries."""
    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of the lse: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Variant(NamedTuple):
    """The function of a call: mask and score by key, with what they captured, scale and dropout;
    and which results it has beside output and lse (see `Results`)."""

    mask: str
    score: str
    mask_captured: Captured
    score_captured: Captured
    scale: float
    dropout_p: float
    residual: bool = False
    max_logit: bool = False
    grouped: bool = False  # of keys that have numbers: see `Numbers` in runtime/dropout.py


class Inputs(NamedTuple):
    """The tensors of one call. Packed sequences have offsets; dense batches have None there."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    seed: Tensor | None = None  # int64 scalar; None: no dropout
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    numbers: Tensor | None = None  # of dropout in a part of a call: see runtime/dropout.py

    @property
    def num_sequences(self) -> int:
        """Batch entries, or packed sequences."""
        if self.cu_seqlens_q is None:
            return self.query.shape[0]
        return self.cu_seqlens_q.shape[0] - 1


class PagedInputs(NamedTuple):
    """The tensors of one call over pages. Packed queries have offsets; dense ones None there."""

    query: Tensor
    key_pages: Tensor  # [num_pages, kv_heads, page_size, head_dim], any strides
    value_pages: Tensor
    page_table: Tensor  # int32 [batch, max_pages]; entries behind a sequence's end are not read
    kv_lens: Tensor  # int32 [batch], the new tokens included
    cu_seqlens_q: Tensor | None = None
    sinks: Tensor | None = None
    key_scales: Tensor | None = None  # [num_pages, kv_heads, page_size]
    value_scales: Tensor | None = None
    query_scale: Tensor | None = None  # of e4m3 queries, float32 [batch, query_heads]; None: 1

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.page_table.shape[0]

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.key_pages.shape[2]

    @property
    def quantised(self) -> bool:
        """Whether pages hold numbers of eight bits."""
        return self.key_pages.dtype in QUANTISED

    @property
    def fp8(self) -> bool:
        """Whether products are of e4m3 numbers."""
        return self.query.dtype == torch.float8_e4m3fn


class Gradients(NamedTuple):
    """The results of a backward pass: one gradient for each input that can have one."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    tables: dict[int, Tensor]  # by index among the score's captured tensors


def heads_inside(rows: Tensor) -> bool:
    """Whether heads lie beside channels in memory: [batch, length, heads, dim]."""
    return rows.transpose(1, 2).is_contiguous()


def in_order_of(rows: Tensor, pattern: Tensor) -> Tensor:
    """Rows that lie in memory as others of their shape do; copied where they do not.

    A kernel is compiled for the steps between rows: an output's gradient in the output's own order
    keeps their number down. Gradients that come otherwise are those of a function of the output
    itself, such as its sum.
    """
    if rows.stride() == pattern.stride():
        return rows
    sizes = zip(rows.shape, rows.stride(), pattern.stride(), strict=True)
    if all([step == wanted or size == 1 for size, step, wanted in sizes]):
        return rows
    return torch.empty_like(pattern).copy_(rows)


class Results(NamedTuple):
    """The results of a forward pass.

    Attributes:
        residual: int8, as the output: what rounding to 16 bits took from it
            (`runtime/rounding.py`). None unless a gradient is due and the output has 16 bits.
        max_logit: the largest score of each head, [batch, heads], by sequence if packed. None
            unless it is asked for.
    """

    output: Tensor
    lse: Tensor
    residual: Tensor | None = None
    max_logit: Tensor | None = None


def empty_results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Memory for output and lse, laid out as every implementation lays it out.

    A dense output takes query's memory order: heads beside channels (as a projection leaves
    them, so that flattening the heads copies nothing), else contiguous.
    """
    return empty_rows(inputs.query, inputs.value.shape[-1], inputs.cu_seqlens_q is not None)


def empty_all_results(inputs: Inputs, variant: Variant) -> tuple[Tensor, ...]:
    """Memory for `Results` as operators give them: what a call does not have has no elements."""
    output, lse = empty_results(inputs)
    residual = torch.empty_like(output, dtype=torch.int8) if variant.residual else None
    shape = inputs.num_sequences, inputs.query.shape[1]
    max_logit = lse.new_empty(shape) if variant.max_logit else None
    return all_results(Results(output, lse, residual, max_logit))


def all_results(results: Results) -> tuple[Tensor, ...]:
    """Results as operators give them, where a tensor of no elements stands for none."""
    output, lse, residual, max_logit = results
    if residual is None:
        residual = output.new_empty(0, dtype=torch.int8)
    return output, lse, residual, lse.new_empty(0) if max_logit is None else max_logit


def empty_rows(query: Tensor, value_dim: int, packed: bool) -> tuple[Tensor, Tensor]:
    """Memory for output and lse of a query; see `empty_results`."""
    output = empty_output(query, query.shape[1], value_dim, packed)
    return output, query.new_empty(row_shape(output, packed), dtype=accumulate_dtype(query.dtype))


def empty_output(query: Tensor, heads: int, value_dim: int, packed: bool) -> Tensor:
    """Memory for an output of so many heads."""
    dtype = output_dtype(query.dtype)
    if packed:
        return query.new_empty(query.shape[0], heads, value_dim, dtype=dtype)
    batch, _, length = query.shape[:3]
    if heads_inside(query):
        return query.new_empty(batch, length, heads, value_dim, dtype=dtype).transpose(1, 2)
    return query.new_empty(batch, heads, length, value_dim, dtype=dtype)


def row_shape(output: Tensor, packed: bool) -> tuple[int, ...]:
    """The shape of one number for each row: [batch, heads, length], packed [heads, tokens]."""
    return (output.shape[1], output.shape[0]) if packed else tuple(output.shape[:3])


def empty_gradients(inputs: Inputs) -> Gradients:
    """Memory for the gradients, laid out as every implementation lays it out."""

    def like(tensor: Tensor) -> Tensor:
        if inputs.cu_seqlens_q is not None:
            return tensor.new_empty(tensor.shape)
        batch, heads, length, dim = tensor.shape
        return tensor.new_empty(batch, length, heads, dim).transpose(1, 2)

    sinks = None if inputs.sinks is None else inputs.sinks.new_empty(inputs.sinks.shape)
    return Gradients(like(inputs.query), like(inputs.key), like(inputs.value), sinks, {})


@dataclass(frozen=True, repr=False)
class KernelConfig:
    """Tile sizes of an implementation and how its kernels run; 0 leaves a choice to it.

    Attributes:
        query_tile: query rows that are computed at once; on a GPU a power of two of at least 16.
        kv_tile: key rows that are computed (on a CPU: classified) at once; as query_tile.
        num_warps: warps of 32 threads that share a tile, a power of two; a CPU has none.
        num_stages: tiles that are loaded ahead of use, this one included; a CPU loads none ahead.
        backward: the config of the backward pass; None leaves all of it to the implementation.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 64, 16)
        >>> config = saccade.KernelConfig(query_tile=32, kv_tile=32)
        >>> output = saccade.attention(query, key, value, causal=True, config=config)
        >>> torch.testing.assert_close(output, saccade.attention(query, key, value, causal=True))
    """

    query_tile: int = 0
    kv_tile: int = 0
    num_warps: int = 0
    num_stages: int = 0
    backward: KernelConfig | None = None

    def __post_init__(self) -> None:
        for name in CONFIG_NUMBERS:
            value, most = getattr(self, name), LARGEST[name]
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not 0 <= value <= most:
                raise ValueError(f"{name}: got {value!r}, takes a whole number from 0 to {most}")
        if self.backward is not None and not isinstance(self.backward, KernelConfig):
            raise ValueError(f"backward: got {self.backward!r}, takes a KernelConfig or None")

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in (*CONFIG_NUMBERS, "backward")}
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items() if value)
        return f"KernelConfig({shown})"

    def numbers(self) -> list[int]:
        """The numbers of this config, then those of its backward pass if it has one."""
        found = [getattr(self, name) for name in CONFIG_NUMBERS]
        return found if self.backward is None else found + self.backward.numbers()

    @staticmethod
    def of_numbers(numbers: Sequence[int]) -> KernelConfig:
        """The inverse of `numbers`."""
        first, rest = numbers[: len(CONFIG_NUMBERS)], numbers[len(CONFIG_NUMBERS) :]
        return KernelConfig(*first, backward=KernelConfig.of_numbers(rest) if rest else None)


# A CPU takes tiles of any length; for a GPU the implementation checks them.
LARGEST = {"query_tile": 2**31 - 1, "kv_tile": 2**31 - 1, "num_warps": 64, "num_stages": 64}
CONFIG_NUMBERS = tuple(LARGEST)


class Problem(NamedTuple):
    """The shape of a call: what implementations are chosen by. Holds no tensors.

    For packed sequences `batch` counts sequences, and `query_len` and `kv_len` count all tokens;
    over pages (`page_size` > 0) too, where `kv_len` counts all slots that tables name if the
    lengths cannot be read.
    """

    batch: int
    query_heads: int
    kv_heads: int
    query_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str  # its type: "cpu", "cuda"
    device_index: int | None = None
    packed: bool = False
    mask: str = ""
    score: str = ""
    sinks: bool = False
    dropout: bool = False
    configured: bool = False
    page_size: int = 0  # 0: no pages
    page_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    tma: bool = False  # whether the strides are such that TMA can read the tensors as they lie
    quantize: str = ""  # fp8 attention: how 16-bit rows become e4m3 numbers, or "given"

    @property
    def operation(self) -> str:
        """The operation's folder below saccade.ops."""
        if self.quantize:
            return "attention_fp8"
        return "paged_attention" if self.page_size else "attention"

    @property
    def pairs(self) -> int:
        """Pairs of a query row and a key row, hidden ones included, over all heads."""
        batches = 1 if self.packed else self.batch
        return batches * self.query_heads * self.query_len * self.kv_len

    @property
    def bytes(self) -> int:
        """Bytes that must move at least once: inputs and output, each read or written once."""
        batches = 1 if self.packed else self.batch
        query_rows = batches * self.query_heads * self.query_len
        kv_rows = batches * self.kv_heads * self.kv_len
        kv_itemsize = (self.page_dtype or self.dtype).itemsize
        of_output = max(self.dtype.itemsize, 2)  # that of e4m3 rows has 16 bits
        query_bytes = query_rows * (
            self.head_dim * self.dtype.itemsize + self.value_dim * of_output
        )
        return query_bytes + kv_rows * kv_itemsize * (self.head_dim + self.value_dim)

    def flops(self, visible_pairs: int | None = None) -> int:
        """Floating-point operations of a forward pass over the visible pairs (all, if not given).

        Two products of two operations a channel, as FlashAttention-2 (Dao 2023, section 4.1)
        counts.
        """
        pairs = self.pairs if visible_pairs is None else visible_pairs
        return 2 * pairs * (self.head_dim + self.value_dim)


# ---- linear attention ----------------------------------------------------------------------------

FUSED_MAPS = ("elu+1", "relu", "exp", "identity")
"""Feature maps that implementations apply themselves, channel by channel."""

NORMALIZERS = ("none", "sum", "clamp", "abs")
ALIGNMENTS = ("bottom_right", "top_left")


class LinearState(NamedTuple):
    """The state of linear attention: sums over the keys seen so far.

    Attributes:
        kv: [batch, state_heads, feature_dim, value_dim]: the sum of key features times values.
        key_sum: [batch, state_heads, feature_dim]: the sum of key features.
        log_scale: [batch, state_heads] or None: both sums are to be multiplied by its exponential.
            Only feature maps that scale their features (`feature_maps.Favor`) have one. One that is
            returned is a constant to autograd: the sums have all of the gradient.

    Examples:
        >>> state = saccade.LinearState(torch.zeros(1, 4, 16, 16), torch.zeros(1, 4, 16))
        >>> query, key, value = torch.randn(3, 1, 4, 1, 16)
        >>> with torch.no_grad():
        ...     output = saccade.linear_attention_step(state, query, key, value)
        >>> torch.testing.assert_close(output, value)  # it has seen one token
    """

    kv: Tensor
    key_sum: Tensor
    log_scale: Tensor | None = None

    def clone(self) -> LinearState:
        """A copy that shares no memory, for a sequence that branches off."""
        scale = None if self.log_scale is None else self.log_scale.clone()
        return LinearState(self.kv.clone(), self.key_sum.clone(), scale)


class LinearInputs(NamedTuple):
    """The tensors of one call, in the order of the operator's arguments.

    Dense: query [batch, heads, rows, dim], decay [batch, state_heads, kv_len]. Packed:
    [tokens, heads, dim] and [kv_tokens, state_heads]. A decay [state_heads] is constant.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    key_lengths: Tensor | None = None
    initial_kv: Tensor | None = None
    initial_key_sum: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether sequences are laid end to end."""
        return self.cu_seqlens_q is not None

    @property
    def num_sequences(self) -> int:
        """Batch entries, or packed sequences."""
        if self.cu_seqlens_q is None:
            return self.query.shape[0]
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def state_heads(self) -> int:
        """Heads of the state: one for each pair of a key head and a value head."""
        return max(self.key.shape[1], self.value.shape[1])

    @property
    def heads(self) -> int:
        """Heads of the output."""
        return max(self.query.shape[1], self.state_heads)


class LinearVariant(NamedTuple):
    """The function of a call: plain values only, in the order of the operator's arguments."""

    causal: bool
    align: str
    feature_map: str  # one of FUSED_MAPS
    normalize: str  # one of NORMALIZERS
    eps: float
    scale: float


class LinearResults(NamedTuple):
    """The results of a forward pass.

    `normaliser`: [batch, heads, query_len] ([heads, tokens] if packed), each row's sum of scores
    before `eps` comes in; without a normaliser it has no elements.
    """

    output: Tensor
    normaliser: Tensor
    kv: Tensor
    key_sum: Tensor


class LinearGradients(NamedTuple):
    """One gradient for each input that can have one."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    initial_kv: Tensor | None
    initial_key_sum: Tensor | None


def empty_linear_results(inputs: LinearInputs, variant: LinearVariant) -> LinearResults:
    """Memory for the results, laid out as every implementation lays it out."""
    query, value_dim = inputs.query, inputs.value.shape[-1]
    wide, packed = accumulate_dtype(query.dtype), inputs.packed
    output = empty_output(query, inputs.heads, value_dim, packed)
    rows = (0,) if variant.normalize == "none" else row_shape(output, packed)
    normaliser = query.new_empty(rows, dtype=wide)
    states = (inputs.num_sequences, inputs.state_heads, query.shape[-1])
    return LinearResults(
        output,
        normaliser,
        query.new_empty(*states, value_dim, dtype=wide),
        query.new_empty(states, dtype=wide),
    )


def empty_linear_gradients(inputs: LinearInputs) -> LinearGradients:
    """Contiguous memory for the gradients."""

    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.new_empty(tensor.shape)

    return LinearGradients(
        inputs.query.new_empty(inputs.query.shape),
        inputs.key.new_empty(inputs.key.shape),
        inputs.value.new_empty(inputs.value.shape),
        like(inputs.decay),
        like(inputs.initial_kv),
        like(inputs.initial_key_sum),
    )


COUNTED_CHUNK = 64  # rows of a chunk where operations are counted


class LinearProblem(NamedTuple):
    """The shape of a call: what implementations are chosen by. Holds no tensors.

    For packed sequences `batch` counts sequences, and `query_len` and `kv_len` count all tokens.
    """

    batch: int
    query_heads: int
    key_heads: int
    value_heads: int
    query_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    causal: bool = True
    feature_map: str = "elu+1"
    normalize: str = "sum"
    packed: bool = False
    decay: bool = False
    state: bool = False
    configured: bool = False
    tma: bool = False  # whether TMA can read query, key and value as they lie

    @property
    def operation(self) -> str:
        """The operation's folder below saccade.ops."""
        return "linear_attention"

    @property
    def bytes(self) -> int:
        """Bytes that must move at least once: inputs and output, each read or written once."""
        rows = 1 if self.packed else self.batch
        heads = max(self.query_heads, self.key_heads, self.value_heads)
        queries = (
            rows * self.query_len * (self.query_heads * self.head_dim + heads * self.value_dim)
        )
        keys = rows * self.kv_len
        keys *= self.key_heads * self.head_dim + self.value_heads * self.value_dim
        return (queries + keys) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward pass in chunks of 64 rows.

        Each query row reads the state and each key row is added to it: 2 · head_dim · value_dim
        operations each. A causal call also multiplies each query row with the keys and values of
        its chunk: 2 · 64 · (head_dim + value_dim).
        """
        rows = 1 if self.packed else self.batch
        heads = max(self.query_heads, self.key_heads, self.value_heads)
        state_heads = max(self.key_heads, self.value_heads)
        product = 2 * self.head_dim * self.value_dim
        inside = 2 * COUNTED_CHUNK * (self.head_dim + self.value_dim) if self.causal else 0
        queries = heads * self.query_len * (product + inside)
        return rows * (queries + state_heads * self.kv_len * product)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of a backward pass in chunks of 64 rows.

        The state is made again by the keys; its gradient takes the queries in; the gradients of
        queries, keys and values each read one of the two: five products with a state. Inside a
        chunk are five more, three of them over head_dim.
        """
        rows = 1 if self.packed else self.batch
        heads = max(self.query_heads, self.key_heads, self.value_heads)
        state_heads = max(self.key_heads, self.value_heads)
        product = 2 * self.head_dim * self.value_dim
        inside = 2 * COUNTED_CHUNK * (3 * self.head_dim + 2 * self.value_dim) if self.causal else 0
        queries = heads * self.query_len * (2 * product + inside)
        return rows * (queries + 3 * state_heads * self.kv_len * product)
