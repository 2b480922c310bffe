"""Schedules fit the machine, and programs take every tile once, dearest first."""

import itertools

import pytest

pytest.importorskip("triton")

from saccade.hopper import configs
from saccade.hopper.configs import KernelProblem

REGISTERS = 65536  # of a multiprocessor
WIDTHS = (64, 128, 256)
PROBLEMS = [
    KernelProblem(head_width, value_width, masked)
    for head_width, value_width in itertools.product(WIDTHS, WIDTHS)
    for masked in (False, True)
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_schedule_fits_a_multiprocessor(problem):
    schedule = configs.choose(problem)
    used = schedule.shared_memory(problem.head_width, problem.value_width)
    assert used <= configs.SHARED_MEMORY
    assert schedule.stages & (schedule.stages - 1) == 0
    warpgroups = [schedule.consumer_registers] * schedule.consumers + [schedule.producer_registers]
    assert all(registers % 8 == 0 and registers <= 256 for registers in warpgroups)
    assert 128 * sum(warpgroups) <= REGISTERS
    if problem.masked:  # the kernels that plan have tiles with sides of a power of two
        assert schedule.query_tile & (schedule.query_tile - 1) == 0


def test_a_schedule_can_be_given_to_measure_it(monkeypatch):
    given = configs.choose(PROBLEMS[0])._replace(stages=4)
    monkeypatch.setattr(configs, "OVERRIDE", given)
    assert configs.choose(PROBLEMS[-1]) == given


def test_heads_take_turns_while_their_keys_fit_the_l2():
    def heads(slots, megabytes, masked=True, group=1):
        return configs.heads_at_once(masked, slots, 132, group, megabytes << 20)

    assert heads(8, 1, masked=False) == 1
    assert heads(8, 1) == 32  # of 33 that would give two tiles a multiprocessor
    assert heads(16, 1) == 17
    assert heads(16, 8) == 4
    assert heads(16, 8, group=2) == 8  # whose query heads share them
    assert heads(16, 64) == 1
