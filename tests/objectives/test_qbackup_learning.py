"""CQL, BCQ and psi-learning find the known optimum of a corridor, or the exact fixed point of KL control there.

The player of the data moves by its place alone: left most often, right less often, and sometimes it writes nothing.
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

from torchrl_lang.data import row_buffer, rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv, corridor_value
from torchrl_lang.evaluation import play_games
from torchrl_lang.modules import QValueHead, UtteranceActor, ValueGuidance, causal_lm, language_actor, qvalue_module
from torchrl_lang.objectives import BCLoss, BCQLoss, CQLLoss, PsiLoss
from torchrl_lang.training import adamw, train_steps
from torchrl_lang.transforms import frozen_copy

LENGTH, WIDTH = 4, 32
LEFT, RIGHT, NOTHING = 0.5, 0.35, 0.15
BEST = float(corridor_value(LENGTH - 1))
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


@pytest.fixture
def actor(env):
    torch.manual_seed(0)
    vocabulary = env.tokenizer.vocab_size
    lm = causal_lm(vocab_size=vocabulary, layers=1, width=WIDTH, heads=2, max_length=48, initializer_range=0.1)
    return language_actor(lm)


def make(kind, env, actor, **options):
    writes = UtteranceActor(actor, env.tokenizer.control, 2)
    qvalue = qvalue_module(QValueHead(WIDTH, env.tokenizer.vocab_size))
    return kind(writes, qvalue, actor_normalizer="action", **options)


def train(loss, walks, *phases):
    """Train for some phases of ``(steps, learning rate)``."""
    updater = None if isinstance(loss, BCLoss) else SoftUpdate(loss, tau=0.05)
    buffer = row_buffer(walks, 32, seed=0)
    for steps, lr in phases or [(300, 5e-3)]:
        options = {"steps": steps, "target_updater": updater, "max_grad_norm": 1.0}
        for _ in train_steps(loss, buffer.sample, adamw(loss, lr), **options):
            pass


def play(env, loss, *, method="greedy", min_p=None, **guidance):
    policy = UtteranceActor(
        loss.language_actor,
        env.tokenizer.control,
        2,
        guidance=ValueGuidance(loss.target_qvalue_network(), **guidance),
        method=method,
        min_p=min_p,
        seed=0,
    )
    return float(play_games(env, policy, games=256, seed=1).returns.mean())


def test_cql_walks_straight(env, walks, actor):
    loss = make(CQLLoss, env, actor, cql_weight=0.01)
    train(loss, walks)
    assert play(env, loss, beta=32.0) == BEST


@pytest.mark.parametrize("threshold", [0.1, 0.5])
def test_bcq_walks_straight_within_what_the_data_support(env, walks, actor, threshold):
    loss = make(BCQLoss, env, actor, threshold=threshold)
    train(loss, walks)
    assert play(env, loss, beta=1.0, include_logits=False, min_p=threshold) == BEST


def test_bcq_without_a_constraint_overestimates_and_with_the_strictest_one_copies(env, walks, actor):
    """Threshold 0 is double Q-learning offline; with 1 the policy is the most likely utterance of the data, ``l``."""
    loss = make(BCQLoss, env, actor, threshold=0.0)
    train(loss, walks)
    assert play(env, loss, beta=1.0, include_logits=False) < BEST - 1
    loss = make(BCQLoss, env, actor, threshold=1.0)
    train(loss, walks, (100, 5e-3))
    assert play(env, loss, beta=1.0, include_logits=False, min_p=1.0) == -8.0


def soft_values(reward_scale, turn_gamma, rounds=200):
    """``V(place) = log sum_u p(u) exp(r / c + gamma V(next place))`` by value iteration, and the optimal ``pi(u)``."""
    prior = torch.tensor([LEFT, RIGHT, NOTHING], dtype=torch.float64).log()
    value = torch.zeros(LENGTH, dtype=torch.float64)
    for _ in range(rounds):
        here = torch.arange(LENGTH - 1)
        after = torch.stack([(here - 1).clamp_min(0), here + 1, here], -1)
        reward = torch.where(after == LENGTH - 1, 0.0, -1.0)
        score = prior + reward / reward_scale + turn_gamma * value[after]
        value = torch.cat([score.logsumexp(-1), torch.zeros(1, dtype=torch.float64)])
    return value[:-1], score.softmax(-1)


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


def tabular_loss(env, *, forbidden, prior=None, **options):
    """Psi-learning of tables, one entry a state and token, so that nothing but the targets decides where it ends."""
    vocabulary = env.tokenizer.vocab_size
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(LastThree(vocabulary), in_keys=["tokens", "attention_mask"], out_keys=["hidden"]),
        TensorDictModule(Table(vocabulary, vocabulary), in_keys=["hidden"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["next_token"], distribution_class=Categorical),
    )
    qvalue = TensorDictModule(Table(vocabulary, 2, vocabulary), in_keys=["hidden"], out_keys=["action_value"])
    writes = UtteranceActor(actor, env.tokenizer.control, 2, forbidden=forbidden, cached=False)
    clocks = {"gamma": 1.0, "turn_gamma": 0.9}
    return PsiLoss(writes, qvalue, actor_normalizer="action", reward_scale=0.5, prior=prior, **clocks, **options)


def learned_values(env, loss, places=LENGTH - 1):
    """At the beginning of an utterance at each place, over what the data write: ``log sum_a exp Qt`` and softmax."""
    end, of_state = env.tokenizer.control.end_of_action, env.tokenizer.control.end_of_state
    vocabulary = env.tokenizer.vocab_size
    # Before the place stands the end of the last utterance.
    code = (end * vocabulary + torch.arange(places)) * vocabulary + of_state
    least = loss.target_qvalue_network_params.data["module", "rows"][code].amin(-2)
    least = least[:, [*env.tokenizer.encode("lr"), end]].double()
    return least.logsumexp(-1), least.softmax(-1)


FAST = (400, 0.1), (200, 0.02)


@pytest.mark.parametrize("prior", ["beside", "frozen"])
def test_psi_learning_finds_the_fixed_point_of_kl_control(env, walks, prior):
    """Soft value iteration with the data's policy as prior; all tokens that can be written stand in the data."""
    forbidden = (*env.tokenizer.control.forbidden_in_action(), *env.tokenizer.encode("0123"))
    loss = tabular_loss(env, forbidden=forbidden)
    if prior == "frozen":
        train(BCLoss(loss.language_actor, actor_normalizer="action"), walks, *FAST)
        loss = tabular_loss(env, forbidden=forbidden, prior=frozen_copy(loss.language_actor), actor_weight=0.0)
    train(loss, walks, *FAST)
    value, policy = soft_values(0.5, 0.9)
    found, probability = learned_values(env, loss)
    torch.testing.assert_close(found, value, rtol=0, atol=0.1)
    torch.testing.assert_close(probability, policy, rtol=0, atol=0.03)


def test_psi_learning_with_a_threshold_needs_no_list_of_tokens(env, walks):
    """Else the digits, which the data never write, count as well, with the value that they began with."""
    value, _ = soft_values(0.5, 0.9)
    found = {}
    for threshold in (0.0, 0.1):
        loss = tabular_loss(env, forbidden=None, threshold=threshold)
        train(loss, walks, *FAST)
        found[threshold], _ = learned_values(env, loss)
    torch.testing.assert_close(found[0.1], value, rtol=0, atol=0.1)
    assert (found[0.0] > value + 0.5).all()
