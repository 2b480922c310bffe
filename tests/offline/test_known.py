"""Known: what is kept of compiled kernels, what is compiled again, and what is found wrong."""

import json

import pytest

from saccade.offline import known
from saccade.offline.calls import Call
from saccade.offline.pool import Compiled, Job, Usage

JOB = Job("sm_90", Call(64), "forward", ("forward",))
USAGES = {f"{number:024x}": Usage(number, 0, 1024) for number in range(64)}


def compiled(identity, usage):
    return Compiled(JOB, "forward", (64, 64, 4, 3), 1.0, usage, "", identity)


RESULTS = [compiled(identity, usage) for identity, usage in USAGES.items()]


def test_what_is_written_is_read_again_by_version(tmp_path):
    file = tmp_path / "kernels.json"
    assert known.read(file, "3.6.0") == {}
    known.write(file, RESULTS, "3.6.0")
    known.write(file, RESULTS[:2], "3.9.0")
    assert known.read(file, "3.6.0") == USAGES
    assert len(known.read(file, "3.9.0")) == 2
    assert known.read(file, "4.0.0") == {}
    known.write(file, RESULTS[:1], "3.6.0")  # what is no more is forgotten
    assert len(known.read(file, "3.6.0")) == 1
    assert set(json.loads(file.read_text())) == {"3.6.0", "3.9.0"}


def test_a_kernel_that_failed_is_not_known(tmp_path):
    file = tmp_path / "kernels.json"
    known.write(file, [compiled("", None)], "3.6.0")
    assert known.read(file, "3.6.0") == {}


@pytest.mark.parametrize("text", ["[]", "nothing", '{"3.6.0": {"00": [1, 2, 3, 4, 5, 6, 7, 8]}}'])
def test_another_file_is_refused_by_name(tmp_path, text):
    file = tmp_path / "kernels.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"kernels.json: .*Delete it"):
        known.read(file, "3.6.0")


def test_a_sample_is_compiled_again_and_changes_with_the_kernels():
    spared = known.trusted(USAGES)
    again = USAGES.keys() - spared.keys()
    assert len(again) == len(USAGES) // known.SAMPLE
    samples = set()
    for number in range(64):
        more = {**USAGES, f"{1000 + number:024x}": Usage(1, 0, 0)}
        samples.add(tuple(sorted(USAGES.keys() - known.trusted(more).keys())))
    assert len(samples) > known.SAMPLE // 2
    assert known.trusted({}) == {}


def test_faults_name_what_is_lacking_and_what_is_wrong(tmp_path):
    file = tmp_path / "kernels.json"
    assert known.faults(file, USAGES, RESULTS) == []
    first = RESULTS[0].identity
    lacking = {identity: usage for identity, usage in USAGES.items() if identity != first}
    (text,) = known.faults(file, lacking, RESULTS)
    assert "lacks 1 of 64 kernels, such as sm_90 forward (bf16 d64 none)" in text
    (text,) = known.faults(file, {**USAGES, first: Usage(99, 0, 1024)}, RESULTS)
    assert "registers=99" in text and "which takes Usage(registers=0" in text
    assert known.faults(file, {}, [compiled("", None)]) == []
