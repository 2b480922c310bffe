"""The user's own table comes back as it was saved, and a broken one says how to get rid of it."""

import json

import pytest

from saccade.ops.attention.triton import tuned_configs
from saccade.ops.attention.triton.configs import KernelProblem
from saccade.ops.attention.triton.tuned_configs import ConfigTable
from saccade.runtime.spec import KernelConfig

FORWARD = KernelProblem("sm_90", "forward", 128, wide=False, masked=True)
KEYS = KernelProblem("sm_90", "backward_keys", 64, wide=True, dropout=True)
FOUND = ConfigTable("sm_90", "NVIDIA H200", "3.6.0", {FORWARD: KernelConfig(64, 64, 4, 3)})


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    file = tmp_path / "settings" / "configs.json"
    monkeypatch.setenv("SACCADE_CONFIGS", str(file))
    tuned_configs.load.cache_clear()
    yield file
    tuned_configs.load.cache_clear()


def test_without_a_file_the_table_is_empty():
    assert tuned_configs.load() == {}


def test_what_was_saved_is_loaded_at_once(file):
    assert tuned_configs.load() == {}
    assert tuned_configs.save(file, FOUND) is None
    assert tuned_configs.load() == {FORWARD: KernelConfig(64, 64, 4, 3)}
    assert tuned_configs.load() is tuned_configs.load()
    assert tuned_configs.read(file) == {"sm_90": FOUND}


def test_saving_keeps_other_entries_and_other_architectures(file):
    ampere = FORWARD._replace(architecture="sm_80")
    tuned_configs.save(file, FOUND)
    tuned_configs.save(
        file, ConfigTable("sm_80", "A100", "3.6.0", {ampere: KernelConfig(32, 32, 4, 1)})
    )
    tuned_configs.save(
        file, ConfigTable("sm_90", "H100", "3.9.0", {KEYS: KernelConfig(16, 32, 8, 1)})
    )
    assert tuned_configs.load() == {
        FORWARD: KernelConfig(64, 64, 4, 3),
        KEYS: KernelConfig(16, 32, 8, 1),
        ampere: KernelConfig(32, 32, 4, 1),
    }
    assert tuned_configs.read(file)["sm_90"].device == "H100"


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("SACCADE_CONFIGS", "")
    assert tuned_configs.path() is None
    assert tuned_configs.load() == {}
    monkeypatch.delenv("SACCADE_CONFIGS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuned_configs.path() == tmp_path / "saccade" / "configs.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned_configs.path() == tmp_path / ".config" / "saccade" / "configs.json"


def entry(**changes):
    plain = {
        "which": "forward", "width": 128, "wide": False, "masked": True, "dropout": False,
        "listed": False, "short": False, "config": [64, 64, 4, 3],
    }  # fmt: skip
    return {**plain, **changes}


def document(*entries, **changes):
    table = {"architecture": "sm_90", "device": "d", "triton": "3.6.0", "entries": list(entries)}
    return json.dumps({"version": 1, "tables": [{**table, **changes}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ("[]", "the file: got"),
        ('{"version": 2, "tables": []}', "version: got 2, takes 1"),
        ('{"version": 1, "tables": {}}', "tables: got"),
        ('{"version": 1, "tables": [], "extra": 0}', "extra"),
        (document(architecture="sm_91"), "architecture: got 'sm_91', takes one of sm_75"),
        (document(entry(which="sideways")), "which: got 'sideways', takes one of forward"),
        (document(entry(width=100)), "width: got 100"),
        (document(entry(masked=1)), "masked: got 1, takes true or false"),
        (document(entry(color="red")), "color"),
        (document(entry(config=[48, 64, 4, 3])), "query_tile: got 48, takes a power of two"),
        (document(entry(config=[64, 64, 4])), "config: got"),
        (document(entry(config=[64, 64, 4, 0])), "config: got"),
        (document(entry(config=[64, 64, 5, 1])), "num_warps: got 5"),
        (document(entry(config=["64", 64, 4, 1])), "query_tile: got '64'"),
        (document(entry(config="fast")), "config: got 'fast', takes a list"),
    ],
)
def test_a_broken_file_says_what_is_wrong_and_how_to_get_rid_of_it(file, text, message):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        tuned_configs.load()
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "Delete the file, or write it anew with `saccade tune --save`" in str(caught.value)
    aside = tuned_configs.save(file, FOUND)
    assert aside is not None and aside.read_text() == text
    assert tuned_configs.load() == FOUND.entries


@pytest.mark.parametrize(
    "text",
    [
        '{"version": NaN, "tables": []}',
        "[" * 100_000,
        document(entry(config=[2**70, 64, 4, 3])),
        document(entry(config=[2**20, 64, 4, 3])),
        document(entry(config=[64, 64, 4, 2**70])),
        document(entry(), architecture=["sm_90"]),
        b"\xff\xfe",
    ],
    ids=["NaN", "deep", "2^70", "2^20", "stages", "list", "no UTF-8"],
)
def test_any_content_is_an_error_that_names_the_file(file, text):
    file.parent.mkdir()
    if not isinstance(text, (bytes, str)):
        text = json.dumps(text)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"configs.json: .*Delete the file"):
        tuned_configs.load()


def test_a_folder_is_no_table_and_stays_where_it_is(file):
    file.mkdir(parents=True)
    for call in (tuned_configs.load, lambda: tuned_configs.save(file, FOUND)):
        with pytest.raises(ValueError, match=r"configs.json: cannot be read: .*SACCADE_CONFIGS"):
            call()
    assert file.is_dir()
