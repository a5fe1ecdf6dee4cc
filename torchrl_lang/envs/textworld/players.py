"""Players of TextWorld games that need no learning: they take what the environment offers."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_lang.functional.random_stream import RandomStream
from torchrl_lang.schema import ACTION

__all__ = ["ExpertPlayer", "RandomAdmissiblePlayer"]

_OFFERED = ("admissible_action", "admissible_mask")


class ExpertPlayer(TensorDictModuleBase):
    """Says what wins: the engine's shortest plan from where the game stands, else the next step of its walkthrough.

    It reads ``expert_action``, so give the environment ``offers="expert"``. Cooking games with several rooms have no
    plan; their walkthrough wins where it has been followed from the start.

    Args:
        epsilon: probability of a random admissible command instead; then give ``offers=("expert", "admissible")``.
        seed: seed of the player's own random stream.
    """

    def __init__(self, *, epsilon: float = 0.0, seed: int | None = None) -> None:
        super().__init__()
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon is a probability, got {epsilon}.")
        self.epsilon = epsilon
        self.in_keys = ["expert_action", *(_OFFERED if epsilon else ())]
        self.out_keys = [ACTION]
        self.random = RandomAdmissiblePlayer(seed=seed) if epsilon else None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, int64 ``[*B, K]``."""
        action = tensordict.get("expert_action").clone()
        if self.random is not None:
            other = self.random(tensordict).get(ACTION)
            errs = self.random.stream.uniform(tuple(action.shape[:-1])).to(action.device) < self.epsilon
            action = torch.where(errs[..., None], other, action)
        return tensordict.set(ACTION, action)


class RandomAdmissiblePlayer(TensorDictModuleBase):
    """Says any of the admissible commands, each as likely as the others; ends its turn at once where there is none.

    It reads ``admissible_action`` and ``admissible_mask``, so give the environment ``offers="admissible"``. Commands
    that a template hides are not offered.

    Args:
        seed: seed of the player's own random stream; without one it takes a seed from the operating system.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [*_OFFERED], [ACTION]
        self.stream = RandomStream(seed)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, int64 ``[*B, K]``."""
        actions, mask = tensordict.get("admissible_action"), tensordict.get("admissible_mask")
        number = mask.sum(-1)
        index = self.stream.below(number)[..., None, None].expand(*number.shape, 1, actions.shape[-1])
        return tensordict.set(ACTION, actions.gather(-2, index).squeeze(-2))
