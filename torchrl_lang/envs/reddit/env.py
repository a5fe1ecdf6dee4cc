"""Reddit comments as a language environment of one step, and a player that writes comments of a dataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Unpack

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.prompt_env import PromptEnv
from torchrl_lang.envs.reddit.data import RedditComments
from torchrl_lang.envs.reddit.rewards import TextReward, rewards_of
from torchrl_lang.envs.text_game import GameOptions
from torchrl_lang.schema import ACTION, ATTENTION_MASK, TOKENS
from torchrl_lang.text.episodes import Episode, Turn
from torchrl_lang.text.rows import encode_episode
from torchrl_lang.text.tokenizers import Tokenizer


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


class CommentPlayer(TensorDictModuleBase):
    """Writes random comments of a dataset, each as often as it occurs there.

    Characters that the tokenizer has never seen are left out.

    Args:
        data: the comments.
        tokenizer: encodes them.
        action_length: ``K``, tokens of an action, its end included.
        of_parent: take the comments on the parent that is shown, instead of all.
        seed: seed of its random generator.

    Raises:
        ValueError: on calls, a comment does not fit an action, or with ``of_parent`` a parent has none.

    Examples:
        >>> import torch
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs.reddit import RedditComments, RedditEnv
        >>> from torchrl_lang.envs.reddit.env import CommentPlayer
        >>> data = RedditComments(["a", "b"], ["ab", "ba"], [1, 1])
        >>> tokenizer = CharTokenizer.from_alphabet("ab")
        >>> env = RedditEnv(data, lambda texts: [0.0] * len(texts), tokenizer, row_length=9, action_length=3)
        >>> player = CommentPlayer(data, tokenizer, 3, of_parent=True, seed=0)
        >>> tokenizer.decode(player(env.reset(game_seed=torch.tensor([1])))["action"][0])
        'ba</a>'
    """

    in_keys = [TOKENS, ATTENTION_MASK]
    out_keys = [ACTION]

    def __init__(
        self,
        data: RedditComments,
        tokenizer: Tokenizer,
        action_length: int,
        *,
        of_parent: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.data, self.tokenizer, self.action_length, self.of_parent = data, tokenizer, action_length, of_parent
        self.stream = RandomStream(seed)
        self._of_row = defaultdict[tuple[int, ...], list[int]](list)  # the numbers of the comments that may follow it
        rows = {parent: self._shown(parent) for parent in set(data.parents)} if of_parent else {}
        for number, parent in enumerate(data.parents if of_parent else ()):
            self._of_row[rows[parent]].append(number)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, int64 ``[*B, K]``."""
        tokens, real = tensordict.get(TOKENS), tensordict.get(ATTENTION_MASK)
        flat = zip(tokens.flatten(0, -2).tolist(), real.flatten(0, -2).sum(-1).tolist(), strict=True)
        choices = [self._choices(row[:length]) for row, length in flat]
        drawn = self.stream.below(torch.tensor([len(each) for each in choices])).tolist()
        control, size = self.tokenizer.control, self.action_length
        action = torch.full((len(choices), size), control.pad)
        for row, each, place in zip(action, choices, drawn, strict=True):
            comment = self.data.comments[each[place]]
            ids = [index for index in self.tokenizer.encode(comment) if index not in control.forbidden]
            if len(ids) >= size:
                raise ValueError(f"{comment!r} has {len(ids) + 1} tokens with its end, action_length={size}.")
            row[: len(ids) + 1] = torch.tensor([*ids, control.end_of_action])
        return tensordict.set(ACTION, action.reshape(*tokens.shape[:-1], size).to(tokens.device))

    def _shown(self, parent: str) -> tuple[int, ...]:
        """The tokens of a row that shows a parent."""
        shown = Episode([Turn(parent)] if parent else [], terminated=False, truncated=True)
        return tuple(encode_episode(shown, self.tokenizer).tokens)

    def _choices(self, row: Sequence[int]) -> Sequence[int]:
        if not self.of_parent:
            return range(len(self.data))
        found = self._of_row.get(tuple(row))
        if found is None:
            raise ValueError(f"The dataset has no comment on {self.tokenizer.decode(row)!r}: give the environment's.")
        return found
