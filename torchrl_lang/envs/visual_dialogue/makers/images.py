"""Features of generated images: a fixed random projection of their attributes, with noise."""

from __future__ import annotations

import numpy as np

from torchrl_lang.envs.visual_dialogue.makers.attributes import ATTRIBUTES, CAPTIONS

__all__ = ["SHARED_SCALE", "image_features"]

SHARED_SCALE = 4.0
"""Length of a value's vector in the shared dimensions, relative to its length in all others."""

_SHARED = 4
_CAPTION_WEIGHT = 1.4
_NOISE = 0.5
_PROJECTION_SEED = 0


def image_features(values: np.ndarray, feature_size: int, rng: np.random.Generator) -> np.ndarray:
    """Features of images, L2-normalised, float32 ``[N, F]``, from the values of their attributes, int ``[N, A]``.

    ``f = x / |x|`` with ``x = sum_a w_a (s S[a, v_a] + G[a, v_a]) + noise``. The vectors ``G`` have independent random
    directions. The vectors ``S`` all lie in the same few dimensions and are ``s`` times longer: there the attributes
    that are still unknown hide the known ones, so the nearest images to a guess are the right ones only after many
    rounds, while ``G`` shows a model all attributes.

    Args:
        values: number of the value of each attribute.
        feature_size: ``F``.
        rng: draws the noise. The projection is the same for all datasets of one ``F``.

    Examples:
        >>> import numpy as np
        >>> from torchrl_lang.envs.visual_dialogue.makers.images import image_features
        >>> image_features(np.zeros((3, 12), dtype=int), 64, np.random.default_rng(0)).shape
        (3, 64)
    """
    fixed = np.random.default_rng(_PROJECTION_SEED)
    shared = fixed.normal(size=(_SHARED, feature_size)) / np.sqrt(feature_size)
    features = rng.normal(size=(len(values), feature_size)) * (_NOISE / np.sqrt(feature_size))
    in_captions = {name for names, _ in CAPTIONS for name in names}
    for place, attribute in enumerate(ATTRIBUTES):
        many = len(attribute.values)
        hidden = fixed.normal(size=(many, _SHARED)) / np.sqrt(_SHARED) @ shared
        own = fixed.normal(size=(many, feature_size)) / np.sqrt(feature_size)
        weight = _CAPTION_WEIGHT if attribute.name in in_captions else 1.0
        features += weight * (SHARED_SCALE * hidden + own)[values[:, place]]
    return (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
