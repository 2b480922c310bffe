"""Reach: how far rows of one sequence see; and xformers' biases for sequences of one length.

A bias says by `reach` how many rows a row sees before and behind its position, and by `align`
which rows stand side by side, the first or the last ones. Calls are made of that, and skip hidden
tiles; only `materialize` writes pairs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from saccade import masks
from saccade.integrations import arguments

Reach = tuple[int | None, int | None]  # rows seen before and behind a row's position; None: all


class AttentionBias:
    """Which keys each query sees, known without a tensor that says it for each pair.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> isinstance(attn_bias.LowerTriangularMask(), attn_bias.AttentionBias)
        True
    """

    HOLDS_DENSE_TENSOR: ClassVar[bool] = False
    align: ClassVar[str] = "bottom_right"
    _written_by_hand: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Note a class of somebody else's that says by `materialize` alone what is visible."""
        super().__init_subclass__(**options)
        own = cls.__module__.startswith(f"{__package__}.")
        if not own and "materialize" in vars(cls):
            cls._written_by_hand = "reach" not in vars(cls)

    def check(self) -> None:
        """Refuse a bias whose `materialize` says something else than its `reach`.

        Raises:
            NotImplementedError: with the name of its class.
        """
        if self._written_by_hand:
            raise NotImplementedError(
                f"attn_bias: got a {type(self).__name__} with a materialize of its own, takes a "
                "class of xformers' own, or a tensor: materialize(shape)"
            )

    def reach(self) -> Reach:
        """How far a row sees within its sequence."""
        raise NotImplementedError(
            f"attn_bias: got a {type(self).__name__}, takes a class of xformers' own"
        )

    def pairs(self) -> masks.Mask | None:
        """The mask of one sequence, or of each; None: nothing is hidden."""
        return arguments.window(*self.reach(), self.align)

    def to(self, device: Any) -> Self:
        """This bias with its tensors on a device."""
        return self

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
    ) -> Tensor:
        """The bias written out, to look at it: 0 where a pair is visible, else -inf.

        Args:
            shape: [..., query rows, key rows].
        """
        return written_out(self._visible(*shape[-2:]), shape, dtype, device)

    def _visible(self, query_len: int, kv_len: int) -> Tensor:
        pairs = self.pairs()
        if pairs is None or not query_len or not kv_len:
            return torch.ones(query_len, kv_len, dtype=torch.bool)
        return pairs.to_dense(1, 1, query_len, kv_len)[0, 0].cpu()


def written_out(visible: Tensor, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
    """0 where a pair is visible, else -inf: [..., query rows, key rows]."""
    hidden = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -torch.inf)
    return hidden.to(device).expand(*shape[:-2], *visible.shape)


class Causal:
    """All that came before a row's position, and the row at it."""

    def reach(self) -> Reach:
        """All rows before."""
        return None, 0


class SlidingWindow:
    """The last rows before a row's position, the one at it included."""

    _window_size: int

    def __post_init__(self) -> None:
        if arguments.whole("window_size", self._window_size) < 1:
            raise ValueError(f"window_size: got {self._window_size}, takes at least 1")

    def reach(self) -> Reach:
        """The window's rows before."""
        return self._window_size - 1, 0


class TwoSidedWindow:
    """Some rows before a row's position, and some behind it."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            if arguments.whole(name, getattr(self, name)) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes at least 0")

    def reach(self) -> Reach:
        """Both sides."""
        return self.window_left, self.window_right


# ---- sequences of one length ---------------------------------------------------------------------


class LowerTriangularMask(Causal, AttentionBias):
    """Causal, the first query at the first key.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.LowerTriangularMask()
        >>> (bias.materialize((2, 4)) == 0).int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0]]
    """

    align: ClassVar[str] = "top_left"

    def __init__(self, *unused: Any, **unused_options: Any):
        """Takes what xformers' takes (a device, say), and needs none of it."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """This mask and a tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal, the first query at the first key, with a tensor that is added to the scores.

    Args:
        bias: broadcastable to [batch, heads, query rows, key rows]; gets a gradient.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.LowerTriangularMaskWithTensorBias(torch.ones(2, 2))
        >>> bias.materialize((2, 2)).tolist()
        [[1.0, -inf], [1.0, 1.0]]
    """

    HOLDS_DENSE_TENSOR: ClassVar[bool] = True

    def __init__(self, bias: Tensor):
        self._bias = self._subtensor = bias

    def to(self, device: Any) -> Self:
        """This bias with its tensor on a device, or in a dtype."""
        return type(self)(self._bias.to(device))

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The mask and the tensor in one."""
        return super().materialize(shape, dtype, device) + self._bias.to(device, dtype)


class LowerTriangularFromBottomRightMask(Causal, AttentionBias):
    """Causal, the last query at the last key.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.LowerTriangularFromBottomRightMask()
        >>> (bias.materialize((2, 4)) == 0).int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
    """

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Of what came before, the last `window_size` rows, a row itself included."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass(eq=False)
class LowerTriangularFromBottomRightLocalAttentionMask(
    SlidingWindow, LowerTriangularFromBottomRightMask
):
    """A sliding window of `_window_size` rows, the last query at the last key.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(2)
        >>> (bias.materialize((2, 4)) == 0).int().tolist()
        [[0, 1, 1, 0], [0, 0, 1, 1]]
    """

    _window_size: int


@dataclass(eq=False)
class LocalAttentionFromBottomRightMask(TwoSidedWindow, AttentionBias):
    """A window to both sides of a row, the last query at the last key.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.LocalAttentionFromBottomRightMask(1, 1)
        >>> (bias.materialize((3, 3)) == 0).int().tolist()
        [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    """

    window_left: int
    window_right: int
