"""The byte model: what its layers compute, how it writes, and its files for transformers."""

import pytest
import torch

from saccade.demo.model import (
    ByteModel,
    DemoModelShape,
    Layer,
    TextSampling,
    cache_error,
    export,
    generate,
    opening,
    rotate,
)
from saccade.serving.token_text import byte_characters

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


# ---- generation


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


# ---- the exported folder, which transformers reads offline

NARROW = DemoModelShape(32, 4, 2, 48, windows=(8, None, None), context=64)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = ByteModel(NARROW).eval()
    with torch.no_grad():
        for weight in model.parameters():  # norms and biases too, which begin alike
            weight += 0.1 * torch.randn_like(weight)
    return model, export(model, tmp_path_factory.mktemp("exported") / "model")


def load(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_are_those_of_the_demos_model(exported, attention):
    model, folder = exported
    theirs = load(folder)
    theirs.set_attn_implementation(attention)
    assert type(theirs).__name__ == "Qwen2ForCausalLM"
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens)
    torch.testing.assert_close(theirs(tokens).logits, wanted, rtol=1e-5, atol=1e-5)
    assert wanted.std() > 0.1


@torch.no_grad()
def test_every_weight_was_given(exported):
    _, folder = exported
    transformers = pytest.importorskip("transformers")
    theirs, found = transformers.Qwen2ForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(w.numel() for w in theirs.parameters()) == exported[0].num_parameters + 256 * 32


def test_tokens_are_bytes(exported):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported[1], local_files_only=True)
    for text in ("def f(x):\n\treturn  x", " é – 語 ", "", "a\x00b\x7f", "<s> [PAD]"):
        tokens = tokenizer.encode(text)
        assert tokens == list(text.encode())
        assert tokenizer.decode(tokens) == text
    assert len(tokenizer) == 256 == len(set(byte_characters()))


def test_windows_of_two_widths_are_refused(tmp_path):
    model = ByteModel(DemoModelShape(32, 4, 2, 48, windows=(8, 4), context=64))
    with pytest.raises(ValueError, match=r"windows: got \(8, 4\)"):
        export(model, tmp_path)
