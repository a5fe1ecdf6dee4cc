"""Reads requests: every field is checked, and errors name the field that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from torchrl_lang._files import shorten
from torchrl_lang._files.readers import unique_keys
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round
from torchrl_lang.envs.visual_dialogue.protocol import (
    BATCH,
    GREEDY,
    ROUTES,
    RequestBatch,
    RequestError,
    Route,
    ServerLimits,
)

__all__ = ["read_batch"]

_LARGEST_FEATURE = 1000.0
"""Largest absolute image feature; those of the protocol are L2-normalised."""


def read_batch(body: bytes, route: str, limits: ServerLimits, feature_size: int) -> tuple[str, RequestBatch]:
    """The route and the dialogues of a request.

    Args:
        body: of the request: a form, that of a batch JSON.
        route: name of the route; the body of a batch names that of its dialogues.
        limits: of the server.
        feature_size: number of image features.

    Raises:
        RequestError: with the field that is wrong.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import ServerLimits
        >>> from torchrl_lang.envs.visual_dialogue.request_reader import read_batch
        >>> read_batch(b"history=%5B%5D&caption=a+cat", "fetch_q_bot_response", ServerLimits(), feature_size=2)
        ('fetch_q_bot_response', RequestBatch(dialogues=[Dialogue(caption='a cat', rounds=())], questions=[], ...
    """
    if route != BATCH:
        form, name = _read_form(body), route
        items = [{field: _form_value(field, text) for field, text in form.items()}]
    else:
        content = _loads("body", body)
        _expect(isinstance(content, dict), "body", f"must be a JSON object, got {shorten(content)}")
        name = _given(content, "route")
        _expect(
            isinstance(name, str) and name in ROUTES, "route", f"must be one of {list(ROUTES)}, got {shorten(name)}"
        )
        items = _items(content, ROUTES[name], limits)
    kind = ROUTES[name]
    read = [_read_dialogue(item, kind, limits) for item in items]
    features = _read_features([_given(item, "img_features") for item in items], feature_size) if kind.sees else None
    return name, RequestBatch([each for each, _ in read], [asked for _, asked in read if asked is not None], features)


def _read_form(body: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError as error:  # not UTF-8, or too many fields
        raise RequestError(400, "body", f"must be a form, encoded as UTF-8 ({error})") from error
    form = dict(pairs)
    twice = next((name for name in form if sum(name == other for other, _ in pairs) > 1), None)
    _expect(twice is None, shorten(twice), "was given twice")
    return form


def _form_value(field: str, text: str) -> Any:
    """A field's value: the caption is plain, the others are JSON; fields that are not the protocol's are ignored."""
    return _loads(field, text) if field in ("history", "img_features", "generation_kwargs") else text


def _loads(field: str, text: str | bytes) -> Any:
    """Strict JSON: no NaN, no infinity, no repeated keys."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, field, f"is not valid JSON ({error})") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _expect(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise RequestError(400, field, message)


def _given(item: Mapping[str, Any], field: str) -> Any:
    _expect(field in item, field, "is missing")
    return item[field]


def _items(content: dict[str, Any], kind: Route, limits: ServerLimits) -> list[dict[str, Any]]:
    """The items of ``/batch``, each as the fields of a single request."""
    listed = ["history", "caption"] + ["img_features"] * kind.sees
    unknown = sorted(content.keys() - {"route", "history", "caption", "img_features", "generation_kwargs"})
    _expect(not unknown, "body", f"has unknown fields {shorten(unknown)}")
    for field in listed:
        _expect(isinstance(_given(content, field), list), field, f"must be a list, got {shorten(content[field])}")
    sizes = {field: len(content[field]) for field in listed}
    _expect(len(set(sizes.values())) == 1, "body", f"must have lists of one length, got {sizes}")
    if sizes["history"] > limits.items:
        raise RequestError(
            413, "history", f"has {sizes['history']} dialogues, this server takes {limits.items} at once"
        )
    shared = {field: content[field] for field in ("generation_kwargs",) if field in content}
    rows = zip(*(content[field] for field in listed), strict=True)
    return [{**shared, **dict(zip(listed, row, strict=True))} for row in rows]


def _read_dialogue(item: Mapping[str, Any], kind: Route, limits: ServerLimits) -> tuple[Dialogue, str | None]:
    """A dialogue, and the question that waits for its answer."""
    history = _given(item, "history")
    _expect(isinstance(history, list), "history", f"must be a list, got {shorten(history)}")
    if len(history) > 2 * limits.rounds:
        raise RequestError(413, "history", f"has {len(history)} texts, this server takes {2 * limits.rounds}")
    texts = [_utterance(entry, place, limits) for place, entry in enumerate(history)]
    ending = "a question" if kind.asks else "an answer, or be empty"
    _expect(len(texts) % 2 == kind.asks, "history", f"must end with {ending} on this route, got {len(texts)} texts")
    given = item.get("generation_kwargs", GREEDY)
    _expect(given == GREEDY, "generation_kwargs", f"must be {json.dumps(GREEDY)}, got {shorten(given)}")
    caption = _text("caption", _given(item, "caption"), limits.text)
    rounds = tuple(Round(*texts[start : start + 2]) for start in range(0, len(texts) - 1, 2))
    return Dialogue(caption, rounds), texts[-1] if kind.asks else None


def _utterance(entry: Any, place: int, limits: ServerLimits) -> str:
    """A text of the history; questions and answers take turns, beginning with a question."""
    known = isinstance(entry, dict) and entry.keys() == {"speaker", "text"}
    _expect(known, "history", f'must hold objects with "speaker" and "text", item {place} is {shorten(entry)}')
    speaker = ("question", "answer")[place % 2]
    found = shorten(entry["speaker"])
    _expect(entry["speaker"] == speaker, "history", f'must alternate: speaker {place} must be "{speaker}", got {found}')
    return _text("history", entry["text"], limits.text)


def _text(field: str, text: Any, longest: int) -> str:
    _expect(isinstance(text, str), field, f"must be a text, got {shorten(text)}")
    if len(text) > longest:
        raise RequestError(413, field, f"has a text of {len(text)} characters, this server takes {longest}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(400, field, f"has a lone surrogate in {shorten(text)}") from error
    return text


def _read_features(rows: list[Any], size: int) -> Tensor:
    for row in rows:
        _expect(isinstance(row, list), "img_features", f"must be a list of numbers, got {shorten(row)}")
        _expect(len(row) == size, "img_features", f"must have {size} numbers, got {len(row)}")
        numbers = set(map(type, row)) <= {float, int}  # no bool
        if not numbers or max(row) > _LARGEST_FEATURE or min(row) < -_LARGEST_FEATURE:
            found = shorten(next(value for value in row if not _is_feature(value)))
            raise RequestError(400, "img_features", f"must be numbers of at most {_LARGEST_FEATURE:g}, got {found}")
    return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), size)


def _is_feature(value: Any) -> bool:
    return type(value) in (float, int) and -_LARGEST_FEATURE <= value <= _LARGEST_FEATURE
