"""Environments whose seed alone determines their episodes, whatever the batch size."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torchrl.envs import EnvBase

__all__ = ["SeededEnv"]


class SeededEnv(EnvBase):
    """The seed and the episode counter of a batched environment. Abstract: subclasses begin and step episodes.

    The ``k``-th row to be reset plays episode ``k`` of the seed: draw what an episode begins with from
    :func:`~torchrl_lang.functional.random_index` with ``self._key`` and the numbers of :meth:`_number_episodes`.

    A copy of an environment with a seed continues as the original would; a copy of one without a seed takes a new seed.

    Args:
        batch_size: number of parallel rows, as a torch size.
        device: device of the tensors.

    Call :meth:`_set_seed` at the end of the subclass's ``__init__``.

    Examples:
        >>> from torchrl_lang.envs import LanguageEnv
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> from torchrl_lang.envs.seeded_env import SeededEnv
        >>> issubclass(LanguageEnv, SeededEnv), issubclass(DarkRoomEnv, SeededEnv)
        (True, True)
    """

    def __init__(
        self, *, batch_size: int | Sequence[int] = (1,), device: torch.device | str | int | None = None
    ) -> None:
        batch = torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)
        super().__init__(device=device, batch_size=batch)
        self._n = batch.numel()
        self.generator = torch.Generator()

    def _set_seed(self, seed: int | None) -> None:
        self._seeded = seed is not None
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(operator.index(seed))
        key = torch.randint(2**62, (), generator=self.generator, device=self.generator.device)
        self._key = key.to(self.device) if self.device is not None else key
        self._episode = torch.zeros((), dtype=torch.int64, device=self.device)

    def _number_episodes(self, fresh: Tensor) -> Tensor:
        """Count the episodes that begin in the ``fresh`` rows, bool ``[N]``, and number them; others' are undefined."""
        number = self._episode + fresh.cumsum(-1) - 1
        self._episode = self._episode + fresh.sum()
        return number

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self._seeded:
            self._set_seed(None)

    def to(self, device: torch.device | str | int) -> Self:
        """Move to a device. Moving to another device drops the current rows: call ``reset`` next."""
        before = self.device
        super().to(device)
        if self.device != before:
            self._key, self._episode = self._key.to(self.device), self._episode.to(self.device)
            self._drop_rows()
        return self

    def _drop_rows(self) -> None:
        """Drop the current episodes, which are on another device."""
        raise NotImplementedError
