"""The exported folder is read by transformers, offline, and computes what the demo's model does."""

import pytest
import torch

from saccade.demo.files import byte_characters, export
from saccade.demo.model import ByteModel
from saccade.demo.settings import DemoModelShape

transformers = pytest.importorskip("transformers")

SMALL = DemoModelShape(32, 4, 2, 48, windows=(8, None, None), context=64)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = ByteModel(SMALL).eval()
    with torch.no_grad():
        for weight in model.parameters():  # norms and biases too, which begin alike
            weight += 0.1 * torch.randn_like(weight)
    return model, export(model, tmp_path_factory.mktemp("exported") / "model")


def load(folder):
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
    theirs, found = transformers.Qwen2ForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(w.numel() for w in theirs.parameters()) == exported[0].num_parameters + 256 * 32


def test_tokens_are_bytes(exported):
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
