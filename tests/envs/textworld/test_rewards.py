"""What turns of real games earn, by themselves and by transforms."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torchrl.envs import Compose, TransformedEnv

from torchrl_lang.envs import check_language_env
from torchrl_lang.envs.textworld.engine import Failed
from torchrl_lang.envs.textworld.env import GameSession
from torchrl_lang.envs.textworld.text import Template
from torchrl_lang.transforms import EntryReward, LivingCost

from ..helpers import action
from .conftest import COIN, SIMPLE

torch.set_num_threads(1)
pytest.importorskip("textworld", reason="the extra 'textworld' is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reused_engines")]

TOLD = ("frob", "restart", "look", "Go South", "go north", "go south", "go east", "go east", "take coin")
EARNED = [-1.25, -1.25, 0.25, 0.25, 0.25, 0.25, 0.25, -1.25, 12.25]
OF_THE_TURN = ("invalid", "was_admissible")


def transforms():
    return [
        LivingCost(0.25),
        EntryReward({"invalid": -1.0}),
        EntryReward({"was_admissible": 0.5}),
        EntryReward({"points": 1.0}),
        EntryReward({"won": 10.0, "lost": -10.0}),
    ]


def play(env, *commands):
    """Rewards of the commands, turn by turn, and the last observation."""
    td, rewards = env.reset(), []
    for command in commands:
        td = env.step(td.set("action", action(env, *[command] * env.batch_size.numel())))["next"]
        rewards.append(td["reward"].flatten().tolist()[0])
    return rewards, td


def test_a_turn_earns_its_points(make_env):
    rewards, last = play(make_env(), *TOLD)
    assert rewards == [0.0] * 8 + [1.0]
    assert last["token_reward"].sum() == 1


def test_every_reward_by_hand_and_the_row_shows_it(make_env):
    """'frob', 'restart' and walking into a wall do nothing; 'look' does something."""
    rewards, last = play(TransformedEnv(make_env(offers=OF_THE_TURN), Compose(*transforms())), *TOLD)
    assert rewards == EARNED
    ends = last["agent_mask"] & ~last["agent_mask"].roll(-1, -1)
    assert last["token_reward"][ends].tolist() == EARNED
    assert (last["token_reward"][~ends] == 0).all()


def test_losing_is_paid_once(make_env):
    env = TransformedEnv(
        make_env("simple", row_length=2500),
        Compose(EntryReward({"points": -1.0}), EntryReward({"won": 10.0, "lost": -10.0})),
    )
    rewards, last = play(env, *SIMPLE[:7], "eat milk", "look")
    assert rewards == [0.0] * 7 + [-10.0, 0.0]
    assert last["lost"].all()
    assert not last["won"].any()
    assert last["token_reward"].sum() == -10


def test_what_is_said_of_the_last_turn(make_env):
    env = make_env(offers=OF_THE_TURN)
    td = env.reset()
    assert not td["invalid"].any()
    assert not td["was_admissible"].any()
    assert not td["points"].any()
    seen = []
    for command in ("frob", "save", "go  SOUTH", "go north. look", "look", "go east", "n", *COIN):
        td = env.step(td.set("action", action(env, command)))["next"]
        seen.append((int(td["invalid"]), int(td["was_admissible"]), int(td["points"])))
    no, yes = (1, 0, 0), (0, 1, 0)
    assert seen == [no, no, yes, yes, yes, no, no, yes, yes, (0, 1, 1)]


def test_a_game_that_fails_is_nobody_s_fault():
    state = {"feedback": "", "score": 0, "moves": 0, "won": False, "lost": False, "done": False}
    seat = GameSession(["a game"], Template())
    seat.opened({**state, "admissible_commands": ["look"]})
    seat.replied("look", Failed("silence"))
    assert not seat.invalid
    assert not seat.was_admissible
    assert seat.points == 0


def test_the_rules_of_language_environments(make_env):
    offers = (*OF_THE_TURN, "admissible")
    make = partial(make_env, "coin", "simple", offers=offers, max_turns=4)
    check_language_env(make(batch_size=[2]), lambda n: make(batch_size=[n]), utterances=TOLD)

    def paid(n):
        return TransformedEnv(make(batch_size=[n]), Compose(*transforms()))

    check_language_env(paid(2), paid, utterances=TOLD)
