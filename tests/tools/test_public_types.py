"""Public names are found without importing them, and types that are not known are told."""

from __future__ import annotations

import importlib

import pytest
from public_names import MODULES, definition, exported
from public_types import faults, is_public, roots_of_public_names

import saccade
from saccade import integrations


@pytest.mark.parametrize("module", [name for name in MODULES if "vllm" not in name])
def test_names_are_those_that_a_program_sees(module: str) -> None:
    found = importlib.import_module(module)
    others = found.__all__[len(exported(module)) :]  # that are listed in a module below
    assert [*exported(module), *others] == found.__all__
    assert not others or module == "saccade.integrations.xformers"
    for name in exported(module):
        where = definition(module, name)
        if where.is_ours and f"{module}.{name}" not in MODULES:
            assert getattr(importlib.import_module(where.module), where.name) is getattr(
                found, name
            )


def test_all_public_modules_are_looked_at() -> None:
    those = {name for name in saccade.__all__ if f"saccade.{name}" in MODULES}
    assert those == {"masks", "scores", "feature_maps", "parallel", "testing"}
    named = {module.split(".")[2] for module in MODULES if ".integrations." in module}
    assert named == set(integrations.NAMES)


def test_a_module_without_names_is_refused() -> None:
    with pytest.raises(ValueError, match="has no __all__"):
        exported("saccade.runtime.spec")


def test_attributes_of_public_names_are_public_unless_they_say_otherwise() -> None:
    roots = roots_of_public_names()
    assert "saccade.ops.attention.api.attention" in roots and "saccade.attention" in roots
    assert is_public("saccade.masks.Mask.key", roots)
    assert is_public("saccade.masks.Mask.__init__", roots)
    assert not is_public("saccade.masks.Mask._combined", roots)
    assert not is_public("saccade.masks.as_mask", roots)
    assert not is_public("saccade.ops.attention.api.flatten", roots)


def test_what_is_not_known_is_told() -> None:
    symbols = [
        {"name": "saccade.masks.causal", "isTypeKnown": True, "isTypeAmbiguous": False},
        {"name": "saccade.masks.as_mask", "isTypeKnown": False, "isTypeAmbiguous": False},
        {"name": "saccade.masks.Mask.key", "isTypeKnown": True, "isTypeAmbiguous": True},
        {"name": "saccade.masks.window", "isTypeKnown": False, "isTypeAmbiguous": False},
    ]
    said = [{"message": "no annotation"}]
    told = list(faults([{**one, "diagnostics": said} for one in symbols], roots_of_public_names()))
    assert [text.split()[0] for text in told] == ["saccade.masks.Mask.key", "saccade.masks.window"]
    assert all("no annotation" in text for text in told)
