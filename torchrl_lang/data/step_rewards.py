"""The rewards of a rollout's steps, which transforms may have changed, as rewards of the tokens of its rows."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_lang.data.step_to_token import row_of_step
from torchrl_lang.functional import row_length
from torchrl_lang.schema import ACTION_MASK, ATTENTION_MASK, RAW_REWARD, TOKEN_REWARD

__all__ = ["reward_entries", "step_rewards"]

# Where several tokens of a turn are paid, their sum and the step's reward may differ by as much, and mean the same.
_ROUNDING = 1e-5


def reward_entries(step: TensorDictBase, reward_key: NestedKey | None) -> dict[NestedKey, NestedKey]:
    """Which entries of rows are made of which rewards of steps: the rewards, and what they were before a penalty.

    A reward that was kept as ``"raw_reward"`` (or under a name that ends so) says that a penalty for the divergence
    was taken off. It goes into the rows as well, so that the same penalty is not taken off a second time.

    Raises:
        KeyError: the steps have no such reward.
    """
    if reward_key is None:
        return {}
    if step.get(reward_key, None) is None:
        raise KeyError(
            f"The steps have no reward {reward_key!r} under 'next', they have "
            f"{sorted(map(str, step.keys(True, True)))}: name it with reward_key=, or keep the "
            "environment's own token rewards with reward_key=None."
        )
    raw = [key for key in step.keys() if isinstance(key, str) and key.endswith(RAW_REWARD)]
    return {TOKEN_REWARD: reward_key} | {key: key for key in raw}


def step_rewards(rollout: TensorDictBase, take: Tensor, rows: TensorDictBase, key: NestedKey) -> Tensor:
    """Rewards of the rows' tokens, float32 ``[N, T]``, that sum to the rewards of the steps, turn by turn.

    By how much a step's reward differs from what its turn earned by ``token_reward`` is added to the turn's last token
    of the agent; to the last one before it where the agent wrote none in this step. Where nothing differs, the rows'
    own rewards come back, bit by bit. Steps that add no token to their row (it has ended) are left out.

    Args:
        rollout: steps ``[*B, time]``.
        take: bool ``[*B, time]``, the steps whose ``next`` observations are the rows.
        rows: those rows, ``[N]``.
        key: the reward behind ``"next"``, ``[*B, time, 1]``.

    Raises:
        ValueError: there is more than one reward a step, or none of the agent's tokens to put it on; or rewards differ
            and an episode began before the rollout, so that the rewards of its first turns are not in it.
    """
    step, own = rollout.get("next"), rows.get(TOKEN_REWARD)
    reward = step.get(key)
    if reward.numel() != take.numel():
        raise ValueError(
            f"{key!r} must be one number a step, {[*take.shape, 1]}, got {list(reward.shape)}: combine them into one "
            "(torchrl.envs.LineariseRewards), or name another one with reward_key=."
        )
    row = row_of_step(take)
    before, after = (row_length(x.get(ATTENTION_MASK)) for x in (rollout, step))
    place = torch.arange(own.shape[-1], device=own.device)
    earned = torch.where(place >= before.unsqueeze(-1), step.get(TOKEN_REWARD), 0.0)
    counts = (row >= 0) & (after > before)
    extra = reward.reshape(take.shape).to(own.dtype) - earned.sum(-1)
    changed = counts & (extra != 0)
    if changed.any():
        # Zero where one token is paid at most: the sum is that very number.
        inexact = earned.abs().sum(-1) - earned.abs().amax(-1)
        changed = changed & ~(extra.abs() <= _ROUNDING * inexact)
    if not changed.any():
        return own.clone()
    last = torch.where(step.get(ACTION_MASK), place, -1).max(-1).values
    _check_places(changed, last, key)
    _check_whole(row, before, counts, rows)
    return own.index_put((row[changed], last[changed]), extra[changed], accumulate=True)


def _check_places(changed: Tensor, last: Tensor, key: NestedKey) -> None:
    without_token = int((changed & (last < 0)).sum())
    if without_token:
        raise ValueError(
            f"{without_token} steps have another {key!r} than their rows, and the agent had written nothing yet: there "
            "is no token to put it on. Reward turns of the agent, or keep the environment's own rewards, "
            "reward_key=None."
        )


def _check_whole(row: Tensor, before: Tensor, counts: Tensor, rows: TensorDictBase) -> None:
    """Raise where the agent had written something before the first step of a row."""
    action_mask = rows.get(ACTION_MASK)
    first = before.new_full((len(rows),), action_mask.shape[-1])
    first = first.scatter_reduce(0, row[counts], before[counts], "amin")
    lost = int(
        (action_mask & (torch.arange(action_mask.shape[-1], device=first.device) < first[:, None])).any(-1).sum()
    )
    if lost:
        raise ValueError(
            f"Transforms changed the rewards, and {lost} of {len(rows)} episodes began before this batch, so the "
            "rewards of their first turns are not in it. Use torchrl_lang.data.EpisodeRows, collect whole episodes "
            "(Collector(..., trajs_per_batch=N)), or keep the environment's own rewards with reward_key=None."
        )
