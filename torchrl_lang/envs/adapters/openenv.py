"""Environments of an OpenEnv server as games of ``TextGameEnv`` (extra ``openenv``)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import itemgetter
from typing import Any
from urllib.parse import urlsplit

from torchrl_lang._checks import needs_extra
from torchrl_lang._files import one_line, shorten

LARGEST_MESSAGE = 2**26


class OpenEnvGame:
    """An environment that a server offers by OpenEnv's WebSocket protocol, as a :class:`~torchrl_lang.envs.TextGame`.

    Every object is a session of its own: the server makes an environment for it when the first game begins. The server
    must allow as many sessions as the batch has rows. Requests are JSON, ``{"type": "reset", "data": {"seed": 3}}`` and
    ``{"type": "step", "data": action}``; answers have an observation, a reward and ``done``. A reward of null is 0. The
    protocol does not distinguish a limit from the end of the task, so ``done`` is ``terminated``.

    Seeds are sent with every reset. Whether they have an effect is the environment's concern; ``check_language_env``
    finds out.

    Args:
        url: address of the server: ``http://``, ``https://``, ``ws://`` or ``wss://``.
        observe: the field of an observation that has the text, or a function from an observation (a dict) to text.
        act: the field of an action that takes the utterance, or a function from an utterance to an action (a dict). It
            raises ``ValueError`` if the utterance is no action.
        invalid_reply, invalid_reward: result of an utterance that is no action by ``act`` or by the server's schema.
        reset_options: further arguments of the environment's reset.
        timeout: seconds to wait for a connection or an answer.

    Raises:
        ImportError: the package ``websockets`` is not installed.
        ConnectionError: on a turn, the server cannot be reached or does not answer in time.
        RuntimeError: on a turn, the server reports an error, its answer is none of the protocol, or no session has
            begun since the last error.
        KeyError: on a turn, the observation has no such field.

    Examples:
        >>> from torchrl_lang.envs import OpenEnvGame
        >>> OpenEnvGame("http://localhost:8000/", observe="echoed_message", act="message").url
        'ws://localhost:8000/ws'
    """

    def __init__(
        self,
        url: str,
        *,
        observe: str | Callable[[dict[str, Any]], str],
        act: str | Callable[[str], dict[str, Any]],
        invalid_reply: str = "That is not a valid action.",
        invalid_reward: float = 0.0,
        reset_options: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.url = re.sub("^http", "ws", url).rstrip("/") + "/ws"
        self.timeout, self.reset_options = timeout, dict(reset_options or {})
        self.observe = itemgetter(observe) if isinstance(observe, str) else observe
        self.act = (lambda text: {act: text}) if isinstance(act, str) else act
        self.invalid = invalid_reply, invalid_reward, False
        self._socket: Any = None

    def reset(self, seed: int) -> str:
        """Begin an episode with this seed, in a new session if there is none."""
        self._socket = self._socket or self._connected()
        answer = self._ask("reset", {**self.reset_options, "seed": seed}) or {}
        return self.observe(answer["observation"])

    def step(self, text: str) -> tuple[str, Any, bool]:
        """Send an utterance as an action."""
        if self._socket is None:
            raise RuntimeError(f"There is no session at {self.url}, or it has ended: call reset first.")
        answer = None
        with suppress(ValueError):
            answer = self._ask("step", self.act(text))
        if answer is None:
            return self.invalid
        return self.observe(answer["observation"]), answer.get("reward") or 0.0, answer.get("done", False)

    def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def _connected(self) -> Any:
        with needs_extra("OpenEnvGame", "openenv"):
            from websockets.sync.client import connect
        local = urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")
        try:
            return connect(self.url, open_timeout=self.timeout, max_size=LARGEST_MESSAGE, proxy=None if local else True)
        except Exception as error:
            raise ConnectionError(f"No OpenEnv server answers at {self.url}: {one_line(error)}") from error

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any] | None:
        """Send a message; returns the data of the observation, None if the server refuses an action by its schema."""
        try:
            with suppress(Exception):  # a server that refuses sends its reason, then closes
                self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=self.timeout))
        except Exception as error:
            self.close()  # a late answer must not be taken for that of the next message
            found = f"{type(error).__name__} {one_line(error)}"
            raise ConnectionError(f"{self.url} did not answer a {kind} in {self.timeout} s: {found}.") from error
        match answer:
            case {"type": "observation", "data": {"observation": dict()}}:
                return dict(answer["data"])
            case {"data": {"code": "VALIDATION_ERROR"}} if kind == "step":
                return None
        self.close()
        remedy = " Let it allow one session per row of the batch." * ("CAPACITY_REACHED" in str(answer))
        raise RuntimeError(f"{self.url} answered a {kind} with {shorten(answer, 300)}.{remedy}")
