"""The comments of a dataset as rows, with rewards."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._checks import finite
from torchrl_lang.data.makers import GameMaker
from torchrl_lang.envs.reddit.dataset import RedditComments
from torchrl_lang.envs.reddit.text_reward import TextReward, rewards_of
from torchrl_lang.text.conversion import to_rows
from torchrl_lang.text.encoded_episode import encode_episode
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["CommentRows"]


class CommentRows(GameMaker):
    """Makes the rows of comments, one step each: the environment writes the parent, the agent the comment.

    Game ``i`` is comment ``i``, whatever the seed. All rewards are computed in one call, so those of a noised reward do
    not depend on the parts in which the rows are written.

    Args:
        data: the comments.
        reward: of their texts.
        tokenizer: the tokenizer of the rows.
        row_length: ``T``.
        scale: the reward of a row is ``scale * reward + shift``.
        shift: see ``scale``.
        include_parent: begin the rows with the parents.
        cutoff: leave out comments whose reward, scaled and shifted, is below this, as ``cuttoff`` does in the ILQL
            paper's code (arXiv 2206.11871); by default none. Numbers of games count those that are left.

    Raises:
        ValueError: the reward does not return one finite number for each text, or none reaches the cutoff; on calls, a
            comment does not fit a row or cannot be encoded; the message names its file and line.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs.reddit import CommentRows, RedditComments
        >>> data = RedditComments(["a", "b"], ["ab", "b"], [1, 1])
        >>> tokenizer = CharTokenizer.from_alphabet("ab")
        >>> rows = CommentRows(data, lambda texts: [float(len(text)) for text in texts], tokenizer, 9)(range(2), seed=0)
        >>> rows["token_reward"].sum(-1)
        tensor([2., 1.])
        >>> CommentRows(data, lambda texts: [1.0, 2.0], tokenizer, 9, scale=-5.0, cutoff=-5.0).data.comments
        ('ab',)
    """

    def __init__(
        self,
        data: RedditComments,
        reward: TextReward,
        tokenizer: Tokenizer,
        row_length: int,
        *,
        scale: float = 1.0,
        shift: float = 0.0,
        include_parent: bool = True,
        cutoff: float | None = None,
    ) -> None:
        super().__init__(tokenizer, row_length)
        self.data, self.include_parent = data, include_parent
        self.rewards: Tensor = rewards_of(reward, data.comments, scale=scale, shift=shift)
        if cutoff is None:
            return
        finite("cutoff", cutoff, low=None)
        kept = (self.rewards >= cutoff).nonzero().flatten()
        if not len(kept):
            best = f"; the best is {float(self.rewards.max()):g}" if len(data) else ""
            raise ValueError(f"None of {len(data)} comments has a reward of at least cutoff={cutoff:g}{best}.")
        self.data, self.rewards = data.take(kept.tolist()), self.rewards[kept]

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See :meth:`GameMaker.__call__`."""
        chosen, rewards = self.data.take(numbers), self.rewards[list(numbers)]
        episodes = chosen.episodes(rewards, include_parent=self.include_parent)
        try:
            return to_rows(episodes, self.tokenizer, self.row_length)
        except ValueError:
            for number, episode in zip(numbers, episodes, strict=True):
                try:
                    encode_episode(episode, self.tokenizer)
                except ValueError as error:
                    raise ValueError(f"{self.data.place(number)} cannot be encoded: {error}") from error
            raise
