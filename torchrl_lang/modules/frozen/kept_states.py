"""The states below the first trained layer that an actor computes while it acts, kept for losses and references."""

from __future__ import annotations

from torch import Tensor

_BYTES = 2**30
"""Of states that are kept at most; later rows are left out, and computed again by who needs them."""


class KeptStates:
    """States of tokens that were read, found again by the tokens of their rows.

    Args:
        name: stands for the weights that computed them, see
            :func:`~torchrl_lang.modules.frozen.frozen_states.states_name`.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.frozen.kept_states import KeptStates
        >>> kept = KeptStates("weights")
        >>> kept.add(torch.tensor([5, 7, 8]), torch.ones(3, 2))
        >>> rows, length = torch.tensor([[5, 7, 0], [6, 7, 0]]), torch.tensor([2, 2])
        >>> [None if states is None else states.tolist() for states in kept.find(rows, length)]
        [[[1.0, 1.0], [1.0, 1.0]], None]
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._room = _BYTES

    def add(self, tokens: Tensor, states: Tensor) -> None:
        """Keep the states ``[L, H]``, which must not be changed later, of a row's first tokens, int64 ``[L]``."""
        if states.nbytes <= self._room:
            self._room -= states.nbytes
            self._rows.append((tokens.cpu().clone(), states))

    def find(self, tokens: Tensor, length: Tensor) -> list[Tensor | None]:
        """For each row of tokens, int64 ``[N, T]``, the states of its first ``length`` ``[N]``; None if unknown."""
        tokens, length = tokens.cpu(), length.cpu()
        found: list[Tensor | None] = [None] * len(tokens)
        for size in length.unique().tolist():
            known = {_key(row[:size]): states for row, states in self._rows if len(row) >= size}
            for row in (length == size).nonzero().squeeze(-1).tolist():
                states = known.get(_key(tokens[row, :size]))
                found[row] = None if states is None else states[:size]
        return found


def _key(tokens: Tensor) -> bytes:
    return tokens.numpy().tobytes()
