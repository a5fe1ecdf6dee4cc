"""The base of the losses with one value for each utterance: Q heads, and which utterances count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_lang.modules.head_values import UTTERANCE_VALUE
from torchrl_lang.objectives.base import TransitionBatch
from torchrl_lang.objectives.target_qvalues import TargetQLoss
from torchrl_lang.objectives.targets import lent

__all__ = ["UtteranceValueLoss"]


class UtteranceValueLoss(TargetQLoss):
    """Base of the losses with one value for each utterance. Abstract: a loss fills in ``forward``."""

    @dataclass
    class _AcceptedKeys(TargetQLoss._AcceptedKeys):
        """The keys of :class:`RowLoss` and that of the values."""

        utterance_value: NestedKey = UTTERANCE_VALUE

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    def _qvalues(self, states: TensorDictBase) -> Tensor:
        """Online Q, ``[U, n_q]``, of the head's inputs ``[U, H]``."""
        with self.qvalue_network_params.to_module(self.qvalue_network):
            return self._read_head("qvalue_network", states)

    @torch.no_grad()
    def _target_qvalues(self, states: TensorDictBase) -> Tensor:
        """Minimum of the target heads, ``[U]``."""
        with lent(self.target_qvalue_network_params, self.qvalue_network):
            return self._read_head("qvalue_network", states.detach()).amin(-1)

    def _counted(self, batch: TransitionBatch, place: Tensor) -> Tensor:
        """Bool ``[U]``: utterances that count, by their last decisions, int64 ``[U]`` in the flattened batch."""
        return torch.ones_like(place, dtype=torch.bool) if batch.mask is None else batch.mask.flatten()[place]
