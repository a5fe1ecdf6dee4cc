"""JSON over HTTP with servers that trickle, break off, close connections, send too much, redirect, and repeat keys."""

import copy
import shutil
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import repeat

import pytest

from tests.envs.scripted_server import Scripted
from torchrl_lang import _http
from torchrl_lang._http import JSONOverHTTP

FAST = {"first_wait": 0.001, "longest_wait": 0.01}
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
FINE = (200, "fine")
MANY = b"0" * 3000
KEY = "sk-secret/<0123>&'abcdef+"


@pytest.fixture(params=["http", "https"])
def served(request):
    """Turns a server into one of a protocol."""
    return request.getfixturevalue("over_tls") if request.param == "https" else lambda server: server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, certificate = (tmp_path_factory.mktemp("tls") / name for name in ("key.pem", "certificate.pem"))
    options = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *options, "-keyout", key, "-out", certificate]
    subprocess.run(made, check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def over_tls(certificate, monkeypatch):
    certificate, key = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve(server):
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.url = server.url.replace("http:", "https:")
        return server

    return serve


def ask(server, **options):
    return JSONOverHTTP(server.url, **{"retries": 0, **FAST, **options}).get("/x")


def slowly(*pieces):
    return "trickle", pieces, 0.05


AGAIN, FINAL = ConnectionError, ValueError
MISBEHAVING = {  # the reply, its error, and a word of the message
    "slow headers": (slowly(OK, *repeat(b"X: y\r\n", 400)), AGAIN, "timed out"),
    "slow chunks": (slowly(CHUNKED, *repeat(b"1\r\n \r\n", 400)), AGAIN, "timed out"),
    "many interim replies": (slowly(*repeat(b"HTTP/1.1 100 Continue\r\n\r\n", 400)), AGAIN, "timed out"),
    "no reply": (("sleep", 5), AGAIN, "timed out"),
    "closed": (("drop", ""), AGAIN, "disconnected"),
    "no HTTP": (("raw", b"SSH-2.0-OpenSSH\r\n\r\n"), AGAIN, "illegal status line"),
    "cut headers": (("raw", OK + b"Content-Le"), AGAIN, "disconnected"),
    "cut body": (("raw", OK + b"Content-Length: 99\r\n\r\n{"), AGAIN, "closed connection"),
    "cut body without length": (("raw", OK + b'\r\n{"results": [{"fla'), AGAIN, "expected JSON"),
    "cut chunks": (("raw", CHUNKED + b'3\r\n{"a\r\n'), AGAIN, "closed connection"),
    "length beyond all memory": (("raw", OK + b"Content-Length: 999999999999999\r\n\r\n12"), AGAIN, "closed"),
    "endless header": (("raw", OK + b"X: " + b"0" * 2**18), AGAIN, "too long|disconnected|reset"),
    "too long a body": (("raw", OK + b"Content-Length: 3000\r\n\r\n" + MANY), FINAL, "replied more than 2000 bytes"),
    "too long a chunk": (("raw", CHUNKED + b"BB8\r\n" + MANY), FINAL, "replied more than"),
    "empty": ((200, b""), FINAL, "expected JSON"),
    "a page": ((200, b"<html>"), FINAL, "replied .*<html>.*expected JSON"),
    "deep": ((200, b"[" * 1999), FINAL, "expected JSON|recursion"),
    "a redirect": ((301, b"", ("Location", "http://127.0.0.1:1/")), FINAL, "status 301"),
    "created": ((201, b"1"), FINAL, "status 201"),
    "rejected": ((400, {"error": "no caption"}), FINAL, "rejected the request with status 400: no caption"),
    "overloaded": ((503, {"error": "full"}), AGAIN, "status 503: full"),
    "failed": ((500, b"oops"), AGAIN, "status 500: .*oops"),
    "too many": ((429, {}), AGAIN, "status 429"),
    "request timed out": ((408, {}), AGAIN, "status 408"),
}


@pytest.mark.parametrize(("reply", "error", "message"), MISBEHAVING.values(), ids=MISBEHAVING)
def test_endpoints_that_misbehave_end_in_a_named_error(reply, error, message, monkeypatch):
    monkeypatch.setattr(_http, "LARGEST_REPLY", 2000)
    with Scripted(reply, reply, FINE) as server:
        began = time.monotonic()
        with pytest.raises(error, match=f"(?s){server.url}/x .*({message})"):
            ask(server, timeout=0.15 if message == "timed out" else 5, retries=1)
        assert time.monotonic() - began < 5
        assert len(server.seen) == (2 if error is AGAIN else 1)
        if error is AGAIN:
            assert ask(server) == "fine"


def test_a_slow_reply_within_the_time_is_read(served):
    with served(Scripted(("trickle", [OK + b"Content-Length: 6\r\n\r\n", b'"fi', b'ne"'], 0.05))) as server:
        assert ask(server, timeout=20) == "fine"


def test_a_server_that_reads_nothing_does_not_block(served):
    """More bytes than the system keeps for a reader; with TLS nobody shakes hands."""
    server, began = served(Scripted()), time.monotonic()  # it is not started
    with pytest.raises(ConnectionError, match="timed out"):
        JSONOverHTTP(server.url, retries=0, timeout=0.3).post("/x", bytes(2**25), "text/plain")
    assert time.monotonic() - began < 10
    server.server_close()
    with served(Scripted(slowly(CHUNKED, *repeat(b"1\r\n \r\n", 400)))) as server, pytest.raises(ConnectionError):
        ask(server, timeout=0.3)


def test_a_server_that_reads_slowly_does_not_block():
    """Each piece is taken in time, all of them are not."""

    def read():
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            while connection.recv(2**17):
                enough.wait(0.05)

    enough = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = threading.Thread(target=read)
        reader.start()
        client = JSONOverHTTP(f"http://127.0.0.1:{listener.getsockname()[1]}", retries=0, timeout=0.2)
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="timed out"):
            client.post("/x", bytes(2**26), "text/plain")
        client.close()
        assert time.monotonic() - began < 10
        enough.set()
        reader.join()


def test_large_bodies_arrive_whole(served):
    body = bytes(range(256)) * 10_000
    with served(Scripted((200, "x" * 3_000_000))) as server:
        assert len(JSONOverHTTP(server.url).post("/x", body, "text/plain")) == 3_000_000
    assert server.seen[0][1:] == ("/x", "text/plain", body)


def waits_of(*script, **options):
    waits = []
    with Scripted(*script, FINE) as server:
        assert JSONOverHTTP(server.url, sleep=waits.append, **options).get("/x") == "fine"
    return waits


def test_waits_grow_up_to_the_longest_and_are_jittered():
    waits = waits_of(*[(503, {})] * 6, first_wait=0.02, longest_wait=0.08)
    for wait, most in zip(waits, [0.02, 0.04, 0.08, 0.08, 0.08, 0.08], strict=True):
        assert most / 2 <= wait <= most
    assert not set(waits) & set(waits_of(*[(503, {})] * 6, first_wait=0.02, longest_wait=0.08))


def date_in(seconds):
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


def test_a_server_can_ask_for_a_longer_wait_but_not_for_too_long_a_one():
    for asked, least, most in (
        ("7", 7, 7),
        (date_in(30_000), 20_000, 30_000),
        *((word, 0, 0.01) for word in ("0", date_in(-9), "soon", "Mon, 23 Nov")),
        ("Mon, 23 Nov 2026 10:00:00 +99999999999999999999", 0, 0.01),
    ):
        [waited] = waits_of((503, {}, ("Retry-After", asked)), longest_asked_wait=30_000, **FAST)
        assert least <= waited <= most, asked
    message = "asks to wait 86400 seconds, longer than longest_asked_wait=60"
    with Scripted((429, {}, ("Retry-After", "86400"))) as server, pytest.raises(ConnectionError, match=message):
        ask(server, retries=3)


def test_connections_that_the_server_has_closed_use_up_no_attempts(served):
    with served(Scripted(FINE, FINE, closes=True)) as server:
        client = JSONOverHTTP(server.url, retries=0)
        for _ in range(2):
            assert client.get("/x") == "fine"
            time.sleep(0.1)
        assert len(server.seen) == server.connections == 2


def test_a_connection_that_ends_when_it_is_reused():
    with Scripted(FINE, ("drop", ""), FINE) as server:
        client = JSONOverHTTP(server.url, retries=1, **FAST)
        assert [client.get("/x"), client.get("/x")] == ["fine"] * 2
        assert server.connections == 2


def test_what_comes_between_two_requests_is_no_reply():
    """Some servers say that they close a connection on which nothing comes."""
    unasked = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 2\r\n\r\n{}"
    with Scripted(("trickle", [OK + b"Content-Length: 1\r\n\r\n1", unasked], 0.05), FINE) as server:
        client = JSONOverHTTP(server.url, retries=0)
        assert client.get("/x") == 1
        time.sleep(0.15)
        assert client.get("/x") == "fine"


def test_connections_are_reused_by_threads():
    with Scripted(*[FINE] * 40) as server:
        client = JSONOverHTTP(server.url)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda number: client.get("/x"), range(40))) == ["fine"] * 40
        assert server.connections <= 4
        client.close()


def test_copies_and_forked_processes_open_connections_of_their_own(monkeypatch):
    with Scripted(*[FINE] * 4) as server:
        client = JSONOverHTTP(server.url)
        assert client.get("/x") == copy.deepcopy(client).get("/x") == "fine"
        assert server.connections == 2
        monkeypatch.setattr(_http.os, "getpid", lambda: -1)
        assert [client.get("/x"), client.get("/x")] == ["fine"] * 2
        assert server.connections == 3


@pytest.mark.parametrize(
    "url",
    ["http://..com/v1", f"http://{'a' * 70}.com/v1", "http://a b/v1", "http://127.0.0.1:1/a\r\nX: y", "here:80", ""]
    + ["http://127.0.0.1:99999/v1", "http://127.0.0.1:x/v1", "http://[::1/v1", "http://h\x00/", "http://h/\ud800"]
    + ["ftp://here", "//here", "https://user:PASS@host/v1", "https://host?key=PASS", "https://h/#PASS", "user:PASS@h"],
)
def test_addresses(url):
    with pytest.raises(ValueError, match="Expected the address of a server, such as") as error:
        JSONOverHTTP(url)
    assert str(error.value).isprintable()
    assert "PASS" not in str(error.value)


def test_good_addresses_wrong_options_and_no_server():
    for url in ("http://[::1]/v1", "https://[::1]:5/", "http://m\xfcnchen.de/a%20b"):
        assert JSONOverHTTP(url).url == url.rstrip("/")
    for option in ({"timeout": 0}, {"retries": 2.5}, {"longest_wait": 0.01}):
        with pytest.raises(ValueError, match=next(iter(option))):
            JSONOverHTTP("http://localhost:1", **option)
    server = Scripted()
    server.server_close()
    with pytest.raises(ConnectionError, match=r"none of 1 requests.*refused.*Check"):
        ask(server)


@pytest.fixture
def with_key(monkeypatch):
    """A client with a key."""

    def make(key, server):
        monkeypatch.setenv("A_KEY", key)
        return JSONOverHTTP(getattr(server, "url", server), key_variable="A_KEY", retries=0)

    return make


@pytest.mark.parametrize(
    "reply",
    [(401, {"error": f"no such key: {KEY}"}), (200, f"no such key: {KEY}".encode())]
    + [("raw", KEY.encode() + b"\r\n\r\n"), (401, ("no such key: " + KEY.upper()).encode())],
    ids=["JSON", "no JSON", "no HTTP", "capitals"],
)
def test_no_message_repeats_the_key(reply, with_key):
    with Scripted(reply) as server:
        with pytest.raises((ValueError, ConnectionError), match=r"since it repeats the key|no HTTP") as error:
            with_key(KEY, server).post("/x", b"", "text/plain")
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY.lower()[:9] not in str(error.value).lower()


def test_a_key_is_sent_over_https_or_to_this_machine_and_not_to_where_a_server_points(with_key):
    for url in ("https://host/v1", "http://localhost:1", "http://127.8.0.1", "http://[::1]"):
        with_key(KEY, url)
    for url in ("http://host/v1", "http://192.168.0.1", "http://localhost.evil.org"):
        with pytest.raises(ValueError, match="over https only"):
            with_key(KEY, url)
    with Scripted(FINE) as other:
        moved = (307, b"", ("Location", other.url))
        with Scripted(moved) as server, pytest.raises(ValueError, match="status 307"):
            with_key(KEY, server).post("/x", b"", "text/plain")
    assert other.seen == []


def test_keys_that_no_header_can_hold_and_harmless_messages_beside_a_key(with_key):
    for key in ("", "sk-one\nsk-two", "sk-caf\xe9", "Bearer sk-1"):
        with pytest.raises(ValueError, match="A_KEY holds no key") as error:
            with_key(key, "http://localhost:1")
        assert "sk-" not in str(error.value)
    reply, message = (401, {"error": {"message": "You exceeded your quota."}}), r"status 401: .*You exceeded your quota"
    with Scripted(reply) as server, pytest.raises(ValueError, match=message):
        with_key(KEY, server).get("/x")
