"""Tiny models of diffusers. Their modules are imported when a model is made.

Each pytest worker imports all tests, and these modules take two seconds.
"""

from __future__ import annotations

from typing import Any


def flux() -> Any:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def unet() -> Any:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4,
    )  # fmt: skip


def autoencoder() -> Any:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return AutoencoderKL(norm_num_groups=4, block_out_channels=(8,))


def tiny_autoencoder() -> Any:
    """The kind that diffusers calls tiny: it has no attention."""
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    return AutoencoderTiny()
