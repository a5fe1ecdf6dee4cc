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
        >>> {row: states.shape for row, states in kept.find(rows, length).items()}
        {0: torch.Size([2, 2])}
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

    def find(self, tokens: Tensor, length: Tensor) -> dict[int, Tensor]:
        """By row of tokens, int64 ``[N, T]``, the states of its first ``length`` ``[N]``, where they are known."""
        tokens, length = tokens.cpu(), length.cpu()
        found = {}
        for size in length.unique().tolist():
            known = {_key(row[:size]): states[:size] for row, states in self._rows if len(row) >= size}
            for row in (length == size).nonzero().squeeze(-1).tolist():
                if (states := known.get(_key(tokens[row, :size]))) is not None:
                    found[row] = states
        return found


def _key(tokens: Tensor) -> bytes:
    return tokens.numpy().tobytes()
