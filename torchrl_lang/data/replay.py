"""Replay buffers over datasets that copy no rows and trim padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage, TensorStorage
from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter
from torchrl.envs.transforms import Compose, DTypeCastTransform, Transform

from torchrl_lang._checks import Count, checked
from torchrl_lang.data.dataset import RowDataset
from torchrl_lang.functional.decisions import row_length
from torchrl_lang.schema import ATTENTION_MASK, FEATURES_MASK, TOKEN_REWARD, TOKENS, check_row, entry


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
        share: ``(k, n)``: of each batch only the share of process ``k`` of ``n``, every ``n``-th row of it. A smaller
            batch may leave a process nothing.

    Attributes:
        epoch: the epoch of the last batch, counted from zero; -1 before the first batch.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl_lang.data.replay import EpochSampler
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=EpochSampler(seed=0), batch_size=2)
        >>> _ = buffer.extend(TensorDict(x=torch.arange(5), batch_size=[5]))
        >>> epoch = [batch["x"] for batch in buffer]
        >>> [len(x) for x in epoch], sorted(torch.cat(epoch).tolist())
        ([2, 2, 1], [0, 1, 2, 3, 4])
    """

    ran_out = False
    """Whether the last batch was the last one of its epoch. (The replay buffer resets it.)"""

    @checked
    def __init__(
        self, *, seed: Annotated[int, 0] = 0, drop_last: bool = False, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.seed, self.drop_last, self.share = seed, drop_last, share
        self.epoch, self._position, self._size = -1, 0, 0
        self._order: Tensor | None = None

    def order(self, size: int, epoch: int) -> Tensor:
        """The order of the rows in an epoch, int64 ``[size]``."""
        return torch.from_numpy(np.random.default_rng([self.seed, epoch]).permutation(size))

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Indices of the next batch."""
        rows = len(storage)
        if not self.can_sample(storage, batch_size):
            raise ValueError(f"No batch of {batch_size} rows can be drawn of {rows} with drop_last={self.drop_last}.")
        if self._left(batch_size) <= 0 or rows < self._size:
            self.epoch, self._position, self._size, self._order = self.epoch + 1, 0, rows, None
        if self._order is None:
            self._order = self.order(self._size, self.epoch)
        index = self._order[self._position : self._position + batch_size]
        self._position += len(index)
        self._remaining_batches = self._left(batch_size)
        self.ran_out = self._remaining_batches <= 0
        first, processes = self.share
        return index[first::processes], {}

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
        numbers = (int(state_dict[key]) for key in ("seed", "epoch", "position", "size"))
        self.seed, self.epoch, self._position, self._size = numbers
        self._order, self.ran_out = None, False

    def dumps(self, path: str | Path) -> None:
        """Write the state as JSON into a folder."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "sampler.json").write_text(json.dumps(self.state_dict()) + "\n")

    def loads(self, path: str | Path) -> None:
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
        pool: number of batches that are sorted together; more of them reduce padding and variety.
        **options: those of :class:`EpochSampler`.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data.replay import BucketSampler
        >>> sampler = BucketSampler(torch.tensor([3, 9, 3, 9]), 2)
        >>> sorted(sorted(batch) for batch in sampler.order(4, epoch=0).view(2, 2).tolist())
        [[0, 2], [1, 3]]
    """

    @checked
    def __init__(self, lengths: Tensor, batch_size: Count, *, pool: Count = 16, **options: Any) -> None:
        super().__init__(**options)
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


class TrimRows(Transform):
    """Trim a batch of rows to its longest row and convert ``tokens`` to int64.

    Only columns that are padding in every row are removed, from all root entries with the shape of the attention mask
    but ``features_mask``.
    Use it in replay buffers over rows, or in a collector's ``postproc`` after
    :func:`~torchrl_lang.data.rows_from_rollout`, which returns rows at the root. It is not for environments, whose
    observations have a fixed width.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.data import TrimRows
        >>> real = torch.tensor([[True, True, False, False], [True, False, False, False]])
        >>> rows = TensorDict(tokens=real.int(), attention_mask=real, batch_size=[2])
        >>> TrimRows()(rows)["tokens"]
        tensor([[1, 1],
                [1, 0]])
    """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a new batch with trimmed entries; the input is not modified."""
        attention = entry(tensordict, ATTENTION_MASK)
        width = max(int(attention.reshape(-1, attention.shape[-1]).any(0).sum()), 1)
        out = tensordict.copy()
        for key, value in tensordict.items():
            if value.shape == attention.shape and key != FEATURES_MASK:  # features are not tokens, however many
                value = value[..., :width]
                out.set(key, value.to(torch.int64) if key == TOKENS else value.contiguous())
        return out

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise RuntimeError("TrimRows changes the width of rows from batch to batch: put it in a replay buffer.")


def row_buffer(
    data: RowDataset | TensorDictBase,
    batch_size: int,
    *,
    seed: int = 0,
    trim: bool = True,
    bucket: bool | int = False,
    drop_last: bool = False,
    share: tuple[int, int] = (0, 1),
    prefetch: int | None = None,
    transform: Transform | None = None,
) -> TensorDictReplayBuffer:
    """A replay buffer over existing rows that samples each row once per epoch, with int64 ``tokens``.

    The rows stay on disk or in memory and are never written: the buffer cannot be extended. To resume training exactly,
    save ``buffer.sampler.state_dict()`` (four integers) and load it into a new buffer's sampler;
    ``buffer.state_dict()`` would contain all data as well.

    Args:
        data: a dataset, rows ``[N]``, or pairs of rows ``[N, 2]``. If there are no rows, as in a collector's batch in
            which no episode ended, the buffer samples empty batches, for which losses are zero.
        batch_size: rows (or pairs) per batch.
        seed: seed of the order.
        trim: trim batches to their longest row (see :class:`TrimRows`).
        bucket: batch rows of similar length (see :class:`BucketSampler`, also for the bias); a
            number is the number of batches that are sorted together.
        drop_last: drop an epoch's last, smaller batch.
        share: ``(k, n)``: sample what process ``k`` of ``n`` gets of each batch of ``batch_size`` rows, every ``n``-th
            row of it. All processes need the same seed; their shares make up the batches of a single process.
        prefetch: number of threads and of batches that they read ahead. It helps if reading is slow or a core is idle.
            One thread keeps the order of batches, several may change it.
        transform: applied to a batch after trimming.

    Raises:
        TypeError, ValueError: rows in memory are malformed, see :func:`~torchrl_lang.schema.check_row`.

    Examples:
        >>> from torchrl_lang.data import row_buffer
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn(n * "a", 1.0)], True) for n in (1, 5, 2, 5)], tokenizer, row_length=100)
        >>> buffer = row_buffer(rows, batch_size=2, bucket=True)
        >>> sorted(batch["tokens"].shape[-1] for batch in buffer)
        [5, 8]
    """
    rows = data.rows if isinstance(data, RowDataset) else data
    if rows.ndim != 1 and rows.shape[1:] != (2,):
        found = f"got {list(rows.shape)}: flatten them first"
        raise ValueError(f"A row buffer takes rows of batch size [N], or pairs [N, 2], {found}.")
    if not isinstance(data, RowDataset):  # a dataset was checked when it was written
        checked = rows.copy()
        if TOKEN_REWARD not in rows.keys():  # losses such as BC need none
            checked.set(TOKEN_REWARD, torch.zeros_like(entry(rows, TOKENS), dtype=torch.float32))
        check_row(checked)
    options: Any = {"seed": seed, "drop_last": drop_last, "share": share}
    sampler = EpochSampler(**options) if rows.shape[0] else _NoRows(**options)
    if bucket and rows.shape[0]:
        lengths = row_length(entry(rows, ATTENTION_MASK)).reshape(len(rows), -1).amax(-1)
        pool = 16 if bucket is True else int(bucket)
        sampler = BucketSampler(lengths, batch_size, pool=pool, **options)
    first = TrimRows() if trim else DTypeCastTransform(torch.int32, torch.int64, in_keys=[TOKENS])
    parts: Any = {"storage": TensorStorage(rows), "sampler": sampler, "writer": ImmutableDatasetWriter()}
    whole = first if transform is None else Compose(first, transform)
    return TensorDictReplayBuffer(**parts, batch_size=batch_size, prefetch=prefetch, transform=whole)


class _NoRows(EpochSampler):
    """Samples empty batches, one per epoch."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Return an empty index."""
        self.epoch, self.ran_out = self.epoch + 1, True
        return torch.zeros(0, dtype=torch.int64), {}
