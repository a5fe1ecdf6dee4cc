"""Image features as principal components of similar size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_lang._checks import have_shapes

__all__ = ["WHITENED", "Whitening"]

WHITENED = 4096
"""Images whose features are enough to find the components."""

_FLOOR = 0.05


class Whitening(nn.Module):
    """The principal components of image features, divided by their standard deviations.

    A few directions of image features vary far more than all others, which a network would be slow to use.
    Components with less than a twentieth of the largest deviation are divided by that much, since they are noise.

    Args:
        feature_size: ``F``.
        components: how many to keep, at most ``F``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue.models.whitening import Whitening
        >>> features = torch.randn(200, 8) * torch.tensor([9.0, 4.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
        >>> whitening = Whitening(8, 4)
        >>> whitening.fit(features)
        >>> whitening(features).std(0).round(decimals=1)
        tensor([1., 1., 1., 1.])
    """

    def __init__(self, feature_size: int, components: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.directions: Tensor
        self.register_buffer("mean", torch.zeros(feature_size))
        self.register_buffer("directions", torch.eye(feature_size, min(components, feature_size)))

    def fit(self, features: Tensor) -> None:
        """Set the components to those of some features, ``[N, F]``."""
        have_shapes(("features", features, (len(features), len(self.mean))))
        sample = features.to(self.mean)
        self.mean.copy_(sample.mean(0))
        many = min(self.directions.shape[1], len(sample))
        _, size, directions = torch.pca_lowrank(sample, many, niter=4)
        deviation = (size / len(sample) ** 0.5).clamp_min(float(size[0]) / len(sample) ** 0.5 * _FLOOR)
        self.directions.zero_()
        self.directions[:, :many] = directions / deviation

    def forward(self, features: Tensor) -> Tensor:
        """Components ``[N, C]`` of features ``[N, F]``."""
        return (features - self.mean) @ self.directions
