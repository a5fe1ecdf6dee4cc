"""Your own environment and TorchRL's own PPO: a policy that must stay near the one that it starts from.

A cart is to be pushed to a flag. The start is a policy that drives there slowly; PPO makes it faster, a Lagrange
multiplier holds its divergence from the start at a target, and a limit cuts episodes that stray too far.
"""

import torch
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_lang.transforms import KLConstrainedTransform, LagrangeKLController


class Cart(EnvBase):
    """Position and speed; each step costs the distance to the flag at 0."""

    def __init__(self, n):
        super().__init__(batch_size=[n])
        self.observation_spec = Composite(observation=Unbounded((n, 2)), shape=[n])
        self.action_spec = Bounded(-5.0, 5.0, (n, 1))
        self.reward_spec = Unbounded((n, 1))

    def _reset(self, tensordict=None, **_):
        start = torch.stack([torch.rand(self.batch_size) * 2 - 1, torch.zeros(self.batch_size)], -1)
        if tensordict is not None and "_reset" in tensordict.keys():
            start = torch.where(tensordict["_reset"], start, self.now)
        self.now = start
        return TensorDict(observation=start.clone(), batch_size=self.batch_size)

    def _step(self, tensordict):
        place, speed = self.now.unbind(-1)
        speed = 0.9 * speed + 0.1 * tensordict["action"].squeeze(-1)
        self.now = torch.stack([place + 0.1 * speed, speed], -1)
        reward, done = -self.now[:, :1].abs(), torch.zeros(*self.batch_size, 1, dtype=torch.bool)
        return TensorDict(
            observation=self.now.clone(), reward=reward, done=done, terminated=done.clone(), batch_size=self.batch_size
        )

    def _set_seed(self, seed):
        torch.manual_seed(seed)


torch.manual_seed(0)
mean = nn.Linear(2, 1)
with torch.no_grad():
    mean.weight.copy_(torch.tensor([[-1.0, -0.5]]))  # the slow driver
    mean.bias.zero_()
net = nn.Sequential(mean, AddStateIndependentNormalScale(1, scale_lb=0.1))
actor = ProbabilisticActor(
    TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
    in_keys=["loc", "scale"],
    distribution_class=IndependentNormal,
    return_log_prob=True,
)
critic = ValueOperator(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["observation"])

target = 0.05
multiplier = LagrangeKLController(0.0, target=target, lr=0.2, proportional=2.0)
near = KLConstrainedTransform(actor, multiplier, limit=20.0)
# RewardSum stands before the penalty, so it sums the raw rewards; behind it, it would sum the adjusted ones.
env = TransformedEnv(Cart(64), Compose(StepCounter(max_steps=50), RewardSum(), near))
collector = Collector(
    env, actor, frames_per_batch=64 * 50, total_frames=64 * 50 * 40, auto_register_policy_transforms=False
)
advantage = GAE(gamma=0.95, lmbda=0.95, value_network=critic)
loss = ClipPPOLoss(actor, critic, entropy_coeff=0.0, normalize_advantage=True)
optimizer = torch.optim.Adam(loss.parameters(), 2e-2)
for number, batch in enumerate(collector):
    near.update(batch)
    with torch.no_grad():
        advantage(batch)
    for part in batch.reshape(-1)[torch.randperm(batch.numel())].split(800):
        losses = loss(part)
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        optimizer.step()
    if number % 10 == 0 or number == 39:
        reward, kl = batch["next", "raw_reward"].mean(), batch["next", "kl"].mean()
        print(
            f"{number:2d}: reward a step {reward:.3f}, KL {kl:.3f} (target {target}), multiplier {float(near.coef):.3f}"
        )
collector.shutdown()
