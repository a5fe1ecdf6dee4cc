"""Values of whole utterances, by which sampled candidates are ranked."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_lang.modules.actor import UTTERANCE_VALUE
from torchrl_lang.modules.decoding.guidance import ValueGuidance
from torchrl_lang.modules.decoding.model_runner import apply_head
from torchrl_lang.modules.trunk import Trunk

__all__ = ["UtteranceValueGuidance"]


class UtteranceValueGuidance(ValueGuidance):
    """Values of finished utterances for ranking: the next-token distribution stays the language model's.

    The policy of ILQL with one value an utterance (arXiv 2206.11871) samples candidates and plays the one with the
    highest ``end_value_weight * min_k Q_k + log_prob_weight * log pi(u | s)``. Q reads the last state of the utterance,
    in which its end is written: ``UtteranceActor(..., method="best_of", candidates=N, end_value_weight=1,
    log_prob_weight=w)``.

    Args:
        qvalue: usually with the target parameters: a :class:`UtteranceQValueHead`, or a TensorDictModule that writes
            ``utterance_value`` ``[N, n_q]``.
        value_trunk: the values' own trunk, or a TensorDictModule over one, if they do not share the actor's.

    Raises:
        ValueError: ``qvalue`` writes other keys.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import UtteranceQValueHead, UtteranceValueGuidance
        >>> guidance = UtteranceValueGuidance(UtteranceQValueHead(8))
        >>> guidance.end_value({"hidden": torch.randn(3, 8)}).shape
        torch.Size([3])
    """

    _values = UTTERANCE_VALUE

    def __init__(self, qvalue: nn.Module, *, value_trunk: Trunk | TensorDictModuleBase | None = None) -> None:
        super().__init__(qvalue, beta=0.0, value_trunk=value_trunk)

    def end_value(self, states: Mapping[str, Tensor], end_of_action: int | None = None) -> Tensor:
        """``min_k Q_k`` of the utterance that ends in each state, ``[N]``."""
        return apply_head(self.qvalue, self._own(states), UTTERANCE_VALUE).amin(-1)

    def _term(self, states: Mapping[str, Tensor], tokens: Tensor | None = None) -> Tensor:
        """Zero for every token, ``[]``."""
        return next(iter(states.values())).new_zeros(())
