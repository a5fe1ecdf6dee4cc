"""The base of the losses whose Q backs up over the next state's action values: CQL, BCQ and psi-learning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn
from torchrl.objectives import ValueEstimators

from torchrl_lang._checks import finite, one_of
from torchrl_lang.functional import masked_mean, td_target
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.head_values import ACTION_VALUE
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.objectives.base import ActorNormalizer, LogitsChunk, TransitionBatch, gather_inputs
from torchrl_lang.objectives.behavior import Behavior
from torchrl_lang.objectives.checks import check_discounts, check_token, set_estimator, vocabulary
from torchrl_lang.objectives.heads import read_head
from torchrl_lang.objectives.no_rows import for_any_number
from torchrl_lang.objectives.policy_loss import actor_loss
from torchrl_lang.objectives.qvalues import QValues
from torchrl_lang.objectives.successors import next_values
from torchrl_lang.objectives.targets import lent, without_dropout
from torchrl_lang.objectives.value_base import QValueRowLoss

__all__ = ["QBackupLoss", "StateTables"]


class QBackupLoss(QValueRowLoss):
    """Base of the losses over rows of tokens whose Q learns from the next state's action values, without a V.

    At each decision ``j`` with state ``s_j``, token ``a_j``, reward ``r_j`` and successor ``s_{j+1}`` (``d`` is 1 where
    the task ended, ``Qt`` the minimum of the target heads, clipped to ``[value_min, value_max]``)::

        y_j         = r_j + gamma (1 - d_{j+1}) B(s_{j+1})
        loss_qvalue = qvalue_weight * mean_j sum_k error(y_j - Q_k(s_j, a_j))
        loss_actor  = actor_weight  * sum_t w_t CE(pi(. | x_<=t), x_{t+1}) / n

    ``B(s)``, the backup, is a function of ``Qt(s, .)`` and differs between the algorithms, as does ``error``. The
    policy ``pi`` is trained by behaviour cloning: ``w`` is 1 at decisions and ``transition_weight`` elsewhere. Every
    output whose name begins with ``loss_`` is already weighted: a training step minimises their sum. A term of weight
    zero is not computed and comes out as zero.

    ``B`` is a maximum or a sum over the vocabulary, so tokens that the policy cannot write must be left out of it: no
    data correct their values. Give an :class:`~torchrl_lang.modules.UtteranceActor` as ``actor_network``. Its forbidden
    tokens, by default all control tokens but the end of the action, are left out, ids from its ``vocab_size`` on too,
    and in the last slot of an utterance all tokens but its end. With a language actor all tokens count.

    The trunk runs once a batch, and where it applies dropout once more without: targets have none. The values of the
    successors are computed without gradients, a chunk of states at a time. Only the Q heads are functional:
    ``qvalue_network_params`` with ``target_qvalue_network_params`` for :class:`~torchrl.objectives.SoftUpdate` or
    :class:`~torchrl.objectives.HardUpdate`.

    Abstract: an algorithm fills in :meth:`_backup`.

    Args:
        actor_network: a language-model actor or an :class:`~torchrl_lang.modules.UtteranceActor` over one, without
            guidance, as in :class:`~torchrl_lang.objectives.ILQLLoss`.
        qvalue_network: ``hidden [N, H] -> action_value [N, n_q, V]``, as in :class:`~torchrl_lang.objectives.ILQLLoss`.

    Keyword Args:
        value_trunk: a trunk of its own for Q; by default it reads the actor's.
        target_trunk: the target heads read a frozen, slowly following copy of the trunk, found by ``SoftUpdate`` as
            ``target_value_trunk_params``. Costs a second pass, without gradients.
        gamma: discount, one a decision; the environment's reply costs none.
        turn_gamma: discount of the step from the last token of an utterance to the next utterance; default ``gamma``.
        qvalue_weight, actor_weight: weights of the terms.
        transition_weight: weight in the policy's loss of tokens that the environment wrote.
        value_min, value_max: bounds of the target Q.
        detach_qvalue, detach_actor: no gradient from that head into the trunk.
        end_of_action: id of the token that ends an utterance, for ``turn_gamma``; default that of an UtteranceActor.
            Without it an utterance ends where the environment writes.
        actor_normalizer: ``"all"`` divides the policy's loss by the real tokens, ``"action"`` by the decisions.
        logits_chunk: positions whose values over the vocabulary exist at a time, in the backup and in the terms over
            the vocabulary. ``"auto"``: a few dozen megabytes. None: all at once.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The input is that of :class:`~torchrl_lang.objectives.ILQLLoss`: a row that is not terminated is bootstrapped from
    its last position. The output holds the losses and, detached, the means ``qvalue`` (of the tokens that were written)
    and ``td_target`` (``y``) over decisions.

    Raises:
        KeyError: an entry is missing; the message names it and :meth:`set_keys`.
        ValueError: an option is out of range, shapes differ, or steps of a rollout came instead of rows.
    """

    default_value_estimator = ValueEstimators.TD0
    out_keys = ["loss_qvalue", "loss_actor", "qvalue", "td_target"]

    def __init__(
        self,
        actor_network: UtteranceActor | ProbabilisticTensorDictSequential,
        qvalue_network: nn.Module,
        *,
        value_trunk: TensorDictModule | None = None,
        target_trunk: bool = False,
        gamma: float = 0.99,
        turn_gamma: float | None = None,
        qvalue_weight: float = 1.0,
        actor_weight: float = 1.0,
        transition_weight: float = 0.0,
        value_min: float | None = None,
        value_max: float | None = None,
        detach_qvalue: bool = False,
        detach_actor: bool = False,
        end_of_action: int | None = None,
        actor_normalizer: ActorNormalizer = "all",
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__(reduction, logits_chunk)
        self._set_policy_and_qvalue(actor_network, qvalue_network, value_trunk)
        self._set_value_trunk(value_trunk, target_trunk)
        one_of("actor_normalizer", actor_normalizer, ("all", "action"))
        check_token("end_of_action", end_of_action, actor_network)
        self._set_value_bounds(value_min, value_max)
        self.gamma, self.turn_gamma, self.end_of_action = gamma, turn_gamma, end_of_action
        self.qvalue_weight, self.actor_weight, self.transition_weight = qvalue_weight, actor_weight, transition_weight
        self.detach_qvalue, self.detach_actor, self.actor_normalizer = detach_qvalue, detach_actor, actor_normalizer
        check_discounts(gamma=gamma, turn_gamma=turn_gamma)
        for name in ("qvalue_weight", "actor_weight", "transition_weight"):
            finite(name, getattr(self, name))

    def make_value_estimator(self, value_type: ValueEstimators | None = None, **hyperparams: Any) -> Self:
        """Set the discounts ``gamma`` and ``turn_gamma``; the only estimator is TD0.

        Raises:
            ValueError: the estimator is another one, or a number lies outside [0, 1].
            TypeError: a hyperparameter is unknown.
        """
        set_estimator(self, value_type, {ValueEstimators.TD0: {}}, hyperparams)
        return self

    # -- the loss --------------------------------------------------------------------------------------------------

    @dispatch(source="_all_in_keys")
    @for_any_number
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        reads_policy = bool(self.actor_weight or (self.qvalue_weight and self._reads_policy))
        actor_rows, value_rows = self._run_trunks(batch, reads_policy)
        qvalues = self._qvalues(batch, value_rows)
        # The terms over the vocabulary come first: they compute Q of the taken tokens on the way.
        losses, metrics = self._regularizers(batch, qvalues), {}
        if self.qvalue_weight:
            policy_rows, online_rows = self._without_dropout(batch, actor_rows, value_rows)
            behavior = self._behavior(batch, policy_rows)
            next_value = self._next_value(batch, behavior, online_rows)
            discount = self._discount(batch, next_value)
            goal = td_target(self._reward(batch, behavior), next_value, batch.terminated, discount)
            term = self._error(goal[:, None] - qvalues.taken).sum(-1)
            losses["loss_qvalue"] = self.qvalue_weight * self._reduce_decisions(term, batch)
            metrics["td_target"] = masked_mean(goal, batch.counts)
        if self.actor_weight:
            term = actor_loss(self, batch, actor_rows, detach=self.detach_actor)
            losses["loss_actor"] = self.actor_weight * term
        if losses.keys() - {"loss_actor"}:
            metrics["qvalue"] = masked_mean(qvalues.taken.detach().mean(-1), batch.counts)
        zero = batch.reward.new_zeros(batch.shape if self.reduction == "none" else ())
        nothing = {name: zero if name.startswith("loss_") else zero.new_full((), torch.nan) for name in self.out_keys}
        return TensorDict({**nothing, **losses, **metrics})

    # -- what an algorithm fills in --------------------------------------------------------------------------------

    @property
    def _reads_policy(self) -> bool:
        """Whether targets depend on the policy."""
        return False

    @property
    def _reads_online(self) -> bool:
        """Whether targets depend on the online heads."""
        return False

    def _without_dropout(
        self, batch: TransitionBatch, actor_rows: TensorDictBase, value_rows: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """The rows of both trunks without dropout, where targets read them."""
        shared = self.value_trunk is None
        if not self.has_target_trunk or self._reads_online or (shared and self._reads_policy):
            value_rows = without_dropout(self._value_trunk, batch.rows, value_rows)
        if shared:
            return value_rows, value_rows
        if self._reads_policy:
            actor_rows = without_dropout(split_actor(self.language_actor).trunk, batch.rows, actor_rows)
        return actor_rows, value_rows

    def _behavior(self, batch: TransitionBatch, actor_rows: TensorDictBase) -> Behavior | None:
        """What targets take for the policy that made the data; None where they depend on none."""
        if not self._reads_policy:
            return None
        states = {key: actor_rows.get(key) for key in split_actor(self.language_actor).trunk.out_keys}
        return Behavior(RowScorer(self.language_actor), states, partial(eval_mode, self.language_actor))

    def _backup(self, tables: StateTables) -> Tensor:
        """``B`` of some states, ``[M]``."""
        raise NotImplementedError(f"{type(self).__name__} has no backup: use CQLLoss, BCQLoss or PsiLoss.")

    def _reward(self, batch: TransitionBatch, behavior: Behavior | None) -> Tensor:
        """The reward of each decision, ``[N]``."""
        return batch.reward

    def _error(self, difference: Tensor) -> Tensor:
        """The error of target minus Q, elementwise: by default its square."""
        return difference.square()

    def _regularizers(self, batch: TransitionBatch, qvalues: QValues) -> dict[str, Tensor]:
        """Further terms, weighted and reduced."""
        return {}

    # -- the successors --------------------------------------------------------------------------------------------

    def _next_value(self, batch: TransitionBatch, behavior: Behavior | None, value_rows: TensorDictBase) -> Tensor:
        """``B`` of each decision's successor, ``[N]``; zero where the task ended or nothing counts."""
        with torch.no_grad():
            target_rows = self._target_rows(batch, value_rows) if self.has_target_trunk else value_rows

        def backup(place: Tensor, certain: Tensor) -> Tensor:
            return self._backup(StateTables(self, place, certain, behavior, value_rows, target_rows))

        return next_values(self, batch, backup)


@dataclass
class StateTables:
    """Tables over the vocabulary at ``M`` states, ``[M, V]`` each, computed when they are asked for.

    Tokens that the policy cannot write have ``-inf`` in all of them.
    """

    loss: QBackupLoss
    place: Tensor
    """int64 ``[M]``: the states, in a batch flattened to ``[B * T]``."""
    certain: Tensor
    """bool ``[M]``: only the end of the utterance can be written."""
    behavior: Behavior | None
    value_rows: TensorDictBase
    target_rows: TensorDictBase

    def target(self) -> Tensor:
        """Clipped minimum of the target heads."""
        loss = self.loss
        return self._possible(loss._clipped(self._least(loss.target_qvalue_network_params, self.target_rows)))

    def online(self) -> Tensor:
        """Minimum of the online heads."""
        return self._possible(self._least(self.loss.qvalue_network_params, self.value_rows))

    def log_behavior(self) -> Tensor:
        """Log-probability under the policy that made the data."""
        assert self.behavior is not None
        return self._possible(self.behavior.log_softmax(self.place))

    def _least(self, params: TensorDictBase, rows: TensorDictBase) -> Tensor:
        network = self.loss.qvalue_network
        states, key = gather_inputs(network.in_keys, rows, self.place), self.loss._head_key("qvalue_network")
        with lent(params, network):
            return read_head(network, states, key, ACTION_VALUE).amin(-2)

    def _possible(self, values: Tensor) -> Tensor:
        # A model's matrix may be larger than the vocabulary: tables have the columns that the policy can write.
        return self.loss.scorer.possible(values, self.certain)[:, : vocabulary(self.loss.actor_network)]
