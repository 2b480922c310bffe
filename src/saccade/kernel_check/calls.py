"""Calls of the library, described by plain numbers, whose kernels are compiled and timed.

A description makes its tensors on a device and starts one pass of the library at a time, so that
what looks at launches sees the same kernels and arguments as in a user's call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from saccade import (
    LinearState,
    attention,
    attention_fp8,
    attention_fp8_varlen,
    attention_paged,
    attention_varlen,
    gated_delta_rule,
    gated_delta_rule_step,
    gated_delta_rule_varlen,
    linear_attention,
    linear_attention_step,
    masks,
    scores,
    write_kv_cache,
)
from saccade.gpu.kernel_args import there_are
from saccade.gpu.language import INTERPRETED
from saccade.masks import Mask
from saccade.ops.attention.triton.call_spec import is_short
from saccade.ops.attention_fp8.validation import Fp8Options
from saccade.ops.attention_fp8.validation import prepare as prepare_fp8
from saccade.runtime.delta_spec import DeltaInputs, DeltaVariant
from saccade.runtime.dropout import Numbers
from saccade.runtime.spec import (
    Inputs,
    KernelConfig,
    LinearInputs,
    LinearVariant,
    PagedInputs,
    Results,
    Variant,
    empty_linear_results,
    empty_results,
)
from saccade.runtime.validation import prepare, prepare_paged, with_seed
from saccade.scores import Score

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGE_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "int8": torch.int8}

CPU = torch.device("cpu")
MASKS = ("none", "causal", "window", "documents", "blocks", "dense")
TABLES = ("documents", "blocks", "dense")  # masks that capture tensors, whose content is not read
WINDOW = 256
MASK_BLOCK = 128  # rows that share an entry of a block-sparse mask
VISIBLE_BLOCKS = 10  # one in so many
SHORT = 1024  # rows; Hopper's forward pass has other schedules for so few
LONG_CHUNK = 512  # query rows over pages; so many take the dense kernel

# The kernels, by the pass in which the library starts them. Names that begin with hopper are
# kernels for sm_90 alone.
ATTENTION_PASSES = {
    "forward": ("forward", "find_tile_ranges", "classify_pairs", "list_tiles", "list_blocks"),
    "ordered": ("backward_keys", "backward_keys, NaN-safe", "backward_queries", "row_statistics"),
    "shared": ("backward_shared", "backward_shared, NaN-safe"),
    "bias": ("backward_bias", "lse_residual"),
    "hopper": ("hopper_forward",),
    "hopper_shared": (
        "hopper_backward",
        "hopper_backward_begin",
        "hopper_backward_end",
        "hopper_backward_nan_safe_keys",
        "hopper_backward_nan_safe_queries",
    ),
    "hopper_ordered": ("hopper_backward, ordered",),
    "hopper_in_order": ("hopper_backward, in key order",),
    "hopper_split": ("hopper_backward, split", "hopper_backward_add_splits"),
    "hopper_apart": ("hopper_backward_keys", "hopper_backward_queries"),
}
PAGED_PASSES = {
    "paged": ("pages", "merge_partials", "plan_pages", "pages_forward"),
    "hopper_paged": ("hopper_pages_forward",),
    "write": ("write_pages",),
}
LINEAR_PASSES = {
    "linear": ("linear_output", "linear_count", "linear_collect", "linear_chain"),
    "linear backward": (
        "linear_row_dot", "linear_grad_query", "linear_grad_key", "linear_grad_value",
    ),
    "linear step": ("linear_step",),
    "hopper_linear": (
        "hopper_linear_forward", "hopper_linear_collect", "hopper_linear_output_nan_safe",
        "hopper_linear_wide_output",
    ),
    "hopper_linear backward": (
        "hopper_linear_backward_queries", "hopper_linear_backward_keys",
        "hopper_linear_collect_queries",
        "hopper_linear_grad_key_nan_safe",  # of three that are like it
        "hopper_linear_wide_grad_query", "hopper_linear_wide_grad_key",
        "hopper_linear_wide_grad_value",
    ),
}  # fmt: skip
DELTA_PASSES = {
    "delta": (
        "delta_sums", "delta_channel_sums", "delta_norms", "delta_system", "delta_segments",
        "delta_join_segments", "delta_forward_scan", "delta_forward_scan, NaN-safe",
    ),
    "delta backward": (
        "delta_reverse_scan", "delta_gradients", "delta_sum_heads", "delta_clear_behind",
    ),
    "delta step": ("delta_step",),
    "hopper_delta": ("hopper_delta_forward", "hopper_delta_nan_safe"),
    "hopper_delta backward": ("hopper_delta_forward, keeping", "hopper_delta_chunk_gradients"),
}  # fmt: skip
FP8_PASSES = {
    "fp8": ("fp8_forward", "fp8_quantise_values", "fp8_mean_keys", "fp8_quantise_rows"),
    "hopper_fp8": ("hopper_fp8_forward",),
}  # fmt: skip
BACKWARD, HOPPER_BACKWARD = "backward", "hopper_backward"
"""Passes of gradients in the form that the library chooses for the sizes of a call."""

PASSES = {**ATTENTION_PASSES, **PAGED_PASSES, **LINEAR_PASSES, **DELTA_PASSES, **FP8_PASSES}
KERNELS = tuple(kernel for kernels in PASSES.values() for kernel in kernels)

StartPass = Callable[[str, KernelConfig | None], None]
"""Starts one of PASSES in the library, with a config or with the one that it chooses."""


class KernelCall(NamedTuple):
    """A call of attention."""

    head_dim: int
    dtype: str = "bf16"
    mask: str = "none"
    score: str = "none"
    dropout_p: float = 0.0
    packed: bool = False
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    length: int = SHORT
    value_dim: int = 0  # 0: as head_dim
    heads_inside: bool = False  # [batch, length, heads, dim] in memory, as projections leave them
    offsets_apart: bool = False  # packed queries and keys have offsets of their own
    sinks: bool = False
    deterministic: bool = False
    query_len: int = 0  # 0: as many rows as keys
    alone: bool = False  # packed rows of a batch entry are one sequence, not two
    # What else the forward pass gives: "residual" or "max_logit"; or "grouped": the call is a part
    # of a longer one, whose dropout it takes part in, with keys in groups of four.
    more: str = ""

    @property
    def operation(self) -> str:
        """The function that is called."""
        return "attention_varlen" if self.packed else "attention"

    @property
    def name(self) -> str:
        """A name in which calls of one catalogue differ."""
        extras = [self.score] if self.score != "none" else []
        extras += ["dropout"] if self.dropout_p else []
        extras += ["sinks"] if self.sinks else []
        extras += ["deterministic"] if self.deterministic else []
        extras += [f"{self.query_len} queries"] if self.query_len else []
        extras += ["packed"] if self.packed else []
        extras += ["one sequence"] if self.alone else []
        extras += [f"{self.length} rows"] if self.length != SHORT else []
        extras += [f"values of {self.value_dim}"] if self.value_dim else []
        extras += ["heads inside"] if self.heads_inside else []
        extras += ["offsets apart"] if self.offsets_apart else []
        extras += [f"with {self.more}"] if self.more else []
        return " ".join([f"{self.dtype} d{self.head_dim} {self.mask}", *extras])

    def is_short(self) -> bool:
        """Whether its rows see few keys, which the library looks at when it chooses a config."""
        mask = None if self.mask in TABLES else self._mask(CPU)
        length = self.length // 2 if self.packed else self.length
        return mask is not None and is_short(mask.key, mask.captured, length, length)

    def make(self, device: torch.device) -> tuple[Inputs, Variant]:
        """Tensors and options; packed rows are two sequences a batch entry."""
        query, key, value = self._tensors(device)
        offsets, of_keys = self._offsets(device)
        inputs, variant, _, _ = prepare(
            query, key, value, offsets, of_keys, None, None, mask=self._mask(device),
            score=self._score(device), scale=None, sinks=None, dropout_p=self.dropout_p,
            return_lse=False, deterministic=False, config=None,
        )  # fmt: skip
        more = {self.more: True} if self.more else {}
        inputs, variant = with_seed(inputs, variant), variant._replace(**more)
        if self.more == "grouped":
            rows = torch.arange(self.length)
            numbers = Numbers.of_rows(0, rows, torch.zeros_like(rows), rows, rows)
            inputs = inputs._replace(numbers=numbers.to(device).table)
        return inputs, variant

    def user_call(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The call by its public name: its output, and what may have gradients."""
        tensors, score = self._tensors(device), self._score(device)
        options: dict[str, Any] = {
            "mask": self._mask(device), "score": score, "dropout_p": self.dropout_p,
            "deterministic": self.deterministic,
        }  # fmt: skip
        if self.sinks:
            options["sinks"] = torch.zeros(self.heads, device=device, requires_grad=True)
        captured = () if score is None else score.captured.tensors
        leaves = [*tensors, *(one for one in captured if one.requires_grad)]
        leaves += [options["sinks"]] if self.sinks else []
        query, key, value = tensors
        if self.packed:
            return attention_varlen(query, key, value, *self._offsets(device), **options), leaves
        return attention(query, key, value, **options), leaves

    def _tensors(self, device: torch.device) -> list[Tensor]:
        return [
            self._rows(heads, length, dim, device)
            for heads, length, dim in (
                (self.heads, self.query_len or self.length, self.head_dim),
                (self.kv_heads, self.length, self.head_dim),
                (self.kv_heads, self.length, self.value_dim or self.head_dim),
            )
        ]

    def _offsets(self, device: torch.device) -> tuple[Any, Any]:
        if not self.packed:
            return None, None
        tokens, each = self.batch * self.length, self.length // (1 if self.alone else 2)
        found = torch.arange(0, tokens + 1, each, dtype=torch.int32, device=device)
        return found, found.clone() if self.offsets_apart else None

    def _rows(self, heads: int, length: int, dim: int, device: torch.device) -> Tensor:
        shape = self.batch, heads, length, dim
        if self.packed:
            shape = self.batch * length, heads, dim
        elif self.heads_inside:
            shape = self.batch, length, heads, dim
        dtype = DTYPES[self.dtype]
        if device.type == "cuda":
            rows = torch.randn(shape, device=device).to(dtype)
        else:
            rows = _untouched(shape, dtype, device)
        return (rows.transpose(1, 2) if self.heads_inside else rows).requires_grad_()

    def _mask(self, device: torch.device) -> Mask | None:
        rows = torch.arange(self.length, device=device)
        match self.mask:
            case "causal":
                return masks.causal()
            case "window":
                return masks.causal() & masks.window(WINDOW)
            case "window 4096":
                return masks.causal() & masks.window(int(self.mask.split()[1]))
            case "documents" | "documents, causal":
                sequences = self.batch * (2 if self.packed else 1)
                ids = (rows * 4 // self.length).expand(sequences, -1).contiguous()
                found = masks.documents(ids)
                return found if self.mask == "documents" else found & masks.causal()
            case "prefix":
                return masks.prefix(torch.ones(self.batch, dtype=torch.int64, device=device))
            case "blocks":
                blocks = torch.arange(-(-self.length // MASK_BLOCK), device=device)
                visible = (blocks[:, None] - blocks) % VISIBLE_BLOCKS == 0
                return masks.blocks(visible.expand(self.heads, -1, -1).contiguous(), MASK_BLOCK)
            case "dense":
                return masks.dense(rows[:, None] >= rows)  # causal, written out
        return None

    def _score(self, device: torch.device) -> Score | None:
        if self.score == "softcap":
            return scores.softcap(30.0)
        if self.score == "alibi":
            return scores.alibi(torch.ones(self.heads, device=device))
        if self.score in ("bias", "bias like rows"):
            shape = (1, self.heads, self.length, self.length)
            dtype = torch.float32 if self.score == "bias" else DTYPES[self.dtype]
            table = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
            return scores.bias(table)
        return None

    def prepared(self, device: torch.device) -> StartPass:
        """Make the tensors, and zeros for a forward pass's results; start passes with these."""
        inputs, variant = self.make(device)
        output, lse = empty_results(inputs)
        gradient, residual = torch.empty_like(output), None
        if inputs.query.dtype.itemsize == 2:
            residual = torch.empty_like(output, dtype=torch.int8)
        saved = Results(output, lse, residual)
        if device.type == "cuda" or INTERPRETED:  # kernels run, and read them
            for tensor in (gradient, output, lse, *([] if residual is None else [residual])):
                tensor.zero_()

        def start(which: str, config: KernelConfig | None) -> None:
            numbers = config or KernelConfig()
            with torch.no_grad():
                if which == "forward":
                    from saccade.ops.attention.triton import host

                    host.forward(inputs, variant, numbers)
                elif which == "hopper":
                    from saccade.ops.attention.hopper import host

                    host.prepared(inputs, variant, KernelConfig())(inputs, variant)
                else:
                    captured = [0] if which == "bias" else []
                    with _backward_of(which) as backward:
                        backward(
                            inputs, variant, numbers, saved, gradient, None, captured,
                            not which.endswith(("shared", BACKWARD)),
                        )  # fmt: skip

        return start


@contextmanager
def _backward_of(which: str) -> Iterator[Callable[..., object]]:
    """The backward pass, made to take the form that `which` names whatever the sizes are."""
    if which in (BACKWARD, HOPPER_BACKWARD):  # the form that the library chooses
        from saccade.ops.attention.hopper import host as hopper_host
        from saccade.ops.attention.triton import host as triton_host

        yield (triton_host if which == BACKWARD else hopper_host).backward
        return
    if not which.startswith("hopper"):
        from saccade.ops.attention.triton import host

        with patch.object(host, "ordered_is_faster", lambda kind: False):
            yield host.backward
        return
    from saccade.ops.attention.hopper import configs
    from saccade.ops.attention.hopper import host as hopper_host

    hopper_host._kinds.clear()  # of calls like this one in another form
    hopper_host._backwards.clear()
    with patch.multiple(
        configs,
        ordered=lambda problem: which == "hopper_ordered" or configs.apart(problem),
        in_key_order=lambda problem: which == "hopper_in_order",
    ):
        yield hopper_host.backward


class PagedCall(NamedTuple):
    """A call over pages, or a write of rows into them."""

    head_dim: int
    dtype: str = "bf16"  # of queries; "fp8" over pages of it
    mask: str = "none"
    page_size: int = 64
    pages: str = ""  # their dtype, if it is another
    query_len: int = 1
    batch: int = 2
    heads: int = 32
    kv_heads: int = 8
    length: int = 1024
    latent: int = 0  # so many first channels of keys are the values; 0: values are as wide as keys

    operation = "attention_paged"

    @property
    def name(self) -> str:
        """A name in which calls of one catalogue differ."""
        extras = [self.pages] if self.pages else []
        short = "short chunk" if self.query_len > 1 else "decode"
        extras += ["chunk" if self.query_len >= LONG_CHUNK else short, f"p{self.page_size}"]
        extras += [f"latent {self.latent}"] if self.latent else []
        extras += [f"{self.heads} heads"] if self.latent else []
        return " ".join([f"{self.dtype} d{self.head_dim} {self.mask}", *extras])

    def make(self, device: torch.device) -> tuple[PagedInputs, Variant]:
        """Tensors and options."""
        inputs, variant, _, _ = prepare_paged(
            self._inputs(device), mask=self._mask(device), score=None, scale=None,
            batch_invariant=False, return_lse=False, config=None,
        )  # fmt: skip
        return inputs, variant

    def user_call(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The call by its public name: its output; nothing has gradients."""
        found = self._inputs(device)
        output = attention_paged(
            *found[:5], mask=self._mask(device), key_scales=found.key_scales,
            value_scales=found.value_scales, query_scale=found.query_scale,
        )  # fmt: skip
        return output, []

    def user_write(self, device: torch.device, rotary: bool) -> None:
        """Write rows by the function's public name."""
        found = self._inputs(device)
        key = found.query.transpose(1, 2).flatten(0, 1)[:, : self.kv_heads].contiguous()
        slots = torch.zeros(key.shape[0], dtype=torch.int64, device=device)
        angles = torch.zeros(key.shape[0], key.shape[2] // 2, device=device)
        write_kv_cache(
            key, key.clone(), found.key_pages, found.value_pages, slots,
            key_scales=found.key_scales, value_scales=found.value_scales,
            rotary=(angles, angles) if rotary else None,
        )  # fmt: skip

    def _inputs(self, device: torch.device) -> PagedInputs:
        count = -(-self.length // self.page_size)
        query_shape = self.batch, self.heads, self.query_len, self.head_dim
        shape = (self.batch * count, self.kv_heads, self.page_size, self.head_dim)
        stored = PAGE_DTYPES[self.pages or self.dtype]

        def scales() -> Tensor | None:
            of_eight_bits = self.pages or self.dtype == "fp8"
            return torch.ones(shape[:3], device=device) if of_eight_bits else None

        table = torch.arange(self.batch * count, dtype=torch.int32, device=device)
        keys = _untouched(shape, stored, device)
        return PagedInputs(
            _untouched(query_shape, PAGE_DTYPES[self.dtype], device),
            keys,
            keys[..., : self.latent] if self.latent else _untouched(shape, stored, device),
            table.view(self.batch, count),
            torch.full((self.batch,), self.length, dtype=torch.int32, device=device),
            key_scales=scales(),
            value_scales=scales(),
            query_scale=torch.ones(query_shape[:2], device=device) if self.dtype == "fp8" else None,
        )

    def _mask(self, device: torch.device) -> Mask | None:
        if self.mask == "tree":
            parents = torch.arange(self.query_len).expand(self.batch, -1) - 1
            before = torch.full((self.batch,), self.length - self.query_len, device=device)
            return masks.tree(masks.tree_bits(parents).to(device), before)
        return masks.causal() if self.mask == "causal" else None

    def prepared(self, device: torch.device) -> StartPass:
        """Make the tensors; start passes with these."""
        inputs, variant = self.make(device)

        def start(which: str, config: KernelConfig | None) -> None:
            if which == "write":
                _write_pages(inputs)
                return
            if which == "hopper_paged":
                from saccade.ops.paged_attention import hopper as host
            else:
                from saccade.ops.paged_attention.triton import host
            with torch.no_grad():
                host.forward(inputs, variant, config or KernelConfig(), False)

        return start


def _write_pages(inputs: PagedInputs) -> None:
    from saccade.kv_cache import write_triton

    key = inputs.query.transpose(1, 2).flatten(0, 1)[:, : inputs.key_pages.shape[1]]
    slots = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device)
    angles = torch.zeros(key.shape[0], key.shape[2] // 2, device=key.device)
    write_triton.write(
        key, key, inputs.key_pages, inputs.value_pages, slots, inputs.key_scales,
        inputs.value_scales, angles, angles, False,
    )  # fmt: skip


def _untouched(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on a GPU; on a CPU, where nothing runs, memory that is never touched and takes none."""
    if device.type == "cuda":
        return torch.zeros(shape, device=device).to(dtype)
    return torch.empty(shape, dtype=dtype)


class LinearCall(NamedTuple):
    """A call of linear attention."""

    head_dim: int
    dtype: str = "bf16"
    decay: bool = False
    length: int = 1024
    batch: int = 2
    heads: int = 64
    group: int = 1  # query heads of a state

    operation = "linear_attention"

    @property
    def name(self) -> str:
        """A name in which calls of one catalogue differ."""
        extras = ["decay"] if self.decay else []
        extras += ["segments"] if self.batch * self.heads < 16 else []
        extras += ["shared"] if self.group > 1 else []
        return " ".join([f"{self.dtype} d{self.head_dim} causal", *extras])

    def make(self, device: torch.device) -> tuple[LinearInputs, LinearVariant]:
        """Tensors and options."""
        shape = self.batch, self.heads, self.length, self.head_dim
        of_keys = self.batch, self.heads // self.group, *shape[2:]
        query, key, value = (
            _untouched(sizes, DTYPES[self.dtype], device) for sizes in (shape, of_keys, of_keys)
        )
        decay = torch.zeros(shape[:3], device=device) if self.decay else None
        variant = LinearVariant(True, "bottom_right", "elu+1", "sum", 1e-6, 1.0)
        return LinearInputs(query, key, value, decay), variant

    def user_call(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The call by its public name: its output, and what may have gradients."""
        inputs, _ = self.make(device)
        leaves = [rows.requires_grad_() for rows in inputs[:3]]
        if inputs.decay is not None:
            leaves.append(inputs.decay.requires_grad_())
        return linear_attention(*leaves[:3], decay=inputs.decay), leaves

    def user_step(self, device: torch.device) -> None:
        """A step of decoding by the function's public name."""
        inputs, _ = self.make(device)
        shape = self.batch, self.heads // self.group, self.head_dim
        state = LinearState(
            torch.zeros(*shape, self.head_dim, device=device), torch.zeros(shape, device=device)
        )
        rows = [rows[:, :, :1].contiguous() for rows in inputs[:3]]
        decay = None if inputs.decay is None else inputs.decay[:, :, :1].contiguous()
        linear_attention_step(state, *rows, decay=decay)

    def prepared(self, device: torch.device) -> StartPass:
        """Make the tensors, and memory for a forward pass's results; start passes with these."""
        inputs, variant = self.make(device)
        results = empty_linear_results(inputs, variant)

        def start(which: str, config: KernelConfig | None) -> None:
            if which.startswith("hopper"):
                from saccade.ops.linear_attention.hopper import host
            else:
                from saccade.ops.linear_attention.triton import host
            numbers = config or KernelConfig()
            if which.endswith("backward"):
                gradient = torch.zeros_like(results.output)
                saved = results.output, results.normaliser
                host.backward(inputs, variant, numbers, *saved, gradient, None, None)
            elif which.endswith("step"):
                query, key, value = (rows[:, :, :1] for rows in inputs[:3])
                decay = None if inputs.decay is None else inputs.decay[:, :, :1]
                one = inputs._replace(query=query, key=key, value=value, decay=decay)
                host.step(results.kv, results.key_sum, None, one, variant)
            else:
                host.forward(inputs, variant, numbers)

        return start


LONG_ROWS = 65536  # of a sequence that is cut into segments, if its heads are few


class DeltaCall(NamedTuple):
    """A call of the gated delta rule."""

    head_dim: int
    dtype: str = "bf16"
    decay: str = "heads"  # none, heads or channels
    length: int = 1024
    batch: int = 2
    heads: int = 32
    key_heads: int = 16
    heads_inside: bool = False  # heads beside channels, as projections leave them
    packed: bool = False  # a sequence for each batch entry

    @property
    def operation(self) -> str:
        """The public name of what is called."""
        return "gated_delta_rule_varlen" if self.packed else "gated_delta_rule"

    @property
    def name(self) -> str:
        """A name in which calls of one catalogue differ."""
        more = (", long" if self.length >= LONG_ROWS else "") + (", packed" if self.packed else "")
        return f"{self.dtype} d{self.head_dim} decay of {self.decay}{more}"

    def make(self, device: torch.device) -> tuple[DeltaInputs, DeltaVariant]:
        """Tensors and options."""

        def rows(heads: int, *channels: int, dtype: torch.dtype = DTYPES[self.dtype]) -> Tensor:
            if self.packed:
                tokens = self.batch * self.length
                return _untouched((tokens, heads, *channels), dtype, device)
            if self.heads_inside:
                made = _untouched((self.batch, self.length, heads, *channels), dtype, device)
                return made.transpose(1, 2)
            return _untouched((self.batch, heads, self.length, *channels), dtype, device)

        query, key = (rows(self.key_heads, self.head_dim) for _ in "qk")
        value, beta, decay = rows(self.heads, self.head_dim), rows(self.heads), None
        if self.decay != "none":
            channels = (self.head_dim,) if self.decay == "channels" else ()
            decay = rows(self.heads, *channels, dtype=torch.float32)
        inputs = DeltaInputs(query, key, value, beta, decay)
        if self.packed:
            ends = torch.arange(self.batch + 1, dtype=torch.int32, device=device) * self.length
            inputs = inputs._replace(cu_seqlens=ends)
        return inputs, DeltaVariant(True, 1.0)

    def user_call(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The call by its public name: its output, and what may have gradients."""
        inputs, _ = self.make(device)
        leaves = [each.requires_grad_() for each in there_are(inputs[:5])]
        ends = there_are((inputs.cu_seqlens,))
        call: Any = gated_delta_rule_varlen if self.packed else gated_delta_rule
        output = call(*leaves[:4], *ends, decay=inputs.decay, normalize_qk=True)
        assert isinstance(output, Tensor)
        return output, leaves

    def user_step(self, device: torch.device) -> None:
        """A step of decoding by the function's public name."""
        inputs, _ = self._replace(length=1).make(device)
        state = self._states(device)
        gated_delta_rule_step(state, *inputs[:4], decay=inputs.decay, normalize_qk=True)

    def _states(self, device: torch.device) -> Tensor:
        shape = self.batch, self.heads, self.head_dim, self.head_dim
        return torch.zeros(shape, device=device)

    def prepared(self, device: torch.device) -> StartPass:
        """Make the tensors; start passes with these."""
        inputs, variant = self.make(device)

        def start(which: str, config: KernelConfig | None) -> None:
            from saccade.ops.delta_rule.hopper import host as hopper_host
            from saccade.ops.delta_rule.triton import host

            numbers = config or KernelConfig()
            if which.endswith("backward"):
                backward = hopper_host.backward if which.startswith("hopper") else host.backward
                backward(inputs, variant, numbers, torch.zeros_like(inputs.value), None)
            elif which.endswith("step"):
                one, slots = self._replace(length=1).make(device)[0], torch.arange(self.batch)
                host.step(self._states(device), slots.to(device), one, variant)
            elif which.startswith("hopper"):
                hopper_host.forward(inputs, variant, numbers)
            else:
                host.forward(inputs, variant, numbers)

        return start


SCALES = "query_scale", "key_scale", "value_scale"


class Fp8KernelCall(NamedTuple):
    """A call of fp8 attention."""

    head_dim: int
    dtype: str = "bf16"  # or "fp8"
    mask: str = "none"
    packed: bool = False
    quantize: str = "block"
    length: int = SHORT
    batch: int = 2
    heads: int = 4
    kv_heads: int = 0  # 0: as many as query heads
    heads_inside: bool = False  # [batch, length, heads, dim] in memory, as projections leave them
    scaled: bool = True  # whether e4m3 rows have scales

    @property
    def operation(self) -> str:
        """The function that is called."""
        return "attention_fp8_varlen" if self.packed else "attention_fp8"

    @property
    def name(self) -> str:
        """A name in which calls of one catalogue differ."""
        extras = [f"scales of {self.quantize}s"] if self.quantize != "block" else []
        extras += ["packed"] if self.packed else []
        extras += [] if self.scaled else [f"{self.length} rows without scales"]
        return " ".join([f"{self.dtype} d{self.head_dim} {self.mask}", *extras])

    def user_call(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The call by its public name: its output; nothing has gradients."""
        scales = dict(zip(SCALES, self._scales(device), strict=True))
        rows, options = self._rows(device), {"mask": self._mask(), "quantize": self._quantize}
        if self.packed:
            ends = self._ends(device)
            return attention_fp8_varlen(*rows, ends, ends, **scales, **options), []
        return attention_fp8(*rows, **scales, **options), []

    @property
    def _quantize(self) -> str | None:
        """How rows of 16 bits are quantised."""
        return None if self.dtype == "fp8" else self.quantize

    def _mask(self) -> Mask | None:
        if self.mask == "window":
            return masks.causal() & masks.window(WINDOW)
        return masks.causal() if self.mask == "causal" else None

    def _rows(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        def rows(heads: int) -> Tensor:
            shape = self.batch, heads, self.length, self.head_dim
            if self.packed:
                shape = self.batch * self.length, heads, self.head_dim
            elif self.heads_inside:
                shape = self.batch, self.length, heads, self.head_dim
            made = _untouched(shape, PAGE_DTYPES[self.dtype], device)
            return made.transpose(1, 2) if self.heads_inside and not self.packed else made

        of_keys = self.kv_heads or self.heads
        return rows(self.heads), rows(of_keys), rows(of_keys)

    def _scales(
        self, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        if self.dtype != "fp8" or not self.scaled:
            return None, None, None
        of_keys = self.kv_heads or self.heads
        query, key, value = (
            torch.ones(self.batch, heads, device=device) for heads in (self.heads, of_keys, of_keys)
        )
        return query, key, value

    def _ends(self, device: torch.device) -> Tensor:
        tokens = self.batch * self.length
        return torch.arange(0, tokens + 1, self.length, dtype=torch.int32, device=device)

    def prepared(self, device: torch.device) -> StartPass:
        """Make the tensors; start passes with these."""
        from saccade.ops.attention_fp8.hopper import host as hopper_host
        from saccade.ops.attention_fp8.triton import host as triton_host

        ends = self._ends(device) if self.packed else None
        fp8 = Fp8Options(*self._scales(device), self._quantize, None, None, None)
        found = prepare_fp8(
            *self._rows(device), ends, None, None, None, fp8=fp8, mask=self._mask(), score=None,
            scale=None, sinks=None, return_lse=False, config=None,
        )  # fmt: skip

        def start(which: str, config: KernelConfig | None) -> None:
            with torch.no_grad():
                numbers = config or KernelConfig()
                host = hopper_host if which == "hopper_fp8" else triton_host
                host.forward(found.inputs, found.variant, numbers, found.quantisation)

        return start


Call = KernelCall | PagedCall | LinearCall | DeltaCall | Fp8KernelCall


def call_of(which: str, fields: Iterable[Any]) -> Call:
    """The description of a call that starts a pass, from its fields."""
    if which in ATTENTION_PASSES:
        return KernelCall(*fields)
    if which in DELTA_PASSES:
        return DeltaCall(*fields)
    if which in FP8_PASSES:
        return Fp8KernelCall(*fields)
    return PagedCall(*fields) if which in PAGED_PASSES else LinearCall(*fields)
