"""The features in front of the rows of a batch, and how a row with features is laid out for a language model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lang.modules.row_front import behind, in_front
from torchrl_lang.schema import PREFIX, PREFIX_MASK, check_prefix, missing_entry

__all__ = ["PrefixFeatures", "reads_prefix"]


class PrefixFeatures(NamedTuple):
    """Features of ``N`` rows, such as those of an image, that a model reads before the first token.

    A row is laid out as its real features, in their order, then its tokens, then padding. So masked features take no
    place, nothing attends to padding in a causal model, and no attention mask is needed. In a row of ids the feature
    ``i`` is ``-1 - i``.
    """

    values: Tensor
    """float ``[N, P, F]``, zero where masked."""
    mask: Tensor | None
    """bool ``[N, P]``: True on real features; None where all are real."""

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None, batch: torch.Size) -> PrefixFeatures:
        """The features of rows of shape ``batch``, ``[*B, P, F]``, flattened to ``N`` rows.

        Raises:
            TypeError: the features are no floats or the mask is not bool.
            ValueError: the shapes do not go together.

        Examples:
            >>> import torch
            >>> from torchrl_lang.modules.prefix_features import PrefixFeatures
            >>> mask = torch.tensor([[False, True], [True, True]])
            >>> features = PrefixFeatures.of(torch.randn(2, 2, 3), mask, torch.Size([2]))
            >>> features.in_front_of(torch.tensor([[7, 8], [5, 6]]))  # of padding, the last place of the first row
            tensor([[-2,  7,  8,  8],
                    [-1, -2,  5,  6]])
        """
        check_prefix(values, mask, batch)
        values = values.reshape(-1, *values.shape[-2:])
        if mask is None:
            return cls(values, None)
        mask = mask.reshape(values.shape[:2])
        # Not multiplied: a masked feature may be anything, NaN included.
        return cls(torch.where(mask.unsqueeze(-1), values, 0), mask)

    @classmethod
    def read(cls, tensordict: TensorDictBase, batch: torch.Size) -> PrefixFeatures | None:
        """The entries ``prefix`` and ``prefix_mask`` of rows of shape ``batch``; None if there is no ``prefix``."""
        values = tensordict.get(PREFIX, None)
        return None if values is None else cls.of(values, tensordict.get(PREFIX_MASK, None), batch)

    @classmethod
    def needed(cls, reader: str, tensordict: TensorDictBase, batch: torch.Size) -> PrefixFeatures:
        """As :meth:`read`; a KeyError in the name of ``reader`` if there is no ``prefix``."""
        found = cls.read(tensordict, batch)
        if found is None:
            advice = f"Add the features, float [*B, P, F], as '{PREFIX}': the model was given a PrefixEmbedding."
            raise missing_entry(reader, [PREFIX], tensordict, advice)
        return found

    @property
    def places(self) -> int:
        """``P``, the number of features of a row, masked ones included."""
        return self.values.shape[1]

    @property
    def number(self) -> Tensor:
        """int64 ``[N]``: the number of each row's real features."""
        if self.mask is None:
            return torch.full(self.values.shape[:1], self.places, device=self.values.device)
        return self.mask.sum(-1)

    def entries(self) -> dict[str, Tensor]:
        """The entries of rows that these are."""
        return {PREFIX: self.values} if self.mask is None else {PREFIX: self.values, PREFIX_MASK: self.mask}

    def select(self, rows: Tensor) -> PrefixFeatures:
        """The features of some rows, int64 or bool, as a copy."""
        return PrefixFeatures(self.values[rows], None if self.mask is None else self.mask[rows])

    def to(self, device: torch.device) -> PrefixFeatures:
        """The same on a device."""
        return PrefixFeatures(self.values.to(device), None if self.mask is None else self.mask.to(device))

    def equals(self, other: PrefixFeatures | None) -> Tensor:
        """Bool ``[N]``: True on rows that surely have the same features."""
        n, device = self.values.shape[0], self.values.device
        if other is None or self.values.shape != other.values.shape or (self.mask is None) != (other.mask is None):
            return torch.zeros(n, dtype=torch.bool, device=device)
        same = (self.values == other.values).flatten(1).all(-1)
        return same if self.mask is None or other.mask is None else same & (self.mask == other.mask).all(-1)

    def in_front_of(self, tokens: Tensor) -> Tensor:
        """The ids of rows with their features, int ``[N, T] -> int64 [N, P + T]``; padding repeats the last token."""
        feature = torch.arange(self.places, device=tokens.device).expand(tokens.shape[0], -1)
        return in_front(-1 - feature, self.mask, tokens.long())

    def of_tokens(self, states: Tensor) -> Tensor:
        """The states of the tokens among those of all places, ``[N, P + T, H] -> [N, T, H]``."""
        if self.mask is None:
            return states[:, self.places :]
        return behind(states, self.number, states.shape[1] - self.places)


def reads_prefix(module: nn.Module | None) -> bool:
    """Whether a module of tensordicts reads features in front of a row."""
    return PREFIX in getattr(module, "in_keys", ())
