"""JSON over HTTP for clients: connections are reused, requests without a reply are sent again."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections import deque
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torchrl_lang.functional.checks import finite, positive
from torchrl_lang.storage import one_line, shorten

__all__ = ["JSONOverHTTP"]

_TRANSIENT = (408, 429)
"""Statuses below 500 on which a request is sent again."""
_LONGEST_ASKED_WAIT = 60.0
"""Seconds of a server's ``Retry-After`` that are waited."""


class _Reply(NamedTuple):
    status: int
    content: bytes
    retry_after: str | None


class JSONOverHTTP:
    """Sends requests and reads JSON; threads may share it. Copies and forked processes open connections of their own.

    Args:
        url: address of the server, ``http://`` or ``https://``.
        timeout: seconds to wait for a connection, and for each part of a reply.
        retries: times that a request is sent again if the server cannot be reached, does not answer in time, or replies
            503 or another 5xx.
        first_wait, longest_wait: seconds before the first retry, doubled before each further one up to the longest, and
            shortened by up to a half at random; a server's ``Retry-After`` can ask for more.

    Raises:
        ConnectionError: after all retries there is no reply.
        ValueError: the server rejects a request, or replies something that is not JSON.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.http_json import JSONOverHTTP
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
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"Expected the address of a server, such as 'http://localhost:5000', got {url!r}.")
        positive("timeout", timeout)
        finite("retries", retries)
        positive("first_wait", first_wait)
        finite("longest_wait", longest_wait, low=first_wait)
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries
        self.first_wait, self.longest_wait = first_wait, longest_wait
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._process = os.getpid()
        self._jitter = random.Random()

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self._ask("GET", path, None, {})

    def post(self, path: str, body: bytes, content_type: str) -> Any:
        """The JSON that a path replies to a body."""
        return self._ask("POST", path, body, {"Content-Type": content_type})

    def close(self) -> None:
        """Close idle connections; the next request opens one again."""
        while self._idle:
            self._idle.pop().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": deque()}

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        for attempt in range(self.retries + 1):
            asked_wait = 0.0
            try:
                reply = self._send(method, self._path + path, body, headers)
            except (OSError, http.client.HTTPException) as error:
                self.close()  # other connections to a server that has ended would fail as well
                problem = one_line(error)
            else:
                if reply.status < 500 and reply.status not in _TRANSIENT:
                    return self._content(path, reply)
                problem = _problem(reply)
                asked_wait = _seconds(reply.retry_after)
            if attempt < self.retries:
                wait = min(self.longest_wait, self.first_wait * 2.0 ** min(attempt, 60)) * self._jitter.uniform(0.5, 1)
                time.sleep(max(wait, asked_wait))
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
            reply = _Reply(response.status, response.read(), response.headers.get("Retry-After"))
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
        message = json.loads(reply.content)["error"]
    except (ValueError, RecursionError, LookupError, TypeError):
        message = shorten(reply.content)
    return f"status {reply.status}: {message}"


def _seconds(retry_after: str | None) -> float:
    """A wait that a server asks for; dates are not read."""
    return min(float(retry_after), _LONGEST_ASKED_WAIT) if retry_after and retry_after.isdecimal() else 0.0
