"""Calls: descriptions of calls of attention, which kernels are compiled and timed for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import masks, scores
from saccade.kernel_check.dtypes import DTYPES
from saccade.kernel_check.linear_calls import LINEAR_PASSES
from saccade.kernel_check.paged_calls import PAGED_PASSES
from saccade.masks import Mask
from saccade.ops.attention.triton.call_spec import is_short
from saccade.runtime.spec import Inputs, KernelConfig, Variant, empty_results
from saccade.runtime.validation import prepare, with_seed
from saccade.scores import Score

CPU = torch.device("cpu")
MASKS = ("none", "causal", "window", "documents", "blocks", "dense")
TABLES = ("documents", "blocks", "dense")  # masks that capture tensors, which are not looked at
SCORES = ("none", "softcap", "bias")
WINDOW = 256
MASK_BLOCK = 128  # rows that share an entry of a block-sparse mask
VISIBLE_BLOCKS = 10  # one in so many

# The kernels, by the pass in which the library starts them.
PASSES = {
    "forward": ("forward", "find_tile_ranges", "classify_pairs", "list_tiles", "list_blocks"),
    "ordered": ("backward_keys", "backward_keys, NaN-safe", "backward_queries", "row_statistics"),
    "shared": ("backward_shared", "backward_shared, NaN-safe"),
    "bias": ("backward_bias",),
    "hopper": ("hopper_forward",),  # by kernels for sm_90 alone
    "hopper_shared": (
        "hopper_backward",
        "hopper_backward_begin",
        "hopper_backward_end",
        "hopper_backward_nan_safe_keys",
        "hopper_backward_nan_safe_queries",
    ),
    "hopper_ordered": ("hopper_backward, ordered",),
    "hopper_in_order": ("hopper_backward, in key order",),
    "hopper_apart": ("hopper_backward_keys", "hopper_backward_queries"),
    **PAGED_PASSES,
    **LINEAR_PASSES,
}
KERNELS = tuple(kernel for kernels in PASSES.values() for kernel in kernels)


SHORT = 1024  # rows, for which Hopper's forward pass has schedules of its own


class KernelCall(NamedTuple):
    """A call of attention. Plain numbers and words, so that it can be handed to a process."""

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

    @property
    def name(self) -> str:
        """What tells the call from others of the same sizes."""
        extras = [self.score] if self.score != "none" else []
        extras += ["dropout"] if self.dropout_p else []
        extras += ["packed"] if self.packed else []
        extras += [f"{self.length} rows"] if self.length != SHORT else []
        extras += [f"values of {self.value_dim}"] if self.value_dim else []
        return " ".join([f"{self.dtype} d{self.head_dim} {self.mask}", *extras])

    def is_short(self) -> bool:
        """Whether its rows see few keys, as the library will find."""
        mask = None if self.mask in TABLES else make_mask(self, CPU)
        length = self.length // 2 if self.packed else self.length
        return mask is not None and is_short(mask.key, mask.captured, length, length)


def make(call: KernelCall, device: torch.device) -> tuple[Inputs, Variant]:
    """The tensors of a call, and what it asks for; packed rows are two sequences a batch entry."""
    query, key, value = (
        torch.randn(shape, device=device).to(DTYPES[call.dtype]).requires_grad_()
        if device.type == "cuda"
        else torch.zeros(shape, dtype=DTYPES[call.dtype], requires_grad=True)
        for shape in (
            _shape(call, call.heads, call.head_dim),
            _shape(call, call.kv_heads, call.head_dim),
            _shape(call, call.kv_heads, call.value_dim or call.head_dim),
        )
    )
    offsets = None
    if call.packed:
        tokens = call.batch * call.length
        offsets = torch.arange(0, tokens + 1, call.length // 2, dtype=torch.int32, device=device)
    mask, score = make_mask(call, device), make_score(call, device)
    inputs, variant, _, _ = prepare(
        query, key, value, offsets, None, None, None,
        mask=mask, score=score, scale=None, sinks=None, dropout_p=call.dropout_p,
        return_lse=False, deterministic=False, config=None,
    )  # fmt: skip
    return with_seed(inputs, variant), variant


def _shape(call: KernelCall, heads: int, dim: int) -> tuple[int, ...]:
    if call.packed:
        return call.batch * call.length, heads, dim
    return call.batch, heads, call.length, dim


def make_mask(call: KernelCall, device: torch.device) -> Mask | None:
    """The mask of a call."""
    makers: dict[str, Callable[[], Mask | None]] = {
        "none": lambda: None,
        "causal": masks.causal,
        "window": lambda: masks.causal() & masks.window(WINDOW),
        "documents": lambda: masks.documents(_document_ids(call, device)),
        "blocks": lambda: masks.blocks(_blocks(call, device), MASK_BLOCK),
        "dense": lambda: masks.dense(_table(call, device)),
    }
    return makers[call.mask]()


def _document_ids(call: KernelCall, device: torch.device) -> Tensor:
    row = torch.arange(call.length, device=device) * 4 // call.length  # four documents
    return row.expand(call.batch * (2 if call.packed else 1), -1).contiguous()


def _blocks(call: KernelCall, device: torch.device) -> Tensor:
    sides = -(-call.length // MASK_BLOCK)
    rows = torch.arange(sides, device=device)
    return ((rows[:, None] - rows) % VISIBLE_BLOCKS == 0).expand(call.heads, -1, -1).contiguous()


def _table(call: KernelCall, device: torch.device) -> Tensor:
    rows = torch.arange(call.length, device=device)
    return rows[:, None] >= rows  # causal, written out


def make_score(call: KernelCall, device: torch.device) -> Score | None:
    """The change of the scores of a call."""
    makers: dict[str, Callable[[], Score | None]] = {
        "none": lambda: None,
        "softcap": lambda: scores.softcap(30.0),
        "bias": lambda: scores.bias(_bias(call, device)),
    }
    return makers[call.score]()


def _bias(call: KernelCall, device: torch.device) -> Tensor:
    shape = (1, call.heads, call.length, call.length)
    return torch.zeros(shape, device=device, requires_grad=True)


def results_of(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Something finite in place of what a forward pass would have given."""
    output, lse = empty_results(inputs)
    return output.zero_(), lse.zero_()


def start(
    inputs: Inputs, variant: Variant, which: str, config: KernelConfig | None, results: Any
) -> None:
    """Have the library start one of PASSES, as it would in a call.

    results: (output, lse) of the forward pass.
    """
    from saccade.ops.attention.triton import gradients
    from saccade.ops.attention.triton import host as triton_host

    given = config or KernelConfig()
    if which == "hopper":
        from saccade.ops.attention.hopper import host as hopper_host

        hopper_host.prepared(inputs, variant, KernelConfig())(inputs, variant)
        return
    if which == "forward":
        triton_host.forward(inputs, variant, given)
        return
    output, lse = results
    if which.startswith("hopper_"):
        _start_hopper_backward(inputs, variant, given, results, which)
        return
    wanted = [0] if which == "bias" else []
    choose = gradients.ordered_is_faster
    gradients.ordered_is_faster = lambda kind: False  # the pass says which form, not the sizes
    try:
        triton_host.backward(
            inputs, variant, given, output, lse, torch.zeros_like(output), None, wanted,
            which != "shared",
        )  # fmt: skip
    finally:
        gradients.ordered_is_faster = choose


def _start_hopper_backward(
    inputs: Inputs, variant: Variant, config: KernelConfig, results: Any, which: str
) -> None:
    from saccade.ops.attention.hopper import configs
    from saccade.ops.attention.hopper import gradients as hopper_gradients
    from saccade.ops.attention.hopper import host as hopper_host

    output, lse = results
    forms = configs.ordered, configs.in_key_order
    # The pass says which form, not the sizes.
    apart = configs.apart
    configs.ordered = lambda problem: which == "hopper_ordered" or apart(problem)
    configs.in_key_order = lambda problem: which == "hopper_in_order"
    hopper_gradients._backwards.clear()  # of a call like this one in another form
    try:
        hopper_host.backward(
            inputs, variant, config, output, lse, torch.zeros_like(output), None, [],
            which != "hopper_shared",
        )  # fmt: skip
    finally:
        configs.ordered, configs.in_key_order = forms
