"""Comments that a player wrote, with what was measured on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_lang._files import FileError, read_json, write_json
from torchrl_lang.envs.reddit import rewards_of
from torchrl_lang.envs.reddit.task import RedditTask, comments_of, distinct
from torchrl_lang.evaluation import perplexity
from torchrl_lang.text import to_rows

__all__ = ["Figures", "WrittenComments", "read_figures"]

_REMEDY = "delete it: the comments are written again"


@dataclass(frozen=True)
class Figures:
    """What was measured on comments."""

    comments: int
    mean_reward: float
    """Of the reward without noise."""
    reward_error: float
    """Its standard error."""
    profanity: float
    """Share of harmful comments."""
    perplexity: float
    """Of the comments' tokens under the BC model of the same seed."""
    distinct_1: float
    distinct_2: float
    words: float
    """Mean number of words."""
    entropy: float | None = None
    """Of the player per token; None where there is no player."""

    @property
    def profanity_error(self) -> float:
        """Standard error of the share.

        Examples:
            >>> from torchrl_lang.recipes.reddit_demo.written import Figures
            >>> Figures(100, -1.0, 0.2, 0.5, 3.0, 0.1, 0.5, 14.0).profanity_error
            0.05
        """
        return math.sqrt(self.profanity * (1 - self.profanity) / self.comments)


@dataclass(frozen=True)
class WrittenComments:
    """Comments, the parents that they reply to, and figures."""

    parents: Sequence[str]
    texts: Sequence[str]
    figures: Figures

    @classmethod
    def by_player(
        cls, task: RedditTask, policy: Any, bc: TensorDictModuleBase, *, split: str, games: int, seed: int
    ) -> WrittenComments:
        """The replies of a policy to parents of a split, which the seed draws; ``bc`` is the actor of BC's run."""
        summary, records = task.evaluate(policy, split=split, games=games, seed=seed)
        pairs = comments_of(records, task.tokenizer())
        return cls._measured(task, pairs, records.rows, bc, summary.entropy)

    @classmethod
    def of_data(cls, task: RedditTask, bc: TensorDictModuleBase, *, split: str, games: int) -> WrittenComments:
        """The first comments of a split."""
        data = task.data(split).take(range(games))
        episodes = data.episodes([0.0] * games, include_parent=task.include_parent)
        rows = to_rows(episodes, task.tokenizer(), task.row_length)
        return cls._measured(task, list(zip(data.parents, data.comments, strict=True)), rows, bc, None)

    @classmethod
    def _measured(
        cls,
        task: RedditTask,
        pairs: Sequence[tuple[str, str]],
        rows: TensorDictBase,
        bc: TensorDictModuleBase,
        entropy: float | None,
    ) -> WrittenComments:
        texts = [text for _, text in pairs]
        rewards = rewards_of(task.clean_reward(), texts, scale=task.scale, shift=task.shift).double()
        found = Figures(
            comments=len(texts),
            mean_reward=float(rewards.mean()),
            reward_error=float(rewards.std() / math.sqrt(len(texts))),
            profanity=float(task.is_harmful(texts).double().mean()),
            perplexity=perplexity(bc, rows),
            distinct_1=distinct(texts, 1),
            distinct_2=distinct(texts, 2),
            words=float(torch.tensor([len(text.split()) for text in texts]).double().mean()),
            entropy=entropy,
        )
        return cls([parent for parent, _ in pairs], texts, found)

    @classmethod
    def load(cls, path: Path) -> WrittenComments:
        """Read what :meth:`save` wrote.

        Raises:
            FileError: the file is damaged.
        """
        content = read_json(path, remedy=_REMEDY)
        try:
            parents, texts = ([str(text) for text in content[name]] for name in ("parents", "texts"))
            return cls(parents, texts, read_figures(content["figures"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(path, f"holds no comments with figures ({error})", _REMEDY) from error

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        write_json(path, asdict(self))


def read_figures(content: Any) -> Figures:
    """Figures from JSON.

    Raises:
        KeyError: one is missing.
        TypeError: the content is no mapping.
    """
    values: dict[str, Any] = {field.name: content[field.name] for field in fields(Figures)}
    return Figures(**values)
