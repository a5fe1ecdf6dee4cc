"""TorchRL's old KL example on a Gymnasium environment (``pip install torchrl-lang[gym]``): a TanhNormal actor drifts.

``KLRewardTransform`` takes the arguments that TorchRL's took. The reward falls as the policy leaves its reference.
"""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import ExplorationType, GymEnv, TransformedEnv, set_exploration_type
from torchrl.envs.utils import check_env_specs
from torchrl.modules import ProbabilisticActor, TanhNormal

from torchrl_lang.transforms import KLRewardTransform

torch.manual_seed(0)
base_env = GymEnv("Pendulum-v1")
n_obs = base_env.observation_spec["observation"].shape[-1]
n_act = base_env.action_spec.shape[-1]
module = TensorDictModule(
    nn.Sequential(nn.Linear(n_obs, n_act * 2), NormalParamExtractor()),
    in_keys=["observation"],
    out_keys=["loc", "scale"],
)
actor = ProbabilisticActor(
    module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True, spec=base_env.action_spec
)
env = TransformedEnv(base_env, KLRewardTransform(actor, coef=1.0, out_keys="reward_kl"))
check_env_specs(env)

for drift in (0.0, 0.25, 0.25, 0.5):
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):  # estimates need actions that are drawn
        for parameter in actor.parameters():
            parameter.add_(drift)
        steps = env.rollout(200, actor)
    reward, adjusted = steps["next", "reward"].mean(), steps["next", "reward_kl"].mean()
    print(
        f"reward {reward:6.2f}, less the divergence {adjusted:6.2f}, divergence {steps['next', 'kl'].mean():5.2f} nats"
    )
