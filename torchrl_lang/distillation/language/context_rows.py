"""The rows of tokens that a policy of the language format keeps: one per stream, without its oldest episodes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ContextRows"]


class ContextRows:
    """Rows of at most ``size`` tokens to which tokens are appended, whole episodes leaving at the front.

    The first token of a row is the control token ``begin``, which stays: a row always looks as one of
    :class:`~torchrl_lang.distillation.language.StepRows` does that begins with an episode.

    Args:
        streams: ``N``.
        size: number of tokens of a row.
        begin: the first token.
        device: device of the tokens.

    Attributes:
        tokens: int64 ``[N, size]``.
        length: int64 ``[N]``.
        episode: int64 ``[N]``, the number of the running episode, to which tokens are appended.

    Examples:
        >>> import torch
        >>> from torchrl_lang.distillation.language.context_rows import ContextRows
        >>> rows = ContextRows(1, 6, begin=9)
        >>> for number in range(3):
        ...     rows.make_room(2)
        ...     rows.append(torch.tensor([[number, number]]))
        ...     rows.episode += 1
        >>> rows.tokens[:, : rows.length[0]]
        tensor([[9, 1, 1, 2, 2]])
    """

    def __init__(self, streams: int, size: int, begin: int, device: torch.device | None = None) -> None:
        self.size = size
        self.tokens = torch.zeros(streams, size, dtype=torch.int64, device=device)
        self.tokens[:, 0] = begin
        self.length = torch.ones(streams, dtype=torch.int64, device=device)
        self.episode = torch.zeros_like(self.length)
        self._episode_of = torch.zeros_like(self.tokens)

    def append(self, ids: Tensor, kept: Tensor | None = None) -> None:
        """Append tokens ``[N, W]``, only those that are ``kept`` ``[N, W]``."""
        kept = torch.ones_like(ids, dtype=torch.bool) if kept is None else kept
        place = self.length[:, None] + kept.cumsum(-1) - 1
        stream = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)[kept]
        self.tokens[stream, place[kept]] = ids[kept]
        self._episode_of[stream, place[kept]] = self.episode[stream]
        self.length = self.length + kept.sum(-1)

    def make_room(self, tokens: int) -> None:
        """Evict the oldest episodes of each row in which this many tokens do not fit, as few as are needed.

        Raises:
            ValueError: the running episode alone has no room.
        """
        for stream in (self.length + tokens > self.size).nonzero().squeeze(-1).tolist():
            length = int(self.length[stream])
            owner = self._episode_of[stream, 1:length]
            kept_most = self.size - 1 - tokens  # tokens that may stay beside the first
            is_kept = owner > owner[len(owner) - 1 - kept_most] if kept_most >= 0 else owner < 0
            if kept_most < 0 or not (is_kept | (owner < self.episode[stream])).all():
                raise ValueError(
                    f"The running episode of stream {stream} has no room for {tokens} more tokens in a context of "
                    f"{self.size}: make the context longer than the longest episode."
                )
            left = int(is_kept.sum())
            for values in (self.tokens, self._episode_of):
                values[stream, 1 : 1 + left] = values[stream, length - left : length].clone()
            self.length[stream] = 1 + left
