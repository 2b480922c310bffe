"""Where there is no GPU, Triton's interpreter runs the kernels; it is told before their import.

Files are run longest first: a worker that gets one of these last leaves the others idle.
"""

import gc
import importlib.util
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LONGEST = (  # files that take more than a quarter of a minute
    "ops/attention/test_contract.py",
    "ops/linear_attention/test_contract.py",
    "integrations/test_transformers_compile.py",
    "kernel_check/test_variants.py",
    "ops/attention/test_custom_op.py",
    "ops/paged_attention/test_contract.py",
    "serving/test_interrupts.py",
    "runtime/call_cache/test_ways.py",
    "ops/attention/test_contract_hidden.py",
    "docs/test_chapters.py",
    "serving/test_decode_steps.py",
    "serving/test_engine.py",
    "serving/test_engine_failures.py",
    "integrations/test_transformers_families.py",
    "kv_cache/test_interrupts.py",
    "kernel_check/test_commands.py",
    "ops/linear_attention/test_custom_op.py",
    "test_memory_safety.py",
    "serving/test_compiled_layers.py",
    "parallel/test_calls.py",
    "bench/test_measure.py",
    "runtime/test_shards.py",
    "bench/test_models.py",
    "serving/test_hybrid.py",
    "serving/test_server.py",
    "modifiers/test_compile.py",
    "kv_cache/test_paged_cache_fuzz.py",
    "modifiers/test_intervals.py",
    "training/test_training_tools.py",
)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # torch.manual_seed() keeps what it would tell a GPU that may come, with the whole stack of
    # calls: milliseconds and memory for each of thousands of seeds.
    for backend in (torch.cuda, torch.xpu, torch.mtia):
        setattr(backend, "manual_seed_all", lambda seed: None)  # noqa: B010 - of a module
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreter import hasten, mend

    hasten()
    mend()

os.environ["SACCADE_CONFIGS"] = ""  # a developer's own table of configs must not change the tests


# Searching all objects for rings again and again takes a tenth of the time: tests and PyTorch's
# modules are many, stay until the end, and tests leave few rings behind.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for rings seldom from now on, and not among what is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
