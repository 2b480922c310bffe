import pytest
import torch

from saccade.demo.model import ByteModel, TextSampling, cache_error, generate, opening
from saccade.demo.settings import DemoModelShape


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = DemoModelShape(32, 4, 2, 48, windows=(8, None), context=64)
    return ByteModel(shape).eval()


def test_logits_with_a_cache_are_those_without(model):
    tokens = torch.randint(256, (48,), generator=torch.Generator().manual_seed(1))
    assert cache_error(model, tokens) < 1e-4


@torch.no_grad()
def test_greedy_generation_is_what_whole_passes_would_choose(model):
    written = generate(model, b"def ", 12, TextSampling(top_k=1))
    text = list(b"def ")
    for _ in range(12):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert written == bytes(text[4:])


def test_a_seed_gives_the_same_text_again(model):
    first, again, other = (generate(model, b"x", 30, TextSampling(seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_long_prompts_and_long_texts_stay_within_the_context(model):
    assert len(generate(model, b"x" * 500, 30, TextSampling())) == 30
    assert len(generate(model, b"", 500, TextSampling())) == 63


def test_opening_begins_with_a_line_and_ends_with_a_word():
    content = torch.tensor(list(b"some words in a line\n" * 50), dtype=torch.uint8)
    piece = opening(content, 40)
    assert piece.startswith(b"some words")
    assert piece.endswith(b" ")
    assert 10 < len(piece) <= 40
