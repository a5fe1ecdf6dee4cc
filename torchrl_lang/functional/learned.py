"""Which positions of a row count in a loss, where not all that was said is to be learned."""

from __future__ import annotations

from torch import Tensor

from torchrl_lang.functional.decisions import decision_mask, shift_left

__all__ = ["trained_states"]


def trained_states(learned: Tensor, action_mask: Tensor) -> Tensor:
    """True where a loss counts, ``bool [*B, T]``: at every state but those whose next token is not to be learned.

    A loss's ``loss_mask_key`` takes a decision by the position of its state, one before its token. The environment's
    words, which a ``transition_weight`` has learned, count.

    Args:
        learned: bool ``[*B, T]``, False on tokens of the agent that are not to be learned; ignored elsewhere.
        action_mask: bool ``[*B, T]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import trained_states
        >>> agent = torch.tensor([False, True, True, False, True])
        >>> learned = torch.tensor([False, False, False, False, True])
        >>> trained_states(learned, agent)
        tensor([False, False,  True,  True,  True])
    """
    return shift_left(learned) | ~decision_mask(action_mask)
