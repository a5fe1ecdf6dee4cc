"""Evaluate how a policy improves over episodes without changes of its weights."""

from __future__ import annotations

from contextlib import closing

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_lang._checks import Count, checked
from torchrl_lang._random_stream import seeded_generators
from torchrl_lang.algorithm_distillation.policies import ContextPolicy
from torchrl_lang.envs.grids import HiddenTaskEnv
from torchrl_lang.schema import ACTION, DONE, EPISODE, OBSERVATION, REWARD, TERMINATED, entry


@torch.no_grad()
@checked
def evaluate_in_context(env: EnvBase, policy: ContextPolicy, episodes: Count, *, seed: int = 0) -> Tensor:
    """The return of each of the first ``episodes`` episodes of every stream, float32 ``[*B, episodes]``.

    Each row of the environment is a stream with a task of its own. All streams step until the slowest has completed its
    episodes; further episodes of the others are not counted.

    Args:
        env: environment of batch size ``[*B]``, such as ``[streams]`` or ``[tasks, streams]``, with one task in each
            row. It is seeded.
        policy: the policy, which sees the rows as one dimension.
        episodes: number of episodes, ``K``.
        seed: seed of environment and policy. The policy's generators are restored afterwards; the environment keeps
            this seed.

    Raises:
        ValueError: the environment draws a task for each episode; of environments side by side, such as a
            ``SerialEnv``, the first one does.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import RandomPolicy, evaluate_in_context
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.arange(25)[:, None], batch_size=[25, 8])
        >>> evaluate_in_context(env, RandomPolicy(5), episodes=3).shape
        torch.Size([25, 8, 3])
    """
    if drawing := _drawing_env(env):
        raise ValueError(f"{drawing} draws a task for each episode, but a stream has one for all: give task=.")
    streams = env.batch_size.numel()
    returns = torch.zeros(streams, episodes, device=env.device)
    number = torch.zeros(streams, dtype=torch.int64, device=env.device)
    with seeded_generators(seed, policy):
        env.set_seed(seed)
        policy.begin(streams)
        observed = env.reset()
        while bool((number < episodes).any()):
            observation = entry(observed, OBSERVATION)
            action = policy.act(observation.reshape(streams, *observation.shape[env.batch_dims :]))
            action = action.reshape(*env.batch_size, *action.shape[1:])
            following = env.step(observed.copy().set(ACTION, action)).get("next")
            reward, done, terminated = (following.get(key).reshape(streams) for key in (REWARD, DONE, TERMINATED))
            policy.observe(reward, done, terminated)
            counted = torch.where(number < episodes, reward, 0)
            returns.scatter_add_(1, number.clamp_max(episodes - 1)[:, None], counted[:, None])
            number = number + done
            observed = env.maybe_reset(following)
    return returns.reshape(*env.batch_size, episodes)


def _drawing_env(env: EnvBase) -> str:
    """The class of an environment that draws a task for each episode, empty if it does not.

    Of several environments side by side, one is made as the first of them.
    """
    if isinstance(env, TransformedEnv):
        return _drawing_env(env.base_env)
    if isinstance(env, BatchedEnvBase):
        with closing(env.create_env_fn[0](**env.create_env_kwargs[0])) as first:
            return _drawing_env(first)
    return type(env).__name__ if isinstance(env, HiddenTaskEnv) and env.fixed_task is None else ""


@checked
def episode_returns(steps: TensorDictBase, episodes: Count) -> Tensor:
    """The returns of the first episodes of learning histories: the curve of a source algorithm.

    Args:
        steps: ``[*S, L]`` with ``reward``, ``done`` and ``episode``, from the first step of the streams on.
        episodes: number of episodes, ``K``, that every stream has completed.

    Returns:
        float32 ``[*S, K]``.

    Raises:
        ValueError: a stream has completed fewer episodes, or the steps do not have all episodes from 0 on.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import episode_returns
        >>> from torchrl_lang.algorithm_distillation.sources import QLearning
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.arange(25)[:, None], batch_size=[25, 2])
        >>> episode_returns(QLearning(env, 200).history(), 10).shape
        torch.Size([25, 2, 10])
    """
    number, shape = entry(steps, EPISODE), steps.batch_size
    reward, done = entry(steps, REWARD).reshape(shape), entry(steps, DONE).reshape(shape)
    expected = done.cumsum(-1) - done.long()
    if not torch.equal(number, expected) or int(done.sum(-1).min()) < episodes:
        raise ValueError(f"The steps must have all episodes of a stream from 0 on, {episodes} completed ones at least.")
    returns = torch.zeros(*shape[:-1], episodes, device=reward.device)
    counted = torch.where(number < episodes, reward, 0)
    return returns.scatter_add_(-1, number.clamp_max(episodes - 1), counted)
