"""Arguments: every check of what a caller passed, before anything is computed.

Each complaint names the argument, what it got and what it takes. Checks that need the values of
tensors run where reading them costs nothing (on the CPU), or under `saccade.testing.checked()`.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.modifiers.expression import Captured
from saccade.modifiers.graph_constants import in_graph
from saccade.modifiers.modifier import Extents, misfit
from saccade.runtime.spec import DTYPES, QUANTISED, Inputs, KernelConfig, PagedInputs

# ---- options of other libraries ------------------------------------------------------------------

BIAS = "score=saccade.scores.bias(tensor) for numbers that are added, mask=tensor for bools"
WRITE = {
    "is_causal": 'mask=saccade.masks.causal("top_left"), which is what PyTorch means by it',
    "attn_mask": BIAS,
    "attention_mask": BIAS,
    "attn_bias": BIAS,
    "bias": BIAS,
    "key_padding_mask": "mask=saccade.masks.key_lengths(lengths), or mask=~padding[:, None, None]",
    "mask_mod": "mask=the function",
    "block_mask": "mask=the function that it was made of",
    "score_mod": "score=the function",
    "window_size": "mask=saccade.masks.window(left, right)",
    "sliding_window": "mask=saccade.masks.window(left)",
    "softcap": "score=saccade.scores.softcap(cap)",
    "logits_soft_cap": "score=saccade.scores.softcap(cap)",
    "alibi_slopes": "score=saccade.scores.alibi(slopes)",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "dropout": "dropout_p=",
    "dropout_rate": "dropout_p=",
    "enable_gqa": "nothing: kv_heads that divide query_heads need no flag",
    "return_softmax_lse": "return_lse=True",
    "return_attn_probs": "return_lse=True; weights are never written out",
    "need_weights": "return_lse=True; weights are never written out",
    "backend": "implementation=",
    "s_aux": "sinks=",
    "output_final_state": "return_state=",
    "use_qk_l2norm_in_kernel": "normalize_qk=",
    "g": "decay=",
    "q_descale": "query_scale=",
    "k_descale": "key_scale=",
    "v_descale": "value_scale=",
}


def options_of(function: Callable[..., Any], shared: Iterable[str] = ()) -> tuple[str, ...]:
    """The options of a public function by their names, with those that its `**options` may hold."""
    found = inspect.signature(function).parameters.values()
    named = [each.name for each in found if each.default is not each.empty]
    names = dict.fromkeys((*shared, *named))
    # Last what says how rows are packed or scaled.
    return tuple(sorted(names, key=lambda name: "_seqlen" in name or "_scale" in name))


def unknown_options(unknown: Iterable[str], takes: Sequence[str]) -> TypeError:
    """The error for options that a call does not have, with what to write instead.

    takes: the names of its own options, see `options_of`.
    """
    name = next(iter(unknown))
    write = WRITE.get(name)
    if write is not None and "=" in write and write.partition("=")[0] not in takes:
        write = None  # what another operation takes
    near = difflib.get_close_matches(name, takes, 1)
    write = write or (f"{near[0]}=" if near else None)
    advice = f"write {write}" if write else f"takes {', '.join(takes)}"
    return TypeError(f"{name}: an unknown option; {advice}")


_checked = contextvars.ContextVar("saccade_checked", default=False)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Also check the values of tensors that lie on a GPU, at the price of waiting for it.

    Examples:
        >>> query, key, value = torch.randn(3, 8, 2, 16)
        >>> ends = torch.tensor([0, 5, 8], dtype=torch.int32)  # on a GPU its values are not read
        >>> with saccade.testing.checked():  # unless they are to be checked
        ...     output = saccade.attention_varlen(query, key, value, ends)
    """
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def values_readable(tensor: Tensor) -> bool:
    """Whether a tensor's values may be read now: not while tracing or under vmap or grad."""
    # In this order: every call over pages asks, and what is compiled must not come to `_checked`,
    # as Dynamo does not follow a ContextVar before torch 2.15.
    if type(tensor) is not Tensor or torch.compiler.is_compiling():
        return False
    if not (tensor.device.type == "cpu" or _checked.get()):
        return False
    return not (torch._C._are_functorch_transforms_active() or in_graph())


INTEGERS = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: object,
    takes: str,
    *,
    dtypes: Sequence[torch.dtype] = (),
    num_dims: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Refuse what is no tensor, or not of these dtypes, dimensions and (query's) device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, takes {takes}")
    if tensor.is_nested:
        raise TypeError(f"{name}: got a nested tensor, takes {takes}")
    if dtypes and tensor.dtype not in dtypes:
        raise TypeError(f"{name}: got {tensor.dtype}, takes {takes}")
    if num_dims is not None and tensor.dim() != num_dims:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, takes {takes}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: got {tensor.device}, takes query's {device}")


def contiguous(numbers: Tensor | None) -> Tensor | None:
    """Numbers of heads, sequences or offsets one after the other, as kernels read them."""
    return None if numbers is None else numbers.contiguous()


DENSE_SHAPES = {
    "query": "[batch, query_heads, query_len, head_dim]",
    "key": "[batch, kv_heads, kv_len, head_dim]",
    "value": "[batch, kv_heads, kv_len, value_dim]",
}
PACKED_SHAPES = {
    "query": "[tokens, query_heads, head_dim]",
    "key": "[kv_tokens, kv_heads, head_dim]",
    "value": "[kv_tokens, kv_heads, value_dim]",
}


def refuse_recording(name: str) -> None:
    """Refuse a call inside of torch.jit.trace, whose program would be wrong for other rows.

    It records PyTorch's operators one by one, with lengths, tiles and offsets as they were.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"{name}: got one inside of torch.jit.trace, which records lengths, masks and offsets "
            "of this call as constants; takes one of torch.export or torch.compile (PyTorch's "
            "scaled_dot_product_attention can be traced, after sdpa.enable() too)"
        )


def check_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shapes: dict[str, str],
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Refuse queries, keys and values that do not fit together."""
    check_kinds(query, key, value, shapes, dtypes)
    _check_sizes(query, key, value, packed=shapes is PACKED_SHAPES)


def check_kinds(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shapes: dict[str, str],
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Refuse what is no tensor of so many dimensions, or of another dtype or device."""
    refuse_recording("query")
    num_dims = shapes["query"].count(",") + 1
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, takes a tensor {shapes[name]}")
        if tensor.is_nested or tensor.layout != torch.strided:
            got = "a nested tensor" if tensor.is_nested else tensor.layout
            raise TypeError(f"{name}: got {got}, takes a dense tensor {shapes[name]}")
        if tensor.dim() != num_dims:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, takes {shapes[name]}")
        if tensor.dtype not in dtypes:
            *most, last = [str(dtype).removeprefix("torch.") for dtype in dtypes]
            raise TypeError(f"{name}: got {tensor.dtype}, takes {', '.join(most)} or {last}")
    dtype, device = query.dtype, query.device
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: got {tensor.dtype}, takes query's {dtype}")
        if tensor.device != device:
            raise ValueError(f"{name}: got {tensor.device}, takes query's {device}")


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, *, packed: bool) -> None:
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    rows = 0 if packed else 2
    if not packed:
        for name, sizes in (("key", of_key), ("value", of_value)):
            if sizes[0] != of_query[0]:
                raise ValueError(f"{name}: got batch {sizes[0]}, takes query's {of_query[0]}")
    if of_value[1] != of_key[1]:
        raise ValueError(f"value: got {of_value[1]} heads, takes key's {of_key[1]}")
    check_heads("key", of_query[1], of_key[1])
    if of_key[-1] != of_query[-1]:
        raise ValueError(f"key: got head_dim {of_key[-1]}, takes query's head_dim {of_query[-1]}")
    if of_value[rows] != of_key[rows]:
        raise ValueError(f"value: got {of_value[rows]} rows, takes key's {of_key[rows]}")


def check_heads(name: str, query_heads: int, kv_heads: int) -> None:
    """Refuse a number of kv heads that does not divide that of query heads."""
    if query_heads != kv_heads and (kv_heads == 0 or query_heads % kv_heads != 0):
        raise ValueError(
            f"{name}: got {kv_heads} heads, takes a number that divides query's {query_heads}"
        )


SMALLEST, LARGEST = 1e-30, 1e30  # scales and caps: kernels hold them, times log2(e), in float32
SCALES = "0 or a number of 1e-30 to 1e+30 in size"


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the scores: 1/sqrt(head_dim) where it is None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0
    return check_scale(scale, " or None (1/sqrt(head_dim))")


def check_scale(scale: object, or_else: str = "") -> float:
    """Refuse what is neither 0 nor a number that float32 holds with room to spare."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)):
        raise TypeError(f"scale: got {scale!r}, takes {SCALES}{or_else}")
    if not (scale == 0 or SMALLEST <= scale <= LARGEST or -LARGEST <= scale <= -SMALLEST):
        raise ValueError(f"scale: got {scale}, takes {SCALES}{or_else}")
    return float(scale)


def check_dropout(dropout_p: float) -> float:
    """Refuse a dropout probability outside [0, 1)."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float, torch.SymFloat)):
        raise TypeError(f"dropout_p: got {dropout_p!r}, takes a number in [0, 1)")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: got {dropout_p}, takes a number in [0, 1)")
    return float(dropout_p)


def check_flag(name: str, value: object) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, takes True or False")


def check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    """Refuse sinks that are not one logit for each query head."""
    if sinks is None:
        return
    check_tensor("sinks", sinks, "a tensor [query_heads] or None")
    if not sinks.is_floating_point():
        raise TypeError(f"sinks: got {sinks.dtype}, takes a floating-point tensor [query_heads]")
    if tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}, takes ({query.shape[1]},)")
    if sinks.device != query.device:
        raise ValueError(f"sinks: got {sinks.device}, takes query's {query.device}")


def check_captured(
    argument: str, key: str, captured: Captured, extents: Extents, device: torch.device
) -> None:
    """Refuse a mask or score whose captured tensors do not fit the problem."""
    for tensor in captured.tensors:
        if tensor.device != device:
            raise ValueError(f"{argument}: captured a tensor on {tensor.device}, takes {device}")
    complaint = misfit(key, captured, extents)
    if complaint is not None:
        raise ValueError(f"{argument}: {complaint}")


OFFSETS = (
    "an int32 tensor [batch + 1] that starts at 0, ascends, and ends at the token count, or below "
    "it: tokens behind the last offset are padding"
)


def check_offsets(name: str, offsets: Tensor, num_tokens: int, device: torch.device) -> None:
    """Refuse sequence offsets that are not 0 … tokens, or fewer, ascending."""
    takes = OFFSETS
    check_tensor(name, offsets, takes, dtypes=(torch.int32,), num_dims=1, device=device)
    if offsets.shape[0] < 1:
        raise ValueError(f"{name}: got shape {tuple(offsets.shape)}, takes {takes}")
    if offsets.shape[0] == 1 and num_tokens:
        raise ValueError(f"{name}: got no sequence for {num_tokens} tokens, takes {takes}")
    if not values_readable(offsets):
        return
    values = offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}: got a first offset of {values[0]}, takes {takes}")
    if any(later < earlier for earlier, later in itertools.pairwise(values)):
        raise ValueError(f"{name}: got offsets that descend, takes {takes}")
    if values[-1] > num_tokens:
        raise ValueError(
            f"{name}: got a last offset of {values[-1]} for {num_tokens} tokens, takes {takes}"
        )


def check_max_length(name: str, length: int | None, offsets: Tensor) -> int | None:
    """Refuse a longest length that is not one; give the longest length where it can be known."""
    longest = None
    if values_readable(offsets):
        longest = int(offsets.diff().max()) if offsets.shape[0] > 1 else 0
    if length is None:
        return longest
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
        raise TypeError(f"{name}: got {length!r}, takes a whole number or None")
    if length < (longest or 0):
        raise ValueError(f"{name}: got {length}, takes at least the longest sequence, {longest}")
    return length if longest is None else longest


def resolve_config(
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None, device: torch.device
) -> KernelConfig | None:
    """The config for this device: the argument, or its capability's entry in a mapping."""
    if config is None or isinstance(config, KernelConfig):
        return config
    takes = "a KernelConfig, or a mapping from (major, minor) to KernelConfig"
    if not isinstance(config, Mapping):
        raise TypeError(f"config: got {type(config).__name__}, takes {takes}")
    for capability, entry in config.items():
        pair = isinstance(capability, tuple) and len(capability) == 2
        if not pair or not all(type(number) is int for number in capability):
            raise TypeError(f"config: got the key {capability!r}, takes {takes}")
        if not isinstance(entry, KernelConfig):
            raise TypeError(f"config: got {type(entry).__name__} for {capability}, takes {takes}")
    if device.type != "cuda":
        return None  # a mapping speaks of GPUs only
    return config.get(torch.cuda.get_device_capability(device))


def extents_of(inputs: Inputs, longest: tuple[Any, Any] | None = None) -> Extents:
    """The sizes that captured tensors must fit."""
    query, key = inputs.query, inputs.key
    if inputs.cu_seqlens_q is None:
        return Extents(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    num_sequences = inputs.cu_seqlens_q.shape[0] - 1
    query_len, kv_len = longest if longest is not None else (None, None)
    return Extents(num_sequences, query.shape[1], query_len, kv_len, packed=True)


# ---- values of masks, scores and caches ---------------------------------------------------------

ALIGNMENTS = ("bottom_right", "top_left")


def check_align(align: str) -> None:
    """Refuse an alignment that does not exist."""
    if align not in ALIGNMENTS:
        raise ValueError(f"align: got {align!r}, takes 'bottom_right' or 'top_left'")


def check_whole_number(name: str, value: object, *, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: got {value!r}, takes a whole number of at least {least}")
    if value < least:
        raise ValueError(f"{name}: got {value}, takes a whole number of at least {least}")


def integers(name: str, tensor: Tensor, num_dims: int) -> Tensor:
    """The tensor, if it is one of whole numbers with so many dimensions."""
    check_tensor(name, tensor, "a tensor of int32 or int64", dtypes=INTEGERS)
    if tensor.dim() != num_dims:
        raise ValueError(f"{name}: got {tensor.dim()} dimensions, takes {num_dims}")
    return tensor


def bools(name: str, tensor: Tensor) -> Tensor:
    """The tensor with four dimensions, if it is one of bools with at most as many."""
    takes = "a tensor of torch.bool (True = visible)"
    check_tensor(name, tensor, takes, dtypes=(torch.bool,))
    if tensor.dim() > 4:
        raise ValueError(f"{name}: got {tensor.dim()} dimensions, takes at most 4")
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def floats(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it is a floating-point one."""
    check_floating_point(name, tensor, "a floating-point tensor")
    return tensor


def check_floating_point(name: str, tensor: object, takes: str) -> None:
    """Refuse what is no floating-point tensor."""
    check_tensor(name, tensor, takes)
    if isinstance(tensor, Tensor) and not tensor.is_floating_point():
        raise TypeError(f"{name}: got {tensor.dtype}, takes {takes}")


# ---- pages ------------------------------------------------------------------------------------

KEY_PAGES = "[num_pages, kv_heads, page_size, head_dim]"
VALUE_PAGES = "[num_pages, kv_heads, page_size, value_dim]"
# Scales of e4m3 numbers: from float32's smallest normal number to what 448 times is its largest.
SMALLEST_FACTOR, LARGEST_FACTOR = 2.0**-126, torch.finfo(torch.float32).max / 448
# Rounding doubles small weights, so that outputs may be almost twice the largest value.
LARGEST_VALUE_FACTOR = torch.finfo(torch.bfloat16).max / 448 / 2
LARGEST_PRODUCT = 448.0**2  # of two e4m3 numbers
PAGE_SCALES = "a floating-point tensor [num_pages, kv_heads, page_size]"
LARGEST_PAGE = 1024
PACKED_QUERY = "[tokens, query_heads, head_dim] with cu_seqlens_q"
DENSE_QUERY = "[batch, query_heads, query_len, head_dim] without cu_seqlens_q"


def check_paged(inputs: PagedInputs) -> None:
    """Refuse queries, pages and tables that do not fit together."""
    _check_query(inputs)
    check_pages(inputs.key_pages, inputs.value_pages, inputs.query.dtype, inputs.query.device)
    _check_paged_sizes(inputs)
    _check_query_scale(inputs)
    check_scales(
        inputs.key_pages, inputs.value_pages, inputs.key_scales, inputs.value_scales, required=True
    )
    _check_table(inputs)


def _check_query(inputs: PagedInputs) -> None:
    query, packed = inputs.query, inputs.cu_seqlens_q is not None
    takes = PACKED_QUERY if packed else DENSE_QUERY
    check_tensor("query", query, f"a tensor {takes}")
    if query.dim() != (3 if packed else 4):
        raise ValueError(f"query: got shape {tuple(query.shape)}, takes {takes}")
    if query.dtype == torch.float8_e4m3fn:
        pages = inputs.key_pages
        if isinstance(pages, Tensor) and pages.dtype != query.dtype:
            raise TypeError(
                f"query: got {query.dtype} over pages of {pages.dtype}, takes it over pages of "
                f"{query.dtype}"
            )
    elif query.dtype not in DTYPES:
        raise TypeError(
            f"query: got {query.dtype}, takes float32, float64, bfloat16, float16 or float8_e4m3fn"
        )


def _check_query_scale(inputs: PagedInputs) -> None:
    """Refuse what e4m3 queries cannot be multiplied by; others have no scale."""
    scale, query = inputs.query_scale, inputs.query
    if scale is None:
        return
    if not inputs.fp8:
        raise TypeError(f"query_scale: got a scale for {query.dtype}, takes None: it is of e4m3")
    sizes = inputs.page_table.shape[0], query.shape[1]
    takes = f"a float32 tensor of one number, or [batch, query_heads], here {sizes}"
    check_tensor("query_scale", scale, takes, dtypes=(torch.float32,), device=query.device)
    if tuple(scale.shape) not in ((), (1,), sizes):
        raise ValueError(f"query_scale: got shape {tuple(scale.shape)}, takes {takes}")
    check_factors("query_scale", scale, takes)


def check_score_range(
    scales: Mapping[str, float], scale: float, head_dim: int, largest: float
) -> None:
    """Refuse factors of the scores of e4m3 rows by which these may leave float32.

    scales: the largest of each argument, the first of which is named; largest: the size of the
    largest score that there may be. Kernels take scores times log2(e).
    """
    if largest * math.log2(math.e) > torch.finfo(torch.float32).max:
        (name, first), *others = scales.items()
        beside = "".join(f"{other}, up to {size:.3g}, and " for other, size in others)
        raise ValueError(
            f"{name}: got up to {first:.3g}, which times {beside}scale, {scale:.3g}, makes scores "
            f"of {head_dim} channels up to {largest:.3g}; takes what keeps them, times log2(e), in "
            "float32"
        )


def check_factors(name: str, scale: Tensor, takes: str, largest: float = LARGEST_FACTOR) -> None:
    """Refuse a scale of numbers that no e4m3 row can be multiplied by, where they may be read.

    Those below the smallest normal number have lost bits, and lose more in products; above
    LARGEST_FACTOR 448, the largest number of a row, would become inf.
    """
    if values_readable(scale):
        wrong = ~((scale >= SMALLEST_FACTOR) & (scale <= largest))
        if bool(wrong.any()):
            got = scale[wrong].flatten()[0].item()
            raise ValueError(
                f"{name}: got {got}, takes finite numbers above 0, from {SMALLEST_FACTOR:.3g} to "
                f"{largest:.3g}: {takes}"
            )


def check_pages(
    key_pages: Tensor, value_pages: Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse pages that do not fit together, or tokens of this dtype and device."""
    for name, pages, takes in (
        ("key_pages", key_pages, KEY_PAGES),
        ("value_pages", value_pages, VALUE_PAGES),
    ):
        check_tensor(name, pages, f"a tensor {takes}")
        if pages.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(pages.shape)}, takes {takes}")
        if pages.dtype != dtype and pages.dtype not in QUANTISED:
            raise TypeError(
                f"{name}: got {pages.dtype}, takes the tokens' {dtype}, float8_e4m3fn or int8"
            )
        if pages.device != device:
            raise ValueError(f"{name}: got {pages.device}, takes the tokens' {device}")
    if value_pages.dtype != key_pages.dtype:
        raise TypeError(f"value_pages: got {value_pages.dtype}, takes key_pages' {key_pages.dtype}")
    if value_pages.shape[:3] != key_pages.shape[:3]:
        raise ValueError(
            f"value_pages: got {tuple(value_pages.shape[:3])} pages, heads and slots, takes "
            f"key_pages' {tuple(key_pages.shape[:3])}"
        )
    if not 1 <= key_pages.shape[2] <= LARGEST_PAGE:
        raise ValueError(f"key_pages: got pages of {key_pages.shape[2]} slots, takes 1 to 1024")


def _check_paged_sizes(inputs: PagedInputs) -> None:
    query, key_pages = inputs.query, inputs.key_pages
    check_heads("key_pages", query.shape[1], key_pages.shape[1])
    if key_pages.shape[3] != query.shape[-1]:
        raise ValueError(
            f"key_pages: got head_dim {key_pages.shape[3]}, takes query's head_dim "
            f"{query.shape[-1]}"
        )


def check_scales(
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    *,
    required: bool,
) -> None:
    """Refuse scales that are not one number for each slot of each head; int8 needs them."""
    for name, scales, pages in (
        ("key_scales", key_scales, key_pages),
        ("value_scales", value_scales, value_pages),
    ):
        if scales is None:
            if pages.dtype == torch.int8 and required:
                raise TypeError(f"{name}: got None for pages of int8, takes {PAGE_SCALES}")
            continue
        if pages.dtype not in QUANTISED:
            raise TypeError(f"{name}: got scales for pages of {pages.dtype}, takes None there")
        check_floating_point(name, scales, PAGE_SCALES)
        if scales.shape != pages.shape[:3]:
            raise ValueError(
                f"{name}: got shape {tuple(scales.shape)}, takes {tuple(pages.shape[:3])}"
            )
        if scales.device != pages.device:
            raise ValueError(f"{name}: got {scales.device}, takes the pages' {pages.device}")


TABLE = "an int32 tensor [batch, max_pages] of page numbers"
LENS = "an int32 tensor [batch] of lengths, the new tokens included"


def _check_table(inputs: PagedInputs) -> None:
    device, int32 = inputs.query.device, (torch.int32,)
    check_tensor("page_table", inputs.page_table, TABLE, dtypes=int32, num_dims=2, device=device)
    check_tensor("kv_lens", inputs.kv_lens, LENS, dtypes=int32, num_dims=1, device=device)
    offsets = inputs.cu_seqlens_q
    batch = inputs.query.shape[0] if offsets is None else offsets.shape[0] - 1
    for name, tensor in (("page_table", inputs.page_table), ("kv_lens", inputs.kv_lens)):
        if tensor.shape[0] != batch:
            raise ValueError(f"{name}: got {tensor.shape[0]} sequences, takes query's {batch}")
    check_page_values(inputs)


def check_page_values(inputs: PagedInputs) -> None:
    """Refuse lengths and page numbers that do not fit the pages, where they can be read."""
    lens, table = inputs.kv_lens, inputs.page_table
    if lens.numel() == 0 or not (values_readable(lens) and values_readable(table)):
        return
    num_pages, _, page_size, _ = inputs.key_pages.shape
    slots = table.shape[1] * page_size
    least, most = (int(each) for each in lens.aminmax())
    if least < 0 or most > slots:
        got = least if least < 0 else most
        raise ValueError(
            f"kv_lens: got {got}, takes 0 to {slots}: page_table has {table.shape[1]} pages of "
            f"{page_size} slots"
        )
    if table.numel() == 0:
        return
    first, last = (int(each) for each in table.aminmax())
    if first >= 0 and last < num_pages:  # as it mostly is, also behind the sequences' ends
        return
    used = torch.arange(table.shape[1], device=lens.device) * page_size < lens.unsqueeze(1)
    wrong = used & ((table < 0) | (table >= num_pages))
    if bool(wrong.any()):
        got = int(table[wrong][0])
        raise ValueError(f"page_table: got page {got}, takes 0 to {num_pages - 1}")
