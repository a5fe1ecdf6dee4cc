"""Find the tokens that rows of a batch begin with in common, so that a model reads them once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Rows are read in two calls, prefixes and the rest, if that saves this many tokens and this fraction of all: a second
# call costs about as much (see length_groups), and the rest attends by a mask over copied keys.
_CALL = {"cpu": 256}
_ELSEWHERE = 16384
_FRACTION = 0.1


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
        >>> from torchrl_lang.modules.shared_prefix import shared_prefix
        >>> rows = torch.tensor([[5, 6, 7, 1], [4, 6, 7, 2], [5, 6, 7, 3], [4, 6, 8, 2]])
        >>> found = shared_prefix(rows, call=1)
        >>> found.width, found.first.tolist(), found.group.tolist()
        (2, [1, 0], [1, 0, 1, 0])
        >>> shared_prefix(rows) is None
        True
    """
    n, width = tokens.shape
    least = _CALL.get(tokens.device.type, _ELSEWHERE) if call is None else call
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
