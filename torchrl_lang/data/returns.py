"""Returns of the episodes in rows."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_lang.functional import decision_mask, shift_left, turn_end_mask
from torchrl_lang.functional.checks import within
from torchrl_lang.schema import ACTION_MASK, ATTENTION_MASK, TOKEN_REWARD, TOKENS, entry

__all__ = ["row_returns"]


def row_returns(
    rows: TensorDictBase,
    *,
    gamma: float = 1.0,
    reward_key: NestedKey = TOKEN_REWARD,
    end_of_action: int | None = None,
) -> Tensor:
    """The return of each episode, ``sum_j gamma**k_j * r_j``, where token ``j`` belongs to turn ``k_j``.

    Turns are counted from 0, so the first one is not discounted, and all tokens of a turn have the same discount. Sums
    are computed in float64, so that they do not depend on the padding.

    Args:
        rows: rows ``[*B]``. After :class:`~torchrl_lang.transforms.KLConstrainedTransform` their ``token_reward`` is
            the reward minus the divergence, and ``raw_reward`` the environment's reward.
        gamma: discount per turn.
        reward_key: the rewards of tokens, float ``[*B, T]``.
        end_of_action: id of the token that ends an utterance, if the environment may write nothing between two of them
            (see :func:`~torchrl_lang.functional.turn_end_mask`).

    Returns:
        float64 ``[*B]``.

    Raises:
        ValueError: the rewards are missing or have the wrong shape, or ``gamma`` is out of range.

    Examples:
        >>> from torchrl_lang.data import CharTokenizer, Episode, Turn, row_returns, to_rows
        >>> turns = [Turn("ab", reward=1.0), Turn("c"), Turn("a", reward=4.0)]
        >>> rows = to_rows([Episode(turns, True)], CharTokenizer.from_alphabet("abc"), 12)
        >>> row_returns(rows), row_returns(rows, gamma=0.5)
        (tensor([5.], dtype=torch.float64), tensor([3.], dtype=torch.float64))
    """
    within("gamma", gamma, 0, 1)
    action_mask, reward = entry(rows, ACTION_MASK), rows.get(reward_key, None)
    if reward is None or reward.shape != action_mask.shape:
        found = sorted(map(str, rows.keys(True, True))) if reward is None else tuple(reward.shape)
        raise ValueError(f"{reward_key!r} must have one reward per token, {tuple(action_mask.shape)}; got {found}.")
    earned = torch.where(decision_mask(action_mask), shift_left(reward.double()), 0.0)
    if gamma == 1:
        return earned.sum(-1)
    ends = turn_end_mask(entry(rows, ATTENTION_MASK), action_mask, entry(rows, TOKENS), end_of_action)
    turn = ends.cumsum(-1) - ends.long()
    return (gamma ** turn.double() * earned).sum(-1)
