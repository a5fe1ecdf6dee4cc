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
            raise ValueError(f"Expected the address of an OpenEnv server, like 'http://localhost:8000', got {url!r}.")
        self.url = parts._replace(scheme=schemes[parts.scheme], path=parts.path.rstrip("/") + "/ws").geturl()
        self.observe, self.timeout, self.reset_options = observe, timeout, dict(reset_options or {})
        self.act = (lambda text: {act: text}) if isinstance(act, str) else act
        self.invalid_reply, self.invalid_reward = invalid_reply, invalid_reward
        self._socket: Any = None

    def reset(self, seed: int) -> str:
        """Begin an episode with this seed, in a new session if there is none."""
        if self._socket is None:
            self._socket = self._connected()
        return self._text(self._ask("reset", {**self.reset_options, "seed": seed}))

    def step(self, text: str) -> tuple[str, Any, bool]:
        """Send an utterance as an action."""
        try:
            answer = self._ask("step", self.act(text))
        except ValueError:
            return self.invalid_reply, self.invalid_reward, False
        return self._text(answer), answer.get("reward") or 0.0, answer.get("done", False)

    def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def _connected(self) -> Any:
        try:
            from websockets.sync.client import connect

            local = urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")
            proxy: Literal[True] | None = None if local else True
            return connect(self.url, open_timeout=self.timeout, max_size=LARGEST_MESSAGE, proxy=proxy)
        except ImportError as error:
            raise ImportError("OpenEnvGame needs websockets: pip install 'torchrl-lang[openenv]'.") from error
        except Exception as error:
            raise ConnectionError(f"No OpenEnv server answers at {self.url}: {one_line(error)}") from error

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message; returns the answer's data. A ValueError if the server refuses an action by its schema."""
        if self._socket is None:
            raise RuntimeError(f"There is no session with {self.url}: call reset first.")
        answer = None
        try:
            with suppress(Exception):  # a server that refuses sends its reason, then closes
                self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=self.timeout))
            if answer["type"] == "observation":
                return dict(answer["data"])
            if kind == "step" and answer["data"]["code"] == "VALIDATION_ERROR":
                raise _RefusedError
        except _RefusedError:
            raise
        except Exception as error:
            self.close()  # a late answer must not be taken for that of the next message
            found = shorten(answer, 300) if answer else f"{type(error).__name__} {one_line(error)}"
            raise ConnectionError(f"{self.url} did not answer a {kind} in {self.timeout} s: {found}.") from error
        self.close()
        remedy = " Let it allow one session per row of the batch." * ("CAPACITY_REACHED" in str(answer))
        raise RuntimeError(f"{self.url} answered a {kind} with {shorten(answer, 300)}.{remedy}")

    def _text(self, answer: dict[str, Any]) -> str:
        seen = answer.get("observation") or {}
        text = seen.get(self.observe) if isinstance(self.observe, str) else self.observe(seen)
        if not isinstance(text, str):
            raise TypeError(f"{self.url} observed {shorten(seen, 200)}: name another field than {self.observe!r}.")
        return text


class _RefusedError(ValueError):
    """The server refuses an action by its schema."""
