"""The states of a training run's random generators, for checkpoints."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RandomState"]


class RandomState:
    """The states of torch's global generators and of some others, for checkpoints.

    Args:
        generators: further generators by name, such as a replay buffer's or a policy's.

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
        """The state of each generator, as byte tensors."""
        return {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "generators": {name: generator.get_state() for name, generator in self.generators.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of every generator.

        Raises:
            KeyError: the state is of other generators than this object's.
            ValueError: it was saved with another number of CUDA devices.
        """
        saved = state_dict["generators"]
        if set(saved) != set(self.generators):
            raise KeyError(f"The state has the generators {sorted(saved)}, expected {sorted(self.generators)}.")
        cuda = state_dict["cuda"]
        if cuda and len(cuda) != torch.cuda.device_count():
            raise ValueError(
                f"The state is of {len(cuda)} CUDA device(s), this machine has {torch.cuda.device_count()}: the run "
                "cannot continue to the same numbers. Omit the random state to continue with other numbers."
            )
        torch.set_rng_state(state_dict["cpu"])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for name, generator in self.generators.items():
            generator.set_state(saved[name])
