"""Call cache: a call that is like one that was validated before is not validated again.

Validating every argument takes longer than a small problem does on a GPU. So what validation and
the choice of backends gave for a plain eager call is kept under all that they look at. Of softmax
attention, dense and packed, that is its kind: heads, channels, dtypes, devices, mask, score and
options; of lengths and strides no more than the choice asks (`backends.lengths_kind`, and whether
TMA can read the tensors), so that a call of a new length is like one that was validated. Before its
kind, a call is looked up by its layout, shapes and strides as they are: that takes less time, and
what was prepared for calls of this layout is kept beside it. Calls over pages, of linear attention
and of the gated delta rule are kept under shapes and strides. Anything out of the ordinary
(captured tensors, dropout, autocast, tracing, transforms, modes, tensor subclasses, offsets that
can be read) is validated every time, so that what observes calls sees the same of each. Of calls
over pages, lengths and page numbers that can be read are checked every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from saccade.masks import AnyMask, Mask
from saccade.runtime import backends
from saccade.runtime.arguments import values_readable
from saccade.runtime.fp8_spec import Quantisation
from saccade.runtime.spec import KernelConfig, Variant, precision
from saccade.runtime.validation import strides_fit_tma
from saccade.scores import AnyScore, Score

# ---- observers -----------------------------------------------------------------------------------
# Dispatch and function modes, `torch.func` and tensor subclasses see the operator; where there is
# none of them, eager calls go past PyTorch's dispatcher, which takes as long as a small problem.

PLAIN = frozenset({Tensor, Parameter})  # types that nothing but PyTorch itself looks into
PLAIN_OR_ABSENT = PLAIN | {type(None)}


def wants_gradients(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a gradient or a forward-mode derivative may be asked for."""
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    return any([tensor.requires_grad for tensor in tensors if tensor is not None])  # faster listed


def unobserved(tensors: Sequence[Tensor | None]) -> bool:
    """Whether no transform, mode or tensor subclass sees the operator, and memory holds all
    numbers as they are."""
    return (
        not observed()
        and PLAIN_OR_ABSENT.issuperset(map(type, tensors))
        and not any([tensor is not None and deferred(tensor) for tensor in tensors])
    )


def deferred(tensor: Tensor) -> bool:
    """Whether memory holds a tensor's negative, as of `z.conj().imag`, or none of its zeros.

    PyTorch's dispatcher writes such numbers out; kernels that are given addresses would read what
    lies there.
    """
    return tensor.is_neg() or tensor._is_zerotensor()


def observed() -> bool:
    """Whether a transform or mode sees every operator."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()  # type: ignore[attr-defined]
        or (torch._C._len_torch_function_stack() > 0 and _more_than_a_device())
    )


def _more_than_a_device() -> bool:
    """Whether a function mode is there that is not `torch.set_default_device`'s own."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


# ---- what is kept -----------------------------------------------------------------------------

MOST_CALLS = 1024  # calls that are kept
PLAIN_VALUES = frozenset({bool, int, float, str, type(None)})
HALVES = (torch.bfloat16, torch.float16)

AnyConfig = KernelConfig | Mapping[tuple[int, int], KernelConfig] | None


@dataclass
class CheckedCall:
    """What validation found out about a call, and what was prepared for calls like it."""

    variant: Any  # Variant, LinearVariant or DeltaVariant
    config: KernelConfig | None
    forward_by: str  # the backend of each pass
    backward_by: str = ""
    backward_unsupported: str = ""  # why no backend has the backward pass
    batch_invariant: bool = False
    quantisation: Quantisation | None = None  # of fp8 attention
    forward: Callable[[Any, Any], Any] | None = None
    plain: dict[bool, tuple[Any, ...]] = field(default_factory=dict)  # by `deterministic`
    kind: CheckedCall | None = None  # of a call that is kept by its layout: of all like it
    with_residual: CheckedCall | None = None  # the call where a gradient is due
    tables: tuple[Tensor, ...] = field(init=False)  # that mask and score captured

    def __post_init__(self) -> None:
        variant, self.tables = self.variant, ()
        if isinstance(variant, Variant):
            self.tables = (*variant.mask_captured.tensors, *variant.score_captured.tensors)

    def differentiated(self, dtype: torch.dtype) -> CheckedCall:
        """The call where a gradient is due: softmax attention whose output has 16 bits keeps what
        rounding took from it (`runtime/rounding.py`)."""
        variant = self.variant
        if dtype not in HALVES or not isinstance(variant, Variant):
            return self
        if self.with_residual is None:
            kind = None if self.kind is None else self.kind.differentiated(dtype)
            self.with_residual = CheckedCall(
                variant._replace(residual=True), self.config, self.forward_by, self.backward_by,
                self.backward_unsupported, self.batch_invariant, kind=kind,
                plain={} if kind is None else kind.plain,
            )  # fmt: skip
        return self.with_residual

    def check_backward(self) -> None:
        """Refuse a call that wants gradients which the named backend does not have."""
        if self.backward_unsupported:
            raise NotImplementedError(f"{self.backward_unsupported} (its backward pass)")


_calls: dict[Any, CheckedCall] = {}
_layouts: dict[Any, CheckedCall] = {}


def find(
    query: Tensor, key: Tensor, value: Tensor, mask: AnyMask, score: AnyScore, scale: float | None,
    implementation: str | None, config: AnyConfig, max_logit: bool = False,
) -> tuple[tuple[Any, ...] | None, CheckedCall | None]:  # fmt: skip
    """What a dense call of attention is kept under, None for one that must be validated; and what
    is kept of one like it, by its layout if there was one, else by its kind."""
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        return None, None
    if _must_be_validated(mask, score, scale, implementation, config):
        return None, None
    options = mask, score, scale, implementation, config, max_logit
    layout = _layout_of(query, key, value, *options)
    found = None if layout is None else _layouts.get(layout)
    if layout is None or found is not None:
        return layout, found
    kind = key_of(query, key, value, *options)
    return kind, _with_layout(layout, lookup(kind))


def find_packed(
    query: Tensor, key: Tensor, value: Tensor, offsets: tuple[Tensor, Tensor],
    longest: tuple[int | None, int | None], mask: AnyMask, score: AnyScore, scale: float | None,
    implementation: str | None, config: AnyConfig, max_logit: bool = False,
) -> tuple[tuple[Any, ...] | None, CheckedCall | None]:  # fmt: skip
    """What `find` finds, of a call of packed sequences. offsets, longest: of queries, of keys."""
    ends, of_keys = offsets
    if not (PLAIN.issuperset(map(type, (query, key, value, ends, of_keys)))):
        return None, None
    if _must_be_validated(mask, score, scale, implementation, config):
        return None, None
    options = mask, score, scale, implementation, config, max_logit
    layout = _layout_of(query, key, value, *options)
    if layout is None or values_readable(ends) or values_readable(of_keys):
        return None, None
    if not (ends.is_contiguous() and of_keys.is_contiguous()):  # validation copies them
        return None, None
    layout = (
        *layout, ends.shape, of_keys.shape, ends.stride(), of_keys.stride(), ends.dtype,
        of_keys.dtype, ends.device, of_keys.device, ends is of_keys, longest, *map(type, longest),
    )  # fmt: skip
    found = _layouts.get(layout)
    if found is not None:
        return layout, found
    kind = key_of_packed(query, key, value, offsets, longest, *options)
    return kind, _with_layout(layout, lookup(kind))


def _layout_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, scale: float | None,
    implementation: str | None, config: AnyConfig, max_logit: bool,
) -> tuple[Any, ...] | None:  # fmt: skip
    """All that tells calls apart but addresses; None: tensors do not lie alike in plain memory."""
    dtype, device, strided = query.dtype, query.device, torch.strided
    if not (key.dtype is value.dtype is dtype and key.device == value.device == device):
        return None
    if not (query.layout is strided and key.layout is strided and value.layout is strided):
        return None
    if query.is_nested or key.is_nested or value.is_nested:  # they have no sizes
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():  # see `deferred`
        return None
    of_mask = of_score = None  # all that tells those without tensors apart, sooner than their hash
    if mask is not None:
        captured = mask.captured
        of_mask = mask.key, *captured.ints, *captured.floats
    if score is not None:
        captured = score.captured
        of_score = score.key, *captured.ints, *captured.floats
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        dtype, device, of_mask, of_score, scale, implementation, config, max_logit,
        precision(dtype),
    )  # fmt: skip


def _with_layout(layout: tuple[Any, ...], kind: CheckedCall | None) -> CheckedCall | None:
    """A kind of call for calls of one layout, kept for later ones."""
    if kind is None:
        return None
    found = CheckedCall(
        kind.variant, kind.config, kind.forward_by, kind.backward_by, kind.backward_unsupported,
        kind.batch_invariant, plain=kind.plain, kind=kind,
    )  # fmt: skip
    _keep(_layouts, layout, found)
    return found


def plain_options(sinks: Tensor | None, dropout_p: float, deterministic: bool) -> bool:
    """Whether a call has no option that its key leaves out."""
    dropless = type(dropout_p) is float and dropout_p == 0.0
    return sinks is None and dropless and type(deterministic) is bool


def key_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask,
    score: AnyScore,
    scale: float | None,
    implementation: str | None,
    config: AnyConfig,
    max_logit: bool = False,
) -> tuple[Any, ...] | None:
    """The kind of a dense call of attention; None for a call that must be validated.

    Sizes that must be equal are compared here, each time: what does not fit is validated, and so
    refused by name.
    """
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        return None
    if _must_be_validated(mask, score, scale, implementation, config):
        return None
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    if not len(of_query) == len(of_key) == len(of_value) == 4:
        return None
    batch, heads, query_len, head_dim = of_query
    kv_batch, kv_heads, kv_len, key_dim = of_key
    value_batch, value_heads, value_len, value_dim = of_value
    if not (batch == kv_batch == value_batch and kv_heads == value_heads and kv_len == value_len):
        return None
    dtype, device = query.dtype, query.device
    if not (key.dtype is value.dtype is dtype and key.device == value.device == device):
        return None
    fits = fits_tma(query, key, value)
    if fits is None:
        return None
    return (
        heads, kv_heads, head_dim, key_dim, value_dim, fits,
        backends.lengths_kind(query_len, kv_len), dtype, device,
        mask, score, scale, implementation, config, max_logit, precision(dtype),
    )  # fmt: skip


def key_of_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int | None, int | None],
    mask: AnyMask,
    score: AnyScore,
    scale: float | None,
    implementation: str | None,
    config: AnyConfig,
    max_logit: bool = False,
) -> tuple[Any, ...] | None:
    """The kind of a call of packed sequences; see `key_of`.

    offsets, longest: of queries, then of keys.
    """
    if not PLAIN.issuperset(map(type, (query, key, value, *offsets))):
        return None
    if _must_be_validated(mask, score, scale, implementation, config):
        return None
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    if not len(of_query) == len(of_key) == len(of_value) == 3:
        return None
    tokens, heads, head_dim = of_query
    kv_tokens, kv_heads, key_dim = of_key
    value_tokens, value_heads, value_dim = of_value
    if kv_tokens != value_tokens or kv_heads != value_heads:
        return None
    ends, of_keys, device = *offsets, query.device
    sizes = ends.shape
    if len(sizes) != 1 or sizes[0] < 2 or of_keys.shape != sizes:
        return None
    if not (ends.dtype is of_keys.dtype is torch.int32 and ends.device == of_keys.device == device):
        return None
    dtype = query.dtype
    if not (key.dtype is value.dtype is dtype and key.device == value.device == device):
        return None
    if any([length is not None and (type(length) is not int or length < 0) for length in longest]):
        return None
    if values_readable(ends) or values_readable(of_keys):
        return None
    fits = fits_tma(query, key, value)
    if fits is None:
        return None
    return (
        heads, kv_heads, head_dim, key_dim, value_dim, fits,
        backends.lengths_kind(tokens, kv_tokens, sizes[0] - 1), longest[0] == 1, dtype, device,
        mask, score, scale, implementation, config, max_logit, precision(dtype),
    )  # fmt: skip


def fits_tma(query: Tensor, key: Tensor, value: Tensor) -> bool | None:
    """Whether TMA can read all of them as they lie; None: they do not lie in plain memory."""
    strided = torch.strided
    if not (query.layout is strided and key.layout is strided and value.layout is strided):
        return None
    return strides_fit_tma(query) and strides_fit_tma(key) and strides_fit_tma(value)


def key_of_any(
    operation: str,
    tensors: Sequence[Tensor | None],
    values: tuple[Any, ...],
    read: Sequence[Tensor | None],
    *,
    mask: AnyMask = None,
    score: AnyScore = None,
    scale: float | None = None,
    implementation: str | None = None,
    config: AnyConfig = None,
) -> tuple[Any, ...] | None:
    """The key of a call of any operation; None for a call that must be validated.

    Args:
        operation: its name.
        tensors: all tensors of the call, the query first; None for those that it does not have.
        values: its other options, which must be numbers, texts or None.
        read: tensors whose values validation reads where it can: such a call is validated.
    """
    types = tuple(map(type, values))  # 1, 1.0 and True are equal, and not the same
    if not (PLAIN_OR_ABSENT.issuperset(map(type, tensors)) and PLAIN_VALUES.issuperset(types)):
        return None
    if _must_be_validated(mask, score, scale, implementation, config):
        return None
    if any([tensor is not None and values_readable(tensor) for tensor in read]):
        return None
    for tensor in tensors:
        if tensor is not None:
            if tensor.is_nested or tensor.is_neg():  # see `_layout_of`
                return None
            if tensor.dim() == 1 and not tensor.is_contiguous():  # validation copies those
                return None
    layouts = [
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for tensor in tensors
    ]
    return (
        operation, *layouts, values, types, mask, score, scale, implementation, config,
        precision(torch.float32),
    )  # fmt: skip


def _must_be_validated(
    mask: Any,
    score: Any,
    scale: float | None,
    implementation: str | None,
    config: AnyConfig,
) -> bool:
    """Whether something observes the call, or its options are of types that keys cannot hold.

    Types are compared, as 1, 1.0 and True are equal and not the same.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_any_autocast_enabled()
        or observed()
        or (mask is not None and (type(mask) is not Mask or mask.captured.tensors))
        or (score is not None and (type(score) is not Score or score.captured.tensors))
        or (scale is not None and type(scale) is not float)
        or (implementation is not None and type(implementation) is not str)
        or (config is not None and type(config) is not KernelConfig)
    )


def lookup(key: tuple[Any, ...] | None) -> CheckedCall | None:
    """The call that was kept under a key, if any."""
    return None if key is None else _calls.get(key)


def keep(key: tuple[Any, ...] | None, checked: CheckedCall) -> None:
    """Keep a validated call, in place of the oldest one where there are `MOST_CALLS`."""
    if key is not None:
        _keep(_calls, key, checked)


def _keep(memory: dict[Any, CheckedCall], key: tuple[Any, ...], checked: CheckedCall) -> None:
    if len(memory) >= MOST_CALLS:
        memory.pop(next(iter(memory)), None)
    memory[key] = checked


def forget() -> None:
    """Forget all calls, so that each is validated like the first of its kind (for tests)."""
    _calls.clear()
    _layouts.clear()
