"""Tables of things and what is true of them: the answer to each question about each thing."""

from __future__ import annotations

import json
import re
import unicodedata
from importlib.resources import files
from typing import Literal

from torchrl_lang._checks import checked

Subject = Literal["things", "cities"]
_YES_OR_NO = {"no": ["No.", "No, it is not so.", "Not really."], "yes": ["Yes.", "Yes, that is so.", "That is right."]}


class QuestionTable:
    """Things, questions about them, and the answers, each in several wordings.

    Of ``"things"``, 233 of them, all 34 questions are answered with yes or no; of ``"cities"``, 125, some of the 13
    have one of several answers, such as a continent.

    A set of things is an integer, in which bit ``i`` stands for thing ``i``.

    Args:
        subject: ``"things"`` or ``"cities"``.

    Attributes:
        openings: ways to begin a game.
        names: the things, with their article where they have one.
        questions: the ways to ask each question.
        answers: the ways to give each answer to each question.
        sets: the things with each answer to each question, as a set.

    Examples:
        >>> from torchrl_lang.envs.questions import QuestionTable
        >>> table = QuestionTable("things")
        >>> len(table.names), table.names[0], table.questions[0][0], table.answers[0][1][0]
        (233, 'a lion', 'Is it alive?', 'Yes.')
        >>> table.read("is it a tiger"), table.read("Does it live?"), table.read("Is it nice?")
        (('guess', 1), ('ask', 0), None)
    """

    @checked
    def __init__(self, subject: Subject) -> None:
        content = json.loads(files(__package__).joinpath(f"{subject}.json").read_text("utf-8"))
        named = {key: {"answers": _YES_OR_NO, **question} for key, question in content["questions"].items()}
        facts = {
            name: {*group["have"].split(), *more.split()}
            for group in content["groups"]
            for name, more in group["things"].items()
        }
        self.openings: list[str] = content["openings"]
        self.names = [*facts]
        self.questions: list[list[str]] = [question["ask"] for question in named.values()]
        self.answers: list[list[list[str]]] = [[*question["answers"].values()] for question in named.values()]
        self.sets: list[list[int]] = []
        for key, question in named.items():
            _, *others = question["answers"]  # things have the first answer where the table lists no other one
            words = [key if other == "yes" else other for other in others]
            given = [sum(1 << place for place, fact in enumerate(facts.values()) if word in fact) for word in words]
            self.sets.append([self.all & ~sum(given), *given])
        self._questions = {plain(way): number for number, ways in enumerate(self.questions) for way in ways}
        self._answers = [
            {plain(way): number for number, ways in enumerate(answers) for way in ways} for answers in self.answers
        ]
        self._things = {
            re.sub("^(an?|the) (pair of )?", "", plain(name)): place for place, name in enumerate(self.names)
        }
        longest_first = sorted(self._things, key=len, reverse=True)
        self._thing = re.compile(rf"\b({'|'.join(longest_first)})\b")

    @property
    def all(self) -> int:
        """The set of all things."""
        return (1 << len(self.names)) - 1

    def answer(self, question: int, thing: int) -> int:
        """The number of the answer to a question about a thing."""
        return next(number for number, things in enumerate(self.sets[question]) if things >> thing & 1)

    def read(self, text: str) -> tuple[Literal["ask", "guess"], int] | None:
        """The number of the question that a text asks, or that of the thing that it names first; None if neither.

        A question is asked in one of its wordings, without regard to case, accents and punctuation. In any other text
        a name is a guess, wherever it stands: "Is it bigger than a cat?" guesses the cat.
        """
        words = plain(text)
        if words in self._questions:
            return "ask", self._questions[words]
        named = self._thing.search(words)
        return named and ("guess", self._things[named[0]])

    def possible(self, texts: list[str]) -> int:
        """The set of the things that fit the texts of a game so far, the game's first and last."""
        left = self.all
        for said, reply in zip(texts[1::2], texts[2::2], strict=True):
            kind, number = self.read(said) or ("", 0)
            if kind == "ask":
                left &= self.sets[number][self._answers[number][plain(reply)]]
            elif kind == "guess":
                left &= ~(1 << number)
        return left


def plain(text: str) -> str:
    """The words of a text, in lower case and without accents."""
    letters = "".join(each for each in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(each))
    return " ".join(re.findall(r"[a-z]+", letters))
