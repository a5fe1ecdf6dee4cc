"""Replay buffers over datasets that copy no rows and trim padding."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage
from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter
from torchrl.envs.transforms import Compose, DTypeCastTransform, Transform

from torchrl_lang._checks import at_least_one
from torchrl_lang.data.datasets import RowDataset
from torchrl_lang.data.samplers import BucketSampler, EpochSampler
from torchrl_lang.functional.decisions import row_length
from torchrl_lang.schema import ATTENTION_MASK, FEATURES_MASK, TOKEN_REWARD, TOKENS, check_row, entry

__all__ = ["TrimRows", "row_buffer"]


class TrimRows(Transform):
    """Trim a batch of rows to its longest row and convert ``tokens`` to int64.

    Only columns that are padding in every row are removed, from all root entries with the shape of the attention mask
    but ``features_mask``.
    Use it in replay buffers over rows, or in a collector's ``postproc`` after
    :func:`~torchrl_lang.data.rows_from_rollout`, which returns rows at the root. It is not for environments, whose
    observations have a fixed width.

    Args:
        multiple_of: round the width up to a multiple, for compiled models that recompile for each new width.

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

    def __init__(self, *, multiple_of: int = 1) -> None:
        super().__init__()
        at_least_one("multiple_of", multiple_of)
        self.multiple_of = multiple_of

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a new batch with trimmed entries; the input is not modified."""
        attention = entry(tensordict, ATTENTION_MASK)
        longest = int(attention.reshape(-1, attention.shape[-1]).any(0).sum())
        width = -(-max(longest, 1) // self.multiple_of) * self.multiple_of
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
    prefetch: int | None = None,
    transform: Transform | None = None,
) -> TensorDictReplayBuffer:
    """A replay buffer over existing rows that samples each row once per epoch, with int64 ``tokens``.

    The rows stay on disk or in memory and are never written: the buffer cannot be extended. To resume training exactly,
    save ``buffer.sampler.state_dict()`` (four integers) and load it into a new buffer's sampler;
    ``buffer.state_dict()`` would contain all data as well.

    Args:
        data: a dataset, or rows ``[N]``. If there are no rows, as in a collector's batch in which no episode ended, the
            buffer samples empty batches, for which losses are zero.
        batch_size: rows per batch.
        seed: seed of the order.
        trim: trim batches to their longest row (see :class:`TrimRows`).
        bucket: batch rows of similar length (see :class:`~torchrl_lang.data.BucketSampler`, also for the bias); a
            number is the number of batches that are sorted together.
        drop_last: drop an epoch's last, smaller batch.
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
    if rows.ndim != 1:
        raise ValueError(f"A row buffer takes rows of batch size [N], got {list(rows.shape)}: flatten them first.")
    if rows is data:  # not a dataset, which was checked when it was written
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
    """Samples empty batches, one per epoch."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Return an empty index."""
        self.epoch, self.ran_out = self.epoch + 1, True
        return torch.zeros(0, dtype=torch.int64), {}


def _check_entering(rows: TensorDictBase) -> None:
    """Raise unless rows are well-formed; rewards may be missing, because losses such as BC need none."""
    if rows.get(TOKEN_REWARD, None) is None:
        rows = rows.copy().set(TOKEN_REWARD, torch.zeros(rows.get(TOKENS).shape, device=rows.device))
    check_row(rows)
