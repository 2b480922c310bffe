"""Modules in place of other libraries', until they are taken away."""

import importlib
import sys

import pytest

from saccade.integrations.replaced_modules import ReplacedModules

OURS = ReplacedModules(
    {"a_library": {"there": 1}, "a_library.part": {"deep": 2}, "a_library.part.leaf": {"leaf": 3}}
)


def test_packages_have_their_modules_and_no_others(monkeypatch):
    theirs = {name: type(sys)(name) for name in ("a_library", "a_library.other")}
    for name, module in theirs.items():
        monkeypatch.setitem(sys.modules, name, module)
    with OURS.installed():
        OURS.install()  # once more changes nothing
        import a_library.part.leaf

        assert a_library.there == 1 and a_library.part.deep == 2
        assert importlib.import_module("a_library.part.leaf").leaf == 3
        with pytest.raises(ImportError):
            importlib.import_module("a_library.other")
        with pytest.raises(ImportError, match="is not a package"):
            importlib.import_module("a_library.part.leaf.below")
        with pytest.raises(AttributeError, match="a_library has no 'absent'; it has there"):
            _ = a_library.absent
    OURS.uninstall()  # once more changes nothing
    assert sys.modules["a_library"] is theirs["a_library"]
    assert sys.modules["a_library.other"] is theirs["a_library.other"]
    assert "a_library.part" not in sys.modules
