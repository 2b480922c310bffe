"""What bodies ask for, and which are refused by the name of a field."""

import json
from typing import Any

import pytest
import served

from saccade.serving.openai_format import (
    Answer,
    Fields,
    News,
    RefusedError,
    Usage,
    read_chat,
    read_completion,
    refused_by_engine,
)
from saccade.serving.request import TokenLogprob


class ChatTokenizer(served.LetterTokenizer):
    chat_template: str | None = "a template"

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"{message['role'][0]}{message['content']}" for message in messages) + "a"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([1] if add_special_tokens else []) + super().encode(text)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([5, 6], [[5, 6]]), ([[5], [6]], [[5], [6]])],
)  # fmt: skip
def test_prompts_are_texts_or_tokens(prompt, prompts):
    assert read_completion({"prompt": prompt}).prompts == prompts


def test_a_body_says_what_the_engine_is_asked_for():
    asked = read_completion({
        "model": "m", "prompt": "a", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
        "min_p": 0.1, "n": 2, "best_of": 2, "seed": 4, "stop": ["x"], "stop_token_ids": [1],
        "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
        "logit_bias": {"7": -1}, "min_tokens": 2, "logprobs": 3, "stream": True,
        "stream_options": {"include_usage": True}, "user": "me", "suffix": None, "echo": False,
    })  # fmt: skip
    assert asked.options == {
        "max_new_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 4,
        "stop": ["x"], "stop_tokens": [1], "presence_penalty": 1, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "logit_bias": {7: -1}, "min_new_tokens": 2, "logprobs": 3,
    }  # fmt: skip
    assert (asked.n, asked.stream, asked.usage, asked.chat) == (2, True, True, False)


def test_what_is_left_out_is_what_clients_expect():
    asked = read_completion({"prompt": "a"})
    assert asked.options.get("max_new_tokens") == 16 and asked.options.get("temperature") == 1.0
    seeds = {read_completion({"prompt": "a"}).options.get("seed") for _ in range(4)}
    assert len(seeds) == 4
    chat = read_chat({"messages": [{"role": "user", "content": "b"}]}, ChatTokenizer())
    assert chat.options.get("max_new_tokens") is None and chat.options.get("logprobs") is None


def test_messages_become_the_tokens_of_the_template():
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": parts}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3}
    asked = read_chat(body, ChatTokenizer())
    assert asked.prompts == [served.LetterTokenizer().encode("saubca")]
    assert asked.options.get("logprobs") == 2 and asked.options.get("max_new_tokens") == 3


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ([], None, "body: got list, takes a JSON object"),
        ({}, "prompt", "prompt: got none"),
        ({"prompt": 5}, "prompt", "prompt: got int"),
        ({"prompt": []}, "prompt", "prompt: got 0 of them"),
        ({"prompt": ["a"] * 129}, "prompt", "prompt: got 129 of them, takes 1 to 128"),
        ({"prompt": ["a", 5]}, "prompt", "prompt: got a list of something else"),
        ({"prompt": [[1.5]]}, "prompt", "prompt: got a list of something else"),
        ({"prompt": "a", "temprature": 1}, "temprature", "temprature: is no field"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "temperature: got str"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "max_tokens: got bool"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "max_tokens: got float"),
        ({"prompt": "a", "echo": True}, "echo", "echo: got True, takes False"),
        ({"prompt": "a", "best_of": 3}, "best_of", "best_of: got 3, takes n, which is 1"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "logit_bias: got 'x', takes"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "takes str"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options", "x is not"),
        (
            {"prompt": "a", "stream": True, "stream_options": {"include_usage": "x"}},
            "stream_options",
            "stream_options.include_usage: got str, takes true or false",
        ),
    ],
)
def test_completions_that_are_refused(body, param, message):
    with pytest.raises(RefusedError, match=message) as refused:
        read_completion(body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages: got none"),
        ({"messages": ["hello"]}, r"messages\[0\]: takes an object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: got NoneType"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]},
         "takes a text, or parts of text"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 4,
          "max_completion_tokens": 2}, "got 2, takes max_tokens, which is 4"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "got half of a surrogate"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools: got"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "takes logprobs"),
        ({"messages": [{"role": "user", "content": "a"}],
          "response_format": {"type": "json_object"}}, "response_format: got"),
    ],
)  # fmt: skip
def test_chats_that_are_refused(body, message):
    with pytest.raises(RefusedError, match=message):
        read_chat(body, ChatTokenizer())


def test_errors_are_text_whatever_a_client_sends():
    with pytest.raises(RefusedError) as refused:
        read_completion({"prompt": "a", "\ud800": 1})
    said = json.dumps(refused.value.body, ensure_ascii=False).encode()
    assert b"\\\\ud800: is no field" in said


def test_a_tokenizer_without_a_template_chats_with_nobody():
    tokenizer = ChatTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RefusedError, match="has no chat template"):
        read_chat({"messages": [{"role": "user", "content": "a"}]}, tokenizer)


def test_errors_of_the_engine_name_the_clients_field():
    for said, param in (("max_new_tokens: got 0", "max_tokens"), ("stop: got", "stop"),
                        ("min_new_tokens: got -1", "min_tokens")):  # fmt: skip
        asked = read_completion({"prompt": "a"})
        found = refused_by_engine(ValueError(said), asked.sent)
        assert found.param == param and str(found).startswith(f"{param}: got")


@pytest.mark.parametrize(
    ("field", "option", "value"),
    [
        ("max_tokens", "max_new_tokens", 0), ("max_tokens", "max_new_tokens", 10**6),
        ("max_completion_tokens", "max_new_tokens", 0), ("min_tokens", "min_new_tokens", -1),
        ("stop_token_ids", "stop_tokens", [97]), ("stop_token_ids", "stop_tokens", ["x"]),
        ("top_logprobs", "logprobs", 21), ("top_p", "top_p", 7), ("logit_bias", "", {"97": 1}),
    ],
)  # fmt: skip
def test_the_engine_s_errors_speak_of_the_field_that_was_sent(field, option, value):
    body = {"messages": [{"role": "user", "content": "b"}], field: value, "logprobs": True}
    body.setdefault(field if option == "max_new_tokens" else "max_tokens", 4)
    asked = read_chat(body, ChatTokenizer())
    engine = served.engine(tokenizer=ChatTokenizer())
    with pytest.raises((TypeError, ValueError)) as refused:
        engine.submit_samples(asked.prompts[0], 1, **asked.options)
    found = refused_by_engine(refused.value, asked.sent)
    assert found.param == field and str(found).startswith(f"{field}: got")
    assert option == field or not option or option not in str(found).replace(field, "")


@pytest.mark.parametrize("token", ["x", "--7", "²", "", "1" * 30])
def test_biases_say_which_token_they_got(token):
    with pytest.raises(RefusedError) as refused:
        read_completion({"prompt": "a", "logit_bias": {token: 100}})
    assert str(refused.value) == f"logit_bias: got {token!r}, takes numbers by token"


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_has_its_offset_in_the_text_of_its_choice(stream):
    asked = read_completion({"prompt": "a", "logprobs": 0, "stream": stream, "n": 2})
    answer = Answer(asked, served.LetterTokenizer(), "m", "1", 0)
    logprobs = [TokenLogprob(token, -1.0, []) for token in (40, 2, 41, 42)]  # 2 has no text
    news = [[News(choice, "", 2, logprobs[:2], None), News(choice, "", 2, logprobs[2:], "length")]
            for choice in range(2)]  # fmt: skip
    if stream:
        pieces = [answer.piece(each) for pair in zip(*news, strict=True) for each in pair]
        found: list[list[int]] = [[], []]
        for piece in pieces:
            choice = piece["choices"][0]
            found[choice["index"]] += choice["logprobs"]["text_offset"]
    else:
        whole = answer.whole(news, Usage(1, 0, 8))
        found = [each["logprobs"]["text_offset"] for each in whole["choices"]]
    assert found == [[0, 1, 1, 2]] * 2


def test_null_is_as_if_left_out():
    fields = Fields({"a": None, "b": 1})
    assert fields.take("a", (int,), "a number", 7) == 7 and fields.take("b", (int,), "") == 1
    fields.finish()
