"""Additional rewards of turns, in the reward of the step and in the row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import Transform

from torchrl_lang._checks import Finite, check_options, checked
from torchrl_lang.functional.decisions import row_length
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, REWARD, TOKEN_REWARD, find_entry


class TurnRewardTransform(Transform):
    """Adds a number to the reward of each turn of a language environment. Abstract.

    Subclasses implement :meth:`earned`. The number is added to ``reward`` and to ``token_reward`` at the last token
    that the agent wrote in this turn, so rows made from the steps contain it. Several may follow each other, in any
    order. A row that is not played in a step, because it has ended or is left out, earns nothing. Over a
    :class:`~torchrl_lang.envs.TokenEnv` each token is a turn.

    The rewards of earlier turns are read from the tensordict that is stepped, so step the one that ``reset`` or
    ``step`` returned, as rollouts and collectors do. A text game refuses rows with these rewards in
    ``reset(set_state=True)``.

    Args:
        in_keys: entries of ``"next"`` that :meth:`earned` reads; an environment without them is refused.

    Raises:
        KeyError: the environment lacks an entry; on steps, the tensordict lacks the row.

    Examples:
        >>> import torch
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_lang.envs import WordleEnv
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer
        >>> from torchrl_lang.transforms import TurnRewardTransform
        >>> class Brevity(TurnRewardTransform):  # a point for each token less than 10
        ...     def earned(self, before, after):
        ...         return 10 - after["agent_mask"].sum(-1)
        >>> env = TransformedEnv(WordleEnv(["crane"], batch_size=[2]), Brevity(["agent_mask"]))
        >>> env.rollout(1, RandomWordPlayer(["slate"]))["next", "reward"].flatten()  # 4 for brevity, -1 for the try
        tensor([3., 3.])
    """

    def __init__(self, in_keys: Sequence[NestedKey] = ()) -> None:
        super().__init__(in_keys=list(in_keys), out_keys=[REWARD, TOKEN_REWARD])

    @abstractmethod
    def earned(self, before: TensorDictBase, after: TensorDictBase) -> Tensor:
        """The reward of a turn, ``[*B]`` or ``[*B, 1]``; ignored on rows that are not played.

        Args:
            before: the row before the turn, and the action.
            after: the ``"next"`` of the step.
        """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuse: only an environment plays turns."""
        raise RuntimeError(f"{type(self).__name__} belongs into an environment, whose rollouts have its rewards.")

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        name, advice = type(self).__name__, "Step the tensordict that reset() or step() of this environment returned."
        earlier, read = (find_entry(name, key, advice, tensordict) for key in (TOKEN_REWARD, ATTENTION_MASK))
        length = row_length(read).unsqueeze(-1)  # [*B, 1]
        played = row_length(next_tensordict.get(ATTENTION_MASK)).unsqueeze(-1) > length
        reward, row = next_tensordict.get(REWARD), next_tensordict.get(TOKEN_REWARD)
        number = torch.where(played, self.earned(tensordict, next_tensordict).reshape(reward.shape), 0).to(reward.dtype)
        place = torch.arange(row.shape[-1], device=row.device)
        last = torch.where(next_tensordict.get(AGENT_MASK), place, 0).max(-1, keepdim=True).values
        row = torch.where(place < length, earlier, row).scatter_add(-1, last, number.to(row.dtype))
        return next_tensordict.set(TOKEN_REWARD, row).set(REWARD, reward + number)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Check that the environment has the entries that are read."""
        present = {key for specs in output_spec.values() for key in specs.keys(True, True)}
        for key in (TOKEN_REWARD, *self.in_keys):
            if key not in present:
                has = sorted(map(str, present))
                raise KeyError(f"{type(self).__name__} reads {key!r} of {has}; a TextWorldEnv may have it by offers=.")
        return super().transform_output_spec(output_spec)


class LivingCost(TurnRewardTransform):
    """Subtracts ``cost`` from every turn, the last one included.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_lang.envs import WordleEnv
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer
        >>> from torchrl_lang.transforms import LivingCost
        >>> env = TransformedEnv(WordleEnv(["crane"], batch_size=[1]), LivingCost(0.5))
        >>> steps = env.rollout(2, RandomWordPlayer(["slate"]))
        >>> steps["next", "reward"].flatten(), steps["next", "token_reward"][0, -1].sum()
        (tensor([-1.5000, -1.5000]), tensor(-3.))
    """

    @checked
    def __init__(self, cost: Finite) -> None:
        super().__init__()
        self.cost = cost

    def earned(self, before: TensorDictBase, after: TensorDictBase) -> Tensor:
        """The negative cost."""
        return torch.full_like(after.get(REWARD), -self.cost)


class EntryReward(TurnRewardTransform):
    """Adds the weighted sum of entries ``[*B, 1]`` of ``"next"``, each counted in every turn in which it is not zero.

    A :class:`~torchrl_lang.envs.textworld.TextWorldEnv` has ``won`` and ``lost``; ``points`` of the last turn, which
    it rewards with 1 each; ``invalid`` (a command that was not understood or impossible) and ``was_admissible``
    (one that was among the admissible ones) where it ``offers`` them.

    Args:
        weights: the reward for each entry, negative for a penalty.

    Raises:
        ValueError: a weight is no finite number.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_lang.envs import WordleEnv
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer
        >>> from torchrl_lang.transforms import EntryReward
        >>> env = TransformedEnv(WordleEnv(["crane"], batch_size=[1]), EntryReward({"terminated": 5.0}))
        >>> env.rollout(2, RandomWordPlayer(["crane"]))["next", "reward"].flatten()
        tensor([5.])
    """

    def __init__(self, weights: Mapping[NestedKey, float]) -> None:
        check_options(**{f"weights[{key!r}]": (weight, "(-inf, inf)") for key, weight in weights.items()})
        self.weights = {key: weight for key, weight in weights.items() if weight}
        super().__init__([*self.weights])

    def earned(self, before: TensorDictBase, after: TensorDictBase) -> Tensor:
        """The weighted sum."""
        total = torch.zeros_like(after.get(REWARD))
        for key, weight in self.weights.items():
            total = total + weight * after.get(key)
        return total
