"""Tasks of Gymnasium as sources of learning histories: an environment, and what a variant of it changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrl.envs import GymWrapper

from torchrl_lang._files import shorten
from torchrl_lang.algorithm_distillation.sources.gym_spaces import plain_spaces

__all__ = ["GymTask", "cart_pole"]


@dataclass(frozen=True)
class GymTask:
    """A variant of a Gymnasium environment (extra ``gym``).

    Observations and actions are converted, after the wrappers, to what a learning history stores:

    ============================  ==================================================================================
    observations                  become
    ============================  ==================================================================================
    Discrete                      a number from 0 on
    Box                           a float32 vector, flattened row by row; values are kept, those of images too
    others, also Tuple, Dict      a float32 vector, by ``gymnasium.spaces.flatten``: numbers are one-hot
    ============================  ==================================================================================

    ============================  ==================================================================================
    actions                       become
    ============================  ==================================================================================
    Discrete                      a number from 0 on
    MultiDiscrete, MultiBinary    a number from 0 on, one for each of at most 1,024 combinations
    Box of floats                 a float32 vector with the same bounds, or with none if one of them is infinite; what
                                  is outside the bounds is clipped before the environment gets it
    ============================  ==================================================================================

    Observations that cannot be flattened (such as Graph and Sequence) and other actions are refused: a wrapper can
    convert them, and can also scale observations or crop images. Actions that are not finite are errors.

    Args:
        name: name of the environment, such as ``"Pendulum-v1"``.
        options: keywords of ``gymnasium.make``, such as ``{"g": 5.0}`` or ``{"max_episode_steps": 100}``.
        attributes: attributes of the unwrapped environment to set, for what its constructor does not take. An
            environment may compute others from them once, which must then be set as well: see :func:`cart_pole`.
        wrappers: what to wrap the environment in, from the inside out: functions or classes ``env -> env``, or
            ``functools.partial`` of them with JSON or functions as arguments. They are a part of the task's
            description, so each is a function or class of a module, and no lambda.

    Raises:
        ValueError: a wrapper cannot be described.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.sources import GymTask
        >>> env = GymTask("Pendulum-v1", {"g": 5.0}, {"max_torque": 1.0}).make()
        >>> env.rollout(3)["action"].shape
        torch.Size([3, 1])
        >>> from functools import partial
        >>> from gymnasium.wrappers import FrameStackObservation
        >>> env = GymTask("Pendulum-v1", wrappers=[partial(FrameStackObservation, stack_size=4)]).make()
        >>> env.reset()["observation"].shape
        torch.Size([12])
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[Callable[[Any], Any]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "wrappers", tuple(self.wrappers))
        self._described_wrappers()

    def make(self) -> GymWrapper:
        """A new environment, whose observations and actions are numbers or float32 vectors.

        Raises:
            ImportError: Gymnasium, or a package that the environment needs, is missing.
            ValueError: the environment has no such attribute, or spaces that are not converted.
        """
        try:
            import gymnasium
        except ImportError as error:
            raise ImportError("Tasks of Gymnasium need the package: pip install 'torchrl-lang[gym]'.") from error
        env = gymnasium.make(self.name, **self.options)
        for name, value in self.attributes.items():
            if not hasattr(env.unwrapped, name):
                known = sorted(key for key, held in vars(env.unwrapped).items() if isinstance(held, (int, float)))
                env.close()
                raise ValueError(f"{self.name} has no attribute {name!r}; its numbers are {shorten(known, 400)}.")
            setattr(env.unwrapped, name, value)
        for wrapper in self.wrappers:
            env = wrapper(env)
        return GymWrapper(plain_spaces(env, self.name), categorical_action_encoding=True)

    def describe(self, number: int) -> dict[str, Any]:
        """The task as JSON, with its number as ``"task"``."""
        described = {"name": self.name, "options": dict(self.options), "attributes": dict(self.attributes)}
        return {"task": number, **described, **({"wrappers": self._described_wrappers()} if self.wrappers else {})}

    def _described_wrappers(self) -> list[Any]:
        """The wrappers as JSON."""
        return json.loads(json.dumps(self.wrappers, default=_describe_callable))


def _describe_callable(value: Any) -> Any:
    """A function, a class or a partial of one as JSON."""
    if isinstance(value, partial):
        return {"partial": value.func, "args": value.args, "keywords": value.keywords}
    name = getattr(value, "__qualname__", "<")
    if "<" in name:
        raise ValueError(
            f"A wrapper of a GymTask is made of functions and classes of modules, functools.partial and JSON, got "
            f"{shorten(value)}: write it as a function of a module."
        )
    return f"{value.__module__}.{name}"


def cart_pole(
    *, length: float = 0.5, force: float = 10.0, pole_mass: float = 0.1, cart_mass: float = 1.0, **options: Any
) -> GymTask:
    """CartPole with another pole, cart or force.

    Args:
        length: half the length of the pole.
        force: force of action 1; that of action 0 has the other sign. A negative force swaps the actions.
        pole_mass: mass of the pole.
        cart_mass: mass of the cart.
        **options: keywords of ``gymnasium.make``.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.sources import cart_pole
        >>> cart_pole(length=1.0, force=-10.0).attributes["polemass_length"]
        0.1
    """
    attributes = {
        "length": length,
        "force_mag": force,
        "masspole": pole_mass,
        "masscart": cart_mass,
        # The environment computes these once, from its own masses and length.
        "total_mass": pole_mass + cart_mass,
        "polemass_length": pole_mass * length,
    }
    return GymTask("CartPole-v1", options, attributes)
