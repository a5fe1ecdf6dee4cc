"""Psi-learning (KL control; Rawlik et al. 2012, Jaques et al., arXiv 1611.02796) for rows of tokens."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_lang.functional.filters import filtered
from torchrl_lang.functional.returns import td_target
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.objectives.base import Policy, over_rows
from torchrl_lang.objectives.policy import actor_loss, check_frozen, frozen_behavior
from torchrl_lang.objectives.values import NextStates, Passes, QValueLoss, QValues, next_values, possible


class PsiLoss(QValueLoss):
    r"""Psi-learning over rows of tokens: soft Q-learning whose reward includes the log-probability under a prior.

    It maximizes the return in units of ``reward_scale`` less the divergence from a prior ``pi0`` (KL control; Rawlik et
    al. 2012, "On Stochastic Optimal Control and Reinforcement Learning by Approximate Inference"; Jaques et al., arXiv
    1611.02796, sec. 3.3, and arXiv 1907.00456; ``h`` is Huber's loss with ``kappa = 1``)::

        y_j         = r_j / reward_scale + log pi0(a_j | s_j) + gamma (1 - d_{j+1}) log sum_a exp Qt(s_{j+1}, a)
        loss_qvalue = qvalue_weight * mean_j sum_k h(y_j - Q_k(s_j, a_j))
        loss_actor  = actor_weight  * sum_t w_t CE(pi(. | x_<=t), x_{t+1}) / n

    At the fixed point ``Q(s, a) = log pi0(a | s) + r / reward_scale + gamma V(s')`` and ``V = log sum_a exp Q``, so the
    learned policy is ``softmax(Q)`` itself: decode with ``ValueGuidance(loss.target_qvalue_network(), beta=1.0,
    include_logits=False)``. The prior is the actor, trained by behaviour cloning beside Q (no gradient flows from the
    targets into it), or a frozen one. Its probabilities are those of the language model, at temperature 1.

    A token that the data never take at a state should contribute nothing to its sum, but no target lowers its Q from
    where it started, and over a vocabulary these tokens come to dominate. With a ``threshold`` the sum is over tokens
    with ``pi0(a | s) / max_b pi0(b | s) >= threshold``, as the maximum of :class:`~torchrl_lang.objectives.BCQLoss`;
    decode with ``min_p=threshold`` then.

    Args:
        actor_network, qvalue_network: as of :class:`~torchrl_lang.objectives.CQLLoss`.

    Keyword Args:
        prior: :func:`~torchrl_lang.transforms.frozen_copy` of an actor, such as a finished behaviour cloning. Costs a
            pass of its trunk, without gradients. The actor's own head is then not read by the targets, and
            ``actor_weight=0`` leaves it untrained, unless it is tied to the embedding of a trunk that Q trains.
        embed_weights: keep the weights of the prior in the ``state_dict``, which loading restores. By default it
            has only a fingerprint of them, and loading beside another prior raises.
        reward_scale: how much reward is worth one nat of divergence, above zero.
        threshold: in [0, 1]; 0, as in the papers, sums over all tokens that the policy can write.
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
        >>> from torchrl_lang.objectives import PsiLoss
        >>> from torchrl_lang.transforms import frozen_copy
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = PsiLoss(actor, qvalue_module(QValueHead(16, 12)), prior=frozen_copy(actor), reward_scale=0.5)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     agent_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0]]),
        ...     terminated=torch.tensor([[True]]),
        ...     batch_size=[1],
        ... )
        >>> bool(loss(rows)["td_target"] < 0)
        True
    """

    out_keys = ["loss_qvalue", "loss_actor", "qvalue", "td_target"]

    def __init__(
        self,
        actor_network: Policy,
        qvalue_network: nn.Module,
        *,
        prior: FrozenActor | None = None,
        embed_weights: bool = False,
        reward_scale: float = 1.0,
        threshold: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        self._set_options(reward_scale=reward_scale, threshold=threshold)
        if prior is not None:
            check_frozen("PsiLoss", "prior", prior, actor_network)
        self.reference, self.embed_weights = prior, embed_weights

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch, prior = self._find(tensordict), self.reference
        rows = Passes(self, batch, reads_policy=self.actor_weight or (self.qvalue_weight and prior is None))
        q, losses, metrics = QValues(self, batch, rows.values), {}, {}
        if self.qvalue_weight:
            pi0 = rows.behavior() if prior is None else frozen_behavior(self, batch)

            def soft_value(s: NextStates) -> Tensor:  # log sum_a exp Qt(s', a)
                target = self._target_table(rows.target, s)
                if self.threshold:
                    target = filtered(target, possible(self, pi0.log_softmax(s.place), s), self.threshold)
                return target.logsumexp(-1)

            next_value = next_values(self, batch, soft_value)
            reward = batch.reward / self.reward_scale + pi0.log_prob(batch)
            y = td_target(reward, next_value, batch.terminated, self._discount(batch, next_value))
            error = F.huber_loss(q.taken, y[:, None].expand_as(q.taken), reduction="none").sum(-1)
            losses["loss_qvalue"] = self._qvalue_loss(tensordict, batch, error, batch.place, batch.counts)
            metrics["td_target"] = y
            metrics["qvalue"] = q.taken.mean(-1)
        if self.actor_weight:
            losses["loss_actor"] = self.actor_weight * actor_loss(self, batch, rows.policy, detach=self.detach_actor)
        return self._output(batch, losses, metrics)
