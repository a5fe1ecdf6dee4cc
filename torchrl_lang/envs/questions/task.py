"""Twenty questions and guess my city as a task of the recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from torchrl_lang._checks import checked
from torchrl_lang.envs import TextGameEnv, TextPlayer
from torchrl_lang.envs.questions.game import GUESSES, LOST, TURNS, UNCLEAR, WON, WRONG, MyopicPlayer, Questions
from torchrl_lang.envs.questions.optimum import BestQuestions
from torchrl_lang.envs.questions.table import QuestionTable, Subject
from torchrl_lang.envs.text_player import PlayText
from torchrl_lang.evaluation import GameRecords, Summary, summarize
from torchrl_lang.recipes.tasks.base import Player, Task, named_player
from torchrl_lang.recipes.tasks.questions import PRESETS, QuestionsData, QuestionsPlay
from torchrl_lang.text import CharTokenizer, word_tokenizer


@checked
@dataclass(frozen=True)
class QuestionsTask(Task):
    """Find out a thing by questions; see :class:`~torchrl_lang.envs.questions.Questions`.

    Args:
        subject: ``"things"`` or ``"cities"``.
    """

    name: ClassVar[str] = "questions"
    data_options = QuestionsData
    play_options = QuestionsPlay
    presets = PRESETS
    baselines = ("random", "myopic", "optimal")
    turns_name = "questions"
    metric_meanings: ClassVar[Mapping[str, str]] = {
        "regret": "the greatest mean return that is possible, minus this one"
    }

    subject: Subject = "things"

    @property
    def optimum(self) -> float:
        """The greatest mean return, exact: -7.46 for things, -3.46 for cities."""
        return _best(self.subject).mean_return

    @property
    def action_length(self) -> int:
        """Tokens of the longest question, and its end."""
        return 1 + self._longest(_texts(self.subject).questions)

    @property
    def row_length(self) -> int:
        """Tokens of an opening and 20 turns of the longest texts, so that no game is cut."""
        texts = _texts(self.subject)
        turn = self.action_length + self._longest(texts.replies) + 1
        return self._longest(texts.openings) + TURNS * turn + 3  # the beginning, two ends

    def _longest(self, texts: list[str]) -> int:
        return max(len(self.tokenizer().encode(text)) for text in texts)

    def tokenizer(self) -> CharTokenizer:
        """The words of the games; others are written in characters."""
        return _tokenizer(self.subject)

    def env(self, batch_size: int, **options: Any) -> TextGameEnv:
        """See :meth:`Task.env`."""
        sizes: Any = {"row_length": self.row_length, "action_length": self.action_length, "batch_size": [batch_size]}
        return TextGameEnv(partial(Questions, _table(self.subject)), self.tokenizer(), **sizes | options)

    def player(self, name: str, seed: int | None = None) -> Player:
        """A scripted player.

        random: any question. myopic: the most informative question each time. optimal: as few as possible on average.
        """
        table = _table(self.subject)
        players: dict[str, Callable[[], PlayText]] = {
            "random": lambda: MyopicPlayer(table, skill=0.0),
            "myopic": lambda: MyopicPlayer(table, skill=1.0),
            "optimal": lambda: _best(self.subject),
        }
        return self._player(named_player(name, players)(), seed)

    def behavior_policy(self, options: QuestionsData) -> Player:
        """The scripted player."""
        return self._player(MyopicPlayer(_table(self.subject), skill=options.skill), options.seed)

    def _player(self, play: PlayText, seed: int | None) -> Player:
        return Player(TextPlayer(play, self.tokenizer(), self.action_length, seed=seed))

    def won(self, records: GameRecords) -> Tensor:
        """Games whose thing was guessed, bool ``[N]``: only the right guess costs nothing."""
        return records.last_reward == 0

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Metrics of games, with their regret."""
        found = summarize(records, name=name, won=self.won)
        return replace(found, metrics={"regret": self.optimum - found.mean_return})


@cache
def _table(subject: Subject) -> QuestionTable:
    return QuestionTable(subject)


@cache
def _best(subject: Subject) -> BestQuestions:
    return BestQuestions(_table(subject))


@cache
def _tokenizer(subject: Subject) -> CharTokenizer:
    return word_tokenizer(chain(*_texts(subject)))


class _Texts(NamedTuple):
    questions: list[str]
    """With the guesses."""
    openings: list[str]
    replies: list[str]


@cache
def _texts(subject: Subject) -> _Texts:
    """All texts that the players and the game write."""
    table = _table(subject)
    asked = [way for ways in table.questions for way in ways]
    answers = [way for answers in table.answers for ways in answers for way in ways]
    openings = [way.format(turns=TURNS) for way in table.openings]

    def about(ways: tuple[str, ...]) -> list[str]:
        return [way.format(name) for way in ways for name in table.names]

    return _Texts([*asked, *about(GUESSES)], openings, [*answers, *about((*WON, *WRONG, *LOST)), *UNCLEAR])
