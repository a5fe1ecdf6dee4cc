"""Samplers that visit every row once per epoch and resume exactly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

__all__ = ["BucketSampler", "EpochSampler"]


class EpochSampler(Sampler):
    """Sampling without replacement whose order depends on seed and epoch only.

    TorchRL's ``SamplerWithoutReplacement`` saves the rest of its permutation, but not the random generator of the next
    one. Here the whole state is four numbers, and a sampler that loads them returns the same batches as the original.

    An epoch covers the rows in the storage when it begins. Its last batch is smaller if the batch size does not divide
    their number; ``drop_last`` drops it. Iteration over the replay buffer ends with the epoch. With ``prefetch`` the
    replay buffer samples ahead of its user, and the saved state includes these batches.

    Args:
        seed: seed of the orders.
        drop_last: drop an epoch's last, smaller batch; each epoch drops other rows.

    Attributes:
        epoch: the epoch of the last batch, counted from zero; -1 before the first batch.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl_lang.data import EpochSampler
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=EpochSampler(seed=0), batch_size=2)
        >>> _ = buffer.extend(TensorDict(x=torch.arange(5), batch_size=[5]))
        >>> epoch = [batch["x"] for batch in buffer]
        >>> [len(x) for x in epoch], sorted(torch.cat(epoch).tolist())
        ([2, 2, 1], [0, 1, 2, 3, 4])
    """

    ran_out = False
    """Whether the last batch was the last one of its epoch. (The replay buffer resets it.)"""

    def __init__(self, *, seed: int = 0, drop_last: bool = False) -> None:
        if seed < 0:
            raise ValueError(f"The seed of a sampler must not be negative, got {seed}.")
        self.seed, self.drop_last = seed, drop_last
        self.epoch, self._position, self._size = -1, 0, 0
        self._order: Tensor | None = None

    def order(self, size: int, epoch: int) -> Tensor:
        """The order of the rows in an epoch, int64 ``[size]``."""
        return torch.from_numpy(np.random.default_rng([self.seed, epoch]).permutation(size))

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Indices of the next batch."""
        rows = len(storage)
        if rows == 0:
            raise RuntimeError("The replay buffer is empty: extend it before you sample.")
        if self.drop_last and rows < batch_size:
            raise ValueError(
                f"drop_last=True leaves no batch of {batch_size} from {rows} rows: use a smaller batch size."
            )
        if self._left(batch_size) <= 0 or rows < self._size:
            self.epoch, self._position, self._size, self._order = self.epoch + 1, 0, rows, None
        if self._order is None:
            self._order = self.order(self._size, self.epoch)
        index = self._order[self._position : self._position + batch_size]
        self._position += len(index)
        self._remaining_batches = self._left(batch_size)
        self.ran_out = self._remaining_batches <= 0
        return index, {}

    def _left(self, batch_size: int) -> int:
        """Number of batches left in the epoch."""
        rows = self._size - self._position
        return rows // batch_size if self.drop_last else -(-rows // batch_size)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether another batch can be sampled."""
        return len(storage) >= (batch_size if self.drop_last else 1)

    def _empty(self) -> None:
        self.epoch, self._position, self._size, self._order, self.ran_out = -1, 0, 0, None, False

    def state_dict(self) -> dict[str, Any]:
        """Four integers that can be written as JSON."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self._position, "size": self._size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state, including its seed."""
        self.seed, self.epoch, self._position, self._size = (
            int(state_dict[key]) for key in ("seed", "epoch", "position", "size")
        )
        self._order, self.ran_out = None, False

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the state as JSON into a folder."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "sampler.json").write_text(json.dumps(self.state_dict()) + "\n")

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Read the state that :meth:`dumps` wrote."""
        self.load_state_dict(json.loads((Path(path) / "sampler.json").read_text()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seed={self.seed}, epoch={self.epoch}, {self._position} of {self._size} rows)"


class BucketSampler(EpochSampler):
    """Batch rows of similar length to reduce padding; each row is still sampled once per epoch.

    The rows are shuffled and cut into pools of ``pool`` batches. Each pool is sorted by length and cut into batches,
    and the batches are shuffled. The rows of a batch are therefore similar in length and in whatever correlates with
    it: if long episodes are bad ones, some batches hold only bad episodes.

    Args:
        lengths: int64 ``[N]``, number of real tokens of each row in the storage, which must not change.
        batch_size: rows per batch; must be the replay buffer's.
        seed: seed of the orders.
        pool: number of batches that are sorted together; more of them reduce padding and variety.
        drop_last: drop an epoch's last, smaller batch.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import BucketSampler
        >>> sampler = BucketSampler(torch.tensor([3, 9, 3, 9]), 2)
        >>> sorted(sorted(batch) for batch in sampler.order(4, epoch=0).view(2, 2).tolist())
        [[0, 2], [1, 3]]
    """

    def __init__(
        self, lengths: Tensor, batch_size: int, *, seed: int = 0, pool: int = 16, drop_last: bool = False
    ) -> None:
        super().__init__(seed=seed, drop_last=drop_last)
        if batch_size < 1 or pool < 1:
            raise ValueError(f"batch_size and pool must be at least 1, got {batch_size} and {pool}.")
        self.lengths = lengths.cpu().numpy()
        self.batch_size, self.pool = batch_size, pool

    def order(self, size: int, epoch: int) -> Tensor:
        """The order of the rows in an epoch, int64 ``[size]``, with the smaller batch last."""
        if size != len(self.lengths):
            raise ValueError(f"The storage holds {size} rows, but the sampler has {len(self.lengths)} lengths.")
        random = np.random.default_rng([self.seed, epoch])
        shuffled = random.permutation(size)
        whole = size - size % self.batch_size
        pools = np.arange(whole) // (self.batch_size * self.pool)
        # Sort by pool, then by length; rows of equal length keep their shuffled order.
        by_length = np.lexsort((self.lengths[shuffled[:whole]], pools))
        batches = random.permutation(shuffled[:whole][by_length].reshape(-1, self.batch_size))
        return torch.from_numpy(np.concatenate([batches.reshape(-1), shuffled[whole:]]))

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Indices of the next batch."""
        if batch_size != self.batch_size:
            raise ValueError(f"Got batch_size={batch_size}, but the sampler was built for {self.batch_size}.")
        return super().sample(storage, batch_size)
