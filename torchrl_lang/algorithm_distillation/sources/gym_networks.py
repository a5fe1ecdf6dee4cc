"""Networks of the learners on Gymnasium tasks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.modules import MLP

from torchrl_lang.schema import OBSERVATION

__all__ = ["observation_network"]


def observation_network(env: EnvBase, outputs: int, width: int, activation: type[nn.Module]) -> nn.Module:
    """A network with two hidden layers that reads the observations of a task.

    Args:
        env: of :meth:`~torchrl_lang.algorithm_distillation.sources.GymTask.make`: float32 vectors ``[*B, D]`` are read
            as they are, numbers int64 ``[*B]`` as one-hot vectors.
        outputs: the number of outputs.
        width: units in each hidden layer.
        activation: class of the activations.

    Returns:
        A module ``observation -> float32 [*B, outputs]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import GymTask
        >>> from torchrl_lang.algorithm_distillation.sources.gym_networks import observation_network
        >>> env = GymTask("FrozenLake-v1").make()
        >>> observation_network(env, 4, 8, torch.nn.ReLU)(torch.tensor([0, 15, 3])).shape
        torch.Size([3, 4])
    """
    spec = env.observation_spec[OBSERVATION]
    inputs = spec.n if spec.ndim == 0 else spec.shape[-1]
    mlp = MLP(in_features=inputs, out_features=outputs, num_cells=[width] * 2, activation_class=activation)
    return nn.Sequential(_OneHot(inputs), mlp) if spec.ndim == 0 else mlp


class _OneHot(nn.Module):
    """Numbers int64 ``[*B]`` as vectors float32 ``[*B, size]``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, number: Tensor) -> Tensor:
        return nn.functional.one_hot(number, self.size).to(torch.float32)
