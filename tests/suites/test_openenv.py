"""OpenEnvGame against a server of openenv-core."""

import socket
import threading
import time

import pytest

from torchrl_lang.envs import OpenEnvGame

pytest.importorskip("openenv.core", reason="openenv-core is not installed: make test-suites runs these tests")
uvicorn = pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def url():
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        guess: int

    class Hint(Observation):
        text: str

    class Number(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **options):
            self.number, self.turns = seed % 10, 0
            return Hint(text="guess", reward=None, done=False)

        def step(self, action, timeout_s=None, **options):
            self.turns += 1
            distance = abs(action.guess - self.number)
            if distance > 90:
                raise ValueError("too far")
            return Hint(text=f"off by {distance}", reward=-distance / 10, done=distance == 0)

        @property
        def state(self):
            return State(step_count=self.turns)

    app = create_fastapi_app(Number, Guess, Hint, max_concurrent_envs=40)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def test_a_game(url):
    game = OpenEnvGame(url, observe="text", act="guess", invalid_reply="no")
    assert game.reset(17) == "guess"
    assert game.step("4") == ("off by 3", -0.3, False)
    assert game.step("seven") == ("no", 0.0, False)  # refused by the schema; the session lives on
    assert game.step("7") == ("off by 0", 0.0, True)
    assert game.reset(8) == "guess"
    with pytest.raises(RuntimeError, match=r"too far.*EXECUTION_ERROR"):
        game.step("100")
    assert game.reset(8) == "guess"
    game.close()
