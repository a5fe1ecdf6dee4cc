"""Implicit language Q-learning (ILQL, arXiv 2206.11871) for rows of tokens, one pass of the trunk a batch."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn
from torchrl.objectives import ValueEstimators

from torchrl_lang._checks import finite, one_of, positive, within
from torchrl_lang.functional import cql_term, expectile_loss, margin_term, masked_mean
from torchrl_lang.functional.advantages import clock
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.objectives.advantage_weights import AdvantageWeights
from torchrl_lang.objectives.base import ActorNormalizer, LogitsChunk, TransitionBatch
from torchrl_lang.objectives.checks import check_discounts, check_token, set_estimator
from torchrl_lang.objectives.no_rows import for_any_number
from torchrl_lang.objectives.policy_loss import actor_loss
from torchrl_lang.objectives.qvalues import QValues
from torchrl_lang.objectives.value_base import ValueRowLoss
from torchrl_lang.objectives.value_targets import Clocks, Target, qvalue_target, value_target

__all__ = ["ILQLLoss"]

_LOSSES = ("loss_value", "loss_qvalue", "loss_cql", "loss_margin", "loss_actor")
_WEIGHTS = ("value_weight", "qvalue_weight", "cql_weight", "margin_weight", "actor_weight")
_METRICS = ("value", "qvalue", "target_qvalue", "advantage")


class ILQLLoss(ValueRowLoss, AdvantageWeights):
    r"""Implicit language Q-learning over rows of tokens.

    At each decision ``j`` with state ``s_j``, token ``a_j``, reward ``r_j`` and successor ``s_{j+1}`` (arXiv
    2206.11871, sec. 4; ``d`` is 1 where the task ended, ``sg`` stops gradients, ``Qt`` is the minimum of the target
    heads, clipped to ``[value_min, value_max]``)::

        loss_value  = value_weight  * mean_j |tau - 1(u_j < 0)| u_j^2,   u_j = sg(Qt(s_j, a_j)) - V(s_j)
        loss_qvalue = qvalue_weight * mean_j sum_k (r_j + gamma (1 - d_{j+1}) sg(V(s_{j+1})) - Q_k(s_j, a_j))^2
        loss_cql    = cql_weight    * mean_j sum_k CE(Q_k(s_j, .) / T, a_j)
        loss_margin = margin_weight * mean_j sum_k sum_a max(0, Q_k(s_j, a) - Q_k(s_j, a_j) + margin)^2
        loss_actor  = actor_weight  * sum_t w_t CE(pi(. | x_<=t), x_{t+1}) / n

    ``mean_j`` is over all decisions of the batch, and ``n`` counts its real tokens but the first of each row, as in the
    paper's code (``actor_normalizer``). ``w`` is :func:`~torchrl_lang.functional.advantage_weight` at decisions, by
    default 1 (behaviour cloning), and ``transition_weight`` elsewhere. Every output whose name begins with ``loss_`` is
    already weighted: a training step minimises their sum. A term of weight zero is not computed and comes out as zero.

    The trunk is an ordinary stateful module and runs once a batch, and where it applies dropout once more without for
    the target heads; ``V(s_{j+1})`` is that of the first pass, as in the paper's code. Heads run only at decisions, the
    target heads only at the taken action. Only the heads are functional: ``qvalue_network_params`` with
    ``target_qvalue_network_params`` for :class:`~torchrl.objectives.SoftUpdate` or
    :class:`~torchrl.objectives.HardUpdate`.

    ``loss_mask_key`` (see :class:`~torchrl.objectives.LossModule`) may name a mask of rows ``[*B]`` or of positions
    ``[*B, T]``; a decision is taken by the position of its state, one before its token.

    Args:
        actor_network: a language-model actor: a trunk (``tokens``, ``attention_mask`` -> ``hidden`` ``[B, T, H]``), a
            head (``hidden`` -> ``logits``), and a distribution over ``logits``; or an
            :class:`~torchrl_lang.modules.UtteranceActor` over one, without guidance, whose language model is trained.
        qvalue_network: any module ``hidden [N, H] -> action_value [N, n_q, V]``, all heads in one module; ``[N, V]``
            is one head. As a module of tensordicts it may write another entry: ``set_keys(action_value=...)`` chooses
            one of several. It is tried out when the loss is built. Three methods save time and memory where it has
            them, as :class:`~torchrl_lang.modules.QValueHead` does: ``taken(hidden, action) -> [N, n_q]``; and, beside
            ``vocab_size``, ``cql_term`` and ``margin_term`` with the signature of :meth:`QValueHead.cql_term
            <torchrl_lang.modules.QValueHead.cql_term>`, which never build the whole table. Over a large vocabulary a
            :class:`~torchrl_lang.modules.TiedQValueHead` is by far the cheapest.
        value_network: likewise ``hidden [N, H] -> state_value [N, 1]`` or ``[N]``, ``set_keys(state_value=...)``.

    Keyword Args:
        value_trunk: a trunk of its own for Q and V (``tokens``, ``attention_mask`` -> ``hidden``); by default they read
            the actor's.
        target_trunk: the target heads read a frozen, slowly following copy of the trunk, found by ``SoftUpdate`` as
            ``target_value_trunk_params``. Costs a second pass, without gradients.
        gamma: discount, one a decision; the environment's reply costs none.
        turn_gamma: discount of the step from the last token of an utterance to the next utterance; default ``gamma``.
            With ``gamma=1`` only turns are discounted.
        expectile: ``tau`` in (0, 1).
        value_weight, qvalue_weight, cql_weight, margin_weight, actor_weight: weights of the terms.
        cql_temperature: ``T``.
        margin: by how much the taken action should lead.
        advantage_temperature: ``beta`` of the policy's weights; 0 with ``"exp"`` is behaviour cloning. Give a
            ``weight_clip`` with a large one.
        advantage_weighting: ``"exp"`` or ``"sign"``.
        weight_clip: upper bound of the policy's weights, ``transition_weight`` included.
        transition_weight: weight in the policy's loss of tokens that the environment wrote.
        value_min, value_max: bounds of the target Q.
        detach_value, detach_qvalue, detach_actor: no gradient from that head into the trunk.
        target: what V regresses on. ``"td"``: the target Q. ``"mc"``: the discounted rewards to go, of which a
            truncated row has only those it holds. ``"lambda"``: :func:`~torchrl_lang.functional.lambda_returns` over
            the target Q, ``lmbda=0`` is ``"td"``, ``lmbda=1`` the rewards to go with a bootstrap for truncated rows.
        lmbda: for ``target="lambda"``.
        turn_lmbda: likewise at the last token of an utterance; default ``lmbda``. With ``lmbda=1, turn_lmbda=0`` V
            regresses at every token on the target Q of the whole utterance, the one at its last token.
        qvalue_lmbda: lambda of Q's target: 0 for the one-step target above, more for TD(lambda) over V, up to 1 for the
            rewards to go with a bootstrap for truncated rows. Above 0 Q learns more of the policy that made the data.
        end_of_action: id of the token that ends an utterance, for ``turn_gamma`` and ``turn_lmbda``; default that of an
            UtteranceActor. Without it an utterance ends where the environment writes
            (:func:`~torchrl_lang.functional.turn_end_mask`).
        actor_normalizer: ``"all"`` divides the policy's loss by the real tokens, ``"action"`` by the decisions.
        logits_chunk: positions whose values over the vocabulary exist at a time, for the terms CQL and margin where
            ``qvalue_network`` has the methods above, and for the policy's where its head is one linear layer.
            ``"auto"``: a few dozen megabytes at a time from 512 tokens on. None: the whole table.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The input holds ``tokens`` (int64 or int32), ``attention_mask``, ``agent_mask`` (bool) and ``token_reward``
    (float32), each ``[*B, T]``, and ``terminated`` (bool ``[*B, 1]``): a row that is not terminated is bootstrapped
    from its last position. It is left as it was. The output holds the five losses and, detached, the means ``value``,
    ``qvalue``, ``target_qvalue`` and ``advantage`` over decisions.

    Raises:
        KeyError: an entry is missing; the message names it and :meth:`set_keys`.
        ValueError: an option is out of range, a head does not fit the model, shapes differ, or steps of a rollout came
            instead of rows.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.objectives import SoftUpdate
        >>> from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor
        >>> from torchrl_lang.modules import qvalue_module, value_module
        >>> from torchrl_lang.objectives import ILQLLoss
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = ILQLLoss(actor, qvalue_module(QValueHead(16, 12)), value_module(ValueHead(16)), gamma=0.9)
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

    default_value_estimator = ValueEstimators.TD0
    out_keys = [*_LOSSES, *_METRICS]

    def __init__(
        self,
        actor_network: UtteranceActor | ProbabilisticTensorDictSequential,
        qvalue_network: nn.Module,
        value_network: nn.Module,
        *,
        value_trunk: TensorDictModule | None = None,
        target_trunk: bool = False,
        gamma: float = 0.99,
        turn_gamma: float | None = None,
        expectile: float = 0.7,
        value_weight: float = 1.0,
        qvalue_weight: float = 1.0,
        cql_weight: float = 0.01,
        cql_temperature: float = 1.0,
        margin_weight: float = 0.0,
        margin: float = 0.0,
        actor_weight: float = 1.0,
        advantage_temperature: float = 0.0,
        advantage_weighting: Literal["exp", "sign"] = "exp",
        weight_clip: float | None = None,
        transition_weight: float = 0.0,
        value_min: float | None = None,
        value_max: float | None = None,
        detach_value: bool = False,
        detach_qvalue: bool = False,
        detach_actor: bool = False,
        target: Target = "td",
        lmbda: float = 0.95,
        turn_lmbda: float | None = None,
        qvalue_lmbda: float = 0.0,
        end_of_action: int | None = None,
        actor_normalizer: ActorNormalizer = "all",
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__(reduction, logits_chunk)
        self._set_networks(actor_network, qvalue_network, value_network, value_trunk, target_trunk)
        one_of("target", target, ("td", "mc", "lambda"))
        one_of("actor_normalizer", actor_normalizer, ("all", "action"))
        within("expectile", expectile, 0, 1, inclusive=False)
        check_token("end_of_action", end_of_action, actor_network)
        positive("cql_temperature", cql_temperature)
        finite("margin", margin, low=None)
        self._set_value_bounds(value_min, value_max)
        self.gamma, self.lmbda, self.turn_gamma, self.turn_lmbda = gamma, lmbda, turn_gamma, turn_lmbda
        self.expectile, self.target = expectile, target
        self.qvalue_lmbda, self.end_of_action = qvalue_lmbda, end_of_action
        self.value_weight, self.qvalue_weight, self.actor_weight = value_weight, qvalue_weight, actor_weight
        self.cql_weight, self.cql_temperature = cql_weight, cql_temperature
        self.margin_weight, self.margin = margin_weight, margin
        self._set_advantage_weights(advantage_temperature, advantage_weighting, weight_clip, transition_weight)
        self.detach_value, self.detach_qvalue = detach_value, detach_qvalue
        self.detach_actor, self.actor_normalizer = detach_actor, actor_normalizer
        check_discounts(
            gamma=gamma, turn_gamma=turn_gamma, lmbda=lmbda, turn_lmbda=turn_lmbda, qvalue_lmbda=qvalue_lmbda
        )
        for name in _WEIGHTS:
            finite(name, getattr(self, name))

    def make_value_estimator(self, value_type: ValueEstimators | None = None, **hyperparams: Any) -> Self:
        """Choose what V regresses on by TorchRL's names: TD0 is ``"td"``, TD1 ``"mc"``, TDLambda ``"lambda"``.

        Args:
            value_type: the estimator, TD0 by default.
            **hyperparams: ``gamma`` and ``turn_gamma`` and, for TDLambda, ``lmbda`` and ``turn_lmbda``.

        Raises:
            ValueError: the estimator is another one, or a number lies outside [0, 1].
            TypeError: a hyperparameter is unknown.
        """
        known = {
            ValueEstimators.TD0: {"target": "td"},
            ValueEstimators.TD1: {"target": "mc"},
            ValueEstimators.TDLambda: {"target": "lambda"},
        }
        set_estimator(self, value_type, known, hyperparams)
        return self

    # -- the loss --------------------------------------------------------------------------------------------------

    @dispatch(source="_all_in_keys")
    @for_any_number
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        actor_rows, value_rows = self._run_trunks(batch, bool(self.actor_weight))
        value, next_value = self._state_values(batch, value_rows)
        qvalues = self._qvalues(batch, value_rows)
        reads_target = self._weighs_advantages or (self.value_weight and self.target != "mc")
        target = self._target_values(batch, value_rows) if reads_target else None
        clocks = self._clocks(batch, value)

        losses = {}
        # The terms over the vocabulary come first: they compute Q of the taken tokens on the way.
        if self.cql_weight:
            term = self._vocabulary_term(cql_term, batch, qvalues, temperature=self.cql_temperature)
            losses["loss_cql"] = self.cql_weight * term
        if self.margin_weight:
            term = self._vocabulary_term(margin_term, batch, qvalues, margin=self.margin)
            losses["loss_margin"] = self.margin_weight * term
        if self.qvalue_weight:
            goal = qvalue_target(batch, value.detach(), next_value.detach(), clocks.gamma, self.qvalue_lmbda)
            error = goal[:, None] - qvalues.taken
            losses["loss_qvalue"] = self.qvalue_weight * self._reduce_decisions(error.square().sum(-1), batch)
        if self.value_weight:
            error = value_target(self.target, batch, target, next_value.detach(), clocks) - value
            term = expectile_loss(error, self.expectile)
            losses["loss_value"] = self.value_weight * self._reduce_decisions(term, batch)
        if self.actor_weight:
            weight = self._actor_weights(value, target)
            term = actor_loss(
                self,
                batch,
                actor_rows,
                weight,
                transition_weight=self._transition_weight,
                detach=self.detach_actor,
            )
            losses["loss_actor"] = self.actor_weight * term
        zero = value.new_zeros(batch.shape if self.reduction == "none" else ())
        losses = {name: losses.get(name, zero) for name in _LOSSES}
        return TensorDict({**losses, **self._metrics(batch, value, qvalues, target)})

    def _clocks(self, batch: TransitionBatch, like: Tensor) -> Clocks:
        """Discount and lambda after each decision, in the dtype of ``like``."""
        if self.turn_gamma is None and self.turn_lmbda is None:
            return Clocks(self.gamma, self.lmbda)
        ends = self._turn_ends(batch)
        pairs = (self.gamma, self.turn_gamma), (self.lmbda, self.turn_lmbda)
        return Clocks(*(clock(ends, inside if across is None else across, inside, like) for inside, across in pairs))

    # -- the policy's weights and metrics --------------------------------------------------------------------------

    def _actor_weights(self, value: Tensor, target: Tensor | None) -> Tensor | None:
        if not self._weighs_advantages:
            return None if self.weight_clip is None else torch.ones_like(value).clamp_max(self.weight_clip)
        assert target is not None
        return self._advantage_weight(target - value.detach())

    def _metrics(
        self, batch: TransitionBatch, value: Tensor, qvalues: QValues, target: Tensor | None
    ) -> dict[str, Tensor]:
        """Detached means over the decisions that count, NaN of what no term computed."""
        entries = {"value": value}
        if self.qvalue_weight or self.cql_weight or self.margin_weight:
            entries["qvalue"] = qvalues.taken.mean(-1)
        if target is not None:
            entries |= {"target_qvalue": target, "advantage": target - value}
        means = {name: masked_mean(entry.detach(), batch.counts) for name, entry in entries.items()}
        return dict.fromkeys(_METRICS, value.new_full((), torch.nan)) | means
