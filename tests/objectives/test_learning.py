"""Losses learn in a corridor the exact fixed point of their equations.

The tutorial ``offline_family`` asks the others for the best play, ``test_chai``, ``test_decision_transformer`` and
``test_ppo`` theirs.

The wanderer moves left most often, right less often, and sometimes it writes nothing.
"""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.objectives import SoftUpdate

from torchrl_lang.data import row_buffer, row_returns, rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.modules import UtteranceActor
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.objectives import BCLoss, DPOLoss, OREOLoss, PsiLoss, QSFTLoss
from torchrl_lang.training import adamw, train_steps
from torchrl_lang.transforms import frozen_copy

LENGTH, WORST = 4, -8.0
LEFT, RIGHT, NOTHING = 0.5, 0.35, 0.15
pytestmark = pytest.mark.slow


class Wanderer(TensorDictModuleBase):
    """Writes ``l``, ``r`` or an empty utterance with fixed probabilities."""

    in_keys, out_keys = ["tokens"], ["action"]

    def __init__(self, tokenizer):
        super().__init__()
        end, pad = tokenizer.control.end_of_action, tokenizer.control.pad
        self.utterances = torch.tensor([[*tokenizer.encode("l"), end], [*tokenizer.encode("r"), end], [end, pad]])
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, tensordict):
        number = tensordict["tokens"].shape[0]
        chances = torch.tensor([LEFT, RIGHT, NOTHING])
        chosen = torch.multinomial(chances, number, replacement=True, generator=self.generator)
        return tensordict.set("action", self.utterances[chosen])


@pytest.fixture(scope="module")
def env():
    return CorridorEnv(LENGTH, start=0, max_turns=8, batch_size=[256], seed=0)


@pytest.fixture(scope="module")
def walks(env):
    rollout = env.rollout(64, Wanderer(env.tokenizer), break_when_any_done=False)
    return rows_from_rollout(rollout, unfinished="drop")


def train(loss, rows, *phases):
    """Train for some phases of ``(steps, learning rate)``."""
    has_targets = any(name.startswith(("target_q", "target_a")) for name, _ in loss.named_children())
    updater = SoftUpdate(loss, tau=0.1) if has_targets else None
    buffer = row_buffer(rows, 64, seed=0)
    for steps, lr in phases:
        options = {"steps": steps, "target_updater": updater, "max_grad_norm": 1.0}
        for _ in train_steps(loss, buffer.sample, adamw(loss, lr), **options):
            pass


BETA = 0.5
SHORT, LONG, LONGEST = ((80, 0.1), (60, 0.02)), ((200, 0.1), (100, 0.02)), ((200, 0.1), (150, 0.02))


class LastThree(nn.Module):
    """A state as one number: the last three tokens, which hold the place."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary

    def forward(self, tokens, attention_mask):
        before = [nn.functional.pad(tokens, (n, 0))[..., : tokens.shape[-1]] for n in (2, 1)]
        code = (before[0] * self.vocabulary + before[1]) * self.vocabulary + tokens
        return code.unsqueeze(-1).float()


class Table(nn.Module):
    """A row of numbers for each state."""

    def __init__(self, vocabulary, *shape):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(vocabulary**3, *shape))

    def forward(self, hidden):
        return self.rows[hidden.squeeze(-1).long()]


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


def moves(env):
    """The tokens ``l``, ``r`` and that of nothing, with which utterances begin."""
    return [*env.tokenizer.encode("lr"), env.tokenizer.control.end_of_action]


def probabilities(actor, env):
    """Of the moves where an utterance begins, ``[places, 3]``."""
    return split_actor(actor).head.module.rows.detach()[starts(env)].softmax(-1)[:, moves(env)]


def mover(actor, env, **options):
    """An actor that writes moves, as the data do, and nothing else."""
    control = env.tokenizer.control
    forbidden = (*control.forbidden_in_action(), *env.tokenizer.encode("0123"))
    return UtteranceActor(actor, control, 2, forbidden=forbidden, cached=False, **options)


@pytest.fixture(scope="module")
def imitation(env, walks):
    actor = tabular_actor(env)
    train(BCLoss(actor, actor_normalizer="action"), walks, *LONGEST)
    expected = torch.tensor([LEFT, RIGHT, NOTHING]).expand(LENGTH - 1, 3)
    torch.testing.assert_close(probabilities(actor, env), expected, rtol=0, atol=0.04)
    return frozen_copy(actor)


def values_of(gamma, combine, scale=1.0, rounds=200):
    """Value iteration: of each place's three moves ``r / scale + gamma V``, where ``combine`` makes V of them."""
    value, here = torch.zeros(LENGTH, dtype=torch.float64), torch.arange(LENGTH - 1)
    after = torch.stack([(here - 1).clamp_min(0), here + 1, here], -1)
    for _ in range(rounds):
        found = torch.where(after == LENGTH - 1, 0.0, -1.0) / scale + gamma * value[after]
        value[:-1] = combine(found)
    return found


def soft_values(scale, gamma):
    """``V(place) = log sum_u p(u) exp(r / scale + gamma V(next place))`` and the optimal ``pi(u)``."""
    prior = torch.tensor([LEFT, RIGHT, NOTHING], dtype=torch.float64).log()
    score = prior + values_of(gamma, lambda found: (prior + found).logsumexp(-1), scale)
    return score.logsumexp(-1), score.softmax(-1)


def test_psi_learning_finds_the_fixed_point_of_kl_control(env, walks, imitation):
    """Soft value iteration with the data's policy as prior; all tokens that can be written stand in the data."""
    vocabulary = env.tokenizer.vocab_size
    qvalue = TensorDictModule(Table(vocabulary, 2, vocabulary), in_keys=["hidden"], out_keys=["action_value"])
    options = {"gamma": 1.0, "turn_gamma": 0.9, "reward_scale": 0.5, "actor_weight": 0.0}
    loss = PsiLoss(mover(tabular_actor(env), env), qvalue, prior=imitation, **options)
    train(loss, walks, *LONG)
    value, policy = soft_values(0.5, 0.9)
    # Where an utterance begins, over what the data write.
    least = loss.target_qvalue_network_params.data["module", "rows"][starts(env)].amin(-2)[:, moves(env)].double()
    torch.testing.assert_close(least.logsumexp(-1), value, rtol=0, atol=0.1)
    torch.testing.assert_close(least.softmax(-1), policy, rtol=0, atol=0.03)


def test_the_probabilities_of_q_sft_become_q_values(env, walks, imitation):
    """``p / pi`` is Q* in units of the interval."""
    gamma, actor, control = 0.9, tabular_actor(env), env.tokenizer.control
    actor.load_state_dict(imitation.actor.state_dict())
    writes = UtteranceActor(actor, control, 2, cached=False)
    options = {"gamma": 1.0, "turn_gamma": gamma, "value_min": WORST, "value_max": 0.0, "threshold": 0.1}
    train(QSFTLoss(writes, imitation, rest=control.pad, **options), walks, *LONGEST)
    found = probabilities(actor, env) / probabilities(imitation.actor, env)
    best = values_of(gamma, lambda values: values.amax(-1)).float()
    torch.testing.assert_close(found, (best - WORST) / -WORST, rtol=0, atol=0.05)


def spoken(env, imitation):
    """A tabular policy that begins as the imitated one, as an actor of moves; and the imitated one, frozen."""
    actor = tabular_actor(env)
    actor.load_state_dict(imitation.actor.state_dict())
    return actor, mover(actor, env), frozen_copy(mover(imitation.actor, env))


def test_oreo_finds_the_fixed_point_of_kl_control(env, walks, imitation):
    """Soft value iteration with the imitated policy as the reference; all tokens that can be written stand in the data.

    Of others consistency says nothing, so that a policy that may write them could keep any probability for them.
    """
    actor, policy, reference = spoken(env, imitation)
    table = Table(env.tokenizer.vocab_size, 1)
    value = TensorDictModule(table, in_keys=["hidden"], out_keys=["state_value"])
    loss = OREOLoss(policy, value, reference, beta=BETA, kl_weight=0.0)
    train(loss, walks, *SHORT)
    expected, best = soft_values(BETA, 1.0)
    torch.testing.assert_close(table.rows.detach()[starts(env), 0], BETA * expected.float(), rtol=0, atol=0.2)
    found = probabilities(actor, env)
    torch.testing.assert_close(found / found.sum(-1, keepdim=True), best.float(), rtol=0, atol=0.05)


def test_dpo_finds_the_fixed_point_of_kl_control(env, walks, imitation):
    """Of preferences ``P(w > l) = sigma(R_w - R_l)`` between finished walks, whose sums of log-ratios are ``R / beta``.

    The environment's replies follow from the moves, so this is the policy that soft value iteration finds.
    """
    finished = walks[walks["terminated"].squeeze(-1)]
    generator = torch.Generator().manual_seed(0)
    pairs = finished[torch.randint(len(finished), (8000, 2), generator=generator)]
    returns = row_returns(pairs)
    first_wins = torch.rand(8000, generator=generator) < (returns[:, 0] - returns[:, 1]).sigmoid()
    pairs = torch.where(first_wins[:, None], pairs, pairs.flip(-1))
    actor, policy, reference = spoken(env, imitation)
    train(DPOLoss(policy, reference, beta=BETA), pairs, (150, 0.1), (150, 0.02))
    found = probabilities(actor, env)
    best = soft_values(BETA, 1.0)[1].float()
    torch.testing.assert_close(found / found.sum(-1, keepdim=True), best, rtol=0, atol=0.05)
