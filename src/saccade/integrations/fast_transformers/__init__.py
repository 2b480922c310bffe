"""fast-transformers: its linear attention layers, masks and feature maps, computed by saccade.

Layouts and arguments are fast-transformers' own: (N, L, H, E) for layers, (N, H, L, E) for
`causal_dot_product`. Differences: any dtype, any strides, more queries than keys, key lengths that
hide values as well, masks that take no memory, and `Favor` that does not underflow, whose states
have a third part.
"""

from saccade.integrations.fast_transformers.attention import (
    AttentionLayer,
    CausalLinearAttention,
    LinearAttention,
    RecurrentAttentionLayer,
    RecurrentCrossAttentionLayer,
    RecurrentCrossLinearAttention,
    RecurrentLinearAttention,
    causal_dot_product,
)
from saccade.integrations.fast_transformers.features import (
    ActivationFunctionFeatureMap,
    BaseMask,
    Favor,
    FeatureMap,
    FullMask,
    GeneralizedRandomFeatures,
    LengthMask,
    RandomFourierFeatures,
    SmoothedRandomFourierFeatures,
    TriangularCausalMask,
    activation_function_feature_map,
    elu_feature_map,
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
