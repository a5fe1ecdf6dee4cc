"""Rewards of dialogues and answered questions, from models in process or behind HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels

__all__ = ["AnsweredQuestions", "Measure", "answer_and_score", "last_round_rewards", "measured"]

Measure = Literal["rank", "distance"]
"""What a reward compares: the percentile of the true image, or the distance of the guessed feature to the true one."""


class AnsweredQuestions(NamedTuple):
    """A batch's answers and the rewards of the questions that led to them."""

    answers: list[str]
    rewards: list[float]


@runtime_checkable
class _AnswersAndScores(Protocol):
    """Models that do both in one call, as a client can."""

    def answer_and_score(
        self, dialogues: Sequence[Dialogue], questions: Sequence[str], features: Tensor, *, measure: Measure
    ) -> AnsweredQuestions: ...


def answer_and_score(
    models: DialogueModels,
    dialogues: Sequence[Dialogue],
    questions: Sequence[str],
    features: Tensor,
    *,
    measure: Measure = "rank",
) -> AnsweredQuestions:
    """Answer one question of each dialogue, and score the round that this completes.

    Models behind HTTP do it in one request.

    Args:
        models: that answer and guess.
        dialogues: before the question.
        questions: one of each dialogue.
        features: of the true images, float ``[N, F]``.
        measure: see :func:`last_round_rewards`.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, answer_and_score
        >>> class Models:
        ...     feature_size = 2
        ...     def answers(self, dialogues, questions, features):
        ...         return ["no"] * len(questions)
        ...     def percentiles(self, dialogues, features):
        ...         return torch.tensor([0.5 + 0.25 * len(dialogue.rounds) for dialogue in dialogues])
        >>> answer_and_score(Models(), [Dialogue("a cat")], ["is it black?"], torch.ones(1, 2))
        AnsweredQuestions(answers=['no'], rewards=[0.25])
    """
    if isinstance(models, _AnswersAndScores):
        return models.answer_and_score(dialogues, questions, features, measure=measure)
    answers = models.answers(dialogues, questions, features)
    completed = [
        dialogue.then(question, answer)
        for dialogue, question, answer in zip(dialogues, questions, answers, strict=True)
    ]
    return AnsweredQuestions(answers, last_round_rewards(models, completed, features, measure=measure))


def last_round_rewards(
    models: DialogueModels, dialogues: Sequence[Dialogue], features: Tensor, *, measure: Measure = "rank"
) -> list[float]:
    """What the last round of each dialogue earned; without rounds, the initial value itself.

    With ``d`` the distance and ``p`` the percentile after ``t`` rounds, the reward of round ``t`` is ``d_{t-1} - d_t``
    or ``p_t - p_{t-1}``; that of no round is ``d_0`` or ``p_0`` (arXiv 2206.11871, visual dialogue).

    Args:
        models: that guess.
        dialogues: up to the round in question.
        features: of the true images, float ``[N, F]``.
        measure: ``"rank"`` for percentiles, or ``"distance"``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, Round, last_round_rewards
        >>> class Models:
        ...     def distances(self, dialogues, features):
        ...         return torch.tensor([2.0 - len(dialogue.rounds) for dialogue in dialogues])
        >>> dialogues = [Dialogue("a cat"), Dialogue("a cat", (Round("is it black?", "no"),))]
        >>> last_round_rewards(Models(), dialogues, torch.ones(2, 2), measure="distance")
        [2.0, 1.0]
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
    """
    if not dialogues:
        return []
    score = models.distances if measure == "distance" else models.percentiles
    return score(dialogues, features).double().tolist()
