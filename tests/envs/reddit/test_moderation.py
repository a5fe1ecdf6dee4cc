"""The reward of moderation endpoints: its protocol, its rate, replies that are none of it, and keys in them."""

import copy
import json
import pickle
import traceback

import pytest
import torch

from tests.envs.scripted_server import Scripted
from torchrl_lang.envs.reddit import CachedReward, ModerationAPIReward, moderation

KEY = "sk-secret/0123456789abcdefghijklmnopqrstuvwxyz"


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
def clock(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(moderation, "time", Clock())
    return moderation.time


def reply(*scores):
    """A good reply with these scores of harassment."""
    results = [{"flagged": s > 0.5, "category_scores": {"harassment": s, "violence": 0.25}} for s in scores]
    return 200, {"id": "modr-1", "model": "m", "results": results}


def client(server, **options):
    return ModerationAPIReward(f"{server.url}/v1", "m", **{"rate": 1e6, **options})


def test_the_protocol():
    with Scripted(*[reply(0.75, 0.125)] * 3) as server:
        values = client(server)(["you fool", "thank you \N{GRINNING FACE}"])
        assert client(server, score="harassment")(["a", "b"]).tolist() == [0.75, 0.125]
        assert client(server, score="largest")(["a", "b"]).tolist() == [0.75, 0.25]
    assert (values.dtype, values.tolist()) == (torch.float32, [1.0, 0.0])
    method, path, kind, body = server.seen[0]
    assert (method, path, kind) == ("POST", "/v1/moderations", "application/json")
    assert json.loads(body) == {"model": "m", "input": ["you fool", "thank you \N{GRINNING FACE}"]}
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_batches_in_order_without_empty_texts():
    with Scripted(reply(0.1, 0.2), reply(0.3, 0.4), reply(0.5)) as server:
        reward = client(server, batch_size=2, score="harassment")
        values = reward(["a", "", "b", "c", " \n", "d", "e"])
        assert reward([]).shape == (0,)
        assert reward(["", " "]).tolist() == [0.0, 0.0]
    assert values.tolist() == pytest.approx([0.1, 0.0, 0.2, 0.3, 0.0, 0.4, 0.5])
    assert [json.loads(seen[-1])["input"] for seen in server.seen] == [["a", "b"], ["c", "d"], ["e"]]


def test_sent_again_until_it_is_answered(clock):
    with Scripted((429, {}, ("Retry-After", "7")), (500, b"oops"), reply(0.75)) as server:
        assert client(server, first_wait=1.0, longest_wait=2.0, retries=2)(["a"]).tolist() == [1.0]
    assert clock.waits[0] == 7.0
    assert 1 <= clock.waits[1] <= 2
    bad = (429, {"error": {"message": "slow down"}})
    with Scripted(bad, bad) as server, pytest.raises(ConnectionError, match="none of 2 requests"):
        client(server, retries=1)(["a"])


@pytest.mark.parametrize(
    ("bad", "score", "noun"),
    [
        ((200, b"<html>"), "flagged", "JSON"),
        ((200, []), "flagged", "wrong content"),
        (reply(0.1), "flagged", "1 results for 2 texts"),
        ((200, {"results": [{}, {}]}), "flagged", "no score 'flagged'"),
        ((200, {"results": [{"flagged": 1}] * 2}), "flagged", "wrong flagged"),
        (reply(0.1, 0.2), "hate", "no score 'hate', but harassment, violence"),
        ((200, {"results": [{"category_scores": {"hate": True}}] * 2}), "hate", "wrong hate"),
        ((200, b'{"results": [{"category_scores": {"a": NaN}}, {}]}'), "largest", "wrong a"),
        (reply(7.0, 0.2), "largest", "wrong harassment"),
        ((401, {"error": {"message": "wrong key"}}), "flagged", "status 401.*wrong key"),
    ],
)
def test_replies_that_are_none_of_the_protocol_are_errors_at_once(bad, score, noun, clock):
    with Scripted(bad, reply(0.1, 0.2)) as server, pytest.raises(ValueError, match=noun):
        client(server, score=score)(["a", "b"])
    assert len(server.seen) == 1
    assert clock.waits == []


@pytest.mark.parametrize("key", [KEY, "abc1234"])
@pytest.mark.parametrize("place", range(4))
def test_results_that_may_hold_the_key_are_not_shown(place, key, monkeypatch):
    """Not in errors, their causes and arguments, tracebacks, or representations."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    scores = [{"category_scores": each} for each in ({key: 0.5}, {"hate": key}, {"hate": 0.5})]
    results = (key, scores[:1], scores[1:2], [scores[2], {key: key}])[place]
    with Scripted((200, {"results": results})) as server:
        reward = client(server, score="hate")
        with pytest.raises(ValueError, match="moderations replied") as error:
            reward(["a"])
    own = error.value.__traceback__.tb_next  # the frames of this test hold the key
    with_locals = traceback.TracebackException(type(error.value), error.value, own, capture_locals=True)
    shown, found = "".join(with_locals.format()) + repr(reward) + str(vars(reward)), error.value
    while found is not None:
        shown += repr(found) + repr(vars(found))
        found = found.__cause__ or found.__context__
    assert key not in shown
    assert server.headers[0]["Authorization"] == f"Bearer {key}"


def test_the_rate_limits_attempts_too_and_pauses_save_requests(clock):
    with Scripted((500, {}), *[reply(0.1)] * 7) as server:
        reward = client(server, rate=2.0, burst=2, batch_size=1, first_wait=0.01, longest_wait=0.01)
        reward(list("abcd"))
        # Two at once, then one each half second: the pause of at most 0.01 s after the first is a part of it.
        assert clock.now - 100.0 == pytest.approx(1.5, abs=1e-6)
        clock.now += 100.0
        clock.waits.clear()
        reward(list("abc"))
    assert clock.waits == [0.5]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])  # noqa: S301
def test_copies_limit_their_own_requests(copied, clock):
    """And do not count from the clock of another machine."""
    with Scripted(*[reply(0.1)] * 4) as server:
        reward = client(server, rate=0.5, burst=2, batch_size=1)
        clock.now = 5.0  # seconds after a restart
        same = copied(reward)
        assert same(["a", "b"]).tolist() == [0.0, 0.0]
        clock.now = 100.0
        reward(["a", "b"])
    assert clock.waits == []
    assert repr(same) == repr(reward)


def test_a_cache_keeps_scored_texts(tmp_path):
    with Scripted(reply(0.1, 0.2), (400, {}), reply(0.3)) as server:
        inner = client(server, score="harassment")
        reward = CachedReward(inner, tmp_path / "rewards.sqlite", model="m", batch_size=2)
        with pytest.raises(ValueError, match="status 400"):
            reward(["a", "b", "c"])
        assert reward(["a", "b", "c"]).tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert [json.loads(seen[-1])["input"] for seen in server.seen] == [["a", "b"], ["c"], ["c"]]
    assert KEY.encode() not in (tmp_path / "rewards.sqlite").read_bytes()


def test_wrong_options():
    for url, burst, noun in (("http://localhost:1", 0, "burst"), ("http://host/v1", 1, "https")):
        with pytest.raises(ValueError, match=noun):  # a key is sent over https, or to this machine
            ModerationAPIReward(url, "m", burst=burst)
