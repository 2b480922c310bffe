"""Every problem has a config that its kernel can run with, wrong ones are refused by name, and the
user's own table comes back as it was saved."""

import json
from itertools import product

import pytest

from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.configs import ARCHITECTURES, PASSES, ConfigTable, KernelProblem
from saccade.runtime.spec import CONFIG_NUMBERS, KernelConfig

WIDTHS, EITHER = (16, 32, 64, 128, 256), (False, True)
HOPPER = KernelProblem("sm_90", "forward", 128, wide=False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_default_is_one_that_a_kernel_can_have(architecture):
    for which, width, wide in product(PASSES, WIDTHS, EITHER):
        for masked, dropout in product(EITHER, EITHER):
            problem = KernelProblem(architecture, which, width, wide, masked, dropout)
            config = configs.choose(problem)
            configs.check(config)
            assert all(config.numbers()) and config.backward is None
            assert config.num_stages <= 4
            assert config.query_tile * config.kv_tile >= 32 * config.num_warps
            streamed = min(config.query_tile, config.kv_tile) * problem.width
            waiting = 2 * (config.num_stages - 1) * streamed * (4 if problem.wide else 2)
            assert waiting <= configs.SHARED_MEMORY[architecture]


def test_tiles_that_were_timed_stay():
    timed = {
        ("forward", ""): (64, 64, 4, 3), ("forward", "listed"): (128, 64, 8, 3),
        ("backward_queries", ""): (128, 32, 8, 3), ("backward_queries", "masked"): (128, 64, 8, 3),
        ("backward_queries", "packed"): (64, 64, 4, 2),
    }  # fmt: skip
    for (which, flag), numbers in timed.items():
        problem = KernelProblem("sm_90", which, 128, wide=False)
        problem = problem._replace(**{flag: True}) if flag else problem
        assert configs.choose(problem) == KernelConfig(*numbers)


def test_a_masked_row_serves_masks_only_where_there_is_one():
    assert configs.row_of(HOPPER)[0] == "forward"
    assert configs.row_of(HOPPER._replace(masked=True))[0] == "forward, masked"
    assert configs.row_of(HOPPER._replace(masked=True, listed=True))[0] == "forward, listed"
    assert configs.row_of(HOPPER._replace(masked=True, dropout=True))[0] == "forward, dropout"
    assert configs.row_of(HOPPER._replace(wide=True, masked=True))[0] == "forward"
    queries = HOPPER._replace(which="backward_queries", packed=True)
    assert configs.row_of(queries)[0] == "backward_queries, packed"
    assert configs.row_of(queries._replace(masked=True))[0] == "backward_queries, masked"
    assert configs.row_of(queries._replace(architecture="sm_80"))[0] == "backward_queries"
    keys = HOPPER._replace(which="backward_keys", masked=True, short=True)
    assert configs.row_of(keys)[0] == "backward_keys, masked"
    assert configs.row_of(keys._replace(packed=True))[0] == "backward_keys, short, packed"


def test_wide_heads_load_ahead_under_a_mask():
    """Without it a causal call at width 256 took longer than one of all pairs."""
    for which, masked in product(("forward", "backward_keys", "backward_queries"), EITHER):
        wide_heads = HOPPER._replace(which=which, width=256, masked=masked)
        assert configs.choose(wide_heads).num_stages > 1


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_80"),
        ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_100"),
        ((11, 0), "sm_100"), ((12, 0), "sm_120"), ((12, 1), "sm_120"), ((13, 0), "sm_120"),
    ],
)  # fmt: skip
def test_a_newer_capability_maps_down(capability, architecture):
    assert configs.architecture_of(capability) == architecture


@pytest.mark.parametrize("capability", [(7, 0), (6, 1)])
def test_an_older_capability_is_refused(capability):
    with pytest.raises(ValueError, match=r"capability: got .* takes \(7, 5\) or newer"):
        configs.architecture_of(capability)


def test_what_is_given_goes_before_the_users_table_and_that_before_the_default():
    table = {HOPPER: KernelConfig(64, 32, 4, 2)}
    assert configs.choose(HOPPER, None, table) == KernelConfig(64, 32, 4, 2)
    assert configs.choose(HOPPER, KernelConfig(query_tile=16), table) == KernelConfig(16, 32, 4, 2)
    assert configs.choose(HOPPER._replace(masked=True), None, table) == KernelConfig(64, 64, 4, 3)
    assert configs.choose(HOPPER._replace(packed=True), None, table) == KernelConfig(64, 32, 4, 2)
    narrow = KernelProblem("sm_90", "forward", 16, wide=False)
    assert configs.choose(
        narrow, None, {configs.entry_of(narrow): KernelConfig(16, 16, 1, 1)}
    ) == KernelConfig(16, 16, 1, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KernelConfig(query_tile=48), "query_tile: got 48, takes a power of two from 16 to 65536"),
        (KernelConfig(query_tile=8), "query_tile: got 8, takes a power of two from 16 to 65536"),
        (KernelConfig(kv_tile=100), "kv_tile: got 100, takes a power of two from 16 to 65536"),
        (KernelConfig(num_warps=3), "num_warps: got 3, takes one of 1, 2, 4, 8, 16"),
        (KernelConfig(num_warps=32), "num_warps: got 32, takes one of 1, 2, 4, 8, 16"),
    ],
)
def test_a_config_that_no_kernel_can_have_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        configs.choose(HOPPER, config)


def test_only_what_cannot_do_better_may_spill():
    assert configs.may_spill(HOPPER._replace(width=64)) == ""
    assert "H200" in configs.may_spill(HOPPER._replace(which="backward_keys"))
    assert "H200" in configs.may_spill(HOPPER._replace(which="backward_keys", width=256))
    assert "tensor cores" in configs.may_spill(HOPPER._replace(wide=True))
    assert configs.may_spill(HOPPER._replace(wide=True, width=64)) == ""
    assert "tensor cores" in configs.may_spill(HOPPER._replace(architecture="sm_75"))


@pytest.mark.parametrize("name", CONFIG_NUMBERS)
@pytest.mark.parametrize("value", [-1, 2**70, 2**31, True, 1.5, float("nan")])
def test_numbers_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"{name}: got .*, takes a whole number from 0 to"):
        KernelConfig(**{name: value})


@pytest.mark.parametrize("name", ["query_tile", "kv_tile"])
def test_tiles_that_no_kernel_has_are_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"{name}: got 131072, takes a power of two from 16 to"):
        configs.check(KernelConfig(**{name: 2**17}))  # pyright: ignore[reportArgumentType]


FORWARD = KernelProblem("sm_90", "forward", 128, wide=False, masked=True)
KEYS = KernelProblem("sm_90", "backward_keys", 64, wide=True, dropout=True)
FOUND = ConfigTable("sm_90", "NVIDIA H200", "3.6.0", {FORWARD: KernelConfig(64, 64, 4, 3)})


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    file = tmp_path / "settings" / "configs.json"
    monkeypatch.setenv("SACCADE_CONFIGS", str(file))
    configs.tuned.cache_clear()
    yield file
    configs.tuned.cache_clear()


def test_without_a_file_the_table_is_empty():
    assert configs.tuned() == {}


def test_what_was_saved_is_loaded_at_once(file):
    assert configs.tuned() == {}
    assert configs.save_tuned(file, FOUND) is None
    assert configs.tuned() == {FORWARD: KernelConfig(64, 64, 4, 3)}
    assert configs.tuned() is configs.tuned()
    assert configs.read_tuned(file) == {"sm_90": FOUND}


def test_saving_keeps_other_entries_and_other_architectures(file):
    ampere = FORWARD._replace(architecture="sm_80")
    configs.save_tuned(file, FOUND)
    configs.save_tuned(
        file, ConfigTable("sm_80", "A100", "3.6.0", {ampere: KernelConfig(32, 32, 4, 1)})
    )
    configs.save_tuned(
        file, ConfigTable("sm_90", "H100", "3.9.0", {KEYS: KernelConfig(16, 32, 8, 1)})
    )
    assert configs.tuned() == {
        FORWARD: KernelConfig(64, 64, 4, 3),
        KEYS: KernelConfig(16, 32, 8, 1),
        ampere: KernelConfig(32, 32, 4, 1),
    }
    assert configs.read_tuned(file)["sm_90"].device == "H100"


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("SACCADE_CONFIGS", "")
    assert configs.tuned_path() is None
    assert configs.tuned() == {}
    monkeypatch.delenv("SACCADE_CONFIGS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert configs.tuned_path() == tmp_path / "saccade" / "configs.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert configs.tuned_path() == tmp_path / ".config" / "saccade" / "configs.json"


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
        configs.tuned()
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "Delete the file, or write it anew with `saccade tune --save`" in str(caught.value)
    aside = configs.save_tuned(file, FOUND)
    assert aside is not None and aside.read_text() == text
    assert configs.tuned() == FOUND.entries


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
        configs.tuned()


def test_a_folder_is_no_table_and_stays_where_it_is(file):
    file.mkdir(parents=True)
    for call in (configs.tuned, lambda: configs.save_tuned(file, FOUND)):
        with pytest.raises(ValueError, match=r"configs.json: cannot be read: .*SACCADE_CONFIGS"):
            call()
    assert file.is_dir()
