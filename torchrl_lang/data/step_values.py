"""Convert what a rollout has for each step to entries of its rows, token by token: rewards and the policy's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_lang.functional.decisions import row_length
from torchrl_lang.schema import (
    ACTION,
    AGENT_MASK,
    ATTENTION_MASK,
    RAW_REWARD,
    TOKEN_REWARD,
    TOKENS,
    TRAIN_MASK,
    missing_entry,
)

__all__ = ["check_steps", "reward_entries", "step_rewards", "token_values"]

# Rounding tolerance between a step's reward and the sum of several token rewards of its turn.
_ROUNDING = 1e-5


def check_steps(rollout: TensorDictBase, carry: Sequence[NestedKey]) -> None:
    """Raise ValueError if a component of TorchRL changed the steps in a way that makes their rows wrong.

    Args:
        rollout: steps of a language environment, ``[*B, time]``.
        carry: the entries that the policy wrote.
    """
    ahead = rollout.get("steps_to_next_obs", None)
    if ahead is not None and bool((ahead > 1).any()):
        raise ValueError(
            "MultiStep has added the rewards of later steps to each step and replaced its 'next' entries: convert the "
            "collector's own steps, without MultiStep. Losses over rows look ahead by themselves (target=, lmbda=)."
        )
    action = rollout.get(ACTION, None)
    if action is None or action.ndim == rollout.ndim or action.shape[-1] < 2:
        return  # the actions are single tokens
    for key in carry:
        value = rollout.get(key, None)
        if value is not None and str(key[-1] if isinstance(key, tuple) else key).endswith("log_prob"):
            _refuse_random_actions(key, value, rollout)


def _refuse_random_actions(key: NestedKey, log_prob: Tensor, rollout: TensorDictBase) -> None:
    """Raise if zeros stand for the log-probabilities of random actions, as a collector's random frames have them.

    A policy may be as certain, but then its utterances end with the same token.
    """
    before, after = (row_length(x.get(ATTENTION_MASK)) for x in (rollout, rollout.get("next")))
    agent = rollout.get(("next", AGENT_MASK))
    place = torch.arange(agent.shape[-1], device=agent.device)
    last = torch.where(agent & (place >= before.unsqueeze(-1)), place, -1).amax(-1)
    # Rows that are full may lack an utterance's end.
    certain = (log_prob == 0).reshape(*rollout.shape, -1).all(-1) & (last >= 0) & (after < agent.shape[-1])
    trained = rollout.get(TRAIN_MASK, None)
    if trained is not None:  # the turns of other players, as in a MixedPolicy, have zeros as well
        certain = certain & trained.reshape(*rollout.shape, -1).any(-1)
    end = rollout.get(("next", TOKENS)).gather(-1, last.clamp_min(0).unsqueeze(-1)).squeeze(-1)[certain]
    if bool((end != end[:1]).any()):
        raise ValueError(
            f"{key!r} is 0, which stands for a probability of one, at all tokens of {end.shape[0]} steps whose actions "
            "end with different tokens: a Collector writes such zeros for the random actions of init_random_frames. "
            "Collect with init_random_frames=0, or convert random actions on their own, without carry=."
        )


def reward_entries(step: TensorDictBase, reward_key: NestedKey | None) -> dict[NestedKey, NestedKey]:
    """Map entries of rows to the step rewards that they are computed from: the reward, and its values before penalties.

    An entry ``"raw_reward"`` (or with this suffix) means that a divergence penalty was subtracted. It is copied to the
    rows as well, so that the same penalty is not subtracted a second time.

    Raises:
        KeyError: the steps do not have the reward.
    """
    if reward_key is None:
        return {}
    if step.get(reward_key, None) is None:
        raise missing_entry(
            "The token reward of rows",
            [reward_key],
            step,
            "Name a reward under 'next' with reward_key=, or use reward_key=None for the environment's token rewards.",
        )
    raw = [key for key in step.keys() if isinstance(key, str) and key.endswith(RAW_REWARD)]
    return {TOKEN_REWARD: reward_key} | {key: key for key in raw}


def step_rewards(rollout: TensorDictBase, take: Tensor, rows: TensorDictBase, key: NestedKey) -> Tensor:
    """Rewards of the rows' tokens, float32 ``[N, T]``, that sum to the step rewards, turn by turn.

    If a step's reward differs from the sum of ``token_reward`` over its turn, the difference is added to the turn's
    last agent token, or to the last agent token before it if the agent wrote none in this step. Otherwise the rows' own
    rewards are returned bit by bit. Steps that add no token (their row has ended) are ignored. The rows are the
    ``next`` observations of the steps ``take``.
    """
    step, own = rollout.get("next"), rows.get(TOKEN_REWARD)
    reward = step.get(key)
    if reward.numel() != take.numel():
        raise ValueError(
            f"{key!r} must be one number per step, {[*take.shape, 1]}, got {list(reward.shape)}: combine them into one "
            "(torchrl.envs.LineariseRewards), or name another reward with reward_key=."
        )
    row = row_of_step(take)
    before, after = (row_length(x.get(ATTENTION_MASK)) for x in (rollout, step))
    place = torch.arange(own.shape[-1], device=own.device)
    earned = torch.where(place >= before.unsqueeze(-1), step.get(TOKEN_REWARD), 0.0)
    counts = (row >= 0) & (after > before)
    extra = reward.reshape(take.shape).to(own.dtype) - earned.sum(-1)
    changed = counts & (extra != 0)
    if changed.any():
        # The difference is exactly zero if at most one token has a reward.
        inexact = earned.abs().sum(-1) - earned.abs().amax(-1)
        changed = changed & ~(extra.abs() <= _ROUNDING * inexact)
    if not changed.any():
        return own.clone()
    last = torch.where(step.get(AGENT_MASK), place, -1).max(-1).values
    without_token = int((changed & (last < 0)).sum())
    if without_token:
        raise ValueError(
            f"{without_token} steps have another {key!r} than their rows, but the agent has written no token yet to "
            "place it on. Reward the agent's turns, or keep the environment's token rewards with reward_key=None."
        )
    _check_whole(row, before, counts, rows)
    return own.index_put((row[changed], last[changed]), extra[changed], accumulate=True)


def _check_whole(row: Tensor, before: Tensor, counts: Tensor, rows: TensorDictBase) -> None:
    """Raise if the agent wrote tokens before the first step of a row."""
    agent_mask = rows.get(AGENT_MASK)
    first = before.new_full((len(rows),), agent_mask.shape[-1])
    first = first.scatter_reduce(0, row[counts], before[counts], "amin")
    place = torch.arange(agent_mask.shape[-1], device=first.device)
    lost = int((agent_mask & (place < first[:, None])).any(-1).sum())
    if lost:
        raise ValueError(
            f"Transforms changed the rewards, and {lost} of {len(rows)} episodes began before this batch, which lacks "
            "the rewards of their first turns. Use torchrl_lang.data.EpisodeRows, collect whole episodes "
            "(Collector(..., trajs_per_batch=N)), or keep the environment's token rewards with reward_key=None."
        )


def token_values(
    rollout: TensorDictBase, take: Tensor, agent_mask: Tensor, keys: Sequence[NestedKey]
) -> dict[NestedKey, Tensor]:
    """Values of the agent's tokens at the tokens' positions in the rows, each ``[N, T]``, zero on other tokens.

    An entry of the steps ``[*B, time]`` has one value per token of the turn's utterance, ``[*B, time, K]``, or one for
    all tokens of the turn, ``[*B, time]`` or ``[*B, time, 1]``. The rows are the ``next`` observations of the steps
    ``take``, and ``agent_mask`` is theirs.
    """
    row = row_of_step(take)
    before = row_length(rollout.get(ATTENTION_MASK))
    after = rollout.get(("next", AGENT_MASK))
    out = {}
    for key in keys:
        value = rollout.get(key, None)
        if value is None:
            raise missing_entry("carry", [key], rollout, "Let the policy write the entry, or do not carry it.")
        value = value if value.ndim > take.ndim else value.unsqueeze(-1)
        width = value.shape[-1] if value.shape[-1] > 1 else after.shape[-1]
        place = before.unsqueeze(-1) + torch.arange(width, device=value.device)
        inside = place < after.shape[-1]
        written = inside & after.gather(-1, place.clamp_max(after.shape[-1] - 1)) & (row >= 0).unsqueeze(-1)
        index = (row.unsqueeze(-1).expand_as(place)[written], place[written])
        out[key] = value.new_zeros(agent_mask.shape).index_put(index, value.expand_as(place)[written])
        known = torch.zeros_like(agent_mask).index_put(index, torch.ones_like(index[0], dtype=torch.bool))
        lost = (agent_mask & ~known).any(-1).sum()
        if lost:
            raise ValueError(
                f"{int(lost)} of {agent_mask.shape[0]} episodes began before this batch, which lacks {key!r} of their "
                "first turns. Collect whole episodes (Collector(..., trajs_per_batch=N), or frames_per_batch a "
                "multiple of the longest episode with resets between batches), or score the rows again."
            )
    return out


def row_of_step(take: Tensor) -> Tensor:
    """The number of the row that each step belongs to, int64 ``[*B, time]``; -1 if its episode has no row."""
    number = (take.flatten().cumsum(0) - 1).view_as(take)
    none = take.numel()
    # The numbers increase with time, so a step's row is the smallest number from it onwards.
    ahead = torch.where(take, number, none).flip(-1).cummin(-1).values.flip(-1)
    return torch.where(ahead == none, -1, ahead)
