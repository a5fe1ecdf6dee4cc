"""Implicit language Q-learning with one value for each utterance (arXiv 2206.11871), one pass of the trunk a batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lang.functional import expectile_loss
from torchrl_lang.functional.decisions import UtteranceSpans, find_utterances
from torchrl_lang.functional.returns import td_target
from torchrl_lang.modules.head_values import STATE_VALUE, UTTERANCE_VALUE
from torchrl_lang.objectives.base import ActorNormalizer, LogitsChunk, Policy, RowLoss, TransitionBatch, over_rows
from torchrl_lang.objectives.networks import as_head, gather_inputs, least_target, values_at
from torchrl_lang.objectives.policy import actor_loss, policy_weight, weighs_advantages
from torchrl_lang.objectives.values import Passes, QValueLoss


class UtterancePlaces(NamedTuple):
    """The ``U`` finished utterances of a batch and its ``S`` states, where losses of utterances read their values."""

    spans: UtteranceSpans
    place: Tensor
    """int64 ``[U]``: the place of each last decision in a batch flattened to ``[B * T]``, where Q is read."""
    state_place: Tensor
    """int64 ``[S]``: places of the states, where V is read."""
    terminated: Tensor
    """bool ``[U]``: the task ended after the utterance."""

    @classmethod
    def of(cls, loss: RowLoss, batch: TransitionBatch) -> UtterancePlaces:
        """The utterances of a batch, which end as a loss has it."""
        ended, width = batch.row_terminated, batch.tokens.shape[-1]
        spans = find_utterances(batch.attention_mask, batch.agent_mask, loss._turn_ends(batch), ended)
        row = spans.row[spans.state]
        return cls(spans, row * width + spans.end, spans.row * width + spans.position, spans.last & ended[row])


class UtteranceILQLLoss(QValueLoss):
    r"""Implicit Q-learning over utterances: the per-utterance variant that ILQL is compared with.

    An utterance ``u_i`` of a row has the state ``s_i``, the position before its first token, and the sum ``R_i`` of its
    tokens' rewards; ``s_{i+1}`` is the state of the next utterance (arXiv 2206.11871, sec. 6; ``d`` is 1 where the task
    ended, ``sg`` stops gradients, ``Qt`` is the minimum of the target heads)::

        loss_value  = value_weight  * mean_i |tau - 1(w_i < 0)| w_i^2,   w_i = sg(Qt(s_i, u_i)) - V(s_i)
        loss_qvalue = qvalue_weight * mean_i sum_k (R_i + gamma (1 - d_{i+1}) sg(V(s_{i+1})) - Q_k(s_i, u_i))^2
        loss_actor  = actor_weight  * sum_t w_t CE(pi(. | x_<=t), x_{t+1}) / n

    ``V`` reads the hidden state at ``s_i``. ``Q`` reads that of the utterance's last decision, in which its end is
    written: it has read all of ``u_i`` but the end itself, so that a decoder can rank utterances without another step
    (:class:`~torchrl_lang.modules.UtteranceValueGuidance`). In the policy's loss each token has the
    :func:`~torchrl_lang.functional.advantage_weight` of its utterance, and the environment's ``transition_weight``.

    Utterances end as in :class:`~torchrl_lang.objectives.ILQLLoss`, and in a terminated row with the row. One that the
    row cuts off has no value: the policy learns its tokens with the weight of advantage zero, and its state bootstraps
    the utterance before. Otherwise a row that is not terminated bootstraps from its last position.

    The trunk runs once a batch, and where it applies dropout once more without for the target heads; the heads run at
    utterances only. Target parameters ``target_qvalue_network_params`` are for
    :class:`~torchrl.objectives.SoftUpdate` or :class:`~torchrl.objectives.HardUpdate`.

    An utterance counts in the losses of Q and V where its last decision counts, by ``loss_mask_key`` or the train mask
    of its last token, with the rewards of all its tokens; in the policy's loss each token counts for itself. So a train
    mask that is True on the end of an utterance only trains its values, but the policy on nothing but that end.

    Args:
        actor_network: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor` over one, without guidance,
            whose language model is trained.
        qvalue_network: any module ``hidden [U, H] -> utterance_value [U, n_q]``, all heads in one; ``[U]`` is one head.
        value_network: likewise ``hidden [U, H] -> state_value [U, 1]`` or ``[U]``.

    Keyword Args:
        gamma: discount, one an utterance.
        expectile: ``tau`` in (0, 1).
        value_weight, qvalue_weight, actor_weight: weights of the terms. One of weight zero is not computed.
        advantage_temperature: ``beta`` of the policy's weights; 0 with ``"exp"`` is behaviour cloning.
        advantage_weighting: ``"exp"``, ``exp(beta * A)``, or ``"sign"``, ``beta`` where ``A > 0`` and ``1 - beta``
            elsewhere, with ``0 < beta <= 1``.
        weight_clip: upper bound of the policy's weights, ``transition_weight`` included.
        transition_weight: weight in the policy's loss of tokens that the environment wrote.
        end_of_action: id of the token that ends an utterance; default that of an UtteranceActor. Without it an
            utterance ends where the environment writes.
        actor_normalizer: ``"all"`` divides the policy's loss by the real tokens, ``"action"`` by the agent's.
        logits_chunk: positions whose logits exist at a time, as in :class:`~torchrl_lang.objectives.ILQLLoss`.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for values at positions, ``[*B, T]``: those of an utterance
            stand at its last decision.

    The input is that of :class:`~torchrl_lang.objectives.ILQLLoss`. The output holds the three losses and, detached,
    the means ``value``, ``qvalue``, ``target_qvalue`` and ``advantage`` over utterances.

    Raises:
        KeyError: an entry is missing; the message names it and :meth:`set_keys`.
        ValueError: an option is out of range, shapes differ, or steps of a rollout came instead of rows.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import UtteranceQValueHead, ValueHead, causal_lm, language_actor
        >>> from torchrl_lang.modules import qvalue_module, value_module
        >>> from torchrl_lang.objectives import UtteranceILQLLoss
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = UtteranceILQLLoss(actor, qvalue_module(UtteranceQValueHead(16)), value_module(ValueHead(16)))
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
    """

    out_keys = ["loss_value", "loss_qvalue", "loss_actor", "value", "qvalue", "target_qvalue", "advantage"]
    _kinds = {"qvalue_network": UTTERANCE_VALUE, "value_network": STATE_VALUE}

    def __init__(
        self,
        actor_network: Policy,
        qvalue_network: nn.Module,
        value_network: nn.Module,
        *,
        gamma: float = 0.99,
        expectile: float = 0.7,
        value_weight: float = 1.0,
        qvalue_weight: float = 1.0,
        actor_weight: float = 1.0,
        advantage_temperature: float = 0.0,
        advantage_weighting: Literal["exp", "sign"] = "exp",
        weight_clip: float | None = None,
        transition_weight: float = 0.0,
        end_of_action: int | None = None,
        actor_normalizer: ActorNormalizer = "all",
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__(
            actor_network,
            qvalue_network,
            gamma=gamma,
            qvalue_weight=qvalue_weight,
            actor_weight=actor_weight,
            transition_weight=transition_weight,
            end_of_action=end_of_action,
            actor_normalizer=actor_normalizer,
            logits_chunk=logits_chunk,
            reduction=reduction,
        )
        self.convert_to_functional(as_head(self, "value_network", value_network), "value_network")
        self._set_options(expectile=expectile, value_weight=value_weight, weight_clip=weight_clip)
        self._set_options(advantage_temperature=advantage_temperature, advantage_weighting=advantage_weighting)

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        rows, found = Passes(self, batch, reads_policy=True), UtterancePlaces.of(self, batch)
        spans, place, counted = found.spans, found.place, batch.counts_at(found.place)
        v = values_at(self, "value_network", rows.values, found.state_place).squeeze(-1)
        value, next_value = v[spans.state], v[spans.state + 1].detach()  # V(s_i), V(s_{i+1})
        losses, metrics = {}, {"value": value}
        if self.qvalue_weight:
            q = values_at(self, "qvalue_network", rows.values, place)
            y = td_target(spans.total(batch.reward), next_value, found.terminated, self.gamma)
            error = (y[:, None] - q).square().sum(-1)
            losses["loss_qvalue"] = self._qvalue_loss(tensordict, batch, error, place, counted)
            metrics["qvalue"] = q.mean(-1)
        advantage = torch.zeros_like(value)
        if self.value_weight or weighs_advantages(self):
            target = least_target(self, gather_inputs(self.qvalue_network.in_keys, rows.target, place))
            advantage = target - value
            metrics |= {"target_qvalue": target, "advantage": advantage}
        if self.value_weight:
            error = expectile_loss(advantage, self.expectile)
            losses["loss_value"] = self.value_weight * self._reduce(error, batch, place, counted)
        if self.actor_weight:
            # Tokens of an utterance that the row cuts off have the weight of advantage zero.
            each = torch.cat([advantage.detach(), advantage.new_zeros(1)])[spans.of_decision]
            losses["loss_actor"] = self.actor_weight * actor_loss(self, batch, rows.policy, policy_weight(self, each))
        return self._output(batch, losses, metrics, counted)
