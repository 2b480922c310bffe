"""Pages that hold values as a part of keys, and layers of unlike sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import saccade
from saccade import masks


def filled(**options: Any) -> tuple[saccade.PagedCache, int, torch.Tensor]:
    sizes: dict[str, Any] = {"num_layers": 2, "kv_heads": 1, "head_dim": 40, "value_dim": 33}
    cache = saccade.PagedCache(16, 4, latent=True, dtype=torch.float64, **sizes | options)
    sequence, rows = cache.allocate(), torch.randn(2, 10, 1, 40, dtype=torch.float64)
    slots = cache.append({sequence: 10})
    for layer in range(2):
        cache.write(layer, rows[layer], None, slots)
    return cache, sequence, rows


def test_a_token_is_kept_once_and_copied_moved_and_swapped_as_such() -> None:
    cache, sequence, rows = filled(host_pages=16)
    other = cache.fork(sequence)
    added = torch.randn(1, 1, 40, dtype=torch.float64)
    slots = cache.append({other: 1})
    for layer in range(2):
        cache.write(layer, added, None, slots)
    cache.swap_out(sequence)
    cache.swap_in(sequence)
    cache.compact()
    cache.check()
    query = torch.randn(1, 8, 3, 40, dtype=torch.float64)
    for layer in range(2):
        for which, extra in ((sequence, added[:0]), (other, added)):
            key = torch.cat([rows[layer], extra]).transpose(0, 1)[None]
            exact = saccade.attention(
                query, key, key[..., :33], causal=True, implementation="reference"
            )
            found = cache.attend(layer, query, [which], mask=masks.causal())
            torch.testing.assert_close(
                found, exact, rtol=0, atol=1e3 * torch.finfo(torch.float64).eps
            )
    pages = cache.pages(0)
    assert pages.latent and pages.value_pages.data_ptr() == pages.key_pages.data_ptr()


def test_layers_of_unlike_heads() -> None:
    cache = saccade.PagedCache(
        8, 4, windows=[None, 3, None], kv_heads=[1, 2, 1], head_dim=[32, 16, 8]
    )
    sequence = cache.allocate()
    slots = cache.append({sequence: 5})
    for layer, (heads, dim) in enumerate(((1, 32), (2, 16), (1, 8))):
        key, value = torch.randn(2, 5, heads, dim)
        cache.write(layer, key, value, slots)
        query = torch.randn(1, 4, 1, dim)
        mask = masks.window(3) if layer == 1 else None
        exact = saccade.attention(
            query, *(each.transpose(0, 1)[None] for each in (key, value)), mask=mask
        )
        torch.testing.assert_close(cache.attend(layer, query, [sequence]), exact)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_dim": 41}, "value_dim: got 41 with latent=True, takes at most head_dim, 40"),
        ({"dtype": torch.int8}, "dtype: got torch.int8 with latent=True"),
        ({"kv_heads": [1, 1, 1]}, "kv_heads: got 3 numbers, takes one for each of 2"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "kv_heads": 1, "head_dim": 40, "value_dim": 32}
    with pytest.raises((TypeError, ValueError), match=message):
        saccade.PagedCache(4, latent=True, **sizes | options)


def test_values_are_written_with_keys_or_beside_them() -> None:
    cache, _, rows = filled()
    with pytest.raises(TypeError, match="value: got a tensor, takes None"):
        cache.write(0, rows[0], rows[0][..., :33], torch.arange(10))
    pages = cache.pages(0)
    with pytest.raises(TypeError, match="takes all of them, or none"):
        saccade.write_kv_cache(rows[0], None, pages.key_pages, pages.value_pages, torch.arange(10))
