"""Training rows from TorchRL rollouts: the row of an episode is its last observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.data.step_values import check_steps, reward_entries, step_rewards, token_values
from torchrl_lang.functional import shift_left
from torchrl_lang.functional.decisions import row_length
from torchrl_lang.schema import (
    AGENT_MASK,
    ATTENTION_MASK,
    DONE,
    FEATURES,
    FEATURES_MASK,
    REWARD,
    ROW_KEYS,
    TERMINATED,
    TOKENS,
    TRUNCATED,
    check_row,
    missing_entry,
)

__all__ = ["COLLECTED", "episode_numbers", "finished_steps", "rows_at", "rows_from_rollout"]

COLLECTED = ("collector", "mask")
"""bool ``[*B, time]``: False on the steps with which a collector padded shorter trajectories."""


def finished_steps(rollout: TensorDictBase) -> Tensor:
    """True at the step that ends an episode, bool ``[*B, time]``, once per episode.

    Without resets TorchRL may step a finished row again, which adds no token, or (with
    ``rollout(break_when_all_done=True)``) repeat its last step until all rows have finished; these steps are False.
    """
    ended = rollout.get(("next", DONE)).squeeze(-1)
    before, after = (row_length(rollout.get(key)) for key in (ATTENTION_MASK, ("next", ATTENTION_MASK)))
    ended = ended & (after > before)
    tokens = rollout.get(("next", TOKENS))
    same = (tokens[..., 1:, :] == tokens[..., :-1, :]).all(-1) & (before[..., 1:] == before[..., :-1])
    repeats = ended[..., :-1] & same
    # Two equal one-turn episodes look like a repeated step, too; but if rows were reset, not all rows would repeat.
    if ended[..., 0].all() or not repeats[ended[..., :-1]].all():
        return ended
    return torch.cat([ended[..., :1], ended[..., 1:] & ~repeats], -1)


def rows_at(
    rollout: TensorDictBase,
    take: Tensor,
    *,
    keep: Sequence[str] = (),
    carry: Sequence[NestedKey] = (),
    reward_key: NestedKey | None = REWARD,
) -> TensorDict:
    """The ``next`` observations at the steps ``take``, bool ``[*B, time]``, as checked rows ``[N]``.

    They have the entries of a row, its features if there are some, ``terminated``, ``truncated``, and the entries
    ``keep``; see :func:`rows_from_rollout` for the others.
    """
    step = rollout.get("next")
    features = [key for key in (FEATURES, FEATURES_MASK) if step.get(key, None) is not None]
    rows = {key: step.get(key)[take] for key in (*ROW_KEYS, TERMINATED, *features, *keep)}
    # Without a truncated entry, an episode that is not terminated was cut by the end of the rollout.
    truncated = step.get(TRUNCATED, None)
    rows[TRUNCATED] = ~rows[TERMINATED] if truncated is None else truncated[take] | ~step.get(DONE)[take]
    out = TensorDict(rows, batch_size=[rows[TERMINATED].shape[0]], device=rollout.device)
    rewards = reward_entries(step, reward_key)
    out.update({name: step_rewards(rollout, take, out, key) for name, key in rewards.items()})
    if carry:
        out.update(token_values(rollout, take, out.get(AGENT_MASK), carry))
    check_row(out)
    return out


def rows_from_rollout(
    rollout: TensorDictBase,
    *,
    unfinished: Literal["drop", "truncate"],
    carry: Sequence[NestedKey] = (),
    keep: Sequence[str] = (),
    reward_key: NestedKey | None = REWARD,
) -> TensorDict:
    """Rows ``[N]`` of the episodes in a rollout or a collector's batch ``[*B, time]``.

    The row of an episode is the ``next`` observation of the step that ends it. Rows have the order of the batch and,
    within one environment, of time.

    Args:
        rollout: steps of a language environment, with the time dimension last. Steps that a collector padded
            (``split_trajs=True``, ``trajs_per_batch=N``) are left out.
        unfinished: "drop" drops episodes that are unfinished at the last step, "truncate" returns them marked
            truncated.
        carry: entries that the policy wrote for each token of its utterances, ``[*B, time, K]``, to scatter to the
            tokens' positions, ``[N, T]``: KL penalties need ``["token_log_prob"]``, for instance.
        keep: entries ``[*B, time, ...]`` of the last ``next`` observation to copy beside the row, ``[N, ...]``.
        reward_key: the step reward under ``"next"`` that ``token_reward`` sums to, turn by turn. The default is the
            transformed reward (for instance by ``RewardScaling``); if it differs from the sum of the environment's
            token rewards of a turn, the difference is added to the turn's last token. None keeps the environment's own
            token rewards.

    Returns:
        A copy of the row entries, ``features`` and ``features_mask`` if the environment shows some,
        ``terminated``, ``truncated``, the carried and the kept entries. If a divergence penalty was subtracted from
        the step rewards, ``raw_reward`` ``[N, T]`` holds the rewards without it, and the rows cannot be penalized a
        second time.

    Raises:
        KeyError: the rollout is not from a language environment, or lacks the reward or an entry to carry.
        ValueError: an episode began before the rollout although an entry is carried or transforms changed the rewards;
            values of the rows are invalid, see :func:`~torchrl_lang.schema.check_values`; ``MultiStep`` changed the
            steps; or log-probabilities are carried of random actions (``init_random_frames``), which have none.

    Note:
        The first episodes to finish are short ones. :func:`~torchrl_lang.data.generate_dataset` avoids this bias by
        keeping the first episodes to begin.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.data import rows_from_rollout
        >>> done = torch.tensor([[[False], [True], [False]]])
        >>> row = torch.zeros(1, 3, 4)
        >>> step = TensorDict(tokens=torch.arange(12).view(1, 3, 4), attention_mask=row == 0, agent_mask=row > 0,
        ...                   token_reward=row, done=done, terminated=done, truncated=~done & done,
        ...                   reward=torch.zeros(1, 3, 1))
        >>> rollout = TensorDict({"attention_mask": row > 0, "next": step}, batch_size=[1, 3])
        >>> rows_from_rollout(rollout, unfinished="drop")["tokens"]
        tensor([[4, 5, 6, 7]])
        >>> rows_from_rollout(rollout, unfinished="truncate")["truncated"].flatten()
        tensor([False,  True])
    """
    one_of("unfinished", unfinished, ("drop", "truncate"))
    step = rollout.get("next")
    missing = [key for key in (*ROW_KEYS, TERMINATED, *keep) if step.get(key, None) is None]
    if missing:
        raise missing_entry(
            "rows_from_rollout",
            [("next", key) for key in missing],
            rollout,
            "Pass a rollout of a language environment that observes them.",
        )
    check_steps(rollout, carry)
    take = finished_steps(rollout)
    if unfinished == "truncate":
        is_step = rollout.get(COLLECTED, torch.ones_like(take))
        take = take | (is_step & ~shift_left(is_step) & ~rollout.get(("next", DONE)).squeeze(-1))
    return rows_at(rollout, take, keep=keep, carry=carry, reward_key=reward_key)


def episode_numbers(done: Tensor, playing: Tensor, begun: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number the episodes of a batch of environments in the order in which they begin.

    ``done`` is bool ``[time, N]``, ``playing`` the number of each environment's episode at the first step, int64
    ``[N]``, and ``begun`` the number of episodes begun so far. Returns the number of each step's episode, int64
    ``[time, N]``, then ``playing`` and ``begun`` for the next steps.
    """
    begins = torch.where(done, begun + done.flatten().cumsum(0).view_as(done) - 1, -1)
    number = torch.cat([playing[None], begins]).cummax(0).values
    return number[:-1], number[-1], begun + done.sum()
