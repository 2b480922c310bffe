"""Integrations: other libraries' calls, answered by saccade; each is imported when first used."""

import importlib
from types import ModuleType

NAMES = (
    "diffusers", "fast_transformers", "fla", "flash_attn", "flash_kernels", "flex_attention",
    "sdpa", "transformers", "vllm", "xformers",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name in NAMES:
        return importlib.import_module(f"saccade.integrations.{name}")
    raise AttributeError(f"saccade.integrations has no {name!r}; it has {', '.join(NAMES)}")
