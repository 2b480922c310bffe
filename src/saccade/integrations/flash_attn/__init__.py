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

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

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


def _defined_in(module: ModuleType) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }


CALLS = {name: globals()[name] for name in __all__ if name.startswith("flash_attn_")}
MODULES: dict[str, dict[str, object]] = {
    "flash_attn": {**CALLS, "__version__": VERSION},
    "flash_attn.flash_attn_interface": CALLS,
    "flash_attn.bert_padding": {name: getattr(functions, name) for name in PADDING},
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": _defined_in(rotary),
    "flash_attn_interface": _defined_in(version_3),
}
PACKAGES = ("flash_attn", "flash_attn.layers")
ROOTS = ("flash_attn", "flash_attn_interface")

_replaced: list[dict[str, ModuleType]] = []  # modules of these names before `install`


def install() -> None:
    """Make `import flash_attn` find these calls, in this process, until `uninstall`.

    What was imported before keeps what it has; so call this first. A flash-attn that is installed
    is hidden meanwhile; `flash_attn_interface`, FlashAttention-3's module, is found as well.
    Calling it twice changes nothing.

    >>> saccade.integrations.flash_attn.install()
    >>> from flash_attn import flash_attn_func
    """
    if _replaced:
        return
    _replaced.append(_take_away())
    made = {name: _module(name, content) for name, content in MODULES.items()}
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
        sys.modules[name] = module


def uninstall() -> None:
    """Put back what `import flash_attn` found before `install`."""
    if _replaced:
        _take_away()
        sys.modules.update(_replaced.pop())


@contextmanager
def installed() -> Iterator[None]:
    """`install` on the way in, `uninstall` on the way out."""
    install()
    try:
        yield
    finally:
        uninstall()


def _take_away() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in ROOTS]
    return {name: sys.modules.pop(name) for name in names}


def _module(name: str, content: dict[str, object]) -> ModuleType:
    module = ModuleType(name, f"{name}'s calls, answered by saccade.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name in PACKAGES)
    if name in PACKAGES:
        module.__path__ = []  # a package without files: other submodules are not found

    def missing(attribute: str) -> object:
        raise AttributeError(
            f"saccade's {name} has no {attribute!r}; it has {', '.join(sorted(content))}"
        )

    vars(module).update(content, __getattr__=missing)
    return module
