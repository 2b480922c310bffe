"""flash_attn: FlashAttention's calls, answered by saccade, with its layouts and defaults.

Change one import, or none: after `install()`, `import flash_attn` in other people's code finds
these calls. Arguments, layouts [batch, length, heads, dim] and return values are those of
flash-attn 2.8; any dtype and device that saccade serves. FlashAttention-3's calls, of
`flash_attn_interface`, are in `version_3`; `flash_attn.layers.rotary` is `rotary`. Differences:

- A row that sees nothing has an lse of -inf (theirs: +inf in training calls).
- Dropout leaves out other weights for the same seed.
- `return_attn_probs` with dropout raises: weights are never written out.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from saccade.integrations.flash_attn import functions, rotary, version_3
from saccade.integrations.flash_attn.cache import flash_attn_with_kvcache
from saccade.integrations.flash_attn.functions import (
    IndexFirstAxis,
    IndexFirstAxisResidual,
    IndexPutFirstAxis,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from saccade.integrations.flash_attn.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from saccade.integrations.replaced_modules import ReplacedModules, defined_in

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "install",
    "installed",
    "pad_input",
    "uninstall",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

VERSION = "2.8.3"
"""Of flash-attn, whose calls these are: programs look at it."""

PADDING = (
    "IndexFirstAxis", "IndexFirstAxisResidual", "IndexPutFirstAxis", "index_first_axis",
    "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
    "unpad_input_for_concatenated_sequences",
)  # fmt: skip


CALLS = {name: globals()[name] for name in __all__ if name.startswith("flash_attn_")}
_modules = ReplacedModules(
    {
        "flash_attn": {**CALLS, "__version__": VERSION},
        "flash_attn.flash_attn_interface": CALLS,
        "flash_attn.bert_padding": {name: getattr(functions, name) for name in PADDING},
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": defined_in(rotary),
        "flash_attn_interface": defined_in(version_3),
    }
)


def install() -> None:
    """Make `import flash_attn` find these calls, in this process, until `uninstall`.

    What was imported before keeps what it has; so call this first. A flash-attn that is installed
    is hidden meanwhile; `flash_attn_interface`, FlashAttention-3's module, is found as well.
    Calling it twice changes nothing.

    Examples:
        >>> saccade.integrations.flash_attn.install()
        >>> from flash_attn import flash_attn_func
        >>> flash_attn_func.__module__
        'saccade.integrations.flash_attn.functions'
        >>> saccade.integrations.flash_attn.uninstall()
    """
    _modules.install()


def uninstall() -> None:
    """Put back what `import flash_attn` found before `install`.

    Examples:
        >>> saccade.integrations.flash_attn.install()
        >>> saccade.integrations.flash_attn.uninstall()  # a flash_attn that is installed is back
    """
    _modules.uninstall()


def installed() -> AbstractContextManager[None]:
    """`install` on the way in, `uninstall` on the way out.

    Examples:
        >>> with saccade.integrations.flash_attn.installed():
        ...     from flash_attn import flash_attn_func
    """
    return _modules.installed()
