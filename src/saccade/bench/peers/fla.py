"""fla: the package flash-linear-attention, whose kernels are tuned within a minute.

It times up to 48 configs for each of eight kernels on the first call of every shape, compiling one
after the other: minutes, on a machine that is paid by the second. Here kernels are compiled side by
side, each config is timed for less long, and small tiles, single warps and the like are left out
(`is_plausible`). Fully tuned, on another H200, its forward pass without features took 1.80, 1.93
and 5.23 ms at the first three of the GPU's shapes in `linear_cases`; tuned like this it took 1.90,
2.08 and 5.78 (`benchmarks/results/h200/linear.txt`).
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from saccade.bench.case import Case
from saccade.bench.peers.peer import Call

KERNELS = ("fla.ops.common.chunk_h", "fla.ops.common.chunk_o", "fla.ops.utils.cumsum")
WARM_MS, TIMED_MS = 3, 15  # of each config; Triton's own are 25 and 100
MOST_COMPILERS = 16


def prepare(case: Case, device: torch.device) -> Call | str:
    """chunk_linear_attn with its normaliser; features are taken outside, as it has none."""
    try:
        module = importlib.import_module("fla.ops.linear_attn")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "fla"
        return "not installed" if missing else f"import fails: {error}"
    if device.type != "cuda":
        return "it takes tensors on a GPU"
    if case.decodes:
        return "chunk_linear_attn goes on from no state in place"
    for name in KERNELS:
        tune_quickly(importlib.import_module(name))

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = (torch.nn.functional.elu(rows) + 1 for rows in (query, key))
        return module.chunk_linear_attn(query, key, value, scale=1.0, normalize=True)[0]

    return Call(run, "rows first")


def tune_quickly(module: ModuleType) -> None:
    """Have the kernels of a module tuned as this file's docstring says."""
    for kernel in vars(module).values():
        while kernel is not None and not hasattr(kernel, "prune_configs"):
            kernel = getattr(kernel, "fn", None)
        if kernel is not None and "prune_configs" not in vars(kernel):
            _tune_quickly(kernel)


def _tune_quickly(tuner: Any) -> None:
    from triton.testing import do_bench

    prune = tuner.prune_configs

    def pruned(meta: dict[str, Any]) -> list[Any]:
        configs = prune(meta)
        kept = [config for config in configs if is_plausible(config)] or configs
        named = dict(tuner.nargs)

        def compile_one(config: Any) -> None:
            asked = {**named, **meta, **config.all_kwargs(), "warmup": True}
            try:
                tuner.fn.run(**asked)
            except Exception:  # it will fail again where it is timed, which Triton expects
                return

        with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_COMPILERS)) as pool:
            list(pool.map(compile_one, kept))
        return kept

    def bench(call: Any, quantiles: Any) -> Any:
        return do_bench(call, warmup=WARM_MS, rep=TIMED_MS, quantiles=quantiles)

    tuner.prune_configs, tuner.do_bench = pruned, bench


def is_plausible(config: Any) -> bool:
    """Whether a config may win on a GPU of today: not the small tiles, and no single warp."""
    tiles = [config.kwargs[name] for name in ("BK", "BV") if name in config.kwargs]
    rows = config.kwargs.get("BT")
    if rows is not None:  # a sum along the rows
        return rows >= 64 and config.num_warps >= 4 and config.num_stages in (1, 3)
    if tiles and config.num_stages == 4:
        return False
    return min(tiles, default=64) >= 64 and config.num_warps > 1
