"""Training rows out of TorchRL rollouts: the last observation of an episode is its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang.data.step_rewards import reward_entries, step_rewards
from torchrl_lang.data.step_to_token import carried
from torchrl_lang.functional import row_length
from torchrl_lang.schema import (
    ACTION_MASK,
    ATTENTION_MASK,
    DONE,
    REWARD,
    ROW_KEYS,
    TERMINATED,
    TOKENS,
    TRUNCATED,
    check_row,
)

__all__ = ["episode_numbers", "finished_steps", "rows_at", "rows_from_rollout"]


def finished_steps(rollout: TensorDictBase) -> Tensor:
    """True at the step that ends an episode, bool ``[*B, time]``, once for each episode.

    Where nothing resets a row that has ended, TorchRL may step it again, which adds no token, or (in
    ``rollout(break_when_all_done=True)``) repeat its last step until all have ended; neither counts.
    """
    ended = rollout.get(("next", DONE)).squeeze(-1)
    before, after = (row_length(rollout.get(key)) for key in (ATTENTION_MASK, ("next", ATTENTION_MASK)))
    ended = ended & (after > before)
    tokens = rollout.get(("next", TOKENS))
    same = (tokens[..., 1:, :] == tokens[..., :-1, :]).all(-1) & (before[..., 1:] == before[..., :-1])
    repeats = ended[..., :-1] & same
    # Two equal episodes of one turn look like a repeated step, too. But had rows been reset, another row would tell.
    if ended[..., 0].all() or not repeats[ended[..., :-1]].all():
        return ended
    return torch.cat([ended[..., :1], ended[..., 1:] & ~repeats], -1)


def rows_at(rollout: TensorDictBase, take: Tensor, keep: Sequence[str] = ()) -> TensorDict:
    """The ``next`` observations at the steps ``take``, bool ``[*B, time]``, as rows ``[N]`` in memory of their own.

    They hold the entries of a row, ``terminated`` and ``truncated``, and those to ``keep``.
    """
    step = rollout.get("next")
    rows = {key: step.get(key)[take] for key in (*ROW_KEYS, TERMINATED, *keep)}
    # Where the environment knows no truncation, an episode that is not terminated was stopped by whoever rolled it out.
    truncated = step.get(TRUNCATED, None)
    rows[TRUNCATED] = ~rows[TERMINATED] if truncated is None else truncated[take] | ~step.get(DONE)[take]
    return TensorDict(rows, batch_size=[rows[TERMINATED].shape[0]], device=rollout.device)


def rows_from_rollout(
    rollout: TensorDictBase,
    *,
    unfinished: Literal["drop", "truncate"],
    carry: Sequence[NestedKey] = (),
    reward_key: NestedKey | None = REWARD,
) -> TensorDict:
    """Rows ``[N]`` of the episodes in a rollout or a collector's batch ``[*B, time]``.

    An episode's row is the ``next`` observation of the step that ends it. Rows come in the order of the batch and,
    within one environment, of time.

    Args:
        rollout: steps of a language environment, the time last.
        unfinished: what to do with an episode that still runs at the last step: "drop" leaves it out, "truncate" takes
            it as it stands, marked truncated.
        carry: entries that the policy wrote for each token of its utterances, ``[*B, time, K]``, to be taken along to
            the tokens' places, ``[N, T]``: ``["token_log_prob"]`` is what rewards kept near a reference need.
        reward_key: the steps' reward behind ``"next"`` that ``token_reward`` adds up to, turn by turn: by default the
            one that the policy was given, as transforms such as ``RewardScaling`` left it. Where it differs from what
            the environment paid for the turn's tokens, the difference goes to the turn's last token. None keeps the
            environment's own token rewards.

    Returns:
        The entries of a row, ``terminated`` and ``truncated``, and what is carried, in memory of their own. Where a
        penalty for the divergence from a reference was taken off the steps' reward, ``raw_reward`` ``[N, T]`` holds
        the rewards without it, and the rows cannot be penalised a second time.

    Raises:
        KeyError: the rollout is of no language environment, or has no such reward, or nothing to carry under that name.
        ValueError: something is carried, or transforms changed the rewards, and an episode began before the rollout,
            so that a part of it is missing; or values of the rows make no sense, see
            :func:`~torchrl_lang.schema.check_values`.

    Note:
        The first episodes to finish are the short ones. For a data set without that bias use
        :func:`~torchrl_lang.data.generate_dataset`, which keeps the first episodes to begin.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.data import rows_from_rollout
        >>> done = torch.tensor([[[False], [True], [False]]])
        >>> row = torch.zeros(1, 3, 4)
        >>> step = TensorDict(tokens=torch.arange(12).view(1, 3, 4), attention_mask=row == 0, action_mask=row > 0,
        ...                   token_reward=row, done=done, terminated=done, truncated=~done & done,
        ...                   reward=torch.zeros(1, 3, 1))
        >>> rollout = TensorDict({"attention_mask": row > 0, "next": step}, batch_size=[1, 3])
        >>> rows_from_rollout(rollout, unfinished="drop")["tokens"]
        tensor([[4, 5, 6, 7]])
        >>> rows_from_rollout(rollout, unfinished="truncate")["truncated"].flatten()
        tensor([False,  True])
    """
    if unfinished not in ("drop", "truncate"):
        raise ValueError(f"unfinished must be 'drop' or 'truncate', got {unfinished!r}.")
    step = rollout.get("next")
    missing = [key for key in (*ROW_KEYS, TERMINATED) if step.get(key, None) is None]
    if missing:
        raise KeyError(f"The rollout has no {missing} under 'next': it must come from a language environment.")
    rewards = reward_entries(step, reward_key)
    take = finished_steps(rollout)
    if unfinished == "truncate":
        running = ~rollout.get(("next", DONE)).squeeze(-1)
        running[..., :-1] = False
        take = take | running
    rows = rows_at(rollout, take)
    rows.update({name: step_rewards(rollout, take, rows, key) for name, key in rewards.items()})
    if carry:
        rows.update(carried(rollout, take, rows[ACTION_MASK], carry))
    check_row(rows)
    return rows


def episode_numbers(done: Tensor, playing: Tensor, begun: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number the episodes of a batch of environments in the order in which they begin.

    Args:
        done: bool ``[time, N]``, the step that ends an episode; the next one begins right after it.
        playing: int64 ``[N]``, the number of the episode that each environment is in at the first step.
        begun: int64 scalar, how many have begun so far.

    Returns:
        int64 ``[time, N]``, the number of the episode that each step belongs to; then ``playing`` and ``begun`` for the
        steps that follow.
    """
    begins = torch.where(done, begun + done.flatten().cumsum(0).view_as(done) - 1, -1)
    number = torch.cat([playing[None], begins]).cummax(0).values
    return number[:-1], number[-1], begun + done.sum()
