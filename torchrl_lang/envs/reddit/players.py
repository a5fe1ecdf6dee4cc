"""Players that write comments of a dataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.reddit.data import RedditComments
from torchrl_lang.schema import ACTION, ATTENTION_MASK, TOKENS
from torchrl_lang.text.episodes import Episode, Turn
from torchrl_lang.text.rows import encode_episode
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["CommentPlayer"]


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
        >>> from torchrl_lang.envs.reddit.players import CommentPlayer
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
                raise ValueError(
                    f"The comment {comment!r} has {len(ids) + 1} tokens with its end, action_length={size}."
                )
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
