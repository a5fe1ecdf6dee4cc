"""The distribution over whole utterances for each row of a batch, defined by a language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from torchrl_lang.modules.decoding.decoder import Decoder, Method

__all__ = ["UtteranceDistribution"]


class UtteranceDistribution(Distribution):
    """Utterances of up to ``K`` tokens, int64 ``[*B, K]``, as continuations of rows.

    ``log_prob`` reads row and utterance in one pass, without a cache and with gradients. It equals the log-probability
    from decoding, except that decoding uses evaluation mode and this the model's current mode, so dropout in training
    mode makes them differ. Impossible utterances (with a forbidden or filtered token, or without an end) have ``-inf``;
    tokens after the end are ignored.

    Args:
        decoder: generates the utterances.
        tokens: int64 ``[*B, T]``, right-padded.
        attention_mask: bool ``[*B, T]``.
        mode: ``"greedy"`` or ``"beam"``: the search for the most likely utterance.
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.independent(constraints.nonnegative_integer, 1)
    has_rsample = False

    def __init__(self, decoder: Decoder, tokens: Tensor, attention_mask: Tensor, *, mode: Method = "greedy") -> None:
        super().__init__(tokens.shape[:-1], torch.Size([decoder.action_length]), validate_args=False)
        self.decoder = decoder
        self._mode: Method = mode
        self.tokens = tokens
        self.attention_mask = attention_mask

    def token_log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of each token, int64 ``[*B, K] -> [*B, K]``: zero after the end, ``-inf`` if impossible."""
        if action.shape != (*self.batch_shape, *self.event_shape):
            raise ValueError(
                f"Utterances of shape {(*self.batch_shape, *self.event_shape)} expected (batch, action_length), got "
                f"{tuple(action.shape)}."
            )
        k = action.shape[-1]
        flat = self.decoder.token_log_prob(
            self.tokens.reshape(-1, self.tokens.shape[-1]),
            self.attention_mask.reshape(-1, self.tokens.shape[-1]),
            action.reshape(-1, k),
        )
        return flat.reshape(action.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of each utterance, int64 ``[*B, K] -> [*B]``."""
        return self.token_log_prob(value).sum(-1)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Sample utterances, ``[*sample_shape, *B, K]``, token by token from the actor's generator."""
        shape = torch.Size(sample_shape)
        drawn = self.decoder.generate(self.tokens, self.attention_mask, method="sample", candidates=shape.numel())
        return (
            drawn.action.reshape(*self.batch_shape, shape.numel(), *self.event_shape)
            .movedim(-2, 0)
            .reshape(*shape, *self.batch_shape, *self.event_shape)
        )

    @property
    def mode(self) -> Tensor:
        """The utterance that greedy or beam decoding finds, ``[*B, K]``, not always the most likely one."""
        found = self.decoder.generate(self.tokens, self.attention_mask, method=self._mode)
        return found.action.reshape(*self.batch_shape, *self.event_shape)

    @property
    def deterministic_sample(self) -> Tensor:
        """:attr:`mode`, under TorchRL's name."""
        return self.mode
