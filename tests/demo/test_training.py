import torch

from saccade.demo.model import ByteModel
from saccade.demo.settings import DemoModelShape
from saccade.demo.text import spread_windows
from saccade.demo.training import TrainingSchedule, held_out_bits, rate, train

SHAPE = DemoModelShape(32, 4, 2, 48, windows=(8, None), context=32)
CONTENT = torch.tensor(list(b"the cat sat on the mat. " * 100), dtype=torch.uint8)


def trained(steps, seed=0):
    torch.manual_seed(seed)
    model = ByteModel(SHAPE)
    history = list(train(model, CONTENT, TrainingSchedule(0, steps, 4, 1e-2, seed)))
    return model, history


def test_training_learns_a_text_that_repeats():
    model, history = trained(60)
    assert history[0].bits_per_byte > 5
    assert held_out_bits(model, spread_windows(CONTENT, 32, 500)) < 2


def test_a_number_of_steps_gives_the_same_model_again():
    first, _ = trained(5)
    again, _ = trained(5)
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_seconds_bound_the_training():
    torch.manual_seed(0)
    history = list(train(ByteModel(SHAPE), CONTENT, TrainingSchedule(0.3, None, 4, 1e-2, 0)))
    assert history[-1].progress == 1
    assert all(step.progress < 1 for step in history[:-1])
    assert history[-1].seconds < 5


def test_learning_rate_rises_then_falls():
    rates = [rate(step / 100) for step in range(101)]
    top = rates.index(max(rates))
    assert 0 < top < 10
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] < 0.1
