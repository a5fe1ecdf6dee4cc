"""The spaces of any Gymnasium environment as those that a learning history can store."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

__all__ = ["plain_spaces"]

_LARGEST = 1024
"""Most combinations of MultiDiscrete or MultiBinary actions: a policy has a logit for each."""


def plain_spaces(env: Any, name: str) -> Any:
    """The environment with observations and actions that are numbers from 0 on, or float32 vectors.

    See :class:`~torchrl_lang.algorithm_distillation.sources.GymTask` for what becomes of which space.

    Args:
        env: the environment, which is closed where an error is raised.
        name: what errors call it.

    Raises:
        ValueError: an observation cannot be flattened (such as Graph and Sequence), or the actions are others. Steps
            raise it for an action that is not finite.

    Examples:
        >>> import gymnasium
        >>> from torchrl_lang.algorithm_distillation.sources.gym_spaces import plain_spaces
        >>> plain_spaces(gymnasium.make("Blackjack-v1"), "Blackjack-v1").observation_space.shape
        (45,)
    """
    try:
        return _plain_actions(_plain_observations(env, name), name)
    except ValueError:
        env.close()
        raise


def _plain_observations(env: Any, name: str) -> Any:
    from gymnasium import spaces, wrappers

    space = env.observation_space
    if isinstance(space, spaces.Discrete):
        return wrappers.TransformObservation(env, lambda seen: seen - space.start, spaces.Discrete(space.n))
    if not space.is_np_flattenable:
        raise ValueError(_refusal(name, "observations", space, "what gymnasium.spaces.flatten takes"))
    plain = _float32(spaces.flatten_space(space))
    return wrappers.TransformObservation(env, lambda seen: np.asarray(spaces.flatten(space, seen), np.float32), plain)


def _plain_actions(env: Any, name: str) -> Any:
    from gymnasium import spaces, wrappers

    space = env.action_space
    if isinstance(space, spaces.Discrete):
        return wrappers.TransformAction(env, lambda number: space.start + number, spaces.Discrete(space.n))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        clipped = wrappers.ClipAction(env)
        bounds = space if space.is_bounded("both") else clipped.action_space
        plain = _float32(spaces.flatten_space(bounds))
        return wrappers.TransformAction(clipped, partial(_finite_box, name, space), plain)
    sizes = _sizes(space)
    if not sizes or math.prod(sizes) > _LARGEST:
        expected = f"Discrete, Box of floats, or MultiDiscrete or MultiBinary of at most {_LARGEST} combinations"
        raise ValueError(_refusal(name, "actions", space, expected))
    return wrappers.TransformAction(env, partial(_combination, space, sizes), spaces.Discrete(math.prod(sizes)))


def _refusal(name: str, what: str, space: Any, expected: str) -> str:
    return f"{name} has {what} of {space}, expected {expected}: convert them with a wrapper in GymTask(wrappers=)."


def _float32(space: Any) -> Any:
    """A box of float32 with the same bounds."""
    from gymnasium import spaces

    # Casting them first: Gymnasium warns where it lowers the precision of bounds.
    return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32))


def _finite_box(name: str, space: Any, action: np.ndarray) -> np.ndarray:
    """The action of a box that a vector stands for."""
    if not np.isfinite(action).all():
        raise ValueError(f"{name} got the action {action}, expected finite numbers: the policy has diverged.")
    return action.astype(space.dtype).reshape(space.shape)


def _sizes(space: Any) -> list[int]:
    """The number of values of each component of an action; none if it is not made of numbers."""
    from gymnasium import spaces

    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return space.nvec.flatten().tolist() if isinstance(space, spaces.MultiDiscrete) else []


def _combination(space: Any, sizes: list[int], number: Any) -> np.ndarray:
    """The action of a MultiDiscrete or MultiBinary space that a number stands for."""
    parts = np.stack(np.unravel_index(number, sizes)).reshape(space.shape)
    return (parts + getattr(space, "start", 0)).astype(space.dtype)
