"""Continue games from given states: rows up to a turn, and further play by any policy."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_lang.data import play_to_end
from torchrl_lang.data.makers.base import Policy, cat_rows
from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.mixture_player import MixturePlayer
from torchrl_lang.envs.wordle.optimal import OptimalPlayer
from torchrl_lang.envs.wordle.scripted_players import OPENERS
from torchrl_lang.envs.wordle.words import WordIndex, wordle_tokenizer
from torchrl_lang.schema import (
    AGENT_MASK,
    ATTENTION_MASK,
    ROW_KEYS,
    TERMINATED,
    TOKEN_REWARD,
    TOKENS,
    TRAIN_MASK,
    TRUNCATED,
    entry,
)

__all__ = [
    "BRANCH_TURN",
    "GAME",
    "KIND",
    "TRIES",
    "begin_games",
    "continue_games",
    "number_of_guesses",
    "optimal_player",
    "rows_before",
    "sorted_by_game",
    "tagged",
    "task_notes",
    "without_opening",
]

KIND, GAME, BRANCH_TURN = "kind", "game", "branch_turn"
"""Entries of rows, int64 ``[N]``: the number of a row's kind, of its expert game, and of the guesses it continues."""

TRIES = 6
"""Number of guesses in the game of newspapers and recipes."""

_CONTROL = wordle_tokenizer().control


def number_of_guesses(rows: TensorDictBase) -> Tensor:
    """Number of guesses of each row, int64 ``[N]``."""
    return _guess_ends(rows).sum(-1)


def rows_before(rows: TensorDictBase, turn: Tensor) -> TensorDict:
    """The rows as they were before guess number ``turn``, counted from zero: the states of a game.

    Args:
        rows: rows ``[N, T]`` of Wordle.
        turn: int64 ``[N]``, each below the row's number of guesses.

    Returns:
        The entries of a row, ``[N, T]``; ``WordleEnv.reset(set_state=True)`` accepts them.

    Raises:
        ValueError: a row has no guess of this number.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import play_to_end
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv, rows_before
        >>> env = WordleEnv(["fuzzy"], batch_size=[1], seed=0)
        >>> rows = play_to_end(env, RandomWordPlayer(["crane"], seed=0))
        >>> state = rows_before(rows, torch.tensor([1]))
        >>> env.tokenizer.decode(state["tokens"][state["attention_mask"]])
        '<a>crane</a><b><b><b><b><b></s>'
    """
    tokens, attention, agent, reward = (entry(rows, key) for key in ROW_KEYS)
    guesses = number_of_guesses(rows)
    out = (turn < 0) | (turn >= guesses)
    if out.any():
        row = int(out.nonzero()[0])
        raise ValueError(f"Row {row} has {int(guesses[row])} guesses: there is no state before guess {int(turn[row])}.")
    ends = _guess_ends(rows)
    made, guessed = _guesses_before(ends), agent | ends
    kept = attention & ((made < turn[:, None]) | ((made == turn[:, None]) & ~guessed))
    state = {
        TOKENS: torch.where(kept, tokens.long(), _CONTROL.pad),
        ATTENTION_MASK: kept,
        AGENT_MASK: agent & kept,
        TOKEN_REWARD: reward * kept,
    }
    return TensorDict(state, batch_size=rows.batch_size, device=tokens.device)


def continue_games(env: WordleEnv, policy: Policy, rows: TensorDictBase) -> TensorDict:
    """Let a policy play unfinished games to their end, on from the state of each row.

    The hidden word of each game is drawn uniformly from the words that fit the row's colours: as the environment draws
    it uniformly at first, this is its distribution given the game so far.

    Args:
        env: the environment, of any batch size; games are played in batches of this size.
        policy: reads a row, writes ``action``.
        rows: unfinished rows ``[N, T]`` of this environment, ``N`` at least 1.

    Returns:
        The finished rows ``[N]`` in the same order, on the CPU.

    Raises:
        ValueError: a row is finished, or no word of the environment fits its colours.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import play_to_end
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv, continue_games, rows_before
        >>> words = ["crane", "slate", "point", "crate"]
        >>> env, player = WordleEnv(words, batch_size=[4], seed=0), RandomWordPlayer(words, seed=0)
        >>> states = rows_before(play_to_end(env, player), torch.zeros(4, dtype=torch.int64))
        >>> bool(continue_games(env, player, states)["terminated"].all())
        True
    """
    n, blocks = env.batch_size.numel(), []
    for block in rows.select(*ROW_KEYS).split(n):
        # The last block is filled up with its first row.
        filled = block[torch.arange(n) % len(block)] if len(block) < n else block
        given: dict[str, Any] = {key: filled.get(key).reshape(*env.batch_size, -1) for key in ROW_KEYS}
        start = env.reset(set_state=True, **given)
        for player in policy.modules() if isinstance(policy, nn.Module) else ():
            if isinstance(player, MixturePlayer):
                player.begin_games()
        blocks.append(play_to_end(env, policy, start, reward_key=None).cpu()[: len(block)])
    return cat_rows(blocks)


def begin_games(env: WordleEnv, policy: Policy, games: int) -> TensorDict:
    """Finished rows ``[games]`` of new games, on the CPU."""
    waves = range(0, games, env.batch_size.numel())
    return cat_rows([play_to_end(env, policy, reward_key=None).cpu() for _ in waves])[:games]


def tagged(rows: TensorDict, kind: int, game: Tensor, turn: Tensor | int = 0) -> TensorDict:
    """The rows with their kind, the number of their expert game, and the number of guesses that they continue."""
    entries = {KIND: torch.full_like(game, kind), GAME: game, BRANCH_TURN: torch.zeros_like(game) + turn}
    return rows.select(*ROW_KEYS, TERMINATED, TRUNCATED).update(entries)


def without_opening(rows: TensorDict) -> TensorDict:
    """The rows with a ``train_mask`` that is False on the guesses that a row continues."""
    continued = _guesses_before(_guess_ends(rows)) < rows.get(BRANCH_TURN)[:, None]
    return rows.set(TRAIN_MASK, ~(entry(rows, AGENT_MASK) & continued))


def _guess_ends(rows: TensorDictBase) -> Tensor:
    """The tokens that end a guess, bool ``[N, T]``."""
    return (entry(rows, TOKENS) == _CONTROL.end_of_action) & entry(rows, ATTENTION_MASK)


def _guesses_before(ends: Tensor) -> Tensor:
    """Number of guesses that ended before each token, int64 ``[N, T]``."""
    return ends.cumsum(-1) - ends.long()


def sorted_by_game(rows: list[TensorDict]) -> TensorDict:
    """The rows of several blocks by their expert game; within a game they keep their order."""
    every = cat_rows([block for block in rows if len(block)])
    return every[every.get(GAME).argsort(stable=True)]


def optimal_player(env: WordleEnv) -> OptimalPlayer:
    """The paper's expert for the words of an environment, with those of its openers that are valid there."""
    index = WordIndex(OPENERS)
    valid = env.is_valid(index.letters.to(env.device)).tolist()
    openers = [word for word, is_valid in zip(OPENERS, valid, strict=True) if is_valid]
    return OptimalPlayer(env.words, rules=env.rules, openers=openers or None, action_length=env.action_length)


def task_notes(env: WordleEnv) -> dict[str, Any]:
    """What the games depend on; of six tries also the name by which the recipes find the task of a dataset."""
    task = {"task": "wordle"} if env.max_tries == TRIES else {}
    return {**task, "words": list(env.words), "rules": env.rules, "max_tries": env.max_tries}
