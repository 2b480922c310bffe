"""Integrations are found by name, and imported no sooner."""

import pkgutil
import subprocess
import sys

import pytest

import saccade.integrations

PROGRAM = """
import sys
import saccade
assert not {f"saccade.integrations.{name}" for name in ("flash_attn", "fla")} & set(sys.modules)
assert "transformers" not in sys.modules
saccade.integrations.flash_attn.install()
import flash_attn
"""


def test_all_that_are_there_are_named():
    there = {module.name for module in pkgutil.iter_modules(saccade.integrations.__path__)}
    assert there - {"arguments", "replaced_modules"} == set(saccade.integrations.NAMES)


def test_a_name_imports_its_module():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_an_unknown_name_is_told_what_there_is():
    with pytest.raises(AttributeError, match="no 'flash_attention'; it has diffusers, fast"):
        _ = saccade.integrations.flash_attention
