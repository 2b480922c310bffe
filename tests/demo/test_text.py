import pytest
import torch

from saccade.demo.text import MAX_BYTES, TextError, gather, spread_windows


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
