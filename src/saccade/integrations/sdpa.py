"""sdpa: PyTorch's `scaled_dot_product_attention`, answered by saccade.

`saccade.scaled_dot_product_attention` has its signature. After `enable()`, every call of
`torch.nn.functional.scaled_dot_product_attention` comes here; what saccade does not serve goes to
PyTorch as before, and `explain` says why. Modes and tensors with a `__torch_function__` see the
call as before. A name that was imported earlier (`from torch.nn.functional import
scaled_dot_product_attention`), TorchScript, exported programs and PyTorch's own C++ layers are not
reached; on a GPU `flash_kernels` reaches them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, has_torch_function
from torch.utils._device import DeviceContext

import saccade
from saccade import masks, scores
from saccade.integrations.arguments import broadcasts

__all__ = [
    "Route",
    "disable",
    "enable",
    "enabled",
    "explain",
    "scaled_dot_product_attention",
]

NAME = "scaled_dot_product_attention"
ORIGINAL: Any = vars(torch._C)["_nn"].scaled_dot_product_attention
PLAIN = (Tensor, Parameter)  # types without a `__torch_function__` of their own

# Made once: a trace would make them anew, through what remembers forms of masks.
TOP_LEFT, BOTTOM_RIGHT = masks.causal(align="top_left"), masks.causal(align="bottom_right")
DISABLED = torch._C._disabled_torch_function_impl


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as `torch.nn.functional.scaled_dot_product_attention` has it.

    Args:
        query: (N, ..., Hq, L, E). key: (N, ..., H, S, E). value: (N, ..., H, S, Ev). Dimensions
            before the rows broadcast.
        attn_mask: broadcastable to (N, ..., Hq, L, S): bool (True = visible), or of query's dtype
            or float32 (under autocast also of 16 bits), added to the scaled scores; the latter is
            differentiable. Or a `CausalBias` of `torch.nn.attention.bias`.
        dropout_p: the probability that a weight is dropped, in evaluation too.
        is_causal: a row sees the keys up to its own number, counted from the first on.
        scale: 1 / sqrt(E) where None.
        enable_gqa: H need only divide Hq.

    Returns:
        (N, ..., Hq, L, Ev). A row that sees nothing gives 0.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: where no implementation serves the call.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 16, 8)
        >>> output = saccade.scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> torch.testing.assert_close(output, saccade.attention(query, key, value, causal=True))
    """
    return translated(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    ).in_own_dtype()


def enable(*, fp8: bool = False, **unknown: Any) -> None:
    """Route `torch.nn.functional.scaled_dot_product_attention` through saccade, until `disable`.

    Calls that saccade does not serve go where they went before: nested tensors and other
    subclasses, devices without an implementation, and all calls while `sdpa_kernel` or one of its
    switches has turned a backend off, since the caller has then chosen another. Calling it twice
    changes nothing but `fp8`.

    Args:
        fp8: compute calls in bfloat16 and float16 by `saccade.attention_fp8`, less exactly, where
            it serves them: without gradients and dropout, on devices with a kernel for it. Other
            calls are computed as without it, and `explain` says why.

    Raises:
        TypeError: for another option, and for fp8 that is no bool.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 16, 8)
        >>> saccade.integrations.sdpa.enable()
        >>> output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> saccade.integrations.sdpa.disable()
    """
    if unknown:
        raise TypeError(f"{next(iter(unknown))}: an unknown option; takes fp8")
    if not isinstance(fp8, bool):
        raise TypeError(f"fp8: got {type(fp8).__name__}, takes True or False")
    _patch.fp8 = fp8
    _patch.put()


def disable() -> None:
    """Give PyTorch its function back.

    Examples:
        >>> before = torch.nn.functional.scaled_dot_product_attention
        >>> saccade.integrations.sdpa.enable()
        >>> saccade.integrations.sdpa.disable()
        >>> torch.nn.functional.scaled_dot_product_attention is before
        True
    """
    _patch.take_away()


@contextmanager
def enabled(*, fp8: bool = False, **unknown: Any) -> Iterator[None]:
    """`enable` on the way in, `disable` on the way out.

    Args:
        fp8: as of `enable`.

    Raises:
        TypeError: as of `enable`.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> with saccade.integrations.sdpa.enabled():
        ...     output = layer(torch.randn(1, 8, 16))  # attends by saccade
    """
    enable(fp8=fp8, **unknown)
    try:
        yield
    finally:
        disable()


@dataclass(frozen=True)
class Route:
    """Where a call goes after `enable`; print it.

    Attributes:
        reason: why it stays with PyTorch, or None: saccade serves it.
        explanation: what `saccade.explain` says of it, where it can be said.
        not_fp8: after `enable(fp8=True)`, why the call is not computed in fp8; else None.

    Examples:
        >>> from torch.nn.attention import SDPBackend, sdpa_kernel
        >>> query, key, value = torch.randn(3, 2, 4, 16, 8)
        >>> with sdpa_kernel(SDPBackend.MATH):
        ...     route = saccade.integrations.sdpa.explain(query, key, value)
        >>> print(route.reason)
        one of PyTorch's backends is turned off, so that somebody has chosen another
    """

    reason: str | None
    explanation: Any = None
    not_fp8: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"attention: by PyTorch's own {NAME}, as saccade cannot serve it: {self.reason}"
        not_fp8 = "" if self.not_fp8 is None else f"\nnot in fp8: {self.not_fp8}"
        return f"{self.explanation}{not_fp8}"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Route:
    """Whether saccade serves a call after `enable`, by which implementation, or why it does not.

    Args: as of `scaled_dot_product_attention`.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 16, 8)
        >>> saccade.integrations.sdpa.explain(query, key, value, is_causal=True).reason is None
        True
    """
    reason = _why_not(query, key, value, attn_mask)
    if reason is not None:
        return Route(reason)
    try:
        call = translated(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        found = saccade.explain(saccade.attention, call.query, call.key, call.value, **call.options)
        in_fp8, not_fp8 = _explained_in_fp8(call) if _patch.fp8 else (None, None)
    except (TypeError, ValueError, NotImplementedError) as error:
        return Route(str(error))
    if in_fp8 is not None:
        return Route(None, in_fp8)
    if found.chosen is None:
        return Route(_reasons(found))
    return Route(None, found, not_fp8)


def _explained_in_fp8(call: SdpaCall) -> tuple[Any, str | None]:
    """What `saccade.explain` says of a call in fp8, or why it is not computed so."""
    reason = call.not_in_fp8()
    if reason is not None:
        return None, reason
    rows, options = (call.query, call.key, call.value), call.fp8_options
    found = saccade.explain(saccade.attention_fp8, *rows, **options)
    return (None, _reasons(found)) if found.chosen is None else (found, None)


def _reasons(found: Any) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in found.reasons.items())


def _served(*arguments: Any, **options: Any) -> Tensor | None:
    """The output of a call that came to PyTorch's function, or None: PyTorch is to serve it."""
    if _why_not(*arguments, *options.values()) is None:
        try:
            call = translated(*arguments, **options)
            output = _served_in_fp8(call) if _patch.fp8 else None
            return call.in_own_dtype() if output is None else output
        except (TypeError, ValueError, NotImplementedError):
            pass  # PyTorch serves it, or finds its own words for what is wrong
    return None


def _served_in_fp8(call: SdpaCall) -> Tensor | None:
    """The output of a call, or None: it is not computed in fp8."""
    if call.not_in_fp8() is not None:
        return None
    try:
        return call.in_fp8()
    except NotImplementedError:  # no kernel for it is there
        return None


def _why_not(*arguments: Any) -> str | None:
    """Why a call stays with PyTorch, as far as that shows before it is translated."""
    for tensor in arguments:
        if not isinstance(tensor, Tensor) or is_causal_bias(tensor):
            continue
        if type(tensor) not in PLAIN:
            return f"it takes plain tensors, not {type(tensor).__name__}"
        if tensor.is_nested:
            return "it takes plain tensors, not nested ones"
    if not _all_backends():
        return "one of PyTorch's backends is turned off, so that somebody has chosen another"
    return None


def _all_backends() -> bool:
    """Whether PyTorch may take any of its backends."""
    switches = torch.backends.cuda
    return (
        switches.flash_sdp_enabled()
        and switches.mem_efficient_sdp_enabled()
        and switches.math_sdp_enabled()
        and switches.cudnn_sdp_enabled()
    )


_all_backends._dynamo_marked_constant = True  # type: ignore[attr-defined]  # to a trace


# ---- translation ---------------------------------------------------------------------------------


class SdpaCall(NamedTuple):
    """A call in saccade's terms."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    leading: torch.Size  # of the output, before its rows

    def rows(self, output: Any) -> Tensor:
        """The output with the dimensions that the call has."""
        assert isinstance(output, Tensor)  # a pair only with return_lse
        return output.reshape(*self.leading, *output.shape[-2:])

    def in_own_dtype(self) -> Tensor:
        """The output by `saccade.attention`, with its errors."""
        return self.rows(saccade.attention(self.query, self.key, self.value, **self.options))

    def in_fp8(self) -> Tensor:
        """The output by `saccade.attention_fp8`, with its errors."""
        rows, options = (self.query, self.key, self.value), self.fp8_options
        return self.rows(saccade.attention_fp8(*rows, **options))

    @property
    def fp8_options(self) -> dict[str, Any]:
        """The options as `saccade.attention_fp8` takes them."""
        return {name: value for name, value in self.options.items() if name != "dropout_p"}

    def not_in_fp8(self) -> str | None:
        """Why it is not computed in fp8, as far as that shows without looking for a kernel."""
        if self.query.dtype not in (torch.bfloat16, torch.float16):
            return f"it quantises bfloat16 and float16, not {self.query.dtype}"
        if self.options["dropout_p"]:
            return f"there is no dropout, of which dropout_p asks {self.options['dropout_p']}"
        score = self.options.get("score")
        captured = () if score is None else score.captured.tensors
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (self.query, self.key, self.value, *captured)
        ):
            return "there is no gradient, which may be asked for"
        return None


def translated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SdpaCall:
    """The call with four dimensions, a mask and a score."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{name}: got {tensor.dim()} dimensions, takes at least 2")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal: got True with attn_mask, takes one of the two")
    leading = _leading((query, key, value), enable_gqa)
    options: dict[str, Any] = {"dropout_p": float(dropout_p), "scale": scale}
    if is_causal:
        options["mask"] = TOP_LEFT
    if attn_mask is not None and is_causal_bias(attn_mask):
        options["mask"] = _causal(attn_mask, query.shape[-2], key.shape[-2])
    elif attn_mask is not None:
        if has_handler(attn_mask):
            got = type(attn_mask).__name__
            raise TypeError(f"attn_mask: got a {got}, takes a plain tensor or a CausalBias")
        shape = (*leading, query.shape[-2], key.shape[-2])
        if not broadcasts(attn_mask, shape):
            raise ValueError(
                f"attn_mask: got {list(attn_mask.shape)}, takes what broadcasts to {list(shape)}"
            )
        mask = _four_dimensions(attn_mask, leading[:-1])
        if mask.dtype == torch.bool:
            options["mask"] = mask
        elif mask.dtype in (query.dtype, torch.float32) or _in_autocast(query, mask):
            options["score"] = scores.bias(mask)
        else:
            takes = f"bool, float32 or query's {query.dtype}"
            raise TypeError(f"attn_mask: got {mask.dtype}, takes {takes}")
    batch, heads = leading[:-1], leading[-1:]
    of_keys = [rows.shape[-3:-2] or (1,) * len(heads) for rows in (key, value)]
    if of_keys[0] != of_keys[1]:  # one of them has a head for all
        of_keys = [heads, heads]
    query, key, value = (
        _four_dimensions(rows.expand(*batch, *count, *rows.shape[-2:]), batch)
        for rows, count in zip((query, key, value), (heads, *of_keys), strict=True)
    )
    return SdpaCall(query, key, value, options, leading)


def _in_autocast(query: Tensor, mask: Tensor) -> bool:
    """Whether autocast would give a mask query's dtype. It is added as exactly as it came."""
    kind = query.device.type
    narrow = mask.dtype in (torch.float16, torch.bfloat16)
    return narrow and kind != "meta" and torch.is_autocast_enabled(kind)


def is_causal_bias(tensor: object) -> bool:
    """Whether it is `torch.nn.attention.bias.CausalBias`, known by name: its module loads much."""
    kind = type(tensor)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def has_handler(tensor: object) -> bool:
    """Whether a tensor's type has a say in what functions make of it, by `__torch_function__`."""
    if type(tensor) in PLAIN:  # torch 2.11's traces compare no methods
        return False
    handler = getattr(type(tensor), "__torch_function__", DISABLED)
    default = Tensor.__torch_function__
    if handler is DISABLED or handler == default:  # in torch 2.15's traces methods lack __func__
        return False
    return getattr(handler, "__func__", handler) != default.__func__


def _causal(bias: Any, query_len: int, kv_len: int) -> masks.Mask:
    """What a CausalBias hides; a square one is aligned at the first key, as PyTorch has it."""
    if bias.variant.name == "UPPER_LEFT" or bias.seq_len_q == bias.seq_len_kv:
        return TOP_LEFT
    if (bias.seq_len_q, bias.seq_len_kv) != (query_len, kv_len):
        got = [bias.seq_len_q, bias.seq_len_kv]
        raise ValueError(f"attn_mask: got {got}, takes the call's {[query_len, kv_len]}")
    return BOTTOM_RIGHT


def _leading(tensors: tuple[Tensor, ...], enable_gqa: bool) -> torch.Size:
    """The output's dimensions before its rows: those of the batch, and the query heads."""
    heads = [(1, *tensor.shape[:-2])[-1] for tensor in tensors]
    most = max(heads) if 0 not in heads else 0
    if enable_gqa and heads[1] == heads[2]:
        most = heads[0]
    elif any(count not in (1, most) for count in heads):
        raise ValueError(
            f"key, value: got {heads[1]} and {heads[2]} heads for query's {heads[0]}, takes as "
            "many or one; with enable_gqa=True a divisor"
        )
    try:
        batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    except RuntimeError:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"query, key, value: got {shapes}, takes batches that broadcast") from None
    return torch.Size((*batch, most) if max(tensor.dim() for tensor in tensors) > 2 else batch)


def _four_dimensions(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Rows or a mask with all dimensions before the last three as one; what is 1 may stay so."""
    missing = max(len(batch) + 3, 4) - tensor.dim()
    tensor = tensor.reshape((1,) * missing + tuple(tensor.shape))
    if len(batch) <= 1:
        return tensor
    return tensor.expand(*batch, *tensor.shape[-3:]).flatten(0, -4)


# ---- the patch -----------------------------------------------------------------------------------
# The object at `torch.nn.functional.scaled_dot_product_attention` after `enable`.
#
# Programs know that function by its identity. A handler of calls (`__torch_function__` of a tensor
# or of a mode) compares `func` with torch.nn.functional.scaled_dot_product_attention or with what
# it kept from earlier, or looks it up in a dictionary; TorchScript knows it by its address. So
# handlers get PyTorch's own function, which is back at its name while they run; and the patch
# equals it, hashes like it, and is registered with TorchScript as the same operator.


class Patch:
    """Replaces PyTorch's function: asks `serve`, and calls that function where it declines.

    Args:
        serve: gives the output of a call, or None for what PyTorch is to serve.

    Attributes:
        fp8: whether calls are computed in fp8 where that can be.
    """

    def __init__(self, serve: Callable[..., Tensor | None]):
        self.serve, self.active, self.fp8 = serve, False, False
        self.before: Callable[..., Tensor] = ORIGINAL
        self._lock, self._away = threading.Lock(), 0
        self.__name__ = self.__qualname__ = NAME
        self.__module__, self.__doc__ = "torch.nn.functional", ORIGINAL.__doc__

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        """The output: ours while active, unless handlers look at the call or it is traced."""
        values = (*arguments, *options.values())
        if not is_handled(values):
            output = self.attempt(*arguments, **options)
            if output is not None:
                return output
        if not may_be_handled(values):
            return self.before(*arguments, **options)
        if torch.compiler.is_compiling():
            setattr(torch.nn.functional, NAME, self.before)
            output = self.before(*arguments, **options)
            setattr(torch.nn.functional, NAME, self)
            return output
        with self._out_of_the_way(), _at_the_bottom(_Last(self)):
            return self.before(*arguments, **options)

    def attempt(self, *arguments: Any, **options: Any) -> Tensor | None:
        """Our output, or None: traced and exported programs keep PyTorch's operator."""
        traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if not self.active or traced or _is_exporting():
            return None
        return self.serve(*arguments, **options)

    def put(self) -> None:
        """Replace the function from now on."""
        if not self.active:
            self.before, self.active = getattr(torch.nn.functional, NAME), True
            operator = _builtins._find_builtin(self.before)
            if operator is not None:
                _builtins._register_builtin(self, operator)
            setattr(torch.nn.functional, NAME, self)

    def take_away(self) -> None:
        """Put the function back, unless it has been replaced again since."""
        self.active = False
        if getattr(torch.nn.functional, NAME) is self:
            setattr(torch.nn.functional, NAME, self.before)

    @contextmanager
    def _out_of_the_way(self) -> Iterator[None]:
        """Put PyTorch's function back while handlers run; other threads meanwhile call it, too."""
        with self._lock:
            self._away += 1
            if getattr(torch.nn.functional, NAME) is self:
                setattr(torch.nn.functional, NAME, self.before)
        try:
            yield
        finally:
            with self._lock:
                self._away -= 1
                alone = getattr(torch.nn.functional, NAME) is self.before
                if self.active and not self._away and alone:
                    setattr(torch.nn.functional, NAME, self)

    def __eq__(self, other: object) -> bool:
        """Equal to PyTorch's function, which this replaces."""
        return other is self or other is ORIGINAL

    def __hash__(self) -> int:
        """PyTorch's function's: dictionaries find the one by the other."""
        return hash(ORIGINAL)

    def __reduce__(self) -> str:
        """Pickled and copied by name, as PyTorch's function is."""
        return NAME


class _Last(TorchFunctionMode):
    """A mode behind all others: when they have seen a call and pass it on, it comes to us."""

    def __init__(self, patch: Patch) -> None:
        super().__init__()
        self.patch = patch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What func gives; of PyTorch's function, what we give if we serve the call."""
        options = kwargs or {}
        if func is self.patch.before:
            output = self.patch.attempt(*args, **options)
            if output is not None:
                return output
        return func(*args, **options)


def is_handled(values: tuple[Any, ...]) -> bool:
    """Whether a mode or a tensor's type looks at calls with these arguments.

    Not counted are the mode of `torch.set_default_device`, which looks at what makes tensors, and
    CausalBias, which we understand.
    """
    if not may_be_handled(values):
        return False
    if any(not is_causal_bias(value) and has_handler(value) for value in values):
        return True
    return any(type(mode) is not DeviceContext for mode in _modes())


def may_be_handled(values: tuple[Any, ...]) -> bool:
    """Whether PyTorch asks a mode or a tensor's type; in compiled code it tells no modes."""
    return torch._C._is_torch_function_mode_enabled() or has_torch_function(values)


def _is_exporting() -> bool:
    """Whether a program is being exported, by `torch.compiler.is_exporting`'s own flag.

    Asked by that function, torch 2.11 says True in all compiled code; newer ones read the flag.
    """
    return torch.compiler._is_exporting_flag


def _modes() -> list[Any]:
    """The modes of this thread, the first to be asked last."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(count)]


@contextmanager
def _at_the_bottom(mode: _Last) -> Iterator[None]:
    """A mode below all that there are; nothing where there are none."""
    modes = _modes()
    if not modes:
        yield
        return
    _replace([mode, *modes])
    try:
        yield
    finally:
        _replace([other for other in _modes() if other is not mode])


def _replace(modes: list[Any]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


_patch = Patch(_served)
