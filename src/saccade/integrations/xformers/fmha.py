"""fmha: the names of `xformers.ops.fmha`."""

from saccade.integrations.xformers import attn_bias as attn_bias
from saccade.integrations.xformers.attention import *  # noqa: F403
from saccade.integrations.xformers.attn_bias import *  # noqa: F403
from saccade.integrations.xformers.operators import *  # noqa: F403
