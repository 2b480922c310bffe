"""The public names: what `saccade` and its public modules export, read without importing them.

`PAGES` lists them for the reference of the site, in the order in which it shows them; a test
compares it with the modules' `__all__`. `public_types.py` checks their types, and
`reference_pages.py` makes their pages.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"


class Chapter(NamedTuple):
    """A stretch of the reference: names of one module that belong together."""

    title: str
    module: str
    about: str
    names: tuple[str, ...]


class Definition(NamedTuple):
    """Where a name comes from: a module of ours and its name there, or another package's module."""

    module: str
    name: str

    @property
    def is_ours(self) -> bool:
        """Whether it is defined in this library."""
        return self.module.partition(".")[0] == "saccade"


def file_of(module: str) -> Path:
    """The file of one of our modules.

    Raises:
        FileNotFoundError: where there is no such module.
    """
    path = SOURCE.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.exists():
            return file
    raise FileNotFoundError(f"no module {module} below {SOURCE}")


@functools.cache
def tree_of(module: str) -> ast.Module:
    """A module, parsed."""
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def exported(module: str) -> tuple[str, ...]:
    """The names in a module's `__all__`.

    Raises:
        ValueError: where it has none: a public module says what is public in it.
    """
    for node in tree_of(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return tuple(ast.literal_eval(value))
    raise ValueError(f"{module} has no __all__")


def definition(module: str, name: str) -> Definition:
    """Where a name of a module is defined, through all imports."""
    for node in ast.walk(tree_of(module)):
        if not isinstance(node, ast.ImportFrom) or node.level:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                found = Definition(str(node.module), alias.name)
                is_module = found.is_ours and _is_module(f"{found.module}.{found.name}")
                is_shadowed = is_module and name in _assigned(found.module)
                if not found.is_ours or (is_module and not is_shadowed):
                    return found
                return definition(*found)
    return Definition(module, name)


def _is_module(name: str) -> bool:
    try:
        file_of(name)
    except FileNotFoundError:
        return False
    return True


def _assigned(module: str) -> set[str]:
    """What a module imports from its own modules by the names of these, as `explain`."""
    return {
        alias.name
        for node in tree_of(module).body
        if isinstance(node, ast.ImportFrom) and node.module == f"{module}.{node.names[0].name}"
        for alias in node.names
    }


INTEGRATIONS = "saccade.integrations"
# Modules of which each public name has a page. The others in saccade.__all__ are these modules.
MODULES = (
    "saccade",
    "saccade.masks",
    "saccade.scores",
    "saccade.feature_maps",
    "saccade.testing",
    f"{INTEGRATIONS}.sdpa",
    f"{INTEGRATIONS}.flex_attention",
    f"{INTEGRATIONS}.flash_attn",
    f"{INTEGRATIONS}.flash_attn.rotary",
    f"{INTEGRATIONS}.flash_attn.version_3",
    f"{INTEGRATIONS}.flash_kernels",
    f"{INTEGRATIONS}.fla",
    f"{INTEGRATIONS}.fast_transformers",
    f"{INTEGRATIONS}.transformers",
    f"{INTEGRATIONS}.diffusers",
    f"{INTEGRATIONS}.vllm",
)


WITHOUT_PAGES = frozenset({"xformers"})  # it is being written


def public_names() -> list[tuple[str, str]]:
    """Each public name with its module; modules themselves are none."""
    return [
        (module, name)
        for module in MODULES
        for name in exported(module)
        if f"{module}.{name}" not in MODULES
    ]
