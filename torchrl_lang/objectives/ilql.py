"""Implicit language Q-learning (ILQL, arXiv 2206.11871) for rows of tokens, one pass of the trunk a batch."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor
from torchrl.objectives import ValueEstimators

from torchrl_lang.functional import (
    advantage_weight,
    cql_term,
    expectile_loss,
    lambda_returns,
    margin_term,
    masked_mean,
    returns_to_go,
    td_target,
)
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.objectives.actor import ActorNormalizer, actor_loss
from torchrl_lang.objectives.rows import DecisionBatch, RowLoss, full_precision, gather_inputs

__all__ = ["ILQLLoss"]

Target = Literal["td", "mc", "lambda"]


class _Values(NamedTuple):
    """Estimates at the decisions of a batch."""

    state: Tensor  # [N], V(s)
    next_state: Tensor  # [N], V(s'), of the bootstrap state behind a row's last decision
    taken: Tensor | None  # [N, n_q], Q(s, a)
    full: Tensor | None  # [N, n_q, V], only where a term needs the whole vocabulary
    target: Tensor | None  # [N], clipped minimum of the target heads at (s, a), no gradient


class ILQLLoss(RowLoss):
    r"""Implicit language Q-learning over rows of tokens.

    At each decision ``j`` with state ``s_j``, token ``a_j``, reward ``r_j`` and successor ``s_{j+1}`` (arXiv 2206.11871,
    sec. 4; ``d`` is 1 where the task ended, ``sg`` stops gradients, ``Qt`` is the minimum of the target heads, clipped
    to ``[value_min, value_max]``)::

        loss_value  = value_weight  * mean_j |tau - 1(u_j < 0)| u_j^2,   u_j = sg(Qt(s_j, a_j)) - V(s_j)
        loss_qvalue = qvalue_weight * mean_j sum_k (r_j + gamma (1 - d_{j+1}) sg(V(s_{j+1})) - Q_k(s_j, a_j))^2
        loss_cql    = cql_weight    * mean_j sum_k CE(Q_k(s_j, .) / T, a_j)
        loss_margin = margin_weight * mean_j sum_k sum_a max(0, Q_k(s_j, a) - Q_k(s_j, a_j) + margin)^2
        loss_actor  = actor_weight  * sum_t w_t CE(pi(. | x_<=t), x_{t+1}) / n

    ``w`` is :func:`~torchrl_lang.functional.advantage_weight` at decisions, by default 1 (behaviour cloning), and
    ``transition_weight`` elsewhere. Every output whose name begins with ``loss_`` is already weighted: a training step
    minimises their sum. A term of weight zero is not computed and comes out as zero.

    The trunk is an ordinary stateful module and runs once a batch. Heads run only at decisions, the target heads only
    at the taken action. Only the heads are functional: ``qvalue_network_params`` with ``target_qvalue_network_params``
    for :class:`~torchrl.objectives.SoftUpdate` or :class:`~torchrl.objectives.HardUpdate`.

    Args:
        actor_network: a language-model actor: a trunk (``tokens``, ``attention_mask`` -> ``hidden`` ``[B, T, H]``), a
            head (``hidden`` -> ``logits``), and a distribution over ``logits``.
        qvalue_network: ``hidden [N, H] -> action_value [N, n_q, V]``, all heads in one module. If it has a method
            ``taken(hidden, action) -> [N, n_q]`` (as :class:`~torchrl_lang.modules.QValueHead` does), only the taken
            action's row of the last layer is computed where that is enough.
        value_network: ``hidden [N, H] -> state_value [N, 1]``.

    Keyword Args:
        value_trunk: a trunk of its own for Q and V (``tokens``, ``attention_mask`` -> ``hidden``); by default they read
            the actor's.
        target_trunk: the target heads read a frozen, slowly following copy of the trunk, found by ``SoftUpdate`` as
            ``target_value_trunk_params``. Costs a second pass, without gradients.
        gamma: discount, one a decision; the environment's reply costs none.
        expectile: ``tau`` in (0, 1).
        value_weight, qvalue_weight, cql_weight, margin_weight, actor_weight: weights of the terms.
        cql_temperature: ``T``.
        margin: by how much the taken action should lead.
        advantage_temperature: ``beta`` of the policy's weights; 0 with ``"exp"`` is behaviour cloning.
        advantage_weighting: ``"exp"`` or ``"sign"``.
        weight_clip: upper bound of the policy's weights, ``transition_weight`` included.
        transition_weight: weight in the policy's loss of tokens that the environment wrote.
        value_min, value_max: bounds of the target Q.
        detach_value, detach_qvalue, detach_actor: no gradient from that head into the trunk.
        target: what V regresses on. ``"td"``: the target Q. ``"mc"``: the discounted rewards to go, of which a
            truncated row has only those it holds. ``"lambda"``: :func:`~torchrl_lang.functional.lambda_returns` over
            the target Q, ``lmbda=0`` is ``"td"``, ``lmbda=1`` the rewards to go with a bootstrap for truncated rows.
            Q's own target is always the one-step one.
        lmbda: for ``target="lambda"``.
        actor_normalizer: ``"all"`` divides the policy's loss by the real tokens, ``"action"`` by the decisions.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The input holds ``tokens`` (int64 or int32), ``attention_mask``, ``action_mask`` (bool) and ``token_reward``
    (float32), each ``[*B, T]``, and ``terminated`` (bool ``[*B, 1]``): a row that is not terminated is bootstrapped from
    its last position. It is left as it was. The output holds the five losses and, detached, the means ``value``,
    ``qvalue``, ``target_qvalue`` and ``advantage`` over decisions.

    Raises:
        KeyError: an entry is missing; the message names it and :meth:`set_keys`.
        ValueError: an option is out of range, shapes differ, or steps of a rollout came instead of rows.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.objectives import SoftUpdate
        >>> from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor, qvalue_module, value_module
        >>> from torchrl_lang.objectives import ILQLLoss
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = ILQLLoss(actor, qvalue_module(QValueHead(16, 12)), value_module(ValueHead(16)), gamma=0.9)
        >>> target = SoftUpdate(loss, tau=0.005)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     action_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0]]),
        ...     terminated=torch.tensor([[True]]),
        ...     batch_size=[1],
        ... )
        >>> out = loss(rows)
        >>> sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        >>> target.step()
    """

    @dataclass
    class _AcceptedKeys(RowLoss._AcceptedKeys):
        """The keys of :class:`RowLoss` and those of the values."""

        action_value: NestedKey = "action_value"
        state_value: NestedKey = "state_value"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    default_value_estimator = ValueEstimators.TD0
    out_keys = [
        "loss_value",
        "loss_qvalue",
        "loss_cql",
        "loss_margin",
        "loss_actor",
        "value",
        "qvalue",
        "target_qvalue",
        "advantage",
    ]

    actor_network: ProbabilisticTensorDictSequential
    value_trunk: TensorDictModule | None
    target_value_trunk_params: TensorDictParams
    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams
    value_network: TensorDictModule
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule,
        value_network: TensorDictModule,
        *,
        value_trunk: TensorDictModule | None = None,
        target_trunk: bool = False,
        gamma: float = 0.99,
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
        actor_normalizer: ActorNormalizer = "all",
        reduction: str | None = None,
    ) -> None:
        super().__init__(reduction)
        _one_of("target", target, ("td", "mc", "lambda"))
        _one_of("advantage_weighting", advantage_weighting, ("exp", "sign"))
        _one_of("actor_normalizer", actor_normalizer, ("all", "action"))
        _within("expectile", expectile, 0, 1, inclusive=False)
        _within("gamma", gamma, 0, 1)
        _within("lmbda", lmbda, 0, 1)
        if cql_temperature <= 0:
            raise ValueError(f"cql_temperature must be positive, got {cql_temperature}.")
        if value_min is not None and value_max is not None and value_min > value_max:
            raise ValueError(f"value_min={value_min} lies above value_max={value_max}.")
        self.actor_network = actor_network
        self.convert_to_functional(qvalue_network, "qvalue_network", create_target_params=True)
        self.convert_to_functional(value_network, "value_network")
        self.value_trunk = value_trunk
        self._make_target_trunk(target_trunk)
        self.gamma, self.expectile, self.target, self.lmbda = gamma, expectile, target, lmbda
        self.value_weight, self.qvalue_weight, self.actor_weight = value_weight, qvalue_weight, actor_weight
        self.cql_weight, self.cql_temperature = cql_weight, cql_temperature
        self.margin_weight, self.margin = margin_weight, margin
        self.advantage_temperature, self.advantage_weighting = advantage_temperature, advantage_weighting
        self.weight_clip, self.transition_weight = weight_clip, transition_weight
        self.value_min, self.value_max = value_min, value_max
        self.detach_value, self.detach_qvalue, self.detach_actor = detach_value, detach_qvalue, detach_actor
        self.actor_normalizer = actor_normalizer

    # -- set-up ----------------------------------------------------------------------------------------------------------

    def make_value_estimator(self, value_type: ValueEstimators | None = None, **hyperparams: Any) -> None:
        """Choose what V regresses on by TorchRL's names: TD0 is ``"td"``, TD1 ``"mc"``, TDLambda ``"lambda"``.

        Args:
            value_type: the estimator, TD0 by default.
            **hyperparams: ``gamma`` and, for TDLambda, ``lmbda``.
        """
        targets = {ValueEstimators.TD0: "td", ValueEstimators.TD1: "mc", ValueEstimators.TDLambda: "lambda"}
        value_type = self.default_value_estimator if value_type is None else value_type
        if value_type not in targets:
            raise ValueError(f"ILQLLoss knows {[str(known) for known in targets]}, got {value_type}.")
        unknown = set(hyperparams) - {"gamma", "lmbda"}
        if unknown:
            raise TypeError(f"Unknown hyperparameters {sorted(unknown)}: give gamma or lmbda.")
        self.target = targets[value_type]
        for name, value in hyperparams.items():
            _within(name, value, 0, 1)
            setattr(self, name, value)

    @property
    def value_trunk_params(self) -> TensorDict:
        """Parameters of the trunk that Q and V read: the source of ``target_value_trunk_params``."""
        return TensorDict.from_module(self._value_trunk)

    @property
    def _value_trunk(self) -> TensorDictModule:
        return split_actor(self.actor_network)[0] if self.value_trunk is None else self.value_trunk

    def _make_target_trunk(self, wanted: bool) -> None:
        self.has_target_trunk = wanted
        if not wanted:
            return
        frozen = self.value_trunk_params.apply(lambda parameter: parameter.data.clone(), filter_empty=False)
        self.target_value_trunk_params = TensorDictParams(frozen, no_convert=True)
        self._has_update_associated["value_trunk"] = False

    def target_qvalue_network(self) -> TensorDictModule:
        """The Q network with the target parameters, as a module of its own that shares them and follows them.

        What a :class:`~torchrl_lang.modules.ValueGuidance` reads when the policy speaks.
        """
        network = deepcopy(self.qvalue_network)
        self.target_qvalue_network_params.to_module(network, preserve_module_state=False)
        return network

    # -- the loss --------------------------------------------------------------------------------------------------------

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        actor_trunk, head, _ = split_actor(self.actor_network)
        batch = self._find(tensordict)
        actor_rows = actor_trunk(batch.rows.copy())
        value_rows = actor_rows if self.value_trunk is None else self.value_trunk(batch.rows.copy())
        values = self._values(batch, value_rows)
        out = {
            "loss_value": self._value_loss(batch, values),
            "loss_qvalue": self._qvalue_loss(batch, values),
            "loss_cql": self._cql_loss(batch, values),
            "loss_margin": self._margin_loss(batch, values),
        }
        zero = values.state.new_zeros(())
        out = {name: zero if term is None else term for name, term in out.items()}
        out["loss_actor"] = zero
        if self.actor_weight:
            out["loss_actor"] = self.actor_weight * actor_loss(
                batch,
                actor_rows,
                head,
                self._actor_weights(values),
                logits_key=self.tensor_keys.logits,
                transition_weight=self._transition_weight,
                normalizer=self.actor_normalizer,
                reduction=self.reduction,
                detach=self.detach_actor,
            )
        return TensorDict({**out, **self._metrics(batch, values)})

    def _value_loss(self, batch: DecisionBatch, values: _Values) -> Tensor | None:
        if not self.value_weight:
            return None
        error = self._value_target(batch, values) - values.state
        return self.value_weight * self._reduce_decisions(expectile_loss(error, self.expectile), batch)

    def _qvalue_loss(self, batch: DecisionBatch, values: _Values) -> Tensor | None:
        if not self.qvalue_weight or values.taken is None:
            return None
        target = td_target(batch.reward, values.next_state.detach(), batch.terminated, self.gamma)
        error = target[:, None] - values.taken
        return self.qvalue_weight * self._reduce_decisions(error.square().sum(-1), batch)

    def _cql_loss(self, batch: DecisionBatch, values: _Values) -> Tensor | None:
        if not self.cql_weight or values.full is None:
            return None
        term = cql_term(values.full, batch.action, self.cql_temperature)
        return self.cql_weight * self._reduce_decisions(term.sum(-1), batch)

    def _margin_loss(self, batch: DecisionBatch, values: _Values) -> Tensor | None:
        if not self.margin_weight or values.full is None:
            return None
        term = margin_term(values.full, batch.action, self.margin)
        return self.margin_weight * self._reduce_decisions(term.sum(-1), batch)

    def _value_target(self, batch: DecisionBatch, values: _Values) -> Tensor:
        """What V regresses on, ``[N]``, without gradient."""
        if self.target == "mc":
            return returns_to_go(batch.next_reward, batch.decision, self.gamma).flatten()[batch.index]
        assert values.target is not None
        if self.target == "td":
            return values.target
        dense = values.target.new_zeros(batch.decision.numel()).index_copy(0, batch.index, values.target)
        # The bootstrap state's V stands behind a row's last decision; rows without a decision have none.
        boot = batch.last.nonzero().squeeze(-1)
        bootstrap = dense.new_zeros(batch.decision.shape[0]).index_copy(
            0, batch.index[boot] // batch.decision.shape[1], values.next_state.detach()[boot]
        )
        bootstrap = torch.where(batch.row_terminated, 0, bootstrap)
        dense = dense.reshape(batch.decision.shape)
        returns = lambda_returns(batch.next_reward, dense, bootstrap, batch.decision, self.gamma, self.lmbda)
        return returns.flatten()[batch.index]

    # -- estimates -------------------------------------------------------------------------------------------------------

    def _values(self, batch: DecisionBatch, rows: TensorDictBase) -> _Values:
        state_value = self._state_values(batch, rows)
        full, taken = self._action_values(batch, rows)
        needs_target = (self.value_weight and self.target != "mc") or self._weighs_advantages
        return _Values(
            state=state_value[batch.state],
            next_state=state_value[batch.state + 1],
            taken=taken,
            full=full,
            target=self._target_values(batch, rows) if needs_target else None,
        )

    def _state_values(self, batch: DecisionBatch, rows: TensorDictBase) -> Tensor:
        """V at all states, ``[S]``."""
        inputs = gather_inputs(self.value_network, rows, batch.state_index)
        with self.value_network_params.to_module(self.value_network):
            out = self.value_network(inputs.detach() if self.detach_value else inputs)
        return full_precision(out.get(self.tensor_keys.state_value).squeeze(-1))

    def _action_values(self, batch: DecisionBatch, rows: TensorDictBase) -> tuple[Tensor | None, Tensor | None]:
        """Online Q at decisions: over the vocabulary where a term needs it, and of the taken action."""
        needs_full = bool(self.cql_weight or self.margin_weight)
        if not (needs_full or self.qvalue_weight):
            return None, None
        inputs = gather_inputs(self.qvalue_network, rows, batch.index)
        inputs = inputs.detach() if self.detach_qvalue else inputs
        with self.qvalue_network_params.to_module(self.qvalue_network):
            if not needs_full:
                return None, self._taken(inputs, batch.action)
            full = full_precision(self.qvalue_network(inputs).get(self.tensor_keys.action_value))
        return full, _pick(full, batch.action)

    @torch.no_grad()
    def _target_values(self, batch: DecisionBatch, rows: TensorDictBase) -> Tensor:
        """Clipped minimum of the target heads at the taken action, ``[N]``."""
        if self.has_target_trunk:
            trunk = self._value_trunk
            with self.target_value_trunk_params.to_module(trunk):
                rows = trunk(batch.rows.copy())
        inputs = gather_inputs(self.qvalue_network, rows, batch.index).detach()
        with self.target_qvalue_network_params.to_module(self.qvalue_network):
            target = self._taken(inputs, batch.action).amin(-1)
        if self.value_min is None and self.value_max is None:
            return target
        return target.clamp(self.value_min, self.value_max)

    def _taken(self, inputs: TensorDictBase, action: Tensor) -> Tensor:
        """Q of the taken action, ``[N, n_q]``, by the network's own short cut where it has one."""
        short_cut = getattr(self.qvalue_network.module, "taken", None)
        if short_cut is not None:
            return full_precision(short_cut(*(inputs.get(key) for key in self.qvalue_network.in_keys), action))
        return _pick(full_precision(self.qvalue_network(inputs).get(self.tensor_keys.action_value)), action)

    # -- the policy's weights and metrics --------------------------------------------------------------------------------

    @property
    def _weighs_advantages(self) -> bool:
        return bool(self.actor_weight) and (self.advantage_weighting == "sign" or self.advantage_temperature != 0)

    @property
    def _transition_weight(self) -> float:
        return self.transition_weight if self.weight_clip is None else min(self.transition_weight, self.weight_clip)

    def _actor_weights(self, values: _Values) -> Tensor | None:
        if not self._weighs_advantages:
            return None if self.weight_clip is None else torch.ones_like(values.state).clamp_max(self.weight_clip)
        assert values.target is not None
        advantage = values.target - values.state.detach()
        return advantage_weight(advantage, self.advantage_temperature, self.advantage_weighting, self.weight_clip)

    def _metrics(self, batch: DecisionBatch, values: _Values) -> dict[str, Tensor]:
        """Detached means over the decisions that count."""
        counted = torch.ones_like(batch.terminated) if batch.counted is None else batch.counted
        entries = {"value": values.state}
        if values.taken is not None:
            entries["qvalue"] = values.taken.mean(-1)
        if values.target is not None:
            entries["target_qvalue"] = values.target
            entries["advantage"] = values.target - values.state
        nan = values.state.new_full((), torch.nan)
        means = {name: masked_mean(value.detach(), counted) for name, value in entries.items()}
        return {name: means.get(name, nan) for name in self.out_keys[5:]}


def _pick(action_value: Tensor, action: Tensor) -> Tensor:
    """The taken action's value of each head: ``[N, n_q, V]``, ``[N]`` -> ``[N, n_q]``."""
    return action_value.gather(-1, action[:, None, None].expand(-1, action_value.shape[1], 1)).squeeze(-1)


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {list(known)}, got {value!r}.")


def _within(name: str, value: float, low: float, high: float, *, inclusive: bool = True) -> None:
    if not (low <= value <= high) or (not inclusive and value in (low, high)):
        raise ValueError(f"{name} must lie in {'[' if inclusive else '('}{low}, {high}{']' if inclusive else ')'}, got {value}.")
