"""Small games, built once and kept in pytest's cache."""

import gc
import os
import time
from pathlib import Path

import pytest

from tests.engines import NAME, forked, reused
from tests.processes import is_running
from torchrl_lang.envs.textworld import TextWorldEnv, TextWorldSpec, build_games
from torchrl_lang.envs.textworld.games import game_texts
from torchrl_lang.envs.textworld.text import TEMPLATES
from torchrl_lang.text import word_tokenizer

SPECS = {
    "simple": TextWorldSpec("simple", seed=1),
    "coin": TextWorldSpec("coin_collector", seed=1, level=3),
    "treasure": TextWorldSpec("treasure_hunter", seed=1, level=3),
    "custom": TextWorldSpec("custom", seed=1),
    "cooking": TextWorldSpec("cooking", seed=2, recipe=3, take=3, go=6, open=True, cook=True, cut=True, drop=True),
}
COIN = ("go south", "go east", "take coin")
SIMPLE = ("open antique trunk", "take old key from antique trunk", "unlock wooden door with old key")


@pytest.fixture(scope="session")
def games(pytestconfig):
    """Files of games by name."""
    folder = pytestconfig.cache.mkdir("games") / "torchrl_lang" / "textworld"  # tests of the task use some of them
    with forked():
        return dict(zip(SPECS, build_games(list(SPECS.values()), folder), strict=True))


@pytest.fixture(scope="session")
def tokenizer(games):
    return word_tokenizer(game_texts(list(games.values()), TEMPLATES["state"], steps=25))


@pytest.fixture
def make_env(games, tokenizer):
    """Environments of some of the games, by name; they are closed when the test is over."""
    made = []

    def make(*names, **options):
        options = {"row_length": 700, "action_length": 10, "batch_size": [1], "seed": 0, "workers": 1, **options}
        made.append(TextWorldEnv([games[name] for name in names or ("coin",)], tokenizer, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture(scope="module")
def reused_engines():
    """For tests of what environments do, not of their processes."""
    with reused():
        yield


@pytest.fixture(autouse=True)
def engines_are_forked():
    """The engine's own script is started by other programs than pytest."""
    with forked():
        yield


def pids_of(pool):
    """Process ids of a pool's engines."""
    return [each.process.pid for each in pool._processes.values()]


def engines():
    """Process ids of this process's engines that have not ended."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        home = Path("/proc", name)
        try:
            state, parent = (home / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            command, called = (home / "cmdline").read_text(), (home / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and state != "Z" and ("engine_process.py" in command or called == NAME):
            found.append(int(name))
    return found


def gone(pids, within=10.0):
    """Whether processes end in time."""
    until = time.monotonic() + within
    while any(map(is_running, pids)) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    return not any(map(is_running, pids))
