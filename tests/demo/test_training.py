"""The text, training on it, and the counting that a trained model must beat."""

import math

import pytest
import torch

from saccade.demo.model import ByteModel, DemoModelShape
from saccade.demo.training import (
    MAX_BYTES,
    PRIOR_COUNT,
    TextError,
    TrainingSchedule,
    bigram,
    bigram_bits,
    gather,
    held_out_bits,
    rate,
    spread_windows,
    train,
    unigram,
    unigram_bits,
)


def write_files(folder, count, size):
    for number in range(count):
        path = folder / f"part{number % 3}" / f"text{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([65 + number % 26]) * size)


def test_default_is_the_standard_library_the_same_on_every_run():
    first, again = gather(None, 256), gather(None, 256)
    assert torch.equal(first.training, again.training)
    assert torch.equal(first.held_out, again.held_out)
    assert 1_000_000 < len(first.training) + len(first.held_out) <= MAX_BYTES + first.num_files
    assert b"import " in bytes(first.training[:200_000].tolist())


def test_of_one_file_the_end_is_held_out(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(b"a" * 18_000 + b"b" * 2_000)
    corpus = gather(path, 256)
    assert set(corpus.training.tolist()) == {ord("a")}
    assert set(corpus.held_out.tolist()) == {ord("b")}


def test_of_many_files_whole_ones_are_held_out(tmp_path):
    write_files(tmp_path, 26, 1_000)
    corpus = gather(tmp_path, 256)
    assert corpus.num_files == 26
    newline = {ord("\n")}
    trained, unseen = (set(part.tolist()) - newline for part in (corpus.training, corpus.held_out))
    assert len(unseen) == 3
    assert not trained & unseen


def test_hidden_and_binary_files_are_no_text(tmp_path):
    write_files(tmp_path, 2, 10_000)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index.txt").write_bytes(b"z" * 10_000)
    (tmp_path / "image.png").write_bytes(b"z\0" * 10_000)
    corpus = gather(tmp_path, 256)
    assert corpus.num_files == 2
    assert ord("z") not in corpus.training


def test_missing_path_is_refused_by_name(tmp_path):
    with pytest.raises(TextError, match=r"nowhere.*no such file or folder"):
        gather(tmp_path / "nowhere", 256)


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(TextError, match="no text found"):
        gather(tmp_path, 256)


def test_too_small_a_text_is_refused_with_what_is_needed(tmp_path):
    path = tmp_path / "small.txt"
    path.write_text("too little")
    with pytest.raises(TextError, match=r"10 bytes of text; the demo needs at least 8,192"):
        gather(path, 256)


def test_windows_predict_each_byte_once():
    content = torch.arange(100, dtype=torch.uint8)
    windows = spread_windows(content, 10, 1_000)
    assert windows.shape == (9, 11)
    assert windows[:, 1:].flatten().tolist() == list(range(1, 91))


def test_few_windows_are_spread_over_the_text():
    windows = spread_windows(torch.arange(101, dtype=torch.uint8), 10, 20)
    assert windows[:, 0].tolist() == [0, 50]


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


def as_bytes(text):
    return torch.tensor(list(text), dtype=torch.uint8)


def test_unigram_counts_with_one_added():
    probabilities = unigram(as_bytes(b"aab"))
    assert float(probabilities[ord("a")]) == pytest.approx(3 / 259)
    assert float(probabilities[ord("b")]) == pytest.approx(2 / 259)
    assert float(probabilities[ord("z")]) == pytest.approx(1 / 259)
    assert float(probabilities.sum()) == pytest.approx(1)


def test_bigram_counts_pairs_and_leans_on_the_unigram():
    text = as_bytes(b"abac")
    probabilities = bigram(text)
    seen = (1 + PRIOR_COUNT * 2 / 260) / (2 + PRIOR_COUNT)
    assert float(probabilities[ord("a"), ord("b")]) == pytest.approx(seen)
    assert torch.allclose(probabilities[ord("z")], unigram(text))
    assert torch.allclose(probabilities.sum(1), torch.ones(256, dtype=torch.float64))


def test_both_are_judged_on_all_but_the_first_byte():
    training, windows = as_bytes(b"abac"), as_bytes(b"zab")[None]
    single = -math.log2(3 / 260) - math.log2(2 / 260)
    assert unigram_bits(training, windows) == pytest.approx(single / 2)
    after_z = -math.log2(3 / 260)
    after_a = -math.log2((1 + PRIOR_COUNT * 2 / 260) / (2 + PRIOR_COUNT))
    assert bigram_bits(training, windows) == pytest.approx((after_z + after_a) / 2)
