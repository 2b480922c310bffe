"""Philox against its published vectors; which pairs are dropped, how many, and always the same."""

import math
from typing import Any

import pytest
import torch

import saccade
from saccade.modifiers.evaluate import index_range
from saccade.runtime import dropout

IMPLEMENTATIONS = ["reference", "cpu"]


def philox(counter: tuple[int, ...], seed: torch.Tensor) -> tuple[int, ...]:
    first, second, third, fourth = (torch.tensor(word) for word in counter)
    words = dropout.philox_4x32((first, second, third, fourth), seed)
    return tuple(int(word) for word in words)


def signed(low: int, high: int) -> torch.Tensor:
    """A seed whose two 32-bit halves are the generator's key words."""
    word = low | high << 32
    return torch.tensor(word - 2**64 if word >= 2**63 else word)


# From kat_vectors of the Random123 distribution, philox4x32 with 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_words(counter, key, words):
    assert philox(counter, signed(*key)) == words


def test_philox_takes_counters_that_broadcast():
    one, two, three, four = (torch.tensor([known[0][k] for known in KNOWN]) for k in range(4))
    for column, (_, key, words) in enumerate(KNOWN):
        found = dropout.philox_4x32((one, two, three, four), signed(*key))
        assert tuple(int(word[column]) for word in found) == words


def grid(batch: int, heads: int, query_len: int, kv_len: int) -> list[torch.Tensor]:
    return [index_range(0, size, dim) for dim, size in enumerate((batch, heads, query_len, kv_len))]


def kept(seed: int, *sizes: int, share: float = 0.5) -> torch.Tensor:
    return dropout.kept(torch.tensor(seed), *grid(*sizes), dropout_p=share)


@pytest.mark.parametrize("bounds", [(0, 40), (0, 1), (1, 2), (3, 4), (4, 8), (5, 31), (39, 40)])
def test_a_range_of_keys_is_kept_as_its_single_keys(bounds):
    rows = grid(2, 3, 5, 40)
    whole = dropout.kept(torch.tensor(11), *rows, dropout_p=0.4)
    part = dropout.kept_range(11, *rows[:3], kv_range=bounds, dropout_p=0.4)
    assert torch.equal(part, whole[..., slice(*bounds)])


@pytest.mark.parametrize("sizes", [(2, 3, 0, 9), (2, 0, 5, 9), (0, 3, 5, 9), (2, 3, 5, 0)])
def test_a_rectangle_may_be_empty(sizes):
    rows = grid(*sizes)[:3]
    part = dropout.kept_range(11, *rows, kv_range=(0, sizes[3]), dropout_p=0.4)
    assert part.shape == sizes and part.dtype == torch.bool


def test_the_first_word_decides_about_the_first_key():
    words = philox((0, 0, 0, 0), torch.tensor(5))
    for share in (0.1, 0.5, 0.9):
        wanted = [word >= round(share * 2**32) for word in words]
        assert kept(5, 1, 1, 1, 4, share=share).flatten().tolist() == wanted


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.1, 0.5, 0.9, 0.999])
def test_the_dropped_share_is_the_probability(share):
    pairs = kept(123, 4, 8, 100, 100, share=share)
    dropped = int((~pairs).sum())
    deviation = math.sqrt(pairs.numel() * share * (1 - share))
    assert abs(dropped - share * pairs.numel()) <= 5 * deviation


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    both = torch.stack([one.flatten(), other.flatten()]).double()
    return float(torch.corrcoef(both)[0, 1])


def test_seeds_batches_heads_rows_and_keys_are_independent():
    here = kept(1, 2, 2, 200, 200)
    pairs = {
        "seed": (here, kept(2, 2, 2, 200, 200)),
        "seed in the high word": (here, kept(1 + (1 << 32), 2, 2, 200, 200)),
        "negative seed": (here, kept(-1, 2, 2, 200, 200)),
        "batch": (here[0], here[1]),
        "head": (here[:, 0], here[:, 1]),
        "batch and head": (here[0, 1], here[1, 0]),
        "row": (here[:, :, :-1], here[:, :, 1:]),
        "key": (here[..., :-1], here[..., 1:]),
        "key of the next draw": (here[..., :-4], here[..., 4:]),
        "row and key": (here, here.transpose(-1, -2)),
    }
    for name, (one, other) in pairs.items():
        assert abs(correlation(one, other)) < 5 / math.sqrt(one.numel()), name


# ---- in the calls -----------------------------------------------------------------------------


def weights(lengths: list[tuple[int, int]], packed: bool, implementation: str, **more) -> list:
    """The weights of 2 heads after dropout of 0.4, one tensor [heads, rows, keys] a sequence."""
    longest = max(keys for _, keys in lengths)
    counts = [torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths, strict=True)]
    torch.manual_seed(7)
    arguments: Any = {"dropout_p": 0.4, "implementation": implementation, **more}
    if not packed:
        rows, keys = lengths[0]
        value = torch.eye(keys).expand(len(lengths), 2, keys, keys)
        zeros = torch.zeros(len(lengths), 2, rows, 3), torch.zeros(len(lengths), 2, keys, 3)
        return list(saccade.attention(zeros[0], zeros[1], value, **arguments))
    value = torch.cat([torch.eye(longest)[:keys] for _, keys in lengths])
    value = value[:, None].expand(-1, 2, -1)
    zeros = [torch.zeros(int(count[-1]), 2, 3) for count in counts]
    output = saccade.attention_varlen(zeros[0], zeros[1], value, *counts, **arguments)
    sequences = output.transpose(0, 1).split([rows for rows, _ in lengths], dim=1)
    return [part[..., :keys] for part, (_, keys) in zip(sequences, lengths, strict=True)]


def test_weights_that_are_left_grow_to_make_up():
    for implementation in IMPLEMENTATIONS:
        found = torch.stack(weights([(50, 30)] * 2, False, implementation))
        for value in found[found > 0]:
            assert float(value) == pytest.approx(1 / 30 / 0.6, rel=1e-5)
        assert 0.3 < float((found == 0).float().mean()) < 0.5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_sequences_drop_what_a_batch_drops(implementation):
    dense = weights([(50, 30)] * 3, False, implementation)
    alike = weights([(50, 30)] * 3, True, implementation)
    unlike = weights([(50, 11), (7, 30), (20, 30)], True, implementation)
    for whole, same, part in zip(dense, alike, unlike, strict=True):
        assert torch.equal(whole == 0, same == 0)
        _, rows, keys = part.shape
        assert torch.equal(whole[:, :rows, :keys] == 0, part == 0)


def test_every_implementation_and_tile_size_drops_the_same_pairs():
    lengths = [(70, 300)] * 2
    wanted = torch.stack(weights(lengths, False, "reference")) == 0
    for config in (None, saccade.KernelConfig(16, 32), saccade.KernelConfig(64, 256)):
        found = torch.stack(weights(lengths, False, "cpu", config=config))
        assert torch.equal(found == 0, wanted)
    causal = torch.stack(weights(lengths, False, "cpu", mask=saccade.masks.causal()))
    hidden = torch.ones(70, 300).triu(300 - 70 + 1).bool()
    assert torch.equal(causal == 0, wanted | hidden)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_backward_drops_what_forward_dropped(implementation):
    rows, value = torch.zeros(1, 2, 20, 3), torch.eye(20).repeat(1, 2, 1, 1).requires_grad_()
    output = saccade.attention(rows, rows, value, dropout_p=0.4, implementation=implementation)
    assert isinstance(output, torch.Tensor)
    (grad_value,) = torch.autograd.grad(output, value, torch.eye(20).expand(1, 2, 20, 20))
    torch.testing.assert_close(grad_value, output.transpose(-1, -2))


def test_the_generator_decides_and_each_call_draws_anew():
    rows = torch.randn(1, 2, 20, 3)

    def call() -> torch.Tensor:
        output = saccade.attention(rows, rows, rows, dropout_p=0.4)
        assert isinstance(output, torch.Tensor)
        return output

    torch.manual_seed(3)
    first, second = call(), call()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(call(), first)
    state = torch.get_rng_state()
    saccade.attention(rows, rows, rows)  # no dropout draws nothing
    assert torch.equal(torch.get_rng_state(), state)


def test_lse_knows_nothing_of_dropout():
    rows = torch.randn(1, 2, 20, 3)
    for implementation in IMPLEMENTATIONS:
        call = {"return_lse": True, "implementation": implementation}
        torch.testing.assert_close(
            saccade.attention(rows, rows, rows, dropout_p=0.4, **call)[1],
            saccade.attention(rows, rows, rows, **call)[1],
        )
