"""The environment with models behind HTTP: the same numbers, one request a step, and what happens without a server."""

from __future__ import annotations

import pytest
import torch

from tests.envs.helpers import action, say_after
from tests.envs.visual_dialogue.played_world import TOKENIZER, make_env, write_world
from tests.envs.visual_dialogue.word_overlap import WORDS
from torchrl_lang.envs.visual_dialogue import (
    DialogueRewards,
    DialogueServer,
    RemoteModels,
)
from torchrl_lang.schema import check_row
from torchrl_lang.text import from_row

pytest.importorskip("uvicorn")

REWARDS = [
    DialogueRewards(penalty="hard"),
    DialogueRewards("agent_stops", scale=2.0, shift=1.0),
    DialogueRewards("10_stop"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("world"), 9)


class Asker:
    """Asks about random words, sometimes nothing, sometimes any tokens; sometimes it stops."""

    def __init__(self, env, seed=0):
        self.env, self.draw = env, torch.Generator().manual_seed(seed)

    def __call__(self, td):
        n = td.numel()
        texts = [self._text() for _ in range(n)]
        ids = action(self.env, *texts)
        anything = torch.randint(self.env.tokenizer.vocab_size, ids.shape, generator=self.draw)
        some = torch.rand(n, 1, generator=self.draw) < 0.2
        return td.set("action", torch.where(some, anything, ids))

    def _text(self):
        word = WORDS[int(torch.randint(len(WORDS), (), generator=self.draw))]
        return ["", "?", "<stop>", *[f"is it {word}?"] * 7][int(torch.randint(10, (), generator=self.draw))]


def assert_same_rollouts(one, other, steps=25):
    """Through resets, of every row at least once."""
    first, second = (env.rollout(steps, Asker(env), break_when_any_done=False) for env in (one, other))
    assert (first == second).all()
    assert first["next", "done"][:, :-1].any(1).all()
    check_row(first.reshape(-1))
    return first


@pytest.mark.parametrize("rewards", REWARDS, ids=lambda each: each.mode)
def test_the_numbers_are_those_of_the_models_in_process(data, models, server, rewards):
    def make(used):
        return make_env(data, used, rewards=rewards, batch_size=[6])

    assert_same_rollouts(make(models), make(RemoteModels(server.url)))


def test_one_request_a_step_and_one_a_reset(data, server):
    client = RemoteModels(server.url)

    def requests():
        return client.health()["counts"]["requests"]

    env = make_env(data, client, rewards=DialogueRewards("10_stop"), batch_size=[5])
    before = requests()
    td = env.reset()
    assert requests() == before + 1
    for turn in range(1, 4):
        td = say_after(env, td, *["is it red?"] * 5)
        assert requests() == before + 1 + turn


def test_the_original_protocol(data, models, server):
    """A server without batches and ``/health`` gives the same rows, at one request a dialogue."""
    client = RemoteModels(server.url, feature_size=models.feature_size)
    made = (make_env(data, used, rewards=REWARDS[0], batch_size=[3]) for used in (models, client))
    assert_same_rollouts(*made, steps=12)


def test_a_server_that_has_gone(data, models):
    with DialogueServer(models) as server:
        client = RemoteModels(server.url, retries=1, first_wait=0.001, longest_wait=0.01)
        env = make_env(data, client)
        td = env.reset()
    with pytest.raises(ConnectionError, match="answered none of 2 requests"):
        say_after(env, td, "red?")
    with pytest.raises(RuntimeError, match="call reset"):
        say_after(env, td, "red?")
    with pytest.raises(ConnectionError):
        env.reset()
    with DialogueServer(models, port=server.port):
        td = say_after(env, env.reset(), "red?")
    assert [turn.text for turn in from_row(td[0], TOKENIZER).turns][1] == "red?"
