"""Models of transformers train with sequences sharded over ranks as they train on one process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import programs
import pytest
import torch

# transformers takes seconds to import: the processes alone do so.
PROGRAM = Path(__file__).parents[1] / "sharded_models.py"
MODELS = (
    "llama", "gpt_oss", "packed", "unsummed", "dropped", "thawed", "counted", "longrope", "dynamic",
    "jumping", "packed beside a mask", "packed by offsets",
)  # fmt: skip
GRAPHS = (
    "layers of gemma2", "inside of llama", "whole of llama", "whole of gemma2", "told of llama",
)  # fmt: skip
STEPS = 3
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None
    or not (torch.distributed.is_available() and torch.distributed.is_gloo_available())
    or not hasattr(os, "fork"),
    reason="there is no transformers, no gloo or no fork",
)
WORLDS = (1, 2, 4)
REFUSED = {
    "padding": "attention_mask: got padding, takes None",
    "embeddings": "inputs_embeds: got some beside sharded sequences",
    "labels": "labels: got shape (2, 4), takes the shape of input_ids, (2, 8)",
    "positions": "position_ids: got shape (2, 8), takes [1, 8]",
    "batch": "input_ids: got other numbers on rank 1 than on rank 0",
    "other labels": "labels: got other numbers on rank 1 than on rank 0",
    "few": "input_ids: got 1 tokens, of which a rank gets none",
    "routers": "output_router_logits: got True beside sharded sequences, takes False",
    "routers of a config": "output_router_logits: got True beside sharded sequences, takes False",
    "items": "num_items_in_batch: got str, takes a number",
    "other items": "num_items_in_batch: got other numbers on rank 1 than on rank 0",
    "kinds": "token_type_ids: got shape (2, 8) beside sharded sequences, takes nothing with rows",
    "offsets": "cu_seq_lens_k: got some where cu_seq_lens_q has others, takes the same",
    "module": "model: got Linear, takes a causal language model of transformers",
    "class": "model: got the class Linear, takes a causal language model of transformers",
    "copy": "model: got a copy, or a pickle, of a LlamaForCausalLM whose sequences are sharded",
    "pickle": "model: got a copy, or a pickle, of a LlamaForCausalLM whose sequences are sharded",
    "convolution": "model: got mixer, a convolution along rows",
    "chunks": "model: got layers of chunked_attention, takes full_attention or sliding_attention",
}

REFUSED_IN_GRAPHS = {
    "padding": "attention_mask: got padding, takes None",
    "packed": "position_ids: got sequences packed into one row in a graph of the whole model",
}


def said_by(folder: Path, worlds: Sequence[int], *program: str) -> dict[tuple[int, int], Any]:
    """What each rank of each world says of each model."""
    command = [sys.executable, str(PROGRAM), str(folder), *program]
    programs.run(command, 300, {**os.environ, "OMP_NUM_THREADS": "1"})
    return {
        (world, rank): json.loads(Path(folder / f"trained.{world}.{rank}").read_text("utf-8"))
        for world in worlds
        for rank in range(world)
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    return said_by(tmp_path_factory.mktemp("sharding"), WORLDS, *map(str, WORLDS))


def assert_as_alone(trained: dict[tuple[int, int], Any], name: str) -> None:
    """Losses and weights of several processes are those of one."""
    alone = trained[1, 0][name]
    assert len(alone["losses"]) == STEPS
    several = [ranks[name] for (world, _), ranks in trained.items() if world > 1 and name in ranks]
    assert len(several) >= 2
    for found in several:
        assert found["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-5)
        assert found["weights"] == pytest.approx(alone["weights"], rel=0, abs=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_one_process(trained: dict[tuple[int, int], Any], name: str) -> None:
    assert_as_alone(trained, name)


@pytest.mark.slow  # tracing takes most of a minute
def test_graphs_of_a_model_train_as_one_process(tmp_path: Path) -> None:
    trained = said_by(tmp_path, (1, 2), "--compiled")
    for name in GRAPHS:
        assert_as_alone(trained, name)
    for rank in range(2):
        found = trained[2, rank]["refusals"]
        assert found.keys() == REFUSED_IN_GRAPHS.keys()
        assert all(text in found[name] for name, text in REFUSED_IN_GRAPHS.items())


def test_a_tuple_holds_what_an_output_does(trained: dict[tuple[int, int], Any]) -> None:
    assert not any(found["tuples differ"] for (world, _), found in trained.items() if world > 1)


def test_what_cannot_be_sharded_is_refused_on_every_rank(
    trained: dict[tuple[int, int], Any],
) -> None:
    for (world, _), found in trained.items():
        if world > 1:
            assert found["refusals"].keys() == REFUSED.keys()
            assert all(text in found["refusals"][name] for name, text in REFUSED.items())
