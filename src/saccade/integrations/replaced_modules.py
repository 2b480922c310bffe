"""Replaced modules: what `import` finds by the names of another library while it is installed."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType


class ReplacedModules:
    """Modules that stand in `sys.modules` between `install` and `uninstall`.

    Args:
        contents: what each module has, by its full name; a package stands among them before what
            is in it.
    """

    def __init__(self, contents: Mapping[str, Mapping[str, object]]):
        self.contents = contents
        self._before: dict[str, ModuleType] | None = None  # modules of these names; None: absent

    def install(self) -> None:
        """Put the modules in place of those that were imported by their names; twice is once."""
        if self._before is not None:
            return
        self._before = self._take_away()
        for name, content in self.contents.items():
            module = _module(name, content, is_package=self._is_package(name))
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
            sys.modules[name] = module

    def uninstall(self) -> None:
        """Put back what was imported before `install`."""
        if self._before is not None:
            self._take_away()
            sys.modules.update(self._before)
            self._before = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """`install` on the way in, `uninstall` on the way out."""
        self.install()
        try:
            yield
        finally:
            self.uninstall()

    def _is_package(self, name: str) -> bool:
        return any(other.startswith(f"{name}.") for other in self.contents)

    def _take_away(self) -> dict[str, ModuleType]:
        roots = {name.partition(".")[0] for name in self.contents}
        names = [name for name in sys.modules if name.partition(".")[0] in roots]
        return {name: sys.modules.pop(name) for name in names}


def defined_in(module: ModuleType) -> dict[str, object]:
    """What a module of ours defines itself, by its public names."""
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }


def names_of(module: ModuleType) -> dict[str, object]:
    """All names of a module that lists another library's, those that it imports among them."""
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def _module(name: str, content: Mapping[str, object], is_package: bool) -> ModuleType:
    module = ModuleType(name, f"{name}'s calls, answered by saccade.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []  # a package without files: other submodules are not found

    def missing(attribute: str) -> object:
        raise AttributeError(
            f"saccade's {name} has no {attribute!r}; it has {', '.join(sorted(content))}"
        )

    vars(module).update(content, __getattr__=missing)
    return module
