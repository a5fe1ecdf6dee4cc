"""Policies trained on adjusted rewards find the best trade-off, which is known: ``pi(a) ~ ref(a) exp(R(a) / coef)``."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torchrl.data import Categorical as CategoricalSpec
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, ExplorationType, TransformedEnv, set_exploration_type
from torchrl.modules import ProbabilisticActor

from tests.letters import REWARD
from torchrl_lang import transforms


class Bandit(EnvBase):
    """Four arms, one pull."""

    def __init__(self, n):
        super().__init__(batch_size=[n])
        self.observation_spec = Composite(observation=Unbounded((n, 1)), shape=[n])
        self.action_spec = CategoricalSpec(4, (n,))
        self.reward_spec = Unbounded((n, 1))

    def _reset(self, tensordict=None, **_):
        return TensorDict(observation=torch.ones(*self.batch_size, 1), batch_size=self.batch_size)

    def _step(self, tensordict):
        done = torch.ones(*self.batch_size, 1, dtype=torch.bool)
        reward = REWARD[tensordict["action"]].unsqueeze(-1)
        step = {"observation": torch.ones(*self.batch_size, 1), "reward": reward, "done": done, "terminated": done}
        return TensorDict(step, batch_size=self.batch_size)

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def bandit_actor():
    net = nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0], [0.5], [0.0], [-1.0]]))
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(module, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True), net


def pull(actor, transform, steps):
    """REINFORCE on what the environment pays through the transform."""
    torch.manual_seed(0)
    env = TransformedEnv(Bandit(512), transform)
    optimizer = torch.optim.Adam(actor.parameters(), 0.1)
    for _ in range(steps):
        with set_exploration_type(ExplorationType.RANDOM):
            step = env.rollout(1, actor).squeeze(-1)
        reward = step["next", "reward"].squeeze(-1)
        optimizer.zero_grad()
        (-(reward - reward.mean()) * step["action_log_prob"]).mean().backward()
        optimizer.step()
        yield step


def test_reinforce_finds_the_best_trade_off():
    coef = 0.3
    actor, net = bandit_actor()
    before = net.weight.detach().clone().flatten()
    for _ in pull(actor, transforms.KLRewardTransform(actor, coef), 100):
        pass
    best = (before + REWARD / coef).softmax(-1)
    found = net.weight.detach().flatten().softmax(-1)
    assert (found - best).abs().sum() / 2 < 0.04
    assert (before.softmax(-1) - best).abs().sum() / 2 > 0.1


TARGET = 0.4  # without a penalty it goes to -log ref(best arm) = 2.8
CONTROLLERS = {
    "adaptive": transforms.AdaptiveKLController(0.1, target=TARGET, horizon=2048),
    "lagrange": transforms.LagrangeKLController(0.0, target=TARGET, lr=0.05, proportional=2.0),
}


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_controllers_hold_the_divergence_at_its_target(controller):
    actor, net = bandit_actor()
    reference = Categorical(logits=net.weight.detach().clone().flatten())
    transform = transforms.KLConstrainedTransform(actor, CONTROLLERS[controller])
    late = []
    for number, step in enumerate(pull(actor, transform, 200)):
        transform.update(step)
        if number >= 120:
            late.append(kl_divergence(Categorical(logits=net.weight.detach().flatten()), reference))
    assert torch.stack(late).mean() == pytest.approx(TARGET, rel=0.15)
