"""An actor for the losses of TorchRL's LLM stack: a distribution over every token of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution, constraints

from torchrl_lang._checks import have_shapes
from torchrl_lang.functional import categorical_entropy, shift_left
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.schema import AGENT_MASK, TOKEN_LOG_PROB, TOKENS, entry


class RowTokenDistribution(Distribution):
    """The distribution of the agent's tokens in rows ``[*B, T]``, each conditioned on the tokens before it.

    Args:
        scorer: computes the log-probabilities.
        rows: ``tokens``, ``attention_mask`` and ``agent_mask``.
        mask: bool ``[*B, T]``, True on tokens that count.
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.nonnegative_integer
    has_rsample = False

    def __init__(self, scorer: RowScorer, rows: TensorDictBase, mask: Tensor) -> None:
        self._scorer, self._batch = scorer, DecisionBatch.read(rows)
        super().__init__(self._batch.shape, torch.Size(), validate_args=False)
        self.mask = mask
        """bool ``[*B, T]``: True on tokens that count."""
        self._states = {} if self._batch.empty else scorer.states(self._batch)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of each token, ``[*B, T]``, at least float32; zero on tokens that the agent did not write.

        Args:
            value: int64 ``[*B, T]``: the rows' own tokens.
        """
        have_shapes((TOKENS, value, tuple(self._batch.shape)))
        batch = self._batch
        if batch.empty:
            return batch.zeros()
        written = value.reshape(-1, value.shape[-1])[:, : batch.tokens.shape[-1]].long()
        batch = replace(batch, action=shift_left(written).flatten()[batch.place])
        return batch.at_tokens(self._scorer.log_prob(batch, self._states))

    def entropy(self) -> Tensor:
        """Entropy in nats of each token's distribution, ``[*B, T]``."""
        batch, scorer = self._batch, self._scorer
        if batch.empty:
            return batch.zeros()
        parts = [scorer.log_softmax(self._states, batch.place[part]) for part in scorer.parts(batch, self._states)]
        entropy = torch.cat([categorical_entropy(part) for part in parts])
        return batch.at_tokens(torch.where(scorer.certain(batch), 0.0, entropy))


class RowTokenActor(TensorDictModuleBase):
    """An actor whose action is all of the agent's tokens in a row, for TorchRL's GRPOLoss, DAPO and CISPOLoss.

    ``get_dist`` is the distribution that acting sampled from, computed in one forward pass, with gradients. Set the
    loss's keys as follows; one advantage per row is enough::

        loss = GRPOLoss(RowTokenActor(policy), entropy_bonus=False)
        loss.set_keys(action="tokens", sample_log_prob="token_log_prob")
        rows["advantage"] = group_advantages(row_returns(rows), group)[:, None, None]

    Train a model with dropout in evaluation mode, because it acts in it. The metrics ``clip_fraction``, ``kl_approx``
    and the divergences of these losses are means over all positions, including padding. For large vocabularies
    :class:`~torchrl_lang.objectives.PPOLoss` needs less memory; it takes the same advantages as ``[N, T]``.

    Args:
        actor: an :class:`~torchrl_lang.modules.UtteranceActor`, or a language actor whose tokens were sampled at
            temperature 1 over the whole vocabulary.
        mask_key: bool ``[*B, T]``, True on tokens that count in the loss, e.g. ``"train_mask"`` of
            :class:`~torchrl_lang.modules.MixedPolicy`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import RowTokenActor, causal_lm, language_actor
        >>> actor = RowTokenActor(language_actor(causal_lm(vocab_size=12, layers=1, width=16, heads=2, max_length=8)))
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9, 0]]),
        ...     attention_mask=torch.tensor([[True, True, True, True, False]]),
        ...     agent_mask=torch.tensor([[False, True, True, False, False]]),
        ...     batch_size=[1],
        ... )
        >>> dist = actor.get_dist(rows)
        >>> dist.log_prob(rows["tokens"]) < 0, dist.mask
        (tensor([[False,  True,  True, False, False]]), tensor([[False,  True,  True, False, False]]))
    """

    def __init__(
        self, actor: UtteranceActor | ProbabilisticTensorDictSequential, *, mask_key: str = AGENT_MASK
    ) -> None:
        super().__init__()
        RowScorer(actor)  # raises now rather than at the first row
        self.actor, self.mask_key = actor, mask_key
        self.in_keys = list(dict.fromkeys([*actor.in_keys, AGENT_MASK, mask_key]))
        self.out_keys = [TOKEN_LOG_PROB]

    def get_dist(self, tensordict: TensorDictBase, **_: Any) -> RowTokenDistribution:
        """The distribution over the tokens of rows ``[*B]``.

        Raises:
            KeyError: an entry is missing.
            ValueError: ``tensordict`` holds steps of a rollout instead of rows.
        """
        return RowTokenDistribution(RowScorer(self.actor), tensordict, entry(tensordict, self.mask_key))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``token_log_prob`` ``[*B, T]`` of the rows."""
        return tensordict.set(TOKEN_LOG_PROB, self.get_dist(tensordict).log_prob(entry(tensordict, TOKENS)))
