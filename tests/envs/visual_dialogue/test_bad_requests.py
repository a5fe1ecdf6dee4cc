"""Requests that are wrong: each gets a JSON error that names the field, and the server answers the next one."""

import json
import random
import re
import select
import socket
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.envs.visual_dialogue.test_server import form, health, post, send
from tests.envs.visual_dialogue.word_overlap import make_batch

ASKING = ("fetch_a_bot_response", "step", "step_rank")
ROUTES = (*ASKING, "fetch_q_bot_response", "fetch_reward", "fetch_reward_rank")


def valid(route="step_rank"):
    dialogues, questions, features = make_batch(3)
    return form(dialogues[2], questions[2] if route in ASKING else None, features[2])


def history(*texts):
    speakers = ("question", "answer") * len(texts)
    return json.dumps([{"speaker": who, "text": text} for who, text in zip(speakers, texts, strict=False)])


DEEP = "[" * 100_000
ONES = "1, " * 15
WRONG = {  # changed fields, status, the field that is named, a part of the message
    "no history": ({"history": None}, 400, "history", "no field"),
    "history is no JSON": ({"history": "[{"}, 400, "history", "JSON"),
    "history is deep": ({"history": DEEP}, 400, "history", "JSON"),
    "history without a text": ({"history": '[{"speaker": "question"}]'}, 400, "history", "history.0.text"),
    "answer first": ({"history": '[{"speaker": "answer", "text": "no"}]'}, 400, "history", "alternate"),
    "another speaker": ({"history": '[{"speaker": "me", "text": "no"}]'}, 400, "history", "'question' or 'answer'"),
    "ends with an answer": ({"history": history("is it red?", "no")}, 400, "history", "end with a question"),
    "a lone surrogate": ({"history": '[{"speaker": "question", "text": "\\ud800"}]'}, 400, "history", "hex escape"),
    "a long text": ({"history": history("x" * 2001)}, 413, "history", "2000"),
    "many rounds": ({"history": history(*["x"] * 65)}, 413, "history", "64"),
    "too few features": ({"img_features": "[1.0]"}, 400, "img_features", "1 image features, expected 16"),
    "infinity": ({"img_features": f"[{ONES} 1e999]"}, 400, "img_features", "img_features.15"),
    "a large number": ({"img_features": f"[{ONES} 1e30]"}, 400, "img_features", "1e+30"),
    "other decoding": ({"generation_kwargs": '{"inference": "sample"}'}, 400, "generation_kwargs", "greedy"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_field_that_is_wrong_is_named(server, name):
    changes, status, field, part = WRONG[name]
    fields = {key: value for key, value in (valid() | changes).items() if value is not None}
    found, reply = post(server, "step_rank", fields)
    assert (found, reply["field"]) == (status, field), reply
    assert part in reply["error"]
    assert len(reply["error"]) < 400


BATCH = {"route": "step", "history": [json.loads(history("is it red?"))]}
BATCH |= {"caption": ["a"], "img_features": [[0.5] * 16]}
WRONG_BATCHES = {
    "no JSON": (b"{", 400, "body"),
    "not UTF-8": (b"\xff\xfe{", 400, "body"),
    "no route": ({"route": None}, 400, "route"),
    "unknown route": ({"route": "health"}, 400, "route"),
    "unknown field": ({"captions": []}, 400, "captions"),
    "caption is a text": ({"caption": "a"}, 400, "caption"),
    "unequal lengths": ({"caption": ["a", "b"]}, 400, "body"),
    "too many": ({name: BATCH[name] * 65 for name in ("history", "caption", "img_features")}, 413, "history"),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_the_field_of_a_batch_that_is_wrong_is_named(server, name):
    body, status, field = WRONG_BATCHES[name]
    if not isinstance(body, bytes):
        body = json.dumps({key: value for key, value in (BATCH | body).items() if value is not None}).encode()
    found, reply = send(server, "batch", body)
    assert (found, reply["field"]) == (status, field)


def test_other_errors(server):
    assert send(server, "nowhere", b"")[0] == 404
    assert send(server, "distance", b"")[0] == 404
    assert send(server, "batch/", b"{}")[0] == 404
    assert send(server, "health", b"x")[0] == 405
    assert send(server, "step", b"{}", **{"Content-Type": "application/json"})[0] == 415
    assert send(server, "step", b"x" * (server.limits["body"] + 1))[0] == 413
    twice = post(server, "step", [("history", "[]"), ("history", "[]")])[1]
    assert (twice["field"], twice["error"]) == ("history", "has history twice")
    kind = {"Content-Type": "Application/X-WWW-Form-URLencoded; charset=utf-8"}
    body = urllib.parse.urlencode(valid("fetch_q_bot_response")).encode()
    assert send(server, "fetch_q_bot_response", body, **kind)[0] == 200
    assert post(server, "step", valid("step") | {"caption": ""})[0] == 200  # a caption may be empty


@pytest.mark.parametrize("sent", [b"", b"POST /batch HTTP/1.1\r\nX: y\r\n"])
def test_headers_that_never_end_close_the_connection(server, sent, monkeypatch):
    monkeypatch.setattr("torchrl_lang.envs.visual_dialogue.server._HEADER_SECONDS", 0.5)
    began = time.monotonic()
    with socket.create_connection((server.host, server.port), timeout=20) as connection, suppress(ConnectionError):
        connection.sendall(sent)
        while not select.select([connection], [], [], 0.1)[0]:
            if sent:  # further bytes do not extend the time
                connection.sendall(b"X: y\r\n")
        assert connection.recv(100) == b""
    assert 0.4 < time.monotonic() - began < 10


def test_a_slow_body_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr("torchrl_lang.envs.visual_dialogue.server._BODY_SECONDS", 0.3)
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(request("batch", b"{", ["Content-Length: 100"]))
        assert b" 408 " in connection.recv(1000).splitlines()[0]


@pytest.mark.slow
def test_reading_a_large_request_does_not_hold_up_others(server):
    """It is parsed beside the loop that answers, and cannot be much larger than the features of a batch."""
    assert server.limits["body"] == 2**22 + 32 * 64 * 16
    large = BATCH | {"img_features": [[0.123456789] * (server.limits["body"] // 14)]}
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(send, server, "batch", json.dumps(large).encode()) for _ in range(2)]
        waits = []
        while not all(each.done() for each in slow):
            began = time.monotonic()
            health(server)
            waits.append(time.monotonic() - began)
    assert [each.result()[0] for each in slow] == [400, 400]
    assert max(waits) < 1


def raw(server, data):
    """Send bytes; the status and the content of what comes back."""
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        with suppress(OSError):  # it was answered before all was read
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            while chunk := connection.recv(2**16):
                answer += chunk
    head, _, content = answer.partition(b"\r\n\r\n")
    if b" 100 " in head:
        head, _, content = content.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return int(head.split()[1]), content[: int(length[1])]  # bytes beyond a body are a request of their own


def request(route, body, headers=()):
    lines = [f"POST /{route} HTTP/1.1", "Host: here", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def sized(body):
    return [f"Content-Length: {len(body)}", "Content-Type: application/x-www-form-urlencoded"]


def damaged_json(rng, route):
    """A value somewhere in a batch is another one."""
    content = json.loads(json.dumps(BATCH))
    place = content
    while True:
        key = rng.choice([*place] if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], list | dict) or not place[key] or rng.random() < 0.3:
            break
        place = place[key]
    place[key] = rng.choice([None, True, -1, 1e300, "", "x" * 3000, [], {}, [[]], {"text": 1}, "\ud800"])
    body = json.dumps(content).encode()
    return request("batch", body, sized(body))


def damaged_bytes(rng, route):
    body = urllib.parse.urlencode(valid(route)).encode()
    data = bytearray(request(route, body, sized(body)))
    for _ in range(rng.randrange(1, 10)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def damaged_head(rng, route):
    body = urllib.parse.urlencode(valid(route)).encode()
    lines = sized(body)
    odd = ["Transfer-Encoding: chunked", "no colon", ": empty", "X: " + "y" * 70_000, "é: é", "Host: other"]
    odd += ["Expect: 100-continue", "Upgrade: websocket", "Connection: upgrade", "Content-Encoding: gzip"]
    odd += ["Content-Type: \x00", "Content-Type: text/plain"]
    odd += [f"Content-Length: {size}" for size in (0, 3, len(body) + 5, 2**40, "-1", "many", "1e3", "0x10", "9" * 30)]
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(odd))
    data = request(route, body, lines[rng.randrange(2) :])
    return data.replace(b"POST", rng.choice([b"POST", b"GET", b"PUT", b"P\x00T", b"", b"CONNECT"]), 1)


@pytest.mark.slow
def test_hundreds_of_damaged_requests_end_in_an_error_or_a_reply(server):
    rng, statuses = random.Random(0), []
    kinds = (damaged_json, damaged_bytes, damaged_head)
    for number in range(150):
        route = rng.choice(ROUTES)
        data = kinds[number % len(kinds)](rng, route)
        status, content = raw(server, data)
        assert status == 200 or 400 <= status < 500, (number, status, content)
        reply = json.loads(content)
        if status != 200:
            assert reply.keys() == {"error", "field"}, (number, reply)
            assert not any(part in reply["error"] for part in ("Traceback", "site-packages", "torchrl_lang", ".py"))
        statuses.append(status)
    assert 3 < statuses.count(200) < 75  # some damage is harmless, most is not
    assert post(server, "step_rank", valid())[0] == 200
