"""The base of the actor-critic losses: it estimates values, advantages and value targets of collected rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.objectives import ValueEstimators

from torchrl_lang.functional import shift_left, shift_right, two_clock_advantages
from torchrl_lang.functional.advantages import Advantages, Bootstrap, with_known_values
from torchrl_lang.functional.decisions import row_length
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.objectives.base import RowLoss, TransitionBatch
from torchrl_lang.objectives.checks import set_estimator
from torchrl_lang.objectives.state_values import StateValueLoss
from torchrl_lang.schema import missing_entry

__all__ = ["AdvantageRowLoss"]

_ESTIMATED = ("advantage", "value_target", "state_value")


class AdvantageRowLoss(StateValueLoss):
    """Base of the losses with advantages, estimated once a batch. Abstract: a loss fills in ``forward`` and sets the
    options, see :class:`~torchrl_lang.objectives.PPOLoss`.
    """

    @dataclass
    class _AcceptedKeys(StateValueLoss._AcceptedKeys):
        """The keys of :class:`StateValueLoss` and those of estimating."""

        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    default_value_estimator = ValueEstimators.GAE

    gamma: float
    lmbda: float
    turn_gamma: float
    turn_lmbda: float
    bootstrap: Bootstrap

    def make_value_estimator(self, value_type: ValueEstimators | None = None, **hyperparams: float) -> Self:
        """Set the two clocks of :meth:`estimate`, by TorchRL's names, and return the loss.

        Args:
            value_type: ``GAE`` (the default) or ``TDLambda``, the same advantages: the clocks as they are; ``TD0``:
                both lambdas 0, one-step errors; ``TD1``: both lambdas 1, rewards to go.
            **hyperparams: ``gamma`` and ``lmbda`` between the tokens of an utterance, ``turn_gamma`` and
                ``turn_lmbda`` between turns.

        Raises:
            ValueError: the estimator is another one, or a number lies outside [0, 1].
            TypeError: a hyperparameter is unknown.
        """
        known: dict[ValueEstimators, dict[str, float]] = {
            ValueEstimators.GAE: {},
            ValueEstimators.TDLambda: {},
            ValueEstimators.TD0: {"lmbda": 0.0, "turn_lmbda": 0.0},
            ValueEstimators.TD1: {"lmbda": 1.0, "turn_lmbda": 1.0},
        }
        set_estimator(self, value_type, known, hyperparams)
        return self

    @torch.no_grad()
    def estimate(self, rows: TensorDictBase, *, reuse_values: bool = False) -> TensorDictBase:
        """Write ``advantage``, ``value_target`` and ``state_value`` into ``rows``, each float ``[*B, T]``.

        They are written at the agent's tokens, zero elsewhere, after one pass of the values' trunk in evaluation mode
        without gradients.

        Args:
            rows: the entries of a row and ``terminated`` ``[*B, 1]``: a row that is not terminated is bootstrapped from
                its last position.
            reuse_values: the rows have ``state_value`` already, carried along from acting; only rows that are not
                terminated are read, for the value of their last position. NaN stands for a state that was not read,
                that of a certain last slot or of another player's token: it is worth what follows it
                , the reward and the discounted value of the next state.

        Returns:
            The same ``rows``; without any, three entries without any.

        Raises:
            KeyError: an entry is missing.
            ValueError: values of the rows make no sense, see :func:`~torchrl_lang.schema.check_values`.
        """
        tokens = rows.get(self.tensor_keys.tokens, None)
        if tokens is not None and not tokens.numel():
            nothing = torch.zeros(tokens.shape, device=tokens.device)
            return rows.update({getattr(self.tensor_keys, name): nothing.clone() for name in _ESTIMATED})
        reader = RowLoss()  # reads rewards and ends, which the loss itself does not
        names = (*RowLoss._row_entries, "features", "features_mask")
        reader.set_keys(**{name: getattr(self.tensor_keys, name) for name in names})
        batch = reader._find(rows)
        with eval_mode(self):
            if reuse_values:
                value, last_value = self._acted_values(rows, batch), self._last_values(batch)
            else:
                value = self._values(self._value_states(batch.rows), batch.state_place)
                value = batch.at_decisions(value, batch.state_place)
                last_value = value.gather(-1, _last(batch)[:, None]).squeeze(-1)
        value, found = self._advantages(value, torch.where(batch.row_terminated, 0.0, last_value), batch)
        for name, dense in zip(_ESTIMATED, (*found, torch.where(batch.decision, value, 0.0)), strict=True):
            rows.set(getattr(self.tensor_keys, name), shift_right(dense).reshape(batch.shape))
        return rows

    def _advantages(self, value: Tensor, last_value: Tensor, batch: TransitionBatch) -> tuple[Tensor, Advantages]:
        """The decisions' values, all of them known, ``[B, T]``, and their advantages."""
        ends = self._turn_ends(batch)
        reward, gammas = batch.next_reward.to(value.dtype), {"gamma": self.gamma, "turn_gamma": self.turn_gamma}
        value = with_known_values(value, reward, last_value, batch.decision, ends, **gammas)
        advantages = two_clock_advantages(
            reward,
            value,
            last_value,
            batch.decision,
            ends,
            lmbda=self.lmbda,
            turn_lmbda=self.turn_lmbda,
            bootstrap=self.bootstrap,
            **gammas,
        )
        return value, advantages

    def _acted_values(self, rows: TensorDictBase, batch: TransitionBatch) -> Tensor:
        """V at the decisions, as acting wrote it, ``[B, T]``."""
        key = self.tensor_keys.state_value
        acted = rows.get(key, None)
        if acted is None:
            advice = "Carry it from acting, rows_from_rollout(..., carry=[...]), or have the values computed."
            raise missing_entry("reuse_values=True", [key], rows, advice)
        return shift_left(acted.reshape(batch.decision.shape))

    def _last_values(self, batch: TransitionBatch) -> Tensor:
        """V of the last position of the rows that are not terminated, ``[B]``; zero for the others."""
        going_on = (~batch.row_terminated).nonzero().squeeze(-1)
        out = torch.zeros(batch.decision.shape[0], device=going_on.device)
        if not going_on.shape[0]:
            return out
        states = self._value_states(batch.rows[going_on])
        place = torch.arange(going_on.shape[0], device=going_on.device) * batch.decision.shape[1]
        last = self._values(states, place + _last(batch)[going_on])
        return out.to(last.dtype).index_copy(0, going_on, last)


def _last(batch: TransitionBatch) -> Tensor:
    """The last real position of each row, int64 ``[B]``."""
    return (row_length(batch.attention_mask) - 1).clamp_min(0)
