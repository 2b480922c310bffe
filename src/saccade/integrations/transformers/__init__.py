"""transformers: models of Hugging Face attend through saccade, and generate with its pages.

    >>> import saccade.integrations.transformers as integration
    >>> integration.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="saccade")
    >>> cache = integration.PagedGenerationCache.for_model(model, max_tokens=2048)
    >>> model.generate(**inputs, past_key_values=cache)

Importing this package needs transformers, 5.17 or newer, and says so where there is none.
"""

from saccade.integrations.transformers import registration as versions

versions.require()

from saccade.integrations.transformers.attention import AttentionStep as AttentionStep  # noqa: E402
from saccade.integrations.transformers.attention import (  # noqa: E402
    attention_forward as attention_forward,
)
from saccade.integrations.transformers.cache import (  # noqa: E402
    PagedGenerationCache as PagedGenerationCache,
)
from saccade.integrations.transformers.masks import lazy_mask as lazy_mask  # noqa: E402
from saccade.integrations.transformers.registration import register as register  # noqa: E402

__all__ = ["AttentionStep", "PagedGenerationCache", "attention_forward", "lazy_mask", "register"]
