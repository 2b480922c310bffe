"""`saccade serve` as its clients see it: the official one, and sockets that stop halfway."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import saccade
from saccade.demo.model import ByteModel, DemoModelShape, export
from saccade.serving import command

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
servers = pytest.importorskip("saccade.serving.server")

KEY = "a secret"
SHAPE = DemoModelShape(32, 4, 2, 48, windows=(8, None), context=96)
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = ByteModel(SHAPE).eval()
    with torch.no_grad():
        model.embedding.weight *= 40  # or all logits are much alike
    return export(model, tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    found = command.load(folder, "cpu")
    found[1].chat_template = TEMPLATE
    return found


class Running:
    """A server that runs, and where."""

    def __init__(self, engine: Any, port: int, uvicorn_server: Any):
        self.engine, self.port, self.uvicorn_server = engine, port, uvicorn_server
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=60
        )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def post(self, path: str, body: bytes, key: str = KEY) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def wait_until_idle(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            held = self.engine.statistics()
            if (held.waiting, held.running, held.cache.used) == (0, 0, 0):
                return
            time.sleep(0.02)
        raise AssertionError(self.engine.statistics())


@contextmanager
def running(loaded: tuple[Any, Any], limits: Any = None, **options: Any) -> Iterator[Running]:
    engine = saccade.Engine(*loaded, **{"max_sequences": 8, "num_pages": 64, **options})
    server = servers.Server(
        engine, loaded[1], name="demo", api_key=KEY, limits=limits or servers.ServerLimits()
    )
    config = uvicorn.Config(server.app, port=0, log_level="error", ws="none", lifespan="on")
    made = uvicorn.Server(config)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        while not made.started:
            assert thread.is_alive()
            time.sleep(0.01)
        found = Running(engine, made.servers[0].sockets[0].getsockname()[1], made)
        with found.client:
            yield found
    finally:
        made.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        assert engine.statistics().cache.used == 0


@pytest.fixture(scope="module")
def server(loaded: tuple[Any, Any]) -> Iterator[Running]:
    with running(loaded) as made:
        yield made


def alone(loaded: tuple[Any, Any], prompt: Any, **options: Any) -> Any:
    return saccade.Engine(*loaded, num_pages=64).generate([prompt], **options)[0]


GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": 12, "temperature": 0}


def test_completions_are_the_engines_texts(server, loaded):
    found = server.client.completions.create(prompt=["def ", "the cat"], **GREEDY)
    wanted = [alone(loaded, text, max_new_tokens=12) for text in ("def ", "the cat")]
    assert [choice.text for choice in found.choices] == [each.text for each in wanted]
    assert [choice.finish_reason for choice in found.choices] == ["length"] * 2
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (11, 24)
    assert found.model == "demo" and found.id.startswith("cmpl-")


def test_streams_are_pieces_of_the_same(server):
    whole = server.client.completions.create(prompt="def ", **GREEDY)
    pieces = list(
        server.client.completions.create(
            prompt="def ", stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(p.choices[0].text for p in pieces[:-1]) == whole.choices[0].text
    assert [p.choices[0].finish_reason for p in pieces[:-1]][-1] == "length"
    assert pieces[-1].usage.completion_tokens == 12 and pieces[-1].choices == []


def test_chats_go_through_the_template(server, loaded):
    messages: Any = [{"role": "user", "content": "hello"}]
    found = server.client.chat.completions.create(messages=messages, **GREEDY)
    wanted = alone(loaded, "user: hello\nassistant: ", max_new_tokens=12).text
    assert found.choices[0].message.content == wanted
    assert found.choices[0].message.role == "assistant"
    pieces = list(server.client.chat.completions.create(messages=messages, stream=True, **GREEDY))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == wanted


def test_seeds_samples_and_ends(server, loaded):
    options: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 3}
    found = server.client.completions.create(prompt="ab", n=3, **options)
    sampling = {"max_new_tokens": 12, "temperature": 1.0}
    wanted = [alone(loaded, "ab", seed=3 + n, **sampling).text for n in range(3)]
    assert [choice.text for choice in found.choices] == wanted
    assert found.usage.prompt_tokens == 2
    text = alone(loaded, "def ", max_new_tokens=12).text
    stop = text[5]
    ended = server.client.completions.create(prompt="def ", stop=stop, **GREEDY).choices[0]
    assert (ended.text, ended.finish_reason) == (text[: text.index(stop)], "stop")


def test_log_probabilities_come_with_their_tokens(server, loaded):
    wanted = alone(loaded, "def ", max_new_tokens=12, logprobs=2)
    found = server.client.completions.create(prompt="def ", logprobs=2, **GREEDY)
    logprobs = found.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx([one.logprob for one in wanted.logprobs])
    assert all(1 <= len(each) <= 2 for each in logprobs.top_logprobs)  # bytes may look alike
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = server.client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=2, **GREEDY
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 12 and all(len(each.top_logprobs) == 2 for each in content)


def test_what_else_is_asked(server):
    assert json.loads(server.get("/health")) == {"status": "ok"}
    assert [model.id for model in server.client.models.list()] == ["demo"]
    assert server.client.models.retrieve("demo").id == "demo"
    text = server.get("/metrics")
    for line in ("saccade_running ", "saccade_new_tokens_total ", "saccade_request_seconds_count "):
        assert f"\n{line}" in text


def test_refusals_name_what_is_wrong(server):
    create = server.client.completions.create
    with pytest.raises(openai.NotFoundError, match="model: got 'other', takes 'demo'"):
        create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature: got -1") as refused:
        create(model="demo", prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="max_tokens: got 1000000 after"):
        create(model="demo", prompt="a", max_tokens=10**6)
    with pytest.raises(openai.BadRequestError, match="nonsense: is no field"):
        create(model="demo", prompt="a", extra_body={"nonsense": 1})
    with pytest.raises(openai.BadRequestError, match="n: got 9, takes at most max_sequences"):
        create(model="demo", prompt="a", n=9)
    most = server.engine.max_sequences + servers.ServerLimits().waiting
    with pytest.raises(openai.BadRequestError, match=rf"n: got .*, takes at most {most} at once"):
        create(model="demo", prompt=["a"] * 128, n=most)
    status, body = server.post("/v1/completions", b'{"prompt": "a", "\\ud800": 1}')
    assert status == 400 and "is no field" in body["error"]["message"]
    assert server.post("/v1/completions", b"{")[0] == 400
    assert server.post("/v1/completions", b"[" * 10_000)[0] == 400
    status, body = server.post("/v1/completions", b"{}", key="wrong")
    assert status == 401 and body["error"]["type"] == "authentication_error"
    status, body = server.post("/v1/completions", b" " * (2**20 + 1))
    assert status == 413 and "takes at most 1048576 bytes" in body["error"]["message"]


def test_too_many_wait_for_too_long(loaded):
    limits = servers.ServerLimits(waiting=1, seconds=0.2)
    with running(loaded, limits, max_sequences=2) as server:
        real = server.engine.step

        def slow() -> bool:
            time.sleep(0.3)
            return real()

        server.engine.step = slow
        with ThreadPoolExecutor(8) as pool:
            found = list(
                pool.map(lambda _: server.post("/v1/completions", b'{"prompt": "ab"}'), range(8))
            )
        assert {status for status, _ in found} == {429, 504}
        assert sum(status == 504 for status, _ in found) == 3
        server.engine.step = real
        server.wait_until_idle()


def connect(server: Running, sent: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    made.sendall(sent)
    return made


def asking(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_leaves_frees_its_pages(server, stream):
    body = b'{"prompt": "ab", "max_tokens": 80, "temperature": 0, "stream": %s}' % stream
    real, steps = server.engine.step, []

    def slow() -> bool:
        time.sleep(0.02)
        steps.append(1)
        return real()

    server.engine.step = slow
    try:
        made = connect(server, asking(body))
        while not steps:
            time.sleep(0.01)
        made.close()
        server.wait_until_idle()
        assert len(steps) < 60
    finally:
        server.engine.step = real


def test_sockets_that_stop_halfway_harm_nobody(server):
    whole = asking(b'{"prompt": "ab", "max_tokens": 4, "temperature": 0}')
    stopped = [connect(server, whole[:size]) for size in range(0, len(whole), 9)]
    assert server.client.completions.create(prompt="a", **GREEDY).choices[0].text
    for made in stopped:
        made.close()
    server.wait_until_idle()


def test_two_hundred_at_once(server, loaded):
    prompts = [f"{number}:" for number in range(200)]
    wanted = saccade.Engine(*loaded).generate(prompts, max_new_tokens=3)
    with ThreadPoolExecutor(200) as pool:
        found = list(
            pool.map(
                lambda prompt: server.post(
                    "/v1/completions",
                    json.dumps({"prompt": prompt, "max_tokens": 3, "temperature": 0}).encode(),
                ),
                prompts,
            )
        )
    assert [status for status, _ in found] == [200] * 200
    assert [body["choices"][0]["text"] for _, body in found] == [each.text for each in wanted]
    server.wait_until_idle()


def test_a_step_that_fails_once_is_taken_again_and_one_that_always_fails_is_answered(loaded):
    with running(loaded) as server:
        real, failures = server.engine.step, [1]

        def failing() -> bool:
            if failures and failures.pop():
                raise RuntimeError("out of luck")
            return real()

        server.engine.step = failing
        wanted = alone(loaded, "def ", max_new_tokens=12).text
        assert server.client.completions.create(prompt="def ", **GREEDY).choices[0].text == wanted

        broken = mock.patch.object(saccade, "attention_paged", side_effect=RuntimeError("no luck"))
        with broken, pytest.raises(openai.InternalServerError, match="the model failed: no luck"):
            server.client.completions.create(prompt="def ", **GREEDY)
        assert server.client.completions.create(prompt="def ", **GREEDY).choices[0].text == wanted


def test_stopping_answers_what_is_under_way(loaded):
    with running(loaded) as server, ThreadPoolExecutor(1) as pool:
        real = server.engine.step

        def slow() -> bool:
            time.sleep(0.05)
            return real()

        server.engine.step = slow
        answer = pool.submit(server.client.completions.create, prompt="def ", **GREEDY)
        while not server.engine.statistics().running:
            time.sleep(0.01)
        server.uvicorn_server.should_exit = True
        assert answer.result(60).choices[0].text == alone(loaded, "def ", max_new_tokens=12).text


def test_the_command_serves_until_it_is_interrupted(folder, loaded):
    ran = [sys.executable, "-m", "saccade", "serve", str(folder), "--port", "0", "--name", "m"]
    with subprocess.Popen(
        ran, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "SACCADE_API_KEY": KEY},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        said: list[str] = []
        try:
            for line in process.stderr:
                said.append(line)
                if "running on" in line:
                    break
            found = re.search(r"http://127.0.0.1:(\d+)", said[-1])
            assert found, said
            client = openai.OpenAI(base_url=f"{found[0]}/v1", api_key=KEY, max_retries=0)
            text = (
                client.completions.create(**{**GREEDY, "model": "m"}, prompt="def ").choices[0].text
            )
            assert text == alone(loaded, "def ", max_new_tokens=12).text
            assert any("decode steps run eagerly" in line for line in said)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (0, 130, -signal.SIGINT)
