"""HTTP connections on which a request ends by a moment, and a reply of more than a size is an error."""

from __future__ import annotations

import http.client
import io
import math
import selectors
import socket
import time
from functools import partial
from typing import Any, NamedTuple

__all__ = ["LARGEST_REPLY", "Connection", "Reply", "ReplyTooLarge", "TLSConnection"]

LARGEST_REPLY = 2**26
"""Bytes of a reply with its headers."""
_PIECE = 2**14
"""Bytes that are read or sent at once: those of a TLS record, each of which may take a socket's whole timeout."""


class ReplyTooLarge(ValueError):
    """A reply has more than ``LARGEST_REPLY`` bytes."""


class Reply(NamedTuple):
    """What a server answered; not shown in tracebacks, since it may repeat a key."""

    status: int
    headers: http.client.HTTPMessage
    content: bytes
    ended_by_closing: bool
    """Whether only the end of the connection shows the end of the content, so that it may have been cut off."""

    def __repr__(self) -> str:
        return f"<reply with status {self.status}>"


class Connection(http.client.HTTPConnection):
    """Sends a request and reads its reply until a deadline.

    A socket's timeout is that of each single wait, which a server that sends a byte now and then never reaches.
    Therefore it is set to the time that is left before each of them.
    """

    received = 0
    """Bytes of the reply to the last request."""
    _deadline = math.inf

    def exchange(self, deadline: float, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        """The reply to a request, if it is complete when ``time.monotonic()`` is the deadline."""
        self._deadline, self.received = deadline, 0
        try:
            self.request(method, path, body, headers)
            response = self.getresponse()
            ended_by_closing = response.length is None and not response.chunked
            content = b"".join(iter(partial(response.read, _PIECE), b""))
            if response.length:
                raise http.client.IncompleteRead(content, response.length)
        except BaseException:
            self.close()
            raise
        return Reply(response.status, response.headers, content, ended_by_closing)

    def is_reusable(self) -> bool:
        """Whether it is open and nothing came since the last reply, neither its end nor an unrequested message."""
        if self.sock is None:
            return False
        with selectors.DefaultSelector() as selector:  # select.select takes no file numbers above 1023
            selector.register(self.sock, selectors.EVENT_READ)
            return not selector.select(0)

    def connect(self) -> None:
        """Open the connection."""
        self.timeout = self.seconds_left()
        super().connect()
        self.sock.settimeout(self.seconds_left())  # for a TLS handshake, see TLSConnection

    def send(self, data: Any) -> None:
        """Send bytes."""
        if self.sock is None:
            self.connect()
        for start in range(0, len(data), _PIECE):
            self.sock.settimeout(self.seconds_left())
            super().send(data[start : start + _PIECE])

    def response_class(self, sock: socket.socket, **options: Any) -> http.client.HTTPResponse:  # type: ignore[override]
        """A reply that reads the socket within the limits."""
        response = http.client.HTTPResponse(sock, **options)
        response.fp = io.BufferedReader(_Limited(self, sock, response.fp.detach()))
        return response

    def seconds_left(self) -> float:
        """Until the deadline; TimeoutError after it."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


class TLSConnection(http.client.HTTPSConnection, Connection):
    """The same with TLS; in this order of the bases the handshake comes after ``Connection.connect``."""


class _Limited(io.RawIOBase):
    """Reads a socket until its connection's deadline, and at most ``LARGEST_REPLY`` bytes a request."""

    def __init__(self, connection: Connection, sock: socket.socket, raw: Any) -> None:
        self._connection, self._sock, self._raw = connection, sock, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._connection.seconds_left())
        count: int = self._raw.readinto(buffer)
        self._connection.received += count
        if self._connection.received > LARGEST_REPLY:
            raise ReplyTooLarge
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
