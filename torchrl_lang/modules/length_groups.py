"""Group the rows of a batch by length, to reduce computation on padding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

# Overhead of a model call, in tokens. Forward and backward on a CPU core it is 50 to 150, for models of 3 x 64 to
# 4 x 128. GPUs get a large number, because small groups leave them idle.
_CALL = {"cpu": 128}
_ELSEWHERE = 8192
_WIDTHS = 48  # number of widths to consider; lengths between them are rounded up


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
        >>> from torchrl_lang.modules.length_groups import length_groups
        >>> length = torch.tensor([70, 26, 72, 25, 26])
        >>> [(rows.tolist(), width) for rows, width in length_groups(length, call=20)]
        [([3, 1, 4], 26), ([0, 2], 72)]
        >>> [width for _, width in length_groups(length, call=1000)]
        [72]
    """
    if length.shape[0] == 0:
        return []
    call = _CALL.get(length.device.type, _ELSEWHERE) if call is None else call
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
        >>> from torchrl_lang.modules.length_groups import equal_groups
        >>> [(rows.tolist(), width) for rows, width in equal_groups(torch.tensor([7, 2, 9, 3]), 2)]
        [([1, 3], 3), ([0, 2], 9)]
    """
    return [(rows, max(int(length[rows[-1]]), 1)) for rows in length.argsort().chunk(count)]


def in_groups(
    read: Callable[[Tensor | None, int], tuple[Tensor, ...]], groups: list[tuple[Tensor, int]], width: int
) -> tuple[Tensor, ...]:
    """Joins the states that ``read`` gives for each group, in the order of the rows.

    Args:
        read: ``(rows, w) -> states``, each ``[M, w, H]``, for rows int64 ``[M]`` and their width; rows None for all.
        groups: see :func:`length_groups`.
        width: ``T``.

    Returns:
        The states ``[N, T, H]``, zero beyond the width of a row's group.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.length_groups import in_groups
        >>> tokens = torch.tensor([[5, 0], [6, 7]])
        >>> groups = [(torch.tensor([1]), 2), (torch.tensor([0]), 1)]
        >>> in_groups(lambda rows, w: (tokens[rows, :w, None],), groups, 2)[0].squeeze(-1)
        tensor([[5, 0],
                [6, 7]])
    """
    one = len(groups) == 1
    parts = [
        [F.pad(state, (0, 0, 0, width - longest)) for state in read(None if one else rows, longest)]
        for rows, longest in groups
    ]
    if one:
        return tuple(parts[0])
    back = torch.cat([rows for rows, _ in groups]).argsort()
    return tuple(torch.cat(states).index_select(0, back) for states in zip(*parts, strict=True))


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
