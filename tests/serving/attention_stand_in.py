"""Until the integration is here: what it does for an engine."""

import torch
import saccade


def register():
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        sliding_window=None,
        softcap=None,
        saccade_step=None,
        **_,
    ):
        mask = (
            saccade.masks.causal()
            if sliding_window is None
            else saccade.masks.window(sliding_window - 1)
        )
        score = None if softcap is None else saccade.scores.softcap(softcap)
        return saccade_step.attend(
            module.layer_idx,
            query,
            key,
            value,
            mask=mask,
            score=score,
            scale=scaling,
            sinks=getattr(module, "sinks", None),
        ), None

    AttentionInterface.register("saccade", attend)
    AttentionMaskInterface.register("saccade", lambda *a, **k: None)
