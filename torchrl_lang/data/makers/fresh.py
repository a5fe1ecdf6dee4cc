"""Fresh games without end, sampled like a replay buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_lang._checks import at_least_one
from torchrl_lang.data.makers.base import GameMaker, cat_rows
from torchrl_lang.data.replay import TrimRows

__all__ = ["FreshGames"]


class FreshGames:
    """Batches of rows of new games, without end: no row is sampled twice.

    It takes the place of :func:`~torchrl_lang.data.row_buffer` in a training loop: ``sample()`` returns a batch, and
    iteration never ends. Games are made in rounds when they are needed, and the rows of a round are shuffled. The state
    is three integers. A sampler that loads them makes the current round again and then returns the same batches as the
    original.

    Args:
        maker: makes the games, e.g. a :class:`~torchrl_lang.data.PolicyGames`.
        batch_size: rows per batch.
        games: games per round, best a multiple of the number of rows of the maker's environment. All rows of a round
            are in memory.
        seed: seed of the games and of their order.
        trim: trim batches to their longest row (see :class:`~torchrl_lang.data.TrimRows`).

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> from torchrl_lang.data import FreshGames, PolicyGames
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=3, batch_size=[16])
        >>> fresh = FreshGames(PolicyGames(env, CorridorPlayer(env.tokenizer, length=3)), batch_size=10, games=16)
        >>> [fresh.sample().shape[0] for _ in range(3)], fresh.state_dict()
        ([10, 10, 10], {'seed': 0, 'round': 1, 'position': 14})
    """

    def __init__(
        self, maker: GameMaker, batch_size: int, *, games: int = 1024, seed: int = 0, trim: bool = True
    ) -> None:
        at_least_one("batch_size", batch_size)
        at_least_one("games", games)
        if seed < 0:
            raise ValueError(f"The seed of fresh games must not be negative, got {seed}.")
        self.maker, self.batch_size, self.games, self.seed = maker, batch_size, games, seed
        self._trim = TrimRows() if trim else None
        self._round, self._position = 0, 0
        self._rows: TensorDict | None = None

    def sample(self) -> TensorDictBase:
        """The next batch ``[batch_size]``."""
        blocks: list[TensorDict] = []
        wanted = self.batch_size
        while wanted:
            rows = self._current()
            blocks.append(rows[self._position : self._position + wanted])
            self._position += len(blocks[-1])
            wanted -= len(blocks[-1])
            if self._position == len(rows):
                self._round, self._position, self._rows = self._round + 1, 0, None
        batch = cat_rows(blocks)
        return batch if self._trim is None else self._trim(batch)

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            yield self.sample()

    def _current(self) -> TensorDict:
        """The shuffled rows of the current round."""
        if self._rows is None:
            first = self._round * self.games
            rows = self.maker(range(first, first + self.games), self.seed)
            if not len(rows):
                raise ValueError(f"{self.games} games of {type(self.maker).__name__} have no row: make more a round.")
            order = np.random.default_rng([self.seed, self._round]).permutation(len(rows))
            self._rows = rows[torch.from_numpy(order)]
        return self._rows

    def state_dict(self) -> dict[str, Any]:
        """Three integers that can be written as JSON."""
        return {"seed": self.seed, "round": self._round, "position": self._position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, including its seed; the maker and ``games`` must be the same."""
        self.seed, self._round, self._position = (int(state_dict[key]) for key in ("seed", "round", "position"))
        self._rows = None
