"""The server's protocol, with a client that is written here from its description alone."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.parse
import urllib.request

import pytest
import torch

from tests.envs.visual_dialogue.conftest import make_batch
from torchrl_lang.envs.visual_dialogue import DialogueServer, RemoteModels, Round
from torchrl_lang.envs.visual_dialogue.scoring import answer_and_score, last_round_rewards

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


@pytest.mark.parametrize("route", ["fetch_a_bot_response", "fetch_q_bot_response", "fetch_reward", "step", "step_rank"])
def test_a_batch_is_answered_like_its_dialogues(server, route):
    dialogues, questions, features = make_batch(7, seed=1)
    asks = route in ("fetch_a_bot_response", "step", "step_rank")
    forms = [form(each, questions[row] if asks else None, features[row]) for row, each in enumerate(dialogues)]
    body = {"route": route, "caption": [each["caption"] for each in forms]}
    body |= {name: [json.loads(each[name]) for each in forms] for name in ("history", "img_features")}
    assert send(server, "batch", json.dumps(body).encode()) == (200, [post(server, route, each)[1] for each in forms])


def test_an_empty_batch_is_answered(server):
    body = {"route": "step", "history": [], "caption": [], "img_features": []}
    assert send(server, "batch", json.dumps(body).encode()) == (200, [])


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
def test_sixty_four_clients_at_once(server, models):
    dialogues, questions, features = make_batch(64, seed=5)
    expected = answer_and_score(models, dialogues, questions, features, measure="distance")
    replies, before = {}, health(server)["counts"]
    together = threading.Barrier(64)

    def client(row):
        together.wait()
        replies[row] = [post(server, "step", form(dialogues[row], questions[row], features[row])) for _ in range(3)]

    threads = [threading.Thread(target=client, args=(row,)) for row in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {row: [(200, [expected.answers[row], expected.rewards[row]])] * 3 for row in range(64)}
    after = health(server)["counts"]
    assert after["dialogues"] - before["dialogues"] == 64 * 3
    assert after["batches"] - before["batches"] < 64 * 3  # some that waited were answered together


@pytest.mark.slow
def test_models_behind_http_and_in_process_give_the_same_numbers(server, models):
    dialogues, questions, features = make_batch(100, seed=7)
    for remote in (RemoteModels(server.url), RemoteModels(server.url, feature_size=16)):
        rows = 100 if remote._items else 10
        batch = dialogues[:rows], features[:rows]
        assert remote.feature_size == 16
        assert remote.answers(batch[0], questions[:rows], batch[1]) == models.answers(
            batch[0], questions[:rows], batch[1]
        )
        assert remote.questions(dialogues[:2]) == ["is it red?", "is it green?"]
        assert torch.equal(remote.distances(*batch), models.distances(*batch))
        assert torch.equal(remote.percentiles(*batch), models.percentiles(*batch))
        for measure in ("distance", "rank"):
            local = answer_and_score(models, batch[0], questions[:rows], batch[1], measure=measure)
            assert answer_and_score(remote, batch[0], questions[:rows], batch[1], measure=measure) == local
            assert last_round_rewards(remote, *batch, measure=measure) == last_round_rewards(
                models, *batch, measure=measure
            )
        assert remote.answers([], [], torch.empty(0, 16)) == []
        assert remote.distances([], torch.empty(0, 16)).shape == (0,)


def test_an_original_server_is_never_asked_for_batches(models):
    pytest.importorskip("uvicorn")
    dialogues, questions, features = make_batch(5)
    with DialogueServer(models, items=1) as running:
        remote = RemoteModels(running.url, feature_size=16)
        remote.answer_and_score(dialogues, questions, features)
        remote.distances(dialogues, features)
        counts = health(running)["counts"]
    assert counts["requests"] == 5 + (1 + 2 + 3 + 4 + 5)
    assert counts["rejected"] == 0
