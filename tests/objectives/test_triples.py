"""PPO and GRPO on queries, responses and rewards: the same update as on an environment's rows, and they learn."""

from __future__ import annotations

import copy

import pytest
import torch

from torchrl_lang.data import rows_from_rollout, rows_from_triples
from torchrl_lang.envs import PromptEnv
from torchrl_lang.modules import (
    UtteranceActor,
    ValueHead,
    causal_lm,
    language_actor,
    row_log_prob,
    value_module,
)
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.text import CharTokenizer
from torchrl_lang.training import total_loss
from torchrl_lang.transforms import KLConstrainedTransform, RowReference, frozen_copy

LETTERS = CharTokenizer.from_alphabet("abcdef")
QUERIES = ["ab", "c", "", "fade"]
T, K, WIDTH = 14, 4, 16


def make_loss(**options):
    torch.manual_seed(0)
    lm = causal_lm(
        vocab_size=LETTERS.vocab_size, layers=1, width=WIDTH, heads=2, max_length=T + K, initializer_range=0.3
    )
    value = ValueHead(WIDTH)
    policy = UtteranceActor(language_actor(lm), LETTERS.control, K, seed=0, value=value)
    return PPOLoss(policy, value_module(value), **options)


def share_of_as(_, completions):
    return [completion.count("a") / 4 - 0.1 * len(completion) for completion in completions]


def played(loss):
    """The rows of a rollout, and the same content as triples with log-probabilities."""
    env = PromptEnv(QUERIES, share_of_as, LETTERS, row_length=T, action_length=K, batch_size=[32], seed=1)
    steps = env.rollout(1, loss.actor_network, break_when_any_done=False)
    rows = rows_from_rollout(steps, unfinished="drop", carry=["token_log_prob"])
    steps = steps[:, 0]
    queries = [QUERIES[seed] for seed in env.game_seed.tolist()]
    rewards = steps["next", "reward"].squeeze(-1)
    return rows, (queries, steps["action"], rewards), steps["token_log_prob"]


def one_step(loss, rows, *, kl):
    """The parameters after one step of PPO on all rows at once."""
    if kl:
        other = copy.deepcopy(loss.actor_network)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1)
        rows = KLConstrainedTransform(RowReference(frozen_copy(other)), 0.3)(rows)
        assert rows["kl"].any()
    # Not Adam: it would magnify the rounding errors of gradients that are zero, such as those of the keys' bias.
    rows, optimizer = loss.estimate(rows), torch.optim.SGD(loss.parameters(), 0.1)
    total_loss(loss(rows)).backward()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in loss.named_parameters()}


@pytest.mark.parametrize("known", [True, False], ids=["log_probs given", "log_probs computed"])
@pytest.mark.parametrize("kl", [False, True], ids=["", "kl"])
def test_a_step_on_triples_is_the_step_on_a_rollout(known, kl):
    loss = make_loss()
    before = {name: parameter.detach().clone() for name, parameter in loss.named_parameters()}
    rows, triples, log_probs = played(loss)
    of_triples = rows_from_triples(*triples, LETTERS, T, log_probs=log_probs if known else None)
    if not known:
        with torch.no_grad():
            of_triples["token_log_prob"] = row_log_prob(loss.actor_network, of_triples)
    one, other = (one_step(copy.deepcopy(loss), each, kl=kl) for each in (rows, of_triples))
    assert any((one[name] - before[name]).abs().max() > 1e-3 for name in one)
    for name, parameter in one.items():
        torch.testing.assert_close(other[name], parameter, rtol=0, atol=1e-6, msg=name)
