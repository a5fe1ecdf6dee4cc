"""Random streams of a training run: seeding them, and remembering where they stand."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RandomState", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed torch's global streams on all devices. For scripts: no other module here touches them.

    Environments, policies and replay buffers have generators of their own, which are seeded where they are made.
    """
    torch.manual_seed(seed)


class RandomState:
    """Where torch's global streams and some generators stand, as a state that a checkpoint can hold.

    Args:
        generators: generators in use, by name, such as a replay buffer's or a policy's.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import RandomState
        >>> stream = RandomState(sampler=torch.Generator())
        >>> state = stream.state_dict()
        >>> first = torch.rand(3)
        >>> stream.load_state_dict(state)
        >>> bool((torch.rand(3) == first).all())
        True
    """

    def __init__(self, **generators: torch.Generator) -> None:
        self.generators = generators

    def state_dict(self) -> dict[str, Any]:
        """The state of each stream, as byte tensors."""
        return {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "generators": {name: generator.get_state() for name, generator in self.generators.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put every stream where it stood.

        Raises:
            KeyError: the state knows other generators than this object.
            ValueError: it was taken with another number of CUDA devices.
        """
        saved = state_dict["generators"]
        if set(saved) != set(self.generators):
            raise KeyError(f"The state has the generators {sorted(saved)}, expected {sorted(self.generators)}.")
        cuda = state_dict["cuda"]
        if cuda and len(cuda) != torch.cuda.device_count():
            raise ValueError(
                f"The state is of {len(cuda)} CUDA device(s), this machine has {torch.cuda.device_count()}: the run "
                "cannot continue to the same numbers. Leave the random state out to continue all the same."
            )
        torch.set_rng_state(state_dict["cpu"])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for name, generator in self.generators.items():
            generator.set_state(saved[name])
