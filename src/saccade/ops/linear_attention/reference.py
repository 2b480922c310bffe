"""Linear attention, written out three times: by pairs, row by row, and in chunks.

    score(i, j) = scale · φ(query_i) · φ(key_j) · fade(i, j)      for keys j that row i sees
    output_i    = Σ_j score(i, j) · value_j / normaliser(Σ_j score(i, j))

Because a score is a plain product, the sum over keys can be kept instead of the keys:

    state_n = e^{decay_n} · state_{n-1} + φ(key_n) · value_nᵀ     and alike for the sum of φ(key_n)

A query row sees the first `seen` keys, hence reads the state after so many. The three forms give
the same numbers; the first is what `implementation="reference"` computes. Gradients are
PyTorch's own. Source: Katharopoulos et al. 2020, section 3.2 and 3.3; decay as in RetNet (Sun et
al. 2023), equations 5 to 7.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from saccade.runtime.spec import LinearInputs, LinearResults, LinearVariant, accumulate_dtype


class ReferenceRows(NamedTuple):
    """A dense call after its feature map, with as many heads everywhere as the output has.

    Hidden keys have features and values of 0 and fade nothing.
    """

    query: Float[Tensor, "batch heads rows features"]
    key: Float[Tensor, "batch heads keys features"]
    value: Float[Tensor, "batch heads keys value_dim"]
    log_decay: Float[Tensor, "batch heads keys"]  # logarithm of what a key row leaves of the state
    seen: Int64[Tensor, " rows"]  # how many keys a query row sees
    kv: Float[Tensor, "batch heads features value_dim"]  # the state before the first key
    key_sum: Float[Tensor, "batch heads features"]


class StateSums(NamedTuple):
    """What each form computes: sums for each row, before the normaliser, and the last state."""

    weighted: Float[Tensor, "batch heads rows value_dim"]
    total: Float[Tensor, "batch heads rows"]
    kv: Float[Tensor, "batch heads features value_dim"]
    key_sum: Float[Tensor, "batch heads features"]


# ---- the three forms ---------------------------------------------------------------------------


class Pairs(NamedTuple):
    """All pairs of a row and a key; visible ones that touch NaN or inf hold NaN."""

    scores: Float[Tensor, "batch heads rows keys"]  # 0 where hidden
    visible: Bool[Tensor, "rows keys"]
    old: Float[Tensor, "batch heads rows features"]  # queries as the initial state meets them
    value: Float[Tensor, "batch heads keys value_dim"]
    total: Float[Tensor, "batch heads rows"]  # the sum of all scores of a row


def pairs_of(rows: ReferenceRows) -> Pairs:
    """The scores, and their sums."""
    query, query_nonfinite = _without_nonfinite_rows(rows.query)
    key, key_nonfinite = _without_nonfinite_rows(rows.key)
    value, value_nonfinite = _without_nonfinite_rows(rows.value)
    nonfinite = query_nonfinite | (key_nonfinite | value_nonfinite).transpose(-1, -2)
    visible = torch.arange(key.shape[2], device=key.device) < rows.seen.unsqueeze(-1)
    log_decay = rows.log_decay.unsqueeze(-2).masked_fill(
        ~visible, 0
    )  # of each row, by the keys it sees
    gap = _sum_after(log_decay)
    scores = query @ key.transpose(-1, -2) * gap.exp()
    scores = scores + torch.zeros_like(gap).masked_fill(nonfinite, torch.nan)
    scores = scores.masked_fill(~visible, 0)
    old = (
        query * log_decay.sum(-1, keepdim=True).exp()
    )  # the state before the first key fades as keys come
    old = old + torch.zeros_like(old).masked_fill(query_nonfinite, torch.nan)
    total = scores.sum(-1) + (old @ rows.key_sum.unsqueeze(-1)).squeeze(-1)
    return Pairs(scores, visible, old, value, total)


def _sum_after(log_decay: Tensor) -> Tensor:
    """For each key the sum over those behind it, in whose gradient no sums are subtracted."""
    return torch.nn.functional.pad(log_decay, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)


def last_state(rows: ReferenceRows) -> tuple[Tensor, Tensor]:
    """The two sums after the last key."""
    key = rows.key * _sum_after(rows.log_decay).exp().unsqueeze(-1)
    whole = rows.log_decay.sum(-1, keepdim=True).exp()
    kv = key.transpose(-1, -2) @ rows.value + whole.unsqueeze(-1) * rows.kv
    return kv, key.sum(-2) + whole * rows.key_sum


def quadratic(rows: ReferenceRows) -> StateSums:
    """By pairs: all scores in memory."""
    pairs = pairs_of(rows)
    weighted = pairs.scores @ pairs.value + pairs.old @ rows.kv
    return StateSums(weighted, pairs.total, *last_state(rows))


def recurrent(rows: ReferenceRows) -> StateSums:
    """Row by row: one state, which each key changes and each query reads."""
    kv, key_sum = rows.kv, rows.key_sum
    weighted = rows.query.new_zeros(*rows.query.shape[:3], rows.value.shape[-1])
    total = rows.query.new_zeros(rows.query.shape[:3])
    for num_keys in range(rows.key.shape[2] + 1):
        if num_keys > 0:
            key, value = rows.key[:, :, num_keys - 1], rows.value[:, :, num_keys - 1]
            left = rows.log_decay[:, :, num_keys - 1, None].exp()
            kv = left.unsqueeze(-1) * kv + key.unsqueeze(-1) * value.unsqueeze(-2)
            key_sum = left * key_sum + key
        reads = (rows.seen == num_keys).unsqueeze(-1)
        weighted = torch.where(reads, rows.query @ kv, weighted)
        read = (rows.query @ key_sum.unsqueeze(-1)).squeeze(-1)
        total = torch.where(reads.squeeze(-1), read, total)
    return StateSums(weighted, total, kv, key_sum)


def chunked(rows: ReferenceRows, chunk: int) -> StateSums:
    """In chunks of keys: by pairs within a chunk, by the state for all that came before it."""
    kv, key_sum = rows.kv, rows.key_sum
    kv_len = rows.key.shape[2]
    parts: list[StateSums] = []
    rows_read: list[Tensor] = []
    for start in range(0, max(kv_len, 1), chunk):
        stop = min(start + chunk, kv_len)
        first = rows.seen > start if start else rows.seen >= 0
        reads = first & (rows.seen <= stop) if stop < kv_len else first
        inside = rows._replace(
            query=rows.query[:, :, reads],
            key=rows.key[:, :, start:stop],
            value=rows.value[:, :, start:stop],
            log_decay=rows.log_decay[:, :, start:stop],
            seen=rows.seen[reads] - start,
            kv=kv,
            key_sum=key_sum,
        )
        part = quadratic(inside)
        kv, key_sum = part.kv, part.key_sum
        parts.append(part)
        rows_read.append(reads.nonzero().squeeze(-1))
    order = torch.cat(rows_read).argsort()
    weighted = torch.cat([part.weighted for part in parts], 2)[:, :, order]
    total = torch.cat([part.total for part in parts], 2)[:, :, order]
    return StateSums(weighted, total, kv, key_sum)


# ---- a call ------------------------------------------------------------------------------------


def attention(
    inputs: LinearInputs, variant: LinearVariant, sums: torch.dtype | None = None
) -> LinearResults:
    """Output, normaliser and last state of a dense or packed call.

    `sums` is the dtype of all arithmetic: float32, or float64 for float64 inputs, where None.
    """
    sums = sums or accumulate_dtype(inputs.query.dtype)
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return _dense(inputs, variant, sums)
    found = [_dense(one, variant, sums) for one in sequences(inputs)]
    if not found:
        found = [_dense(_empty_sequence(inputs), variant, sums)]
        states = tuple(state[:0] for state in found[0][2:])
    else:
        states = tuple(torch.cat(parts) for parts in list(zip(*found, strict=True))[2:])
    output = torch.cat([part.output.squeeze(0).transpose(0, 1) for part in found])
    padding = inputs.query.shape[0] - output.shape[0]
    output = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, padding))
    if variant.normalize == "none":
        return LinearResults(output, found[0].normaliser, *states)
    normaliser = torch.cat([part.normaliser.squeeze(0) for part in found], 1)
    normaliser = torch.nn.functional.pad(normaliser, (0, padding))
    return LinearResults(output, normaliser, *states)


def sequences(inputs: LinearInputs) -> list[LinearInputs]:
    """The packed sequences as dense calls of one batch entry."""
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None
    ends_q, ends_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()

    def heads_first(rows: Tensor) -> Tensor:
        return rows.transpose(0, 1).unsqueeze(0)

    found: list[LinearInputs] = []
    for b in range(len(ends_q) - 1):
        q, k = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        decay = inputs.decay
        if decay is not None and decay.dim() == 2:
            decay = heads_first(decay[k])
        query, key, value = map(heads_first, (inputs.query[q], inputs.key[k], inputs.value[k]))
        kv, key_sum = (None if sums is None else sums[b : b + 1] for sums in inputs[5:7])
        found.append(LinearInputs(query, key, value, decay, None, kv, key_sum))
    return found


def _empty_sequence(inputs: LinearInputs) -> LinearInputs:
    """A sequence without rows, which stands for none."""
    query, key, value = (
        rows[:0].transpose(0, 1).unsqueeze(0) for rows in (inputs.query, inputs.key, inputs.value)
    )
    return LinearInputs(query, key, value)


def _dense(inputs: LinearInputs, variant: LinearVariant, sums: torch.dtype) -> LinearResults:
    """By pairs, whose scores are normalised before they meet values."""
    rows = lay_out(inputs, variant, sums)
    pairs = pairs_of(rows)
    factor = one_over_divisor(pairs.total, variant).unsqueeze(-1)
    weights = (pairs.scores * factor).masked_fill(~pairs.visible, 0)
    output = weights @ pairs.value + (pairs.old * factor) @ rows.kv
    if inputs.initial_kv is None:
        num_keys = rows.seen.expand(rows.query.shape[0], 1, -1)
        if inputs.key_lengths is not None:
            num_keys = torch.minimum(num_keys, inputs.key_lengths.view(-1, 1, 1))
        output = output.masked_fill((num_keys == 0).unsqueeze(-1), 0)
    kv, key_sum = last_state(rows)
    group = inputs.heads // max(inputs.state_heads, 1)
    kv, key_sum = kv[:, :: max(group, 1)], key_sum[:, :: max(group, 1)]
    total = pairs.total if variant.normalize != "none" else pairs.total.new_empty(0)
    return LinearResults(output.to(inputs.query.dtype), total, kv, key_sum)


def lay_out(inputs: LinearInputs, variant: LinearVariant, sums: torch.dtype) -> ReferenceRows:
    """The call after its feature map, with hidden keys selected away and heads repeated."""
    query, key, value = (rows.to(sums) for rows in inputs[:3])
    batch, kv_len, heads = key.shape[0], key.shape[2], inputs.heads
    hidden = torch.zeros(batch, 1, kv_len, dtype=torch.bool, device=key.device)
    if inputs.key_lengths is not None:
        row = torch.arange(kv_len, device=key.device)
        hidden = row >= inputs.key_lengths.view(-1, 1, 1)
    key = features(variant.feature_map, key.masked_fill(hidden.unsqueeze(-1), 0))
    log_decay = key.new_zeros(batch, inputs.state_heads, kv_len)
    if inputs.decay is not None:
        decay = inputs.decay.to(sums)
        log_decay = log_decay + (decay.unsqueeze(-1) if decay.dim() == 1 else decay)
    states = (*log_decay.shape[:2], key.shape[-1])
    kv, key_sum = inputs.initial_kv, inputs.initial_key_sum
    kv = key.new_zeros(*states, value.shape[-1]) if kv is None else kv.to(sums)
    key_sum = key.new_zeros(states) if key_sum is None else key_sum.to(sums)
    return ReferenceRows(
        _repeated(features(variant.feature_map, query) * variant.scale, heads),
        _repeated(key.masked_fill(hidden.unsqueeze(-1), 0), heads),
        _repeated(value.masked_fill(hidden.unsqueeze(-1), 0), heads),
        _repeated(log_decay.masked_fill(hidden, 0), heads),
        keys_seen(query.shape[2], kv_len, variant, query.device),
        _repeated(kv, heads),
        _repeated(key_sum, heads),
    )


def keys_seen(
    query_len: int, kv_len: int, variant: LinearVariant, device: torch.device
) -> Int64[Tensor, " rows"]:
    """How many keys each query row sees: they are always the first ones."""
    if not variant.causal:
        return torch.full((query_len,), kv_len, device=device)
    shift = kv_len - query_len if variant.align == "bottom_right" else 0
    return (torch.arange(1, query_len + 1, device=device) + shift).clamp(0, kv_len)


def features(name: str, rows: Tensor) -> Tensor:
    """φ: what stands in for the softmax's exponential."""
    if name == "elu+1":
        return torch.where(rows > 0, rows + 1, rows.clamp(max=0).exp())
    if name == "relu":
        return rows.relu()
    return rows.exp() if name == "exp" else rows


def one_over_divisor(
    total: Float[Tensor, "batch heads rows"], variant: LinearVariant
) -> Float[Tensor, "batch heads rows"]:
    """What scores are multiplied by so that they become weights; 0 where the divisor is 0."""
    if variant.normalize == "none":
        return torch.ones_like(total)
    if variant.normalize == "sum":
        divisor = total + variant.eps
    elif variant.normalize == "clamp":
        divisor = total.clamp(min=variant.eps)
    else:
        divisor = total.abs().clamp(min=variant.eps)
    nothing = divisor == 0
    return (1 / divisor.masked_fill(nothing, 1)).masked_fill(nothing, 0)


def _repeated(rows: Tensor, heads: int) -> Tensor:
    """Each head as often as heads of the output share it."""
    return rows.repeat_interleave(heads // max(rows.shape[1], 1), dim=1)


def _without_nonfinite_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the rows that hold NaN or inf, and say which they are: [..., rows, 1].

    A pair with such a row gets the score NaN, which is then selected away where the pair is
    hidden. A product would carry it further: 0 · NaN is NaN.
    """
    nonfinite = ~rows.isfinite().all(-1, keepdim=True)
    return rows.masked_fill(nonfinite, 0), nonfinite
