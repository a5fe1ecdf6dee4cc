"""A frozen language model as reference of whole rows: every token of an episode in one causal pass."""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.modules.frozen.frozen_copy import HeldActor
from torchrl_lang.modules.row_scoring import RowScorer, row_log_prob
from torchrl_lang.transforms.keys import ActionKeys
from torchrl_lang.transforms.references.base import Reference

__all__ = ["RowReference"]


class RowReference(Reference):
    """Scores the agent's tokens of whole rows: one pass of the trunk, the head at decisions only.

    For batches of rows, in a replay buffer or as ``postproc`` after a conversion to rows. A language actor gives the
    plain distribution over all tokens at temperature 1. An :class:`~torchrl_lang.modules.UtteranceActor` gives the one
    that it acts by, with its temperature, filters, forbidden tokens and forced end, which compares with the
    ``token_log_prob`` of acting.

    The log-probability is float ``[*B, T]``, at the tokens that the agent wrote, zero on all others.

    Args:
        frozen: the actor, see :func:`~torchrl_lang.transforms.frozen_copy`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.transforms import RowReference, frozen_copy
        >>> lm = causal_lm(vocab_size=12, layers=1, width=16, heads=2, max_length=8)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9, 0]]),
        ...     attention_mask=torch.tensor([[True, True, True, True, False]]),
        ...     agent_mask=torch.tensor([[False, True, True, False, False]]),
        ...     batch_size=[1],
        ... )
        >>> RowReference(frozen_copy(language_actor(lm))).log_prob(rows, rows) < 0
        tensor([[False,  True,  True, False, False]])
    """

    frozen: HeldActor
    _why_no_env = (
        "A language actor scores whole rows, in a replay buffer or as postproc of a collector. In an environment pass "
        "an UtteranceActor, which scores the turn that was just taken."
    )

    def __init__(self, frozen: HeldActor) -> None:
        self.frozen = frozen
        self.scorer = RowScorer(frozen.actor)
        self.action_keys = ActionKeys.row()
        self.in_keys = list(frozen.actor.in_keys)

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        with self.frozen.eval_mode():
            return row_log_prob(self.frozen.actor, tensordict)
