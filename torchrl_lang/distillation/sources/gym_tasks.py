"""Tasks of Gymnasium as sources of learning histories: an environment, and what a variant of it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchrl.envs import GymWrapper

from torchrl_lang.storage import shorten

__all__ = ["GymTask", "cart_pole"]


@dataclass(frozen=True)
class GymTask:
    """A variant of a Gymnasium environment (extra ``gym``).

    Args:
        name: name of the environment, such as ``"Pendulum-v1"``.
        options: keywords of ``gymnasium.make``, such as ``{"g": 5.0}`` or ``{"max_episode_steps": 100}``.
        attributes: attributes of the unwrapped environment to set, for what its constructor does not take. An
            environment may compute others from them once, which must then be set as well: see :func:`cart_pole`.

    Examples:
        >>> from torchrl_lang.distillation.sources import GymTask
        >>> env = GymTask("Pendulum-v1", {"g": 5.0}, {"max_torque": 1.0}).make()
        >>> env.rollout(3)["action"].shape
        torch.Size([3, 1])
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> GymWrapper:
        """A new environment, whose discrete actions are numbers.

        Raises:
            ImportError: Gymnasium, or a package that the environment needs, is missing.
            ValueError: the environment has no such attribute.
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
        return GymWrapper(env, categorical_action_encoding=True)

    def describe(self, number: int) -> dict[str, Any]:
        """The task as JSON, with its number as ``"task"``."""
        return {"task": number, **asdict(self)}


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
        >>> from torchrl_lang.distillation.sources import cart_pole
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
