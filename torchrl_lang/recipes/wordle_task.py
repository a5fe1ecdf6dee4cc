"""What all Wordle recipes share: which words and rules, who plays the data, how a player is judged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

from torchrl_lang.data import Tokenizer
from torchrl_lang.envs.wordle import (
    MixturePlayer,
    RandomWordPlayer,
    Rules,
    WordleEnv,
    WrongPlayer,
    common_words,
    demo_words,
    load_words,
    wordle_tokenizer,
)
from torchrl_lang.evaluation import GameRecords, Summary, play_games, summarize, unanswered
from torchrl_lang.functional.checks import one_of
from torchrl_lang.storage import Fields

__all__ = ["MEDIOCRE", "WordleTask", "mediocre_player"]

MEDIOCRE = (0.5, 0.3, 0.2)
"""Shares of careful, careless and contrary players in :func:`mediocre_player`."""


@dataclass(frozen=True)
class WordleTask:
    """The words that may be hidden, and the rules; travels with a data set in its manifest."""

    words: tuple[str, ...]
    rules: Rules = "official"

    @classmethod
    def of(cls, words: str, rules: Rules) -> WordleTask:
        """``words``: how many of the shipped ones, ``"all"`` of them, or the path of a file."""
        if words == "all":
            return cls(tuple(common_words()), rules)
        return cls(tuple(demo_words(int(words)) if words.isdigit() else load_words(words)), rules)

    @property
    def action_length(self) -> int:
        """Tokens of a guess: five letters and the end of the action."""
        return 6

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all Wordle games."""
        return wordle_tokenizer()

    def env(self, batch_size: int, **options: Any) -> WordleEnv:
        """The environment, natively batched."""
        return WordleEnv(list(self.words), [batch_size], rules=self.rules, **options)

    def example(self, seed: int | None) -> tuple[RandomWordPlayer, dict[str, Any]]:
        """A player of random words, and the options of :meth:`env` that it needs: none."""
        return RandomWordPlayer(list(self.words), rules=self.rules, seed=seed), {}

    def judge(
        self, policy: Any, *, games: int, seed: int, name: str = "", batch: int = 256, device: Any = None
    ) -> tuple[Summary, GameRecords]:
        """Play a fixed set of games and sum up."""
        env = self.env(min(batch, games), device=device)
        records = play_games(env, policy, games=games, seed=seed)
        return self.summary(records, name), records

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Figures of games that were played."""
        control = wordle_tokenizer().control
        return summarize(records, name=name, invalid=lambda games: unanswered(games.rows, control))

    def notes(self) -> dict[str, Any]:
        """For a data set's manifest."""
        return {"task": "wordle", **asdict(self)}

    @classmethod
    def from_notes(cls, notes: Fields) -> WordleTask:
        """From a data set's manifest, or a run's record.

        Raises:
            FileError: a field is missing, of another type, or no word list or rules.
        """
        words, rules = notes.list_of("words", str), notes.take("rules", str)
        try:
            one_of("rules", rules, get_args(Rules))
            return cls(tuple(load_words(words)), cast(Rules, rules))
        except ValueError as error:
            raise notes.error(f"holds no task ({str(error).rstrip('.')})") from error


def mediocre_player(task: WordleTask, *, seed: int) -> MixturePlayer:
    """Plays a fixed pile of mediocre games: each game by a careful, a careless or a contrary player.

    Careful: any word that agrees with all colours. Careless: that, or any word at all, half and half. Contrary: a word
    that the colours rule out.
    """
    words, rules = list(task.words), task.rules
    players = [
        RandomWordPlayer(words, prob_smart=1.0, rules=rules, seed=seed),
        RandomWordPlayer(words, prob_smart=0.5, rules=rules, seed=seed + 1),
        WrongPlayer(words, rules=rules, seed=seed + 2),
    ]
    return MixturePlayer(players, MEDIOCRE, per="game", seed=seed + 3)
