"""Environments whose seed alone determines their episodes, whatever the batch size."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Self, TypedDict

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchrl_lang import schema
from torchrl_lang.envs.row_state import read_mask

Device = torch.device | str | int | None


class EnvOptions(TypedDict, total=False):
    """Options that every environment takes: the number of parallel rows as a torch size, a seed and a device."""

    batch_size: int | Sequence[int]
    seed: int | None
    device: Device


class SeededEpisodes(EnvBase):
    """The seed, the episode counter and the specs of outcomes of a batched environment, also beside another base class.

    The ``k``-th row to be reset plays episode ``k`` of the seed: draw what an episode begins with from
    ``random_index`` with ``self._key`` and the numbers of :meth:`_number_episodes`.

    A copy of an environment with a seed continues as the original would; a copy of one without a seed takes a new seed.
    """

    generator: torch.Generator

    def _set_seed(self, seed: int | None) -> None:
        self._seeded = seed is not None
        self.generator.seed() if seed is None else self.generator.manual_seed(operator.index(seed))
        self._key = torch.randint(2**62, (), generator=self.generator, device="cpu").to(self.device)
        self._episode = torch.zeros((), dtype=torch.int64, device=self.device)

    def _number_episodes(self, fresh: Tensor) -> Tensor:
        """Count the episodes that begin in the ``fresh`` rows, bool ``[N]``, and number them; others' are undefined."""
        number = self._episode + fresh.cumsum(-1) - 1
        self._episode = self._episode + fresh.sum()
        return number

    def _set_outcome_specs(self) -> None:
        """Set the specs of the reward and the flags of a turn."""
        batch, device = self.batch_size, self.device
        self.reward_spec = Unbounded(shape=(*batch, 1), dtype=torch.float32, device=device)
        done = {key: flags(batch, 1, device) for key in (schema.DONE, schema.TERMINATED, schema.TRUNCATED)}
        self.full_done_spec = Composite(done, shape=batch, device=device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self._seeded:
            self._set_seed(None)


class SeededEnv(SeededEpisodes):
    """A batched environment whose seed determines its episodes. Abstract: subclasses begin and step episodes.

    Call :meth:`_set_specs` in the subclass's ``__init__``.
    """

    _rows: Any = None
    """The current episodes; None before the first reset and on another device."""
    _terminated: Tensor
    _truncated: Tensor

    def __init__(
        self, *, batch_size: int | Sequence[int] = (1,), seed: int | None = None, device: Device = None
    ) -> None:
        batch = torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)
        super().__init__(device=device, batch_size=batch)
        self._n = batch.numel()
        self.generator = torch.Generator()
        self._set_seed(seed)

    def _set_specs(self, observation: dict[str, Any], action: TensorSpec) -> None:
        self.observation_spec = Composite(observation, shape=self.batch_size, device=self.device)
        self.action_spec = action
        self._set_outcome_specs()

    def _rows_to_step(self, tensordict: TensorDictBase) -> Tensor:
        """The rows that are not done and that a ``"_step"`` mask does not exclude, bool ``[N]``."""
        live, mask = ~(self._terminated | self._truncated), read_mask("_step", tensordict, self._n)
        return live if mask is None else live & mask

    def _rows_to_reset(self, tensordict: TensorDictBase | None) -> Tensor:
        """The rows of a ``"_reset"`` mask, all without one, bool ``[N]``."""
        mask = read_mask("_reset", tensordict, self._n)
        fresh = torch.ones(self._n, dtype=torch.bool, device=self.device) if mask is None else mask
        if self._rows is None and not fresh.all():
            raise RuntimeError(f"The first reset of {type(self).__name__} must reset every row: omit '_reset'.")
        return fresh

    def to(self, device: torch.device | str | int) -> Self:
        """Move to a device. Moving to another device drops the current rows: call ``reset`` next."""
        before = self.device
        super().to(device)
        if self.device != before:
            self._key, self._episode = self._key.to(self.device), self._episode.to(self.device)
            self._rows = None
        return self

    def _begun(self) -> Any:
        if self._rows is None:
            raise RuntimeError(f"{type(self).__name__} was used before its first reset: call reset() first.")
        return self._rows


def flags(batch: torch.Size, n: int, device: torch.device | None) -> Binary:
    """``n`` flags per row: bool ``[*B, n]``."""
    return Binary(n=n, shape=(*batch, n), dtype=torch.bool, device=device)


def token_ids(vocab_size: int, batch: torch.Size, *shape: int, device: torch.device | None) -> Categorical:
    """Token ids, int64 ``[*B, *shape]``."""
    return Categorical(vocab_size, shape=(*batch, *shape), dtype=torch.int64, device=device)


def row_specs(vocab_size: int, batch: torch.Size, width: int, device: torch.device | None) -> dict[str, TensorSpec]:
    """The four entries of a row, ``[*B, T]``."""
    return {
        schema.TOKENS: token_ids(vocab_size, batch, width, device=device),
        schema.ATTENTION_MASK: flags(batch, width, device),
        schema.AGENT_MASK: flags(batch, width, device),
        schema.TOKEN_REWARD: Unbounded(shape=(*batch, width), dtype=torch.float32, device=device),
    }


def feature_specs(batch: torch.Size, size: tuple[int, int], device: torch.device | None) -> dict[str, TensorSpec]:
    """Specs of ``features`` ``[*B, P, F]`` and ``features_mask`` ``[*B, P]`` for a ``size`` of ``(P, F)``."""
    features = Unbounded(shape=(*batch, *size), dtype=torch.float32, device=device)
    return {schema.FEATURES: features, schema.FEATURES_MASK: flags(batch, size[0], device)}
