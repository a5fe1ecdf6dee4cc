"""JSON over HTTP for clients: connections are reused, requests without a reply are sent again."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from torchrl_lang._checks import count, finite, positive
from torchrl_lang._files import one_line
from torchrl_lang.envs.http_connection import LARGEST_REPLY, Connection, Reply, ReplyTooLarge, TLSConnection
from torchrl_lang.envs.secret import Secret, is_short, shown, without_key

__all__ = ["SYSTEM_CLOCK", "Clock", "JSONOverHTTP"]

_TRANSIENT = (408, 429)
"""Statuses below 500 on which a request is sent again."""


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


class _SendAgain(Exception):
    """There is no reply, for a reason (the first argument) that may pass after some seconds (the second)."""


class JSONOverHTTP:
    """Sends requests and reads JSON; threads may share it. Copies and forked processes open connections of their own.

    Args:
        url: address of the server, ``http://`` or ``https://``.
        timeout: seconds until the last byte of a reply is there, from the opening of a connection or the sending of
            the request on. The look-up of a host's name, and attempts at further addresses of it, are not counted.
        retries: times that a request is sent again if the server cannot be reached, does not answer in time, breaks
            off, or replies 503 or another 5xx. A connection that the server has closed between two requests is replaced
            at once and counts as none of them.
        first_wait, longest_wait: seconds before the first retry, doubled before each further one up to the longest, and
            shortened by up to a half at random; a server's ``Retry-After`` can ask for more.
        longest_asked_wait: seconds of a ``Retry-After`` that are waited; if it asks for more, there is no retry.
        before: called before each request is sent, retries among them, for instance to wait.
        clock: what waits between retries.

    Raises:
        ConnectionError: after all retries there is no reply, or the server asks for too long a wait.
        ValueError: the server rejects a request, or replies something that is not JSON or is larger than 64 MiB.

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
        parts = _address(url)
        positive("timeout", timeout)
        count("retries", retries)
        positive("first_wait", first_wait)
        finite("longest_wait", longest_wait, low=first_wait)
        finite("longest_asked_wait", longest_asked_wait)
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries
        self.first_wait, self.longest_wait = first_wait, longest_wait
        self.longest_asked_wait, self._before, self._clock = longest_asked_wait, before, clock
        self._kind = TLSConnection if parts.scheme == "https" else Connection
        # Without a port http.client would take the end of an IPv6 address for one.
        self._host, self._port = str(parts.hostname), parts.port or self._kind.default_port
        self._path = parts.path.rstrip("/")
        self._idle: deque[Connection] = deque()
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
                what this method returns have ``***`` instead; with a shorter one, errors leave out what the server
                replied. Give a :class:`~torchrl_lang.envs.secret.Secret`: tracebacks do not show it.
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
            self._before()
            try:
                return self._attempt(method, path, body, headers, key)
            except _SendAgain as error:
                problem, asked_wait = error.args
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

    def _attempt(self, method: str, path: str, body: bytes | None, headers: dict[str, str], key: str | None) -> Any:
        failure: Exception
        try:
            reply = self._send(method, self._path + path, body, headers)
        except ReplyTooLarge:
            failure = ValueError(f"{self.url}{path} replied more than {LARGEST_REPLY} bytes, expected some JSON.")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()  # other connections to a server that has ended would fail as well
            failure = _SendAgain(_failure(error, key), 0.0)
        else:
            return self._content(path, reply._replace(content=without_key(reply.content, key)), key)
        raise failure  # here, since in the block above the request would be a part of its traceback, and the key of it

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        """One request on an idle connection or a new one, which is kept if it was answered."""
        request = (time.monotonic() + self.timeout, method, path, body, headers)
        connection = self._reusable()
        if connection is not None:
            try:
                return self._exchange(connection, request)
            except OSError:  # the server may close a connection at the moment of its reuse
                if connection.received:
                    raise
        return self._exchange(self._kind(self._host, self._port), request)

    def _exchange(self, connection: Connection, request: tuple[Any, ...]) -> Reply:
        reply = connection.exchange(*request)
        self._idle.append(connection)
        return reply

    def _reusable(self) -> Connection | None:
        if self._process != os.getpid():  # connections are the parent's: two processes would read each other's replies
            self._idle, self._process = deque(), os.getpid()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_reusable():
                return connection
            connection.close()

    def _content(self, path: str, reply: Reply, key: str | None) -> Any:
        if reply.status >= 500 or reply.status in _TRANSIENT:
            raise _SendAgain(_problem(reply, key), _asked_wait(reply.headers))
        if reply.status != 200:
            raise ValueError(f"{self.url}{path} rejected the request with {_problem(reply, key)}.")
        try:
            return json.loads(reply.content)
        except (ValueError, RecursionError) as error:
            fault = f"replied {shown(reply.content, key)}, expected JSON ({error})"
        if reply.ended_by_closing:
            raise _SendAgain(f"it {fault}, and closed the connection, perhaps too early", 0.0)
        raise ValueError(f"{self.url}{path} {fault}.")  # here, since the error above holds the reply


def _address(url: str) -> SplitResult:
    """The parts of a server's address. What http.client cannot send is found here: its errors would show the key."""
    if set(url) & set("@?#"):  # it would stand in errors and representations
        raise ValueError(
            "The address of a server must be without user, password, query and fragment, which are not sent: got "
            "one with '@', '?' or '#', not shown here because it may hold a password."
        )
    fault = ""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna") and parts.port != 0:
            if parts.path.isascii() and url.isprintable() and " " not in url:
                return parts
            fault = ", with characters that no address has: write those of a path as %20 and the like"
    except ValueError as error:
        fault = f" ({one_line(error)})"
    raise ValueError(f"Expected the address of a server, such as 'http://localhost:5000', got {url!r}{fault}.")


def _failure(error: Exception, key: str | None) -> str:
    """What went wrong on the way; errors of http.client may show a part of the reply, and others of the request."""
    if isinstance(error, OSError) and not isinstance(error, http.client.HTTPException):
        return one_line(error)
    if is_short(key) or isinstance(error, ValueError):
        return type(error).__name__
    text = without_key(str(error).encode(errors="replace"), key).decode()
    return one_line(Exception(text or type(error).__name__))


def _problem(reply: Reply, key: str | None) -> str:
    """The status and the message of an error, which is JSON with the field ``error`` where the server is ours."""
    try:
        message = shown(str(json.loads(reply.content)["error"]), key)
    except (ValueError, RecursionError, LookupError, TypeError):
        message = shown(reply.content, key)
    return f"status {reply.status}: {message}"


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
