"""Models that would not attend through saccade are refused by name, and masks are no numbers."""

import ast
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_models import llama
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

import saccade.integrations.transformers as integration
from saccade.integrations.transformers import attention
from saccade.integrations.transformers.deferred import MaskTensor, WrittenMask

SMALL = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT: dict[str, Any] = {**SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4}
BERT: dict[str, Any] = {
    **SMALL, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
LOCAL: dict[str, Any] = {"attention_types": [[["global", "local"], 1]]}
BART: dict[str, Any] = {**SMALL, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
PARTS = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}
NOT_ASKING: dict[str, dict[str, Any]] = {
    "Bloom": {**SMALL, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "CodeGen": {**GPT, "rotary_dim": 4},
    "Mpt": {**SMALL, "d_model": 32, "n_heads": 4, "n_layers": 2},
    "XGLM": {**SMALL, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32},
    "GPTNeoXJapanese": BERT, "RemBert": {**BERT, "input_embedding_size": 32},
    "MegatronBert": BERT, "RoFormer": BERT, "SqueezeBert": {**BERT, "embedding_size": 32},
    "MPNet": BERT, "IBert": BERT, "VisualBert": BERT, "ConvBert": BERT, "Luke": BERT,
    "BigBird": BERT,
    "LED": BART, "Mvp": BART, "TrOCR": {**SMALL, "d_model": 32, "decoder_layers": 1},
    "DebertaV2": BERT, "Deberta": BERT,
    "XLNet": {**SMALL, "d_model": 32, "n_layer": 2, "n_head": 4},
    "ImageGPT": GPT, "GPTJ": {**GPT, "rotary_dim": 4}, "Falcon": BERT,
    "GPTNeo": {**SMALL, **PARTS, **LOCAL}, "DeepseekV32": SMALL, "GlmMoeDsa": SMALL,
}  # fmt: skip


def model_class(name: str) -> Any:
    for ending in ("ForCausalLM", "Model", "ForQuestionAnswering"):
        if hasattr(transformers, name + ending):
            return getattr(transformers, name + ending)
    raise AssertionError(f"no model of {name}")


@pytest.mark.parametrize("name", NOT_ASKING)
def test_model_that_does_not_ask_is_refused_when_it_is_made(name):
    integration.register()
    kind = model_class(name)
    config = getattr(transformers, f"{name}Config")(**NOT_ASKING[name])
    takes = "'sdpa' or 'eager'" if kind._supports_sdpa else "'eager'"
    with pytest.raises(ValueError, match=rf"got 'saccade' for {kind.__name__}, but .*{takes}"):
        kind._from_config(config, attn_implementation="saccade")


def test_bark_is_refused_part_by_part():
    integration.register()
    config = transformers.BarkSemanticConfig(num_layers=1, num_heads=2, hidden_size=8)
    with pytest.raises(ValueError, match="got 'saccade' for BarkSemanticModel, but"):
        transformers.BarkSemanticModel._from_config(config, attn_implementation="saccade")


def test_setting_it_later_leaves_the_model_as_it_was(caplog):
    integration.register()
    tiny = transformers.BloomForCausalLM(transformers.BloomConfig(**NOT_ASKING["Bloom"]))
    before = tiny.config._attn_implementation
    with caplog.at_level("WARNING", "transformers"):
        transformers.utils.logging.enable_propagation()
        tiny.set_attn_implementation("saccade")
        transformers.utils.logging.disable_propagation()
    assert tiny.config._attn_implementation == before
    assert "BloomForCausalLM does not support setting" in caplog.text


def test_part_of_a_model_can_keep_another():
    integration.register()
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
            image_size=8, patch_size=4,
        ),
        transformers.TrOCRConfig(**NOT_ASKING["TrOCR"], decoder_ffn_dim=32),
    )  # fmt: skip
    kind = transformers.VisionEncoderDecoderModel
    with pytest.raises(ValueError, match="got 'saccade' for TrOCRForCausalLM"):
        kind._from_config(config, attn_implementation="saccade")
    parts = {"encoder": "saccade", "decoder": "eager"}
    made: Any = kind._from_config(config, attn_implementation=parts)
    assert made.encoder.config._attn_implementation == "saccade"
    assert made.decoder.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["Bloom", "CodeGen", "Mpt", "XGLM", "GPTNeoXJapanese"])
def test_behind_the_check_the_mask_itself_refuses(name):
    """As for a model whose source says less, or code that changes the config."""
    integration.register()
    config = getattr(transformers, f"{name}Config")(**NOT_ASKING[name])
    tiny = model_class(name)(config)
    tiny.config._attn_implementation_internal = "saccade"
    with pytest.raises(
        ValueError, match=rf"'saccade' for {name}ForCausalLM, whose {name}Attention"
    ):
        tiny(torch.ones(1, 5, dtype=torch.long))


def test_module_without_source_is_let_pass(monkeypatch):
    """As classes from a notebook: they may well ask the interface."""
    monkeypatch.setitem(sys.modules, "no_source", ModuleType("no_source"))
    assert attention.why_not("no_source") is None and attention.why_not("not_there") is None


def test_class_of_a_user_is_known_by_its_parents(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_source", ModuleType("no_source"))
    mine: Any = type("Mine", (transformers.BloomModel,), {"__module__": "no_source"})
    with pytest.raises(ValueError, match="got 'saccade' for Mine, but"):
        attention.refuse_unless_asking(mine)
    fine: Any = type("Fine", (transformers.LlamaModel,), {"__module__": "no_source"})
    attention.refuse_unless_asking(fine)


def test_other_names_are_not_looked_at():
    assert attention.guard()
    tiny = transformers.BloomForCausalLM(transformers.BloomConfig(**NOT_ASKING["Bloom"]))
    assert tiny.get_correct_attn_implementation("eager") == "eager"
    assert PreTrainedModel.get_correct_attn_implementation.__name__.startswith("get_correct")


# ---- masks are no numbers ------------------------------------------------------------------------


def masks() -> dict[str, Any]:
    lazy: Any = integration.lazy_mask(2, 7, 7)
    return {"lazy": lazy, "slice": lazy[:, :, :, :7], "copied": lazy.clone()}


ROWS = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(0))
NUMBERS = {
    "added to": lambda mask: ROWS + mask,
    "added": lambda mask: mask + ROWS,
    "in place": lambda mask: ROWS.clone().add_(mask),
    "turned around": lambda mask: 1.0 - mask,
    "times": lambda mask: mask * torch.finfo(torch.float32).min,
    "baddbmm": lambda mask: torch.baddbmm(mask[:, 0], ROWS[:, 0], ROWS[:, 0]),
    "to a dtype": lambda mask: mask.to(torch.float32),
    "type_as": lambda mask: mask.type_as(ROWS),
    "copied": lambda mask: torch.empty(2, 3, 7, 7).copy_(mask),
    "less than": lambda mask: mask < 0,
    "equal to": lambda mask: mask == 0,
    "largest": lambda mask: torch.max(mask, ROWS),
    "fills what is visible": lambda mask: ROWS.masked_fill(mask, -1.0),
    "counted": lambda mask: mask.sum(-1),
    "a branch": lambda mask: torch.where(ROWS > 0, mask, 0.0),
    "filled with -inf": lambda mask: mask.masked_fill(ROWS[:, :1] > 0, -torch.inf),
    "joined to numbers": lambda mask: torch.cat([mask, ROWS[:, :1]], 1),
}
ASKED = {
    "where": lambda mask: torch.where(mask, ROWS, -1.0),
    "two numbers": lambda mask: torch.where(mask, 0.0, -1.0),
    "masked_fill": lambda mask: ROWS.masked_fill(~mask, -1.0),
    "in place": lambda mask: ROWS.clone().masked_fill_(~mask, -1.0),
    "sdpa": lambda mask: torch.nn.functional.scaled_dot_product_attention(
        ROWS, ROWS, ROWS, attn_mask=mask
    ),
    "index": lambda mask: ROWS[mask.expand(2, 3, 7, 7)],
    "any": lambda mask: torch.tensor([bool(mask.any()), bool(mask.all())]),
}
REMADE = {
    "slice": lambda mask: mask[:, 0, 2:, :5],
    "view": lambda mask: mask.reshape(2, -1, 49).unsqueeze(1),
    "repeat": lambda mask: mask.repeat_interleave(2, dim=0),
    "and": lambda mask: mask & (ROWS[:, :1] > 0),
    "or not": lambda mask: torch.logical_or(~mask, ROWS[:, :1] > 0),
    "joined": lambda mask: torch.cat([mask, torch.ones(2, mask.shape[1], 7, 2).bool()], -1),
    "padded": lambda mask: torch.nn.functional.pad(mask, (0, 2), value=False),
    "filled": lambda mask: mask.masked_fill(ROWS[:, :1] > 0, True),
    "branch": lambda mask: torch.where(ROWS[:, :1] > 0, mask, torch.tensor(False)),
    "turned": lambda mask: mask.expand(2, 4, 7, 7).transpose(1, 2).reshape(-1, 7)[:, None],
    "to bool": lambda mask: mask[:, :, 1:].to(torch.bool).contiguous(),
}


@pytest.fixture(params=["no mode", "inference mode"])
def mode(request) -> Iterator[None]:
    """In inference mode operators reach a mask whole that are otherwise made of others."""
    with torch.inference_mode(request.param == "inference mode"):
        yield


@pytest.mark.parametrize("which", masks())
@pytest.mark.parametrize("use", NUMBERS)
@pytest.mark.usefixtures("mode")
def test_mask_is_no_number(use, which):
    with pytest.raises(ValueError, match=r"got 'saccade' for no model, whose code computes with"):
        NUMBERS[use](masks()[which])


@pytest.mark.parametrize("which", masks())
@pytest.mark.parametrize("use", ASKED)
@pytest.mark.usefixtures("mode")
def test_mask_chooses_as_a_bool_tensor_does(use, which):
    mask = masks()[which]
    got, wanted = ASKED[use](mask), ASKED[use](mask.written_out())
    assert type(got) is Tensor and torch.equal(got, wanted)


@pytest.mark.parametrize("which", masks())
@pytest.mark.parametrize("use", REMADE)
@pytest.mark.usefixtures("mode")
def test_mask_of_a_mask_is_a_mask(use, which):
    mask = masks()[which]
    got = REMADE[use](mask)
    assert isinstance(got, MaskTensor)
    assert torch.equal(got.written_out(), REMADE[use](mask.written_out()))
    with pytest.raises(ValueError, match="computes with an attention mask"):
        torch.add(got, 1.0)


def test_copy_may_be_changed_in_place_and_nothing_else():
    lazy: Any = integration.lazy_mask(2, 7, 7)
    with pytest.raises(NotImplementedError, match="changes its argument in place"):
        lazy[:, :, :, 0] = False
    with pytest.raises(NotImplementedError, match="changes its argument in place"):
        lazy.unsqueeze(0).logical_not_()
    copied = lazy.clone()
    copied[:, :, :, 0] = False
    assert isinstance(copied, WrittenMask) and not bool(copied[..., 0].any())
    assert bool(lazy[..., 0].all())
    with pytest.raises(NotImplementedError, match="changes its argument in place"):
        copied.masked_fill_(torch.ones(7).bool(), -torch.inf)
    for addend in (0.0, -torch.inf, -1):
        with pytest.raises(ValueError, match=f"an entry of it that is set to {addend}"):
            copied[:, :, :, 1] = addend


def test_layers_attend_by_a_mask_that_was_sliced():
    layer = llama().model.layers[0].self_attn
    mask: Any = integration.lazy_mask(2, 7, 7)
    rows = ROWS[..., :4]
    wanted, _ = attention.attention_forward(layer, rows, rows, rows, mask)
    got, _ = attention.attention_forward(layer, rows, rows, rows, mask[:, :, :, :7].clone())
    torch.testing.assert_close(got, wanted)


# ---- what models say to their attention ----------------------------------------------------------

# How many rows there are, which saccade reads off tensors, and what it can do without.
HARMLESS = {"max_length_q", "max_length_k", "position_ids", "deterministic"}
LIBRARY = pathlib.Path(inspect.getfile(transformers)).parent / "models"
CALL = re.compile(r"\b(?:attention|attn)_(?:interface|function|fn)\((?=\s*self)")
EAGER = re.compile(r"^def eager_attention_forward\(", re.MULTILINE)


def parsed(source: str, start: int) -> ast.AST:
    """The call or the function that begins there."""
    depth, end = 0, source.index("(", start)
    while end == source.index("(", start) or depth:
        depth += {"(": 1, ")": -1}.get(source[end], 0)
        end += 1
    text = source[start:end]
    return ast.parse(text + ": ..." if text.startswith("def") else text).body[0]


def said() -> dict[str, set[str]]:
    """What any model passes to its attention by name, or expects there, and which models."""
    found: dict[str, set[str]] = {}
    for path in LIBRARY.glob("*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        for match in (*CALL.finditer(source), *EAGER.finditer(source)):
            begun = parsed(source, match.start())
            names = [
                each.arg for each in ast.walk(begun) if isinstance(each, ast.arg | ast.keyword)
            ]
            for name in names:
                found.setdefault(name or "**", set()).add(path.parent.name)
    return found


def test_everything_that_models_say_is_known():
    takes = set(inspect.signature(integration.attention_forward).parameters)
    packed = {"cu_seq_lens_q", "cu_seq_lens_k", "output_attentions"}
    known = takes | packed | set(attention.NOT_SERVED) | HARMLESS | {"**", "kwargs"}
    found = said()
    assert len(found["scaling"]) > 200
    assert {name: models for name, models in found.items() if name not in known} == {}


@pytest.mark.parametrize("name", attention.NOT_SERVED)
def test_sparse_layers_are_refused(name):
    integration.register()
    layer = llama().model.layers[0].self_attn
    told: dict[str, Any] = {name: torch.zeros(1)}
    with pytest.raises(ValueError, match=rf"{name}: got some from LlamaAttention, takes None"):
        attention.attention_forward(layer, ROWS, ROWS, ROWS, None, **told)
    assert AttentionInterface()["saccade"] is integration.attention_forward
