"""What makes games: the base class, and games that a policy plays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from torchrl_lang._random_stream import seeded_generators
from torchrl_lang.data.rollouts import rows_at
from torchrl_lang.schema import DONE, REWARD, TOKENS
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["GameMaker", "Policy", "PolicyGames", "play_to_end", "seed_of_games"]

Policy = Callable[[TensorDictBase], TensorDictBase]
"""Reads a row, writes ``action``."""


def seed_of_games(seed: int, numbers: range) -> int:
    """The seed of the games ``numbers``, below ``2**32``: other games get an independent one.

    Examples:
        >>> from torchrl_lang.data import seed_of_games
        >>> seed_of_games(0, range(0, 10)) == seed_of_games(0, range(10, 20))
        False
    """
    return int(np.random.SeedSequence([seed, numbers.start]).generate_state(1)[0])


@torch.no_grad()
def play_to_end(
    env: EnvBase, policy: Policy, start: TensorDictBase | None = None, *, reward_key: NestedKey | None = REWARD
) -> TensorDict:
    """Let a policy play every row of an environment to its end, without beginning other games.

    Args:
        env: a batched language environment, possibly transformed.
        policy: reads a row, writes ``action``.
        start: what a reset returned; by default the environment is reset.
        reward_key: see :func:`~torchrl_lang.data.rows_from_rollout`.

    Returns:
        Rows ``[N]`` in the order of the environment's rows.

    Examples:
        >>> from torchrl_lang.data import play_to_end
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=3, batch_size=[4], seed=0)
        >>> rows = play_to_end(env, CorridorPlayer(env.tokenizer, length=3))
        >>> len(rows), bool((rows["terminated"] | rows["truncated"]).all())
        (4, True)
    """
    start = env.reset() if start is None else start
    # Each step adds a token or more, so no game has as many steps as a row has tokens.
    rollout = env.rollout(
        start.get(TOKENS).shape[-1],
        policy,
        auto_reset=False,
        tensordict=start,
        break_when_any_done=False,
        break_when_all_done=True,
    )
    done = rollout.get(("next", DONE)).squeeze(-1)
    return rows_at(rollout, done & (done.cumsum(-1) == 1), reward_key=reward_key)


class GameMaker(ABC):
    """Makes rows of games, which are numbered from zero. Abstract: subclasses implement :meth:`__call__`.

    :func:`~torchrl_lang.data.generate_in_parts` writes a maker's games to disk, :class:`~torchrl_lang.data.FreshGames`
    draws batches of new ones without end.

    Args:
        tokenizer: the tokenizer of the rows.
        row_length: the width of the rows.
    """

    def __init__(self, tokenizer: Tokenizer, row_length: int) -> None:
        self.tokenizer, self.row_length = tokenizer, row_length

    @abstractmethod
    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """The rows ``[N]`` of the games ``numbers``, one or more for each game, on the CPU.

        The result depends on the arguments only (see :func:`seed_of_games`). Entries beside those of a row,
        ``terminated`` and ``truncated`` are stored with the rows.
        """

    def notes(self) -> dict[str, Any]:
        """What the games depend on, as JSON, for the manifest of a dataset."""
        return {"maker": type(self).__name__}


class PolicyGames(GameMaker):
    """Games of one policy.

    Games are played in waves, one on each row of the environment, and all that begin are kept, so short ones are not
    preferred. What the last wave plays too many is dropped: ask for a multiple of the number of rows.

    Args:
        env: a batched language environment, possibly transformed. It is seeded and not closed.
        policy: reads a row, writes ``action``. Generators that it or its modules hold are seeded during a call (see
            :func:`~torchrl_lang._random_stream.seeded_generators`), as are torch's own.

    Examples:
        >>> from torchrl_lang.data import PolicyGames
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=3, batch_size=[4])
        >>> games = PolicyGames(env, CorridorPlayer(env.tokenizer, length=3))
        >>> rows = games(range(6), seed=0)
        >>> len(rows), bool((rows == games(range(6), seed=0)).all())
        (6, True)
    """

    def __init__(self, env: EnvBase, policy: Policy) -> None:
        super().__init__(env.tokenizer, env.observation_spec[TOKENS].shape[-1])
        self.env, self.policy = env, policy

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See :meth:`GameMaker.__call__`."""
        seed, waves = seed_of_games(seed, numbers), []
        with seeded_generators(seed, self.policy):
            self.env.set_seed(seed)
            for _ in range(0, len(numbers), self.env.batch_size.numel()):
                waves.append(play_to_end(self.env, self.policy).cpu())
        return cat_rows(waves)[: len(numbers)]

    def notes(self) -> dict[str, Any]:
        """See :meth:`GameMaker.notes`."""
        return {**super().notes(), "policy": type(self.policy).__name__}


def cat_rows(blocks: list[TensorDict]) -> TensorDict:
    """Rows ``[N]`` of several blocks with the same entries."""
    rows: Any = torch.cat(blocks, 0)  # typed as a tensor by torch
    return rows
