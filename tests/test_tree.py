"""The tree of the source: modules that can be imported in any order, and tests that mirror it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/saccade"
MODULES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path
    for path in SOURCE.rglob("*.py")
    if path != SOURCE / "__init__.py"
}
SHARED = {"docs", "suites", "tools", "training", "call_cache"}  # folders of tests alone


def imported(nodes: list[ast.stmt]) -> Iterator[str]:
    """The modules of ours that statements import as soon as they run."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saccade"):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in MODULES else str(node.module)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imported(node.body)


def test_no_module_waits_for_itself() -> None:
    arrows = nx.DiGraph()
    for name, path in MODULES.items():
        for module in imported(ast.parse(path.read_text(encoding="utf-8")).body):
            if module in MODULES:
                arrows.add_edge(name, module)
    circles = [part for part in nx.strongly_connected_components(arrows) if len(part) > 1]
    assert circles == []


@pytest.mark.parametrize(
    "folder",
    sorted(
        str(path.relative_to(ROOT / "tests"))
        for path in (ROOT / "tests").rglob("*")
        if path.is_dir() and path.name != "__pycache__"
    ),
)
def test_a_folder_of_tests_mirrors_one_of_the_source(folder: str) -> None:
    assert Path(folder).name in SHARED or (SOURCE / folder).is_dir()
