"""fast-transformers: its linear attention layers, masks and feature maps, computed by saccade.

Layouts and arguments are fast-transformers' own: (N, L, H, E) for layers, (N, H, L, E) for
`causal_dot_product`. Differences: any dtype, any strides, more queries than keys, key lengths that
hide values as well, masks that take no memory, and `Favor` that does not underflow, whose states
have a third part.
"""

from saccade.integrations.fast_transformers.attention import (
    CausalLinearAttention as CausalLinearAttention,
)
from saccade.integrations.fast_transformers.attention import LinearAttention as LinearAttention
from saccade.integrations.fast_transformers.attention import (
    RecurrentCrossLinearAttention as RecurrentCrossLinearAttention,
)
from saccade.integrations.fast_transformers.attention import (
    RecurrentLinearAttention as RecurrentLinearAttention,
)
from saccade.integrations.fast_transformers.attention import (
    causal_dot_product as causal_dot_product,
)
from saccade.integrations.fast_transformers.features import (
    ActivationFunctionFeatureMap as ActivationFunctionFeatureMap,
)
from saccade.integrations.fast_transformers.features import Favor as Favor
from saccade.integrations.fast_transformers.features import FeatureMap as FeatureMap
from saccade.integrations.fast_transformers.features import (
    GeneralizedRandomFeatures as GeneralizedRandomFeatures,
)
from saccade.integrations.fast_transformers.features import (
    RandomFourierFeatures as RandomFourierFeatures,
)
from saccade.integrations.fast_transformers.features import (
    SmoothedRandomFourierFeatures as SmoothedRandomFourierFeatures,
)
from saccade.integrations.fast_transformers.features import (
    activation_function_feature_map as activation_function_feature_map,
)
from saccade.integrations.fast_transformers.features import elu_feature_map as elu_feature_map
from saccade.integrations.fast_transformers.layers import AttentionLayer as AttentionLayer
from saccade.integrations.fast_transformers.layers import (
    RecurrentAttentionLayer as RecurrentAttentionLayer,
)
from saccade.integrations.fast_transformers.layers import (
    RecurrentCrossAttentionLayer as RecurrentCrossAttentionLayer,
)
from saccade.integrations.fast_transformers.masks import BaseMask as BaseMask
from saccade.integrations.fast_transformers.masks import FullMask as FullMask
from saccade.integrations.fast_transformers.masks import LengthMask as LengthMask
from saccade.integrations.fast_transformers.masks import (
    TriangularCausalMask as TriangularCausalMask,
)

__all__ = [
    "ActivationFunctionFeatureMap",
    "AttentionLayer",
    "BaseMask",
    "CausalLinearAttention",
    "Favor",
    "FeatureMap",
    "FullMask",
    "GeneralizedRandomFeatures",
    "LengthMask",
    "LinearAttention",
    "RandomFourierFeatures",
    "RecurrentAttentionLayer",
    "RecurrentCrossAttentionLayer",
    "RecurrentCrossLinearAttention",
    "RecurrentLinearAttention",
    "SmoothedRandomFourierFeatures",
    "TriangularCausalMask",
    "activation_function_feature_map",
    "causal_dot_product",
    "elu_feature_map",
]
