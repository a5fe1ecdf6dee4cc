"""The rows of tokens that a policy of the language format keeps: one per stream, without its oldest episodes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ContextRows"]


class ContextRows:
    """Rows of at most ``size`` tokens and ``steps`` steps, at whose front whole episodes leave.

    The first token of a row is the control token ``begin``, which stays: a row always looks as one of
    :class:`~torchrl_lang.algorithm_distillation.language.StepRows` does that begins with an episode.

    Args:
        streams: ``N``.
        size: number of tokens of a row.
        begin: the first token.
        steps: number of steps of a row, at most; None for no limit.
        device: device of the tokens.

    Attributes:
        tokens: int64 ``[N, size]``.
        length: int64 ``[N]``.
        episode, step: int64 ``[N]``, the numbers of the running episode and step, to which tokens are appended.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.language.context_rows import ContextRows
        >>> rows = ContextRows(1, 6, begin=9)
        >>> for number in range(3):
        ...     rows.make_room(2)
        ...     rows.append(torch.tensor([[number, number]]))
        ...     rows.end_step(torch.tensor([True]))
        >>> rows.tokens[:, : rows.length[0]]
        tensor([[9, 1, 1, 2, 2]])
    """

    def __init__(
        self, streams: int, size: int, begin: int, steps: int | None = None, device: torch.device | None = None
    ) -> None:
        self.size, self.steps = size, steps
        self.tokens = torch.zeros(streams, size, dtype=torch.int64, device=device)
        self.tokens[:, 0] = begin
        self.length = torch.ones(streams, dtype=torch.int64, device=device)
        self.episode, self.step = torch.zeros_like(self.length), torch.zeros_like(self.length)
        self._episode_of, self._step_of = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens)

    def append(self, ids: Tensor, kept: Tensor | None = None) -> None:
        """Append tokens ``[N, W]``, only those that are ``kept`` ``[N, W]``."""
        kept = torch.ones_like(ids, dtype=torch.bool) if kept is None else kept
        place = self.length[:, None] + kept.cumsum(-1) - 1
        stream = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)[kept]
        self.tokens[stream, place[kept]] = ids[kept]
        self._episode_of[stream, place[kept]] = self.episode[stream]
        self._step_of[stream, place[kept]] = self.step[stream]
        self.length = self.length + kept.sum(-1)

    def end_step(self, done: Tensor) -> None:
        """Begin the next step, of a new episode where ``done`` ``[N]``."""
        self.step = self.step + 1
        self.episode = self.episode + done.to(self.episode.device)

    def make_room(self, tokens: int) -> None:
        """Evict the oldest episodes of each row in which a step of this many tokens does not fit, as few as are needed.

        Raises:
            ValueError: the running episode alone has no room.
        """
        leaving = self.length + tokens - self.size
        if self.steps is not None:
            written = torch.arange(self.size, device=self.tokens.device) < self.length[:, None]
            written[:, 0] = False  # the first token is of no step
            old = self._step_of <= (self.step - self.steps)[:, None]
            leaving = torch.maximum(leaving, (written & old).sum(-1))
        for stream in (leaving > 0).nonzero().squeeze(-1).tolist():
            length, last = int(self.length[stream]), int(leaving[stream])
            owner = self._episode_of[stream, 1:length]
            if last > len(owner) or owner[last - 1] == self.episode[stream]:
                limit = "" if self.steps is None else f" and {self.steps} steps"
                raise ValueError(
                    f"The running episode of stream {stream} has no room for {tokens} more tokens in a context of "
                    f"{self.size} tokens{limit}: make the context longer than the longest episode."
                )
            left = int((owner > owner[last - 1]).sum())
            for values in (self.tokens, self._episode_of, self._step_of):
                values[stream, 1 : 1 + left] = values[stream, length - left : length].clone()
            self.length[stream] = 1 + left
