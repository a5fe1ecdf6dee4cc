"""Finding out a thing by questions: twenty questions and guess my city, with a program that answers, and a player."""

from __future__ import annotations

import math
import random

from torchrl_lang._checks import Unit, checked
from torchrl_lang.envs.questions.table import QuestionTable

TURNS = 20
GUESSES = ("Is it {}?", "I guess it is {}.", "My guess is {}.")
WON = ("Yes, it is {}!", "You found it: {}.")
WRONG = ("No, it is not {}.", "No, something else.")
LOST = ("No. It was {}.", "That was your last question. It is {}.")
UNCLEAR = ("I do not understand the question.", "Please ask something else.")


class Questions:
    """Find out which thing the other one has in mind, in at most 20 questions. A :class:`TextGame`.

    These are twenty questions and guess my city of LMRL-Gym (arXiv 2311.18232) with a table that answers in place of a
    model. A text that names a thing is a guess, see :meth:`QuestionTable.read`. The right one ends the game with 0;
    every other text, also one that the game does not understand, costs 1, and the 20th ends the game. The thing is
    number ``seed % len(table.names)``, so that consecutive seeds play all of them; wordings are drawn from the seed. To
    train on few seeds teaches which thing has which wordings.

    Args:
        table: the things, questions and answers.

    Examples:
        >>> from torchrl_lang.envs.questions import Questions, QuestionTable
        >>> game = Questions(QuestionTable("cities"))
        >>> game.reset(seed=5)
        "Let's play: where is my home? Ask me, but no more than 20 times."
        >>> game.step("Which continent is it on?")
        ('In Europe.', -1.0, False)
        >>> game.step("Is it Vienna?")
        ('You found it: Vienna.', 0.0, True)
    """

    def __init__(self, table: QuestionTable) -> None:
        self.table = table

    def reset(self, seed: int) -> str:
        """See :class:`TextGame`."""
        self._rng, self.thing, self._turn = random.Random(seed), seed % len(self.table.names), 0
        return self._rng.choice(self.table.openings).format(turns=TURNS)

    def step(self, text: str) -> tuple[str, float, bool]:
        """See :class:`TextGame`."""
        self._turn += 1
        kind, number = self.table.read(text) or ("", 0)
        if kind == "guess" and number == self.thing:
            return self._say(WON, number), 0.0, True
        if self._turn == TURNS:
            return self._say(LOST, self.thing), -1.0, True
        if kind == "guess":
            return self._say(WRONG, number), -1.0, False
        answers = self.table.answers[number][self.table.answer(number, self.thing)] if kind else UNCLEAR
        return self._rng.choice(answers), -1.0, False

    def _say(self, ways: tuple[str, ...], thing: int) -> str:
        return self._rng.choice(ways).format(self.table.names[thing])


class MyopicPlayer:
    """Plays :class:`Questions` as a function for :class:`~torchrl_lang.envs.TextPlayer`.

    With the probability ``skill`` it asks the question with the greatest expected information about the things that
    are left, or guesses one of two, or where no question divides them; otherwise it asks any question.

    Args:
        table: of the game.
        skill: the probability. At 1 it is the myopic player: it looks one question ahead.

    Examples:
        >>> import random
        >>> from torchrl_lang.envs.questions import MyopicPlayer, QuestionTable
        >>> player = MyopicPlayer(QuestionTable("things"), skill=1.0)
        >>> player(["I have a thing in mind. Ask me, but no more than 20 times."], random.Random(0))
        'Is it found outdoors?'
    """

    @checked
    def __init__(self, table: QuestionTable, *, skill: Unit = 0.5) -> None:
        self.table, self.skill = table, skill

    def __call__(self, texts: list[str], rng: random.Random) -> str:
        """The next question or guess after the texts of a game so far."""
        if rng.random() >= self.skill:
            return rng.choice(rng.choice(self.table.questions))
        left = self.table.possible(texts)
        information = [_information(left, sets) for sets in self.table.sets]
        if left.bit_count() > 2 and max(information) > 0:
            return rng.choice(self.table.questions[information.index(max(information))])
        things = [place for place in range(len(self.table.names)) if left >> place & 1]
        return rng.choice(GUESSES).format(self.table.names[rng.choice(things)])


def _information(left: int, sets: list[int]) -> float:
    """The entropy of the answer to a question, in nats, if each thing that is left is equally likely."""
    shares = [(left & things).bit_count() / left.bit_count() for things in sets]
    return -sum(share * math.log(share) for share in shares if share)
