"""Conservative Q-learning (CQL, arXiv 2006.04779) for rows of tokens."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import nn

from torchrl_lang._checks import torchrl_names
from torchrl_lang.functional import cql_term
from torchrl_lang.functional.returns import td_target
from torchrl_lang.objectives.base import Policy, over_rows
from torchrl_lang.objectives.policy import actor_loss
from torchrl_lang.objectives.values import Passes, QValueLoss, QValues, next_values


class CQLLoss(QValueLoss):
    r"""Conservative Q-learning over rows of tokens, the baseline of the ILQL paper.

    Q-learning with a term that lowers the values of tokens that the data do not take (arXiv 2006.04779, eq. 4; ``d`` is
    1 where the task ended, ``Qt`` the minimum of the target heads, clipped to ``[value_min, value_max]``)::

        y_j         = r_j + gamma (1 - d_{j+1}) max_a Qt(s_{j+1}, a)
        loss_qvalue = qvalue_weight * mean_j sum_k (y_j - Q_k(s_j, a_j))^2
        loss_cql    = cql_weight    * mean_j sum_k CE(Q_k(s_j, .) / T, a_j)
        loss_actor  = actor_weight  * sum_t w_t CE(pi(. | x_<=t), x_{t+1}) / n

    Unlike :class:`~torchrl_lang.objectives.ILQLLoss`, whose V stays within the values of tokens in the data, the
    maximum is over all tokens that the policy can write, and only the CQL term keeps it from trusting those that the
    data never take. The policy is decoded as that of ILQL, ``ValueGuidance(loss.target_qvalue_network(), beta=...)``.

    Args:
        actor_network, qvalue_network: as of :class:`~torchrl_lang.objectives.ILQLLoss`. With an
            :class:`~torchrl_lang.modules.UtteranceActor` its forbidden tokens, by default all control tokens but the
            end of the action, are left out of the maximum, ids from its ``vocab_size`` on too, and in the last slot of
            an utterance all tokens but its end: no data correct their values.

    Keyword Args:
        cql_weight: the paper's ``alpha``, by default 0.1.
        cql_temperature: ``T``; also as ``temperature``, its name in :class:`torchrl.objectives.CQLLoss`.
        min_q_weight: the weight as TorchRL has it, ``cql_weight / T``: its term is ``T`` times the one above.
        **options: those of :class:`~torchrl_lang.objectives.ILQLLoss` of these names: ``value_trunk``,
            ``target_trunk``, ``gamma``, ``turn_gamma``, ``qvalue_weight``, ``actor_weight``, ``transition_weight``,
            ``value_min``, ``value_max``, ``detach_qvalue``, ``detach_actor``, ``end_of_action``,
            ``actor_normalizer``, ``logits_chunk`` and ``reduction``.

    The input is that of :class:`~torchrl_lang.objectives.ILQLLoss`. The output holds the losses, already weighted, and,
    detached, the means ``qvalue`` (of the tokens that were written) and ``td_target`` (``y``) over decisions.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.objectives import SoftUpdate
        >>> from torchrl_lang.modules import QValueHead, causal_lm, language_actor, qvalue_module
        >>> from torchrl_lang.objectives import CQLLoss
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = CQLLoss(actor, qvalue_module(QValueHead(16, 12)), gamma=0.9)
        >>> target = SoftUpdate(loss, tau=0.005)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     agent_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0]]),
        ...     terminated=torch.tensor([[True]]),
        ...     batch_size=[1],
        ... )
        >>> out = loss(rows)
        >>> sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        >>> target.step()
    """

    out_keys = ["loss_qvalue", "loss_cql", "loss_actor", "qvalue", "td_target"]

    @torchrl_names(temperature="cql_temperature")
    def __init__(
        self,
        actor_network: Policy,
        qvalue_network: nn.Module,
        *,
        cql_weight: float | None = None,
        cql_temperature: float = 1.0,
        min_q_weight: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        if cql_weight is not None and min_q_weight is not None:
            raise TypeError(f"{cql_weight=} and {min_q_weight=} are one weight: give one of them.")
        if cql_weight is None:
            cql_weight = 0.1 if min_q_weight is None else min_q_weight * cql_temperature
        self._set_options(cql_weight=cql_weight, cql_temperature=cql_temperature)

    @property
    def temperature(self) -> float:
        """TorchRL's name of ``cql_temperature``; setting it leaves ``min_q_weight``, not ``cql_weight``, as it was."""
        return self.cql_temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.cql_weight, self.cql_temperature = self.min_q_weight * value, value

    @property
    def min_q_weight(self) -> float:
        """The weight as TorchRL has it, ``cql_weight / T``."""
        return self.cql_weight / self.cql_temperature

    @min_q_weight.setter
    def min_q_weight(self, value: float) -> None:
        self.cql_weight = value * self.cql_temperature

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        rows = Passes(self, batch, reads_policy=self.actor_weight)
        q, losses, metrics = QValues(self, batch, rows.values), {}, {}
        if self.cql_weight:  # first: it computes Q of the taken tokens on the way
            losses["loss_cql"] = self.cql_weight * q.term(cql_term, temperature=self.cql_temperature)
        if self.qvalue_weight:
            best = next_values(self, batch, lambda s: self._target_table(rows.target, s).amax(-1))  # max_a Qt(s', a)
            y = td_target(batch.reward, best, batch.terminated, self._discount(batch, best))
            error = (y[:, None] - q.taken).square().sum(-1)
            losses["loss_qvalue"] = self._qvalue_loss(tensordict, batch, error, batch.place, batch.counts)
            metrics["td_target"] = y
        if losses:
            metrics["qvalue"] = q.taken.mean(-1)
        if self.actor_weight:
            losses["loss_actor"] = self.actor_weight * actor_loss(self, batch, rows.policy, detach=self.detach_actor)
        return self._output(batch, losses, metrics)
