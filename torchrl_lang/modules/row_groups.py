"""How to read a batch of rows with less computation: in groups of like length, and common beginnings once."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Overhead of a model call, in tokens. Forward and backward on a CPU core it is 50 to 150, for models of 3 x 64 to
# 4 x 128. GPUs get a large number, because small groups leave them idle.
_CALL = {"cpu": 128}
_ELSEWHERE = 8192
_WIDTHS = 48  # number of widths to consider; lengths between them are rounded up
# Rows are read in two calls, prefixes and the rest, if that saves the overhead of two calls and this fraction of all
# tokens: the rest attends by a mask over copied keys.
_FRACTION = 0.1


def length_groups(length: Tensor, *, call: int | None = None) -> list[tuple[Tensor, int]]:
    """Split rows by length so that the cost of tokens, padding and model calls is minimal.

    Finds the optimal split by dynamic programming over the distinct lengths. Synchronizes with the device.

    Args:
        length: int64 ``[N]``, real tokens of each row.
        call: overhead of a call, in tokens; default a measured number for CPUs and a large one for other devices.

    Returns:
        For each group its rows, int64 ``[M]``, and its width, at least 1 and at least the longest row's.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.row_groups import length_groups
        >>> length = torch.tensor([70, 26, 72, 25, 26])
        >>> [(rows.tolist(), width) for rows, width in length_groups(length, call=20)]
        [([3, 1, 4], 26), ([0, 2], 72)]
        >>> [width for _, width in length_groups(length, call=1000)]
        [72]
    """
    if length.shape[0] == 0:
        return []
    call = _call_of(length) if call is None else call
    shown, order = length.clamp_min(1).cpu().sort(stable=True)
    step = -(-int(shown[-1]) // _WIDTHS)
    width, count = torch.unique_consecutive(-(-shown // step) * step, return_counts=True)
    width = width.clamp_max(shown[-1])
    cuts = _cuts(width.tolist(), [0, *count.cumsum(0).tolist()], call)
    if len(cuts) == 2:  # one group needs no sorting, and no copy to the device, which would wait for it
        return [(torch.arange(shown.shape[0], device=length.device), int(shown[-1]))]
    groups = [(order[begin:end], int(shown[end - 1])) for begin, end in pairwise(cuts)]
    return [(rows.to(length.device), longest) for rows, longest in groups]


def equal_groups(length: Tensor, count: int) -> list[tuple[Tensor, int]]:
    """Split rows by length into ``count`` groups of equal size; the result is that of :func:`length_groups`.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.row_groups import equal_groups
        >>> [(rows.tolist(), width) for rows, width in equal_groups(torch.tensor([7, 2, 9, 3]), 2)]
        [([1, 3], 3), ([0, 2], 9)]
    """
    return [(rows, max(int(length[rows[-1]]), 1)) for rows in length.argsort().chunk(count)]


def _cuts(width: list[int], rows: list[int], call: int) -> list[int]:
    """The cuts of sorted rows, including both ends: ``rows[i]`` of them are shorter than ``width[i]``."""
    best, previous = [0], [0]  # minimal cost of all rows below each width, and the beginning of its last group
    for end, longest in enumerate(width, 1):
        costs = [best[begin] + (rows[end] - rows[begin]) * longest + call for begin in range(end)]
        best.append(min(costs))
        previous.append(costs.index(best[-1]))
    cuts, end = [rows[-1]], len(width)
    while end:
        end = previous[end]
        cuts.append(rows[end])
    return cuts[::-1]


class SharedPrefix(NamedTuple):
    """Rows ``N`` whose first ``width`` tokens are those of one of ``G`` rows."""

    width: int
    """``P``, number of tokens; the prefix of a shorter row includes padding."""
    first: Tensor
    """int64 ``[G]``: a row of each prefix."""
    group: Tensor
    """int64 ``[N]``: the prefix of each row."""


def shared_prefix(tokens: Tensor, length: Tensor | None = None, *, call: int | None = None) -> SharedPrefix | None:
    """The cut of rows that saves most tokens, if every prefix that occurs is read once; synchronizes with the device.

    Of ``N`` rows with ``G`` different prefixes of ``P`` tokens ``(N - G) P`` need not be read: one prefix of all rows
    or one for each group of rows. At least one place of every row is left behind the cut.

    Args:
        tokens: int64 ``[N, T]``, right-padded.
        length: int64 ``[N]``, real tokens of each row; default ``T``. Padding is not counted as saved.
        call: number of tokens to save at least; default a measured number for CPUs and a large one for other devices.

    Returns:
        The cut; None if it saves too little.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.row_groups import shared_prefix
        >>> rows = torch.tensor([[5, 6, 7, 1], [4, 6, 7, 2], [5, 6, 7, 3], [4, 6, 8, 2]])
        >>> found = shared_prefix(rows, call=1)
        >>> found.width, found.first.tolist(), found.group.tolist()
        (2, [1, 0], [1, 0, 1, 0])
        >>> shared_prefix(rows) is None
        True
    """
    n, width = tokens.shape
    least = 2 * _call_of(tokens) if call is None else call
    if (n - 1) * (width - 1) < least:
        return None
    shown = tokens.cpu()
    real = torch.full((n,), width) if length is None else length.cpu()
    # Bytes of rows are compared at once. Any order will do in which rows of a common prefix are neighbours.
    text = [row.tobytes() for row in shown.numpy()]
    order = torch.tensor(sorted(range(n), key=text.__getitem__))
    ordered = shown[order]
    alike = (ordered[1:] == ordered[:-1]).long().cumprod(-1).sum(-1).clamp_max(width - 1)  # with the row before
    cuts = torch.cat([alike, real.clamp_max(width - 1)]).unique()  # what is saved is linear between these
    read = torch.minimum(real, cuts[:, None]).sum(-1)
    saved = read - cuts * (1 + (alike < cuts[:, None]).sum(-1))
    best = int(saved.argmax())
    if int(saved[best]) < max(least, _FRACTION * int(real.sum())):
        return None
    begins = torch.cat([torch.tensor([True]), alike < cuts[best]])
    group = torch.empty_like(order).index_copy(0, order, begins.cumsum(0) - 1)
    return SharedPrefix(int(cuts[best]), order[begins].to(tokens.device), group.to(tokens.device))


def _call_of(tensor: Tensor) -> int:
    """The overhead of a model call on the device of a tensor, in tokens."""
    return _CALL.get(tensor.device.type, _ELSEWHERE)
