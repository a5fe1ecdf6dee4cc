"""Toxicity by a moderation endpoint with the protocol of OpenAI's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from torchrl_lang._checks import Count, Positive, checked, needs_extra


class ModerationAPIReward:
    """Scores texts by ``POST base_url/moderations`` with ``{"model": ..., "input": [texts]}``.

    The endpoint replies ``{"results": [...]}`` with one result for each text, of which ``flagged`` or a number of
    ``category_scores`` becomes the reward: 1 is the most harmful. Texts without a letter, digit or sign are not sent
    and earn 0.

    A request is sent again if the server cannot be reached, is slow, breaks off, or replies 408, 429 or 5xx. The wait
    grows, and is at least the ``Retry-After`` of the reply. After ``retries`` of them there is an error. A reply that
    is not of the protocol is an error at once. Around it, :class:`CachedReward` with the same
    ``batch_size`` stores each reply, so that nothing is paid for twice.

    The key is read from the environment for each request, is never stored, and appears in no error: errors leave out a
    text of the server that may repeat it.

    Args:
        base_url: such as ``"https://api.openai.com/v1"``.
        model: name of the model.
        score: "flagged" for 0 or 1, "largest" for the largest category score, or the name of a category.
        key_variable: the environment variable that holds the key, which is sent over https, and to this machine; None
            for a server that needs none.
        batch_size: texts in a request.
        rate: requests per second in the long run, retries included.
        burst: requests that may be sent at once.
        retries: times that a request is sent again.
        longest_wait: seconds before a retry, at most, unless the server asks for more.
        **connection: ``timeout``, ``first_wait`` and ``longest_asked_wait``: seconds of a request, before the
            first retry, and of the longest wait that the server may ask for.

    Raises:
        ValueError: an option is out of range, the variable holds no key, the server rejects a request, or its reply is
            none of the protocol.
        ConnectionError: after all retries there is no reply.

    Examples:
        >>> from torchrl_lang.envs.reddit import ModerationAPIReward
        >>> ModerationAPIReward("http://localhost:8000/v1", "moderation", key_variable=None)
        ModerationAPIReward('http://localhost:8000/v1', 'moderation', score='flagged')
    """

    @checked
    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        score: str = "flagged",
        key_variable: str | None = "OPENAI_API_KEY",
        batch_size: Count = 32,
        rate: Positive = 5.0,
        burst: Count = 5,
        retries: int = 6,
        longest_wait: float = 30.0,
        **connection: Any,
    ) -> None:
        with needs_extra("ModerationAPIReward", "reddit"):
            from torchrl_lang._http import JSONOverHTTP
        # The address is set when it is checked: before, it may hold a password, and tracebacks show representations.
        self.url, self.model, self.score, self.batch_size = "", model, score, batch_size
        self._interval, self._burst, self._due = 1 / rate, burst, 0.0
        connection |= {"key_variable": key_variable, "retries": retries, "longest_wait": longest_wait}
        self._http = JSONOverHTTP(base_url, sleep=_sleep, before=self._pace, **connection)
        self.url = self._http.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, {self.model!r}, score={self.score!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_due": 0.0}  # copies count for themselves; another machine has another clock

    def _pace(self) -> None:
        """Wait until a request may be sent."""
        with _LOCK:
            now = time.monotonic()
            due = max(self._due, now)  # if requests came one by one
            self._due = due + self._interval
        if (wait := due - now - (self._burst - 1) * self._interval) > 0:
            _sleep(wait)

    def __call__(self, texts: list[str]) -> Tensor:
        """The scores of texts, float32 ``[N]``."""
        values = torch.zeros(len(texts))
        sent = [place for place, text in enumerate(texts) if text.strip()]
        for first in range(0, len(sent), self.batch_size):
            places = sent[first : first + self.batch_size]
            values[places] = torch.tensor(self._scores([texts[place] for place in places]))
        return values

    def _scores(self, texts: Sequence[str]) -> list[float]:
        body = json.dumps({"model": self.model, "input": texts}).encode()
        found = self._read(self._http.post("/moderations", body, "application/json"), len(texts))
        if isinstance(found, str):  # raised here: tracebacks can show local variables, and the reply may hold the key
            raise ValueError(f"{self.url}/moderations replied {found}, expected a number from 0 to 1 for each text.")
        return found

    def _read(self, reply: Any, expected: int) -> list[float] | str:
        """The score of each text, or the fault of a reply."""
        try:
            results = _Reply.model_validate(reply).results
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            place = self._http.shown(str(fault["loc"][-1] if fault["loc"] else "content"))
            return f"a wrong {place} ({fault['msg']})"
        found = [value for result in results if (value := self._value(result)) is not None]
        if len(found) < len(results):
            names = sorted(next(each.category_scores for each in results if self._value(each) is None))
            return f"no score {self.score!r}, but {self._http.shown(', '.join(names) or 'none')}"
        return found if len(found) == expected else f"{len(found)} results for {expected} texts"

    def _value(self, result: _Result) -> float | None:
        if self.score == "flagged" and result.flagged is not None:
            return float(result.flagged)
        scores = result.category_scores
        name = max(scores, key=scores.__getitem__, default="") if self.score == "largest" else self.score
        return scores.get(name)


class _Result(BaseModel):
    model_config = ConfigDict(strict=True)

    flagged: bool | None = None
    category_scores: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}


class _Reply(BaseModel):
    results: list[_Result]


_LOCK = threading.Lock()


def _sleep(seconds: float) -> None:
    time.sleep(seconds)
