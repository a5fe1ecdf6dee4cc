"""JSON over HTTP for clients: connections are reused, requests without a reply are sent again."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from torchrl_lang.functional.checks import finite, positive
from torchrl_lang.storage import one_line, shorten

__all__ = ["SYSTEM_CLOCK", "Clock", "JSONOverHTTP", "Secret"]

_TRANSIENT = (408, 429)
"""Statuses below 500 on which a request is sent again."""
_SHORTEST_KEY = 8
"""Characters of the shortest key that replies are searched for: "x", of a server that takes any, is in many words."""


class Clock(Protocol):
    """What measures and waits; the module ``time`` is one."""

    def monotonic(self) -> float:
        """Seconds since any fixed moment."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


class _SystemClock:
    """The module ``time`` as an object that can be copied and pickled."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


SYSTEM_CLOCK = _SystemClock()
_JITTER = random.SystemRandom()  # it has no state that copies and forked processes would share


def _nothing() -> None:
    pass


class Secret(str):
    """A text that representations do not show, such as the local variables in a traceback.

    Examples:
        >>> from torchrl_lang.envs.http_json import Secret
        >>> key = Secret("sk-1")
        >>> {"key": key}, f"Bearer {key}"
        ({'key': '***'}, 'Bearer sk-1')
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class _Reply(NamedTuple):
    status: int
    content: bytes
    retry_after: float
    """Seconds that the server asks to wait, 0 if it does not."""


class JSONOverHTTP:
    """Sends requests and reads JSON; threads may share it. Copies and forked processes open connections of their own.

    Args:
        url: address of the server, ``http://`` or ``https://``.
        timeout: seconds to wait for a connection, and for each part of a reply.
        retries: times that a request is sent again if the server cannot be reached, does not answer in time, or replies
            503 or another 5xx.
        first_wait, longest_wait: seconds before the first retry, doubled before each further one up to the longest, and
            shortened by up to a half at random; a server's ``Retry-After`` can ask for more.
        longest_asked_wait: seconds of a ``Retry-After`` that are waited; if it asks for more, there is no retry.
        before: called before each request is sent, retries among them, for instance to wait.
        clock: what waits between retries.

    Raises:
        ConnectionError: after all retries there is no reply, or the server asks for too long a wait.
        ValueError: the server rejects a request, or replies something that is not JSON.

    Examples:
        >>> from torchrl_lang.envs.http_json import JSONOverHTTP
        >>> JSONOverHTTP("localhost:5000")
        Traceback (most recent call last):
            ...
        ValueError: Expected the address of a server, such as 'http://localhost:5000', got 'localhost:5000'.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        retries: int = 12,
        first_wait: float = 0.1,
        longest_wait: float = 5.0,
        longest_asked_wait: float = 60.0,
        before: Callable[[], object] = _nothing,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if set(url) & set("@?#"):  # it would stand in errors and representations
            raise ValueError(
                "The address of a server must be without user, password, query and fragment, which are not sent: got "
                "one with '@', '?' or '#', not shown here because it may hold a password."
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"Expected the address of a server, such as 'http://localhost:5000', got {url!r}.")
        positive("timeout", timeout)
        finite("retries", retries)
        positive("first_wait", first_wait)
        finite("longest_wait", longest_wait, low=first_wait)
        finite("longest_asked_wait", longest_asked_wait)
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries
        self.first_wait, self.longest_wait = first_wait, longest_wait
        self.longest_asked_wait, self._before, self._clock = longest_asked_wait, before, clock
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._process = os.getpid()

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self._ask("GET", path, None, {}, None)

    def post(self, path: str, body: bytes, content_type: str, *, key: str | None = None) -> Any:
        """The JSON that a path replies to a body.

        Args:
            path: below the server's address.
            body: what to send.
            content_type: of the body.
            key: sent as ``Authorization: Bearer``. Where the server repeats one of 8 characters or more, errors and
                what this method returns have ``***`` instead. Give a :class:`Secret`: tracebacks do not show it.
        """
        authorization = {} if key is None else {"Authorization": Secret(f"Bearer {key}")}
        return self._ask("POST", path, body, {"Content-Type": content_type, **authorization}, key)

    def close(self) -> None:
        """Close idle connections; the next request opens one again."""
        while self._idle:
            self._idle.pop().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": deque()}

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str], key: str | None) -> Any:
        for attempt in range(self.retries + 1):
            asked_wait = 0.0
            self._before()
            try:
                reply = self._send(method, self._path + path, body, headers)
            except (OSError, http.client.HTTPException) as error:
                self.close()  # other connections to a server that has ended would fail as well
                problem = one_line(Exception(_without(str(error) or type(error).__name__, key)))
            else:
                reply = reply._replace(content=_without_key(reply.content, key))
                if reply.status < 500 and reply.status not in _TRANSIENT:
                    return self._content(path, reply)
                problem, asked_wait = _problem(reply), reply.retry_after
            if asked_wait > self.longest_asked_wait:
                raise ConnectionError(
                    f"{self.url}{path} asks to wait {asked_wait:g} seconds, longer than longest_asked_wait="
                    f"{self.longest_asked_wait:g} ({problem}). Try again later, or allow longer waits."
                )
            if attempt < self.retries:
                wait = min(self.longest_wait, self.first_wait * 2.0 ** min(attempt, 60)) * _JITTER.uniform(0.5, 1)
                self._clock.sleep(max(wait, asked_wait))
        raise ConnectionError(
            f"{self.url}{path} answered none of {self.retries + 1} requests, the last one with: {problem}. Check that "
            f"the server runs there, or allow more retries."
        )

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> _Reply:
        """One request on an idle connection or a new one, which is kept if it was answered."""
        if self._process != os.getpid():  # connections are the parent's: two processes would read each other's replies
            self._idle, self._process = deque(), os.getpid()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._kind(self._host, self._port, timeout=self.timeout)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            reply = _Reply(response.status, response.read(), _asked_wait(response.headers))
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return reply

    def _content(self, path: str, reply: _Reply) -> Any:
        if reply.status != 200:
            raise ValueError(f"{self.url}{path} rejected the request with {_problem(reply)}.")
        try:
            return json.loads(reply.content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.url}{path} replied {shorten(reply.content)}, expected JSON ({error}).") from error


def _problem(reply: _Reply) -> str:
    """The status and the message of an error, which is JSON with the field ``error`` where the server is ours."""
    try:
        message = str(json.loads(reply.content)["error"])
    except (ValueError, RecursionError, LookupError, TypeError):
        message = shorten(reply.content)
    return f"status {reply.status}: {message}"


def _without_key(content: bytes, key: str | None) -> bytes:
    r"""A reply without the key, however often it escapes it: in JSON, ``\/`` and ``\u002f`` are ``/`` too."""
    if key is None or len(key) < _SHORTEST_KEY:
        return content
    with suppress(ValueError, RecursionError):
        content = json.dumps(json.loads(content)).encode()  # as ASCII; replies may be UTF-16
    characters = [b"(?:%b|u%04x)" % (re.escape(character.encode()), ord(character)) for character in key]
    return re.sub(rb"\\*".join(characters), b"***", content, flags=re.IGNORECASE)


def _without(text: str, key: str | None) -> str:
    """A text without the key, in which no part of it is left where the text is cut afterwards."""
    return text.replace(key, "***") if key else text


def _asked_wait(headers: Message) -> float:
    """The seconds of ``Retry-After``, a number or a date; 0 if there is none, or none that can be read."""
    asked = headers.get("Retry-After", "").strip()
    if asked.isdecimal():
        return float(asked)
    try:
        until = parsedate_to_datetime(asked)
        now = parsedate_to_datetime(headers["Date"]) if headers.get("Date") else datetime.now(UTC)
        return max((until - now).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):  # of a date with a time zone and one without, or a far one
        return 0.0
