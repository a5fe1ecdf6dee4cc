"""TorchRL's own losses train an utterance actor on steps of a rollout."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import A2CLoss, ClipPPOLoss, HardUpdate, KLPENPPOLoss, ReinforceLoss
from torchrl.objectives.value import GAE

from tests.modules.toys import tiny_lm
from tests.objectives.test_ppo import corridor, speaker
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.games import corridor_value
from torchrl_lang.modules import UtteranceActor, ValueHead, language_actor, row_value_module, value_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.text import CharTokenizer
from torchrl_lang.training import adamw, total_loss

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented")
LOSSES = {
    "ppo": ClipPPOLoss,
    "a2c": A2CLoss,
    "reinforce": ReinforceLoss,
    "kl": lambda *networks, **options: KLPENPPOLoss(*networks, delay_actor=True, **options),
}


def moved(policy):
    """Change the policy's weights a little."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.05 * torch.randn_like(weight))


def gradients(policy, loss):
    policy.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_our_ppo_where_the_terms_coincide(name):
    """In the corridor an utterance is one token and a certain end. A2C and REINFORCE have no ratio: on fresh data."""
    env = corridor(16)
    policy = speaker(env)
    steps = env.rollout(6, policy, break_when_any_done=False)
    steps["advantage"] = torch.randn(16, 6, 1, generator=torch.Generator().manual_seed(0))
    steps["value_target"] = torch.zeros_like(steps["advantage"])
    steps["of_tokens"] = steps["advantage"].expand_as(steps["token_log_prob"]).contiguous()
    rows = rows_from_rollout(steps, unfinished="truncate", carry=["token_log_prob", "of_tokens"])
    rows["advantage"], rows["value_target"] = rows["of_tokens"], torch.zeros_like(rows["of_tokens"])
    entropy = {} if name == "reinforce" else {"entropy_coeff": 0.1}
    options = {"reduction": "sum", **entropy, **({"beta": 0.0} if name == "kl" else {})}
    theirs = LOSSES[name](policy, row_value_module(policy, ValueHead(32)), **options)
    if name in ("ppo", "kl"):
        moved(policy)
    out = theirs(steps)
    parts = [out[key] for key in ("loss_objective", "loss_actor", "loss_entropy") if key in out.keys()]
    clips = {"clip_epsilon": (1.0, 1e6) if name == "kl" else 0.2, "normalize_advantage": False, "value_weight": 0.0}
    weight = entropy.get("entropy_coeff", 0.0)
    ours = PPOLoss(policy, value_module(ValueHead(32)), reduction="sum", entropy_weight=weight, **clips)(rows)
    mine, its = gradients(policy, total_loss(ours)), gradients(policy, sum(parts))
    assert len(its) > 10
    torch.testing.assert_close(its, mine, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_they_find_the_straight_walk(name):
    env = corridor(32)
    policy = speaker(env, spread=0.1)
    critic = row_value_module(policy, ValueHead(32))
    loss = LOSSES[name](policy, critic, **({"dtarg": 0.1} if name == "kl" else {}))
    estimate = GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=True)
    updater = HardUpdate(loss, value_network_update_interval=1) if name == "kl" else None
    optimizer, returns, best = adamw(loss, 7e-3, weight_decay=0.0), [], float(corridor_value(3))
    while len(returns) < 3 or (len(returns) < 40 and sum(returns[-3:]) < 3 * (best - 0.15)):
        steps = env.rollout(8, policy, break_when_any_done=False)
        done, reward = steps["next", "done"].long(), steps["next", "reward"]
        returns.append(float((reward * (done.cumsum(1) == done)).sum(1).mean()))  # of the first walk
        if name in ("ppo", "kl"):  # the others learn from each step once, and estimate by themselves
            estimate(steps)
        if updater is not None:
            updater.step()
        for _ in range(4 if name in ("ppo", "kl") else 1):
            optimizer.zero_grad()
            total_loss(loss(steps)).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
            optimizer.step()
    assert returns[0] < best - 3
    assert sum(returns[-3:]) > 3 * (best - 0.15), returns


def test_the_earlier_policy_of_delay_actor_is_the_one_before_the_step():
    """TorchRL puts its weights into the model during ``get_dist`` only."""
    env = corridor(512)
    policy = speaker(env)
    loss = LOSSES["kl"](policy, row_value_module(policy, ValueHead(32)), entropy_bonus=False)
    earlier = copy.deepcopy(policy)
    steps = env.rollout(1, policy)
    moved(policy)
    out = loss(steps)
    then, now = earlier.get_dist(steps), policy.get_dist(steps)
    expected = (steps["action_log_prob"] - now.log_prob(steps["action"])).mean()
    torch.testing.assert_close(out["kl_approx"], expected.detach(), rtol=1e-4, atol=1e-5)
    drawn = then.sample((20,))
    exact = (then.log_prob(drawn) - now.log_prob(drawn)).mean()
    assert exact > 0.01
    torch.testing.assert_close(out["kl"].mean(), exact, rtol=0.3, atol=0.0)
    assert not any("weight" in vars(module) for module in policy.modules())  # the model has its own again


def test_entropy_and_its_gradient_are_unbiased():
    """Against the sum over all seven utterances of up to two letters."""
    tokenizer = CharTokenizer.from_alphabet("ab")
    lm = tiny_lm(vocab_size=tokenizer.vocab_size)
    policy = UtteranceActor(language_actor(lm), tokenizer.control, 3, temperature=0.3, seed=0)
    end, pad = tokenizer.control.end_of_action, tokenizer.control.pad
    two = itertools.product((0, 1), repeat=2)
    every = torch.tensor([[end, pad, pad], [0, end, pad], [1, end, pad], *([a, b, end] for a, b in two)])
    row = TensorDict(tokens=torch.tensor([[0, 1, 1]]), attention_mask=torch.ones(1, 3).bool(), batch_size=[1])
    log_prob = policy.get_dist(row).log_prob(every[:, None])  # sample dimensions
    assert log_prob.shape == (7, 1)
    torch.testing.assert_close(log_prob[:, 0], policy.get_dist(row.expand(7)).log_prob(every))
    exact = -(log_prob.exp() * log_prob).sum()
    estimate = policy.get_dist(row.expand(10_000)).entropy()
    assert estimate.shape == (10_000,)
    torch.testing.assert_close(estimate.mean(), exact, rtol=0.02, atol=0.0)
    expected, found = gradients(policy, exact), gradients(policy, estimate.mean())
    largest = max(value.abs().max() for value in expected.values())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.05 * float(largest))


def test_a_critic_of_rows_reads_their_last_token_and_runs_in_vmap():
    env = corridor(16)
    policy = speaker(env)
    critic = row_value_module(policy, ValueHead(32))
    with torch.no_grad():
        critic[-1].module.out_bias.fill_(0.5)
    steps = env.rollout(4, policy, break_when_any_done=False)
    every = value_module(critic[-1].module)(critic[0](steps.copy()))["state_value"].squeeze(-1)
    expected = every.gather(-1, steps["attention_mask"].sum(-1, keepdim=True) - 1)
    for flag in (True, False):
        found = GAE(gamma=0.9, lmbda=0.9, value_network=critic, deactivate_vmap=flag)(steps.clone())
        torch.testing.assert_close(found["state_value"], expected.detach())
    assert "hidden" not in found.keys()


def test_what_data_do_not_hold_is_refused_by_name():
    env = corridor(4)
    policy = speaker(env)
    assert (policy.dist_sample_keys, policy.log_prob_keys) == (["action"], ["action_log_prob"])
    steps = env.rollout(2, policy)
    dist = policy.get_dist(steps)
    assert torch.equal(policy.log_prob(steps, dist=dist), dist.log_prob(steps["action"]))
    with pytest.raises(NotImplementedError, match="delay_actor=True"):
        KLPENPPOLoss(policy, row_value_module(policy, ValueHead(32)))(steps)
