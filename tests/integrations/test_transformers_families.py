"""Families of models do through saccade what they do without it, or are refused by name.

docs/transformers.md shows what each does; every row is compared with what happens here. After a
change, `PYTHONPATH=src:tests python tests/integrations/test_transformers_families.py` writes it.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
from tiny_families import FAMILIES, Family, Inputs
from torch import Tensor

import saccade
import saccade.integrations.transformers as integration
from saccade.integrations.transformers import attention

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "transformers.md"
MARKERS = "<!-- families: begin -->\n", "<!-- families: end -->"
NEW_TOKENS = 6
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
EQUAL, REFUSED, NOTHING = "equal", "refused", "–"


class Refused(Exception):
    """An error that says what it got and what it takes."""


class Row(NamedTuple):
    """What a family does: equal to transformers' own attention, refused, or nothing of the kind."""

    training: str
    generate: str
    pages: str


def counted(calls: list[str]) -> Any:
    """What stands in for a part of saccade's attention function, and notes who attends by it."""
    asked = attention._mask_and_bias

    def counting(*arguments: Any) -> Any:
        calls.append("attended")
        return asked(*arguments)

    return counting


def own(family: Family) -> str:
    """What transformers itself attends with; its sdpa knows neither softcap nor sinks."""
    return family.compare or ("sdpa" if family.model_class._supports_sdpa else "eager")


def named(error: Exception) -> bool:
    """Whether an error says what it got and what it takes."""
    found = re.match(r"[\w, ]+: got .* takes ", str(error), re.DOTALL) is not None
    return found and isinstance(error, ValueError | TypeError | NotImplementedError)


def outcome(check: Callable[[Family], None], family: Family) -> str:
    """Equal, as the check asserts, or refused by name; any other error is a fault."""
    integration.register()
    try:
        check(family)
    except (ValueError, TypeError, NotImplementedError) as error:
        if not named(error):
            raise
        return REFUSED
    return EQUAL


# ---- forward passes and gradients ----------------------------------------------------------------


def trained(model: Any, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """All that a forward pass gives, and the gradients of a sum of it with random weights."""
    model = model.to(dtype)
    inputs = {
        name: rows.to(dtype) if rows.is_floating_point() else rows for name, rows in inputs.items()
    }
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    results = model(**inputs, **options)
    found = {
        name: result
        for name, result in results.items()
        if isinstance(result, Tensor) and result.requires_grad
    }
    assert found
    loss = torch.zeros((), dtype=dtype)
    for number, result in enumerate(found.values()):
        random = torch.Generator().manual_seed(number)
        loss = loss + (result * torch.randn(result.shape, generator=random).to(dtype)).sum()
    loss.backward()
    gradients = {
        f"gradient of {name}": weights.grad
        for name, weights in model.named_parameters()
        if weights.grad is not None
    }
    return {name: each.detach().double() for name, each in {**found, **gradients}.items()}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """How far tensors are from the exact ones, each for its size.

    What should be 0 (the gradient of a key's bias) is noise in every precision, so a gradient's
    size is at least a hundredth of the largest gradient's.
    """
    assert found.keys() == exact.keys()
    largest = max(float(each.abs().max()) for name, each in exact.items() if "gradient" in name)
    return {
        name: float((each - exact[name]).abs().max())
        / max(float(exact[name].abs().max()), largest / 100 if "gradient" in name else 1e-30)
        for name, each in found.items()
    }


def training(family: Family) -> None:
    """Saccade may err twice as far from float64 as transformers' own attention, plus roundings."""
    ours = family.make("saccade")
    exact = trained(family.make(own(family)), family.inputs(), torch.float64)
    plain = errors(trained(family.make(own(family)), family.inputs(), torch.float32), exact)
    got = errors(trained(ours, family.inputs(), torch.float32), exact)
    allowed = 2 * max(plain.values()) + 16 * torch.finfo(torch.float32).eps
    assert allowed < 1e-3, f"{family.name}: float32 itself errs by {max(plain.values()):.2g}"
    worst = max(got, key=lambda name: got[name])
    assert got[worst] <= allowed, f"{worst} errs by {got[worst]:.3g}, may err by {allowed:.3g}"


# ---- generating ----------------------------------------------------------------------------------


def left_padded(family: Family) -> Inputs:
    """What generate takes: the shorter text begins later."""
    inputs = {name: rows for name, rows in family.inputs().items() if "decoder" not in name}
    if "attention_mask" in inputs:
        for name in ("input_ids", "attention_mask"):
            inputs[name] = torch.stack([inputs[name][0], inputs[name][1].roll(2)])
    return inputs


def generated(model: Any, family: Family, **options: Any) -> Tensor:
    return model.generate(**left_padded(family), **GREEDY, **options)


def generate(family: Family) -> None:
    ours = family.make("saccade")
    assert torch.equal(generated(ours, family), generated(family.make(own(family)), family))


def pages(family: Family) -> None:
    ours = family.make("saccade")
    cache = integration.PagedGenerationCache.for_model(
        ours, max_tokens=40, batch_size=2, page_size=4
    )
    got = generated(ours, family, past_key_values=cache)
    assert torch.equal(got, generated(family.make(own(family)), family))


def engine(family: Family) -> None:
    """Prompts of all lengths, in chunks, and together in one batch."""
    made = saccade.Engine(
        family.make("saccade"), num_pages=48, page_size=4, max_sequences=4, max_batch_tokens=6
    )
    prompts = [tiny_models.tokens(1, length, length)[0].tolist() for length in (9, 1, 4, 14)]
    got = made.generate(prompts, max_new_tokens=NEW_TOKENS, stop_tokens=())
    alone = family.make(own(family))
    for prompt, text in zip(prompts, got, strict=True):
        rows = torch.tensor([prompt])
        wanted = alone.generate(
            rows, attention_mask=torch.ones_like(rows), use_cache=False, **GREEDY
        )
        assert text.tokens == wanted[0, len(prompt) :].tolist()


def used(family: Family) -> str:
    """What becomes of training; equal numbers count where saccade was asked for them."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_mask_and_bias", counted(calls))
        found = outcome(training, family)
    assert bool(calls) == (found == EQUAL), f"{len(calls)} calls"
    return found


def row(family: Family) -> Row:
    """What a family does, as it is found out now; the engine, in `engine`, is asked by itself."""
    trains = used(family)
    if not family.writes:
        return Row(trains, NOTHING, NOTHING)
    return Row(trains, outcome(generate, family), outcome(pages, family))


# ---- the table -----------------------------------------------------------------------------------


HEAD: tuple[str, ...] = (
    "| family | model | kind | forward, gradients | `generate` | from pages | `Engine` |",
    "|---|---|---|---|---|---|---|",
)


def begun(family: Family) -> str:
    """What a family's line begins with."""
    return f"| {family.name} | `{family.model}` | {family.kind} | "


def shown() -> list[str]:
    """The lines of the table in the documentation."""
    return PAGE.read_text(encoding="utf-8").split(MARKERS[0])[1].split(MARKERS[1])[0].splitlines()


def cells(name: str) -> list[str]:
    """What the table says of a family: training, generating, pages, engine."""
    start = begun(FAMILIES[name])
    (line,) = (each for each in shown() if each.startswith(start))
    return line.removeprefix(start).removesuffix(" |").split(" | ")


@pytest.mark.parametrize("name", FAMILIES)
def test_family_does_what_the_table_says(name):
    assert [*row(FAMILIES[name])] == cells(name)[:3]


@pytest.mark.parametrize("name", FAMILIES)
def test_engine_does_what_the_table_says(name):
    assert outcome(engine, FAMILIES[name]) == cells(name)[3]


def test_table_has_every_family_once():
    assert tuple(shown()[:2]) == HEAD
    for line, family in zip(shown()[2:], FAMILIES.values(), strict=True):
        assert line.startswith(begun(family)) and set(cells(family.name)) <= {
            EQUAL,
            REFUSED,
            NOTHING,
        }
    assert sum(cells(name)[0] == EQUAL for name in FAMILIES) >= 40


def test_other_errors_are_no_refusals():
    assert named(ValueError("model: got a cat, takes a dog"))
    assert not named(ValueError("view size is not compatible, got 3, takes 2"))
    assert not named(KeyError("model: got a cat, takes a dog"))

    def other(family: Family) -> None:
        raise ValueError(f"other: {family.name}")

    with pytest.raises(ValueError, match="other: Llama"):
        outcome(other, FAMILIES["Llama"])


def main() -> None:
    """Write the table anew."""
    lines = list(HEAD)
    for family in FAMILIES.values():
        lines.append(begun(family) + " | ".join((*row(family), outcome(engine, family))) + " |")
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    PAGE.write_text(before + MARKERS[0] + "\n".join(lines) + "\n" + MARKERS[1] + after, "utf-8")


if __name__ == "__main__":
    main()
