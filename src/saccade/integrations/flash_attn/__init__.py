"""flash_attn: FlashAttention's calls, answered by saccade, with its layouts and defaults.

Change one import, or none: after `install()`, `import flash_attn` in other people's code finds
these calls. Arguments, layouts [batch, length, heads, dim] and return values are those of
flash-attn 2.8; any dtype and device that saccade serves. FlashAttention-3's calls, of
`flash_attn_interface`, are in `version_3`; `flash_attn.layers.rotary` is `rotary`. Differences:

- A row that sees nothing has an lse of -inf (theirs: +inf in training calls).
- Dropout leaves out other weights for the same seed.
- `return_attn_probs` with dropout raises: weights are never written out.
"""

from saccade.integrations.flash_attn.cache import flash_attn_with_kvcache
from saccade.integrations.flash_attn.functions import (
    IndexFirstAxis,
    IndexFirstAxisResidual,
    IndexPutFirstAxis,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from saccade.integrations.flash_attn.import_hook import install, installed, uninstall
from saccade.integrations.flash_attn.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "install",
    "installed",
    "pad_input",
    "uninstall",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]
