"""Features in front of the tokens of rows, such as those of an image: their layout and their embedding."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lang._checks import Count, checked
from torchrl_lang.schema import FEATURES, FEATURES_MASK, check_row_features, find_entry


def in_front(front: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """Rows that begin with those entries of ``front`` that are real, in their order, without a gap.

    Args:
        front: ids ``[*B, P]`` or embeddings ``[*B, P, H]``.
        mask: bool ``[*B, P]``: True on real entries of ``front``.
        row: ``[*B, T]`` or ``[*B, T, H]``, what follows.

    Returns:
        ``[*B, P + T]`` or ``[*B, P + T, H]``; padding repeats the last entry of the row.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.features import in_front
        >>> mask = torch.tensor([[False, True], [True, True]])
        >>> in_front(torch.tensor([[1, 2], [3, 4]]), mask, torch.tensor([[7, 8], [5, 6]]))
        tensor([[2, 7, 8, 8],
                [3, 4, 5, 6]])
    """
    dim, places = mask.ndim - 1, mask.shape[-1]
    width, number = row.shape[dim], mask.sum(-1, keepdim=True)
    order = (~mask).long().argsort(dim=-1, stable=True)  # real ones first
    place = torch.arange(places + width, device=mask.device)
    own = places + (place - number).clamp(0, width - 1)
    return take(torch.cat([front, row], dim), torch.where(place < number, nn.functional.pad(order, (0, width)), own))


def behind(states: Tensor, number: Tensor, width: int) -> Tensor:
    """The states of the tokens of rows that begin with ``number`` others, ``[*B, P + T, H] -> [*B, T, H]``.

    Args:
        states: those of all places.
        number: int64 ``[*B]``, at most ``P``.
        width: ``T``.
    """
    return take(states, number.unsqueeze(-1) + torch.arange(width, device=states.device))


def take(values: Tensor, place: Tensor) -> Tensor:
    """Entries at places, int64 ``[*B, n]``, of ``[*B, N]`` or ``[*B, N, H]``."""
    if values.ndim > place.ndim:
        return values.gather(-2, place.unsqueeze(-1).expand(*place.shape, values.shape[-1]))
    return values.gather(-1, place)


class RowFeatures(NamedTuple):
    """Features of ``N`` rows, such as those of an image, that a model reads before the first token.

    A row is laid out as its real features, in their order, then its tokens, then padding. So masked features take no
    place, nothing attends to padding in a causal model, and no attention mask is needed.
    """

    values: Tensor
    """float ``[N, P, F]``, zero where masked."""
    mask: Tensor
    """bool ``[N, P]``: True on real features."""

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None, batch: torch.Size) -> RowFeatures:
        """The features of rows of shape ``batch``, ``[*B, P, F]``, flattened to ``N`` rows.

        Raises:
            TypeError: the features are no floats or the mask is not bool.
            ValueError: the shapes do not go together.
        """
        check_row_features(values, mask, batch)
        values = values.reshape(-1, *values.shape[-2:])
        mask = values.new_ones(values.shape[:2], dtype=torch.bool) if mask is None else mask.reshape(values.shape[:2])
        # Not multiplied: a masked feature may be anything, NaN included.
        return cls(torch.where(mask.unsqueeze(-1), values, 0), mask)

    @classmethod
    def read(cls, tensordict: TensorDictBase, batch: torch.Size, reader: str = "") -> RowFeatures | None:
        """The entries ``features`` and ``features_mask`` of rows of shape ``batch``.

        Without ``features`` None, or a KeyError in the name of a ``reader``.
        """
        if not reader and FEATURES not in tensordict.keys():
            return None
        values = find_entry(reader, FEATURES, "The model reads features, float [*B, P, F], of rows.", tensordict)
        return cls.of(values, tensordict.get(FEATURES_MASK, None), batch)

    @property
    def places(self) -> int:
        """``P``, the number of features of a row, masked ones included."""
        return self.values.shape[1]

    @property
    def number(self) -> Tensor:
        """int64 ``[N]``: the number of each row's real features."""
        return self.mask.sum(-1)

    def entries(self) -> dict[str, Tensor]:
        """The entries of rows that these are."""
        return {FEATURES: self.values, FEATURES_MASK: self.mask}

    def select(self, rows: Tensor) -> RowFeatures:
        """The features of some rows, int64 or bool, as a copy."""
        return RowFeatures(self.values[rows], self.mask[rows])

    def to(self, device: torch.device) -> RowFeatures:
        """The same on a device."""
        return RowFeatures(self.values.to(device), self.mask.to(device))

    def equals(self, other: RowFeatures | None) -> Tensor:
        """Bool ``[N]``: True on rows that surely have the same features."""
        if other is None or self.values.shape != other.values.shape:
            return torch.zeros_like(self.mask[:, :1].any(-1))
        return (self.values == other.values).flatten(1).all(-1) & (self.mask == other.mask).all(-1)


class FeatureEmbedding(nn.Module):
    """Projects the features of a row, ``features`` ``[*B, P, F]``, to embeddings that a model reads before the tokens.

    Features of images enter a language model so (arXiv 2106.13884). Attach it with
    :func:`~torchrl_lang.modules.with_features`.

    A row is its real features, in their order, then its tokens; features that ``features_mask`` excludes take no place.
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
        >>> from torchrl_lang.modules import FeatureEmbedding
        >>> FeatureEmbedding(5, 8, hidden=16)(torch.randn(2, 3, 5)).shape
        torch.Size([2, 3, 8])
    """

    @checked
    def __init__(self, features: Count, width: Count, *, hidden: Annotated[int, 0] = 0, positions: bool = True) -> None:
        super().__init__()
        self.features, self.width, self.hidden, self.positions = features, width, hidden, positions
        self.project: nn.Module = nn.Linear(hidden or features, width)
        if hidden:
            self.project = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), self.project)

    def config(self) -> dict[str, Any]:
        """Arguments that build an embedding of the same shape."""
        return {name: getattr(self, name) for name in ("features", "width", "hidden", "positions")}

    def forward(self, values: Tensor) -> Tensor:
        """Embeddings of features, float ``[*B, P, F] -> [*B, P, H]``."""
        return self.project(values.to(next(self.parameters()).dtype))

    def embed(self, features: RowFeatures, embedded: Tensor, learned: nn.Module | None) -> Tensor:
        """Put projected features in front of embedded tokens, ``[N, T, H] -> [N, P + T, H]``.

        Args:
            features: of the rows.
            embedded: tokens.
            learned: the model's embedding of positions; None if it has no such module.
        """
        projected = self(features.values).to(embedded.dtype)
        if learned is not None and not self.positions:
            # The model adds the embedding of place 0 to features that take no position.
            place = torch.zeros((), dtype=torch.int64, device=embedded.device)
            projected = projected - learned(place).to(embedded.dtype)
        return in_front(projected, features.mask, embedded)


def reads_features(module: nn.Module | None) -> bool:
    """Whether a module of tensordicts reads features in front of a row."""
    return FEATURES in getattr(module, "in_keys", ())
