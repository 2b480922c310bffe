"""fla's kernels are tuned with the configs that may win, which are compiled side by side."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
from saccade.bench.peers import packages


def config(num_warps: int = 4, num_stages: int = 2, **tiles: int) -> Any:
    numbers = {**tiles, "num_warps": num_warps, "num_stages": num_stages}
    return SimpleNamespace(
        kwargs=tiles, num_warps=num_warps, num_stages=num_stages, all_kwargs=lambda: numbers
    )


class Tuner:
    """As much of a kernel of Triton that is tuned as the peer touches."""

    def __init__(self, configs: list[Any]) -> None:
        self.configs, self.nargs = configs, {"rows": "of a call"}
        self.asked: list[dict[str, Any]] = []
        self.fn = SimpleNamespace(run=self.run)

    def prune_configs(self, meta: dict[str, Any]) -> list[Any]:
        return self.configs

    def run(self, **asked: Any) -> None:
        self.asked.append(asked)
        if asked["num_warps"] == 8:
            raise RuntimeError("out of registers")


def test_what_may_win_is_compiled_before_it_is_timed():
    configs = [config(BK=64, BV=64), config(8, BK=64, BV=64), config(BK=32, BV=64), config(1)]
    tuner = Tuner(configs)
    module: Any = SimpleNamespace(kernel=SimpleNamespace(fn=tuner), other=3)
    packages.tune_quickly(module)
    packages.tune_quickly(module)  # once is enough
    assert tuner.prune_configs({"T": 8}) == configs[:2]
    assert len(tuner.asked) == 2
    assert all(
        asked["warmup"] and asked["T"] == 8 and asked["rows"] == "of a call"
        for asked in tuner.asked
    )


def test_a_kernel_without_plausible_configs_keeps_all():
    tuner = Tuner([config(1), config(1, BK=16)])
    packages.tune_quickly(SimpleNamespace(kernel=tuner))  # type: ignore[arg-type]
    assert len(tuner.prune_configs({})) == 2


@pytest.mark.parametrize(
    "plausible, one",
    [
        (True, config(BT=64, num_stages=3)),
        (False, config(BT=32, num_stages=3)),
        (False, config(2, BT=128, num_stages=3)),
        (False, config(num_stages=4, BK=64)),
        (True, config(num_stages=4)),
    ],
)
def test_small_tiles_and_few_warps_are_left_out(plausible: bool, one: Any):
    assert packages.is_plausible(one) is plausible
