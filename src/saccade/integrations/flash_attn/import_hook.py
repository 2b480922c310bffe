"""Import hook: let `import flash_attn` in other people's code find saccade's calls.

So does `import flash_attn_interface`, FlashAttention-3's module.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from saccade.integrations.flash_attn import cache, functions, rotary, version_3
from saccade.integrations.flash_attn import functions as padding

VERSION = "2.8.3"
"""Of flash-attn, whose calls these are: programs look at it."""

CALLS = {
    name: getattr(module, name)
    for module in (functions, cache)
    for name in vars(module)
    if name.startswith("flash_attn_")
}


def _own(module: ModuleType) -> dict[str, object]:
    """What a module defines for others."""
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }


MODULES: dict[str, dict[str, object]] = {
    "flash_attn": {**CALLS, "__version__": VERSION},
    "flash_attn.flash_attn_interface": CALLS,
    "flash_attn.bert_padding": _own(padding),
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": _own(rotary),
    "flash_attn_interface": _own(version_3),
}
PACKAGES = ("flash_attn", "flash_attn.layers")
ROOTS = ("flash_attn", "flash_attn_interface")

_before: list[dict[str, ModuleType]] = []  # what was imported under such names before `install`


def install() -> None:
    """Make `import flash_attn` find these calls, in this process, until `uninstall`.

    What was imported before keeps what it has; so call this first. A flash-attn that is installed
    is hidden meanwhile. Calling it twice changes nothing.

    >>> saccade.integrations.flash_attn.install()
    >>> from flash_attn import flash_attn_func
    """
    if _before:
        return
    _before.append(_take_away())
    made = {name: _module(name, content) for name, content in MODULES.items()}
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
        sys.modules[name] = module


def uninstall() -> None:
    """Put back what `import flash_attn` found before `install`."""
    if _before:
        _take_away()
        sys.modules.update(_before.pop())


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
