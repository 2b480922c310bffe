import pytest
import torch

from saccade.demo.model import ByteModel, Layer, rotate
from saccade.demo.settings import DemoModelShape

SMALL = DemoModelShape(
    width=32, query_heads=4, kv_heads=2, hidden=48, windows=(8, None), context=64
)  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ByteModel(SMALL).eval()


def random_bytes(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def test_logits_are_one_for_each_byte_value(model):
    assert model(random_bytes(3, 20)).shape == (3, 20, 256)


def test_default_model_has_about_a_million_parameters():
    assert 0.8e6 < ByteModel(DemoModelShape()).num_parameters < 1.3e6


@torch.no_grad()
def test_later_bytes_change_no_earlier_logits(model):
    tokens = random_bytes(1, 40)
    changed = tokens.clone()
    changed[0, 25:] = (changed[0, 25:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :25], after[:, :25], atol=1e-6)
    assert not torch.allclose(before[:, 25:], after[:, 25:], atol=1e-3)


@torch.no_grad()
def test_window_layers_see_no_further_back_than_their_window():
    torch.manual_seed(0)
    one_layer = ByteModel(DemoModelShape(32, 4, 2, 48, windows=(8,), context=64)).eval()
    first = one_layer.layers[0]
    assert isinstance(first, Layer)
    first.attention.project.bias.zero_()  # or it looks three bytes back at most
    tokens = random_bytes(1, 40)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    moved = (one_layer(tokens) - one_layer(changed)).abs().amax(-1)[0]
    assert moved[10 + 8] > 1e-6
    assert moved[10 + 8 + 1 :].max() < 1e-6


@torch.no_grad()
def test_heads_of_the_first_layer_begin_by_looking_back():
    torch.manual_seed(0)
    model = ByteModel(DemoModelShape())
    call = model.attention_calls(random_bytes(1, 40))[0]
    key = call.key.repeat_interleave(3, dim=1)
    scores = call.query @ key.transpose(-1, -2) / 32**0.5
    weights = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
    for head in range(6):
        back = 1 + head % 3
        assert float(weights[0, head].diagonal(-back).mean()) > 0.5


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rows = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def product(first, second):
        return float((rotate(rows[0], first) * rotate(rows[1], second)).sum())

    assert product(3, 7) == pytest.approx(product(103, 107), abs=1e-4)
    assert float(rotate(rows[0], 9).norm()) == pytest.approx(float(rows[0].norm()), rel=1e-5)


def test_attention_calls_are_what_the_layers_compute(model):
    calls = model.attention_calls(random_bytes(1, 20))
    assert [call.layer for call in calls] == ["1 (window 8)", "2 (causal)"]
    assert calls[0].query.shape == (1, 4, 20, 8)
    assert calls[0].key.shape == calls[0].value.shape == (1, 2, 20, 8)
