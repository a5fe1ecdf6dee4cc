"""Prompts and a reward for completions: a language environment of one turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from torchrl_lang._files import shorten
from torchrl_lang.envs.game_turn import GamePlace
from torchrl_lang.envs.text_game import GameOptions, TextGameEnv
from torchrl_lang.text.tokenizers import Tokenizer

RewardFunction = Callable[[list[str], list[str]], Sequence[float] | Tensor]
"""Maps prompts and completions to one reward each."""


class PromptEnv(TextGameEnv):
    """Each episode shows a prompt; the agent's only utterance is its completion, which a function rewards.

    Prompts are drawn uniformly with replacement; the seed determines the order. ``reset(game_seed=indices)`` shows
    prompts by their index. The reward function is called once per step, with the prompts and completions of all rows
    that were played, so that a reward model can score them in one batch.

    Args:
        prompts: the prompts; an empty one gives the agent the first turn.
        reward: called as ``reward(prompts, completions)`` with two lists of texts; returns one finite number each. If
            it has a method ``set_seed``, because it draws something, a seed of the environment is passed on to it.
        features: what belongs to each prompt and is no text, such as the vectors of an image, ``[n, F]`` for each
            prompt with ``n`` up to ``P`` and one ``F``; observations then have ``features`` float32 ``[*B, P, F]`` and
            ``features_mask``.
        tokenizer: with a :class:`~torchrl_lang.text.ChatTokenizer` prompts are messages of the user.
        **options: ``row_length``, ``action_length``, ``read`` and others of :class:`~torchrl_lang.envs.TextGameEnv`.

    Raises:
        ValueError: there are no prompts, their features do not fit, or an index is out of range; on steps, the reward
            function returns another number of rewards.
        TypeError: on steps, a reward is not a finite number.

    Examples:
        >>> import torch
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs import PromptEnv
        >>> def shorter_is_better(prompts, completions):
        ...     return [-len(completion) for completion in completions]
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> env = PromptEnv(["ab", "c"], shorter_is_better, tokenizer, row_length=12, action_length=4)
        >>> td = env.reset(game_seed=torch.tensor([1]))
        >>> action = torch.tensor([[*tokenizer.encode("ca"), tokenizer.control.end_of_action, tokenizer.control.pad]])
        >>> td = env.step(td.set("action", action))["next"]
        >>> tokenizer.decode(td["tokens"][0, :7]), td["reward"].item(), td["terminated"].item()
        ('<s>c</s>ca</a></eod>', -2.0, True)
    """

    def __init__(
        self,
        prompts: Sequence[str],
        reward: RewardFunction,
        tokenizer: Tokenizer,
        *,
        features: Sequence[Any] | Tensor | None = None,
        **options: Unpack[GameOptions],
    ) -> None:
        self.prompts, self.reward = list(prompts), reward
        if isinstance(prompts, str) or not self.prompts or not all(isinstance(one, str) for one in self.prompts):
            raise ValueError(f"PromptEnv needs a list of texts as prompts, got {shorten(prompts)}.")
        self._number_of_starts = len(self.prompts)
        size, self._of_prompts = None, []
        if features is not None:
            self._of_prompts = [torch.as_tensor(one, dtype=torch.float32, device="cpu") for one in features]
            shapes = [tuple(one.shape) for one in self._of_prompts]
            if len(shapes) != len(self.prompts) or {*map(len, shapes)} != {2}:
                raise ValueError(f"features are [n, F] for each of {len(self.prompts)} prompts, got {shapes[:5]}, ...")
            size = (max(n for n, _ in shapes), shapes[0][1])
        no_game: Any = lambda: None  # noqa: E731 (there are no game objects)
        super().__init__(no_game, tokenizer, features=size, **options)

    def _set_seed(self, seed: int | None) -> None:
        super()._set_seed(seed)
        if seed is not None and hasattr(self.reward, "set_seed"):
            self.reward.set_seed(seed)

    def _features(self, place: GamePlace) -> Any:
        return self._of_prompts[place.seed]

    def _begin_all(self, places: Mapping[int, GamePlace]) -> Iterable[tuple[int, Any]]:
        return ((row, self.prompts[place.seed]) for row, place in places.items())

    def _play_all(self, uttered: Mapping[int, list[int]], places: Mapping[int, GamePlace]) -> Iterable[tuple[int, Any]]:
        if not uttered:
            return ()
        prompts = [self.prompts[places[row].seed] for row in uttered]
        completions = [self._read(ids) for ids in uttered.values()]
        rewards = self.reward(prompts, completions)
        if not hasattr(rewards, "__len__") or len(rewards) != len(prompts):
            raise ValueError(f"The reward function returned {shorten(rewards)}, expected {len(prompts)} numbers.")
        return [(row, ("", reward, True)) for row, reward in zip(uttered, rewards, strict=True)]
