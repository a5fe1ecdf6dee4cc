"""Reddit comments as a language environment of one step."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from torchrl_lang.envs.prompt_env import PromptEnv
from torchrl_lang.envs.reddit.data import RedditComments
from torchrl_lang.envs.reddit.rewards import TextReward, rewards_of
from torchrl_lang.envs.text_game import GameOptions
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["RedditEnv"]


class RedditEnv(PromptEnv):
    r"""Each episode shows the parent of a comment of the dataset; the agent writes another comment, which is rewarded.

    Parents are drawn uniformly over the comments, so those with many comments are drawn more often, as in the ILQL
    paper's code (arXiv 2206.11871). Without them every episode begins with the agent's turn. Any text gets a reward:
    the text of tokens that cannot be decoded is ``"\N{REPLACEMENT CHARACTER}"``.

    Args:
        data: the comments whose parents are shown; ``reset(game_seed=numbers)`` chooses them by number.
        reward: of the agent's comments, one call a step for all rows. If it has a method ``set_seed``, as
            :class:`~torchrl_lang.envs.reddit.Noised` has, the environment's seed is passed on to it.
        scale: the environment's reward is ``scale * reward + shift``.
        shift: see ``scale``.
        include_parent: show the parents.
        tokenizer: encodes parents and comments.
        **options: ``row_length``, ``action_length`` and others of :class:`~torchrl_lang.envs.PromptEnv`.

    Raises:
        ValueError: there are no comments, or an option is out of range; on steps, the reward does not return one finite
            number for each text.

    Examples:
        >>> import torch
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs.reddit import RedditComments, RedditEnv
        >>> data = RedditComments(["abba", "b"], ["b", "a"], [1, 1])
        >>> tokenizer = CharTokenizer.from_alphabet("ab")
        >>> def count(texts):
        ...     return torch.tensor([float(text.count("a")) for text in texts])
        >>> env = RedditEnv(data, count, tokenizer, row_length=12, action_length=4, scale=-5.0)
        >>> td = env.reset(game_seed=torch.tensor([1]))
        >>> td["action"] = torch.tensor([[*tokenizer.encode("aba"), tokenizer.control.end_of_action]])
        >>> td = env.step(td)["next"]
        >>> tokenizer.decode(td["tokens"][0, :8]), td["reward"].item(), td["terminated"].item()
        ('<s>b</s>aba</a></eod>', -10.0, True)
    """

    def __init__(
        self,
        data: RedditComments,
        reward: TextReward,
        tokenizer: Tokenizer,
        *,
        scale: float = 1.0,
        shift: float = 0.0,
        include_parent: bool = True,
        **options: Unpack[GameOptions],
    ) -> None:
        parents = data.parents if include_parent else [""] * len(data)
        super().__init__(parents, _OfComments(reward, scale, shift), tokenizer, **options)


class _OfComments:
    """The reward of an environment of prompts from one of texts."""

    def __init__(self, reward: TextReward, scale: float, shift: float) -> None:
        self._reward, self._scale, self._shift = reward, scale, shift

    def __call__(self, parents: list[str], comments: list[str]) -> Tensor:
        return rewards_of(self._reward, comments, scale=self._scale, shift=self._shift)

    def set_seed(self, seed: int) -> None:
        """Seed a reward that draws something."""
        if hasattr(self._reward, "set_seed"):
            self._reward.set_seed(seed)
