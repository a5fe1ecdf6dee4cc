"""Implicit language Q-learning (ILQL, arXiv 2206.11871) for rows of tokens, one pass of the trunk a batch."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import ValueEstimators

from torchrl_lang.functional import cql_term, expectile_loss, two_clock_advantages
from torchrl_lang.functional.returns import lambda_returns, returns_to_go, td_target
from torchrl_lang.functional.value_terms import margin_term
from torchrl_lang.objectives.base import Policy, TransitionBatch, over_rows
from torchrl_lang.objectives.networks import as_head, values_at
from torchrl_lang.objectives.policy import actor_loss, policy_weight, weighs_advantages
from torchrl_lang.objectives.values import Passes, QValueLoss, QValues, target_qvalues

Target = Literal["td", "mc", "lambda"]


class ILQLLoss(QValueLoss):
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
        advantage_weighting: ``"exp"``, ``exp(beta * A)``, or ``"sign"``, ``beta`` where ``A > 0`` and ``1 - beta``
            elsewhere, with ``0 < beta <= 1``.
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
    from its last position. It is left as it was, but rows that a prioritized sampler drew (with ``priority_weight``)
    get their ``td_error``, float ``[*B, 1]``, where ``qvalue_weight`` is not 0: the mean over a row's decisions of the
    errors in ``loss_qvalue``. The output holds the five losses and, detached, the means ``value``, ``qvalue``,
    ``target_qvalue`` and ``advantage`` over decisions.

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

    out_keys = ["loss_value", "loss_qvalue", "loss_cql", "loss_margin", "loss_actor"]
    out_keys += ["value", "qvalue", "target_qvalue", "advantage"]
    _estimators = {
        ValueEstimators.TD0: {"target": "td", "lmbda": 0.0, "turn_lmbda": None},
        ValueEstimators.TD1: {"target": "lambda", "lmbda": 1.0, "turn_lmbda": None},
        ValueEstimators.TDLambda: {"target": "lambda"},
    }

    def __init__(
        self,
        actor_network: Policy,
        qvalue_network: nn.Module,
        value_network: nn.Module,
        *,
        expectile: float = 0.7,
        value_weight: float = 1.0,
        cql_weight: float = 0.01,
        cql_temperature: float = 1.0,
        margin_weight: float = 0.0,
        margin: float = 0.0,
        advantage_temperature: float = 0.0,
        advantage_weighting: Literal["exp", "sign"] = "exp",
        weight_clip: float | None = None,
        detach_value: bool = False,
        target: Target = "td",
        lmbda: float = 0.95,
        turn_lmbda: float | None = None,
        qvalue_lmbda: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        network = as_head(self, "value_network", value_network, self.value_trunk)
        self.convert_to_functional(network, "value_network")
        self._set_options(target=target, lmbda=lmbda, turn_lmbda=turn_lmbda, qvalue_lmbda=qvalue_lmbda)
        self._set_options(expectile=expectile, value_weight=value_weight, detach_value=detach_value)
        self._set_options(cql_weight=cql_weight, cql_temperature=cql_temperature)
        self._set_options(margin_weight=margin_weight, margin=margin, weight_clip=weight_clip)
        self._set_options(advantage_temperature=advantage_temperature, advantage_weighting=advantage_weighting)

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        rows = Passes(self, batch, reads_policy=self.actor_weight)
        v = values_at(self, "value_network", rows.values, batch.state_place, detach=self.detach_value).squeeze(-1)
        value, next_value = v[batch.state], v[batch.state + 1].detach()  # V(s_j), V(s_{j+1})
        q, losses, metrics = QValues(self, batch, rows.values), {}, {"value": value}
        # The terms over the vocabulary come first: they compute Q of the taken tokens on the way.
        if self.cql_weight:
            losses["loss_cql"] = self.cql_weight * q.term(cql_term, temperature=self.cql_temperature)
        if self.margin_weight:
            losses["loss_margin"] = self.margin_weight * q.term(margin_term, margin=self.margin)
        if self.qvalue_weight:
            y = self._qvalue_target(batch, value.detach(), next_value)
            error = (y[:, None] - q.taken).square().sum(-1)
            losses["loss_qvalue"] = self._qvalue_loss(tensordict, batch, error, batch.place, batch.counts)
        if losses:
            metrics["qvalue"] = q.taken.mean(-1)
        if weighs_advantages(self) or (self.value_weight and self.target != "mc"):
            metrics["target_qvalue"] = target_qvalues(self, batch, rows.target)  # Qt(s_j, a_j)
            metrics["advantage"] = metrics["target_qvalue"] - value
        if self.value_weight:
            u = self._value_target(batch, metrics.get("target_qvalue"), next_value) - value
            losses["loss_value"] = self.value_weight * self._reduce_decisions(expectile_loss(u, self.expectile), batch)
        if self.actor_weight:
            advantage = metrics["advantage"] if weighs_advantages(self) else torch.zeros_like(value)
            w = policy_weight(self, advantage.detach())
            losses["loss_actor"] = self.actor_weight * actor_loss(self, batch, rows.policy, w, detach=self.detach_actor)
        return self._output(batch, losses, metrics)

    def _value_target(self, batch: TransitionBatch, qvalue: Any, next_value: Tensor) -> Tensor:
        """Targets of V at the decisions, ``[N]``: ``qvalue``, rewards to go, or lambda-returns over ``qvalue``."""
        if self.target == "td":
            return qvalue
        reward = batch.next_reward.to(next_value.dtype)
        gamma = self._clock(batch, self.gamma, self.turn_gamma, next_value)
        if self.target == "mc":
            returns = returns_to_go(reward, batch.decision, gamma)
        else:
            lmbda = self._clock(batch, self.lmbda, self.turn_lmbda, next_value)
            values, bootstrap = batch.at_decisions(qvalue), batch.bootstrap(next_value)
            returns = lambda_returns(reward, values, bootstrap, batch.decision, gamma, lmbda)
        return returns.flatten()[batch.place]

    def _qvalue_target(self, batch: TransitionBatch, value: Tensor, next_value: Tensor) -> Tensor:
        """Targets of Q at the decisions, ``[N]``: ``r + gamma V(s')``, or with ``qvalue_lmbda`` TD(lambda) over V."""
        if not self.qvalue_lmbda:
            return td_target(batch.reward, next_value, batch.terminated, self._discount(batch, next_value))
        gamma = self._clock(batch, self.gamma, self.turn_gamma, next_value)
        row = batch.next_reward, batch.at_decisions(value), batch.bootstrap(next_value), batch.decision
        # All steps count as ends of turns, and have the discount that ``turn_gamma`` gives here.
        found = two_clock_advantages(*row, batch.decision, turn_gamma=gamma, turn_lmbda=self.qvalue_lmbda)
        return found.value_target.flatten()[batch.place]
