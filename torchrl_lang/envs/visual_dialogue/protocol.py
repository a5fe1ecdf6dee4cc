"""The server's protocol: routes, limits, and the form of dialogues and errors.

The routes and fields are those of the server that the ILQL paper (arXiv 2206.11871) used: a form with ``history``, a
JSON list of ``{"speaker": "question" | "answer", "text": ...}``, ``caption``, ``img_features``, a JSON list of numbers,
and ``generation_kwargs``. The replies are JSON. The route ``/batch`` is new: a JSON object with ``route`` and the same
fields, each a list with one item a dialogue; its reply is the list of what that route replies to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.steps import Measure

__all__ = [
    "BATCH",
    "GREEDY",
    "ROUTES",
    "RequestBatch",
    "RequestError",
    "Route",
    "ServerLimits",
    "error_reply",
    "history_of",
]

BATCH = "batch"
"""The route of batches."""
GREEDY = {"inference": "greedy", "beamSize": 1}
"""The only decoding of answers and questions."""


class Route(NamedTuple):
    """What a route needs and replies."""

    replies: Literal["answer", "question", "reward", "step", "value"]
    measure: Measure | None = None

    @property
    def asks(self) -> bool:
        """Whether the history ends with a question that has no answer yet."""
        return self.replies in ("answer", "step")

    @property
    def batched_only(self) -> bool:
        """Whether only batches have this route."""
        return self.replies == "value"

    @property
    def sees(self) -> bool:
        """Whether the image features are needed."""
        return self.replies != "question"


ROUTES = {
    "fetch_a_bot_response": Route("answer"),
    "fetch_q_bot_response": Route("question"),
    "fetch_reward": Route("reward", "distance"),
    "fetch_reward_rank": Route("reward", "rank"),
    "step": Route("step", "distance"),
    "step_rank": Route("step", "rank"),
    "distance": Route("value", "distance"),
    "percentile": Route("value", "rank"),
}
"""Routes by name; those of the original protocol, and two that reply the values themselves."""


@dataclass(frozen=True)
class ServerLimits:
    """Sizes beyond which the server rejects a request.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import ServerLimits
        >>> ServerLimits(items=0)
        Traceback (most recent call last):
            ...
        ValueError: items must be at least 1, got 0.
    """

    body: int = 2**24
    """bytes of a request"""
    items: int = 64
    """dialogues of a batch"""
    rounds: int = 32
    """rounds of a dialogue"""
    text: int = 2000
    """characters of a caption, question or answer"""
    queue: int = 256
    """requests that wait for the models"""

    def __post_init__(self) -> None:
        for field in fields(self):
            at_least_one(field.name, getattr(self, field.name))


class RequestError(ValueError):
    """A request cannot be answered.

    Args:
        status: of the HTTP reply.
        field: of the request that is wrong; None for the request as a whole.
        message: what came, what was expected.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.protocol import RequestError
        >>> str(RequestError(400, "caption", "is missing"))
        'caption is missing'
    """

    def __init__(self, status: int, field: str | None, message: str) -> None:
        self.status, self.field = status, field
        super().__init__(f"{field} {message}" if field else message)


def error_reply(message: str, field: str | None = None) -> dict[str, Any]:
    """The JSON of an error.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.protocol import error_reply
        >>> error_reply("caption is missing", "caption")
        {'error': 'caption is missing', 'field': 'caption'}
    """
    return {"error": message, "field": field}


class RequestBatch(NamedTuple):
    """Dialogues of a request; ``questions`` and ``features`` are given where the route needs them."""

    dialogues: list[Dialogue]
    questions: list[str]
    features: Tensor | None  # float32 [N, F]

    @classmethod
    def joined(cls, batches: Sequence[RequestBatch]) -> RequestBatch:
        """One batch of several of the same route."""
        parts = [batch.features for batch in batches if batch.features is not None]
        return cls(
            [dialogue for batch in batches for dialogue in batch.dialogues],
            [question for batch in batches for question in batch.questions],
            torch.cat(parts) if parts else None,
        )


def history_of(dialogue: Dialogue, question: str | None = None) -> list[dict[str, str]]:
    """The field ``history`` of a dialogue, and of a new question.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.protocol import history_of
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue
        >>> history_of(Dialogue("a cat"), "is it black?")
        [{'speaker': 'question', 'text': 'is it black?'}]
    """
    texts = dialogue.texts[1:] + ([] if question is None else [question])
    return [{"speaker": ("question", "answer")[place % 2], "text": text} for place, text in enumerate(texts)]
