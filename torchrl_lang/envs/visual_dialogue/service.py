"""Answers requests with dialogue models: read, queued for the model thread, counted. No web framework."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterable, Mapping
from dataclasses import asdict
from typing import Any

from torchrl_lang.envs.visual_dialogue.dialogue import DialogueModels
from torchrl_lang.envs.visual_dialogue.model_queue import ModelQueue, Questioner
from torchrl_lang.envs.visual_dialogue.protocol import BATCH, RequestError, ServerLimits, error_reply
from torchrl_lang.envs.visual_dialogue.request_reader import read_batch

__all__ = ["DialogueService"]

_BODY_SECONDS = 30.0
_READ_TO_REJECT = 4
"""Multiple of the largest body that is read before it is rejected."""
_FORM = "application/x-www-form-urlencoded"


class DialogueService:
    """What a server replies, for :class:`~torchrl_lang.envs.visual_dialogue.DialogueServer`, which has the arguments.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import ServerLimits
        >>> from torchrl_lang.envs.visual_dialogue.service import DialogueService
        >>> class Models:
        ...     feature_size = 2
        >>> service = DialogueService(Models(), None, name="none", limits=ServerLimits())
        >>> service.health()["counts"]
        {'requests': 0, 'rejected': 0, 'batches': 0, 'dialogues': 0, 'failures': 0}
        >>> service.close()
    """

    def __init__(
        self, models: DialogueModels, questioner: Questioner | None, *, name: str, limits: ServerLimits
    ) -> None:
        self.name, self.limits, self.feature_size = name, limits, models.feature_size
        self.counts = Counter({"requests": 0, "rejected": 0})
        self._began = time.monotonic()
        self._queue = ModelQueue(models, questioner, size=limits.queue)

    def health(self) -> dict[str, Any]:
        """The reply of ``/health``."""
        return {
            "model": self.name,
            "feature_size": self.feature_size,
            "questioner": self._queue.questioner is not None,
            "queue": len(self._queue),
            "counts": {**self.counts, **self._queue.counts},
            "limits": asdict(self.limits),
            "uptime": time.monotonic() - self._began,
        }

    async def answer(self, route: str, headers: Mapping[str, str], chunks: AsyncIterable[bytes]) -> tuple[Any, int]:
        """The content and the status of the reply to a POST.

        Args:
            route: name of the route.
            headers: of the request, their names in lower case.
            chunks: its body.
        """
        self.counts["requests"] += 1
        try:
            body = await self._body(int(headers.get("content-length", 0)), chunks)
            if route != BATCH and not headers.get("content-type", _FORM).startswith(_FORM):
                raise RequestError(415, "body", f"must be a form, sent as {_FORM}")
            name, batch = read_batch(body, route, self.limits, self.feature_size)
            replies = await asyncio.wrap_future(self._queue.submit(name, batch))
        except RequestError as error:
            self.counts["rejected"] += error.status < 500
            return error_reply(str(error), error.field), error.status
        return (replies if route == BATCH else replies[0]), 200

    def close(self) -> None:
        """Answer what waits, then stop."""
        self._queue.close()

    async def _body(self, declared: int, chunks: AsyncIterable[bytes]) -> bytes:
        """The body of a request, which must arrive in time.

        One that is too large is read as well, within limits: a client that is still sending would not read the reply.
        """
        body, size, largest = bytearray(), 0, self.limits.body
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for chunk in chunks:
                    size += len(chunk)
                    if max(size, declared) <= largest:
                        body += chunk
                    elif max(size, declared) > _READ_TO_REJECT * largest:
                        break
        except TimeoutError:
            raise RequestError(408, "body", f"did not arrive within {_BODY_SECONDS:g} seconds") from None
        if max(size, declared) > largest:
            raise RequestError(413, "body", f"is larger than {largest} bytes")
        return bytes(body)
