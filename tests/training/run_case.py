"""Run one case of training in this process, and keep its losses and weights.

Usage: python tests/training/run_case.py CASE ATTENDS FILE

CASE is a function of a file beside this one: "trl.dpo" is `dpo` in cases_trl.py.
ATTENDS is "saccade" or "sdpa"; "exact", which is sdpa in float64 from end to end; or "careless",
which sees every earlier token whatever the mask says, to show that a comparison notices.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tiny import Run
from torch._dynamo.comptime import comptime

CALLS = [0]  # of saccade's attention; compiled code counts when it is traced


def count(*_: Any) -> None:
    """One more call."""
    CALLS[0] += 1


def careless(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Causal attention that asks no mask."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=options.get("scaling")
    )
    return output.transpose(1, 2), None


def prepare(attends: str) -> None:
    """Make the attention known by its name, and have its calls counted."""
    if attends == "careless":
        transformers.AttentionInterface.register(attends, careless)
        transformers.AttentionMaskInterface.register(attends, lambda **_: None)
    if attends == "saccade":
        import saccade
        import saccade.integrations.transformers as integration

        integration.register()
        attention: Any = saccade.attention

        def counted(*tensors: Any, **options: Any) -> Any:
            comptime(count, count)
            return attention(*tensors, **options)

        saccade.attention = counted


def main(case: str, attends: str, file: str) -> None:
    """Run the case; the first process of several writes."""
    prepare(attends)
    exact = attends == "exact"
    torch.manual_seed(0)
    module, _, function = case.partition(".")
    trains = getattr(importlib.import_module(f"cases_{module}"), function)
    trained = trains(Run("sdpa" if exact else attends, exact))
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        torch.save({**trained._asdict(), "calls": CALLS[0]}, file)
    if dist.is_available() and dist.is_initialized():  # as most tools leave it
        dist.barrier()  # or one process would end, with its connections, while another needs them
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
