"""OpenAI format: what a body of its HTTP interface asks for, and what answers look like.

Nothing is taken in silence: a field that is not known, or asks for what is not served, is refused
by its name.

Source: OpenAI's API reference, completions and chat completions.
"""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from saccade.serving.decoding import Tokenizer
from saccade.serving.request import Prompt, RequestOptions, TokenLogprob, read_text
from saccade.serving.token_text import Offsets, text_of

LEAST_LOGPROB = -9999.0  # in the place of -inf, which JSON does not have
MOST_PROMPTS = 128  # of one body
# Fields that change nothing about what is generated.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls", "model",
}  # fmt: skip
# Fields that are taken only with these values.
ONLY: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"),
    "functions": ([],), "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
# What fields are called by the engine, whose errors name them.
OUR_NAMES = {
    "min_tokens": "min_new_tokens", "stop_token_ids": "stop_tokens", "temperature": "temperature",
    "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "repetition_penalty": "repetition_penalty",
}  # fmt: skip
REASONS = {"length": "length", "stop_token": "stop", "stop_string": "stop"}


class RefusedError(Exception):
    """A request that is not served: what the client is told.

    Attributes:
        status: of HTTP. param: the field that is at fault, or None.
    """

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

    @property
    def body(self) -> dict[str, Any]:
        """The error as clients know it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        about = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        about = {name: _in_utf8(each) for name, each in about.items()}
        return {"error": about}


def _in_utf8(value: Any) -> Any:
    """A text with halves of surrogate pairs, which a client may send, written out."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


class Asked(NamedTuple):
    """What one body asks for.

    Attributes:
        options: of `Engine.submit_samples`, n of them for each prompt.
        usage: whether a stream ends with counts.
        sent: the fields that gave options which have several names, by option.
    """

    chat: bool
    prompts: list[Prompt]
    n: int
    options: RequestOptions
    stream: bool
    usage: bool
    sent: Mapping[str, str]


class Fields:
    """The fields of a body, each of which must be taken."""

    def __init__(self, body: object):
        if not isinstance(body, Mapping):
            raise RefusedError(400, f"body: got {type(body).__name__}, takes a JSON object")
        self._body: Mapping[Any, Any] = body
        self._left = {name for name in body if body[name] is not None} - IGNORED

    def take(self, name: str, kinds: tuple[type, ...], takes: str, default: Any = None) -> Any:
        """A field's value; the default where it is left out, or null."""
        value = self._body.get(name)
        self._left.discard(name)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            got = type(value).__name__
            raise RefusedError(400, f"{name}: got {got}, takes {takes}", name)
        return value

    def finish(self) -> None:
        """Refuse what nobody took."""
        for name in sorted(map(str, self._left)):
            value = self._body[name]
            if name not in ONLY:
                raise RefusedError(400, f"{name}: is no field that is known here", name)
            if value not in ONLY[name]:
                only = " or ".join(map(repr, ONLY[name]))
                raise RefusedError(400, f"{name}: got {value!r}, takes {only}", name)


def read_completion(body: object) -> Asked:
    """What a body of /v1/completions asks for.

    Raises:
        RefusedError: naming the field, what it got and what it takes.
    """
    fields = Fields(body)
    prompt = fields.take("prompt", (str, list), "a text, tokens, or a list of these")
    if prompt is None:
        raise RefusedError(400, "prompt: got none, takes a text, tokens, or a list of these",
                           "prompt")  # fmt: skip
    several = [prompt]
    if isinstance(prompt, list) and not (prompt and _is_token(prompt[0])):
        several = prompt
    if not 1 <= len(several) <= MOST_PROMPTS:
        got = len(several)
        raise RefusedError(400, f"prompt: got {got} of them, takes 1 to {MOST_PROMPTS}", "prompt")
    for each in several:
        if not isinstance(each, str) and not (isinstance(each, list) and all(map(_is_token, each))):
            raise RefusedError(400, "prompt: got a list of something else, takes texts or tokens",
                               "prompt")  # fmt: skip
    most = fields.take("max_tokens", (int,), "a whole number", 16)
    logprobs = fields.take("logprobs", (int,), "a whole number")
    sent = {"max_new_tokens": "max_tokens"}
    return _asked(fields, False, several, {"max_new_tokens": most, "logprobs": logprobs}, sent)


def read_chat(body: object, tokenizer: Any) -> Asked:
    """What a body of /v1/chat/completions asks for; its prompt is made by the chat template.

    Raises:
        RefusedError: naming the field, what it got and what it takes.
    """
    fields = Fields(body)
    messages = fields.take("messages", (list,), "a list of messages")
    if not messages:
        raise RefusedError(400, "messages: got none, takes at least one", "messages")
    texts = [_message(number, message) for number, message in enumerate(messages)]
    if not getattr(tokenizer, "chat_template", None):
        raise RefusedError(
            400, "messages: this model's tokenizer has no chat template; /v1/completions takes a "
            "prompt", "messages",
        )  # fmt: skip
    try:
        text = tokenizer.apply_chat_template(texts, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever a template raises
        raise RefusedError(
            400, f"messages: the chat template fails ({error})", "messages"
        ) from error
    try:
        text = read_text("messages", text)
    except ValueError as error:
        raise RefusedError(400, str(error), "messages") from None
    tokens = list(tokenizer.encode(text, add_special_tokens=False))  # the template has its own
    by_name = {
        name: fields.take(name, (int,), "a whole number")
        for name in ("max_tokens", "max_completion_tokens")
    }
    name = "max_completion_tokens" if by_name["max_tokens"] is None else "max_tokens"
    most, other = by_name[name], by_name["max_completion_tokens"]
    if other is not None and other != most:
        raise RefusedError(
            400, f"max_completion_tokens: got {other}, takes max_tokens, which is {most}",
            "max_completion_tokens",
        )  # fmt: skip
    wanted = fields.take("logprobs", (bool,), "true or false", False)
    likeliest = fields.take("top_logprobs", (int,), "a whole number")
    if likeliest is not None and not wanted:
        raise RefusedError(400, "top_logprobs: takes logprobs: true beside it", "top_logprobs")
    given = {"max_new_tokens": most, "logprobs": (likeliest or 0) if wanted else None}
    sent = {"max_new_tokens": name, "logprobs": "top_logprobs", "prompt": "messages"}
    return _asked(fields, True, [tokens], given, sent)


def _message(number: int, message: object) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RefusedError(400, f"{where}: takes an object with a role and a content", "messages")
    content: Any = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping)]
        parts = [part.get("text") for part in parts if part.get("type", "text") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) != len(content):
            raise RefusedError(400, f"{where}.content: takes a text, or parts of text", "messages")
        content = "".join(texts)
    if not isinstance(content, str):
        got = type(content).__name__
        raise RefusedError(400, f"{where}.content: got {got}, takes a text", "messages")
    return {**message, "content": content}


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _asked(
    fields: Fields, chat: bool, prompts: list[Prompt], given: Mapping[str, int | None],
    sent: Mapping[str, str],
) -> Asked:  # fmt: skip
    number, whole = "a number", "a whole number"
    options: dict[str, Any] = {**given}
    options["temperature"] = fields.take("temperature", (int, float), number, 1.0)
    for name, ours in OUR_NAMES.items():
        if name in ("min_tokens", "top_k"):
            value = fields.take(name, (int,), whole)
        elif name == "stop_token_ids":
            value = fields.take(name, (list,), "a list of tokens")
        else:
            value = fields.take(name, (int, float), number, options.get(ours))
        if value is not None:
            options[ours] = value
    stop = fields.take("stop", (str, list), "a text, or a list of texts")
    if stop is not None:
        options["stop"] = stop
    biases = fields.take("logit_bias", (dict,), "numbers by token", {})
    for token in biases:
        if not re.fullmatch("-?[0-9]{1,18}", token):
            raise RefusedError(400, f"logit_bias: got {token!r}, takes numbers by token",
                               "logit_bias")  # fmt: skip
    options["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    seed = fields.take("seed", (int,), whole)
    options["seed"] = int.from_bytes(os.urandom(8), "little") if seed is None else seed
    n = fields.take("n", (int,), whole, 1)
    best_of = fields.take("best_of", (int,), whole, n)
    if best_of != n:
        raise RefusedError(400, f"best_of: got {best_of}, takes n, which is {n}", "best_of")
    stream = fields.take("stream", (bool,), "true or false", False)
    about = fields.take("stream_options", (dict,), "an object", {})
    if not stream and about:
        raise RefusedError(400, "stream_options: takes stream: true beside it", "stream_options")
    for name, value in about.items():
        if name not in ("include_usage", "include_obfuscation"):
            raise RefusedError(400, f"stream_options: {name} is not known here", "stream_options")
        if not (value is None or isinstance(value, bool)):
            got = f"got {type(value).__name__}, takes true or false"
            raise RefusedError(400, f"stream_options.{name}: {got}", "stream_options")
    fields.finish()
    asked: Any = options
    return Asked(chat, prompts, n, asked, stream, bool(about.get("include_usage")), sent)


def refused_by_engine(error: Exception, sent: Mapping[str, str]) -> RefusedError:
    """An error of `Engine.submit`, whose text begins with the argument, in the client's words.

    sent: what the client called arguments that have several names, as `Asked.sent`.
    """
    said = str(error)
    name = said.partition(":")[0]
    theirs = {ours: field for field, ours in OUR_NAMES.items()} | dict(sent)
    for ours, field in theirs.items():
        anywhere = "_" in ours  # "prompt" is a word of its own
        said = re.sub(rf"(?<!\w){ours}(?!\w)" if anywhere else rf"^{ours}(?=:)", field, said)
    return RefusedError(400, said, theirs.get(name, name))


# ---- answers -------------------------------------------------------------------------------------


class News(NamedTuple):
    """What came of one choice since the last time.

    Attributes:
        tokens: how many. logprobs: of these, where they are wanted.
        reason: why nothing more comes; None before that.
    """

    choice: int
    text: str
    tokens: int
    logprobs: Sequence[TokenLogprob]
    reason: str | None
    error: BaseException | None = None


@dataclass(frozen=True)
class Usage:
    """How many tokens were read, found in the cache, and written."""

    prompt: int
    cached: int
    written: int

    @property
    def body(self) -> dict[str, Any]:
        """The counts as clients know them."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answer:
    """The bodies of one answer, in one piece or as a stream.

    Args:
        name: of the model. number, created: what clients tell answers apart by.
    """

    def __init__(self, asked: Asked, tokenizer: Tokenizer, name: str, number: str, created: int):
        self._asked, self._tokenizer = asked, tokenizer
        prefix, kind = (
            ("chatcmpl", "chat.completion") if asked.chat else ("cmpl", "text_completion")
        )
        if asked.chat and asked.stream:
            kind += ".chunk"
        self._text_of = functools.cache(functools.partial(text_of, tokenizer))
        # Of each choice's text, where its tokens begin.
        self._offsets = defaultdict[int, Offsets](lambda: Offsets(self._shown, self._text_of))
        self._head = {
            "id": f"{prefix}-{number}", "object": kind, "created": created, "model": name,
        }  # fmt: skip

    def whole(self, news: Iterable[Sequence[News]], usage: Usage) -> dict[str, Any]:
        """The answer in one piece, from all that came of each choice."""
        choices = []
        for index, of_choice in enumerate(news):
            text = "".join(each.text for each in of_choice)
            logprobs = [one for each in of_choice for one in each.logprobs]
            choice = {"index": index, "logprobs": self._logprobs(index, logprobs)}
            if self._asked.chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            choices.append({**choice, "finish_reason": REASONS.get(of_choice[-1].reason or "")})
        return {**self._head, "choices": choices, "usage": usage.body}

    def first(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before anything has come."""
        if not self._asked.chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._piece({"index": index, "delta": delta, "logprobs": None,
                            "finish_reason": None})  # fmt: skip

    def piece(self, news: News) -> dict[str, Any]:
        """A piece of a stream."""
        logprobs = self._logprobs(news.choice, news.logprobs)
        choice: dict[str, Any] = {"index": news.choice, "logprobs": logprobs}
        if self._asked.chat:
            choice["delta"] = {"content": news.text} if news.text else {}
        else:
            choice["text"] = news.text
        return self._piece({**choice, "finish_reason": REASONS.get(news.reason or "")})

    def last(self, usage: Usage) -> dict[str, Any] | None:
        """What a stream ends with, if counts are wanted."""
        if not self._asked.usage:
            return None
        return {**self._head, "choices": [], "usage": usage.body}

    def _piece(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._asked.usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        if self._asked.chat:
            return {
                "content": [
                    self._entry(one.token, one.logprob)
                    | {"top_logprobs": [self._entry(*each) for each in one.likeliest]}
                    for one in logprobs
                ]
            }
        return {
            "tokens": [self._name(one.token) for one in logprobs],
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [
                {self._name(token): _finite(logprob) for token, logprob in one.likeliest}
                for one in logprobs
            ],
            "text_offset": [self._offsets[index].add(one.token) for one in logprobs],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        found = self._text_of(token)
        of_bytes = None if found.data is None else list(found.data)
        return {"token": found.escaped, "logprob": _finite(logprob), "bytes": of_bytes}

    def _shown(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=True)

    def _name(self, token: int) -> str:
        """A token where it stands without its bytes; parts of characters are told apart."""
        found = self._text_of(token)
        return found.text if found.escaped == found.text else f"bytes:{found.escaped}"


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
