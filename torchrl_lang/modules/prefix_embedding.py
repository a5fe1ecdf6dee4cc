"""Embeddings of features in front of a row, such as those of an image, in the space of token embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang._checks import at_least_one

__all__ = ["PrefixEmbedding"]


class PrefixEmbedding(nn.Module):
    """Projects the features of a row, ``prefix`` ``[*B, P, F]``, to embeddings that a model reads before the tokens.

    Features of images enter a language model so (arXiv 2106.13884). Attach it with
    :func:`~torchrl_lang.modules.with_prefix`.

    A row is its real features, in their order, then its tokens; features that ``prefix_mask`` excludes take no place.
    With ``positions`` the ``n`` real features of a row have the positions ``0 … n - 1`` and its tokens ``n, n + 1, …``,
    so the model needs positions for ``P + T`` places. Without, the tokens' positions begin at 0 as those of a row
    without features do. The features then have no position embedding in models that learn one per position (GPT-2),
    and in models with rotary positions all have position 0, that of the first token. Either way attention is causal
    from the first feature on, and a row without real features has the states of the model without them.

    Args:
        features: ``F``, the width of a feature.
        width: ``H``, the width of the model's embeddings.
        hidden: width of a hidden layer with GELU; 0 for a linear projection.
        positions: whether the features take positions of the model.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import PrefixEmbedding
        >>> PrefixEmbedding(5, 8, hidden=16)(torch.randn(2, 3, 5)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, features: int, width: int, *, hidden: int = 0, positions: bool = True) -> None:
        super().__init__()
        at_least_one("features", features)
        at_least_one("width", width)
        if type(hidden) is not int or hidden < 0:
            raise ValueError(f"hidden must be the width of a hidden layer, or 0 for a linear projection, got {hidden}.")
        self.features, self.width, self.hidden, self.positions = features, width, hidden, positions
        self.project: nn.Module = nn.Linear(hidden or features, width)
        if hidden:
            self.project = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), self.project)

    def config(self) -> dict[str, Any]:
        """Arguments that build an embedding of the same shape."""
        return {name: getattr(self, name) for name in ("features", "width", "hidden", "positions")}

    def forward(self, prefix: Tensor) -> Tensor:
        """Embeddings of features, float ``[*B, P, F] -> [*B, P, H]``."""
        if prefix.shape[-1] != self.features:
            raise ValueError(
                f"The PrefixEmbedding projects features of width {self.features}, got {prefix.shape[-1]}: build it "
                f"with features={prefix.shape[-1]}."
            )
        return self.project(prefix.to(next(self.parameters()).dtype))

    def room(self, max_length: int | None, features: int) -> int | None:
        """Number of tokens that fit beside ``features`` of a row in a model of ``max_length`` positions; None: any."""
        return max_length - features if max_length is not None and self.positions else max_length

    def position_ids(self, slots: Tensor, count: Tensor, max_length: int | None) -> Tensor | None:
        """The positions of places, int64 ``[N, q]``, in rows with ``count`` features; None if these are the places."""
        if self.positions:
            return None
        last = None if max_length is None else max_length - 1  # padding may lie behind
        return (slots - count[:, None]).clamp(0, last)

    def embed(
        self, ids: Tensor, prefix: Tensor, embedding: Callable[[Tensor], Tensor], learned: nn.Module | None
    ) -> Tensor:
        """Embeddings of rows of features and tokens, ``[N, q, H]``.

        Args:
            ids: int64 ``[N, q]``; ``-1 - i`` is feature ``i`` of the row, at one of the first ``P`` places.
            prefix: float ``[N, P, F]``.
            embedding: the model's, of ids that are not negative.
            learned: the model's embedding of positions; None if it has no such module.
        """
        embedded = embedding(ids.clamp_min(0))
        front = ids[:, : prefix.shape[1]]
        projected = self(prefix).to(embedded.dtype)
        if learned is not None and not self.positions:
            # The model adds the embedding of place 0 to features that take no position.
            place = torch.zeros((), dtype=torch.int64, device=ids.device)
            projected = projected - learned(place).to(embedded.dtype)
        row = torch.arange(ids.shape[0], device=ids.device)[:, None]
        first = projected[row, (-1 - front).clamp_min(0)]
        first = torch.where((front < 0).unsqueeze(-1), first, embedded[:, : front.shape[1]])
        return torch.cat([first, embedded[:, front.shape[1] :]], 1)
