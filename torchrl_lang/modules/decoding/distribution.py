"""The distribution over whole utterances for each row of a batch, defined by a language model."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributions import Distribution, constraints

from torchrl_lang.modules.decoding.decoder import Decoder, Method
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.row_scoring import row_log_prob

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
        features: of the rows, flattened, for models that read some.
        mode: ``"greedy"`` or ``"beam"``: the search for the most likely utterance.
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.independent(constraints.nonnegative_integer, 1)
    has_rsample = False

    def __init__(
        self,
        decoder: Decoder,
        tokens: Tensor,
        attention_mask: Tensor,
        *,
        features: RowFeatures | None = None,
        mode: Method = "greedy",
    ) -> None:
        super().__init__(tokens.shape[:-1], torch.Size([decoder.action_length]), validate_args=False)
        self.decoder = decoder
        self._mode: Method = mode
        self.tokens = tokens
        self.attention_mask = attention_mask
        self._features = features

    def token_log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of each token, int64 ``[*B, K] -> [*B, K]``: zero after the end, ``-inf`` if impossible.

        The last slot of an utterance without an end is impossible.
        """
        if action.shape != (*self.batch_shape, *self.event_shape):
            raise ValueError(
                f"Utterances of shape {(*self.batch_shape, *self.event_shape)} expected (batch, action_length), got "
                f"{tuple(action.shape)}."
            )
        if not action.numel():
            return torch.zeros(action.shape, device=action.device)
        flat = action.reshape(-1, action.shape[-1])
        tokens, length = self.tokens.reshape(-1, self.tokens.shape[-1]).long(), self.attention_mask.sum(-1).flatten()
        prompt = self.decoder.prompt(tokens, length, self._features)
        is_end = flat == self.decoder.control.end_of_action
        active = (is_end.cumsum(-1) - is_end.long()) == 0  # up to and including the first end
        if self.decoder.stop is not None:  # utterances that stop have padding instead
            active &= (flat == self.decoder.control.pad).cumsum(-1) == 0
        place = length[:, None] + torch.arange(flat.shape[-1], device=flat.device)
        tokens = torch.cat([prompt.tokens, torch.zeros_like(flat)], -1).scatter(-1, place, flat)
        position = torch.arange(tokens.shape[-1], device=flat.device)
        rows = TensorDict(
            tokens=tokens,
            attention_mask=position < (length + active.sum(-1))[:, None],
            agent_mask=torch.zeros_like(tokens, dtype=torch.bool).scatter(-1, place, active),
            batch_size=tokens.shape[:1],
        )
        if self._features is not None:
            rows.update(self._features.entries())
        return row_log_prob(self.decoder, rows).gather(-1, place).reshape(action.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of each utterance, int64 ``[*B, K] -> [*B]``."""
        return self.token_log_prob(value).sum(-1)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Sample utterances, ``[*sample_shape, *B, K]``, token by token from the actor's generator."""
        shape = torch.Size(sample_shape)
        drawn = self.decoder.generate(
            self.tokens, self.attention_mask, method="sample", candidates=shape.numel(), features=self._features
        )
        return (
            drawn.action.reshape(*self.batch_shape, shape.numel(), *self.event_shape)
            .movedim(-2, 0)
            .reshape(*shape, *self.batch_shape, *self.event_shape)
        )

    @property
    def mode(self) -> Tensor:
        """The utterance that greedy or beam decoding finds, ``[*B, K]``, not always the most likely one."""
        found = self.decoder.generate(self.tokens, self.attention_mask, method=self._mode, features=self._features)
        return found.action.reshape(*self.batch_shape, *self.event_shape)

    @property
    def deterministic_sample(self) -> Tensor:
        """:attr:`mode`, under TorchRL's name."""
        return self.mode
