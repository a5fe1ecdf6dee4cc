"""The base of the losses with Q heads, and what their terms share: online and target Q, and values of next states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.nn import Parameter
from torchrl.objectives import ValueEstimators

from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.functional.value_terms import divisor
from torchrl_lang.modules.head_values import ACTION_VALUE, UTTERANCE_VALUE, with_heads
from torchrl_lang.modules.heads import TiedQValueHead
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.objectives import networks
from torchrl_lang.objectives.base import Policy, RowLoss, TransitionBatch, in_chunks
from torchrl_lang.objectives.policy import Behavior, pieces


class QValueLoss(RowLoss):
    """Base of the losses with Q heads. Abstract: a loss fills in ``forward``.

    The trunk is a stateful module that runs once a batch. Only the heads are functional, with target parameters that
    TorchRL's target updaters find; so is a target trunk, where one is asked for, since it needs no gradient. The
    options are those of :class:`~torchrl_lang.objectives.ILQLLoss`.

    Rows that a prioritized sampler drew, which have a ``priority_weight``, get a ``td_error`` (float ``[*B, 1]``): the
    mean over what counts in the row of the errors of which ``loss_qvalue`` is the mean over the batch. Nothing else is
    written into the input. The weights are not used, as in TorchRL's ``IQLLoss`` and ``CQLLoss``.
    """

    @dataclass
    class _AcceptedKeys(RowLoss._AcceptedKeys):
        """The keys of :class:`RowLoss` and those of a prioritized sampler."""

        priority: NestedKey = "td_error"
        priority_weight: NestedKey = "priority_weight"

    default_keys = _AcceptedKeys

    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams
    value_network: TensorDictModule  # where a loss has one
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams
    target_value_trunk_params: TensorDictParams

    default_value_estimator = ValueEstimators.TD0
    _estimators: Mapping[ValueEstimators, Mapping[str, Any]] = {ValueEstimators.TD0: {}}
    _targets: str = (
        "its targets are backups of its Q and V over tokens or utterances, computed in each call of the loss"
    )

    def __init__(
        self,
        actor_network: Policy | None,
        qvalue_network: nn.Module,
        *,
        value_trunk: TensorDictModule | None = None,
        target_trunk: bool = False,
        gamma: float = 0.99,
        turn_gamma: float | None = None,
        qvalue_weight: float = 1.0,
        actor_weight: float = 1.0,
        value_min: float | None = None,
        value_max: float | None = None,
        detach_qvalue: bool = False,
        detach_actor: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, **options)
        network = networks.as_head(self, "qvalue_network", qvalue_network, value_trunk)
        if next(network.parameters(), None) is None:
            raise ValueError("The qvalue_network has no parameters: give the module that holds them, not a function.")
        self.convert_to_functional(network, "qvalue_network", create_target_params=True)
        self.value_trunk, self.has_target_trunk = value_trunk, target_trunk
        if target_trunk:
            self.target_value_trunk_params = networks.frozen_target(self.value_trunk_params)
            self._has_update_associated["value_trunk"] = False
        self._set_options(gamma=gamma, turn_gamma=turn_gamma, qvalue_weight=qvalue_weight, actor_weight=actor_weight)
        self._set_options(value_min=value_min, value_max=value_max)
        self._set_options(detach_qvalue=detach_qvalue, detach_actor=detach_actor)
        if value_min is not None and value_max is not None and value_min > value_max:
            raise ValueError(f"value_min={value_min} lies above value_max={value_max}.")
        head = getattr(network, "module", None)
        if isinstance(head, TiedQValueHead) and all(head.embedding.weight is not one for one in self.parameters()):
            raise ValueError("The Q head is tied to an embedding that is not part of this loss: tie it to the actor's.")

    def _make_vmap(self) -> None:
        """Called by ``set_vmap_randomness``: nothing is mapped, a module computes the values of all its heads."""

    def target_qvalue_network(self) -> TensorDictModule:
        """The Q network with the target parameters, as a module of its own that shares them and follows them.

        For a :class:`~torchrl_lang.modules.ValueGuidance` or another policy that reads values, by this library's key.
        """
        network = deepcopy(self.qvalue_network)
        target: Any = self._modules["target_qvalue_network_params"]  # as an attribute it warns without an updater
        # Parameters of its own over the same memory, so that it has a state_dict and can be saved.
        frozen = target.data.apply(partial(Parameter, requires_grad=False))
        frozen.to_module(network, preserve_module_state=False)
        values = self._kinds["qvalue_network"]
        if type(network) is TensorDictModule and network.out_keys != [values] and len(network.out_keys) == 1:
            return TensorDictModule(network.module, in_keys=network.in_keys, out_keys=[values])
        return network

    def _qvalue_loss(
        self, rows: TensorDictBase, batch: TransitionBatch, error: Tensor, place: Tensor, counted: Tensor
    ) -> Tensor:
        """``loss_qvalue`` of the errors at places of the batch, each ``[M]``; sampled rows get their ``td_error``."""
        if self.tensor_keys.priority_weight in rows.keys(True):
            total = batch.at_decisions(torch.where(counted, error.detach(), 0), place).sum(-1)
            mean = total / batch.at_decisions(counted.to(total.dtype), place).sum(-1).clamp_min(1)
            rows.set(self.tensor_keys.priority, mean.reshape(*batch.shape[:-1], 1))
        return self.qvalue_weight * self._reduce(error, batch, place, counted)

    # -- values of tokens ----------------------------------------------------------------------------------------------

    def _clipped(self, target: Tensor) -> Tensor:
        """Target values within their bounds."""
        bounds = self.value_min, self.value_max
        return target if bounds == (None, None) else target.clamp(*bounds)

    def _target_table(self, rows: TensorDictBase, at: NextStates) -> Tensor:
        """``Qt(s, .)``, the clipped minimum of the target heads, ``[M, V]``; ``-inf`` at impossible tokens."""
        return possible(self, self._clipped(_table(self, self.target_qvalue_network_params, rows, at)), at)

    def _online_table(self, rows: TensorDictBase, at: NextStates) -> Tensor:
        """``Q(s, .)``, the minimum of the online heads, ``[M, V]``; ``-inf`` at impossible tokens."""
        return possible(self, _table(self, self.qvalue_network_params, rows, at), at)


class Passes:
    """The rows of a batch with what the trunks of a loss wrote into them: each pass at most once."""

    def __init__(self, loss: QValueLoss, batch: TransitionBatch, reads_policy: Any) -> None:
        self._loss, self._batch = loss, batch
        self._still: TensorDictBase | None = None
        self._target: TensorDictBase | None = None
        shared = loss.value_trunk is None
        runs = bool(reads_policy) or shared
        self.policy = loss._policy_trunk(batch.rows.copy()) if runs else batch.rows
        """States for the policy's head."""
        self.values = self.policy if shared else loss._value_trunk(batch.rows.copy())
        """States for the heads of Q and V."""

    @property
    def still_values(self) -> TensorDictBase:
        """States for targets from the online heads, without dropout."""
        if self._still is None:
            self._still = networks.without_dropout(self._loss._value_trunk, self._batch.rows, self.values)
        return self._still

    @property
    def target(self) -> TensorDictBase:
        """States for the target heads, without dropout: of the target trunk where there is one."""
        loss = self._loss
        if not loss.has_target_trunk:
            return self.still_values
        if self._target is None:
            with torch.no_grad(), networks.lent(loss.target_value_trunk_params, loss._value_trunk):
                self._target = loss._value_trunk(self._batch.rows.copy())
        return self._target

    def behavior(self) -> Behavior:
        """The policy itself, without dropout, as the estimate of the one that made the data."""
        loss = self._loss
        if loss.value_trunk is None:
            rows = self.still_values
        else:
            rows = networks.without_dropout(loss._policy_trunk, self._batch.rows, self.policy)
        actor = loss.language_actor
        return Behavior(loss._scorer(actor), loss._policy_states(rows), partial(eval_mode, actor))


class QValues:
    """Online Q at the ``N`` decisions of a batch, each form computed at most once, when a term first asks for it."""

    def __init__(self, loss: QValueLoss, batch: TransitionBatch, rows: TensorDictBase) -> None:
        self._loss, self._batch, self._key = loss, batch, networks.head_key(loss, "qvalue_network")
        states = networks.gather_inputs(loss.qvalue_network.in_keys, rows, batch.place)
        if "qvalue_network" not in loss._tried:
            with torch.no_grad():
                networks.online_values(loss, "qvalue_network", states[:1])
        self._states = states.detach() if loss.detach_qvalue else states
        self._taken: Tensor | None = None
        self._table: Tensor | None = None

    @property
    def table(self) -> Tensor:
        """Q(s, .) of all tokens, ``[N, n_q, V]``."""
        if self._table is None:  # no cached_property: before Python 3.12 its lock breaks the compiler's graph
            self._table = networks.online_values(self._loss, "qvalue_network", self._states)
        return self._table

    @property
    def taken(self) -> Tensor:
        """Q(s, a) of the tokens that were written, ``[N, n_q]``; free of charge after a term over the vocabulary."""
        if self._taken is None and self._table is not None:
            self._taken = _pick(self._table, self._batch.action)
        if self._taken is None:
            network = self._loss.qvalue_network
            with self._loss.qvalue_network_params.to_module(network):
                self._taken = _taken_values(network, self._states, self._batch.action, self._key)
        return self._taken

    def term(self, term: Callable[..., Tensor], **options: Any) -> Tensor:
        """Reduce a term ``(action_value [N, n_q, V], action [N], **options) -> [N, n_q]``, summed over the heads.

        Where the vocabulary is large and the head has a method of the same name, that computes it chunk by chunk and
        never builds the table.
        """
        loss, batch, network = self._loss, self._batch, self._loss.qvalue_network
        head, states, action = getattr(network, "module", None), self._states, batch.action
        size = getattr(head, "vocab_size", None)
        if size is None or not hasattr(head, term.__name__) or not in_chunks(loss.logits_chunk, size):
            return loss._reduce_decisions(term(self.table, action, **options).sum(-1), batch)
        # Decisions are left out rather than multiplied by zero: a masked value may be infinite.
        kept = None if batch.mask is None else batch.counts.nonzero().squeeze(-1)
        if kept is not None:
            states, action = states[kept], action[kept]
        recompute = loss.reduction == "none"
        chunk = loss.logits_chunk if isinstance(loss.logits_chunk, int) else None
        inputs = [states.get(key) for key in network.in_keys]
        with loss.qvalue_network_params.to_module(network):
            method = getattr(head, term.__name__)
            total, each, taken = method(*inputs, action, chunk_size=chunk, recompute=recompute, **options)
        if self._taken is None:
            self._taken = _put_back(taken, kept, batch)
        if recompute:
            return batch.at_decisions(_put_back(each.sum(-1), kept, batch)).reshape(batch.shape)
        return total if loss.reduction == "sum" else total / divisor(batch.counts)


@torch.no_grad()
def target_qvalues(loss: QValueLoss, batch: TransitionBatch, rows: TensorDictBase) -> Tensor:
    """``Qt(s, a)``, the clipped minimum of the target heads at the taken action, ``[N]``."""
    network = loss.qvalue_network
    states = networks.gather_inputs(network.in_keys, rows, batch.place).detach()
    with networks.lent(loss.target_qvalue_network_params, network):
        target = _taken_values(network, states, batch.action, networks.head_key(loss, "qvalue_network")).amin(-1)
    return loss._clipped(target)


class NextStates(NamedTuple):
    """``M`` states whose values are backed up."""

    place: Tensor
    """int64 ``[M]``: their places in a batch flattened to ``[B * T]``."""
    forced: Tensor
    """bool ``[M]``: only the end of the utterance can be written there."""


@torch.no_grad()
def next_values(loss: RowLoss, batch: TransitionBatch, backup: Callable[[NextStates], Tensor]) -> Tensor:
    """Bootstrap values ``backup(s')`` of the successors of a batch's decisions, ``[N]``, a chunk of states at a time.

    Zero where the task ended or nothing counts. ``loss.logits_chunk`` is the size of a chunk.
    """
    index = (batch.counts & ~batch.terminated).nonzero().squeeze(-1)
    place = batch.state_place[batch.state[index] + 1]
    forced = loss.scorer.certain(batch, place)
    parts = pieces(loss, place.shape[0])
    found = torch.cat([backup(NextStates(place[part], forced[part])) for part in parts])
    return found.new_zeros(batch.place.shape).index_copy(0, index, found)


def possible(loss: RowLoss, values: Tensor, at: NextStates) -> Tensor:
    """A table ``[M, V]`` of the tokens that the policy can write, with ``-inf`` at those that it cannot write here.

    A model's matrix may be larger than the vocabulary.
    """
    return loss.scorer.possible(values, at.forced)[:, : networks.vocabulary(loss.actor_network)]


def _table(loss: QValueLoss, params: TensorDictBase, rows: TensorDictBase, at: NextStates) -> Tensor:
    """The minimum over heads of Q, ``[M, V]``."""
    network = loss.qvalue_network
    states = networks.gather_inputs(network.in_keys, rows, at.place)
    with networks.lent(params, network):
        return networks.read_head(network, states, networks.head_key(loss, "qvalue_network"), ACTION_VALUE).amin(-2)


def _taken_values(network: TensorDictModule, states: TensorDictBase, action: Tensor, key: Any) -> Tensor:
    """Q of the tokens that were written, ``[N, n_q]``, by the head's own method ``taken`` where it has one."""
    method = getattr(getattr(network, "module", None), "taken", None)
    if method is not None:
        return upcast_half(with_heads(method(*(states.get(key) for key in network.in_keys), action), UTTERANCE_VALUE))
    return _pick(networks.read_head(network, states, key, ACTION_VALUE), action)


def _pick(action_value: Tensor, action: Tensor) -> Tensor:
    """The taken action's value of each head: ``[N, n_q, V]``, ``[N]`` -> ``[N, n_q]``."""
    return action_value.gather(-1, action[:, None, None].expand(-1, action_value.shape[1], 1)).squeeze(-1)


def _put_back(values: Tensor, kept: Tensor | None, batch: TransitionBatch) -> Tensor:
    """Values of the decisions that count among all ``N``, zero elsewhere."""
    if kept is None:
        return values
    return values.new_zeros((batch.place.shape[0], *values.shape[1:])).index_copy(0, kept, values)
