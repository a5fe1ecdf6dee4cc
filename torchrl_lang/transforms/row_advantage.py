"""Advantages of whole rows without a critic, written where rows enter a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from torchrl_lang._checks import Count, NonNegative, Unit, checked
from torchrl_lang.data import row_returns
from torchrl_lang.data.selection import restored_rows, saved_rows
from torchrl_lang.functional import (
    decision_mask,
    group_advantages,
    returns_to_go,
    shift_left,
    state_advantages,
    turn_end_mask,
)
from torchrl_lang.functional.advantages import clock, standardized, turn_states
from torchrl_lang.functional.decisions import shift_right
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, GROUP, RAW_REWARD, TOKEN_REWARD, TOKENS, TRAIN_MASK, entry


class RowAdvantage(Transform):
    """Writes ``advantage`` float ``[N, T]`` at the agent's tokens of rows, from the returns of the rows alone.

    It is for rows what TorchRL's ``MCAdvantage`` is for steps, with its names: write ``rows = advantage.inv(rows)``, or
    append it to a replay buffer that is extended with rows. :class:`~torchrl_lang.objectives.PPOLoss` reads the result
    without a critic, TorchRL's losses read ``rows["advantage"].unsqueeze(-1)``. With ``G_j`` the
    return from decision ``j`` on, ``R = G_0`` that of the row, and means and deviations over the rows of a group::

        "grpo"         A_j = (R - mean R) / std R                    (arXiv 2402.03300)
        "dr-grpo"      A_j = R - mean R                              (arXiv 2503.20783)
        "rloo"         A_j = R - mean of the others' R               (arXiv 2402.14740)
        "gigpo"        A_j = (R - mean R) / std R + weight * S_k     (arXiv 2505.10978), turn k of j, S_k of its state,
                                                                      see torchrl_lang.functional.state_advantages
        "batch"        A_j = (R - mean R) / std R                    over all rows at hand, no groups
        "reinforce++"  A_j = (G_j - mean G) / std G                  over trained decisions at hand (arXiv 2501.03262)

    Put a penalty on rewards before it (:class:`~torchrl_lang.transforms.KLConstrainedTransform`). Where the policy
    decides how long an episode is, a baseline for each number of the turn would be biased: there is none.

    Args:
        advantage: one of the names above.
        grpo_size: rows of incomplete groups wait in :attr:`waiting` until a call completes them, as collectors end
            episodes in any order; None takes the groups as they are. It is the environment's ``group_size``.
        prompt_key: the group of each row, int64 ``[N]`` or ``[N, 1]``.
        rewards_key: rewards of tokens, float ``[N, T]``.
        advantage_key: where the advantages go.
        gamma: discount from turn to turn; in ``"gigpo"`` that of ``S_k`` alone, as in the paper: ``R`` is the
            sum of the rewards.
        anchor: which turns begin in the same state, see ``turn_states``.
        weight: of the advantages of turns in ``"gigpo"``.
        drop_equal: leave out groups whose rows have equal returns, before penalties: their advantages are 0 (dynamic
            sampling, arXiv 2503.14476). :meth:`draw` plays until there are enough others.
        end_of_action: id of the token that ends an utterance, if the environment may write nothing between two of them
            (see :func:`~torchrl_lang.functional.turn_end_mask`).
        max_waiting: rows that may wait for their groups: more are a sign that these will never be complete.

    Where no group is complete, or none differs, :meth:`inv` returns None, and a replay buffer is not extended. The
    ``state_dict`` has the rows that wait.

    Raises:
        KeyError: on calls, an entry is missing.
        ValueError: on calls, a reward is not finite, or more than ``max_waiting`` rows wait.

    Examples:
        >>> from torchrl_lang.data import rows_from_rollout
        >>> from torchrl_lang.envs import WordleEnv
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer
        >>> from torchrl_lang.transforms import RowAdvantage
        >>> words = ["crane", "slate", "purge", "mouse"]
        >>> env = WordleEnv(words, batch_size=[8], group_size=4, seed=0)
        >>> steps = env.rollout(6, RandomWordPlayer(words, seed=0), break_when_any_done=False)
        >>> advantage = RowAdvantage("rloo", grpo_size=4)
        >>> rows = advantage.inv(rows_from_rollout(steps, unfinished="drop"))
        >>> one = rows["group"] == rows["group"][0]
        >>> rows["token_reward"][one].sum(-1), rows["advantage"][one, 1]
        (tensor([-1.,  0., -2., -3.]), tensor([ 0.6667,  2.0000, -0.6667, -2.0000]))
    """

    waiting: TensorDictBase | None = None
    """Rows of incomplete groups; set it to None to drop them."""

    @checked
    def __init__(
        self,
        advantage: Literal["grpo", "dr-grpo", "rloo", "gigpo", "batch", "reinforce++"] = "grpo",
        grpo_size: Count | None = None,
        prompt_key: NestedKey = GROUP,
        rewards_key: NestedKey = TOKEN_REWARD,
        advantage_key: NestedKey = "advantage",
        *,
        gamma: Unit = 1.0,
        anchor: Literal["prefix", "observation"] = "prefix",
        weight: NonNegative = 1.0,
        drop_equal: bool = False,
        end_of_action: int | None = None,
        max_waiting: Count = 2**16,
    ) -> None:
        super().__init__(in_keys=[prompt_key, rewards_key], out_keys=[advantage_key])
        self.advantage, self.grpo_size, self.drop_equal = advantage, grpo_size, drop_equal
        self.prompt_key, self.rewards_key, self.advantage_key = prompt_key, rewards_key, advantage_key
        self.gamma, self.anchor, self.weight, self.end_of_action = gamma, anchor, weight, end_of_action
        self.max_waiting = max_waiting

    def get_extra_state(self) -> dict[str, Any]:
        """The rows that wait, as tensors by key; a part of the ``state_dict``."""
        return {"waiting": saved_rows(self.waiting)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Let the rows of a state wait."""
        self.waiting = restored_rows(state["waiting"])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leave rows that are sampled as they are: a batch may hold parts of groups."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        rows = self._estimate(self._choose(tensordict))
        return rows if len(rows) else None  # a replay buffer is not extended then

    @checked
    def draw(self, play: Callable[[], TensorDictBase], groups: Count, *, limit: Count = 10) -> TensorDictBase:
        """Play until there are as many groups: those of equal returns, with ``drop_equal``, are drawn again.

        Args:
            play: plays episodes and returns their rows ``[N]``.
            groups: how many groups to find.
            limit: of calls of ``play``; after them there may be fewer groups, or no rows at all.

        Returns:
            All rows found, with their advantages.
        """
        found: list[TensorDictBase] = []
        while len(found) < limit and sum(self._group(rows).unique().numel() for rows in found) < groups:
            found.append(self._choose(play().copy()))
        return self._estimate(torch.cat(found))

    def _choose(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows of complete groups, of those that differ."""
        rewards = entry(rows, self.rewards_key)
        if not rewards.isfinite().all():
            raise ValueError(f"{self.rewards_key} is not finite in some rows: find out where it is computed.")
        if self.grpo_size is not None:
            rows = rows if self.waiting is None else torch.cat([self.waiting.to(rewards.device), rows])
            _, which, number = self._group(rows).unique(return_inverse=True, return_counts=True)
            complete = (number >= self.grpo_size)[which]
            self.waiting, rows = rows[~complete], rows[complete]
            if len(self.waiting) > self.max_waiting:
                causes = "grpo_size is not the environment's group_size, or some of its episodes never come here"
                raise ValueError(f"{len(self.waiting)} rows wait for groups of {self.grpo_size}: {causes}.")
        return rows[self._differs(rows)] if self.drop_equal else rows

    def _estimate(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows with their advantages."""
        agent, reward = entry(rows, AGENT_MASK), shift_left(entry(rows, self.rewards_key))
        decision = decision_mask(agent)
        ends = turn_end_mask(entry(rows, ATTENTION_MASK), agent, entry(rows, TOKENS), self.end_of_action)
        to_go = returns_to_go(reward.double(), decision, clock(ends, self.gamma, 1.0, reward))
        if self.advantage == "reinforce++":
            trains = shift_left(rows.get(TRAIN_MASK, agent))
            found = torch.where(decision, standardized(to_go, decision & trains), 0.0)
        else:  # R of gigpo is the plain sum, whatever discounts its turns
            returns = row_returns(rows, reward_key=self.rewards_key) if self.advantage == "gigpo" else to_go[:, 0]
            found = torch.where(decision, self._of_rows(rows, returns)[:, None], 0.0)
        if self.advantage == "gigpo":
            state = turn_states(entry(rows, TOKENS), agent, ends, anchor=self.anchor)
            found = found + self.weight * state_advantages(to_go, self._group(rows), state, decision, ends)
        return rows.set(self.advantage_key, shift_right(found).to(reward.dtype))

    def _of_rows(self, rows: TensorDictBase, returns: Tensor) -> Tensor:
        """The advantage of each row as a whole, ``[N]``."""
        if self.advantage == "batch":
            return standardized(returns)
        baseline: Any = "others" if self.advantage == "rloo" else "all"
        scale = self.advantage not in ("dr-grpo", "rloo")
        return group_advantages(returns, self._group(rows), scale=scale, baseline=baseline)

    def _differs(self, rows: TensorDictBase) -> Tensor:
        """Whether the returns of a row's group differ, bool ``[N]``."""
        key = RAW_REWARD if RAW_REWARD in rows.keys() else self.rewards_key
        returns = row_returns(rows, reward_key=key, end_of_action=self.end_of_action)
        which = self._group(rows).unique(return_inverse=True)[1]
        highest, lowest = (
            torch.zeros_like(returns).scatter_reduce(0, which, returns, kind, include_self=False)
            for kind in ("amax", "amin")
        )
        return (highest - lowest > 1e-6)[which]  # group_advantages takes such a deviation for none

    def _group(self, rows: TensorDictBase) -> Tensor:
        return entry(rows, self.prompt_key).reshape(-1)
