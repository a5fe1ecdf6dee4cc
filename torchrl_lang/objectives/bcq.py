"""Discrete batch-constrained Q-learning (BCQ, arXiv 1910.01708) for rows of tokens."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_lang.functional.returns import td_target
from torchrl_lang.functional.value_terms import bcq_value
from torchrl_lang.objectives.base import Policy, over_rows
from torchrl_lang.objectives.policy import actor_loss
from torchrl_lang.objectives.values import NextStates, Passes, QValueLoss, QValues, next_values, possible


class BCQLoss(QValueLoss):
    r"""Discrete batch-constrained Q-learning over rows of tokens.

    Q-learning whose maximum is over tokens that the behaviour policy ``pi``, learned beside, would write (arXiv
    1910.01708, eq. 2 and algorithm 1; ``h`` is Huber's loss with ``kappa = 1``, and the online Q that chooses is the
    minimum of its heads)::

        a'_j        = argmax over a with pi(a | s_{j+1}) / max_b pi(b | s_{j+1}) >= threshold of Q(s_{j+1}, a)
        y_j         = r_j + gamma (1 - d_{j+1}) Qt(s_{j+1}, a'_j)
        loss_qvalue = qvalue_weight * mean_j sum_k h(y_j - Q_k(s_j, a_j))
        loss_actor  = actor_weight  * sum_t w_t CE(pi(. | x_<=t), x_{t+1}) / n

    Decode greedily under the same constraint, with ``ValueGuidance(loss.target_qvalue_network(), beta=1.0,
    include_logits=False)`` in ``UtteranceActor(..., min_p=threshold, method="greedy")``; without ``min_p`` for a
    threshold of 0. With ``actor_weight=0`` nothing trains ``pi``, which should then be the result of behaviour cloning;
    give ``detach_qvalue=True`` or a ``value_trunk`` as well, or Q's gradient changes the trunk that ``pi`` reads.

    Args:
        actor_network, qvalue_network: as of :class:`~torchrl_lang.objectives.CQLLoss`.

    Keyword Args:
        threshold: the paper's ``tau``, in [0, 1]: 0 is double Q-learning over all tokens that the policy can write, 1
            the evaluation of the behaviour policy's most likely token.
        **options: those of :class:`~torchrl_lang.objectives.ILQLLoss` of these names: ``value_trunk``,
            ``target_trunk``, ``gamma``, ``turn_gamma``, ``qvalue_weight``, ``actor_weight``, ``transition_weight``,
            ``value_min``, ``value_max``, ``detach_qvalue``, ``detach_actor``, ``end_of_action``,
            ``actor_normalizer``, ``logits_chunk`` and ``reduction``.

    The input is that of :class:`~torchrl_lang.objectives.ILQLLoss`. The output holds the losses, already weighted, and,
    detached, the means ``qvalue`` (of the tokens that were written) and ``td_target`` (``y``) over decisions.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import QValueHead, causal_lm, language_actor, qvalue_module
        >>> from torchrl_lang.objectives import BCQLoss
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = BCQLoss(actor, qvalue_module(QValueHead(16, 12)), threshold=0.3)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     agent_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0]]),
        ...     terminated=torch.tensor([[True]]),
        ...     batch_size=[1],
        ... )
        >>> sorted(loss(rows).keys())
        ['loss_actor', 'loss_qvalue', 'qvalue', 'td_target']
    """

    out_keys = ["loss_qvalue", "loss_actor", "qvalue", "td_target"]

    def __init__(
        self, actor_network: Policy, qvalue_network: nn.Module, *, threshold: float = 0.3, **options: Any
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        self._set_options(threshold=threshold)

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        rows = Passes(self, batch, reads_policy=self.actor_weight or self.qvalue_weight)
        q, losses, metrics = QValues(self, batch, rows.values), {}, {}
        if self.qvalue_weight:
            pi = rows.behavior()

            def chosen(s: NextStates) -> Tensor:  # Qt(s', a')
                target, online = self._target_table(rows.target, s), self._online_table(rows.still_values, s)
                return bcq_value(target, online, possible(self, pi.log_softmax(s.place), s), self.threshold)

            next_value = next_values(self, batch, chosen)
            y = td_target(batch.reward, next_value, batch.terminated, self._discount(batch, next_value))
            error = F.huber_loss(q.taken, y[:, None].expand_as(q.taken), reduction="none").sum(-1)
            losses["loss_qvalue"] = self._qvalue_loss(tensordict, batch, error, batch.place, batch.counts)
            metrics["td_target"] = y
            metrics["qvalue"] = q.taken.mean(-1)
        if self.actor_weight:
            losses["loss_actor"] = self.actor_weight * actor_loss(self, batch, rows.policy, detach=self.detach_actor)
        return self._output(batch, losses, metrics)
