"""Players of TextWorld games that need no learning: they take what the environment offers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.functional.random_stream import RandomStream
from torchrl_lang.schema import ACTION

__all__ = ["ExpertPlayer", "RandomAdmissiblePlayer"]

_OFFERED = ("admissible_action", "admissible_mask")


class ExpertPlayer(TensorDictModuleBase):
    """Says what wins: the engine's shortest plan from where the game stands, else the next step of its walkthrough.

    It reads ``expert_action``, so give the environment ``offers="expert"``. Cooking games with several rooms have no
    plan; their walkthrough wins where it has been followed from the start.

    An expert who errs now and then makes data that show how one gets back on the way. With several probabilities there
    are experts of as many kinds: row ``r`` of the batch errs with ``epsilon[r % n]``. A game stays in its row, so one
    of them plays it from its beginning to its end.

    Args:
        epsilon: probability of a random command instead, or one for each kind of expert; above 0 give the environment
            ``offers=("expert", "admissible")``.
        foreign: share of the random commands that are another row's: one that is admissible in its game, and most
            often impossible in this one, so that the data show how that is answered.
        seed: seed of the player's own random stream.

    Raises:
        ValueError: there is no expert, or a probability is none.
    """

    def __init__(
        self, *, epsilon: float | Sequence[float] = 0.0, foreign: float = 0.0, seed: int | None = None
    ) -> None:
        super().__init__()
        shares = tuple(epsilon) if isinstance(epsilon, Sequence) else (epsilon,)
        if not shares or not all(0 <= share <= 1 for share in (*shares, foreign)):
            raise ValueError(
                f"epsilon is the probability of a random command, or one for each expert, and foreign a share of them: "
                f"got epsilon={epsilon}, foreign={foreign}."
            )
        self.epsilon, self.foreign = shares, foreign
        errs = any(shares)
        self.in_keys = ["expert_action", *(_OFFERED if errs else ())]
        self.out_keys = [ACTION]
        self.random = RandomAdmissiblePlayer(seed=seed) if errs else None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, int64 ``[*B, K]``."""
        action = tensordict.get("expert_action").clone()
        if self.random is not None:
            other = self._random_command(self.random, tensordict)
            action = torch.where(self._errs(self.random.stream, action[..., 0])[..., None], other, action)
        return tensordict.set(ACTION, action)

    def _errs(self, stream: RandomStream, rows: Tensor) -> Tensor:
        """The rows whose expert errs in this turn, bool ``[*B]``."""
        number = torch.arange(rows.numel()).reshape(rows.shape)
        epsilon = torch.tensor(self.epsilon, dtype=torch.float64)[number % len(self.epsilon)]
        return (stream.uniform(tuple(rows.shape)) < epsilon).to(rows.device)

    def _random_command(self, player: RandomAdmissiblePlayer, tensordict: TensorDictBase) -> Tensor:
        """A random command for each row, ``[*B, K]``, some of them another row's."""
        own = player(tensordict).get(ACTION)
        if not self.foreign:
            return own
        rows = own.reshape(-1, own.shape[-1])
        n = len(rows)
        away = 1 + player.stream.below(torch.full((n,), max(n - 1, 1)))  # never the row itself, but where it is alone
        others = rows[((torch.arange(n) + away) % n).to(rows.device)].reshape(own.shape)
        is_foreign = (player.stream.uniform(tuple(own.shape[:-1])) < self.foreign).to(own.device)
        return torch.where(is_foreign[..., None], others, own)


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
