"""A curriculum: starts whose games are sometimes better and sometimes worse are drawn more often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.data import row_returns
from torchrl_lang.schema import GROUP, entry

FLOOR = 0.2
"""Share of the draws that is uniform, so that every start is seen now and then."""
_KEPT = 0.9
"""Weight of earlier returns of a start at each batch that has new ones: the policy changes."""
_PRIOR = 4.0
"""Returns that the mean variance of all starts counts for in the variance of each."""


class Curriculum:
    """Draws the starts of games with weights from the variance of their returns.

    A start that is always won, or always lost, has nothing to teach: the weight of start ``i`` is::

        (1 - FLOOR) * v_i / sum_j v_j + FLOOR / S,    v_i = (n_i s_i^2 + k s^2) / (n_i + k)

    with the variance ``s_i^2`` of its last ``n_i`` returns, which fade, and their mean ``s^2`` over all starts. So
    starts without games have a mean weight; where no returns vary the draw is uniform.

    Args:
        env: a language environment with a ``group_size``, also wrapped: its groups begin with what is drawn.
        most: number of starts to draw from, at most as many as there are.

    Raises:
        ValueError: ``reset`` of the environment accepts no start, or there is only one, or it has no ``group_size``.

    Call :meth:`update` with the rows of each batch, and :meth:`clear` where ``set_seed`` begins new groups.

    Examples:
        >>> from torchrl_lang.data import rows_from_rollout
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> from torchrl_lang.training import Curriculum
        >>> env = CorridorEnv(5, max_turns=4, batch_size=[256], group_size=4, seed=0)
        >>> curriculum = Curriculum(env, 100)
        >>> walks = env.rollout(4, CorridorPlayer(env.tokenizer, 5, p_right=0.6, seed=0), break_when_any_done=False)
        >>> curriculum.update(rows_from_rollout(walks, unfinished="drop"))
        >>> [round(float(weight), 2) for weight in curriculum.weights()]
        [0.06, 0.07, 0.18, 0.69]
    """

    def __init__(self, env: Any, most: int) -> None:
        base = getattr(env, "base_env", env)
        self.values = base.possible_starts(most).cpu()
        if len(self.values) < 2:
            found = f"{type(base).__name__} has {len(self.values)}"
            raise ValueError(f"A curriculum needs games whose starts can be given in reset: {found}. Leave it out.")
        if base.group_size is None:
            raise ValueError(
                f"A curriculum draws the starts of groups: give {type(base).__name__} a group_size, 1 or more."
            )
        self._sums = torch.zeros(3, len(self.values), dtype=torch.float64)  # numbers, sums and squares of returns
        self._begun: dict[int, int] = {}
        base.starts = self.draw

    def weights(self) -> Tensor:
        """The probability of each start, float64 ``[S]``."""
        number, total, square = self._sums
        variance = (square - total.square() / number.clamp_min(1e-9)).clamp_min(0)  # times the number
        mean = variance.sum() / number.sum().clamp_min(1e-9)
        found = (variance + _PRIOR * mean) / (number + _PRIOR)
        uniform = torch.ones_like(found) / len(found)
        return (1 - FLOOR) * found / found.sum() + FLOOR * uniform if found.sum() > 1e-9 else uniform

    def draw(self, group: Tensor) -> Tensor:
        """The starts of groups by their numbers, int64 ``[G]`` both; of a group that has begun it is the same again."""
        ends = self.weights().cumsum(0)
        for number in {*group.tolist()} - self._begun.keys():
            chance = torch.tensor(number / 2**62, dtype=torch.float64)  # numbers of groups are uniform below 2**62
            self._begun[number] = min(int(torch.searchsorted(ends, chance)), len(ends) - 1)
        return self.values[[self._begun[number] for number in group.tolist()]].to(group.device)

    def update(self, rows: TensorDictBase) -> None:
        """Count the returns of rows ``[N]`` whose groups were drawn here.

        Raises:
            KeyError: the rows have no ``group``.
            ValueError: some groups were not drawn here, or before :meth:`clear`.
        """
        groups = entry(rows, GROUP).flatten().tolist()
        if unknown := {*groups} - self._begun.keys():
            found = f"{len(unknown)} of the {len({*groups})} groups of the rows were not drawn here, or before clear()"
            raise ValueError(f"{found}: give rows that the environment of the curriculum has played since then.")
        start = torch.tensor([self._begun[number] for number in groups])
        returns = row_returns(rows).cpu().double()
        self._sums[:, start.unique()] *= _KEPT
        self._sums.index_add_(1, start, torch.stack([torch.ones_like(returns), returns, returns.square()]))

    def clear(self) -> None:
        """Drop the starts of groups: those that follow have other numbers."""
        self._begun = {}

    def state_dict(self) -> dict[str, Any]:
        """The returns of each start, and the starts of the groups."""
        return {"sums": self._sums.clone(), "begun": torch.tensor([*self._begun.items()]).reshape(-1, 2)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._sums, self._begun = state_dict["sums"].clone(), dict(state_dict["begun"].long().tolist())
