"""Every loss learns, on a task whose answer is known: the corridor, where nobody in the data walked straight."""

from __future__ import annotations

import pytest
import torch
from torchrl.objectives import SoftUpdate

from torchrl_lang.data import row_buffer, rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer, corridor_value
from torchrl_lang.evaluation import play_games
from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.objectives import BCLoss, ILQLLoss
from torchrl_lang.training import adamw, train_steps

LENGTH, WIDTH = 4, 32
pytestmark = pytest.mark.slow

BEST = float(corridor_value(LENGTH - 1))


@pytest.fixture(scope="module")
def env():
    return CorridorEnv(LENGTH, start=0, max_turns=8, batch_size=[256], seed=0)


@pytest.fixture(scope="module")
def walks(env):
    player = CorridorPlayer(env.tokenizer, LENGTH, seed=0)
    rollout = env.rollout(64, player, break_when_any_done=False)
    return rows_from_rollout(rollout, unfinished="drop")


@pytest.fixture
def actor(env):
    torch.manual_seed(0)
    vocabulary = env.tokenizer.vocab_size
    lm = causal_lm(vocab_size=vocabulary, layers=1, width=WIDTH, heads=2, max_length=48, initializer_range=0.1)
    return language_actor(lm)


def train(loss, walks, steps, lr=5e-3):
    updater = SoftUpdate(loss, tau=0.05) if isinstance(loss, ILQLLoss) else None
    buffer = row_buffer(walks, 32, seed=0)
    for _ in train_steps(loss, buffer.sample, adamw(loss, lr), steps=steps, target_updater=updater, max_grad_norm=1.0):
        pass


def play(env, actor, guidance=None, method="sample"):
    policy = UtteranceActor(actor, env.tokenizer.control, 2, guidance=guidance, method=method)
    return play_games(env, policy, games=256, seed=1)


def test_the_data_holds_no_straight_walk(walks):
    assert walks["token_reward"].sum(-1).max() < BEST


def test_bc_walks_as_the_data_does(env, walks, actor):
    train(BCLoss(actor, actor_normalizer="action"), walks, 100)
    returns = play(env, actor).returns
    data = walks["token_reward"].sum(-1)
    assert abs(float(returns.mean() - data.mean())) < 0.5
    assert (returns >= BEST).float().mean() < 0.05  # copying finds the straight walk by accident at most


@pytest.mark.parametrize("options", [{}, {"target": "lambda", "lmbda": 0.3}], ids=["td", "lambda"])
def test_ilql_finds_the_straight_walk_that_nobody_went(env, walks, actor, options):
    vocabulary = env.tokenizer.vocab_size
    loss = ILQLLoss(
        actor,
        qvalue_module(QValueHead(WIDTH, vocabulary)),
        value_module(ValueHead(WIDTH)),
        expectile=0.9,
        cql_weight=0.001,  # the best move is one that the data never made there
        actor_normalizer="action",
        **options,
    )
    train(loss, walks, 250)
    guidance = ValueGuidance(loss.target_qvalue_network(), beta=32.0)
    returns = play(env, actor, guidance, method="greedy").returns
    assert float(returns.mean()) == BEST
