"""The fewest questions that find things on average, exact, and the player that needs no more."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple

from torchrl_lang.envs.questions.game import GUESSES
from torchrl_lang.envs.questions.table import QuestionTable


class BestQuestions:
    r"""The best player of :class:`Questions`, exact, as a function for :class:`~torchrl_lang.envs.TextPlayer`.

    The cost :math:`C(S)` of a set :math:`S` of things that are left is the sum over them of the turns before the right
    guess. One thing costs nothing. Otherwise a turn is a question, whose answers divide the set into :math:`S_i`, or
    the guess of a thing :math:`x`:

    .. math:: C(S) = |S| + \min\left(\min_{\text{question}} \sum_i C(S_i),\ \min_x C(S \setminus x) - 1\right)

    The search raises a lower bound of the cost of a set until a turn attains it. It begins with the cost if questions
    could divide a set at will, and so leaves out nearly all sets. The limit of 20 turns is not looked at: the best
    plans of both tables end before, and a search with the limit, which may give things up, found the same costs.

    Args:
        table: the things, questions and answers.

    Examples:
        >>> from torchrl_lang.envs.questions import BestQuestions, QuestionTable
        >>> best = BestQuestions(QuestionTable("cities"))
        >>> best.cost(0b11)  # guess one of two
        1
        >>> round(best.mean_return, 3)
        -3.464
    """

    def __init__(self, table: QuestionTable) -> None:
        self.table = table
        self._least = _least_costs(len(table.names), max(map(len, table.sets)))
        self._known: dict[int, tuple[int, bool]] = {}
        """A lower bound of the cost of each set, and whether it is the cost."""

    @property
    def mean_return(self) -> float:
        """The greatest mean return over all things."""
        return -self.cost(self.table.all) / len(self.table.names)

    def cost(self, left: int, limit: float = math.inf) -> int:
        """The cost of a set of things; if that is above the limit, a lower bound that is above it, too."""
        size = left.bit_count()
        if size <= 2:
            return max(0, size - 1)
        bound, is_exact = self._known.get(left, (self._least[size], False))
        while not is_exact and bound <= limit:
            found = self._cheapest(left, bound)
            bound, is_exact = found, found == bound
            self._known[left] = bound, is_exact
        return bound

    def __call__(self, texts: list[str], rng: random.Random) -> str:
        """The next question or guess after the texts of a game so far."""
        left = self.table.possible(texts)
        cost = self.cost(left)
        best = next(turn for turn in self._turns(left) if self._cost_of(turn, cost) == cost)
        if best.kind == "ask":
            return rng.choice(self.table.questions[best.number])
        return rng.choice(GUESSES).format(self.table.names[best.number])

    def _turns(self, left: int) -> list[_Turn]:
        """The questions that divide a set and the guesses, those that may cost least first."""
        size, turns = left.bit_count(), list[_Turn]()
        for question, sets in enumerate(self.table.sets):
            parts = sorted((part for things in sets if (part := left & things)), key=int.bit_count)
            if len(parts) > 1:
                least = size + sum(self._least[part.bit_count()] for part in parts)
                turns.append(_Turn(least, parts, "ask", question))
        for thing in range(len(self.table.names)):
            if left >> thing & 1:
                turns.append(_Turn(size - 1 + self._least[size - 1], [left ^ 1 << thing], "guess", thing))
        return sorted(turns, key=lambda turn: turn.least)

    def _cheapest(self, left: int, bound: int) -> int:
        """The least cost of all turns if it is the bound; otherwise a greater lower bound."""
        cheapest = math.inf
        for turn in self._turns(left):
            if turn.least >= cheapest or cheapest == bound:
                break
            cheapest = min(cheapest, self._cost_of(turn, bound))
        return int(cheapest)

    def _cost_of(self, turn: _Turn, limit: int) -> int:
        """The cost of a turn and those after it; if that is above the limit, a lower bound that is above it, too."""
        cost = turn.least
        for part in turn.parts:  # the smallest first
            least = self._least[part.bit_count()]
            cost += self.cost(part, limit - cost + least) - least
            if cost > limit:
                break
        return cost


class _Turn(NamedTuple):
    """A question or a guess."""

    least: int
    """A lower bound of the cost of this turn and those after it."""
    parts: list[int]
    """The sets of which one is left afterwards, the smallest first."""
    kind: Literal["ask", "guess"]
    number: int
    """Of the question or the thing."""


def _least_costs(things: int, answers: int) -> list[int]:
    """The costs of sets of 0 to ``things`` things if there were every question with that number of answers."""
    costs = [0, 0]
    divided = [[0, 0] for _ in range(answers)]  # [k][n]: n things in at most k + 1 parts
    for size in range(2, things + 1):
        splits = [min(costs[first] + parts[size - first] for first in range(1, size)) for parts in divided[:-1]]
        costs.append(size + min(costs[-1] - 1, splits[-1]))
        for parts, least in zip(divided, [costs[-1], *(min(costs[-1], split) for split in splits)], strict=True):
            parts.append(least)
    return costs
