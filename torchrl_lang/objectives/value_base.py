"""Losses with Q and V over a trunk: which networks there are, and what they say at the decisions of a batch."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor

from torchrl_lang.functional.checks import finite
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.modules.tied_qvalue_head import TiedQValueHead
from torchrl_lang.objectives.base import (
    DecisionBatch,
    LogitsChunk,
    RowLoss,
    gather_inputs,
    in_pieces,
)
from torchrl_lang.objectives.checks import check_actor, check_head, check_vocabularies

__all__ = ["ValueRowLoss", "Values"]


class Values(NamedTuple):
    """Estimates at the ``N`` decisions of a batch."""

    state: Tensor
    """float ``[N]``: V(s)."""
    next_state: Tensor
    """float ``[N]``: V(s'), of the bootstrap state behind a row's last decision."""
    taken: Tensor | None
    """float ``[N, n_q]``: Q(s, a) of the taken action; None where no term reads it."""
    full: Tensor | None
    """float ``[N, n_q, V]``: Q(s, .), only where a term reads the whole vocabulary."""
    target: Tensor | None
    """float ``[N]``: clipped minimum of the target heads at (s, a), without gradient; None where no term reads it."""
    terms: dict[str, tuple[Tensor, Tensor]]
    """Terms over the vocabulary by the network's own methods: the sum over what counts, and each ``[N]``."""


class ValueRowLoss(RowLoss):
    """Base of the losses with Q and V heads on a trunk. Abstract: a loss fills in ``forward``.

    The trunk is a stateful module that runs once a batch. Only the heads are functional, with target parameters of Q
    that TorchRL's target updaters find; so is a target trunk, where one is asked for, since it needs no gradient.

    Args:
        actor_network: the language-model actor, or an :class:`~torchrl_lang.modules.UtteranceActor` over one.
        qvalue_network: ``hidden [N, H] -> action_value [N, n_q, V]``.
        value_network: ``hidden [N, H] -> state_value [N, 1]``.
        value_trunk: a trunk of its own for Q and V.
        target_trunk: the target heads read a slowly following copy of the trunk.
        value_min: least target Q.
        value_max: greatest target Q.
        detach_value: no gradient from V into the trunk.
        detach_qvalue: no gradient from Q into the trunk.
        logits_chunk: see :class:`~torchrl_lang.objectives.ILQLLoss`.
        reduction: see :class:`RowLoss`.
    """

    @dataclass
    class _AcceptedKeys(RowLoss._AcceptedKeys):
        """The keys of :class:`RowLoss` and those of the values."""

        action_value: NestedKey = "action_value"
        state_value: NestedKey = "state_value"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    actor_network: UtteranceActor | ProbabilisticTensorDictSequential
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
        actor_network: UtteranceActor | ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule,
        value_network: TensorDictModule,
        *,
        value_trunk: TensorDictModule | None = None,
        target_trunk: bool = False,
        value_min: float | None = None,
        value_max: float | None = None,
        detach_value: bool = False,
        detach_qvalue: bool = False,
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__(reduction, logits_chunk)
        name = type(self).__name__
        check_actor(name, actor_network)
        check_head(name, "qvalue_network", qvalue_network, self.tensor_keys.action_value, "qvalue_module")
        check_head(name, "value_network", value_network, self.tensor_keys.state_value, "value_module")
        check_vocabularies(actor_network, qvalue_network)
        for option, bound in (("value_min", value_min), ("value_max", value_max)):
            if bound is not None:
                finite(option, bound, low=None)
        if value_min is not None and value_max is not None and value_min > value_max:
            raise ValueError(f"value_min={value_min} lies above value_max={value_max}.")
        self.actor_network = actor_network
        self.convert_to_functional(qvalue_network, "qvalue_network", create_target_params=True)
        self.convert_to_functional(value_network, "value_network")
        self.value_trunk = value_trunk
        self.has_target_trunk = target_trunk
        if target_trunk:
            frozen = self.value_trunk_params.apply(lambda parameter: parameter.data.clone(), filter_empty=False)
            self.target_value_trunk_params = TensorDictParams(frozen, no_convert=True)
            self._has_update_associated["value_trunk"] = False
        self._check_tie()
        self.value_min, self.value_max = value_min, value_max
        self.detach_value, self.detach_qvalue = detach_value, detach_qvalue

    def _check_tie(self) -> None:
        """Raise where Q would train an embedding that no optimiser finds in this loss."""
        head = getattr(self.qvalue_network, "module", None)
        if not isinstance(head, TiedQValueHead) or head.detach_embedding:
            return
        if all(parameter is not head.embedding.weight for parameter in self.parameters()):
            raise ValueError(
                "The Q head trains the embedding that it is tied to (detach_embedding=False), which is not part of "
                f"this {type(self).__name__}, so that no optimiser would find it: tie it to the actor's head or to an "
                "embedding within the trunk that Q reads, such as lm.get_input_embeddings()."
            )

    @property
    def language_actor(self) -> ProbabilisticTensorDictSequential:
        """Trunk, head and distribution of the policy."""
        return RowScorer(self.actor_network).language_actor

    @property
    def value_trunk_params(self) -> TensorDict:
        """Parameters of the trunk that Q and V read: the source of ``target_value_trunk_params``."""
        return TensorDict.from_module(self._value_trunk)

    @property
    def _value_trunk(self) -> TensorDictModule:
        return split_actor(self.language_actor).trunk if self.value_trunk is None else self.value_trunk

    def target_qvalue_network(self) -> TensorDictModule:
        """The Q network with the target parameters, as a module of its own that shares them and follows them.

        What a :class:`~torchrl_lang.modules.ValueGuidance` reads when the policy speaks.
        """
        network = deepcopy(self.qvalue_network)
        self.target_qvalue_network_params.to_module(network, preserve_module_state=False)
        return network

    def _values(
        self,
        batch: DecisionBatch,
        rows: TensorDictBase,
        *,
        full: bool,
        taken: bool,
        target: bool,
        short_cuts: dict[str, dict[str, Any]],
    ) -> Values:
        """Estimates that are asked for, from the rows with what the values' trunk wrote.

        ``short_cuts`` names methods of the Q network that compute a term over the vocabulary, with their options.
        """
        state_value = self._state_values(batch, rows)
        found, taken_value = self._short_cut_terms(batch, rows, short_cuts)
        full_value = None
        if full or (taken and taken_value is None):
            full_value, taken_value = self._action_values(batch, rows, full=full)
        return Values(
            state=state_value[batch.state],
            next_state=state_value[batch.state + 1],
            taken=taken_value,
            full=full_value,
            target=self._target_values(batch, rows) if target else None,
            terms=found,
        )

    def _state_values(self, batch: DecisionBatch, rows: TensorDictBase) -> Tensor:
        """V at all states, ``[S]``."""
        inputs = gather_inputs(self.value_network, rows, batch.state_place)
        with self.value_network_params.to_module(self.value_network):
            out = self.value_network(inputs.detach() if self.detach_value else inputs)
        return upcast_half(out.get(self.tensor_keys.state_value).squeeze(-1))

    def _action_values(
        self, batch: DecisionBatch, rows: TensorDictBase, *, full: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Online Q at decisions: over the vocabulary where a term needs it, and of the taken action."""
        inputs = gather_inputs(self.qvalue_network, rows, batch.place)
        inputs = inputs.detach() if self.detach_qvalue else inputs
        with self.qvalue_network_params.to_module(self.qvalue_network):
            if not full:
                return None, self._taken(inputs, batch.action)
            everything = upcast_half(self.qvalue_network(inputs).get(self.tensor_keys.action_value))
        return everything, _pick(everything, batch.action)

    def _has_short_cut(self, name: str) -> bool:
        """Whether a term over the vocabulary comes from the network's own method, without the whole table."""
        module = getattr(self.qvalue_network, "module", None)
        vocabulary = getattr(module, "vocab_size", None)
        return vocabulary is not None and hasattr(module, name) and in_pieces(self.logits_chunk, vocabulary)

    def _short_cut_terms(
        self, batch: DecisionBatch, rows: TensorDictBase, short_cuts: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor | None]:
        """Terms by the network's own methods, and Q of the taken action ``[N, n_q]``, which comes with each."""
        if not short_cuts:
            return {}, None
        place, action, back = batch.place, batch.action, None
        if batch.counted is not None:
            # Leave out rather than multiply: a masked value may be infinite.
            back = batch.counted.nonzero().squeeze(-1)
            place, action = place[back], action[back]
        inputs = gather_inputs(self.qvalue_network, rows, place)
        inputs = inputs.detach() if self.detach_qvalue else inputs
        states = [inputs.get(key) for key in self.qvalue_network.in_keys]
        terms, taken_value = {}, None
        with self.qvalue_network_params.to_module(self.qvalue_network):
            for name, options in short_cuts.items():
                total, each, taken = getattr(self.qvalue_network.module, name)(*states, action, **options)
                terms[name] = total, _put_back(each.sum(-1), back, batch)
                taken_value = _put_back(taken, back, batch) if taken_value is None else taken_value
        return terms, taken_value

    def _reduce_term(self, term: tuple[Tensor, Tensor], batch: DecisionBatch) -> Tensor:
        """Reduce a term that came with its sum."""
        total, each = term
        if self.reduction == "none":
            return batch.scatter(each).reshape(batch.shape)
        return total if self.reduction == "sum" else total / self._number(batch)

    @torch.no_grad()
    def _target_values(self, batch: DecisionBatch, rows: TensorDictBase) -> Tensor:
        """Clipped minimum of the target heads at the taken action, ``[N]``."""
        if self.has_target_trunk:
            trunk = self._value_trunk
            with self.target_value_trunk_params.to_module(trunk):
                rows = trunk(batch.rows.copy())
        inputs = gather_inputs(self.qvalue_network, rows, batch.place).detach()
        with self.target_qvalue_network_params.to_module(self.qvalue_network):
            target = self._taken(inputs, batch.action).amin(-1)
        if self.value_min is None and self.value_max is None:
            return target
        return target.clamp(self.value_min, self.value_max)

    def _taken(self, inputs: TensorDictBase, action: Tensor) -> Tensor:
        """Q of the taken action, ``[N, n_q]``, by the network's own short cut where it has one."""
        short_cut = getattr(getattr(self.qvalue_network, "module", None), "taken", None)
        if short_cut is not None:
            return upcast_half(short_cut(*(inputs.get(key) for key in self.qvalue_network.in_keys), action))
        return _pick(upcast_half(self.qvalue_network(inputs).get(self.tensor_keys.action_value)), action)


def _put_back(values: Tensor, back: Tensor | None, batch: DecisionBatch) -> Tensor:
    """Values of the decisions that count among all ``N``, zero elsewhere."""
    if back is None:
        return values
    return values.new_zeros((batch.place.shape[0], *values.shape[1:])).index_copy(0, back, values)


def _pick(action_value: Tensor, action: Tensor) -> Tensor:
    """The taken action's value of each head: ``[N, n_q, V]``, ``[N]`` -> ``[N, n_q]``."""
    return action_value.gather(-1, action[:, None, None].expand(-1, action_value.shape[1], 1)).squeeze(-1)
