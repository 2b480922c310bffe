"""Models of transformers train through saccade: losses, gradients, checkpointing, dropout."""

import copy
import warnings
from typing import Any

import pytest
import torch
from tiny_models import OWN, assert_errs_no_more, llama, model, sharpened, tokens
from torch import Tensor

LENGTH = 20
RIGHT_PADDED = torch.ones(2, LENGTH, dtype=torch.long)
RIGHT_PADDED[1, 15:] = 0
BATCHES: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "padded": {"attention_mask": RIGHT_PADDED},
    "packed": {"position_ids": torch.cat([torch.arange(7), torch.arange(13)])[None].expand(2, -1)},
}


def trained(
    name: str, implementation: str, dtype: torch.dtype, batch: str = "plain", **checkpointing: Any
) -> dict[str, Tensor]:
    """The logits and all gradients of one step."""
    tiny = copy.deepcopy(model(name)).to(dtype).train()
    tiny.set_attn_implementation(implementation)
    if checkpointing:
        with warnings.catch_warnings():  # a later transformers calls it activation checkpointing
            warnings.simplefilter("ignore", FutureWarning)
            tiny.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    input_ids = tokens(2, LENGTH)
    real = BATCHES[batch].get("attention_mask", torch.ones_like(input_ids)).bool()
    labels = input_ids.masked_fill(~real, -100)
    result = tiny(input_ids, labels=labels, use_cache=False, **BATCHES[batch])
    result.loss.backward()
    gradients = {key: weights.grad for key, weights in tiny.named_parameters()}
    return {"logits": result.logits.detach() * real[..., None], **gradients}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", OWN)
def test_errs_no_more_than_plain_attention(name, batch):
    exact = trained(name, "plain", torch.float64, batch)
    plain = trained(name, "plain", torch.float32, batch)
    got = trained(name, "saccade", torch.float32, batch)
    for key in exact:
        assert_errs_no_more(got[key], plain[key], exact[key])
    assert any(key.endswith("sinks") for key in exact) == (name == "gpt_oss")


@pytest.mark.parametrize(
    ("name", "told_by"), [("llama", "positions"), ("llama", "offsets"), ("gpt_oss", "offsets")]
)
def test_documents_do_not_see_each_other(name, told_by):
    """GPT-OSS hands no positions to its masks (transformers 5.23), so offsets alone tell it."""
    tiny = copy.deepcopy(model(name))
    tiny.set_attn_implementation("saccade")
    position_ids = torch.cat([torch.arange(7), torch.arange(13)])[None]
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32)
    told: dict[str, Any] = {"position_ids": position_ids}
    if told_by == "offsets":
        told |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    input_ids = tokens(1, 20)
    second = tiny(input_ids, use_cache=False, **told).logits[:, 7:]
    alone = tiny(input_ids[:, 7:], use_cache=False).logits
    torch.testing.assert_close(second, alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "batch"), [("llama", "padded"), ("qwen3", "packed")])
def test_checkpointing_changes_no_bit(name, batch, reentrant):
    kept = trained(name, "saccade", torch.float32, batch)
    again = trained(name, "saccade", torch.float32, batch, use_reentrant=reentrant)
    for key in kept:
        assert torch.equal(kept[key], again[key]), key


def test_dropout_is_drawn_again_for_the_backward_pass():
    """With checkpointing the weights that dropped must drop again."""
    steps = []
    for checkpointing in (False, True, None):
        tiny = sharpened(llama(attention_dropout=0.3)).train()
        tiny.set_attn_implementation("saccade")
        if checkpointing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                tiny.gradient_checkpointing_enable()
        torch.manual_seed(1 if checkpointing is None else 0)
        tiny(tokens(2, 9), labels=tokens(2, 9), use_cache=False).loss.backward()
        steps.append([weights.grad for weights in tiny.parameters()])
    assert all(map(torch.equal, steps[0], steps[1]))
    assert not any(map(torch.equal, steps[0], steps[2]))  # another seed drops others
