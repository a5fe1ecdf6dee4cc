"""Dialogues about images, and what models that answer questions and guess the image are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Measure = Literal["rank", "distance"]
"""Measure of a reward: the percentile of the true image, or the distance of the guessed feature to the true one."""


class Round(NamedTuple):
    """A question of the agent, with its question mark, and the reply to it.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.dialogue import Round
        >>> Round("is it red?", "no").answer
        'no'
    """

    question: str
    answer: str


class Dialogue(NamedTuple):
    """The caption of an image and the rounds about it.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue
        >>> dialogue = Dialogue("a dog").then("is it red?", "no").then("what colour is it?", "white")
        >>> dialogue.first(1)
        Dialogue(caption='a dog', rounds=(Round(question='is it red?', answer='no'),))
        >>> dialogue.first(1).texts
        ['a dog', 'is it red?', 'no']
    """

    caption: str
    rounds: tuple[Round, ...] = ()

    def first(self, rounds: int) -> Dialogue:
        """The dialogue up to a number of rounds."""
        return self._replace(rounds=self.rounds[:rounds])

    def then(self, question: str, answer: str) -> Dialogue:
        """The dialogue with one more round."""
        return self._replace(rounds=(*self.rounds, Round(question, answer)))

    @property
    def texts(self) -> list[str]:
        """Caption, questions and answers in their order."""
        return [self.caption, *(text for each in self.rounds for text in each)]


class DialogueModels(Protocol):
    """The answerer and the image guesser, batched, in this process or behind HTTP.

    The reward of a round is the distance before it minus the distance after it, or the percentile after it minus the
    percentile before it; without a round it is the initial distance or percentile.
    """

    feature_size: int

    def answers(self, dialogues: Sequence[Dialogue], questions: Sequence[str], features: Tensor) -> list[str]:
        """The reply to one new question of each dialogue; ``features`` is float ``[N, F]``, L2-normalised."""
        ...

    def distances(self, dialogues: Sequence[Dialogue], features: Tensor) -> Tensor:
        """Float ``[N]``: mean over the features of the squared difference of predicted and true image feature.

        The prediction is that after the last round.
        """
        ...

    def percentiles(self, dialogues: Sequence[Dialogue], features: Tensor) -> Tensor:
        """Float ``[N]`` in ``[0, 1]``: ``1 - rank / (P + 1)`` of the true image among it and a pool of ``P``.

        The nearest image has rank 1.
        """
        ...


def answer_and_score(
    models: DialogueModels,
    dialogues: Sequence[Dialogue],
    questions: Sequence[str],
    features: Tensor,
    *,
    measure: Measure = "rank",
) -> tuple[list[str], list[float]]:
    """Answer one question of each dialogue, and score the round that this completes, see :func:`last_round_rewards`.

    Models behind HTTP do it in one request.
    """
    in_one_call: Callable[..., tuple[list[str], list[float]]] | None = getattr(models, "answer_and_score", None)
    if in_one_call is not None:
        return in_one_call(dialogues, questions, features, measure=measure)
    answers = models.answers(dialogues, questions, features)
    completed = [dialogue.then(*turn) for dialogue, *turn in zip(dialogues, questions, answers, strict=True)]
    return answers, last_round_rewards(models, completed, features, measure=measure)


def last_round_rewards(
    models: DialogueModels, dialogues: Sequence[Dialogue], features: Tensor, *, measure: Measure = "rank"
) -> list[float]:
    """The reward of the last round of each dialogue; without rounds, the initial value itself.

    With ``d`` the distance and ``p`` the percentile after ``t`` rounds, the reward of round ``t`` is ``d_{t-1} - d_t``
    or ``p_t - p_{t-1}``; that of no round is ``d_0`` or ``p_0`` (arXiv 2206.11871, visual dialogue).
    """
    rows = [row for row, dialogue in enumerate(dialogues) if dialogue.rounds]
    before = [dialogues[row].first(-1) for row in rows]
    repeated = torch.cat([features, features[rows]]) if rows else features
    values = measured(models, [*dialogues, *before], repeated, measure)
    rewards, sign = values[: len(dialogues)], 1 if measure == "rank" else -1
    for row, earlier in zip(rows, values[len(dialogues) :], strict=True):
        rewards[row] = sign * (rewards[row] - earlier)
    return rewards


def measured(models: DialogueModels, dialogues: Sequence[Dialogue], features: Tensor, measure: Measure) -> list[float]:
    """The distance or percentile after each dialogue's last round, as Python numbers.

    Differences of these are exact, so that a client which adds rewards up gets the same number.

    Raises:
        ValueError: a value is not finite.
    """
    if not dialogues:
        return []
    score = models.distances if measure == "distance" else models.percentiles
    values = score(dialogues, features).double()
    if not values.isfinite().all():
        raise ValueError(f"The models gave a {measure} that is not finite: {values[~values.isfinite()][0]}.")
    return values.tolist()
