"""One thread that runs the models, and a bounded queue in front of it: waiting requests are answered as one batch."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels
from torchrl_lang.envs.visual_dialogue.protocol import REPLIES, ROUTES, RequestBatch, RequestError
from torchrl_lang.envs.visual_dialogue.scoring import answer_and_score, last_round_rewards, measured

__all__ = ["ModelQueue", "Questioner"]

Questioner = Callable[[Sequence[Dialogue]], list[str]]
"""Asks the next question of each dialogue; it raises :class:`RequestError` for a dialogue that it cannot read."""

_LOG = logging.getLogger(__name__)


class _Work(NamedTuple):
    route: str
    batch: RequestBatch
    replies: Future[list[Any]]


class ModelQueue:
    """Runs the models for many requests, in one thread, in the order of their arrival.

    All requests that wait while the models are busy are answered next, those of one route as one batch. If a batch
    fails, its requests are answered one at a time, so that only those that are at fault fail.

    Args:
        models: that answer and guess.
        questioner: that asks, if any.
        size: requests that may wait.
        batch: dialogues at which a batch is full; the request that fills it is not split.
    """

    def __init__(self, models: DialogueModels, questioner: Questioner | None, *, size: int, batch: int = 256) -> None:
        self.models, self.questioner, self.batch = models, questioner, batch
        self.counts = Counter({"batches": 0, "dialogues": 0, "failures": 0})
        self._waiting: queue.Queue[_Work | None] = queue.Queue(size)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="visual dialogue models", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return self._waiting.qsize()

    def submit(self, route: str, batch: RequestBatch) -> Future[list[Any]]:
        """The replies to come, one a dialogue.

        Raises:
            RequestError: 503, if the queue is full.
        """
        work = _Work(route, batch, Future())
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            raise RequestError(503, f"{self._waiting.maxsize} requests are waiting: send it again later") from None
        return work.replies

    def close(self, timeout: float = 30.0) -> None:
        """Answer what waits, then stop."""
        try:
            self._waiting.put(None, timeout=timeout)
        except queue.Full:  # the models hang; the thread ends with the process
            return
        self._thread.join(timeout)

    @torch.no_grad()
    def _run(self) -> None:
        while not self._ended:
            works = self._next()
            for route in dict.fromkeys(work.route for work in works):
                self._answer([work for work in works if work.route == route])

    def _next(self) -> list[_Work]:
        """All that waits, up to a full batch."""
        works: list[_Work] = []
        dialogues = 0
        while not works or (dialogues < self.batch and not self._waiting.empty()):
            work = self._waiting.get()
            if work is None:
                self._ended = True
                break
            if work.replies.set_running_or_notify_cancel():
                works.append(work)
                dialogues += len(work.batch.dialogues)
        return works

    def _answer(self, works: Sequence[_Work]) -> None:
        """Answer requests of one route together; if that fails, one at a time."""
        batch = RequestBatch.joined([work.batch for work in works])
        self.counts.update(batches=1, dialogues=len(batch.dialogues))
        try:
            replies = self._replies(works[0].route, batch) if batch.dialogues else []
        except Exception as error:
            if len(works) > 1:
                for work in works:
                    self._answer([work])
                return
            self._fail(works[0], error)
            return
        for work in works:
            count = len(work.batch.dialogues)
            work.replies.set_result(replies[:count])
            replies = replies[count:]

    def _fail(self, work: _Work, error: Exception) -> None:
        """The client gets no more than that it failed; the reason is for the server's log."""
        if not isinstance(error, RequestError):
            self.counts["failures"] += 1
            _LOG.error("The models failed on a request of %s.", work.route, exc_info=error)
            error = RequestError(500, "the models failed on this request; the server's log has the reason")
        work.replies.set_exception(error)

    def _replies(self, route: str, batch: RequestBatch) -> list[Any]:
        """Replies that the protocol has; raises ValueError for others."""
        kind, (dialogues, questions, _) = ROUTES[route], batch
        features: Any = batch.features  # given where the route needs them, as its measure is
        measure: Any = kind.measure
        replies: Any
        if kind.replies == "question":
            if self.questioner is None:
                raise RequestError(404, "this server has no questioner: start it with one")
            replies = self.questioner(dialogues)
        elif kind.replies == "answer":
            replies = self.models.answers(dialogues, questions, features)
        elif kind.replies == "step":
            replies = zip(*answer_and_score(self.models, dialogues, questions, features, measure=measure), strict=True)
        elif kind.replies == "reward":
            replies = last_round_rewards(self.models, dialogues, features, measure=measure)
        else:
            replies = measured(self.models, dialogues, features, measure)
        checked: list[Any] = REPLIES[route].validate_python(list(replies))
        if len(checked) != len(dialogues):
            raise ValueError(f"Expected {len(dialogues)} replies of the models, got {len(checked)}.")
        return checked
