"""JSON over HTTP with servers that trickle, break off, close connections, send too much, and repeat keys."""

from __future__ import annotations

import base64
import html
import shutil
import socket
import ssl
import subprocess
import threading
import time
import traceback
from contextlib import suppress
from itertools import repeat
from urllib.parse import quote

import pytest

from tests.envs.scripted_server import Scripted
from torchrl_lang.envs import http_connection
from torchrl_lang.envs.http_json import JSONOverHTTP
from torchrl_lang.envs.secret import Secret, without_key

FAST = {"first_wait": 0.001, "longest_wait": 0.01}
OK = b"HTTP/1.1 200 OK\r\n"
KEY = "sk-secret/<0123>&'abcdef+"
FINE = (200, "fine")


@pytest.fixture(params=["http", "https"])
def served(request):
    """What turns a server into one of a protocol."""
    return request.getfixturevalue("over_tls") if request.param == "https" else lambda server: server


@pytest.fixture
def over_tls(tmp_path, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    files = ["-keyout", key, "-out", certificate]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *options, *files]
    subprocess.run(made, check=True, capture_output=True)
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


TRICKLES = {
    "status": [bytes([byte]) for byte in OK + b"Content-Length: 99\r\n\r\n"],
    "headers": [OK, *repeat(b"X: y\r\n", 400)],
    "body without length": [OK + b"\r\n", *repeat(b" ", 400)],
    "body": [OK + b"Content-Length: 99\r\n\r\n", *repeat(b" ", 400)],
    "chunks": [OK + b"Transfer-Encoding: chunked\r\n\r\n", *repeat(b"1\r\n \r\n", 400)],
}


@pytest.mark.parametrize("pieces", TRICKLES.values(), ids=TRICKLES)
def test_a_reply_that_trickles_is_none(served, pieces):
    with served(Scripted(("trickle", pieces, 0.05), FINE)) as server:
        began = time.monotonic()
        assert ask(server, retries=1, timeout=0.3) == "fine"
        assert 0.3 <= time.monotonic() - began < 10
        assert len(server.seen) == 2


def test_a_slow_reply_within_the_time_is_read(served):
    pieces = [OK + b"Content-Length: 6\r\n\r\n", b'"fi', b'ne"']
    with served(Scripted(("trickle", pieces, 0.2))) as server:
        assert ask(server, timeout=20) == "fine"


def test_a_server_that_reads_nothing_does_not_block(served):
    """More bytes than the system keeps for a reader."""
    server = served(Scripted())  # it is not started, so that nobody reads; with TLS nobody shakes hands
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="timed out"):
        JSONOverHTTP(server.url, retries=0, timeout=0.3).post("/x", bytes(2**25), "text/plain")
    assert time.monotonic() - began < 10
    server.server_close()


def test_a_server_that_reads_slowly_does_not_block():
    """Each piece is taken in time, all of them are not."""

    def read():
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            while connection.recv(2**17):
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = threading.Thread(target=read)
        reader.start()
        client = JSONOverHTTP(f"http://127.0.0.1:{listener.getsockname()[1]}", retries=0, timeout=0.5)
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="timed out"):
            client.post("/x", bytes(2**26), "text/plain")
        assert time.monotonic() - began < 10
        reader.join()


MANY = b"0" * 3000
TOO_LARGE = {
    "length": [OK + b"Content-Length: 3000\r\n\r\n" + MANY],
    "no length": [OK + b"\r\n" + MANY],
    "chunks": [OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"BB8\r\n" + MANY],
    "chunk of less than nothing": [OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + MANY],
    "headers": [OK + b"X: " + MANY],
}


@pytest.mark.parametrize("pieces", TOO_LARGE.values(), ids=TOO_LARGE)
def test_too_large_a_reply_is_an_error_at_once(pieces, monkeypatch):
    monkeypatch.setattr(http_connection, "LARGEST_REPLY", 2000)
    with Scripted(("trickle", pieces, 0), FINE) as server, pytest.raises(ValueError, match="replied more than"):
        ask(server, retries=3)
    assert len(server.seen) == 1


def test_a_length_beyond_all_memory():
    reply = ("raw", OK + b"Content-Length: 999999999999999\r\n\r\n12")
    with Scripted(reply) as server, pytest.raises(ConnectionError, match="IncompleteRead"):
        ask(server)


def test_large_bodies_arrive_whole(served):
    body = bytes(range(256)) * 10_000
    with served(Scripted((200, "x" * 3_000_000))) as server:
        assert len(JSONOverHTTP(server.url).post("/x", body, "text/plain")) == 3_000_000
    assert server.seen[0][-1] == body


CUT = {
    "headers": OK + b"Content-Le",
    "status": b"HTTP/1.1 200",
    "body": OK + b"Content-Length: 99\r\n\r\n{",
    "body without length": OK + b'\r\n{"results": [{"fla',
    "chunks": OK + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n',
    "all but the status": OK + b"\r\n",
}


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
def test_a_reply_that_breaks_off_is_asked_for_again(cut):
    with Scripted(("raw", cut), ("raw", cut), FINE) as server:
        assert ask(server, retries=2) == "fine"
    with Scripted(("raw", cut), ("raw", cut), FINE) as server:
        with pytest.raises(ConnectionError, match="none of 2 requests"):
            ask(server, retries=1)
        assert len(server.seen) == 2


def test_a_whole_reply_without_a_length():
    with Scripted(("raw", OK + b'\r\n"fine"')) as server:
        assert ask(server) == "fine"


def test_an_empty_reply_with_its_length_is_none_of_the_protocol():
    with Scripted((200, b""), FINE) as server, pytest.raises(ValueError, match="expected JSON"):
        ask(server, retries=1)


@pytest.mark.parametrize("wait", [0, 0.1])
def test_connections_that_the_server_has_closed_use_up_no_attempts(served, wait):
    with served(Scripted(*[FINE] * 4, closes=True)) as server:
        client = JSONOverHTTP(server.url, retries=0)
        for _ in range(4):
            assert client.get("/x") == "fine"
            time.sleep(wait)
        assert len(server.seen) == server.connections == 4


@pytest.mark.parametrize("wait", [0.001, 0.1])
def test_all_retries_reach_a_server_that_closes(wait):
    with Scripted(*[(503, {"error": "full"})] * 9, closes=True) as server:
        with pytest.raises(ConnectionError, match="none of 5 requests, the last one with: status 503: full"):
            ask(server, retries=4, first_wait=wait, longest_wait=wait)
        assert len(server.seen) == 5


def test_a_connection_that_ends_when_it_is_reused():
    with Scripted(FINE, ("drop", ""), FINE, ("drop", "")) as server:
        client = JSONOverHTTP(server.url, retries=0)
        assert [client.get("/x"), client.get("/x")] == ["fine"] * 2
        assert server.connections == 2
        with Scripted(("drop", ""), FINE) as other, pytest.raises(ConnectionError, match="none of 1 requests"):
            ask(other)  # a new connection
    assert len(other.seen) == 1


def test_what_comes_between_two_requests_is_no_reply():
    """Some servers say that they close a connection on which nothing comes."""
    unasked = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 2\r\n\r\n{}"
    with Scripted(("trickle", [OK + b"Content-Length: 1\r\n\r\n1", unasked], 0.05), FINE) as server:
        client = JSONOverHTTP(server.url, retries=0)
        assert client.get("/x") == 1
        time.sleep(0.3)
        assert client.get("/x") == "fine"


ADDRESSES = [
    "http://..com/v1",
    f"http://{'a' * 70}.com/v1",
    "http://h\xfc.invalid/\xfc",
    "http://a b/v1",
    "http://127.0.0.1:1/a b",
    "http://127.0.0.1:1/a\r\nX: y",
    "http://x.invalid\n/v1",
    "http://127.0.0.1:99999/v1",
    "http://127.0.0.1:0/v1",
    "http://127.0.0.1:x/v1",
    "http://[::1/v1",
    "http://h\x00/",
    "http://h/\ud800",
    "",
]


@pytest.mark.parametrize("url", ADDRESSES)
def test_addresses(url):
    with pytest.raises(ValueError, match="Expected the address of a server, such as") as error:
        JSONOverHTTP(url)
    assert repr(url) in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://[::1]/v1", 80), ("https://[::1]", 443), ("http://[::1]:5/", 5), ("http://m\xfcnchen.de", 80)],
)
def test_good_addresses(url, port):
    connection = JSONOverHTTP(url)._kind(JSONOverHTTP(url)._host, JSONOverHTTP(url)._port)
    assert connection.port == port
    assert connection.host in ("::1", "m\xfcnchen.de")


@pytest.mark.parametrize("key", ["sk-\u20ac0123456789", "sk-\n0123456789"])
def test_what_no_header_can_hold_is_not_shown(key):
    with Scripted() as server:
        client = JSONOverHTTP(server.url, retries=0)
        with pytest.raises(ConnectionError) as error:
            client.post("/x", b"", "text/plain", key=Secret(key))
    own = error.value.__traceback__.tb_next
    text = traceback.TracebackException(type(error.value), error.value, own, capture_locals=True)
    assert "0123456789" not in "".join(text.format())


@pytest.mark.parametrize(
    "form",
    [
        quote,
        lambda key: quote(key, safe=""),
        lambda key: quote(quote(key, safe="")),
        lambda key: "".join(f"%{ord(character):02x}" for character in key),
        html.escape,
        lambda key: html.escape(html.escape(key)),
        lambda key: "".join(f"&#{ord(character)};" for character in key),
        lambda key: "".join(f"&#x{ord(character):02X};" for character in key),
        lambda key: key.replace("/", "&sol;").replace("+", "&plus;"),
        lambda key: "\0".join(key),
        lambda key: key.encode("utf-32").decode("latin-1"),
    ],
)
@pytest.mark.parametrize("status", [401, 500, 200, "raw"])
def test_keys_that_a_server_escapes(form, status):
    content = f"no such key: {form(KEY)}, you see\r\n".encode("latin-1")
    with Scripted((status, content)) as server, pytest.raises((ValueError, ConnectionError)) as error:
        JSONOverHTTP(server.url, retries=0).post("/x", b"", "text/plain", key=Secret(KEY))
    for left in ("sk-", "secret", "s\\x00k", "0123", "abcdef", "%73", "#115", "#x73"):
        assert left not in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_keys_in_other_encodings(encoding):
    reply = (401, f"no key {KEY}, you see".encode(encoding))
    with Scripted(reply) as server, pytest.raises(ValueError, match=r"no key \*\*\*, you see"):
        JSONOverHTTP(server.url).post("/x", b"", "text/plain", key=Secret(KEY))


def test_a_key_in_json_that_was_utf_16():
    shown = without_key(b'{"a": "%b"}' % "\\u0000".join(KEY).encode(), KEY)
    assert b"sk" not in shown.replace(b"\\u0000", b"")


def test_searching_for_a_key_takes_linear_time():
    began = time.process_time()
    for text in ("\\" * 2**18, "s" + "\\u0000" * 2**16, "&amp;" * 2**16, "&" + "amp;" * 2**16, "%" + "25" * 2**17):
        without_key(text.encode(), "&&&&&&&&%%%%%%%%sssssss")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("key", ["k", "abc1234"])
@pytest.mark.parametrize("bad", [(401, "bad"), (500, {"error": "bad"}), (200, b"bad"), ("raw", "bad")])
def test_short_keys(key, bad):
    status, content = bad
    told = f"<{key}{key}{key}> {base64.b64encode(key.encode())}"
    content = {"error": told} if isinstance(content, dict) else told.encode() + b"\r\n"
    with Scripted((status, content), (200, [key])) as server:
        client = JSONOverHTTP(server.url, retries=0)
        with pytest.raises((ValueError, ConnectionError)) as error:
            client.post("/x", b"", "text/plain", key=Secret(key))
        assert client.post("/x", b"", "text/plain", key=Secret(key)) == [key]
    own = error.value.__traceback__.tb_next
    text = "".join(traceback.TracebackException(type(error.value), error.value, own, capture_locals=True).format())
    assert key * 3 not in text
    if status != "raw":
        assert "not shown (it may hold the key, which is short)" in str(error.value)


@pytest.mark.parametrize("retries", [2.5, True, "3", None, float("nan")])
def test_retries_are_an_integer(retries):
    with pytest.raises(ValueError, match="retries must be an integer of at least 0"):
        JSONOverHTTP("http://localhost:1", retries=retries)
