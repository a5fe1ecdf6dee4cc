"""The model thread: merging, a full queue, models that fail or hang, and what is still answered at the end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.envs.visual_dialogue.conftest import make_batch
from tests.envs.visual_dialogue.test_bad_requests import raw, request, sized
from tests.envs.visual_dialogue.test_protocol import form, health, post
from tests.envs.visual_dialogue.word_overlap import WordOverlap, ask
from torchrl_lang.envs.visual_dialogue import Dialogue, DialogueServer
from torchrl_lang.envs.visual_dialogue.model_queue import ModelQueue
from torchrl_lang.envs.visual_dialogue.protocol import RequestBatch, RequestError


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


def one(caption):
    return RequestBatch([Dialogue(caption)], ["is it red?"], torch.zeros(1, 16))


def submit(models, *captions):
    return [models.submit("fetch_a_bot_response", one(caption)) for caption in captions]


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_waits_is_answered_as_one_batch_in_order(held):
    models = ModelQueue(held, ask, size=8)
    first = submit(models, "a")
    until(lambda: held.batches)
    rest = submit(models, "b", "c", "d")
    question = models.submit("fetch_q_bot_response", RequestBatch([Dialogue("e")], [], None))
    held.go.set()
    assert [future.result(60) for future in first + rest] == [["no"]] * 4
    assert question.result(60) == ["is it red?"]
    assert held.batches == [["a"], ["b", "c", "d"]]
    models.close()


def test_a_batch_is_not_filled_beyond_its_size(held):
    models = ModelQueue(held, None, size=8, batch=2)
    waiting = submit(models, "a")
    until(lambda: held.batches)
    waiting += submit(models, "b", "c", "d")
    held.go.set()
    assert [future.result(60) for future in waiting] == [["no"]] * 4
    assert held.batches == [["a"], ["b", "c"], ["d"]]
    models.close()


def test_only_the_request_at_fault_fails(held):
    models = ModelQueue(held, None, size=8)
    waiting = submit(models, "a")
    until(lambda: held.batches)
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


def test_a_request_that_was_given_up_is_not_answered(held):
    models = ModelQueue(held, None, size=8)
    first = submit(models, "a")
    until(lambda: held.batches)
    dropped, last = submit(models, "b", "c")
    assert dropped.cancel()
    held.go.set()
    assert (first[0].result(60), last.result(60)) == (["no"], ["no"])
    assert held.batches == [["a"], ["c"]]
    models.close()


def test_what_waits_is_answered_before_the_end(held):
    models = ModelQueue(held, None, size=8)
    waiting = submit(models, "a", "b", "c")
    held.go.set()
    models.close()
    assert [future.result(0) for future in waiting] == [["no"]] * 3


def test_replies_that_do_not_fit_are_failures():
    class Short(WordOverlap):
        def answers(self, dialogues, questions, features):
            return []

    models = ModelQueue(Short(), None, size=8)
    with pytest.raises(RequestError, match="failed"):
        submit(models, "a")[0].result(60)
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
        until(lambda: held.batches)
        second = pool.submit(post, serving, "fetch_a_bot_response", fields("b"))
        until(lambda: health(serving)["queue"] == 1)
        status, reply = post(serving, "fetch_a_bot_response", fields("c"))
        assert (status, reply["error"]) == (503, "1 requests are waiting: send it again later")
        body = b"caption=a&history=%5B%5D"
        assert raw(serving, request("fetch_q_bot_response", body, sized(body)))[0] == 503
        held.go.set()
        assert first.result(60)[0] == second.result(60)[0] == 200


def test_failures_show_nothing_of_the_machine(held, serving, caplog):
    held.go.set()
    status, reply = post(serving, "fetch_a_bot_response", fields("fault"))
    assert (status, reply["field"]) == (500, None)
    assert "weights.bin" not in reply["error"]
    assert "weights.bin" in caplog.text
    status, reply = post(serving, "fetch_reward", form(Dialogue("odd"), None, make_batch(1)[2][0]))
    assert status == 500
    assert post(serving, "fetch_a_bot_response", fields("a"))[0] == 200


def test_a_server_without_a_questioner_has_no_questions(held, serving):
    status, reply = post(serving, "fetch_q_bot_response", form(Dialogue("a")))
    assert (status, reply["error"]) == (404, "this server has no questioner: start it with one")


def test_a_port_in_use_is_named(serving):
    with pytest.raises(OSError, match=f"127.0.0.1:{serving.port}"):
        DialogueServer(WordOverlap(), port=serving.port).start()


@pytest.mark.parametrize("option", [{"items": 0}, {"queue": 0}, {"host": ""}])
def test_wrong_options(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        DialogueServer(WordOverlap(), **option)


@pytest.mark.parametrize("host", ["\xe9..x", "a" * 70 + ".com", "a b"])
def test_a_host_that_is_no_address(host):
    with pytest.raises(OSError, match=f"{host}"):
        DialogueServer(WordOverlap(), host=host).start()
