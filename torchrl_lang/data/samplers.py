"""Samplers that visit every row once an epoch and resume exactly where they stood."""

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
    """Sampling without replacement whose order is a function of seed and epoch alone.

    TorchRL's ``SamplerWithoutReplacement`` saves what is left of its permutation but draws the next one from a random
    stream that it does not save, and it fills the last batch of an epoch from the next epoch or not depending on
    circumstance. Here the whole state is four numbers, and a sampler that loads them gives the very batches that the
    other would have given.

    An epoch covers the rows that are in the storage when it begins. Its last batch is smaller where the batch size does
    not divide their number, or is left out with ``drop_last``. Iterating over the replay buffer ends with the epoch.
    With ``prefetch`` a replay buffer samples ahead of what its user has seen, and so does the saved state.

    Args:
        seed: seed of the orders.
        drop_last: leave out an epoch's last, smaller batch; other rows are left out in each epoch.

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

    def __init__(self, *, seed: int = 0, drop_last: bool = False) -> None:
        if seed < 0:
            raise ValueError(f"The seed of a sampler must not be negative, got {seed}.")
        self.seed, self.drop_last = seed, drop_last
        self._epoch, self._position, self._size = -1, 0, 0
        self._order: Tensor | None = None
        self._ran_out = False

    def order(self, size: int, epoch: int) -> Tensor:
        """The rows in the order of an epoch, int64 ``[size]``."""
        return torch.from_numpy(np.random.default_rng([self.seed, epoch]).permutation(size))

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Indices of the next batch."""
        rows = len(storage)
        if rows == 0:
            raise RuntimeError("The replay buffer is empty: extend it before you sample.")
        if self.drop_last and rows < batch_size:
            raise ValueError(
                f"drop_last=True leaves no batch of {batch_size} out of {rows} rows: take a smaller batch."
            )
        if self._left(batch_size) <= 0 or rows < self._size:
            self._epoch, self._position, self._size, self._order = self._epoch + 1, 0, rows, None
        if self._order is None:
            self._order = self.order(self._size, self._epoch)
        index = self._order[self._position : self._position + batch_size]
        self._position += len(index)
        self._remaining_batches = self._left(batch_size)
        self._ran_out = self._remaining_batches <= 0
        return index, {}

    def _left(self, batch_size: int) -> int:
        """Batches left in the epoch."""
        rows = self._size - self._position
        return rows // batch_size if self.drop_last else -(-rows // batch_size)

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, counted from zero; -1 before the first."""
        return self._epoch

    @property
    def ran_out(self) -> bool:
        """The last batch was the last of its epoch."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = value

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether there is a batch to be had."""
        return len(storage) >= (batch_size if self.drop_last else 1)

    def _empty(self) -> None:
        self._epoch, self._position, self._size, self._order, self._ran_out = -1, 0, 0, None, False

    def state_dict(self) -> dict[str, Any]:
        """Four integers, ready for JSON."""
        return {"seed": self.seed, "epoch": self._epoch, "position": self._position, "size": self._size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; the seed is the saved one's."""
        self.seed, self._epoch, self._position, self._size = (
            int(state_dict[key]) for key in ("seed", "epoch", "position", "size")
        )
        self._order, self._ran_out = None, False

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the state as JSON into a folder."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "sampler.json").write_text(json.dumps(self.state_dict()) + "\n")

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Read what :meth:`dumps` wrote."""
        self.load_state_dict(json.loads((Path(path) / "sampler.json").read_text()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seed={self.seed}, epoch={self._epoch}, {self._position} of {self._size} rows)"


class BucketSampler(EpochSampler):
    """Rows of similar length share a batch, so that little of it is padding; still each row once an epoch.

    The rows are shuffled, cut into pools of ``pool`` batches, each pool is sorted by length and cut into batches, and
    the batches are shuffled. An epoch is what it was, but a single batch is of one length, and of whatever goes with
    length: where long episodes are bad ones, some batches hold nothing else.

    Args:
        lengths: int64 ``[N]``, real tokens of each row of the storage, which must not change.
        batch_size: the size of all batches; the replay buffer must be given the same.
        seed: seed of the orders.
        pool: batches that are sorted together; more means less padding and less variety.
        drop_last: leave out an epoch's last, smaller batch.

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
        """The rows in the order of an epoch, int64 ``[size]``, the smaller batch last."""
        if size != len(self.lengths):
            raise ValueError(f"The storage holds {size} rows, the sampler knows the lengths of {len(self.lengths)}.")
        random = np.random.default_rng([self.seed, epoch])
        shuffled = random.permutation(size)
        whole = size - size % self.batch_size
        pools = np.arange(whole) // (self.batch_size * self.pool)
        # By pool, then by length; what is equal stays in its shuffled order.
        by_length = np.lexsort((self.lengths[shuffled[:whole]], pools))
        batches = random.permutation(shuffled[:whole][by_length].reshape(-1, self.batch_size))
        return torch.from_numpy(np.concatenate([batches.reshape(-1), shuffled[whole:]]))

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Indices of the next batch."""
        if batch_size != self.batch_size:
            raise ValueError(f"A batch of {batch_size} rows is asked for, the sampler was made for {self.batch_size}.")
        return super().sample(storage, batch_size)
