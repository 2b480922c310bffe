"""Keys, and masks and scores as values: compared, printed, copied, stored, moved."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from written_functions import MASKS, SCORES, causal, normal, t5, window

import saccade
from saccade import masks, scores
from saccade.masks import as_mask
from saccade.modifiers import evaluate, expression
from saccade.modifiers.expression import Captured, key_of, parse
from saccade.scores import as_score

ids = torch.tensor([[0, 0, 1, 1]])


def of_numbers(width: int, rate: float) -> Any:
    return as_mask(lambda b, h, q, k: (q - k) * rate < width)


# ---- equal expressions have equal keys --------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_a_key_is_parsed_to_what_it_was_made_of(name):
    for made in (as_mask(MASKS[name]), ~as_mask(MASKS[name]) & masks.causal()):
        assert key_of(parse(made.key)) == made.key
        assert as_mask(MASKS[name]) == as_mask(MASKS[name])


def test_numbers_are_no_part_of_a_key():
    assert of_numbers(3, 0.5).key == of_numbers(-(2**40), 1e30).key
    assert of_numbers(3, 0.5) != of_numbers(3, 0.25)
    assert masks.window(7).key == masks.window(31, 4).key
    assert scores.softcap(3.0).key == scores.softcap(30.0).key
    assert not any(digit in as_mask(window(7)).key.replace("i0", "") for digit in "789")


CAUSAL = {
    "q >= k": lambda b, h, q, k: q >= k, "k <= q": lambda b, h, q, k: k <= q,
    "q - k >= 0": lambda b, h, q, k: q - k >= 0, "~(k > q)": lambda b, h, q, k: ~(k > q),
    "k - q <= 0": lambda b, h, q, k: k - q <= 0, "0 <= q - k": lambda b, h, q, k: q - k >= 0,
    "k < q + 1": lambda b, h, q, k: k < q + 1, "q - k > -1": lambda b, h, q, k: q - k > -1,
    "-q <= -k": lambda b, h, q, k: -q <= -k, "q + 5 >= k + 5": lambda b, h, q, k: q + 5 >= k + 5,
    "logical_not": lambda b, h, q, k: torch.logical_not(q < k),
    "twice": lambda b, h, q, k: (q >= k) & (k <= q),
    "with ones": lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & torch.ge(q, k),
    "with what it holds": lambda b, h, q, k: (q >= k) & (k <= q + 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_causal_masks_have_one_key(name, align):
    assert masks.function(align=align)(CAUSAL[name])() == masks.causal(align)


WINDOWS = {
    "two sides": lambda b, h, q, k: (q - k <= 5) & (q >= k),
    "the other way": lambda b, h, q, k: (k <= q) & (k >= q - 5),
    "less than": lambda b, h, q, k: (q - k < 6) & (q - k >= 0),
    "greater than": lambda b, h, q, k: (k > q - 6) & (k < q + 1),
    "wider ones too": lambda b, h, q, k: (q - k < 6) & (q - k <= 9) & (q >= k) & (k - q <= 2),
    "logical": lambda b, h, q, k: torch.logical_and(q + 1 > k, torch.sub(q, k).le(5)),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_windows_have_one_key(name, align):
    assert masks.function(align=align)(WINDOWS[name])() == masks.window(5, align=align)


def test_windows_to_both_sides_have_one_key():
    wanted = masks.window(3, 2, align="top_left")
    assert as_mask(lambda b, h, q, k: (k - q <= 2) & (q - k <= 3)) == wanted
    assert as_mask(lambda b, h, q, k: (q - 3 <= k) & (k < q + 3)) == wanted


def test_captured_tensors_are_numbered_as_they_are_read():
    one, two = torch.arange(4), torch.arange(5)
    both = as_mask(lambda b, h, q, k: (one[q] == two[k]) & (one[k] == 0))
    assert both.captured.tensors == (one, two, one) or both.captured.tensors == (one, two)
    assert as_mask(lambda b, h, q, k: one[q] == two[k]).key == (
        as_mask(lambda b, h, q, k: two[q] == one[k]).key
    )


SCRIPT = """
import pickle, sys
for made in pickle.load(open(sys.argv[1], "rb")):
    print(type(made).__name__, made.key)
"""


def test_keys_are_the_same_in_a_process_that_knows_no_function(tmp_path):
    table = torch.arange(13) % 3
    made = [
        as_mask(causal), as_mask(lambda b, h, q, k: (table[q] == table[k]) & (q - k < 9)),
        as_score(t5), as_score(lambda s, b, h, q, k: s * 2.0 + table[k]), of_numbers(3, 0.5),
        masks.causal() & ~masks.documents(ids), scores.softcap(3.0) >> scores.alibi(torch.ones(3)),
    ]  # fmt: skip
    path = tmp_path / "made.pickle"
    path.write_bytes(pickle.dumps(made))
    command = [sys.executable, "-c", SCRIPT, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == [f"{type(one).__name__} {one.key}" for one in made]
    # Made anew there, of text that only that process has, a mask has the key that it has here.
    anew = (
        "import saccade\nfrom saccade.masks import as_mask\n"
        "near = as_mask(lambda batch, head, i, j: i - j < 31)\n"
        "print(near.key, as_mask(lambda b, h, q, k: ~(k > q)) == saccade.masks.causal('top_left'))"
    )
    command = [sys.executable, "-c", anew]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found == f"{as_mask(lambda b, h, q, k: q - k < 7).key} True\n"


def test_a_text_that_is_no_key_is_refused():
    for text in (
        "kv_row;<= 0 1", "<= 0 1", "kv_row;neg 4", "kv_row;neg", "kv_row;neg 0 0", "kv_row;neg -1",
        "kv_row;+ 0", "number", "number t0", "number i", "number i0 0x", "literal", "literal x",
        "batch;read t0:q 0", "batch;read t0 0", "batch;take t0:i:a-b 0", "kv_row;neg ²",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="not the key of an expression"):
            parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "kv_row;print(1)or 0",  # an operation of one operand is written before it
        "kv_row;query_row;or\tprint(1)or 0 1",
        "kv_row;query_row;<=\n\nprint(1)\n 0 1",
        "literal print(1)",
        "number i0]+data[print(1)",
        "batch;read t0:i]+data[print(1) 0",
    ],
)
def test_a_mask_out_of_a_file_cannot_bring_code(text):
    with pytest.raises(ValueError, match="not the key of an expression"):
        parse(text)
    captured = Captured((torch.ones(9, dtype=torch.int32),), (1,))
    rows = torch.randn(1, 1, 8, 16)
    with pytest.raises(ValueError, match="not the key of an expression"):
        saccade.attention(rows, rows, rows, mask=masks.Mask(text, captured))


def test_known_operations_are_those_that_are_computed():
    assert set(evaluate.OPERATIONS) == expression.OPERATORS
    for op in expression.OPERATORS:
        operands = ";".join(["score"] * 3), " ".join("012"[: expression.num_operands(op)])
        assert parse(f"{operands[0]};{op} {operands[1]}")[-1].op == op


# ---- as values --------------------------------------------------------------------------------

PRINTED = {
    "Mask(kv_row <= query_row)": lambda: as_mask(CAUSAL["q - k >= 0"]),
    "Mask(kv_row <= query_row + shift)": lambda: masks.causal(),
    "Mask(kv_row < lengths[batch])": lambda: masks.key_lengths(torch.tensor([3])),
    "Mask((query_row - kv_row) % 3 == 0)": lambda: as_mask(lambda b, h, q, k: (q - k) % 3 == 0),
    "Mask((query_row - 7 <= kv_row) & (kv_row <= query_row + 0))": lambda: masks.window(
        7, align="top_left"
    ),
    "Mask(~tensor0[query_row, kv_row])": lambda: as_mask(
        lambda b, h, q, k: ~torch.ones(3, 3).bool()[q, k]
    ),
    "Score(3.0 * tanh(score / 3.0))": lambda: scores.softcap(3.0),
    "Score(score - slopes[head] * abs(query_row + shift - kv_row))": lambda: scores.alibi(
        torch.ones(3)
    ),
    "Score(where(head == 0, score, -inf))": lambda: as_score(
        lambda s, b, h, q, k: torch.where(h == 0, s, -float("inf"))
    ),
}


@pytest.mark.parametrize("text", PRINTED)
def test_a_mask_prints_what_it_computes(text):
    assert repr(PRINTED[text]()) == text


def every() -> dict[str, Any]:
    masked = {f"mask {name}": as_mask(function) for name, function in MASKS.items()}
    scored = {f"score {name}": as_score(function) for name, function in SCORES.items()}
    return masked | scored | {"nothing hidden": masks.NOTHING_HIDDEN, "joined": masks.tree(
        masks.tree_bits(torch.tensor([[-1, 0, 0]])), torch.tensor([4])
    ) | masks.causal(), "softcap": scores.softcap(4.0) >> scores.bias(normal(3, 1, 5))}  # fmt: skip


def test_masks_and_scores_are_copied_by_value():
    for name, made in every().items():
        for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert copied == made and hash(copied) == hash(made), name
            assert repr(copied) == repr(made), name
            assert type(copied) is type(made), name
    assert masks.causal() != scores.NOTHING_CHANGED
    assert masks.causal() != "causal"


def test_masks_and_scores_are_compared_by_value():
    assert masks.documents(ids) == masks.documents(ids.clone())
    assert masks.documents(ids) != masks.documents(ids + 1)
    assert masks.documents(ids) != masks.documents(ids.int())
    assert masks.documents(ids) != masks.documents(ids[:, :3])
    assert masks.window(3) != masks.window(4)
    assert masks.causal() != masks.causal("top_left")
    nothing = scores.bias(torch.full((3,), torch.nan))
    assert nothing == copy.copy(nothing)
    assert len({masks.window(3), masks.window(3), masks.window(4), masks.documents(ids)}) == 3


def test_stored_masks_and_scores_are_loaded_with_the_defaults():
    state = every() | {
        "config": saccade.KernelConfig(query_tile=64, backward=saccade.KernelConfig(kv_tile=32))
    }
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file) == state
    step = saccade.LinearState(*(torch.ones(1, 1, 2, 2) for _ in saccade.LinearState._fields))
    file = io.BytesIO()
    torch.save(step, file)
    file.seek(0)
    assert type(torch.load(file)) is saccade.LinearState


def test_masks_and_scores_are_moved_with_their_tensors():
    moved = (masks.documents(ids) & masks.window(3)).to("meta")
    assert moved.key == (masks.documents(ids) & masks.window(3)).key
    assert {tensor.device.type for tensor in moved.captured.tensors} == {"meta"}
    assert moved != masks.documents(ids) & masks.window(3)
    assert moved == moved
    assert moved.captured.ints == (3, 0)
    assert masks.causal().to("meta") == masks.causal()
    assert scores.bias(normal(3)).to("cpu") == scores.bias(normal(3))


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(normal(2, 1, 6))
        self.slopes = torch.nn.Parameter(normal(2))
        self.mask = as_mask(causal)
        self.score = scores.bias(self.table) >> as_score(
            lambda s, b, h, q, k: s - self.slopes[h] * (q - k)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return saccade.attention(rows, rows, rows, mask=self.mask, score=self.score)


def test_a_module_that_holds_a_score_is_copied_with_its_parameters():
    module, rows = Biased(), normal(1, 2, 6, 4)
    copied = copy.deepcopy(module)
    assert copied.score.captured.tensors[1] is copied.slopes
    assert copied.score.captured.tensors[0].data_ptr() == copied.table.data_ptr()
    with torch.no_grad():
        copied.table.add_(1.0)
        copied.slopes.zero_()
    assert not torch.allclose(module(rows), copied(rows))
    copied(rows).square().sum().backward()
    assert copied.table.grad is not None and copied.slopes.grad is not None
    assert module.table.grad is None and module.slopes.grad is None
    again = pickle.loads(pickle.dumps(copied))
    torch.testing.assert_close(again(rows), copied(rows))
