"""A client of OpenEnv's protocol, against a server written from the protocol's description."""

import json
import threading
from contextlib import contextmanager

import pytest

from tests.envs.helpers import check_game
from torchrl_lang.envs import OpenEnvGame

server = pytest.importorskip("websockets.sync.server")


class Session:
    """One environment: a number to find by its distance, with OpenEnv's answers as dicts."""

    def answer(self, message):
        kind, data = message["type"], message.get("data", {})
        if kind == "reset":
            self.number = data["seed"] % data.get("below", 10)
            return self.observation("guess", None, False)
        if kind == "step":
            if set(data) != {"guess"} or not str(data["guess"]).isdecimal():
                return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}
            distance = abs(int(data["guess"]) - self.number)
            if distance > 90:
                return {"type": "error", "data": {"message": "overflow", "code": "EXECUTION_ERROR"}}
            return self.observation(f"off by {distance}", distance == 0, distance == 0)
        return {"type": "error", "data": {"message": f"Unknown message type: {kind}", "code": "UNKNOWN_TYPE"}}

    @staticmethod
    def observation(text, reward, done):
        data = {"observation": {"text": text, "legal": [1, 2]}, "reward": reward, "done": done}
        return {"type": "observation", "data": data}


@contextmanager
def serve(most_sessions=100, answer=None):
    """The address of a server of such sessions."""
    open_sessions = []

    def handle(socket):
        if len(open_sessions) >= most_sessions:
            socket.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
            return
        session = Session()
        open_sessions.append(session)
        try:
            for raw in socket:
                reply = (answer or session.answer)(json.loads(raw))
                socket.send(reply if isinstance(reply, str) else json.dumps(reply))
        finally:
            open_sessions.remove(session)

    with server.serve(handle, "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()
        thread.join()


def test_the_rules_of_language_environments():
    with serve() as url:
        options = {"observe": "text", "act": "guess", "invalid_reply": "no", "invalid_reward": -1.0}
        check_game(lambda: OpenEnvGame(url, **options), "1", "7", "a", "", row_length=60, action_length=4)


def test_a_game_and_an_error_of_the_server_that_ends_the_session():
    with serve() as url:
        game = OpenEnvGame(url, observe="text", act="guess", reset_options={"below": 5})
        assert game.reset(7) == "guess"
        assert game.step("4") == ("off by 2", False, False)
        assert game.step("two") == ("That is not a valid action.", 0.0, False)
        assert game.step("2") == ("off by 0", True, True)
        game.reset(9)
        with pytest.raises(RuntimeError, match=r"answered a step with .*EXECUTION_ERROR"):
            game.step("100")
        with pytest.raises(RuntimeError, match="call reset first"):  # a new session would know nothing of this game
            game.step("1")
        assert game.reset(9) == "guess"
        game.close()
        game.close()


def test_a_server_that_is_full_says_so():
    with serve(most_sessions=1) as url:
        one, other = (OpenEnvGame(url, observe="text", act="guess") for _ in range(2))
        one.reset(0)
        with pytest.raises(RuntimeError, match="one session per row"):
            other.reset(0)
        one.close()


def test_servers_that_are_slow_or_gone():
    waiting = threading.Event()

    def late(message):
        if message["data"].get("seed") == 1:
            waiting.wait(10)
        return Session.observation(f"seed {message['data']['seed']}", None, False)

    with serve(answer=late) as url:
        game = OpenEnvGame(url, observe="text", act="guess", timeout=0.2)
        with pytest.raises(ConnectionError, match=r"did not answer a reset in 0\.2 s: TimeoutError"):
            game.reset(1)
        waiting.set()
        assert game.reset(2) == "seed 2"
        game.close()
    with pytest.raises(ConnectionError, match=r"No OpenEnv server answers at ws://127\.0"):
        game.reset(0)
    with pytest.raises(ConnectionError, match="localhost:8000/ws isn't a valid URI"):
        OpenEnvGame("localhost:8000", observe="text", act="guess").reset(0)
