"""Where there is no GPU, Triton's interpreter runs the kernels; it is told before their import.

Files are run longest first: a worker that gets one of these last leaves the others idle.
"""

import gc
import importlib.util
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

HERE = Path(__file__).parent
CALLERS = ("bench", "demo", "integrations", "serving")
"""Folders of tests that call operations as users do, by shapes that their own tests try."""
LONGEST = (  # files that take more than a quarter of a minute
    "ops/linear_attention/test_contract.py",
    "ops/attention/test_contract.py",
    "kernel_check/test_variants.py",
    "ops/paged_attention/test_contract.py",
    "parallel/test_calls.py",
    "integrations/test_transformers_compile.py",
    "tools/test_compile_wheel.py",
    "docs/test_chapters.py",
    "serving/test_compiled_layers.py",
    "serving/test_ranks.py",
    "serving/test_prompt_steps.py",
    "integrations/test_transformers_families.py",
    "serving/test_hybrid.py",
    "serving/test_decode_steps.py",
    "serving/test_engine.py",
    "ops/attention/test_contract_hidden.py",
    "serving/test_engine_failures.py",
    "runtime/call_cache/test_ways.py",
    "kv_cache/test_interrupts.py",
    "test_memory_safety.py",
    "serving/test_merged_products.py",
    "parallel/test_compiled.py",
    "modifiers/test_intervals.py",
    "test_import.py",
    "serving/test_compiled_products.py",
    "modifiers/test_compile.py",
    "ops/linear_attention/test_reference.py",
    "bench/test_models.py",
    "bench/test_measure.py",
    "kernel_check/test_commands.py",
    "serving/test_model.py",
    "ops/linear_attention/test_custom_op.py",
    "ops/attention/test_custom_op.py",
    "gpu/test_machine_code.py",
    "test_tracing.py",
    "serving/test_server.py",
    "docs/test_pages.py",
    "serving/test_interrupts.py",
    "runtime/test_shards.py",
    "integrations/test_transformers_sharding.py",
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


def pytest_configure(config: pytest.Config) -> None:
    """Before any module is imported whose shapes are checked."""
    if config.getoption("jaxtyping_packages", None):
        from shape_checks import check_shapes_alone

        check_shapes_alone()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for rings seldom from now on, and not among what is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seed 1` draws other random numbers; a test alone has those that it has among others."""
    parser.addoption("--seed", default="0", help="what random numbers of all tests come from")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed random numbers by the test's own name, and check shapes where operations are tested.

    Checking shapes takes a third of the time of what calls operations.
    """
    seed = zlib.crc32(f"{item.nodeid} {item.config.getoption('--seed')}".encode())
    torch.manual_seed(seed)
    random.seed(seed)
    folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
    jaxtyping.config.update("jaxtyping_disable", folder in CALLERS)


@pytest.fixture(autouse=True)
def modes_are_left() -> Iterator[None]:
    """A test that leaves PyTorch in another mode fails itself, and not all that come after it."""
    yield
    left = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    if left != (False, True):
        _ENTERED.append(torch._C._InferenceMode(False))
        pytest.fail(f"leaves (inference mode, gradients) at {left}, not at (False, True)")


_ENTERED: list[object] = []
"""What brings modes back that were left: each undoes itself once nothing holds it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
