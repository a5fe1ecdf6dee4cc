"""The server: models behind HTTP, by the original protocol and in batches (extra ``visdial``)."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchrl_lang.envs.visual_dialogue.dialogue import DialogueModels
from torchrl_lang.envs.visual_dialogue.model_queue import Questioner
from torchrl_lang.envs.visual_dialogue.protocol import ServerLimits
from torchrl_lang.envs.visual_dialogue.service import DialogueService
from torchrl_lang.envs.visual_dialogue.web import web_app, web_server

__all__ = ["DialogueServer"]

_BACKLOG = 1024
"""Connections that wait to be accepted."""


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
        limits: sizes beyond which requests are rejected.

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

    def __init__(
        self,
        models: DialogueModels,
        questioner: Questioner | None = None,
        *,
        name: str = "models",
        host: str = "127.0.0.1",
        port: int = 0,
        limits: ServerLimits | None = None,
    ) -> None:
        self.models, self.questioner, self.name = models, questioner, name
        self.host, self.port, self.limits = host, port, limits or ServerLimits()
        self._running: tuple[Any, threading.Thread, DialogueService] | None = None

    @property
    def url(self) -> str:
        """Address of the server that has been started."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        """Listen, and answer in a thread of its own."""
        service = DialogueService(self.models, self.questioner, name=self.name, limits=self.limits)
        try:
            server = web_server(web_app(service))
            listening = _listening(self.host, self.port)
        except (ImportError, OSError):
            service.close()
            raise
        self.port = listening.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="HTTP server")
        thread.start()
        self._running = server, thread, service

    def close(self) -> None:
        """Stop listening, answer the requests under way, and end."""
        if self._running is not None:
            server, thread, service = self._running
            server.should_exit = True
            thread.join()
            service.close()
            self._running = None

    def run(self, announce: Callable[[str], object]) -> None:
        """Serve until SIGTERM or SIGINT; ``announce`` is called with the address. For the main thread."""
        stops: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            stops.append(number)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with self:
                announce(self.url)
                while not stops:
                    time.sleep(0.1)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> DialogueServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only with its protocol named does asyncio set TCP_NODELAY, without which every small reply takes 40 ms longer.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name == "posix":  # a server that is started again gets its port back; on Windows it would share it
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from error
    return made
