"""The bases of the losses with Q, and with Q and V, over a trunk: networks, and their values at a batch's decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

from torchrl_lang._checks import finite
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.frozen.fingerprint import fingerprint
from torchrl_lang.modules.head_values import ACTION_VALUE, STATE_VALUE
from torchrl_lang.modules.tied_qvalue_head import TiedQValueHead
from torchrl_lang.objectives.base import TransitionBatch, gather_inputs, in_chunks
from torchrl_lang.objectives.checks import check_actor
from torchrl_lang.objectives.qvalues import QValues, taken_values
from torchrl_lang.objectives.target_qvalues import TargetQLoss
from torchrl_lang.objectives.targets import frozen_target, lent, without_dropout

__all__ = ["QValueRowLoss", "ValueRowLoss"]

_TIED = "tied_embedding_fingerprint"


class QValueRowLoss(TargetQLoss):
    """Base of the losses with Q heads on a trunk. Abstract: a loss fills in ``forward`` and sets the options.

    The trunk is a stateful module that runs once a batch. Only the heads are functional; so is a target trunk, where
    one is asked for, since it needs no gradient.

    Where Q is tied to an embedding that is in none of the loss's networks, the ``state_dict`` has its fingerprint, and
    ``load_state_dict`` beside another embedding raises a RuntimeError.
    """

    @dataclass
    class _AcceptedKeys(TargetQLoss._AcceptedKeys):
        """The keys of :class:`RowLoss` and that of the action values."""

        action_value: NestedKey = ACTION_VALUE

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    value_trunk: TensorDictModule | None
    target_value_trunk_params: TensorDictParams

    value_min: float | None
    """Least target Q."""
    value_max: float | None
    """Greatest target Q."""
    detach_qvalue: bool
    """No gradient flows from Q into the trunk."""
    detach_actor: bool
    """No gradient flows from the policy's term into the trunk."""

    def _set_policy_and_qvalue(
        self,
        actor_network: UtteranceActor | ProbabilisticTensorDictSequential,
        qvalue_network: nn.Module,
        value_trunk: TensorDictModule | None,
    ) -> None:
        """Check these networks and make the Q head functional."""
        check_actor(type(self).__name__, actor_network)
        self.actor_network = actor_network
        self._set_qvalue(qvalue_network, ACTION_VALUE, value_trunk)

    def _set_value_trunk(self, value_trunk: TensorDictModule | None, target_trunk: bool) -> None:
        """Set the trunk that the values read, and copy it if the target heads read a copy."""
        self.value_trunk = value_trunk
        self.has_target_trunk = target_trunk
        if target_trunk:
            self.target_value_trunk_params = frozen_target(self.value_trunk_params)
            self._has_update_associated["value_trunk"] = False
        self._check_tie()

    def _set_value_bounds(self, value_min: float | None, value_max: float | None) -> None:
        """Check and set the bounds of the target Q."""
        for name, bound in (("value_min", value_min), ("value_max", value_max)):
            if bound is not None:
                finite(name, bound, low=None)
        if value_min is not None and value_max is not None and value_min > value_max:
            raise ValueError(f"value_min={value_min} lies above value_max={value_max}.")
        self.value_min, self.value_max = value_min, value_max

    def _check_tie(self) -> None:
        """Raise where Q would train an embedding that no optimiser finds in this loss."""
        if self._tied_elsewhere is not None and not self.qvalue_network.module.detach_embedding:
            raise ValueError(
                "The Q head trains the embedding that it is tied to (detach_embedding=False), which is not part of "
                f"this {type(self).__name__}, so that no optimiser would find it: tie it to the actor's head or to an "
                "embedding within the trunk that Q reads, such as lm.get_input_embeddings()."
            )

    @property
    def _tied_elsewhere(self) -> Tensor | None:
        """The embedding ``[V, D]`` that Q is tied to, if it is in none of the loss's networks."""
        head = getattr(self.qvalue_network, "module", None)
        if not isinstance(head, TiedQValueHead):
            return None
        weight: Any = head.embedding.weight
        return None if any(parameter is weight for parameter in self.parameters()) else weight

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (embedding := self._tied_elsewhere) is not None:
            destination[prefix + _TIED] = fingerprint([("weight", embedding)])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if (embedding := self._tied_elsewhere) is None:
            return
        _, _, missing, unexpected, errors = args
        key = prefix + _TIED
        if key not in state_dict:
            missing.append(key)
            return
        unexpected.remove(key)
        if not torch.equal(state_dict[key].cpu(), fingerprint([("weight", embedding)])):
            errors.append(
                "The state was made beside another language model than that whose embedding the Q head of this "
                f"{type(self).__name__} reads, or in another dtype: load that model's weights first."
            )

    @property
    def value_trunk_params(self) -> TensorDict:
        """Parameters of the trunk that Q and V read: the source of ``target_value_trunk_params``."""
        return TensorDict.from_module(self._value_trunk)

    @property
    def _value_trunk(self) -> TensorDictModule:
        return split_actor(self.language_actor).trunk if self.value_trunk is None else self.value_trunk

    def _run_trunks(self, batch: TransitionBatch, reads_policy: bool) -> tuple[TensorDictBase, TensorDictBase]:
        """The rows with what the policy's head reads, unless no term does, and with what the values' heads read."""
        runs = reads_policy or self.value_trunk is None
        actor_rows = split_actor(self.language_actor).trunk(batch.rows.copy()) if runs else batch.rows
        return actor_rows, actor_rows if self.value_trunk is None else self.value_trunk(batch.rows.copy())

    def _qvalues(self, batch: TransitionBatch, rows: TensorDictBase) -> QValues:
        """Online Q at the decisions."""
        states = gather_inputs(self.qvalue_network.in_keys, rows, batch.place)
        if not self._heads["qvalue_network"].tried:
            with torch.no_grad(), self.qvalue_network_params.to_module(self.qvalue_network):
                self._read_head("qvalue_network", states[:1])
        return QValues(
            self.qvalue_network,
            self.qvalue_network_params,
            states.detach() if self.detach_qvalue else states,
            batch.action,
            self._head_key("qvalue_network"),
            batch.counted,
        )

    @torch.no_grad()
    def _target_values(self, batch: TransitionBatch, rows: TensorDictBase) -> Tensor:
        """Clipped minimum of the target heads at the taken action, ``[N]``."""
        rows = self._target_rows(batch, rows)
        states = gather_inputs(self.qvalue_network.in_keys, rows, batch.place).detach()
        with lent(self.target_qvalue_network_params, self.qvalue_network):
            key = self._head_key("qvalue_network")
            target = taken_values(self.qvalue_network, states, batch.action, key).amin(-1)
        return self._clipped(target)

    def _target_rows(self, batch: TransitionBatch, rows: TensorDictBase) -> TensorDictBase:
        """The rows with what the target heads read, without dropout: of the target trunk where there is one."""
        trunk = self._value_trunk
        if not self.has_target_trunk:
            return without_dropout(trunk, batch.rows, rows)
        with lent(self.target_value_trunk_params, trunk):
            return trunk(batch.rows.copy())

    def _clipped(self, target: Tensor) -> Tensor:
        """Target values within their bounds."""
        if self.value_min is None and self.value_max is None:
            return target
        return target.clamp(self.value_min, self.value_max)

    def _vocabulary_term(
        self, term: Callable[..., Tensor], batch: TransitionBatch, qvalues: QValues, **options: Any
    ) -> Tensor:
        """Reduce a term ``(action_value [N, n_q, V], action [N], **options) -> [N, n_q]``, summed over the heads.

        Where the vocabulary is large and the head has a method of the same name, that computes it chunk by chunk.
        """
        head = getattr(self.qvalue_network, "module", None)
        vocabulary = getattr(head, "vocab_size", None)
        if vocabulary is None or not hasattr(head, term.__name__) or not in_chunks(self.logits_chunk, vocabulary):
            return self._reduce_decisions(term(qvalues.table, batch.action, **options).sum(-1), batch)
        chunk_size = self.logits_chunk if isinstance(self.logits_chunk, int) else None
        recompute = self.reduction == "none"
        total, each = qvalues.in_chunks(term.__name__, chunk_size=chunk_size, recompute=recompute, **options)
        if recompute:
            return batch.at_decisions(each).reshape(batch.shape)
        return total if self.reduction == "sum" else total / batch.number


class ValueRowLoss(QValueRowLoss):
    """Base of the losses with Q and V heads on a trunk. Abstract, as :class:`QValueRowLoss`."""

    @dataclass
    class _AcceptedKeys(QValueRowLoss._AcceptedKeys):
        """The keys of :class:`QValueRowLoss` and that of the state value."""

        state_value: NestedKey = STATE_VALUE

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    value_network: TensorDictModule
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams

    detach_value: bool
    """No gradient flows from V into the trunk."""

    def _set_networks(
        self,
        actor_network: UtteranceActor | ProbabilisticTensorDictSequential,
        qvalue_network: nn.Module,
        value_network: nn.Module,
        value_trunk: TensorDictModule | None,
        target_trunk: bool,
    ) -> None:
        """Check the networks and make the heads functional."""
        self._set_policy_and_qvalue(actor_network, qvalue_network, value_trunk)
        network = self._checked_head("value_network", value_network, STATE_VALUE, value_trunk)
        self.convert_to_functional(network, "value_network")
        self._set_value_trunk(value_trunk, target_trunk)

    def _state_values(self, batch: TransitionBatch, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """V(s) and V(s') of the decisions, each ``[N]``, from the rows with what the values' trunk wrote."""
        inputs = gather_inputs(self.value_network.in_keys, rows, batch.state_place)
        with self.value_network_params.to_module(self.value_network):
            value = self._read_head("value_network", inputs.detach() if self.detach_value else inputs).squeeze(-1)
        return value[batch.state], value[batch.state + 1]
