"""Q-SFT and OREO in a corridor whose values are known: exact fixed points of tables, and better play than imitation.

The player of the data is the one of ``test_qbackup_learning.py``: it moves left more often than right.
"""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical
from torchrl.objectives import SoftUpdate

from tests.objectives.test_qbackup_learning import LEFT, LENGTH, NOTHING, RIGHT, LastThree, Table, Wanderer, soft_values
from torchrl_lang.data import row_buffer, rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv, corridor_value
from torchrl_lang.evaluation import play_games
from torchrl_lang.modules import LikelihoodGuidance, UtteranceActor, ValueHead, causal_lm, language_actor, value_module
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.objectives import BCLoss, OREOLoss, QSFTLoss
from torchrl_lang.training import adamw, train_steps
from torchrl_lang.transforms import frozen_copy

pytestmark = pytest.mark.slow
WIDTH, BETA, WORST = 32, 0.5, -8.0
BEST = float(corridor_value(LENGTH - 1))


@pytest.fixture(scope="module")
def env():
    return CorridorEnv(LENGTH, start=0, max_turns=8, batch_size=[256], seed=0)


@pytest.fixture(scope="module")
def walks(env):
    rollout = env.rollout(64, Wanderer(env.tokenizer), break_when_any_done=False)
    return rows_from_rollout(rollout, unfinished="drop")


def train(loss, walks, *phases):
    """Train for phases of ``(steps, learning rate)``."""
    updater = SoftUpdate(loss, tau=0.1) if isinstance(loss, QSFTLoss) else None
    buffer = row_buffer(walks, 64, seed=0)
    for steps, lr in phases:
        options = {"steps": steps, "target_updater": updater, "max_grad_norm": 1.0}
        for _ in train_steps(loss, buffer.sample, adamw(loss, lr), **options):
            pass


# -- fixed points ------------------------------------------------------------------------------------------------------

FAST = (400, 0.1), (300, 0.02)


def tabular_actor(env):
    """A policy of one number for each state and token."""
    vocabulary = env.tokenizer.vocab_size
    return ProbabilisticTensorDictSequential(
        TensorDictModule(LastThree(vocabulary), in_keys=["tokens", "attention_mask"], out_keys=["hidden"]),
        TensorDictModule(Table(vocabulary, vocabulary), in_keys=["hidden"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["next_token"], distribution_class=Categorical),
    )


def starts(env):
    """The states in which utterances begin, by their places, as the table counts them."""
    control, vocabulary = env.tokenizer.control, env.tokenizer.vocab_size
    return (control.end_of_action * vocabulary + torch.arange(LENGTH - 1)) * vocabulary + control.end_of_state


def probabilities(actor, env):
    """Of ``l``, ``r`` and nothing where an utterance begins, ``[places, 3]``."""
    written = [*env.tokenizer.encode("lr"), env.tokenizer.control.end_of_action]
    return split_actor(actor).head.module.rows.detach()[starts(env)].softmax(-1)[:, written]


@pytest.fixture(scope="module")
def imitation(env, walks):
    actor = tabular_actor(env)
    train(BCLoss(actor, actor_normalizer="action"), walks, *FAST)
    expected = torch.tensor([LEFT, RIGHT, NOTHING]).expand(LENGTH - 1, 3)
    torch.testing.assert_close(probabilities(actor, env), expected, rtol=0, atol=0.04)
    return frozen_copy(actor)


def best_values(gamma, rounds=100):
    """``Q*`` of the moves left, right and none at each place, by value iteration."""
    value = torch.zeros(LENGTH)
    here = torch.arange(LENGTH - 1)
    after = torch.stack([(here - 1).clamp_min(0), here + 1, here], -1)
    for _ in range(rounds):
        found = torch.where(after == LENGTH - 1, 0.0, -1.0) + gamma * value[after]
        value = torch.cat([found.amax(-1), torch.zeros(1)])
    return found


def test_the_probabilities_of_q_sft_become_q_values(env, walks, imitation):
    """``p / pi`` is Q* in units of the interval, exactly with a token for the rest, too much with an even share."""
    gamma, ratios = 0.9, {}
    for rest in (env.tokenizer.control.pad, None):
        actor = tabular_actor(env)
        actor.load_state_dict(imitation.actor.state_dict())
        loss = QSFTLoss(
            UtteranceActor(actor, env.tokenizer.control, 2, cached=False),
            imitation,
            gamma=1.0,
            turn_gamma=gamma,
            value_min=WORST,
            value_max=0.0,
            threshold=0.1,
            rest=rest,
        )
        train(loss, walks, *FAST)
        ratios[rest] = probabilities(actor, env) / probabilities(imitation.actor, env)
    expected = (best_values(gamma) - WORST) / -WORST
    torch.testing.assert_close(ratios[env.tokenizer.control.pad], expected, rtol=0, atol=0.05)
    assert (ratios[None] > expected - 0.02).all()
    assert (ratios[None] > expected + 0.03).any()


def test_oreo_finds_the_fixed_point_of_kl_control(env, walks, imitation):
    """Soft value iteration with the imitated policy as the reference; all tokens that can be written stand in the data.

    Of others consistency says nothing, so that a policy that may write them could keep any probability for them.
    """
    control, vocabulary = env.tokenizer.control, env.tokenizer.vocab_size
    forbidden = (*control.forbidden_in_action(), *env.tokenizer.encode("0123"))
    actor = tabular_actor(env)
    actor.load_state_dict(imitation.actor.state_dict())
    policy, reference = (
        UtteranceActor(one, control, 2, forbidden=forbidden, cached=False) for one in (actor, imitation.actor)
    )
    table = Table(vocabulary, 1)
    value = TensorDictModule(table, in_keys=["hidden"], out_keys=["state_value"])
    loss = OREOLoss(policy, value, frozen_copy(reference), beta=BETA, kl_weight=0.0)
    train(loss, walks, *FAST, (100, 0.005))
    expected, best = soft_values(BETA, 1.0)
    torch.testing.assert_close(table.rows.detach()[starts(env), 0], BETA * expected.float(), rtol=0, atol=0.2)
    found = probabilities(actor, env)
    torch.testing.assert_close(found / found.sum(-1, keepdim=True), best.float(), rtol=0, atol=0.05)


# -- better than imitation ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cloned(env, walks):
    torch.manual_seed(0)
    vocabulary = env.tokenizer.vocab_size
    lm = causal_lm(vocab_size=vocabulary, layers=1, width=WIDTH, heads=2, max_length=48, initializer_range=0.1)
    actor = language_actor(lm)
    train(BCLoss(actor, actor_normalizer="action"), walks, (150, 5e-3), (100, 5e-4))
    return frozen_copy(actor)


@pytest.fixture
def actor(env, cloned):
    """A copy of the imitation, to be trained."""
    lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=WIDTH, heads=2, max_length=48)
    actor = language_actor(lm)
    actor.load_state_dict(cloned.actor.state_dict())
    return actor


def play(env, actor, **options):
    policy = UtteranceActor(actor, env.tokenizer.control, 2, seed=0, **{"method": "greedy", **options})
    return float(play_games(env, policy, games=256, seed=1).returns.mean())


def test_imitation_does_not_arrive(env, cloned):
    assert play(env, cloned.actor) == WORST  # the likeliest utterance is l
    assert play(env, cloned.actor, method="sample") < BEST - 3


def test_q_sft_walks_straight_by_its_values(env, walks, cloned, actor):
    """Where the data's habit is the wrong move, the value itself has to guide: its product with the habit agrees."""
    control, threshold = env.tokenizer.control, 0.2
    loss = QSFTLoss(
        UtteranceActor(actor, control, 2),
        cloned,
        gamma=1.0,
        turn_gamma=0.9,
        value_min=WORST,
        value_max=0.0,
        threshold=threshold,
        rest=control.pad,
    )
    train(loss, walks, (300, 5e-3), (100, 1e-3))
    by_value = LikelihoodGuidance(actor, beta=32.0, ratio=True)
    assert play(env, cloned.actor, guidance=by_value, min_p=threshold) == BEST
    assert play(env, cloned.actor, guidance=LikelihoodGuidance(actor, beta=0.0)) == WORST
    assert play(env, cloned.actor, guidance=LikelihoodGuidance(actor, beta=32.0)) == WORST


@pytest.mark.parametrize("level", ["token", "utterance"])
def test_oreo_walks_straight(env, walks, cloned, actor, level):
    reference = frozen_copy(UtteranceActor(cloned.actor, env.tokenizer.control, 2))
    loss = OREOLoss(
        UtteranceActor(actor, env.tokenizer.control, 2),
        value_module(ValueHead(WIDTH)),
        reference,
        beta=BETA,
        kl_weight=0.05,
        level=level,
    )
    train(loss, walks, (150, 2e-3), (100, 5e-4))
    assert play(env, actor) == BEST
    assert play(env, actor, method="sample") > play(env, cloned.actor, method="sample") + 1.5
