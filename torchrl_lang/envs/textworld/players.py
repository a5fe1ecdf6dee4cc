"""Scripted policies for TextWorld, which choose among the commands that the environment offers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.schema import ACTION, AGENT_MASK

_OFFERED = ("admissible_action", "admissible_mask")


class ExpertPlayer(TensorDictModuleBase):
    """Plays an expert's command: the engine's shortest plan from the current state, or the walkthrough's next step.

    It reads ``expert_action``, so use ``offers="expert"`` in the environment. Cooking games with several rooms have no
    plan; their walkthrough wins only if it is followed from the start.

    With ``epsilon`` above 0 the expert sometimes plays a random command, so that its data show how to recover from
    mistakes. A sequence of probabilities makes several kinds of experts: row ``r`` of the batch uses
    ``epsilon[r % n]``, so each game is played by one kind from beginning to end.

    Args:
        epsilon: probability of a random command, or one per kind of expert; above 0 use
            ``offers=("expert", "admissible")`` in the environment.
        foreign: fraction of random commands that are taken from another row: admissible in its game and mostly
            impossible in this one, so that the data show the replies to impossible commands.
        first: the action of the first turn, ``K`` ids, such as those of ``inventory``, which lists keys that no other
            text names.
        seed: seed of the policy's random generator.

    Raises:
        ValueError: ``epsilon`` is empty, or a probability is out of range.
    """

    def __init__(
        self,
        *,
        epsilon: float | Sequence[float] = 0.0,
        foreign: float = 0.0,
        first: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.epsilon = tuple(epsilon) if isinstance(epsilon, Sequence) else (epsilon,)
        self.foreign = foreign
        probabilities = {f"epsilon[{n}]": (share, "[0, 1]") for n, share in enumerate(self.epsilon)}
        check_options(**{"len(epsilon)": (len(self.epsilon), 1)}, foreign=(foreign, "[0, 1]"), **probabilities)
        self.random = RandomAdmissiblePlayer(seed=seed) if any(self.epsilon) else None
        self.first = None if first is None else torch.tensor(first)
        self.in_keys = ["expert_action", *(_OFFERED if self.random else ()), *([] if first is None else [AGENT_MASK])]
        self.out_keys = [ACTION]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, int64 ``[*B, K]``."""
        action = tensordict.get("expert_action").clone()
        if self.random is not None:
            other = self._random_command(self.random, tensordict)
            rows = action[..., 0]
            number = torch.arange(rows.numel()).reshape(rows.shape)
            epsilon = torch.tensor(self.epsilon, dtype=torch.float64)[number % len(self.epsilon)]
            errs = (self.random.stream.uniform(tuple(rows.shape)) < epsilon).to(action.device)
            action = torch.where(errs[..., None], other, action)
        if self.first is not None:
            has_acted = tensordict.get(AGENT_MASK).any(-1, keepdim=True)
            action = torch.where(has_acted, action, self.first.to(action.device))
        return tensordict.set(ACTION, action)

    def _random_command(self, player: RandomAdmissiblePlayer, tensordict: TensorDictBase) -> Tensor:
        """A random command for each row, ``[*B, K]``, some of them from another row."""
        own = player(tensordict).get(ACTION)
        if not self.foreign:
            return own
        rows = own.reshape(-1, own.shape[-1])
        n = len(rows)
        away = 1 + player.stream.below(torch.full((n,), max(n - 1, 1)))  # another row, unless there is only one
        others = rows[((torch.arange(n) + away) % n).to(rows.device)].reshape(own.shape)
        is_foreign = (player.stream.uniform(tuple(own.shape[:-1])) < self.foreign).to(own.device)
        return torch.where(is_foreign[..., None], others, own)


class RandomAdmissiblePlayer(TensorDictModuleBase):
    """Plays a uniformly drawn admissible command, or an empty one if there is none.

    It reads ``admissible_action`` and ``admissible_mask``, so use ``offers="admissible"`` in the environment. It does
    not play commands that the template hides.

    Args:
        seed: seed of the policy's random generator; by default from the operating system.
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
