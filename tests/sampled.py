"""Requests whose tokens are chosen in all ways, and what each gives alone."""

from typing import Any

import served

REQUESTS: list[dict[str, Any]] = [
    {}, {"temperature": 1.2, "seed": 3}, {"temperature": 0.9, "top_k": 7, "seed": 1},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4}, {"logit_bias": {5: 4.0, 9: -9.0}},
    {"temperature": 1.5, "min_p": 0.1, "presence_penalty": 1.0, "logprobs": 3},
    {"min_new_tokens": 5}, {"logprobs": 0},
]  # fmt: skip


def of_one_alone(prompt: list[int], options: dict[str, Any]) -> Any:
    engine = served.engine(num_pages=200, run_ahead=False)
    return engine.generate([prompt], max_new_tokens=9, stop_tokens=[4, 8, 15, 16], **options)[0]
