"""Options: FlashAttention's arguments in saccade's terms, and numbers as its callers give them.

Its extension takes Python's numbers, NumPy's, and tensors of one element; so does this. Its calls
over pages work with queries that require a gradient, and fail when one is asked for; so do these.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade import masks, scores


def whole(name: str, value: Any) -> Any:
    """A whole number.

    Raises:
        TypeError: for what is none.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {_said(value)}, takes a whole number") from None


def real(name: str, value: Any) -> Any:
    """A number.

    Raises:
        TypeError: for what is none.
        ValueError: for a tensor that waits for a gradient, which it would not get.
    """
    if type(value) in (int, float) or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype != torch.bool:
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: got a tensor that requires a gradient, takes a number")
        return value.item()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{name}: got {_said(value)}, takes a number")


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        TypeError: for what is neither, nor 0 or 1.
    """
    if type(value) is bool:
        return value
    one = getattr(value, "size", None) == 1 or (isinstance(value, Tensor) and value.numel() == 1)
    if (one or isinstance(value, int)) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name}: got {_said(value)}, takes True or False")


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """Two whole numbers, of a tuple, a list, an array or a tensor.

    Raises:
        TypeError: for anything else.
    """
    try:
        left, right = value
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {_said(value)}, takes two whole numbers") from None
    return whole(name, left), whole(name, right)


def _said(value: Any) -> str:
    """A value as messages say it."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


# Further than any row lies from any other; the sum of two fits in 32 bits.
FAR = 2**30


class FlashOptions(NamedTuple):
    """FlashAttention's options that all of its calls share; see `flash_attn_func`."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None

    @classmethod
    def of(
        cls, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, alibi_slopes: Any
    ) -> FlashOptions:
        """Options as a caller gave them, as Python's numbers."""
        return cls(
            None if softmax_scale is None else real("softmax_scale", softmax_scale),
            flag("causal", causal),
            pair("window_size", window_size),
            real("softcap", softcap),
            alibi_slopes,
        )

    @property
    def local(self) -> bool:
        """Whether a row's place matters."""
        return self.causal or self.window_size != (-1, -1)

    def keywords(self) -> dict[str, Any]:
        """The same as options of `saccade.attention`."""
        return {"mask": self.mask(), "score": self.score(), "scale": self.softmax_scale}

    def mask(self) -> masks.Mask | None:
        """Causal or a window, aligned at the bottom right; -1 leaves a side open."""
        left, right = self.window_size
        if self.causal:
            right = 0
        if left < 0 and right < 0:
            return None
        if left < 0 and right == 0:
            return masks.causal()
        return masks.window(FAR if left < 0 else left, FAR if right < 0 else right)

    def score(self) -> scores.Score | None:
        """The softcap, then ALiBi."""
        found = scores.softcap(self.softcap) if self.softcap > 0 else None
        slopes = self.alibi_slopes
        if slopes is None:
            return found
        if slopes.dim() not in (1, 2):
            raise ValueError(
                f"alibi_slopes: got {list(slopes.shape)}, takes [heads] or [batch, heads]"
            )
        alibi = scores.alibi(slopes) if slopes.dim() == 1 else alibi_by_batch(slopes)
        return alibi if found is None else found >> alibi


@scores.function(align="bottom_right")
def alibi_by_batch(
    score: Any, batch: Any, head: Any, query_row: Any, kv_row: Any, slopes: Any
) -> Any:
    """ALiBi with slopes [batch, heads]."""
    return score - scores.take(slopes, batch, head) * scores.absolute(query_row - kv_row)


def no_weights(return_attn_probs: Any, dropout_p: Any) -> tuple[float, bool]:
    """The share to drop, and whether more than the output is wanted.

    Raises:
        NotImplementedError: if weights are wanted that show what was dropped.
    """
    dropout_p = float(real("dropout_p", dropout_p))
    return_attn_probs = flag("return_attn_probs", return_attn_probs)
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError(
            f"return_attn_probs: got True with dropout_p = {dropout_p}; saccade never writes "
            "weights out. Ask for them with dropout_p = 0 (the lse comes with them)"
        )
    return dropout_p, return_attn_probs


def answer(output: Tensor, lse: Tensor, return_attn_probs: bool) -> Any:
    """What FlashAttention returns: the output alone, or with the lse and an empty tensor."""
    return (output, lse, output.new_empty(0)) if return_attn_probs else output


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, dropout_p: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Attention of tensors [batch, length, heads, dim]; the output is laid out like them."""
    output, lse = saccade.attention(
        *(rows.transpose(1, 2) for rows in (q, k, v)),
        **options.keywords(),
        dropout_p=dropout_p,
        deterministic=flag("deterministic", deterministic),
        return_lse=True,
    )
    return output.transpose(1, 2), lse


def without_gradient(name: str, outputs: tuple[Tensor, Tensor], *given: Any) -> Any:
    """Outputs that were computed under `torch.no_grad`, which refuse to give a gradient.

    Args:
        name: of the call.
        given: the call's tensors; where none of them waits for a gradient, nothing is refused.
    """
    waiting = [tensor for tensor in given if isinstance(tensor, Tensor) and tensor.requires_grad]
    if not (waiting and torch.is_grad_enabled()):
        return outputs
    return _Refusing.apply(name, *outputs, *waiting)


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, output: Tensor, lse: Tensor, *waiting: Tensor) -> Any:
        ctx.name = name
        return output.view_as(output), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: got a gradient to send back, takes none: attention over pages is forward "
            "only, as FlashAttention's is; take flash_attn_varlen_func without block_table"
        )
