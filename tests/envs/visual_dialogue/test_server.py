"""The server and its queue, by a client written here from the protocol's description, and the client on any server."""

import json
import socket
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.envs.scripted_server import Scripted
from tests.envs.visual_dialogue.word_overlap import WordOverlap, ask, make_batch
from tests.processes import wait_until
from torchrl_lang.envs.visual_dialogue import DialogueServer, RemoteModels
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round, answer_and_score, last_round_rewards
from torchrl_lang.envs.visual_dialogue.protocol import RequestBatch, RequestError
from torchrl_lang.envs.visual_dialogue.server import ModelQueue

GREEDY = '{"inference": "greedy", "beamSize": 1}'


def post(server, route, fields):
    """What a form is answered, as status and JSON."""
    return send(server, route, urllib.parse.urlencode(fields).encode())


def send(server, route, body, **headers):
    request = urllib.request.Request(f"{server.url}/{route}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def form(dialogue, question=None, feature=None):
    history = []
    for asked, answered in dialogue.rounds:
        history += [{"speaker": "question", "text": asked}, {"speaker": "answer", "text": answered}]
    if question is not None:
        history.append({"speaker": "question", "text": question})
    fields = {"history": json.dumps(history), "caption": dialogue.caption, "generation_kwargs": GREEDY}
    return fields if feature is None else {**fields, "img_features": json.dumps(feature.tolist())}


def test_routes_of_the_original_protocol(server, models):
    dialogues, questions, features = make_batch(10)
    answers = models.answers(dialogues, questions, features)
    for row, dialogue in enumerate(dialogues):
        asked = form(dialogue, questions[row], features[row])
        complete = form(dialogue, None, features[row])
        earlier = dialogue._replace(rounds=dialogue.rounds[:-1])
        for route, step, score, sign in (
            ("fetch_reward", "step", models.distances, -1),
            ("fetch_reward_rank", "step_rank", models.percentiles, 1),
        ):

            def value(what, score=score, row=row):
                return float(score([what], features[row : row + 1]))

            change = sign * (value(dialogue) - value(earlier)) if dialogue.rounds else value(dialogue)
            assert post(server, route, complete) == (200, change)
            after = dialogue._replace(rounds=(*dialogue.rounds, Round(questions[row], answers[row])))
            assert post(server, step, asked) == (200, [answers[row], sign * (value(after) - value(dialogue))])
        assert post(server, "fetch_a_bot_response", asked) == (200, answers[row])
        word = ("red", "green", "blue", "black", "cat")[len(dialogue.rounds)]
        assert post(server, "fetch_q_bot_response", form(dialogue)) == (200, f"is it {word}?")


@pytest.mark.parametrize("route", ["fetch_q_bot_response", "fetch_reward", "step_rank"])
def test_a_batch_is_answered_like_its_dialogues(server, route):
    dialogues, questions, features = make_batch(7, seed=1)
    asks = route == "step_rank"
    forms = [form(each, questions[row] if asks else None, features[row]) for row, each in enumerate(dialogues)]
    body = {"route": route, "caption": [each["caption"] for each in forms]}
    body |= {name: [json.loads(each[name]) for each in forms] for name in ("history", "img_features")}
    assert send(server, "batch", json.dumps(body).encode()) == (200, [post(server, route, each)[1] for each in forms])


def test_health(server):
    before = health(server)
    post(server, "fetch_q_bot_response", form(make_batch(1)[0][0]))
    post(server, "fetch_q_bot_response", {})
    after = health(server)
    assert (after["model"], after["feature_size"], after["queue"]) == ("word overlap", 16, 0)
    assert after["limits"]["items"] == 64
    assert after["uptime"] > before["uptime"] > 0
    grown = {name: after["counts"][name] - before["counts"][name] for name in after["counts"]}
    assert grown == {"requests": 2, "rejected": 1, "batches": 1, "dialogues": 1, "failures": 0}


def health(server):
    with urllib.request.urlopen(f"{server.url}/health", timeout=60) as reply:
        return json.load(reply)


@pytest.mark.slow
def test_models_behind_http_and_in_process_give_the_same_numbers(server, models):
    dialogues, questions, features = make_batch(70, seed=7)
    for remote in (RemoteModels(server.url), RemoteModels(server.url, feature_size=16)):
        rows = 70 if remote._items else 6  # more than a batch has
        batch, asked = (dialogues[:rows], features[:rows]), (dialogues[:rows], questions[:rows], features[:rows])
        assert remote.feature_size == 16
        assert remote.answers(*asked) == models.answers(*asked)
        assert remote.questions(dialogues[:2]) == ["is it red?", "is it green?"]
        assert torch.equal(remote.distances(*batch), models.distances(*batch))
        assert torch.equal(remote.percentiles(*batch), models.percentiles(*batch))
        for measure in ("distance", "rank"):
            local = answer_and_score(models, *asked, measure=measure)
            assert answer_and_score(remote, *asked, measure=measure) == local
            local = last_round_rewards(models, *batch, measure=measure)
            assert last_round_rewards(remote, *batch, measure=measure) == local
        assert remote.answers([], [], torch.empty(0, 16)) == []
        assert remote.distances([], torch.empty(0, 16)).shape == (0,)


class Held(WordOverlap):
    """Waits before it answers, records the captions of its batches, and fails on some."""

    def __init__(self):
        super().__init__()
        self.go, self.batches = threading.Event(), []

    def answers(self, dialogues, questions, features):
        self.batches.append([dialogue.caption for dialogue in dialogues])
        assert self.go.wait(60)
        if "fault" in self.batches[-1]:
            raise RuntimeError("/home/somewhere/weights.bin")
        return super().answers(dialogues, questions, features)

    def distances(self, dialogues, features):
        found = super().distances(dialogues, features)
        return found.masked_fill(torch.tensor([dialogue.caption == "odd" for dialogue in dialogues]), torch.nan)


@pytest.fixture
def held():
    return Held()


def submit(models, *captions):
    route, question, image = "fetch_a_bot_response", ["is it red?"], torch.zeros(1, 16)
    return [models.submit(route, RequestBatch([Dialogue(caption)], question, image)) for caption in captions]


def test_what_waits_is_answered_as_one_batch_in_order_but_for_what_was_given_up(held):
    models = ModelQueue(held, ask, size=8)
    first = submit(models, "a")
    wait_until(lambda: held.batches)
    rest = submit(models, "b", "given up", "c", "d")
    assert rest.pop(1).cancel()
    question = models.submit("fetch_q_bot_response", RequestBatch([Dialogue("e")], [], None))
    held.go.set()
    assert [future.result(60) for future in first + rest] == [["no"]] * 4
    assert question.result(60) == ["is it red?"]
    assert held.batches == [["a"], ["b", "c", "d"]]
    models.close()


def test_only_the_request_at_fault_fails(held):
    models = ModelQueue(held, None, size=8)
    waiting = submit(models, "a")
    wait_until(lambda: held.batches)
    waiting += submit(models, "b", "fault", "c")
    held.go.set()
    fault = waiting.pop(2)
    assert [future.result(60) for future in waiting] == [["no"]] * 3
    with pytest.raises(RequestError, match="log") as failure:
        fault.result(60)
    assert failure.value.status == 500
    assert models.counts["failures"] == 1
    assert submit(models, "after")[0].result(60) == ["no"]
    models.close()


@pytest.fixture
def serving(held):
    pytest.importorskip("uvicorn")
    with DialogueServer(held, queue=1) as running:
        yield running
        held.go.set()


def fields(caption):
    _, questions, features = make_batch(1)
    return form(Dialogue(caption), questions[0], features[0])


def test_a_full_queue_asks_to_come_back_later(held, serving):
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(post, serving, "fetch_a_bot_response", fields("a"))
        wait_until(lambda: held.batches)
        second = pool.submit(post, serving, "fetch_a_bot_response", fields("b"))
        wait_until(lambda: health(serving)["queue"] == 1)
        status, reply = post(serving, "fetch_a_bot_response", fields("c"))
        assert (status, reply["error"]) == (503, "1 requests wait: send it again later")
        held.go.set()
        assert first.result(60)[0] == second.result(60)[0] == 200


def test_failures_show_nothing_of_the_machine(held, serving, caplog):
    held.go.set()
    status, reply = post(serving, "fetch_a_bot_response", fields("fault"))
    assert (status, reply["field"]) == (500, None)
    assert "weights.bin" not in reply["error"]
    assert "weights.bin" in caplog.text
    assert post(serving, "fetch_reward", form(Dialogue("odd"), None, make_batch(1)[2][0]))[0] == 500
    assert post(serving, "fetch_q_bot_response", form(Dialogue("a")))[0] == 404  # there is no questioner
    assert post(serving, "fetch_a_bot_response", fields("a"))[0] == 200


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_all_addresses_of_both_kinds():
    with DialogueServer(WordOverlap(), host="::") as running:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, running.port), timeout=10).close()


def test_servers_that_cannot_start(serving, monkeypatch):
    with pytest.raises(OSError, match=f"127.0.0.1.*{serving.port}"):
        DialogueServer(WordOverlap(), port=serving.port).start()
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl-lang\[visdial\]'"):
        DialogueServer(WordOverlap()).start()


FAST = {"first_wait": 0.001, "longest_wait": 0.01}
HEALTH = (200, {"feature_size": 16, "limits": {"items": 64}})


def test_what_the_server_rejects_is_not_sent_again():
    rejected = (400, {"error": "caption is missing", "field": "caption"})
    with Scripted(HEALTH, rejected) as server:
        models = RemoteModels(server.url, **FAST)
        with pytest.raises(ValueError, match="/batch rejected the request with status 400: caption is missing"):
            models.distances(*make_batch(1)[::2])
        assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [(b"<html>", "expected JSON"), ({}, "list"), ([1.0, 2.0], "2 replies, expected 1"), (["far"], "number")]
    + [(b"[NaN]", "number"), ([True], "number"), ([-0.5], "greater than or equal to 0")]
    + [([1e300], "less than or equal to")],
)
def test_replies_that_are_none_of_the_protocol(reply, message):
    with Scripted(HEALTH, (200, reply)) as server, pytest.raises(ValueError, match=f"(?s){server.url}.*{message}"):
        RemoteModels(server.url).distances(*make_batch(1)[::2])


def test_steps_and_health_that_are_none_of_the_protocol():
    for reply in (["yes"], [["yes"]], [[1.0, "yes"]], [["yes", -1.5]], [["yes", True]]):
        with Scripted(HEALTH, (200, reply)) as server, pytest.raises(ValueError, match="The reply of http"):
            RemoteModels(server.url).answer_and_score(*make_batch(1))
    for replied in ({}, {"feature_size": 0, "limits": {"items": 64}}, {"feature_size": 16}, []):
        with Scripted((200, replied)) as server, pytest.raises(ValueError, match="give the feature_size"):
            RemoteModels(server.url)


def test_the_bytes_of_the_original_protocol():
    """As the original client sends them: a form with a JSON history, and replies of JSON."""
    dialogue = Dialogue("a cat & a dog", (Round("is it wet?", "no"),))
    with Scripted((200, ["yes", 0.25]), (200, 0.5)) as server:
        models = RemoteModels(server.url + "/", feature_size=2)
        features = torch.tensor([[0.5, -0.25]])
        assert answer_and_score(models, [dialogue], ["is it red?"], features) == (["yes"], [0.25])
        assert last_round_rewards(models, [dialogue._replace(rounds=())], features) == [0.5]
    method, path, kind, body = server.seen[0]
    assert (method, path, kind) == ("POST", "/step_rank", "application/x-www-form-urlencoded")
    assert body == (
        b"history=%5B%7B%22speaker%22%3A+%22question%22%2C+%22text%22%3A+%22is+it+wet%3F%22%7D%2C+%7B%22speaker%22%3A+"
        b"%22answer%22%2C+%22text%22%3A+%22no%22%7D%2C+%7B%22speaker%22%3A+%22question%22%2C+%22text%22%3A+%22is+it+red"
        b"%3F%22%7D%5D&caption=a+cat+%26+a+dog&img_features=%5B0.5%2C+-0.25%5D"
        b"&generation_kwargs=%7B%22inference%22%3A+%22greedy%22%2C+%22beamSize%22%3A+1%7D"
    )
    assert server.seen[1][1] == "/fetch_reward_rank"


def test_values_of_an_original_server_are_sums_of_its_rewards():
    dialogue = Dialogue("a", (Round("b?", "c"), Round("d?", "e")))
    with Scripted(*[(200, reward) for reward in (2.0, 0.5, 0.25, 0.25, 0.5, -0.125)]) as server:
        models = RemoteModels(server.url, feature_size=2)
        assert models.distances([dialogue], torch.ones(1, 2)).tolist() == [2.0 - 0.5 - 0.25]
        assert models.percentiles([dialogue], torch.ones(1, 2)).tolist() == [0.25 + 0.5 - 0.125]
    assert [seen[1] for seen in server.seen] == ["/fetch_reward"] * 3 + ["/fetch_reward_rank"] * 3
