"""The client of moderation endpoints against a server that misbehaves."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import time
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
import torch

from tests.envs.scripted_server import Scripted
from torchrl_lang.envs.reddit.rewards import CachedReward, ModerationAPIReward, TokenBucket

KEY = "sk-secret/0123456789abcdefghijklmnopqrstuvwxyz"
LONG_KEY = "sk-" + "0123456789" * 20
BACKSLASH_KEY = 'sk-back\\slash/"0123456789\\'


def escaped(key):
    """As PHP writes it in JSON."""
    return json.dumps(key)[1:-1].replace("/", r"\/")


def numbers(key):
    return "".join(rf"\u{ord(character):04X}" for character in key)


class Clock:
    """Waiting takes no time, but is counted."""

    def __init__(self):
        self.now, self.waits = 100.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def reply(*scores, **more):
    """A good reply with these scores of harassment."""
    results = [
        {"flagged": score > 0.5, "category_scores": {"harassment": score, "violence": 0.25}, "categories": {}}
        for score in scores
    ]
    return 200, {"id": "modr-1", "model": "m", "results": results, **more}


def client(server, clock=None, **options):
    return ModerationAPIReward(f"{server.url}/v1", "m", clock=clock or Clock(), **{"rate": 1e6, **options})


def test_the_protocol():
    with Scripted(reply(0.75, 0.125)) as server:
        values = client(server)(["you fool", "thank you \N{GRINNING FACE}"])
    assert values.dtype == torch.float32
    assert values.tolist() == [1.0, 0.0]
    method, path, kind, body = server.seen[0]
    assert (method, path, kind) == ("POST", "/v1/moderations", "application/json")
    assert json.loads(body) == {"model": "m", "input": ["you fool", "thank you \N{GRINNING FACE}"]}
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_scores():
    with Scripted(reply(0.75, 0.125), reply(0.75, 0.125)) as server:
        assert client(server, score="harassment")(["a", "b"]).tolist() == [0.75, 0.125]
        assert client(server, score="largest")(["a", "b"]).tolist() == [0.75, 0.25]


def test_no_key_is_sent_where_none_is_needed(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with Scripted(reply(0.75)) as server:
        client(server, key_variable=None)(["a"])
    assert "Authorization" not in server.headers[0]


def test_batches_in_order_without_empty_texts():
    with Scripted(reply(0.1, 0.2), reply(0.3, 0.4), reply(0.5)) as server:
        values = client(server, batch_size=2, score="harassment")(["a", "", "b", "c", " \n", "d", "e"])
    assert values.tolist() == pytest.approx([0.1, 0.0, 0.2, 0.3, 0.0, 0.4, 0.5])
    assert [json.loads(seen[-1])["input"] for seen in server.seen] == [["a", "b"], ["c", "d"], ["e"]]


def test_nothing_is_sent_for_no_text():
    with Scripted() as server:
        assert client(server)([]).shape == (0,)
        assert client(server)(["", " "]).tolist() == [0.0, 0.0]
    assert server.seen == []


@pytest.mark.parametrize(
    "bad",
    [(429, {"error": {"message": "slow down"}}), (500, b"oops"), (503, {}), ("cut", reply(0.75)[1]), ("drop", "")],
    ids=["429", "500", "503", "cut off", "dropped"],
)
def test_sent_again_until_it_is_answered(bad):
    clock = Clock()
    with Scripted(bad, bad, bad, reply(0.75)) as server:
        assert client(server, clock, first_wait=1.0, longest_wait=2.0)(["a"]).tolist() == [1.0]
    assert len(server.seen) == 4
    assert len(clock.waits) == 3
    for wait, most in zip(clock.waits, [1.0, 2.0, 2.0], strict=True):  # doubled, at most the longest, and jittered
        assert most / 2 <= wait <= most


def test_a_slow_server():
    with Scripted(("sleep", 2), reply(0.75)) as server:
        began = time.monotonic()
        assert client(server, timeout=0.1)(["a"]).tolist() == [1.0]
        assert time.monotonic() - began < 1.5
        assert len(server.seen) == 2


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_attempts_are_bounded(retries):
    clock = Clock()
    message = rf"none of {retries + 1} requests.*429.*slow down"
    bad = (429, {"error": {"message": "slow down"}})
    with Scripted(*[bad] * 9) as server, pytest.raises(ConnectionError, match=message):
        client(server, clock, retries=retries)(["a"])
    assert len(server.seen) == retries + 1
    assert len(clock.waits) == retries


def test_retry_after_in_seconds():
    clock = Clock()
    with Scripted((429, {}, ("Retry-After", "7")), (503, {}, ("Retry-After", "0")), reply(0.75)) as server:
        client(server, clock, first_wait=0.5, longest_wait=0.5)(["a"])
    assert clock.waits[0] == 7.0
    assert 0.25 <= clock.waits[1] <= 0.5


@pytest.mark.parametrize(("ahead", "low", "high"), [(20, 17, 21), (-20, 0, 0.5)])
def test_retry_after_as_a_date(ahead, low, high):
    """Relative to the server's own clock, which may be wrong."""
    clock = Clock()
    until = datetime.now(UTC) + timedelta(seconds=ahead)
    with Scripted((429, {}, ("Retry-After", format_datetime(until, usegmt=True))), reply(0.75)) as server:
        client(server, clock, first_wait=0.5, longest_wait=0.5)(["a"])
    assert low <= clock.waits[0] <= high


def test_retry_after_that_cannot_be_read():
    clock = Clock()
    far = "Mon, 23 Nov 2020 10:00:00 +99999999999999999999"
    unreadable = ("soon", "-5", "", far)
    with Scripted(*[(429, {}, ("Retry-After", text)) for text in unreadable], reply(0.75)) as server:
        client(server, clock, first_wait=0.5, longest_wait=0.5)(["a"])
    assert max(clock.waits) <= 0.5


def test_too_long_a_wait_is_an_error_at_once():
    clock = Clock()
    message = "asks to wait 86400 seconds, longer than longest_asked_wait=90"
    bad = (429, {}, ("Retry-After", "86400"))
    with Scripted(bad, reply(0.75)) as server, pytest.raises(ConnectionError, match=message):
        client(server, clock, longest_asked_wait=90.0)(["a"])
    assert clock.waits == []
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("bad", "score", "message"),
    [
        ((200, b"<html>"), "flagged", "expected JSON"),
        ((200, b'{"results": [{"flagged": tr'), "flagged", "expected JSON"),
        ((200, []), "flagged", "no list of results for 2 texts"),
        ((200, {"results": None}), "flagged", "no list of results for 2 texts"),
        (reply(0.1), "flagged", "1 results for 2 texts"),
        (reply(0.1, 0.2, 0.3), "flagged", "3 results for 2 texts"),
        ((200, {"results": [1, 2]}), "flagged", "no JSON object"),
        ((200, {"results": [{}, {}]}), "flagged", 'without "flagged"'),
        ((200, {"results": [{"flagged": 1}] * 2}), "flagged", 'without "flagged"'),
        ((200, {"results": [{}, {}]}), "largest", 'without "category_scores"'),
        (reply(0.1, 0.2), "hate", r"without a score of 'hate'; its categories are \['harassment', 'violence'\]"),
        ((200, {"results": [{"category_scores": {"hate": "high"}}] * 2}), "hate", "number from 0 to 1"),
        ((200, b'{"results": [{"category_scores": {"a": NaN}}, {}]}'), "largest", "number from 0 to 1"),
        (reply(7.0, 0.2), "largest", "from 0 to 1, got 7.0"),
        (reply(0.1, -0.5), "harassment", "from 0 to 1, got -0.5"),
        ((401, {"error": {"message": "wrong key"}}), "flagged", "status 401.*wrong key"),
        ((400, b"no"), "flagged", "status 400"),
        ((301, b""), "flagged", "status 301"),
    ],
)
def test_replies_that_are_none_of_the_protocol_are_errors_at_once(bad, score, message):
    clock = Clock()
    with Scripted(bad, reply(0.1, 0.2)) as server, pytest.raises(ValueError, match=message):
        client(server, clock, score=score)(["a", "b"])
    assert len(server.seen) == 1
    assert clock.waits == []


@pytest.mark.parametrize("key", [KEY, LONG_KEY, BACKSLASH_KEY])
@pytest.mark.parametrize(
    "bad",
    [
        lambda key: (401, {"error": {"message": f"Incorrect API key provided: {key}."}}),
        lambda key: (401, f"no such key: {key}".encode()),
        lambda key: (500, {"error": {"message": f"{key} failed"}}),
        lambda key: (429, f"{key} again".encode()),
        lambda key: (200, f"<html>{key}".encode()),
        lambda key: (200, {"results": [key]}),
        lambda key: (200, {"results": key}),
        lambda key: ("raw", f"Authorization {key}\r\n".encode()),  # no HTTP
        lambda key: (200, {"results": [{"category_scores": {key: 0.5}}]}),
        lambda key: (200, f'{{"results": [{{"category_scores": {{"{escaped(key)}": 0.5}}}}]}}'.encode()),
        lambda key: (200, {"results": [{"category_scores": {"hate": key}}]}),
        lambda key: (401, f'{{"detail": "no key {escaped(key)}"}}'.encode()),
        lambda key: (401, f'{{"detail": "no key {escaped(key)}"}}'.encode("utf-16")),
        lambda key: (401, f'{{"detail": "no key {escaped(key)}'.encode()),  # no JSON
        lambda key: (401, f'"{numbers(key)}"'.encode()),
        lambda key: (401, f"{numbers(key)}".encode()),  # no JSON
        lambda key: (401, {"error": {"message": key}}),
        lambda key: (401, {"error": json.dumps({"message": key}).replace("/", r"\/")}),
    ],
)
def test_the_key_appears_nowhere(bad, key, monkeypatch, caplog, capfd):
    """Not in errors, their causes and arguments, in logs, output or representations."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with caplog.at_level(logging.DEBUG), Scripted(*[bad(key)] * 2) as server:
        reward = client(server, retries=1, score="hate")
        with pytest.raises((ValueError, ConnectionError)) as error:
            reward(["a"])
    own = error.value.__traceback__.tb_next  # the frames of this test hold the key
    with_locals = traceback.TracebackException(type(error.value), error.value, own, capture_locals=True)
    shown = "".join(with_locals.format()) + caplog.text + "".join(capfd.readouterr())
    found, seen = error.value, set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        shown += repr(found) + repr(vars(found))
        found = found.__cause__ or found.__context__
    shown += repr(reward) + str(vars(reward)) + str(vars(reward._http))
    shown, plain = shown.replace("\\", ""), key.replace("\\", "")
    assert plain[:8] not in shown
    assert plain[-8:] not in shown
    assert server.headers[0]["Authorization"] == f"Bearer {key}"


@pytest.mark.parametrize("key", ["m", "1", "results", "0.75"])
def test_short_keys_of_servers_that_take_any(key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with Scripted(reply(0.75)) as server:
        assert client(server, score="harassment")(["a"]).tolist() == [0.75]


@pytest.mark.parametrize(
    "results",
    [[], ["abc1234"], [{"category_scores": {"abc1234": 0.5}}], [{"category_scores": {"hate": "abc1234"}}]],
)
def test_results_that_may_hold_a_short_key_are_not_shown(results, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "abc1234")
    with Scripted((200, {"results": results})) as server, pytest.raises(ValueError, match=r"moderations|hate") as error:
        client(server, score="hate")(["a"])
    own = error.value.__traceback__.tb_next
    with_locals = traceback.TracebackException(type(error.value), error.value, own, capture_locals=True)
    assert "abc1234" not in "".join(with_locals.format())


@pytest.mark.parametrize("url", ["http://..com/v1", f"http://{'a' * 70}.com/v1", "http://user:PASS@host/v1"])
def test_an_object_whose_address_is_wrong_can_be_shown(url):
    half = ModerationAPIReward.__new__(ModerationAPIReward)
    with pytest.raises(ValueError, match="address of a server"):
        half.__init__(url, "m")
    assert repr(half) == "ModerationAPIReward('', 'm', score='flagged')"


@pytest.mark.parametrize("value", ["", "  "])
def test_a_missing_key(monkeypatch, value):
    monkeypatch.setenv("OPENAI_API_KEY", value)
    with pytest.raises(ValueError, match="OPENAI_API_KEY holds no key"):
        ModerationAPIReward("http://localhost:1", "m")


@pytest.mark.parametrize("value", ["sk-one\nsk-two", "sk-caf\xe9", "Bearer sk-1"])
def test_a_key_that_no_header_can_hold(monkeypatch, value):
    monkeypatch.setenv("OPENAI_API_KEY", value)
    with pytest.raises(ValueError, match="characters other than printable ASCII") as error:
        ModerationAPIReward("http://localhost:1", "m")
    assert "sk-" not in str(error.value)


def test_the_token_bucket_limits_attempts_too():
    clock = Clock()
    with Scripted((500, {}), *[reply(0.1)] * 4) as server:
        client(server, clock, rate=2.0, burst=2, batch_size=1, first_wait=0.01, longest_wait=0.01)(list("abcd"))
    assert len(server.seen) == 5
    # Two at once, then one each half second: the pause of at most 0.01 s after the first is a part of it.
    assert clock.now - 100.0 == pytest.approx(1.5, abs=1e-6)


def test_a_token_bucket_fills_while_nothing_is_taken():
    clock = Clock()
    bucket = TokenBucket(4.0, burst=3, clock=clock)
    for _ in range(5):
        bucket.take()
    assert clock.waits == [0.25, 0.25]
    clock.now += 100.0
    for _ in range(4):
        bucket.take()
    assert clock.waits == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])  # noqa: S301
def test_copies_limit_their_own_requests(copied, monkeypatch):
    waits = []
    monkeypatch.setattr("torchrl_lang.envs.reddit.rewards.token_bucket._SystemClock.sleep", waits.append)
    with Scripted(*[reply(0.1)] * 4) as server:
        reward = ModerationAPIReward(f"{server.url}/v1", "m", rate=0.5, burst=2, batch_size=1)
        same = copied(reward)
        assert same(["a", "b"]).tolist() == reward(["a", "b"]).tolist()
    assert len(waits) == (2 if copied is copy.copy else 0)  # a shallow copy shares the bucket
    assert repr(same) == repr(reward)


def test_a_copied_bucket_does_not_count_from_the_clock_of_another_machine():
    clock = Clock()
    bucket = TokenBucket(1.0, burst=2, clock=clock)
    bucket.take()
    state = bucket.__getstate__()
    clock.now = 5.0  # seconds after a restart
    other = TokenBucket.__new__(TokenBucket)
    other.__setstate__(state)
    other.take()
    assert clock.waits == []
    other.take()
    assert clock.waits == [1.0]


def test_a_cache_keeps_what_has_been_scored(tmp_path):
    with Scripted(reply(0.1, 0.2), (400, {}), reply(0.3)) as server:
        inner = client(server, score="harassment")
        reward = CachedReward(inner, tmp_path / "rewards.sqlite", model="m", batch_size=2)
        with pytest.raises(ValueError, match="status 400"):
            reward(["a", "b", "c"])
        assert reward(["a", "b", "c"]).tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert [json.loads(seen[-1])["input"] for seen in server.seen] == [["a", "b"], ["c"], ["c"]]
    assert KEY.encode() not in (tmp_path / "rewards.sqlite").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "api.openai.com"}, "address"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size must be an integer"),
        ({"retries": 2.5}, "retries must be an integer"),
        ({"burst": 1.5}, "burst must be an integer"),
        ({"rate": 0}, "rate"),
        ({"burst": 0}, "burst"),
        ({"retries": -1}, "retries"),
        ({"longest_wait": 0}, "longest_wait"),
        ({"longest_asked_wait": -1}, "longest_asked_wait"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        ModerationAPIReward(**{"base_url": "http://localhost:1", "model": "m", **options})
