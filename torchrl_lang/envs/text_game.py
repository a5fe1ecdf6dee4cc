"""Text games in plain Python, strings in and strings out, as a batched language environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.data.tokenizers import Tokenizer
from torchrl_lang.envs.language_env import LanguageEnv, Reply, TaskState
from torchrl_lang.envs.rows import Rows, Utterance
from torchrl_lang.functional import random_index

__all__ = ["TextGame", "TextGameEnv"]

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""What a game reads where the tokenizer has no text for what the agent wrote."""


@runtime_checkable
class TextGame(Protocol):
    """One player's game. The same seed begins the same game; all chance comes from the seed."""

    def reset(self, seed: int) -> str:
        """Begin a game. Returns its opening words; empty where the player speaks first."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """The answer (may be empty), the reward of this turn, and whether the task has ended."""


class TextGameEnv(LanguageEnv):
    r"""A batch of plain-Python games; each row of the batch has its own game object.

    Every episode has a game seed, drawn from the environment's seed and the number of the episode. A reset tensordict
    may name it instead, ``game_seed`` int64 ``[*B]`` (and names it again where the tensordict is used again), or the
    keyword, ``reset(game_seed=...)``: wrapped environments take the keyword only (see
    :class:`~torchrl_lang.envs.LanguageEnv`). :attr:`game_seed` tells the seeds in play.

    ``reset(tensordict, set_state=True)`` begins the games of ``game_seed`` anew and plays the agent's part of the rows
    again. The row so played must be the row that came, token for token and reward for reward: a game whose chance does
    not come from its seed, or a row of another seed, is an error.

    What the agent writes never crashes the game loop: control tokens reach the game by name, and an utterance that the
    tokenizer cannot decode as ``"\N{REPLACEMENT CHARACTER}"``. What a game says must be encodable. Where a game
    fails, the error says which one and what it was told, and the next call must be a full reset. For games that take
    their time, play several environments side by side in a ``ParallelEnv``.

    Args:
        make_game: makes a new game; called once for every row of the batch.
        tokenizer, row_length, action_length, max_turns, batch_size, seed, device: as in
            :class:`~torchrl_lang.envs.LanguageEnv`.

    Raises:
        ValueError: the tokenizer cannot encode what a game says (the message names the game and the text); on
            ``reset``, a row is not what its game seed plays.

    Examples:
        >>> from torchrl_lang.data import CharTokenizer
        >>> from torchrl_lang.envs import TextGameEnv
        >>> class Parrot:
        ...     def reset(self, seed):
        ...         return "say"
        ...     def step(self, text):
        ...         return text, float(len(text)), text == "bye"
        >>> env = TextGameEnv(Parrot, CharTokenizer.from_alphabet("abesy"), row_length=32, action_length=4)
        >>> env.tokenizer.decode(env.reset()["tokens"][0, :5])
        '<s>say</s>'
    """

    _reset_entries = ("game_seed",)

    def __init__(
        self,
        make_game: Callable[[], TextGame],
        tokenizer: Tokenizer,
        *,
        row_length: int,
        action_length: int,
        max_turns: int | None = None,
        batch_size: int | Sequence[int] = (1,),
        seed: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(
            tokenizer,
            row_length=row_length,
            action_length=action_length,
            max_turns=max_turns,
            batch_size=batch_size,
            seed=seed,
            device=device,
        )
        self._games = [make_game() for _ in range(self._n)]

    @property
    def game_seed(self) -> Tensor:
        """The seeds of the games in play, int64 ``[*B]``."""
        if self._rows is None:
            raise RuntimeError("No game has begun: call reset() first.")
        return self._task["game_seed"].clone().reshape(self.batch_size)

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        named = self._named(options, "game_seed")
        seed = self._draw_seeds(episode) if named is None else named
        texts: list[list[int]] = [[] for _ in self._games]
        with self._all_or_none():
            seeds = dict(zip(_true(fresh), seed[fresh].tolist(), strict=True))
            for row, text in self._begin_all(seeds):
                texts[row] = self._encode(text, row, seeds[row])
            standing = self._standing()
        return *self._pad(texts), {"game_seed": seed, **standing}

    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        texts: list[list[int]] = [[] for _ in self._games]
        rewards, ended = [0.0] * self._n, [False] * self._n
        seeds, lengths, said = (values.tolist() for values in (task["game_seed"], utterance.length, utterance.tokens))
        with self._all_or_none():
            utterances = {row: said[row][: lengths[row]] for row in _true(live)}
            for row, (text, rewards[row], ended[row]) in self._play_all(utterances, seeds):
                texts[row] = self._encode(text, row, seeds[row])
            standing = self._standing()
        tokens, length = self._pad(texts)
        reward = torch.tensor(rewards, dtype=torch.float32, device=self.device)
        return Reply(tokens, length, reward, torch.tensor(ended, device=self.device)), {**task, **standing}

    def _restore(self, rows: Rows, task: TaskState, fresh: Tensor, options: TensorDictBase | None) -> TaskState:
        with self._all_or_none():
            if self._named(options, "game_seed") is None:
                raise KeyError(
                    "reset(tensordict, set_state=True) needs the seeds of the rows, 'game_seed', too: as an entry, or "
                    "by keyword where the environment is wrapped."
                )
            seeds, lengths = task["game_seed"].tolist(), rows.length.tolist()
            for row in _true(fresh):
                came = [values[row, : lengths[row]].tolist() for values in rows[:3]]
                played = self._replay(row, seeds[row], *came[:2])
                if played != (came[0], came[2]):
                    raise ValueError(
                        f"Row {row} is not what game seed {seeds[row]} plays. It reads {self._decode(came[0])!r} with "
                        f"rewards {[r for r in came[2] if r]}, the game {self._decode(played[0])!r} with rewards "
                        f"{[r for r in played[1] if r]}."
                    )
        return task

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Until the end of the block there are no rows: a game that fails leaves the others a turn ahead of theirs."""
        rows, self._rows = self._rows, None
        yield
        self._rows = rows

    # -- all games, one after the other; what plays them side by side says so here -------------------------------------

    def _draw_seeds(self, episode: Tensor) -> Tensor:
        """Seeds of episodes that came without, int64 ``[N]``."""
        return random_index(self._key, episode, 2**31)

    def _begin_all(self, seeds: Mapping[int, int]) -> Iterable[tuple[int, str]]:
        """Begin the games of some rows with their seeds; rows and opening words."""
        return ((row, self._begin(row, seed)) for row, seed in seeds.items())

    def _play_all(
        self, utterances: Mapping[int, list[int]], seeds: Sequence[int]
    ) -> Iterable[tuple[int, tuple[str, float, bool]]]:
        """Tell the games of some rows what was said; rows, and answer, reward and whether the game has ended."""
        return ((row, self._play(row, ids, seeds[row])) for row, ids in utterances.items())

    def _standing(self) -> TaskState:
        """What is known of the games beside their seeds, in tensors ``[N, ...]``."""
        return {}

    # -- one game ------------------------------------------------------------------------------------------------------

    def _begin(self, row: int, seed: int) -> str:
        try:
            return self._games[row].reset(seed)
        except Exception as error:
            error.add_note(f"Game {row} of the batch was being reset with seed {seed}.")
            raise

    def _play(self, row: int, ids: list[int], seed: int) -> tuple[str, float, bool]:
        said = self._decode(ids)
        try:
            text, reward, terminated = self._games[row].step(said)
            return text, float(reward), bool(terminated)
        except Exception as error:
            error.add_note(f"Game {row} of the batch (seed {seed}) was being told {said!r}.")
            raise

    def _replay(self, row: int, seed: int, tokens: list[int], agent: list[bool]) -> tuple[list[int], list[float]]:
        """Play the agent's part of a row in the game that has just begun; returns the row so written."""
        control = self.tokenizer.control
        opening = self._encode(self._begin(row, seed), row, seed)
        ids = [control.begin_state, *opening, control.end_of_state] if opening else [control.begin_action]
        rewards = [0.0] * len(ids)
        said: list[int] = []
        for token, is_agent in zip(tokens, agent, strict=True):
            if token == control.end_of_action:
                text, reward, terminated = self._play(row, said, seed)
                turn = [*said, token, *self._encode(text, row, seed)]
                earned = [0.0] * len(turn)
                earned[len(said) - (0 if is_agent else 1)] = reward
                if len(turn) > len(said) + 1:
                    turn.append(control.end_of_state)
                if terminated:
                    turn.append(control.end_of_dialogue)
                ids, rewards, said = ids + turn, rewards + earned + [0.0] * (len(turn) - len(earned)), []
            elif is_agent:
                said.append(token)
        return ids, torch.tensor(rewards, dtype=torch.float32).tolist()

    # -- text ----------------------------------------------------------------------------------------------------------

    def _encode(self, text: str, row: int, seed: int) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"Game {row} of the batch (seed {seed}) said {text!r}, which the tokenizer cannot encode: {error} "
                f"Take a tokenizer that knows all the game's words."
            ) from error

    def _decode(self, ids: list[int]) -> str:
        try:
            return self.tokenizer.decode(ids)
        except (ValueError, LookupError):
            return UNREADABLE

    def _pad(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """int64 ``[N, R]``, right-padded, and the lengths, int64 ``[N]``."""
        width = max(map(len, texts))
        pad = self.tokenizer.control.pad
        tokens = [text + [pad] * (width - len(text)) for text in texts]
        length = [len(text) for text in texts]
        return (
            torch.tensor(tokens, dtype=torch.int64, device=self.device).reshape(self._n, width),
            torch.tensor(length, dtype=torch.int64, device=self.device),
        )


def _true(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()
