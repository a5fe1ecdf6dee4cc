"""Implicit language Q-learning with one value for each utterance (arXiv 2206.11871), one pass of the trunk a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn

from torchrl_lang._checks import finite, one_of, within
from torchrl_lang.functional import expectile_loss, find_utterances, masked_mean, td_target
from torchrl_lang.functional.decisions import UtteranceSpans
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.head_values import STATE_VALUE, UTTERANCE_VALUE
from torchrl_lang.objectives.advantage_weights import AdvantageWeights
from torchrl_lang.objectives.base import ActorNormalizer, LogitsChunk, gather_inputs
from torchrl_lang.objectives.checks import check_actor, check_token
from torchrl_lang.objectives.no_rows import for_any_number
from torchrl_lang.objectives.policy_loss import actor_loss
from torchrl_lang.objectives.targets import without_dropout
from torchrl_lang.objectives.utterance_base import UtteranceValueLoss

__all__ = ["UtteranceILQLLoss"]

_LOSSES = ("loss_value", "loss_qvalue", "loss_actor")
_WEIGHTS = ("value_weight", "qvalue_weight", "actor_weight")
_METRICS = ("value", "qvalue", "target_qvalue", "advantage")


class UtteranceILQLLoss(UtteranceValueLoss, AdvantageWeights):
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
        advantage_weighting: ``"exp"`` or ``"sign"``.
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

    @dataclass
    class _AcceptedKeys(UtteranceValueLoss._AcceptedKeys):
        """The keys of :class:`UtteranceValueLoss` and that of V."""

        state_value: NestedKey = STATE_VALUE

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = [*_LOSSES, *_METRICS]

    value_network: TensorDictModule
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams

    def __init__(
        self,
        actor_network: UtteranceActor | ProbabilisticTensorDictSequential,
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
        super().__init__(reduction, logits_chunk)
        check_actor("UtteranceILQLLoss", actor_network)
        check_token("end_of_action", end_of_action, actor_network)
        self.actor_network = actor_network
        self._set_qvalue(qvalue_network, UTTERANCE_VALUE)
        self.convert_to_functional(self._checked_head("value_network", value_network, STATE_VALUE), "value_network")
        one_of("actor_normalizer", actor_normalizer, ("all", "action"))
        within("gamma", gamma, 0, 1)
        within("expectile", expectile, 0, 1, inclusive=False)
        self.gamma, self.expectile, self.end_of_action = gamma, expectile, end_of_action
        self.value_weight, self.qvalue_weight, self.actor_weight = value_weight, qvalue_weight, actor_weight
        self._set_advantage_weights(advantage_temperature, advantage_weighting, weight_clip, transition_weight)
        self.actor_normalizer = actor_normalizer
        for name in _WEIGHTS:
            finite(name, getattr(self, name))

    @dispatch(source="_all_in_keys")
    @for_any_number
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        trunk = split_actor(self.language_actor).trunk
        rows = trunk(batch.rows.copy())
        width = batch.tokens.shape[-1]
        ends, terminated = self._turn_ends(batch), batch.row_terminated
        spans = find_utterances(batch.attention_mask, batch.agent_mask, ends, terminated)
        row = spans.row[spans.state]
        place = row * width + spans.end
        counted = self._counted(batch, place)
        every_value = self._state_values(rows, spans.row * width + spans.position)
        value, next_value = every_value[spans.state], every_value[spans.state + 1].detach()
        finished = gather_inputs(self.qvalue_network.in_keys, rows, place)
        found = {"value": value}
        losses = {}
        if self.qvalue_weight:
            qvalue = self._qvalues(finished)
            goal = td_target(spans.total(batch.reward), next_value, spans.last & terminated[row], self.gamma)
            term = (goal[:, None] - qvalue).square().sum(-1)
            losses["loss_qvalue"] = self.qvalue_weight * self._reduce(term, batch, place, counted)
            found["qvalue"] = qvalue.mean(-1)
        if self.value_weight or self._weighs_advantages:
            still = without_dropout(trunk, batch.rows, rows)
            found["target_qvalue"] = self._target_qvalues(gather_inputs(self.qvalue_network.in_keys, still, place))
            found["advantage"] = found["target_qvalue"] - value
        if self.value_weight:
            term = expectile_loss(found["advantage"], self.expectile)
            losses["loss_value"] = self.value_weight * self._reduce(term, batch, place, counted)
        if self.actor_weight:
            losses["loss_actor"] = self.actor_weight * actor_loss(
                self,
                batch,
                rows,
                self._actor_weights(found.get("advantage", torch.zeros_like(value)).detach(), spans),
                transition_weight=self._transition_weight,
            )
        zero = value.new_zeros(batch.shape if self.reduction == "none" else ())
        means = {name: masked_mean(entry.detach(), counted) for name, entry in found.items()}
        metrics = dict.fromkeys(_METRICS, value.new_full((), torch.nan)) | means
        return TensorDict({**{name: losses.get(name, zero) for name in _LOSSES}, **metrics})

    def _state_values(self, rows: TensorDictBase, place: Tensor) -> Tensor:
        """V at places of the flattened batch, ``[S]``."""
        inputs = gather_inputs(self.value_network.in_keys, rows, place)
        with self.value_network_params.to_module(self.value_network):
            return self._read_head("value_network", inputs).squeeze(-1)

    def _actor_weights(self, advantage: Tensor, spans: UtteranceSpans) -> Tensor:
        """The weight of each decision, ``[N]``, from the advantages of the utterances, ``[U]``."""
        advantage = torch.cat([advantage, advantage.new_zeros(1)])[spans.of_decision]
        return self._advantage_weight(advantage)
