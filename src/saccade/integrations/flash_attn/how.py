"""How: FlashAttention's options in saccade's terms."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

import saccade
from saccade import masks, scores
from saccade.integrations.flash_attn.scalars import flag, pair, real

# Further than any row lies from any other; the sum of two fits in 32 bits.
FAR = 2**30


class How(NamedTuple):
    """FlashAttention's options that all of its calls share; see `flash_attn_func`."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None

    @classmethod
    def of(
        cls, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, alibi_slopes: Any
    ) -> How:
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

    def options(self) -> dict[str, Any]:
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
    q: Tensor, k: Tensor, v: Tensor, how: How, dropout_p: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Attention of tensors [batch, length, heads, dim]; the output is laid out like them."""
    output, lse = saccade.attention(
        *(rows.transpose(1, 2) for rows in (q, k, v)),
        **how.options(),
        dropout_p=dropout_p,
        deterministic=flag("deterministic", deterministic),
        return_lse=True,
    )
    return output.transpose(1, 2), lse
