"""A trunk for critics with privileged information: facts of training only, like a hidden word or reference solution."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_lang.modules.features import behind, in_front
from torchrl_lang.modules.trunk import HIDDEN, Trunk, trunk_module
from torchrl_lang.schema import ATTENTION_MASK, PRIVILEGED, PRIVILEGED_MASK, TOKENS, find_entry


class PrivilegedTrunk(TensorDictModuleBase):
    """Runs a trunk over rows that begin with privileged information: the values' trunk of an asymmetric critic.

    A critic is used in training only, so it may read what the policy must not: the hidden word of a game, a reference
    solution, the other player's goal (asymmetric actor-critic, arXiv 1710.06542; for language agents SWEET-RL, arXiv
    2503.15478). Returns depend on it, so such a critic predicts them better, and advantages have less variance. Since
    the privileged information precedes every action, the policy gradient stays unbiased.

    The tokens ``privileged`` of each row are put in front of its tokens, without a gap; the states of the row's own
    positions come back. Attention is causal, so every state of the row sees all privileged tokens.

    Pass it as ``value_trunk`` of :class:`~torchrl_lang.objectives.PPOLoss`, over a language model of its own: the
    policy's model would learn from the values to expect tokens that it never gets. Let
    :meth:`~torchrl_lang.objectives.PPOLoss.estimate` compute the values, ``reuse_values=False``. Action values that
    guide decoding must not read privileged information, because it is not there when the policy acts.

    Args:
        trunk: the critic's trunk; its positions hold the privileged tokens and the row.

    Reads ``tokens`` (int64) and ``attention_mask`` (bool), both ``[*B, T]``, ``privileged`` (int64 ``[*B, F]``, token
    ids) and, unless all of these are real, ``privileged_mask`` (bool ``[*B, F]``; others take no place). A trunk that
    reads features (:func:`~torchrl_lang.modules.with_features`, of the trunk or of this module) reads them first.
    Writes ``hidden`` ``[*B, T, H]``.

    Raises:
        KeyError: the rows have no ``privileged`` entry.
        ValueError: rows and privileged tokens together exceed the model's positions; the shapes do not fit.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import PrivilegedTrunk, Trunk, causal_lm
        >>> trunk = PrivilegedTrunk(Trunk(causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)))
        >>> rows = TensorDict(
        ...     tokens=torch.randint(11, (3, 5)),
        ...     attention_mask=torch.ones(3, 5, dtype=torch.bool),
        ...     privileged=torch.randint(11, (3, 2)),
        ...     batch_size=[3],
        ... )
        >>> trunk(rows)["hidden"].shape
        torch.Size([3, 5, 8])
    """

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk = trunk_module(trunk)
        self.in_keys = [*self.trunk.in_keys, PRIVILEGED, PRIVILEGED_MASK]
        self.out_keys = [HIDDEN]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the states of the rows' positions into ``tensordict``."""
        tokens, attention = tensordict.get(TOKENS), tensordict.get(ATTENTION_MASK)
        advice = "EpisodeRows(keep=['privileged']) keeps it."
        privileged = find_entry("PrivilegedTrunk", PRIVILEGED, advice, tensordict)
        real = tensordict.get(PRIVILEGED_MASK, None)
        real = torch.ones_like(privileged, dtype=torch.bool) if real is None else real
        joined = in_front(privileged.to(tokens.dtype), real, tokens)
        number = real.sum(-1)  # [*B]
        length = (number + attention.sum(-1)).unsqueeze(-1)
        read = torch.arange(joined.shape[-1], device=tokens.device) < length
        out = self.trunk(tensordict.copy().update({TOKENS: joined, ATTENTION_MASK: read}))
        return tensordict.set(HIDDEN, behind(out.get(HIDDEN), number, tokens.shape[-1]))
