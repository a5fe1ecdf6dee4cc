"""Replay buffers over data sets: no copy on the way in, no needless padding on the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage
from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter
from torchrl.envs.transforms import Compose, DTypeCastTransform, Transform

from torchrl_lang.data.datasets import RowDataset
from torchrl_lang.data.samplers import BucketSampler, EpochSampler
from torchrl_lang.functional import row_length
from torchrl_lang.schema import ATTENTION_MASK, TOKEN_REWARD, TOKENS, check_row, entry

__all__ = ["TrimRows", "row_buffer"]


class TrimRows(Transform):
    """Cut a batch of rows to its longest one, and read ``tokens`` as int64.

    Only columns that are padding in every row go, and only entries at the root are cut. For replay buffers over rows;
    in a collector's ``postproc`` behind :func:`~torchrl_lang.data.rows_from_rollout`, which puts rows at the root, for
    what stands under ``next`` keeps its width. Not for environments, whose observations keep one width.

    Args:
        keys: the entries to cut, each ``[*B, T]``; those that a batch lacks are passed over. By default all that are of
            the attention mask's shape.
        multiple_of: round the width up to a multiple, for compiled models that are slow to meet a new width.

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

    def __init__(self, keys: Sequence[str] | None = None, *, multiple_of: int = 1) -> None:
        super().__init__()
        if multiple_of < 1:
            raise ValueError(f"multiple_of must be at least 1, got {multiple_of}.")
        self.keys, self.multiple_of = None if keys is None else tuple(keys), multiple_of

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A batch of its own with the entries cut; the input is left as it was."""
        attention = entry(tensordict, ATTENTION_MASK)
        longest = int(attention.reshape(-1, attention.shape[-1]).any(0).sum())
        width = -(-max(longest, 1) // self.multiple_of) * self.multiple_of
        out = tensordict.copy()
        for key, value in tensordict.items():
            if value.shape == attention.shape if self.keys is None else key in self.keys:
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
    prefetch: int | None = None,
    transform: Transform | None = None,
) -> TensorDictReplayBuffer:
    """A replay buffer over rows that are there already, each sampled once an epoch, with int64 ``tokens``.

    The rows stay where they are, on disk or in memory, and are only read: the buffer takes no further ones. To resume a
    training exactly, save ``buffer.sampler.state_dict()``, four integers, and load it into a new buffer's sampler
    (``buffer.state_dict()`` would hold all the data as well).

    Args:
        data: a data set, or rows ``[N]``. Of no rows at all, such as those of a collector's batch in which no episode
            ended, empty batches are sampled, for which losses are zero.
        batch_size: rows in a batch.
        seed: seed of the order.
        trim: cut batches to their longest row (see :class:`TrimRows`).
        bucket: let rows of similar length share a batch (see :class:`~torchrl_lang.data.BucketSampler`, its bias
            too); a number is the batches that are sorted together.
        drop_last: leave out an epoch's last, smaller batch.
        prefetch: batches that threads, as many, read ahead while the last one is trained on. It pays where reading is
            slow or a core is free. With one thread the batches keep their order; with more they may swap places.
        transform: applied to a batch after trimming.

    Raises:
        TypeError, ValueError: rows in memory are malformed, see :func:`~torchrl_lang.schema.check_row`.

    Examples:
        >>> from torchrl_lang.data import CharTokenizer, Episode, Turn, row_buffer, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn(n * "a", 1.0)], True) for n in (1, 5, 2, 5)], tokenizer, row_length=100)
        >>> buffer = row_buffer(rows, batch_size=2, bucket=True)
        >>> sorted(batch["tokens"].shape[-1] for batch in buffer)
        [5, 8]
    """
    rows = data.rows if isinstance(data, RowDataset) else data
    if rows.ndim != 1:
        raise ValueError(f"A row buffer takes rows of batch size [N], got {list(rows.shape)}: flatten them first.")
    if rows is data:  # a data set was checked when it was written
        _check_entering(rows)
    if not rows.shape[0]:
        sampler: EpochSampler = _NoRows(seed=seed, drop_last=drop_last)
    elif bucket:
        pool = 16 if bucket is True else int(bucket)
        lengths = row_length(entry(rows, ATTENTION_MASK))
        sampler = BucketSampler(lengths, batch_size, seed=seed, pool=pool, drop_last=drop_last)
    else:
        sampler = EpochSampler(seed=seed, drop_last=drop_last)
    first = TrimRows() if trim else DTypeCastTransform(torch.int32, torch.int64, in_keys=[TOKENS])
    return TensorDictReplayBuffer(
        storage=TensorStorage(rows),
        sampler=sampler,
        writer=ImmutableDatasetWriter(),
        batch_size=batch_size,
        prefetch=prefetch,
        transform=first if transform is None else Compose(first, transform),
    )


class _NoRows(EpochSampler):
    """Samples empty batches, each an epoch of its own."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """No index."""
        self._epoch, self._ran_out = self._epoch + 1, True
        return torch.zeros(0, dtype=torch.int64), {}


def _check_entering(rows: TensorDictBase) -> None:
    """Raise unless rows are well-formed; losses such as behaviour cloning need no rewards, so these may be missing."""
    if rows.get(TOKEN_REWARD, None) is None:
        rows = rows.copy().set(TOKEN_REWARD, torch.zeros(rows.get(TOKENS).shape, device=rows.device))
    check_row(rows)
