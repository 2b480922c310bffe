"""Calls of attention, and the kernels that they start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from saccade import attention, attention_varlen, masks, scores
from saccade.gpu.language import INTERPRETED
from saccade.kernel_check.calls.tensors import CPU, DTYPES, SHORT, WINDOW, StartPass, untouched
from saccade.masks import Mask
from saccade.ops.attention.triton.call_spec import is_short
from saccade.runtime.dropout import Numbers
from saccade.runtime.spec import Inputs, KernelConfig, Results, Variant, empty_results
from saccade.runtime.validation import prepare, with_seed
from saccade.scores import Score

MASKS = ("none", "causal", "window", "documents", "blocks", "dense")
TABLES = ("documents", "blocks", "dense")  # masks that capture tensors, whose content is not read
MASK_BLOCK = 128  # rows that share an entry of a block-sparse mask
VISIBLE_BLOCKS = 10  # one in so many

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
BACKWARD, HOPPER_BACKWARD = "backward", "hopper_backward"
"""Passes of gradients in the form that the library chooses for the sizes of a call."""


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
            rows = untouched(shape, dtype, device)
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
