"""A dialogue about an image, and the models that answer its questions and guess the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Dialogue", "DialogueModels", "Round"]


class Round(NamedTuple):
    """A question of the agent and the reply to it.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Round
        >>> Round("is it red?", "no").answer
        'no'
    """

    question: str
    """With its question mark."""
    answer: str


class Dialogue(NamedTuple):
    """The caption of an image and the rounds about it.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, Round
        >>> dialogue = Dialogue("a dog", (Round("is it red?", "no"), Round("what colour is it?", "white")))
        >>> dialogue.first(1)
        Dialogue(caption='a dog', rounds=(Round(question='is it red?', answer='no'),))
        >>> dialogue.first(0).then("is it red?", "no").texts
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
