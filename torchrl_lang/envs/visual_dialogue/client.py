"""Dialogue models behind HTTP: a client of the server, or of the original one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang._files import mistake
from torchrl_lang._http import JSONOverHTTP
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.protocol import BATCH, REPLIES, ROUTES, Greedy, Health, history_of
from torchrl_lang.envs.visual_dialogue.scoring import AnsweredQuestions, Measure

__all__ = ["RemoteModels"]

_NAMES = {(route.replies, route.measure): name for name, route in ROUTES.items()}


class RemoteModels:
    """The models of a server, as :class:`~torchrl_lang.envs.visual_dialogue.DialogueModels`.

    Requests are sent again, after a growing and jittered wait, if the server cannot be reached, does not answer in
    time, or replies 503 or another 5xx; the server keeps nothing between requests, so nothing is lost. Connections are
    reused. Threads may share a client.

    Args:
        url: address of the server.
        feature_size: of an original server, whose protocol has no batches and no ``/health``: one request a dialogue is
            sent, and for a distance or percentile one a round. None for the server of this library.
        **connection: ``timeout``, seconds of a request, ``retries``, and ``first_wait`` and ``longest_wait``, seconds
            before a retry.

    Raises:
        ConnectionError: after all retries there is no reply.
        ValueError: the server rejects a request, or its reply is none of the protocol.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, DialogueServer, RemoteModels
        >>> class Models:
        ...     feature_size = 2
        ...     def answers(self, dialogues, questions, features):
        ...         return ["no"] * len(questions)
        >>> with DialogueServer(Models()) as server:
        ...     RemoteModels(server.url).answers([Dialogue("a cat")], ["is it black?"], torch.ones(1, 2))
        ['no']
    """

    def __init__(self, url: str, *, feature_size: int | None = None, **connection: Any) -> None:
        check_options(feature_size=(feature_size, 1))
        self._http = JSONOverHTTP(url, **connection)
        self._items: int | None = None  # of a batch; None: the server has no batches
        if feature_size is None:
            health = self._checked(TypeAdapter(Health), self.health(), "; give the feature_size of an original server")
            feature_size, self._items = health.feature_size, health.limits.items
        self.feature_size: int = feature_size

    def health(self) -> Any:
        """The server's report about itself."""
        return self._http.get("/health")

    def answers(self, dialogues: Sequence[Dialogue], questions: Sequence[str], features: Tensor) -> list[str]:
        """The reply to one new question of each dialogue; features float ``[N, F]``."""
        return self._replies("fetch_a_bot_response", dialogues, questions, features)

    def questions(self, dialogues: Sequence[Dialogue]) -> list[str]:
        """The next question of each dialogue, by the server's questioner."""
        return self._replies("fetch_q_bot_response", dialogues)

    def distances(self, dialogues: Sequence[Dialogue], features: Tensor) -> Tensor:
        """Float ``[N]``: squared distance between predicted and true image feature, after the last round."""
        return self._values("distance", dialogues, features)

    def percentiles(self, dialogues: Sequence[Dialogue], features: Tensor) -> Tensor:
        """Float ``[N]`` in [0, 1]: percentile of the true image, after the last round."""
        return self._values("rank", dialogues, features)

    def answer_and_score(
        self,
        dialogues: Sequence[Dialogue],
        questions: Sequence[str],
        features: Tensor,
        *,
        measure: Measure = "rank",
    ) -> AnsweredQuestions:
        """See :func:`~torchrl_lang.envs.visual_dialogue.answer_and_score`; one request a batch."""
        steps = self._replies(_NAMES["step", measure], dialogues, questions, features)
        return AnsweredQuestions([answer for answer, _ in steps], [reward for _, reward in steps])

    def close(self) -> None:
        """Close idle connections; the next request opens one again."""
        self._http.close()

    def _values(self, measure: Measure, dialogues: Sequence[Dialogue], features: Tensor) -> Tensor:
        if self._items is not None:
            values = self._replies(_NAMES["value", measure], dialogues, None, features)
        else:
            values = [self._sum(measure, *each) for each in zip(dialogues, features, strict=True)]
        return torch.tensor(values, dtype=torch.float32, device=features.device)

    def _sum(self, measure: Measure, dialogue: Dialogue, feature: Tensor) -> float:
        """A value from rewards: the initial one, and its change in each round, which a distance counts downwards."""
        prefixes = [dialogue.first(count) for count in range(len(dialogue.rounds) + 1)]
        repeated = feature.expand(len(prefixes), -1)
        first, *changes = self._replies(_NAMES["reward", measure], prefixes, None, repeated)
        return first + sum(changes) * (1 if measure == "rank" else -1)

    def _replies(
        self,
        route: str,
        dialogues: Sequence[Dialogue],
        questions: Sequence[str] | None = None,
        features: Tensor | None = None,
    ) -> list[Any]:
        """The reply of a route to each dialogue, asked in batches or one at a time."""
        asked = [None] * len(dialogues) if questions is None else questions
        columns: dict[str, list[Any]] = {
            "history": [history_of(*each) for each in zip(dialogues, asked, strict=True)],
            "caption": [dialogue.caption for dialogue in dialogues],
        }
        if features is not None:
            if len(features) != len(dialogues):
                raise ValueError(
                    f"Expected one row of features for each of {len(dialogues)} dialogues, got {len(features)}."
                )
            columns["img_features"] = features.float().tolist()
        ask, step = (self._single, 1) if self._items is None else (self._batch, self._items)
        replies: list[Any] = []
        for start in range(0, len(dialogues), step):
            part = {name: column[start : start + step] for name, column in columns.items()}
            replies += self._checked(REPLIES[route], ask(route, part))
            if len(replies) != min(start + step, len(dialogues)):
                raise ValueError(f"{self._http.url} sent {len(replies)} replies, expected {len(dialogues)}.")
        return replies

    def _single(self, route: str, columns: dict[str, list[Any]]) -> list[Any]:
        """One dialogue, by the original protocol."""
        form = {name: value if name == "caption" else json.dumps(value) for name, [value] in columns.items()}
        if ROUTES[route].replies != "reward":
            form["generation_kwargs"] = json.dumps(Greedy().model_dump())
        return [self._http.post(f"/{route}", urlencode(form).encode(), "application/x-www-form-urlencoded")]

    def _batch(self, route: str, columns: dict[str, list[Any]]) -> Any:
        body = json.dumps({"route": route, **columns}).encode()
        return self._http.post(f"/{BATCH}", body, "application/json")

    def _checked(self, expected: TypeAdapter[Any], reply: Any, hint: str = "") -> Any:
        try:
            return expected.validate_python(reply)
        except ValidationError as error:
            raise ValueError(f"The reply of {self._http.url} {mistake(error)}{hint}.") from None
