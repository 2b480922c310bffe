"""Trial: whether a model gives in packed chunks what it gives alone, tried before it serves.

Layers that keep something else than keys and values (a convolution's last rows, a state) run over
rows of strangers in a packed pass, and lose at the end of a chunk what they had. Nothing fails
then: the tokens are others. So an engine compares, once, a few packed steps with a plain pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import saccade
from saccade.serving.model import BatchStep, PackedModel, Rows
from saccade.serving.request import Limits, Request
from saccade.serving.sampling import Sampling
from saccade.serving.scheduler import Scheduler

PROMPTS, LENGTH = 3, 12
# Of rows: rounding alone may turn near ties between experts over in some of them.
QUANTILE = 0.5
MARGIN = 6.0  # over what another attention's rounding changes
ROUNDINGS = 4.0  # of the dtype, where that happens to change nothing


class AlonePass:
    """A step over sequences side by side, each whole, that keeps nothing and asks the reference."""

    def attend(
        self, layer_index: int, query: Rows, key: Rows, value: Rows, **options: Any
    ) -> Float[Tensor, "batch rows heads value_dim"]:
        """Attend to all of each sequence."""
        output = saccade.attention(query, key, value, implementation="reference", **options)
        return output.transpose(1, 2).contiguous()


def check(model: PackedModel, page_size: int, options: Mapping[str, Any]) -> None:
    """Compare packed, chunked steps with a plain pass, on random tokens of the model's vocabulary.

    They may differ as far as rounding explains: by some times what one plain pass differs from
    another that attends by another formula. That takes two passes over 36 tokens and four over
    9 to 11, with pages of its own, and leaves PyTorch's random numbers where they were.

    Args:
        page_size, options: of the engine, so that the same kernels run.

    Raises:
        ValueError: naming the model, if they differ by more.
    """
    device = model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        prompts = _prompts(model)
        plain = model.plain_logits(prompts)
        again = model.whole_logits(prompts, AlonePass())
        packed, first = _packed(model, prompts, page_size, options)
    plain, again, packed = (each.flatten(0, 1).double() for each in (plain, again, packed))
    compared = plain.isfinite().all(1) & again.isfinite().all(1)
    compared[:first] = False  # the first chunk of all has nobody before it
    if not compared.any():
        return
    unit = (plain - plain.mean(1, keepdim=True)).norm(dim=1)
    rounding = ROUNDINGS * torch.finfo(model.shape.dtype).eps
    allowed = MARGIN * _typical(again - plain, unit, compared) + rounding
    differs = _typical(packed - plain, unit, compared)
    if not differs <= allowed:
        raise ValueError(
            f"model: got {model.name}, whose logits differ by {differs:.2g} of their size between "
            "a plain pass and one over chunks of several sequences side by side, where rounding "
            f"explains {allowed:.2g}; takes a model whose layers keep nothing but keys and values, "
            "and which takes positions from position_ids"
        )


def _prompts(model: PackedModel) -> Int[Tensor, "prompts length"]:
    """Random tokens that have no special meaning."""
    length = min(LENGTH, model.longest or LENGTH)
    random = torch.Generator().manual_seed(0)
    ordinary = sorted(set(range(min(model.vocabulary, 2**16))) - model.special_tokens)
    chosen = torch.randint(len(ordinary), (PROMPTS, length), generator=random)
    return torch.tensor(ordinary)[chosen].to(model.device)


def _packed(
    model: PackedModel, prompts: Tensor, page_size: int, options: Mapping[str, Any]
) -> tuple[Float[Tensor, "prompts length vocabulary"], int]:
    """The logits of every row, from steps such as the engine's; and the rows of the first step."""
    length = prompts.shape[1]
    rows = max(length - 1, 1)  # so that a chunk of one token comes, and every prompt is cut
    shape, windows = model.shape, model.windows
    cache = saccade.PagedCache(
        PROMPTS * (-(-length // page_size) + 1), page_size, windows=windows,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, value_dim=shape.value_dim,
        dtype=shape.dtype, device=model.device, prefix_caching=False,
    )  # fmt: skip
    scheduler = Scheduler(
        cache, max_batch_tokens=rows, max_sequences=PROMPTS, preemption="recompute"
    )
    for number, prompt in enumerate(prompts.tolist()):
        scheduler.add(Request(number, prompt, Sampling(), Limits(1)))
    found: list[list[Tensor]] = [[] for _ in range(PROMPTS)]
    while (plan := scheduler.plan()) is not None:
        step = BatchStep(cache, plan, model.numbers, options)
        step.last_rows = torch.arange(step.input_ids.shape[1], device=model.device)
        shares = model.logits(step).split([share.stop - share.start for share in plan.shares])
        scheduler.commit(plan.shares)
        for share, logits in zip(plan.shares, shares, strict=True):
            found[share.request.number].append(logits)
            if share.draws:
                scheduler.remove(share.request)
    return torch.stack([torch.cat(each) for each in found]), rows


def _typical(difference: Tensor, unit: Tensor, compared: Tensor) -> float:
    """How far most rows are off, in parts of their logits' size."""
    relative = difference.norm(dim=1) / unit
    return float(relative[compared].nan_to_num(torch.inf).quantile(QUANTILE))
