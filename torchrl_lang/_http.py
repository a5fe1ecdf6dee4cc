"""JSON over HTTP for clients: a deadline, retries, a largest reply, and keys that no message shows."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, NamedTuple

import httpcore2
import httpx2

from torchrl_lang._checks import NonNegative, Positive, check_options, checked
from torchrl_lang._files import one_line

LARGEST_REPLY = 2**26
"""Bytes of the content of a reply; its headers may have 100 KiB."""
_PIECE = 2**14
"""Bytes that are sent at once: each piece may take what is left of the time."""
_JITTER = random.SystemRandom()  # it has no state that copies and forked processes would share


class JSONOverHTTP:
    """Sends requests and reads JSON; threads may share it. Copies and forked processes open connections of their own.

    Redirects are not followed, and neither proxies nor passwords are read from the environment.

    Args:
        url: address of the server, ``http://`` or ``https://``.
        key_variable: environment variable with a key, read for each request and sent as ``Authorization: Bearer``.
            Errors leave out a text of the server that repeats it.
        timeout: seconds until the last byte of a reply is there, without the look-up of a host's name.
        retries: times that a request is sent again if the server cannot be reached, does not answer in time, breaks
            off, or replies 408, 429 or 5xx.
        first_wait, longest_wait: seconds before the first retry, doubled before each further one up to the longest, and
            shortened by up to a half at random; a server's ``Retry-After`` can ask for more.
        longest_asked_wait: seconds of a ``Retry-After`` that are waited; if it asks for more, there is no retry.
        before: called before each request is sent, retries among them, for instance to wait.
        sleep: waits, by default ``time.sleep``.

    Raises:
        ConnectionError: after all retries there is no reply, or the server asks for too long a wait.
        ValueError: the server rejects a request, or replies something that is not JSON or is larger than 64 MiB; on
            construction, the address is none, the key is missing, or it would be sent without TLS.
    """

    @checked
    def __init__(
        self,
        url: str,
        *,
        key_variable: str | None = None,
        timeout: Positive = 60.0,
        retries: Annotated[int, 0] = 12,
        first_wait: Positive = 0.1,
        longest_wait: float = 5.0,
        longest_asked_wait: NonNegative = 60.0,
        before: Callable[[], object] | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._address = _address(url)
        self.url = url.rstrip("/")
        check_options(longest_wait=(longest_wait, f"[{first_wait}, inf)"))
        self.key_variable, self.timeout, self.retries = key_variable, timeout, retries
        self.first_wait, self.longest_wait, self.longest_asked_wait = first_wait, longest_wait, longest_asked_wait
        self._before, self._sleep = before, sleep or time.sleep
        self._pool: tuple[int, httpcore2.ConnectionPool] | None = None
        if self._key() is not None and self._address.scheme == "http" and not _is_local(self._address.host):
            raise ValueError(f"A key is sent over https only, got {url!r}: use https, or key_variable=None.")

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self._ask("GET", path, None, {})

    def post(self, path: str, body: bytes, content_type: str) -> Any:
        """The JSON that a path replies to a body."""
        return self._ask("POST", path, body, {"Content-Type": content_type})

    def close(self) -> None:
        """Close idle connections; the next request opens one again."""
        if self._pool is not None:
            self._pool[1].close()
            self._pool = None

    def shown(self, text: str) -> str:
        """A text of the server as one line for a message, unless it repeats the key."""
        key = self._key()
        if key is not None and key.lower() in text.lower():
            return "a text that is not shown, since it repeats the key"
        return " ".join(text.split())[:300]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def _key(self) -> str | None:
        if self.key_variable is None:
            return None
        key = os.environ.get(self.key_variable, "").strip()
        if not key or not all("!" <= character <= "~" for character in key):
            raise ValueError(f"{self.key_variable} holds no key of printable ASCII: set it, or key_variable=None.")
        return key

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        for attempt in range(self.retries + 1):
            if self._before is not None:
                self._before()
            reply = self._attempt(method, path, body, headers)
            if not isinstance(reply, _Problem):
                return reply
            if reply.is_final:
                raise ValueError(f"{self.url}{path} {reply.text}.")
            if reply.wait > self.longest_asked_wait:
                asked = f"{reply.wait:g} seconds, longer than longest_asked_wait={self.longest_asked_wait:g}"
                raise ConnectionError(f"{self.url}{path} asks to wait {asked} ({reply.text}): try later, or allow it.")
            if attempt < self.retries:
                wait = min(self.longest_wait, self.first_wait * 2.0 ** min(attempt, 60)) * _JITTER.uniform(0.5, 1)
                self._sleep(max(wait, reply.wait))
        tried = f"{self.url}{path} answered none of {self.retries + 1} requests, the last one with: {reply.text}"
        raise ConnectionError(f"{tried}. Check that the server runs there, or allow more retries.")

    def _attempt(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        """The JSON of a reply, or a problem."""
        key, address, content = self._key(), self._address, bytearray()
        sent: Any = {"Host": address.netloc.decode("ascii"), **headers}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        target = address.raw_path.rstrip(b"/") + path.encode()
        url = httpcore2.URL(scheme=address.raw_scheme, host=address.raw_host, port=address.port, target=target)
        until = time.monotonic() + self.timeout  # in place of seconds: see _Backend
        limits: Any = {"timeout": {"connect": until, "read": until, "write": until}}
        try:
            with self._connections().stream(method, url, headers=sent, content=body, extensions=limits) as reply:
                for chunk in reply.iter_stream():
                    content += chunk
                    if len(content) > LARGEST_REPLY:
                        return _Problem(f"replied more than {LARGEST_REPLY} bytes, expected some JSON", is_final=True)
        except httpcore2.ProtocolError as error:  # it may quote the reply, escaped
            return _Problem(one_line(error) if key is None else "no HTTP")
        except (OSError, httpcore2.NetworkError, httpcore2.TimeoutException) as error:
            return _Problem(one_line(error) if str(error) else type(error).__name__)
        fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reply.headers}
        if reply.status != 200:
            problem = f"status {reply.status}: {self._message(content)}"
            if reply.status >= 500 or reply.status in (408, 429):
                return _Problem(problem, wait=_asked_wait(fields))
            return _Problem(f"rejected the request with {problem}", is_final=True)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            may_be_cut = not fields.keys() & {"content-length", "transfer-encoding"}
            return _Problem(f"replied {self._message(content)}, expected JSON ({error})", is_final=not may_be_cut)

    def _connections(self) -> httpcore2.ConnectionPool:
        if self._pool is None or self._pool[0] != os.getpid():  # two processes would read each other's replies
            context = ssl.create_default_context() if self._address.scheme == "https" else None
            self._pool = os.getpid(), httpcore2.ConnectionPool(context, network_backend=_Backend())
        return self._pool[1]

    def _message(self, content: bytearray) -> str:
        """The content of an error, or its field ``error`` if it is JSON."""
        text = content.decode(errors="replace")
        with suppress(ValueError, RecursionError, LookupError, TypeError):
            text = str(json.loads(content)["error"])
        return self.shown(text) or "nothing"


class _Problem(NamedTuple):
    """The reason why there is no reply; unless it is final, the request is sent again after a wait."""

    text: str
    is_final: bool = False
    wait: float = 0.0


def _seconds_left(until: float | None) -> float:
    left = (until or 0.0) - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Backend(httpcore2.SyncBackend):
    """Opens connections until a deadline, which stands in place of the library's timeouts of each single wait."""

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *rest: Any, **more: Any) -> _Stream:
        return _Stream(super().connect_tcp(host, port, _seconds_left(timeout), *rest, **more))


class _Stream(httpcore2.NetworkStream):
    """Reads and writes a connection until a deadline."""

    def __init__(self, stream: httpcore2.NetworkStream) -> None:
        self._stream = stream
        self.close, self.get_extra_info = stream.close, stream.get_extra_info  # type: ignore[method-assign]

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _seconds_left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _PIECE):
            self._stream.write(buffer[start : start + _PIECE], _seconds_left(timeout))

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: Any = None) -> _Stream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, _seconds_left(timeout)))


def _address(url: str) -> httpx2.URL:
    """The parts of a server's address."""
    with suppress(httpx2.InvalidURL, ValueError):
        address = httpx2.URL(url)
        reachable = address.host.encode("idna") and (address.port is None or 0 < address.port < 1 << 16)
        if address.scheme in ("http", "https") and reachable and not set(url) & set("@?# "):
            return address
    got = "one that may hold a password" if set(url) & set("@?#") else repr(url)
    what = "the address of a server, such as 'http://localhost:5000', without user, password, query and fragment"
    raise ValueError(f"Expected {what}, got {got}.")


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _asked_wait(headers: Mapping[str, str]) -> float:
    """The seconds of ``Retry-After``, a number or a date; 0 if there is none, or none that can be read."""
    asked = headers.get("retry-after", "").strip()
    if asked.isdecimal():
        return float(asked)
    with suppress(ValueError, TypeError, OverflowError):  # no date, one without a time zone, or a far one
        return max((parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds(), 0.0)
    return 0.0
