"""A walk along a corridor: the smallest task in which copying the best data is not enough. Tensors only.

Places stand in a row, numbered from 0; the last one is the goal. The environment says where the agent stands, the agent
says ``r`` or ``l`` and moves one place, not past the ends; anything else leaves it where it is. A move that reaches the
goal earns 0 and ends the task, any other -1. Where the agent stands is all that matters, so the best policy and its
value are known: :func:`corridor_value`.

:class:`CorridorPlayer` makes data without a single straight walk. Copying it, or its best walks, keeps the detours;
a learner that joins the good halves of different walks finds the way that nobody went.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.data.tokenizers import CharTokenizer, Tokenizer
from torchrl_lang.envs.language_env import LanguageEnv, Reply, TaskState
from torchrl_lang.envs.row_state import Rows, Utterance
from torchrl_lang.functional import random_index
from torchrl_lang.schema import ACTION, ATTENTION_MASK, TOKENS

__all__ = ["CorridorEnv", "CorridorPlayer", "corridor_value"]

_PLACES = "0123456789"


def corridor_value(distance: Tensor | int, gamma: float = 1.0) -> Tensor:
    """What the best policy earns from ``distance`` places before the goal, when its turn begins.

    A move is two tokens, the letter and the end of the action, so with one discount a token the ``t``-th move's reward
    weighs ``gamma**(2 t + 1)`` and ``V*(d) = -(gamma + gamma**3 + ... + gamma**(2 d - 3))``.

    Args:
        distance: moves to the goal, at least 1, any shape.
        gamma: discount of a token.

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

    A row reads ``<s>0</s>r</a>1</s>r</a>2</s></eod>``. A reset tensordict may name the place to start from, ``place``
    int64 ``[*B]``, or the keyword, ``reset(place=...)``: wrapped environments take the keyword only (see
    :class:`~torchrl_lang.envs.LanguageEnv`).

    Args:
        length: number of places, 2 to 10.
        start: where walks begin; None draws a place before the goal.
        max_turns: moves before a walk is truncated.
        batch_size, seed, device: as in :class:`~torchrl_lang.envs.LanguageEnv`.

    Examples:
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=4, start=0, batch_size=[2], seed=0)
        >>> walk = env.rollout(8, CorridorPlayer(env.tokenizer, 4, seed=0), break_when_any_done=False)
        >>> env.tokenizer.decode(walk[0, 0]["tokens"][:3])
        '<s>0</s>'
        >>> bool((walk["next", "reward"].sum(1) < -2).all())  # never the best walk
        True
    """

    _reset_entries = ("place",)

    def __init__(
        self,
        length: int = 4,
        *,
        start: int | None = None,
        max_turns: int = 8,
        batch_size: int | Sequence[int] = (1,),
        seed: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not 2 <= length <= len(_PLACES):
            raise ValueError(f"A corridor has 2 to {len(_PLACES)} places, got length={length}.")
        if start is not None and not 0 <= start < length - 1:
            raise ValueError(f"A walk starts before the goal, at 0 to {length - 2}, got start={start}.")
        self.length = length
        self.start = start
        tokenizer = CharTokenizer.from_alphabet(_PLACES[:length] + "lr")
        # An opening of 3 tokens, 5 for every turn (a letter too many among them), the end of the dialogue.
        super().__init__(
            tokenizer,
            row_length=4 + 5 * max_turns,
            action_length=2,
            max_turns=max_turns,
            batch_size=batch_size,
            seed=seed,
            device=device,
        )
        self._left, self._right = tokenizer.encode("lr")

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        place = random_index(self._key, episode, self.length - 1)
        if self.start is not None:
            place = torch.full_like(place, self.start)
        named = self._named(options, "place")
        if named is not None:
            place = self._before_goal(named, fresh)
        # The digits come first in the alphabet: a place is its own token.
        return place[:, None], torch.ones_like(place), {"place": place}

    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        letter, alone = utterance.tokens[:, 0], utterance.length == 1
        step = (alone & (letter == self._right)).long() - (alone & (letter == self._left)).long()
        place = (task["place"] + step).clamp(0, self.length - 1)
        arrived = place == self.length - 1
        reward = arrived.float() - 1
        return Reply(place[:, None], torch.ones_like(place), reward, arrived), {"place": place}

    def _restore(self, rows: Rows, task: TaskState, fresh: Tensor, options: TensorDictBase | None) -> TaskState:
        said = rows.tokens.gather(-1, (rows.length - 2).clamp_min(0)[:, None]).squeeze(-1)
        return {"place": self._before_goal(said, fresh)}

    def _before_goal(self, place: Tensor, fresh: Tensor) -> Tensor:
        bad = fresh & ((place < 0) | (place >= self.length - 1))
        if bad.any():
            raise ValueError(
                f"A walk goes on from a place before the goal, 0 to {self.length - 2}, got {place[bad].tolist()}."
            )
        return torch.where(fresh, place, 0)


class CorridorPlayer(TensorDictModuleBase):
    """A walker that makes a detour in every walk: right with probability ``p_right``, left otherwise.

    On the goal's doorstep it always turns left once before it may go in.

    Args:
        tokenizer: that of the corridor.
        length: number of places of the corridor.
        p_right: probability of the better move. Below one half even the most likely move is the wrong one.
        seed: of its own random stream.
        device: where the stream lives.
    """

    in_keys = [TOKENS, ATTENTION_MASK]
    out_keys = [ACTION]

    def __init__(
        self,
        tokenizer: Tokenizer,
        length: int,
        *,
        p_right: float = 0.4,
        seed: int = 0,
        device: torch.device | str | int = "cpu",
    ) -> None:
        super().__init__()
        if not 0 < p_right < 1:
            raise ValueError(f"p_right must lie in (0, 1), got {p_right}: every move needs to be tried.")
        self.p_right = p_right
        self._left, self._right = tokenizer.encode("lr")
        self._doorstep = length - 2
        self._end = tokenizer.control.end_of_action
        self.generator = torch.Generator(device).manual_seed(seed)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the next move of each row, ``action``."""
        tokens, real = tensordict.get(TOKENS), tensordict.get(ATTENTION_MASK)
        place = tokens.gather(-1, (real.sum(-1, keepdim=True) - 2).clamp_min(0)).squeeze(-1)
        straight = ~(tokens == self._left).any(-1)
        chance = torch.rand(place.shape, generator=self.generator, device=self.generator.device)
        right = (chance.to(place.device) < self.p_right) & ~(straight & (place == self._doorstep))
        letter = torch.where(right, self._right, self._left)
        return tensordict.set(ACTION, torch.stack([letter, torch.full_like(letter, self._end)], -1))
