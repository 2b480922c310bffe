"""What is remembered of a mask is right whatever happens to what it captured."""

import torch

import saccade
from saccade import masks
from saccade.ops.attention.cpu.remembered import MOST_COMPARED, Remembered


def counting(results: Remembered[int], tensors: list[torch.Tensor], key: str = "a") -> int:
    """What is remembered; a new result is the sum of the tensors."""
    return results.get(key, tensors, lambda: int(sum(tensor.sum() for tensor in tensors)))


def test_equal_contents_are_made_once():
    made = []
    results: Remembered[int] = Remembered(most=4)
    for _ in range(3):
        results.get("a", [torch.arange(3)], lambda: made.append(1) or 7)
    assert made == [1]
    results.get("a", [torch.arange(3).int()], lambda: made.append(1) or 7)
    results.get("b", [torch.arange(3)], lambda: made.append(1) or 7)
    assert len(made) == 3


def test_a_change_without_pytorchs_knowledge_is_seen():
    results: Remembered[int] = Remembered(most=4)
    tensor = torch.arange(3)
    assert counting(results, [tensor]) == 3
    tensor.numpy()[0] = 5
    assert counting(results, [tensor]) == 8
    tensor.data.zero_()
    assert counting(results, [tensor]) == 0


def test_the_oldest_go_first():
    results: Remembered[int] = Remembered(most=10, size=lambda result: result)
    for key, size in (("a", 4), ("b", 4), ("c", 4), ("too large", 11)):
        results.get(key, [], lambda size=size: size)
    assert list(results.entries) == [("b",), ("c",)] and results.total == 8
    results.get("b", [], lambda: 4)
    results.get("d", [], lambda: 4)
    assert list(results.entries) == [("b",), ("d",)] and results.total == 8


def test_large_and_real_tensors_are_not_compared():
    results: Remembered[int] = Remembered(most=4)
    counting(results, [torch.zeros(MOST_COMPARED + 1, dtype=torch.int8)])
    counting(results, [torch.zeros(3)])
    assert not results.entries


def test_what_inference_mode_made_serves_training():
    query = torch.randn(3, 2, 8, 4)
    mask = masks.key_lengths(torch.tensor([3, 8, 5])) & masks.causal()
    with torch.inference_mode():
        wanted = saccade.attention(query, query, query, mask=mask)
    learns = query.clone().requires_grad_()
    found = saccade.attention(learns, learns, learns, mask=mask)
    torch.testing.assert_close(found, wanted.clone())
    found.sum().backward()
    assert learns.grad is not None and bool(learns.grad.isfinite().all())
