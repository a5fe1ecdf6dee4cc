"""The server's protocol and its client: routes, requests, replies and errors.

The routes and fields are those of the server that the ILQL paper (arXiv 2206.11871) used: a form with ``history``, a
JSON list of ``{"speaker": "question" | "answer", "text": ...}``, ``caption``, ``img_features``, a JSON list of numbers,
and ``generation_kwargs``. The replies are JSON. The route ``/batch`` is new: a JSON object with ``route`` and the same
fields, each a list with one item a dialogue; its reply is the list of what that route replies to each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode

import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, Json, Strict, TypeAdapter, ValidationError
from torch import Tensor

from torchrl_lang._checks import have_shapes, needs_extra
from torchrl_lang._files import mistake
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Measure, Round

BATCH = "batch"
"""The route of batches."""
LONGEST_TEXT = 2000
"""Characters of a caption, question or answer."""
MOST_ROUNDS = 32
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Route(NamedTuple):
    """The fields and the reply of a route."""

    replies: Literal["answer", "question", "reward", "step", "value"]
    measure: Measure | None = None

    @property
    def asks(self) -> bool:
        """Whether the history ends with a question that has no answer yet."""
        return self.replies in ("answer", "step")

    @property
    def sees(self) -> bool:
        """Whether the image features are needed."""
        return self.replies != "question"

    @property
    def reply(self) -> Any:
        """The type of a reply; a percentile lies in [0, 1], and its change in [-1, 1]."""
        largest = 1 if self.measure == "rank" else 1e7
        value = Annotated[float, Field(ge=0 if self.replies == "value" else -largest, le=largest)]
        step = Annotated[tuple[str, value], Strict(False)]
        return {"step": step, "reward": value, "value": value}.get(self.replies, str)


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
"""Routes by name; those of the original protocol, and two of batches that reply the values themselves."""
REPLIES: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter[Any](list.__class_getitem__(route.reply), config=_STRICT)  # type: ignore[arg-type]
    for name, route in ROUTES.items()
}
"""The replies of each route to some dialogues."""


class _Utterance(BaseModel):
    model_config = _STRICT
    speaker: Literal["question", "answer"]
    text: Annotated[str, Field(max_length=LONGEST_TEXT)]


class Greedy(BaseModel):
    """The only decoding of answers and questions."""

    model_config = _STRICT
    inference: Literal["greedy"] = "greedy"
    beamSize: Literal[1] = 1


_Caption = Annotated[str, Field(max_length=LONGEST_TEXT)]
_History = Annotated[list[_Utterance], FailFast(), Field(max_length=2 * MOST_ROUNDS)]
_NONE: Any = None  # pydantic cannot read `| None` behind FailFast, which has no hash
_Features = Annotated[list[Annotated[float, Field(ge=-1000, le=1000)]], FailFast()]  # the protocol's are normalized


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    history: Json[_History]
    caption: _Caption
    img_features: Json[_Features] = _NONE
    generation_kwargs: Json[Greedy] = Greedy()


class _Batch(BaseModel):
    model_config = _STRICT
    route: Literal[tuple(ROUTES)]  # type: ignore[valid-type]
    history: Annotated[list[_History], FailFast()]
    caption: Annotated[list[_Caption], FailFast()]
    img_features: Annotated[list[_Features], FailFast()] = _NONE
    generation_kwargs: Greedy = Greedy()


class RequestError(ValueError):
    """A request cannot be answered.

    Args:
        status: of the HTTP reply.
        message: what came, what was expected.
        field: of the request that is wrong; None for the request as a whole.
    """

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        self.status, self.field = status, field
        super().__init__(message)


class RequestBatch(NamedTuple):
    """Dialogues of a request; ``questions`` and ``features`` are given where the route needs them."""

    dialogues: list[Dialogue]
    questions: list[str]
    features: Tensor | None  # float32 [N, F]


def read_request(body: bytes, route: str, *, items: int, feature_size: int) -> tuple[str, RequestBatch]:
    """The route and the dialogues of a request.

    Args:
        body: of the request: a form, that of a batch JSON.
        route: name of the route; the body of a batch names that of its dialogues.
        items: most dialogues of a batch.
        feature_size: number of image features.

    Raises:
        RequestError: with the field that is wrong.
    """
    try:
        name, histories, captions, features = _fields_of(body, route)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        status = 413 if first["type"] in ("too_long", "string_too_long") else 400
        raise RequestError(status, mistake(error), str(first["loc"][0]) if first["loc"] else "body") from None
    kind = ROUTES[name]
    if kind.sees and features is None:
        raise RequestError(400, 'has no field "img_features"', "img_features")
    features = features if kind.sees else None
    lengths = {len(column) for column in (histories, captions, features) if column is not None}
    if len(lengths) > 1:
        raise RequestError(400, f"has lists of the lengths {sorted(lengths)}, expected one length", "body")
    if len(histories) > items:
        raise RequestError(413, f"has {len(histories)} dialogues, this server takes {items} at once", "history")
    if sizes := {len(row) for row in features or []} - {feature_size}:
        raise RequestError(400, f"has {min(sizes)} image features, expected {feature_size}", "img_features")
    texts = [_texts(history, kind) for history in histories]
    dialogues = list(map(Dialogue, captions, (tuple(map(Round, each[::2], each[1::2])) for each in texts)))
    questions = [each[-1] for each in texts] if kind.asks else []
    images = None if features is None else torch.tensor(features, dtype=torch.float32).reshape(-1, feature_size)
    return name, RequestBatch(dialogues, questions, images)


def _fields_of(body: bytes, route: str) -> tuple[str, list[list[_Utterance]], list[str], list[list[float]] | None]:
    if route == BATCH:
        batch = _Batch.model_validate_json(body)
        return batch.route, batch.history, batch.caption, batch.img_features
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError as error:  # not UTF-8, or too many fields
        raise RequestError(400, f"is no form, encoded as UTF-8 ({error})", "body") from error
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RequestError(400, f"has {twice[0][:60]} twice", twice[0][:60])
    form = _Form.model_validate(dict(pairs))
    return route, [form.history], [form.caption], None if form.img_features is None else [form.img_features]


def _texts(history: Sequence[_Utterance], kind: Route) -> list[str]:
    """The texts of a history, in which questions and answers take turns, beginning with a question."""
    alternate = all(each.speaker == ("question", "answer")[place % 2] for place, each in enumerate(history))
    if not alternate or len(history) % 2 != kind.asks:
        ending = "end with a question" if kind.asks else "end with an answer, or be empty"
        raise RequestError(400, f"has a history that must alternate, begin with a question and {ending}", "history")
    return [each.text for each in history]


# -- the client --------------------------------------------------------------------------------------------------------

_NAMES = {(route.replies, route.measure): name for name, route in ROUTES.items()}


class _Limits(BaseModel):
    items: Annotated[int, Field(ge=1)]


class _Health(BaseModel):
    """The part of the reply of ``/health`` that a client needs."""

    model_config = ConfigDict(strict=True)
    feature_size: Annotated[int, Field(ge=1)]
    limits: _Limits


class RemoteModels:
    """The models of a server, as :class:`~torchrl_lang.envs.visual_dialogue.dialogue.DialogueModels`.

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
        with needs_extra("RemoteModels", "visdial"):
            from torchrl_lang._http import JSONOverHTTP
        self._http = JSONOverHTTP(url, **connection)
        self._items: int | None = None  # of a batch; None: the server has no batches
        if feature_size is None:
            health = self._parsed(TypeAdapter(_Health), self.health(), "; give the feature_size of an original server")
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
        self, dialogues: Sequence[Dialogue], questions: Sequence[str], features: Tensor, *, measure: Measure = "rank"
    ) -> tuple[list[str], list[float]]:
        """Answers and rewards of the rounds that they complete; one request a batch."""
        steps = self._replies(_NAMES["step", measure], dialogues, questions, features)
        return [answer for answer, _ in steps], [reward for _, reward in steps]

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
        histories = [_history(*each) for each in zip(dialogues, asked, strict=True)]
        columns: dict[str, list[Any]] = {"history": histories, "caption": [each.caption for each in dialogues]}
        if features is not None:
            have_shapes(("features", features, (len(dialogues), self.feature_size)))
            columns["img_features"] = features.float().tolist()
        ask, step = (self._single, 1) if self._items is None else (self._batch, self._items)
        replies: list[Any] = []
        for start in range(0, len(dialogues), step):
            part = {name: column[start : start + step] for name, column in columns.items()}
            replies += self._parsed(REPLIES[route], ask(route, part))
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

    def _parsed(self, expected: TypeAdapter[Any], reply: Any, hint: str = "") -> Any:
        try:
            return expected.validate_python(reply)
        except ValidationError as error:
            raise ValueError(f"The reply of {self._http.url} {mistake(error)}{hint}.") from None


def _history(dialogue: Dialogue, question: str | None) -> list[dict[str, str]]:
    """The field ``history`` of a dialogue, and of a new question."""
    texts = dialogue.texts[1:] + ([] if question is None else [question])
    return [{"speaker": ("question", "answer")[place % 2], "text": text} for place, text in enumerate(texts)]
