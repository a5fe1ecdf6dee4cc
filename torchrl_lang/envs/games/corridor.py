"""A corridor: a tensor-only task in which imitating the best data is not optimal.

Places are numbered from 0, and the last one is the goal. The environment writes the agent's place; the agent writes
``r`` or ``l`` and moves one place, but not past the ends; other utterances do not move it. The move that reaches the
goal has reward 0 and terminates the task, all others have reward -1. The state is the agent's place, so the optimal
policy and its value are known: :func:`corridor_value`.

:class:`CorridorPlayer` generates data in which no walk is optimal. Behaviour cloning on it, or on its best walks, keeps
the detours; a learner that combines parts of different walks finds the shortest one.
"""

from __future__ import annotations

from typing import Unpack

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang.envs.language_env import EpisodeOptions, LanguageEnv, Reply, TaskState
from torchrl_lang.envs.reset_inputs import in_range
from torchrl_lang.envs.row_state import Rows, Utterance
from torchrl_lang.functional.random import random_index
from torchrl_lang.schema import ACTION, ATTENTION_MASK, TOKENS
from torchrl_lang.text.tokenizers import CharTokenizer, Tokenizer

_PLACES = "0123456789"


def corridor_value(distance: Tensor | int, gamma: float = 1.0) -> Tensor:
    """Value of the optimal policy at ``distance`` places before the goal, at the beginning of its turn.

    A move has two tokens, the letter and the end of the action. With one discount per token the reward of move ``t``
    has the weight ``gamma**(2 t + 1)``, so ``V*(d) = -(gamma + gamma**3 + ... + gamma**(2 d - 3))``.

    Args:
        distance: moves to the goal, at least 1, any shape.
        gamma: discount per token.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.games import corridor_value
        >>> corridor_value(torch.tensor([1, 2, 3]))
        tensor([ 0., -1., -2.])
        >>> corridor_value(3, gamma=0.5)  # -(0.5 + 0.125)
        tensor(-0.6250)
    """
    misses = torch.as_tensor(distance, dtype=torch.float32) - 1
    if gamma == 1:
        return 0.0 - misses
    return -gamma * (1 - gamma ** (2 * misses)) / (1 - gamma**2)


class CorridorEnv(LanguageEnv):
    """The corridor as a batch of language tasks; see :mod:`torchrl_lang.envs.games.corridor`.

    A row is ``<s>0</s>r</a>1</s>r</a>2</s></eod>``. ``reset`` accepts the first place, as an entry ``place`` int64
    ``[*B]`` of its tensordict or by keyword, ``reset(place=...)``; use the keyword if the environment is wrapped (see
    :class:`~torchrl_lang.envs.LanguageEnv`).

    Args:
        length: number of places, 2 to 10.
        start: the first place; None draws a place before the goal.
        max_turns: number of moves after which a walk is truncated.
        **options: ``batch_size``, ``group_size``, ``seed`` and ``device``, as in
            :class:`~torchrl_lang.envs.LanguageEnv`.

    Examples:
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=4, start=0, batch_size=[2], seed=0)
        >>> walk = env.rollout(8, CorridorPlayer(env.tokenizer, 4, seed=0), break_when_any_done=False)
        >>> env.tokenizer.decode(walk[0, 0]["tokens"][:3])
        '<s>0</s>'
        >>> bool((walk["next", "reward"].sum(1) < -2).all())  # no walk is optimal
        True
    """

    _reset_entries = ("place",)

    def __init__(
        self, length: int = 4, *, start: int | None = None, max_turns: int = 8, **options: Unpack[EpisodeOptions]
    ) -> None:
        check_options(length=(length, range(2, len(_PLACES) + 1)), start=(start, (None, *range(length - 1))))
        self.length, self.start, self._number_of_starts = length, start, length - 1
        tokenizer = CharTokenizer.from_alphabet(_PLACES[:length] + "lr")
        # An opening of 3 tokens, 5 per turn (with one letter too many), and the end-of-dialogue token.
        super().__init__(tokenizer, row_length=4 + 5 * max_turns, action_length=2, max_turns=max_turns, **options)
        self._left, self._right = tokenizer.encode("lr")

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        named = self._named(options, "place")
        if named is not None:
            place = in_range("place", named, fresh, self.length - 1)
        elif self.start is not None:
            place = torch.full_like(episode, self.start)
        else:
            place = random_index(self._key, episode, self.length - 1)
        # The digits come first in the alphabet, so the id of a place is its number.
        return place[:, None], torch.ones_like(place), {"place": place}

    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        letter, alone = utterance.tokens[:, 0], utterance.length == 1
        step = (alone & (letter == self._right)).long() - (alone & (letter == self._left)).long()
        place = (task["place"] + step).clamp(0, self.length - 1)
        arrived = place == self.length - 1
        reward = arrived.float() - 1
        return Reply(place[:, None], torch.ones_like(place), reward, arrived), {"place": place}

    def possible_starts(self, most: int) -> Tensor:
        """See :meth:`LanguageEnv.possible_starts`: the fixed start alone, if there is one."""
        return super().possible_starts(most) if self.start is None else torch.tensor([self.start], device=self.device)

    def _restore(self, rows: Rows, task: TaskState, fresh: Tensor, options: TensorDictBase | None) -> TaskState:
        last_place = rows.tokens.gather(-1, (rows.length - 2).clamp_min(0)[:, None]).squeeze(-1)
        return {"place": in_range("place", last_place, fresh, self.length - 1)}


class CorridorPlayer(TensorDictModuleBase):
    """A policy with a detour in every walk: moves right with probability ``p_right``, otherwise left.

    Next to the goal it always moves left once before it may reach the goal.

    Args:
        tokenizer: tokenizer of the corridor.
        length: number of places of the corridor.
        p_right: probability of moving right. Below one half even the most likely move is the wrong one.
        seed: seed of its random generator.
    """

    in_keys = [TOKENS, ATTENTION_MASK]
    out_keys = [ACTION]

    def __init__(self, tokenizer: Tokenizer, length: int, *, p_right: float = 0.4, seed: int = 0) -> None:
        super().__init__()
        check_options(p_right=(p_right, "(0, 1)"))
        self.p_right = p_right
        self._left, self._right = tokenizer.encode("lr")
        self._doorstep = length - 2
        self._end = tokenizer.control.end_of_action
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the next move of each row, ``action``."""
        tokens, real = tensordict.get(TOKENS), tensordict.get(ATTENTION_MASK)
        place = tokens.gather(-1, (real.sum(-1, keepdim=True) - 2).clamp_min(0)).squeeze(-1)
        straight = ~(tokens == self._left).any(-1)
        chance = torch.rand(place.shape, generator=self.generator)
        right = (chance.to(place.device) < self.p_right) & ~(straight & (place == self._doorstep))
        letter = torch.where(right, self._right, self._left)
        return tensordict.set(ACTION, torch.stack([letter, torch.full_like(letter, self._end)], -1))
