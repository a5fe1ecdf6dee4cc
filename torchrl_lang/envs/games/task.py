"""Guessing a number and selling in a shop, in words, as a task of the recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang.envs import TextGameEnv, TextPlayer
from torchrl_lang.envs.games import GuessNumber, GuessPlayer, Shop, ShopPlayer
from torchrl_lang.envs.text_player import PlayText
from torchrl_lang.evaluation import GameRecords, Summary, summarize
from torchrl_lang.recipes.tasks.base import Player, Task, named_player
from torchrl_lang.recipes.tasks.env_task import RandomTokens
from torchrl_lang.recipes.tasks.games import PRESETS, GamesData, GamesPlay
from torchrl_lang.text import CharTokenizer, ChatTokenizer, RowFormat, Tokenizer
from torchrl_lang.text.chat_tokenizer import encode_action


class _Game(NamedTuple):
    make: Callable[..., Any]
    play: Callable[[], PlayText]
    splits: Mapping[str, Mapping[str, Any]]
    """Options of the game for each split."""
    system: str
    longest: str
    """An utterance of the scripted player that no other one exceeds."""
    secret: str
    """The hidden state of a ``{game}`` that has begun, in words."""


_THINGS = {things: {"things": things} for things in ("training", "testing")}
_GAMES = {
    "guess": _Game(
        GuessNumber,
        GuessPlayer,
        {"training": {}, "testing": {}},
        "You guess a secret number. Reply with one number.",
        "My guess is 15.",
        "the number is {game.number}",
    ),
    "shop": _Game(
        Shop,
        ShopPlayer,
        _THINGS,
        "You sell things in a shop. Reply with a price.",
        "You can have it for 117.",
        "the customer pays up to {game.limit} of {game.tag} coins",
    ),
}


@dataclass(frozen=True)
class GamesTask(Task):
    """A game in words: :class:`~torchrl_lang.envs.games.GuessNumber` or :class:`~torchrl_lang.envs.games.Shop`.

    The things of the shop's split ``"testing"`` are not sold in ``"training"``; the splits of guessing differ in their
    seeds only.

    Args:
        game: ``"guess"`` or ``"shop"``.
        pretrained: name or folder of a chat model, whose tokenizer and chat template write the rows, with a system
            message; None: rows of characters.
    """

    name: ClassVar[str] = "games"
    data_options = GamesData
    play_options = GamesPlay
    presets = PRESETS
    baselines = ("random", "scripted")
    splits = ("testing", "training")
    metric_meanings: ClassVar[Mapping[str, str]] = {"tokens": "mean number of tokens that the agent wrote in a game"}
    row_length: ClassVar[int] = 512

    game: Literal["guess", "shop"] = "guess"
    pretrained: str | None = None

    @property
    def optimum(self) -> float:
        """The greatest mean return, exact."""
        return self.make_game().optimal_return()

    @property
    def system(self) -> str:
        """The system message of a chat model."""
        return _GAMES[self.game].system

    @property
    def action_length(self) -> int:
        """Tokens of the longest utterance of the scripted player, its end, and one to spare."""
        return len(encode_action(self.tokenizer(), _GAMES[self.game].longest)) + 2

    def tokenizer(self) -> Tokenizer:
        """That of the chat model, or characters."""
        return _tokenizer(self.pretrained, self.system)

    def make_game(self, split: str = "training") -> Any:
        """A game of a split."""
        check_options(split=(split, self.splits))
        return _GAMES[self.game].make(**_GAMES[self.game].splits[split])

    def secrets(self, games: int, seed: int, split: str) -> list[str]:
        """Describe the hidden states of the first games of an evaluation."""
        env, game, found = self.env(games, split=split, seed=seed), self.make_game(split), []
        env.reset()
        for game_seed in env.game_seed.tolist():
            game.reset(game_seed)
            found.append(_GAMES[self.game].secret.format(game=game))
        return found

    def env(self, batch_size: int, *, split: str = "training", **options: Any) -> TextGameEnv:
        """The environment on the games of a split."""
        sizes: Any = {"row_length": self.row_length, "action_length": self.action_length, "batch_size": [batch_size]}
        return TextGameEnv(partial(self.make_game, split), self.tokenizer(), **sizes | options)

    def player(self, name: str, seed: int | None = None) -> Player:
        """``"random"``: random tokens; ``"scripted"``: the mediocre player of the game."""
        kinds = {
            "random": lambda: RandomTokens(self.tokenizer().control, self.action_length, seed=seed),
            "scripted": lambda: TextPlayer(_GAMES[self.game].play(), self.tokenizer(), self.action_length, seed=seed),
        }
        return Player(named_player(name, kinds)())

    def behavior_policy(self, options: GamesData) -> Player:
        """The scripted player."""
        return self.player("scripted", options.seed)

    def won(self, records: GameRecords) -> Tensor:
        """Games whose last turn was rewarded, bool ``[N]``."""
        return records.last_reward > 0

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Metrics of games, with the number of tokens."""
        return summarize(records, name=name, won=self.won, metrics={"tokens": lambda records: records.agent_tokens})


@cache
def _tokenizer(pretrained: str | None, system: str) -> Tokenizer:
    if pretrained is None:
        return CharTokenizer.from_alphabet([chr(code) for code in range(32, 127)])
    return ChatTokenizer(pretrained, RowFormat.from_chat_template(pretrained, system=system))
