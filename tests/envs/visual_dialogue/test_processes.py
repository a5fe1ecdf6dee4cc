"""The server as a program: the command, its end, and its end in the middle of a client's run."""

import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.envs.visual_dialogue.test_server import form, health, post
from tests.envs.visual_dialogue.word_overlap import make_batch
from tests.processes import Program, wait_until
from torchrl_lang.envs.visual_dialogue import RemoteModels
from torchrl_lang.envs.visual_dialogue.dialogue import answer_and_score

pytestmark = pytest.mark.slow
COMMAND = """
import sys, time
{before}
from torchrl_lang.envs.visual_dialogue import prepare
from tests.envs.visual_dialogue.word_overlap import WordOverlap
from torchrl_lang.__main__ import _run

class Slow(WordOverlap):
    def answers(self, *arguments):
        time.sleep({delay})
        return super().answers(*arguments)

prepare.local_models = lambda *arguments: Slow()
sys.argv = ["torchrl_lang", "serve", "visual_dialogue", "--models", "/models/small", "--features", "x.npy"]
sys.argv += ["--port", "{port}"]
sys.exit(_run())
"""


class Serving:
    """The command ``serve visual_dialogue`` with models that need no training, in a process of its own."""

    host = "127.0.0.1"

    def __init__(self, delay=0.0, port=0, before=""):
        pytest.importorskip("uvicorn")
        self.program = Program("-c", COMMAND.format(delay=delay, port=port, before=before))
        said = re.compile(r"on (http://127\.0\.0\.1:(\d+)),")
        wait_until(lambda: said.search(self.program.stdout) or self.program.returncode is not None)
        assert self.program.returncode is None, self.program.stderr
        self.url, port = said.search(self.program.stdout).groups()
        self.port = int(port)


@pytest.fixture
def start():
    started = []

    def make(**options):
        started.append(Serving(**options))
        return started[-1]

    yield make
    for each in started:
        each.program.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_the_requests_under_way(start, number, models):
    serving = start(delay=0.2)
    assert health(serving)["model"] == "small"
    dialogues, questions, features = make_batch(4)
    with ThreadPoolExecutor(4) as pool:
        forms = [form(*each) for each in zip(dialogues, questions, features, strict=True)]
        asked = [pool.submit(post, serving, "fetch_a_bot_response", each) for each in forms]
        while health(serving)["counts"]["requests"] < 4:
            time.sleep(0.01)
        serving.program.send_signal(number)
        assert [each.result()[1] for each in asked] == models.answers(dialogues, questions, features)
    assert serving.program.wait() == 0, serving.program.stderr
    assert serving.program.stderr == ""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((serving.host, serving.port), timeout=1)


def test_more_connections_than_descriptors(start):
    """The server closes those beyond its own, logs nothing, and goes on."""
    serving = start(before="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))")
    opened = [socket.create_connection((serving.host, serving.port), timeout=10) for _ in range(350)]
    time.sleep(0.2)
    for connection in opened:
        connection.close()
    assert RemoteModels(serving.url).health()["model"] == "small"
    assert len(serving.program.stderr) < 10_000


def test_killed_and_restarted_in_the_middle_of_a_run(start, models):
    """The client goes on; every dialogue is answered, with the numbers of models in process."""
    serving = start(delay=0.02)
    dialogues, questions, features = make_batch(12)
    expected = answer_and_score(models, dialogues, questions, features)
    remote = RemoteModels(serving.url, retries=20)
    done, started = {}, []

    def restart():
        while len(done) < 4:
            time.sleep(0.001)
        serving.program.kill()
        time.sleep(0.3)
        started.append(start(port=serving.port, delay=0.02))

    killer = threading.Thread(target=restart)
    killer.start()

    def ask(row):
        reply = remote.answer_and_score(dialogues[row : row + 1], questions[row : row + 1], features[row : row + 1])
        done[row] = tuple(each[0] for each in reply)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(12)))
    killer.join()
    assert started
    assert [done[row] for row in range(12)] == list(zip(*expected, strict=True))
