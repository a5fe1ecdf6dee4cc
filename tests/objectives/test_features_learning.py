"""What only the features say can be learned by a policy that reads them, and by no other."""

from __future__ import annotations

import pytest
import torch
from torchrl.objectives import SoftUpdate

from torchrl_lang.data import row_buffer
from torchrl_lang.data.generate import play_to_end
from torchrl_lang.envs import TextGameEnv
from torchrl_lang.evaluation import play_games
from torchrl_lang.modules import (
    FeatureEmbedding,
    QValueHead,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
    with_features,
)
from torchrl_lang.objectives import BCLoss, ILQLLoss
from torchrl_lang.text import CharTokenizer
from torchrl_lang.training import adamw, train_steps

LETTERS, WIDTH = CharTokenizer.from_alphabet("abcd?"), 32
CHANCE = 0.25
pytestmark = pytest.mark.slow


class Picture:
    """The text is the same in all games; a one-hot vector, behind one of zeros, says which letter is right."""

    def reset(self, seed):
        self.answer = seed % 4
        self.features = torch.stack([torch.zeros(4), torch.eye(4)[self.answer]])[seed // 4 % 2 :]
        return "?"

    def step(self, text):
        return "", float(text == "abcd"[self.answer]), True


@pytest.fixture(scope="module")
def env():
    return TextGameEnv(Picture, LETTERS, row_length=12, action_length=2, features=(2, 4), batch_size=[512], seed=0)


def actor_of(reads, seed=0):
    torch.manual_seed(seed)
    lm = causal_lm(vocab_size=LETTERS.vocab_size, layers=1, width=WIDTH, heads=2, max_length=16, initializer_range=0.1)
    return with_features(language_actor(lm), FeatureEmbedding(4, WIDTH)) if reads else language_actor(lm)


@pytest.fixture(scope="module")
def guesses(env):
    """Games of a policy that does not look, and writes letters at random."""
    control, words = LETTERS.control, LETTERS.encode("abcd")
    forbidden = tuple({*range(LETTERS.vocab_size)} - {*words})
    return play_to_end(env, UtteranceActor(actor_of(False), control, 2, temperature=9.0, forbidden=forbidden, seed=1))


def train(loss, rows, steps):
    updater = SoftUpdate(loss, tau=0.05) if isinstance(loss, ILQLLoss) else None
    buffer = row_buffer(rows, 64, seed=0)
    for _ in train_steps(
        loss, buffer.sample, adamw(loss, 5e-3), steps=steps, target_updater=updater, max_grad_norm=1.0
    ):
        pass


def share_of_right_letters(env, actor, guidance=None):
    policy = UtteranceActor(actor, LETTERS.control, 2, guidance=guidance, method="greedy")
    return float(play_games(env, policy, games=512, seed=1).returns.mean())


@pytest.mark.parametrize("reads", [True, False])
def test_behavior_cloning_of_right_answers(env, guesses, reads):
    right = guesses[guesses["token_reward"].sum(-1) == 1.0]
    assert 64 < len(right) < 256
    actor = actor_of(reads)
    train(BCLoss(actor), right, 60)
    found = share_of_right_letters(env, actor)
    assert found > 0.98 if reads else abs(found - CHANCE) < 0.1


@pytest.mark.parametrize("reads", [True, False])
def test_implicit_language_q_learning_from_guesses(env, guesses, reads):
    actor = actor_of(reads)
    qvalue, value = qvalue_module(QValueHead(WIDTH, LETTERS.vocab_size)), value_module(ValueHead(WIDTH))
    loss = ILQLLoss(actor, qvalue, value, gamma=1.0)
    train(loss, guesses, 150)
    found = share_of_right_letters(env, actor, ValueGuidance(loss.target_qvalue_network(), beta=32.0))
    assert found > 0.98 if reads else abs(found - CHANCE) < 0.1
