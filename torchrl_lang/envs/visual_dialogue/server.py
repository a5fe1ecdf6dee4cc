"""The server: models behind HTTP, by the original protocol and in batches (extra ``visdial``)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from torchrl_lang._checks import Count, checked, needs_extra
from torchrl_lang.envs.visual_dialogue import protocol
from torchrl_lang.envs.visual_dialogue.dialogue import (
    Dialogue,
    DialogueModels,
    answer_and_score,
    last_round_rewards,
    measured,
)

_LOG = logging.getLogger(__name__)
_BACKLOG = 128
"""Connections that wait to be accepted; asyncio accepts as many at once, and logs each that it cannot."""
_SPARE_DESCRIPTORS = 2 * _BACKLOG
"""Of the process, beside those of connections."""
_HEADER_SECONDS = 30.0
_BODY_SECONDS = 30.0
_KEEP_ALIVE_SECONDS = 75
_SHUTDOWN_SECONDS = 30
_READ_TO_REJECT = 4
"""Multiple of the largest body that is read before it is rejected: a client that still sends reads no reply."""
_FORM = "application/x-www-form-urlencoded"
_NUMBER, _TEXTS = 32, 2**22
"""Bytes of an image feature, and of all texts of a request, at most."""
Questioner = Callable[[Sequence[Dialogue]], list[str]]
"""Asks the next question of each dialogue; it raises :class:`RequestError` for a dialogue that it cannot read."""


class _Work(NamedTuple):
    route: str
    batch: protocol.RequestBatch
    replies: Future[list[Any]]


class ModelQueue:
    """Runs the models for many requests, in one thread, in the order of their arrival.

    All requests that wait while the models are busy are answered next, those of one route as one batch. If a batch
    fails, its requests are answered one at a time, so that only those that are at fault fail.

    Args:
        models: that answer and guess.
        questioner: that asks, if any.
        size: requests that may wait.
        batch: dialogues at which a batch is full; the request that fills it is not split.
    """

    def __init__(self, models: DialogueModels, questioner: Questioner | None, *, size: int, batch: int = 256) -> None:
        self.models, self.questioner, self.batch = models, questioner, batch
        self.counts = Counter({"batches": 0, "dialogues": 0, "failures": 0})
        self._waiting: queue.Queue[_Work | None] = queue.Queue(size)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="visual dialogue models", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return self._waiting.qsize()

    def submit(self, route: str, batch: protocol.RequestBatch) -> Future[list[Any]]:
        """The replies to come, one a dialogue.

        Raises:
            RequestError: 503, if the queue is full.
        """
        work = _Work(route, batch, Future())
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            raise protocol.RequestError(503, f"{self._waiting.maxsize} requests wait: send it again later") from None
        return work.replies

    def close(self, timeout: float = 30.0) -> None:
        """Answer what waits, then stop."""
        with suppress(queue.Full):  # of models that hang, whose thread ends with the process
            self._waiting.put(None, timeout=timeout)
            self._thread.join(timeout)

    @torch.no_grad()
    def _run(self) -> None:
        while not self._ended:
            works = self._next()
            for route in dict.fromkeys(work.route for work in works):
                self._answer([work for work in works if work.route == route])

    def _next(self) -> list[_Work]:
        """All that waits, up to a full batch."""
        works: list[_Work] = []
        dialogues = 0
        while not works or (dialogues < self.batch and not self._waiting.empty()):
            work = self._waiting.get()
            if work is None:
                self._ended = True
                break
            if work.replies.set_running_or_notify_cancel():
                works.append(work)
                dialogues += len(work.batch.dialogues)
        return works

    def _answer(self, works: Sequence[_Work]) -> None:
        """Answer requests of one route together; if that fails, one at a time."""
        dialogues = [dialogue for work in works for dialogue in work.batch.dialogues]
        questions = [question for work in works for question in work.batch.questions]
        features = [work.batch.features for work in works if work.batch.features is not None]
        joined = protocol.RequestBatch(dialogues, questions, torch.cat(features) if features else None)
        self.counts.update(batches=1, dialogues=len(dialogues))
        try:
            replies = iter(self._replies(works[0].route, joined) if dialogues else [])
        except Exception as error:
            return self._fail(works, error)
        for work in works:
            work.replies.set_result([next(replies) for _ in work.batch.dialogues])

    def _fail(self, works: Sequence[_Work], error: Exception) -> None:
        """The client gets no more than that it failed; the reason is for the server's log."""
        work, *others = works
        if others:
            for each in works:
                self._answer([each])
            return
        if not isinstance(error, protocol.RequestError):
            self.counts["failures"] += 1
            _LOG.error("The models failed on a request of %s.", work.route, exc_info=error)
            error = protocol.RequestError(500, "the models failed on this request; the server's log has the reason")
        work.replies.set_exception(error)

    def _replies(self, route: str, batch: protocol.RequestBatch) -> list[Any]:
        """Replies that the protocol has; raises ValueError for others."""
        kind, (dialogues, questions, _) = protocol.ROUTES[route], batch
        features: Any = batch.features  # given where the route needs them, as its measure is
        measure: Any = kind.measure
        if kind.replies == "question" and self.questioner is None:
            raise protocol.RequestError(404, "this server has no questioner: start it with one")
        ways: dict[str, Callable[[], Any]] = {
            "question": lambda: self.questioner(dialogues),  # type: ignore[misc]
            "answer": lambda: self.models.answers(dialogues, questions, features),
            "step": lambda: zip(
                *answer_and_score(self.models, dialogues, questions, features, measure=measure), strict=True
            ),
            "reward": lambda: last_round_rewards(self.models, dialogues, features, measure=measure),
            "value": lambda: measured(self.models, dialogues, features, measure),
        }
        checked: list[Any] = protocol.REPLIES[route].validate_python(list(ways[kind.replies]()))
        if len(checked) != len(dialogues):
            raise ValueError(f"Expected {len(dialogues)} replies of the models, got {len(checked)}.")
        return checked


class DialogueServer:
    """Serves models, and possibly a questioner, over HTTP.

    The original protocol's routes take forms: ``/fetch_a_bot_response``, ``/fetch_q_bot_response``, ``/fetch_reward``,
    ``/fetch_reward_rank``, ``/step``, ``/step_rank``. ``/batch`` takes JSON with the name of one of these as ``route``,
    or ``distance`` or ``percentile``, and lists of their fields. GET ``/health`` describes the server. Errors are JSON,
    ``{"error": ..., "field": ...}``.

    Args:
        models: that answer and guess.
        questioner: a function from dialogues to their next questions.
        name: of the models, for ``/health``.
        host: address to listen on; the default is reachable from this machine alone.
        port: to listen on; 0 takes a free one.
        items: most dialogues of a batch; it also limits the bytes of a request.
        queue: requests that may wait for the models.

    Raises:
        ImportError: starlette or uvicorn is not installed.
        OSError: on the start, the address cannot be used.

    Examples:
        >>> import json, urllib.request
        >>> from torchrl_lang.envs.visual_dialogue import DialogueServer
        >>> class Models:
        ...     feature_size = 2
        >>> with DialogueServer(Models(), name="none") as server:
        ...     with urllib.request.urlopen(server.url + "/health") as reply:
        ...         print(json.load(reply)["model"])
        none
    """

    @checked
    def __init__(
        self,
        models: DialogueModels,
        questioner: Questioner | None = None,
        *,
        name: str = "models",
        host: str = "127.0.0.1",
        port: int = 0,
        items: Count = 64,
        queue: Count = 256,
    ) -> None:
        if not host:
            raise ValueError("host is empty: give an address to listen on, such as 127.0.0.1, or 0.0.0.0 for all.")
        self.models, self.questioner, self.name, self.host, self.port = models, questioner, name, host, port
        self.limits = {
            "body": _TEXTS + _NUMBER * items * models.feature_size,
            "items": items,
            "rounds": protocol.MOST_ROUNDS,
            "text": protocol.LONGEST_TEXT,
            "queue": queue,
        }
        self._counts = Counter({"requests": 0, "rejected": 0})
        self._began = 0.0
        self._running: tuple[Any, threading.Thread, ModelQueue] | None = None

    @property
    def url(self) -> str:
        """Address of the server that has been started."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        """Listen, and answer in a thread of its own."""
        server = self._web_server()
        listening = _listening(self.host, self.port)
        self.port, self._began = listening.getsockname()[1], time.monotonic()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="HTTP server")
        self._running = server, thread, ModelQueue(self.models, self.questioner, size=self.limits["queue"])
        thread.start()

    def close(self) -> None:
        """Stop listening, answer the requests under way, and end."""
        if self._running is not None:
            server, thread, models = self._running
            server.should_exit = True
            thread.join()
            models.close()
            self._running = None

    def run(self, announce: Callable[[str], object]) -> None:
        """Serve until SIGTERM or SIGINT; ``announce`` is called with the address. For the main thread."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # both raise KeyboardInterrupt
        with suppress(KeyboardInterrupt), self:
            announce(self.url)
            threading.Event().wait()
        signal.signal(signal.SIGTERM, before)

    def __enter__(self) -> DialogueServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _health(self) -> dict[str, Any]:
        waiting = self._running[2]  # type: ignore[index]
        return {
            "model": self.name,
            "feature_size": self.models.feature_size,
            "questioner": self.questioner is not None,
            "queue": len(waiting),
            "counts": {**self._counts, **waiting.counts},
            "limits": self.limits,
            "uptime": time.monotonic() - self._began,
        }

    async def _answer(self, route: str, content_type: str, chunks: AsyncIterable[bytes], declared: int) -> Any:
        """The content of the reply to a POST."""
        body = await self._body(declared, chunks)
        if route != protocol.BATCH and content_type.partition(";")[0].strip().lower() != _FORM:
            raise protocol.RequestError(415, f"must be a form, sent as {_FORM}", "body")
        sizes = {"items": self.limits["items"], "feature_size": self.models.feature_size}
        name, batch = await asyncio.to_thread(protocol.read_request, body, route, **sizes)
        replies = await asyncio.wrap_future(self._running[2].submit(name, batch))  # type: ignore[index]
        return replies if route == protocol.BATCH else replies[0]

    async def _body(self, declared: int, chunks: AsyncIterable[bytes]) -> bytes:
        """The body of a request, which must arrive in time."""
        body, size, largest = bytearray(), 0, self.limits["body"]
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for chunk in chunks:
                    size += len(chunk)
                    if max(size, declared) <= largest:
                        body += chunk
                    elif max(size, declared) > _READ_TO_REJECT * largest:
                        break
        except TimeoutError:
            raise protocol.RequestError(408, f"did not arrive within {_BODY_SECONDS:g} seconds", "body") from None
        if max(size, declared) > largest:
            raise protocol.RequestError(413, f"is larger than {largest} bytes", "body")
        return bytes(body)

    def _web_server(self) -> Any:
        with needs_extra("DialogueServer", "visdial"):
            import uvicorn
            from starlette.applications import Starlette
            from starlette.exceptions import HTTPException
            from starlette.requests import ClientDisconnect, Request
            from starlette.responses import JSONResponse
            from starlette.routing import Route

        def failure(status: int, message: str, field: str | None = None) -> JSONResponse:
            headers = {"retry-after": "1"} if status == 503 else {}
            return JSONResponse({"error": message, "field": field}, status, headers)

        def answering(route: str) -> Callable[[Request], Any]:
            async def answer(request: Request) -> JSONResponse:
                self._counts["requests"] += 1
                sent = request.headers
                given = sent.get("content-type", _FORM), request.stream(), int(sent.get("content-length", 0))
                return JSONResponse(await self._answer(route, *given))

            return answer

        async def health(request: Request) -> JSONResponse:
            return JSONResponse(self._health())

        async def rejected(request: Request, error: Any) -> JSONResponse:
            self._counts["rejected"] += error.status < 500
            return failure(error.status, str(error), error.field)

        async def no_route(request: Request, error: Any) -> JSONResponse:
            return failure(error.status_code, f"{request.method} {request.url.path}: {error.detail}")

        async def incomplete(request: Request, error: Exception) -> JSONResponse:
            return failure(400, "the body ended too early", "body")

        async def failed(request: Request, error: Exception) -> JSONResponse:
            _LOG.error("The server failed on a request of %s.", request.url.path, exc_info=error)
            return failure(500, "the server failed on this request")

        posts = [*(name for name, kind in protocol.ROUTES.items() if kind.replies != "value"), protocol.BATCH]
        routes = [Route("/health", health), *(Route(f"/{name}", answering(name), methods=["POST"]) for name in posts)]
        handlers: Any = {protocol.RequestError: rejected, HTTPException: no_route, ClientDisconnect: incomplete}
        app = Starlette(routes=routes, exception_handlers={**handlers, Exception: failed})
        app.router.redirect_slashes = False
        config = uvicorn.Config(
            app,
            http=_protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the server logs what matters
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        return uvicorn.Server(config)


def _protocol() -> Any:
    """The class by which uvicorn reads HTTP, with what it lacks.

    Headers must arrive in time, errors are JSON, clients that close their side before the reply get it, and connections
    beyond the descriptors of the process are closed.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    most = _most_connections()

    class Protocol(H11Protocol):
        late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.close()
            self.expect_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.late is not None:
                self.late.cancel()

        def expect_headers(self) -> None:
            """Bound the time until a request's headers are complete; further bytes of them do not extend it."""
            waits = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
            if waits and self.late is None:
                self.late = self.loop.call_later(_HEADER_SECONDS, self.transport.close)
            elif not waits and self.late is not None:
                self.late.cancel()
                self.late = None

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = json.dumps({"error": msg, "field": None}).encode()
                headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
                headers += [("connection", "close")]
                for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def eof_received(self) -> Any:
            """Whether a reply is still to come, so that the connection stays open."""
            begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
            if begun or self.conn.their_state is h11.SEND_BODY:
                self.send_400_response("The request ended too early.")
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering:
                self.cycle.keep_alive = False
            return answering

    return Protocol


def _most_connections() -> int:
    """Connections that leave the process spare descriptors."""
    if os.name != "posix":
        return 1 << 16
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(soft - _SPARE_DESCRIPTORS, 8) if soft != resource.RLIM_INFINITY else 1 << 16


def _listening(host: str, port: int) -> socket.socket:
    family, both = socket.AF_INET6 if ":" in host else socket.AF_INET, host == "::" and socket.has_dualstack_ipv6()
    try:
        made = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (TypeError, UnicodeError) as error:  # of a name that no host can have
        raise OSError(f"{host!r} is no address to listen on ({error}).") from error
    # Connections inherit it; without it every small reply takes 40 ms longer.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
