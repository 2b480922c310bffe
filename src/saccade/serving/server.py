"""Server: OpenAI's HTTP interface over an engine, which one thread drives.

That thread takes steps as long as anybody waits, and hands what came to the tasks that answer
clients. A client that leaves, and a request whose time is over, is cancelled between two steps, and
its pages are free.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from saccade.serving.engine import Engine
from saccade.serving.openai_format import (
    Answer,
    Asked,
    News,
    RefusedError,
    Usage,
    read_chat,
    read_completion,
    refused_by_engine,
)
from saccade.serving.request import Completion

log = logging.getLogger("saccade.server")
LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


class ServerLimits(NamedTuple):
    """What a server takes.

    Attributes:
        body: bytes of a request. waiting: choices that wait beside those that run.
        seconds: that a request may take.
    """

    body: int = 2**20
    waiting: int = 256
    seconds: float = 600.0


class Served:
    """One choice that a client waits for."""

    def __init__(self, index: int, completion: Completion):
        self.index, self.completion = index, completion
        self.inbox: asyncio.Queue[News] | None = None


class Driver:
    """The thread that takes an engine's steps."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Condition()
        self._arrived: deque[list[Served]] = deque()
        self._left: deque[Served] = deque()
        self._served: list[Served] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="saccade-engine", daemon=True)
        self.unfinished = 0  # choices that were taken and not left; the event loop's own count
        self.failure: Exception | None = None  # since which nothing is served
        self.when_failed: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin, from the event loop that answers."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End, with all that are still served."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def serve(self, served: list[Served]) -> asyncio.Queue[News]:
        """Hand in choices; what comes of them comes through a queue."""
        inbox: asyncio.Queue[News] = asyncio.Queue()
        for each in served:
            each.inbox = inbox
        with self._wake:
            if self.failure is None:
                self._arrived.append(served)
                self._wake.notify()
            else:
                for each in served:
                    inbox.put_nowait(_failed(each, self.failure))
        return inbox

    def leave(self, served: Sequence[Served]) -> None:
        """Nobody waits for these any more."""
        self.unfinished -= len(served)
        with self._wake:
            self._left.extend(served)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._arrived or self._left or self._served or self._stopping):
                    self._wake.wait()
                while self._arrived:
                    self._served += self._arrived.popleft()
                left = {self._left.popleft() for _ in range(len(self._left))}
            try:
                if self._stopping:
                    left |= set(self._served)
                for each in left:
                    each.completion.cancel()
                self._served = [each for each in self._served if each not in left]
                if self._stopping:
                    return
                self.engine.step()
            except Exception as error:
                if self.engine.failure:
                    self._give_up(error)
                    return
                log.exception("a step failed")  # the engine ends those at fault
            self._hand_out()

    def _give_up(self, error: Exception) -> None:
        """Answer everybody with the error: a rank has failed, and no step can be taken."""
        log.error("%s", error)
        with self._wake:
            self.failure = error
            while self._arrived:
                self._served += self._arrived.popleft()
        self._send([(each, _failed(each, error)) for each in self._served])
        self._served = []
        self.when_failed()

    def _hand_out(self) -> None:
        came: list[tuple[Served, News]] = []
        for each in self._served:
            fresh = each.completion.fresh()
            if fresh.tokens or fresh.text or fresh.reason is not None:
                came.append((each, News(each.index, *fresh)))
        if came:
            self._served = [each for each in self._served if not each.completion.done]
            self._send(came)

    def _send(self, came: list[tuple[Served, News]]) -> None:
        def deliver() -> None:
            for each, news in came:
                assert each.inbox is not None  # it was handed in
                each.inbox.put_nowait(news)

        assert self._loop is not None  # it was started
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(deliver)


def _failed(served: Served, error: Exception) -> News:
    return News(served.index, "", 0, (), "error", error)


class Meter:
    """What /metrics tells beside the engine's own counts."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()
        self._times: dict[str, list[float]] = {"time_to_first_token": [], "request": []}
        self._buckets = {name: [0] * len(LATENCIES) for name in self._times}
        self._sums = dict.fromkeys(self._times, 0.0)
        self._counts = dict.fromkeys(self._times, 0)

    def add(self, name: str, seconds: float) -> None:
        """One more time."""
        self._sums[name] += seconds
        self._counts[name] += 1
        for number, most in enumerate(LATENCIES):
            self._buckets[name][number] += seconds <= most

    def text(self, engine: Engine, unfinished: int) -> str:
        """All of it in Prometheus' text format."""
        found = engine.statistics()
        gauges = {
            "running": found.running, "waiting": found.waiting, "unfinished": unfinished,
            "pages": found.pages, "pages_used": found.cache.used, "pages_idle": found.cache.idle,
            "states": found.states, "states_used": found.cache.states_used,
        }  # fmt: skip
        counters = {
            "steps": found.steps, "prompt_tokens": found.prompt_tokens,
            "cached_tokens": found.cached_tokens, "new_tokens": found.new_tokens,
            "preemptions": found.preemptions, "requests_done": found.done,
        }  # fmt: skip
        lines = []
        for name, value in gauges.items():
            lines += [f"# TYPE saccade_{name} gauge", f"saccade_{name} {value}"]
        for name, value in counters.items():
            lines += [f"# TYPE saccade_{name}_total counter", f"saccade_{name}_total {value}"]
        lines.append("# TYPE saccade_answers_total counter")
        for status, count in sorted(self.answers.items()):
            lines.append(f'saccade_answers_total{{status="{status}"}} {count}')
        for name in self._times:
            full = f"saccade_{name}_seconds"
            lines.append(f"# TYPE {full} histogram")
            for most, count in zip(LATENCIES, self._buckets[name], strict=True):
                lines.append(f'{full}_bucket{{le="{most}"}} {count}')
            lines.append(f'{full}_bucket{{le="+Inf"}} {self._counts[name]}')
            lines += [f"{full}_sum {self._sums[name]}", f"{full}_count {self._counts[name]}"]
        return "\n".join(lines) + "\n"


class Server:
    """An engine behind OpenAI's interface.

    Args:
        engine: with a tokenizer.
        name: of the model, as clients ask for it.
        api_key: that clients must give; None takes everybody.

    Attributes:
        app: the ASGI application.
        driver: the thread that takes the engine's steps.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, *, name: str, api_key: str | None,
        limits: ServerLimits,
    ):  # fmt: skip
        self._engine, self._tokenizer, self._name = engine, tokenizer, name
        self._api_key, self._limits = api_key, limits
        self.driver, self._meter, self._created = Driver(engine), Meter(), int(time.time())
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{name:path}", self._guarded(self._model)),
                Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.driver.start()
        yield
        await run_in_threadpool(self.driver.stop)

    def _guarded(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """A handler for those who have the key, whose refusals are answers."""

        async def answer(request: Request) -> Response:
            try:
                self._check_key(request)
                response: Response = await handler(request)
            except RefusedError as error:
                headers = {"Retry-After": "1"} if error.status == 429 else None
                response = JSONResponse(error.body, error.status, headers)
            except ClientDisconnect:
                response = Response(status_code=499)  # which nobody reads
            self._meter.answers[response.status_code] += 1
            return response

        return answer

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._api_key}".encode()):
            raise RefusedError(401, "authorization: takes Bearer and this server's API key")

    # ---- what is asked ---------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        text = await run_in_threadpool(self._meter.text, self._engine, self.driver.unfinished)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._name, "object": "model", "created": self._created, "owned_by": "saccade",
        }  # fmt: skip

    def _check_model(self, name: object) -> None:
        if name is not None and name != self._name:
            raise RefusedError(404, f"model: got {name!r}, takes {self._name!r}", "model")

    async def _completions(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._answer(request, await run_in_threadpool(read_completion, body))

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        asked = await run_in_threadpool(read_chat, body, self._tokenizer)
        return await self._answer(request, asked)

    async def _body(self, request: Request) -> Any:
        most, size, parts = self._limits.body, 0, []
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise RefusedError(413, f"body: takes at most {most} bytes")
            parts.append(part)
        try:
            body = json.loads(b"".join(parts))
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"body: is no JSON ({error})") from None
        if isinstance(body, dict):
            self._check_model(body.get("model"))
        return body

    # ---- answers ---------------------------------------------------------------------------------

    async def _answer(self, request: Request, asked: Asked) -> Response:
        wanted = len(asked.prompts) * asked.n
        most = self._engine.max_sequences + self._limits.waiting
        if wanted > most:
            name = "n" if asked.n > 1 else "prompt"
            got = f"got {wanted} choices ({len(asked.prompts)} prompts, n is {asked.n})"
            raise RefusedError(400, f"{name}: {got}, takes at most {most} at once", name)
        if self.driver.unfinished + wanted > most:
            raise RefusedError(429, f"too many requests: {most} choices at once are served")
        self.driver.unfinished += wanted
        try:
            served = await run_in_threadpool(self._submit, asked)
        except BaseException:
            self.driver.unfinished -= wanted
            raise
        answer = Answer(asked, self._tokenizer, self._name, uuid.uuid4().hex, int(time.time()))
        news = self._news(request, len(served), self.driver.serve(served))
        if asked.stream:
            events = self._stream(answer, asked, served, news)
            return EventStream(events, lambda: self.driver.leave(served))
        try:
            came: list[list[News]] = [[] for _ in served]
            async for each in news:
                if each.error is not None:
                    raise RefusedError(500, f"the model failed: {each.error}")
                came[each.choice].append(each)
        finally:
            self.driver.leave(served)
        return JSONResponse(answer.whole(came, self._usage(asked, served)))

    def _submit(self, asked: Asked) -> list[Served]:
        completions: list[Completion] = []
        try:
            for prompt in asked.prompts:
                completions += self._engine.submit_samples(prompt, asked.n, **asked.options)
        except (TypeError, ValueError) as error:
            for completion in completions:
                completion.cancel()
            raise refused_by_engine(error, asked.sent) from error
        return [Served(index, completion) for index, completion in enumerate(completions)]

    async def _news(
        self, request: Request, unfinished: int, inbox: asyncio.Queue[News]
    ) -> AsyncIterator[News]:
        """What comes of choices, until all have ended, the client has left or time is over."""
        begin, first = time.perf_counter(), True
        gone = asyncio.ensure_future(_has_left(request))
        try:
            while unfinished:
                coming = asyncio.ensure_future(inbox.get())
                left = self._limits.seconds - (time.perf_counter() - begin)
                await asyncio.wait(
                    {coming, gone}, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED
                )
                if not coming.done():
                    coming.cancel()
                    if gone.done():
                        raise ClientDisconnect
                    most = self._limits.seconds
                    raise RefusedError(504, f"time: a request may take {most:g} seconds here")
                news = coming.result()
                if first:
                    self._meter.add("time_to_first_token", time.perf_counter() - begin)
                    first = False
                unfinished -= news.reason is not None
                yield news
            self._meter.add("request", time.perf_counter() - begin)
        finally:
            gone.cancel()

    async def _stream(
        self, answer: Answer, asked: Asked, served: list[Served], news: AsyncIterator[News]
    ) -> AsyncIterator[str]:
        for each in served:
            first = answer.first(each.index)
            if first is not None:
                yield _event(first)
        try:
            async for each in news:
                if each.error is not None:
                    raise RefusedError(500, f"the model failed: {each.error}")
                if each.text or each.reason is not None or each.logprobs:
                    yield _event(answer.piece(each))
        except RefusedError as error:
            yield _event(error.body)
            return
        last = answer.last(self._usage(asked, served))
        if last is not None:
            yield _event(last)
        yield "data: [DONE]\n\n"

    @staticmethod
    def _usage(asked: Asked, served: list[Served]) -> Usage:
        """Counts of all choices; those of one prompt read it once."""
        found = [each.completion.statistics for each in served]
        of_prompts = found[:: asked.n]
        return Usage(
            sum(each.prompt_tokens for each in of_prompts),
            sum(each.cached_tokens for each in of_prompts),
            sum(each.new_tokens for each in found),
        )


class EventStream(Response):
    """Server-sent events.

    Args:
        leave: called in the end, whether all were sent or the client has left.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._leave = events, leave

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send all events."""
        start = {"type": "http.response.start", "status": self.status_code}
        events: Any = self._events
        try:
            await send({**start, "headers": self.raw_headers})
            async for event in events:
                body = {"type": "http.response.body", "body": event.encode(), "more_body": True}
                await send(body)
            await send({"type": "http.response.body", "body": b""})
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._leave()
            await events.aclose()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _has_left(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


STARTUP_FAILURE = 3  # uvicorn's own exit status
SHUTDOWN_SECONDS = 60  # that requests under way may take once the server is asked to stop


def run(server: Server, host: str, port: int) -> None:
    """Serve until a signal asks to stop: what is under way is answered first.

    Raises:
        RuntimeError: where a rank has failed; everybody was answered so.
    """
    import uvicorn

    config = uvicorn.Config(
        server.app, host=host, port=port, log_level="info",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )  # fmt: skip
    running = uvicorn.Server(config)

    def stop() -> None:
        running.should_exit = True

    server.driver.when_failed = stop
    # uvicorn raises a signal again once everything is answered; what comes after that, as telling
    # other ranks of the end, is still to be done.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        running.run()
    signal.signal(signal.SIGTERM, before)
    if server.driver.failure is not None:
        raise RuntimeError(str(server.driver.failure)) from server.driver.failure
    if not running.started:
        sys.exit(STARTUP_FAILURE)
