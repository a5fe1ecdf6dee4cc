"""Toxicity by a moderation endpoint with the protocol of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang._files import shorten
from torchrl_lang._http import JSONOverHTTP
from torchrl_lang.envs.reddit.rewards.token_bucket import SYSTEM_CLOCK, Clock, TokenBucket

__all__ = ["ModerationAPIReward"]


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
        burst: requests that may be sent at once, see :class:`TokenBucket`.
        retries: times that a request is sent again.
        longest_wait: seconds before a retry, at most, unless the server asks for more.
        clock: what measures and waits.
        **connection: ``timeout``, ``first_wait`` and ``longest_asked_wait``: seconds of a request, before the
            first retry, and of the longest wait that the server may ask for.

    Raises:
        ValueError: an option is out of range, the variable holds no key, the server rejects a request, or its reply is
            none of the protocol.
        ConnectionError: after all retries there is no reply.

    Examples:
        >>> from torchrl_lang.envs.reddit.rewards import ModerationAPIReward
        >>> ModerationAPIReward("http://localhost:8000/v1", "moderation", key_variable=None)
        ModerationAPIReward('http://localhost:8000/v1', 'moderation', score='flagged')
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        score: str = "flagged",
        key_variable: str | None = "OPENAI_API_KEY",
        batch_size: int = 32,
        rate: float = 5.0,
        burst: int = 5,
        retries: int = 6,
        longest_wait: float = 30.0,
        clock: Clock = SYSTEM_CLOCK,
        **connection: Any,
    ) -> None:
        # The address is set when it is checked: before, it may hold a password, and tracebacks show representations.
        self.url = ""
        self.model, self.score, self.key_variable, self.batch_size = model, score, key_variable, batch_size
        at_least_one("batch_size", batch_size)
        bucket = TokenBucket(rate, burst=burst, clock=clock)
        self._http = JSONOverHTTP(
            base_url,
            key_variable=key_variable,
            retries=retries,
            longest_wait=longest_wait,
            sleep=clock.sleep,
            before=bucket.take,
            **connection,
        )
        self.url = self._http.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, {self.model!r}, score={self.score!r})"

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
        reply = self._http.post("/moderations", body, "application/json")
        try:
            return self._read(reply, len(texts))
        except ValueError as error:
            problem = str(error)
        del reply  # tracebacks can show local variables, and the reply may repeat the key
        raise ValueError(problem)

    def _read(self, reply: Any, expected: int) -> list[float]:
        results = reply.get("results") if isinstance(reply, Mapping) else None
        if not isinstance(results, list) or len(results) != expected:
            found = f"{len(results)} results" if isinstance(results, list) else "no list of results"
            raise ValueError(f"{self.url}/moderations replied {found} for {expected} texts.")
        return [self._value(result) for result in results]

    def _value(self, result: Any) -> float:
        place = f"{self.url}/moderations replied a result"
        if not isinstance(result, Mapping):
            raise ValueError(f"{place} that is no JSON object.")
        if self.score == "flagged":
            if not isinstance(result.get("flagged"), bool):
                raise ValueError(f'{place} without "flagged", true or false.')
            return float(result["flagged"])
        scores = result.get("category_scores")
        if not isinstance(scores, Mapping) or not scores:
            raise ValueError(f'{place} without "category_scores".')
        if self.score == "largest":
            return max(self._read_score(name, score) for name, score in scores.items())
        if self.score not in scores:
            categories = self._http.shown(str(sorted(scores)))
            raise ValueError(f"{place} without a score of {self.score!r}; its categories are {categories}.")
        return self._read_score(self.score, scores[self.score])

    def _read_score(self, name: str, score: Any) -> float:
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
            found = score if isinstance(score, int | float) else self._http.shown(shorten(score))
            raise ValueError(f"The score of {self._http.shown(name)} must be a number from 0 to 1, got {found}.")
        return float(score)
