"""xformers: the attention of `xformers.ops`, answered by saccade, with its layouts and biases.

Change one import, or none: after `install()`, `import xformers.ops` in other people's code finds
these calls. Arguments, layouts [batch, length, heads, dim], biases and return values are those of
xformers 0.0.30; any dtype and device that saccade serves. Differences:

- `op` names a kernel of xformers', and is not needed.
- A row that sees nothing gives 0, and an lse of -inf.
- Dropout leaves out other weights for the same seed.
- Only attention is here, of drafted trees too, and two operators that dinov2 imports beside it:
  xformers' layers and its other operators are not found.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from saccade.integrations.replaced_modules import ReplacedModules, defined_in, names_of
from saccade.integrations.xformers import (
    attention,
    attn_bias_utils,
    dispatch,
    indexing,
    info,
    operators,
    tree_attention,
)
from saccade.integrations.xformers import attn_bias as attn_bias
from saccade.integrations.xformers import fmha as fmha
from saccade.integrations.xformers.fmha import *  # noqa: F403
from saccade.integrations.xformers.indexing import *  # noqa: F403

__all__ = ["install", "installed", "unbind", "uninstall"]
# What xformers.ops has: its calls, biases, and names of kernels, which are not needed.
__all__ += attention.__all__
__all__ += attn_bias.__all__
__all__ += indexing.__all__
__all__ += operators.__all__

VERSION = "0.0.30"
"""Of xformers, whose calls these are: programs look at it."""


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Views of a tensor along a dimension, as PyTorch's `unbind` gives them.

    Examples:
        >>> saccade.integrations.xformers.unbind(torch.randn(2, 16, 3, 4, 32), dim=2)[0].shape
        torch.Size([2, 16, 4, 32])
    """
    return x.unbind(dim)


_modules = ReplacedModules(
    {
        # ComfyUI asks for the version by its module, and whether there are kernels.
        "xformers": {"__version__": VERSION, "_has_cpp_library": True},
        "xformers.version": {"__version__": VERSION},
        "xformers.ops": {
            **names_of(fmha),
            **defined_in(indexing),
            "unbind": unbind,
            "AttentionMask": attn_bias.AttentionBias,
        },
        "xformers.ops.fmha": names_of(fmha),
        "xformers.ops.fmha.attn_bias": names_of(attn_bias),
        "xformers.ops.fmha.common": {**names_of(attn_bias), **defined_in(operators)},
        "xformers.ops.fmha.dispatch": names_of(dispatch),
        "xformers.ops.tree_attention": names_of(tree_attention),
        "xformers.attn_bias_utils": defined_in(attn_bias_utils),
        "xformers.info": defined_in(info),
        **{
            f"xformers.ops.fmha.{name}": operator._asdict()
            for name, operator in operators.MODULES.items()
        },
    }
)


def install() -> None:
    """Make `import xformers.ops` find these calls, in this process, until `uninstall`.

    What was imported before keeps what it has; so call this first. An xformers that is installed is
    hidden meanwhile. Calling it twice changes nothing.

    Examples:
        >>> saccade.integrations.xformers.install()
        >>> from xformers.ops import memory_efficient_attention
        >>> memory_efficient_attention.__module__
        'saccade.integrations.xformers.attention'
        >>> saccade.integrations.xformers.uninstall()
    """
    _modules.install()


def uninstall() -> None:
    """Put back what `import xformers` found before `install`.

    Examples:
        >>> saccade.integrations.xformers.install()
        >>> saccade.integrations.xformers.uninstall()  # an xformers that is installed is back
    """
    _modules.uninstall()


def installed() -> AbstractContextManager[None]:
    """`install` on the way in, `uninstall` on the way out.

    Examples:
        >>> with saccade.integrations.xformers.installed():
        ...     from xformers.ops import memory_efficient_attention
    """
    return _modules.installed()
