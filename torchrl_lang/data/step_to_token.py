"""Scatter what a policy wrote at each step, such as log-probabilities of its tokens, to the tokens of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_lang.functional import row_length
from torchrl_lang.schema import ACTION_MASK, ATTENTION_MASK, missing_entry

__all__ = ["row_of_step", "token_values"]


def token_values(
    rollout: TensorDictBase, take: Tensor, action_mask: Tensor, keys: Sequence[NestedKey]
) -> dict[NestedKey, Tensor]:
    """Values of the agent's tokens, at the tokens' positions in the rows.

    Args:
        rollout: steps ``[*B, time]``. Each entry is ``[*B, time, K]``, one value per token of the turn's utterance, or
            ``[*B, time]`` or ``[*B, time, 1]``, one value for all tokens of the turn.
        take: bool ``[*B, time]``, the steps whose ``next`` observations are the rows.
        action_mask: bool ``[N, T]`` of these rows.
        keys: the entries to carry.

    Returns:
        Each entry as ``[N, T]``, zero on tokens that the agent did not write.

    Raises:
        KeyError: an entry is missing.
        ValueError: an episode began before the rollout, which lacks its first turns.
    """
    row = row_of_step(take)
    before = row_length(rollout.get(ATTENTION_MASK))
    after = rollout.get(("next", ACTION_MASK))
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
        out[key] = value.new_zeros(action_mask.shape).index_put(index, value.expand_as(place)[written])
        known = torch.zeros_like(action_mask).index_put(index, torch.ones_like(index[0], dtype=torch.bool))
        lost = (action_mask & ~known).any(-1).sum()
        if lost:
            raise ValueError(
                f"{int(lost)} of {action_mask.shape[0]} episodes began before this batch, which lacks {key!r} of their "
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
