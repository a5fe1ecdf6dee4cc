"""Environments of an OpenEnv server as games of ``TextGameEnv`` (extra ``openenv``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

from torchrl_lang._files import one_line, shorten

__all__ = ["OpenEnvGame"]

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
        RuntimeError: on a turn, the server reports an error, or its answer is none of the protocol.
        TypeError: on a turn, the observation is not a text.

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
        parts = urlsplit(url)
        schemes = {"http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}
        if parts.scheme not in schemes or not parts.hostname:
            raise ValueError(
                f"Expected the address of an OpenEnv server, such as 'http://localhost:8000', got {url!r}."
            )
        self.url = parts._replace(scheme=schemes[parts.scheme], path=parts.path.rstrip("/") + "/ws").geturl()
        self.observe, self.act, self.timeout = observe, act, timeout
        self.invalid_reply, self.invalid_reward = invalid_reply, invalid_reward
        self.reset_options = dict(reset_options or {})
        self._socket: Any = None

    def reset(self, seed: int) -> str:
        """Begin an episode with this seed, in a new session if there is none."""
        if self._socket is None:
            self._connect()
        answer = self._ask({"type": "reset", "data": {**self.reset_options, "seed": seed}})
        return self._text(answer)

    def step(self, text: str) -> tuple[str, Any, bool]:
        """Send an utterance as an action."""
        try:
            action = {self.act: text} if isinstance(self.act, str) else self.act(text)
        except ValueError:
            return self.invalid_reply, self.invalid_reward, False
        answer = self._ask({"type": "step", "data": action}, refusable=True)
        if answer is None:
            return self.invalid_reply, self.invalid_reward, False
        reward = answer.get("reward")
        return self._text(answer), 0.0 if reward is None else reward, answer.get("done", False)

    def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def _connect(self) -> None:
        try:
            from websockets.sync.client import connect
        except ImportError as error:
            raise ImportError("OpenEnvGame needs websockets: pip install 'torchrl-lang[openenv]'.") from error
        local = urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")
        proxy: Literal[True] | None = None if local else True
        try:
            self._socket = connect(self.url, open_timeout=self.timeout, max_size=LARGEST_MESSAGE, proxy=proxy)
        except Exception as error:
            raise ConnectionError(f"No OpenEnv server answers at {self.url}: {one_line(error)}") from error

    def _ask(self, message: dict[str, Any], *, refusable: bool = False) -> Any:
        """Send a message; returns the answer's data, or None if the server refuses an action by its schema."""
        if self._socket is None:
            raise RuntimeError(f"There is no session with {self.url}: call reset first.")
        from websockets.exceptions import ConnectionClosed  # a session has it

        try:
            with suppress(OSError, EOFError, ConnectionClosed):  # a server that refuses sends its reason, then closes
                self._socket.send(json.dumps(message))
            answer = json.loads(self._socket.recv(timeout=self.timeout))
        except Exception as error:
            self.close()  # a late answer must not be taken for that of the next message
            raise ConnectionError(
                f"{self.url} did not answer a {message['type']} within {self.timeout} s: {type(error).__name__} "
                f"{one_line(error)} The next reset begins a new session."
            ) from error
        data = answer.get("data") if isinstance(answer, dict) else None
        if isinstance(data, dict) and answer.get("type") == "observation":
            return data
        code = data.get("code") if isinstance(data, dict) else None
        if refusable and code == "VALIDATION_ERROR":
            return None
        self.close()
        remedy = " Let it allow one session per row of the batch." if code == "CAPACITY_REACHED" else ""
        raise RuntimeError(f"{self.url} answered a {message['type']} with {shorten(answer, 300)}.{remedy}")

    def _text(self, answer: dict[str, Any]) -> str:
        observation = answer.get("observation")
        fields = observation if isinstance(observation, dict) else {}
        text = fields.get(self.observe) if isinstance(self.observe, str) else self.observe(fields)
        if not isinstance(text, str):
            raise TypeError(
                f"{self.url} observed {shorten(observation, 200)}, of which {shorten(text)} is no text: pass observe= "
                f"with the name of another field, or a function."
            )
        return text
