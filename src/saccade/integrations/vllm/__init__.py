"""vllm: an attention backend for vLLM's engine, on saccade's attention over pages.

vLLM finds it as a plugin when both are installed; `--attention-backend SACCADE` selects it. It
serves decoders: grouped heads, windows, softcap, ALiBi, sinks; caches in the model's dtype, in fp8
with one scale for a layer, and in fp8 or int8 with one for each token of each head;
`VLLM_BATCH_INVARIANT`; steps that only decode as CUDA graphs. It refuses what it does not serve:
images whose tokens see each other, caches that are split over ranks, encoders.
"""

from __future__ import annotations

import importlib

__all__ = ["register"]

NAME = "SACCADE"
BACKEND = "saccade.integrations.vllm.backend.Backend"
REGISTRY = "vllm.v1.attention.backends.registry"


def register() -> None:
    """Tell vLLM of the backend. Calling it twice changes nothing.

    Raises:
        ImportError: if vLLM is not installed, or keeps its backends in another way than 0.33 does.

    Examples:
        >>> try:
        ...     saccade.integrations.vllm.register()
        ... except ImportError as error:
        ...     print("vLLM is not here")
        vLLM is not here
    """
    try:
        registry = importlib.import_module(REGISTRY)
        known, add = registry.AttentionBackendEnum.__members__, registry.register_backend
    except (ModuleNotFoundError, AttributeError) as error:
        raise ImportError(f"saccade.integrations.vllm takes vLLM 0.33 ({error})") from None
    if NAME not in known:
        add(NAME, BACKEND)
