"""Masks and scores as parts of modules: moved, found, saved, copied and trained as tensors are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saccade
from saccade import ModifierModule, masks, scores

LENGTH = 8


def rows() -> Tensor:
    return torch.randn(2, 2, LENGTH, 4, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """A layer with a mask that it reads and a score that it learns."""

    def __init__(self) -> None:
        super().__init__()
        ids = torch.arange(LENGTH)[None] // 3
        self.mask = ModifierModule(masks.documents(ids) & masks.window(2))
        slopes = nn.Parameter(torch.tensor([0.5, 0.25]))
        bias = nn.Parameter(torch.zeros(2, 1, LENGTH))
        self.score = ModifierModule(scores.alibi(slopes) >> scores.bias(bias))

    def forward(self, query: Tensor) -> Tensor:
        return saccade.attention(query, query, query, mask=self.mask(), score=self.score())


def test_gives_the_mask_that_it_was_made_of():
    for made in (masks.causal(), masks.window(3, 1), masks.key_lengths(torch.tensor([3, 5]))):
        assert ModifierModule(made)() == made
    change = scores.softcap(20.0) >> scores.alibi(torch.tensor([0.5, 1.0]))
    assert ModifierModule(change)() == change


def test_parameters_and_buffers_have_names():
    layer = Layer()
    assert [name for name, _ in layer.named_parameters()] == ["score.slopes", "score.tensor"]
    assert [name for name, _ in layer.named_buffers()] == ["mask.query_ids"]  # read as kv_ids, too
    assert set(layer.state_dict()) == {"score.slopes", "score.tensor", "mask.query_ids"}
    unsaved = ModifierModule(masks.dense(torch.ones(2, 2).bool()), persistent=False)
    assert list(unsaved.buffers()) and not unsaved.state_dict()
    assert "slopes" in repr(layer) or "alibi" in repr(layer) or "ModifierModule" in repr(layer)


def test_learns():
    layer = Layer()
    step = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer(rows())
    before.square().sum().backward()
    assert all(weights.grad is not None for weights in layer.parameters())
    step.step()
    assert not torch.equal(layer(rows()), before)


def test_follows_the_module():
    moved = Layer().to("meta")
    assert {tensor.device.type for tensor in moved.mask().captured.tensors} == {"meta"}
    assert {tensor.device.type for tensor in moved.score().captured.tensors} == {"meta"}
    wide = Layer().double()
    assert wide.score().captured.tensors[0].dtype == torch.float64
    assert wide.mask().captured.tensors[0].dtype == torch.int64
    assert wide(rows().double()).dtype == torch.float64


def test_a_copy_is_of_its_own():
    layer = Layer()
    twin = copy.deepcopy(layer)
    wanted = layer(rows())
    with torch.no_grad():
        for weights in layer.parameters():
            weights.add_(1.0 * torch.arange(weights.shape[-1]))
    torch.testing.assert_close(twin(rows()), wanted)
    assert not torch.equal(layer(rows()), wanted)
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(twin(rows()), layer(rows()))


def test_is_part_of_a_graph():
    torch._dynamo.reset()
    layer = Layer()
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for call in (compiled, layer):
        layer.zero_grad()
        output = call(rows())
        output.square().sum().backward()
        results.append([output.detach(), *(weights.grad for weights in layer.parameters())])
    torch.testing.assert_close(*results)
    torch._dynamo.reset()


def test_refuses_what_no_module_can_own():
    with pytest.raises(TypeError, match="modifier: got function, takes a saccade Mask or Score"):
        ModifierModule(lambda b, h, q, k: q >= k)  # pyright: ignore[reportArgumentType]
    computed = nn.Parameter(torch.ones(2)).exp()
    with pytest.raises(ValueError, match="tensor slopes requires a gradient"):
        ModifierModule(scores.alibi(computed))
