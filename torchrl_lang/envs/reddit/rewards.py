"""Rewards of texts, ``list[str] -> Tensor`` float32 ``[N]``: of their words, of data, and made of other rewards."""

from __future__ import annotations

import re
import sqlite3
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from torchrl_lang._checks import Count, Unit, check_options, checked, needs_extra
from torchrl_lang._files import file_errors, shorten
from torchrl_lang.text.tokenizers import normalized

if TYPE_CHECKING:
    from torchrl_lang.envs.reddit.data import RedditComments

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_COLUMNS = "model TEXT NOT NULL, text BLOB NOT NULL, value REAL NOT NULL, PRIMARY KEY (model, text)"
_TABLE = f"CREATE TABLE IF NOT EXISTS rewards ({_COLUMNS}) WITHOUT ROWID"
_PATIENCE = 60.0
"""Seconds to wait for another process that writes."""


class TextReward(Protocol):
    """A function from texts to one number each; rewards score any number of texts in one call.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit.rewards import TextReward
        >>> def shorter_is_better(texts: list[str]) -> torch.Tensor:
        ...     return torch.tensor([-float(len(text)) for text in texts])
        >>> reward: TextReward = shorter_is_better
    """

    def __call__(self, texts: list[str], /) -> Tensor:
        """The values of texts, float32 ``[N]`` on the CPU."""


def rewards_of(
    reward: Callable[[list[str]], object], texts: Sequence[str], *, scale: float = 1.0, shift: float = 0.0
) -> Tensor:
    """Computes ``scale * reward + shift`` of texts, float32 ``[N]``; raises ValueError unless each is finite.

    Args:
        reward: a :class:`TextReward`, or a function that returns a list.
        texts: the texts.
        scale: the factor; the ILQL paper's toxicity reward has -5.
        shift: added to the product.
    """
    found = reward(list(texts))
    try:
        values = torch.as_tensor(found, dtype=torch.float32, device="cpu").detach() * scale + shift
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0, 0)
    if values.shape != (len(texts),):
        raise ValueError(f"A reward needs one number for each of {len(texts)} texts, got {shorten(found)}.")
    if not values.isfinite().all():
        place = int((~values.isfinite()).nonzero()[0, 0])
        raise ValueError(f"Rewards must be finite, got {values[place]} for {shorten(texts[place])}.")
    return values


class ProbabilityReward(ABC):
    """Base of the rewards that are probabilities; subclasses fill in :meth:`_probabilities`.

    Args:
        threshold: the reward is 1 where the probability is at least this, else 0; None: it is the probability itself.
    """

    @checked
    def __init__(self, threshold: Unit | None) -> None:
        self.threshold = threshold

    def probabilities(self, texts: list[str]) -> Tensor:
        """The probabilities for texts, float32 ``[N]`` on the CPU."""
        return rewards_of(self._probabilities, texts) if texts else torch.zeros(0)

    def __call__(self, texts: list[str]) -> Tensor:
        """The rewards of texts, float32 ``[N]``."""
        found = self.probabilities(texts)
        return found if self.threshold is None else (found >= self.threshold).float()

    @abstractmethod
    def _probabilities(self, texts: list[str]) -> Tensor:
        """The probabilities for at least one text."""


class ProfanityReward(ProbabilityReward):
    """The probability that a text is profane or insulting, by a linear model on word counts.

    1 is the most profane: scale it with a negative number to punish profanity. The model, alt-profanity-check, scores
    200,000 short texts a second. It finds slurs and insults, and misses words in disguise ("sh1t") and hostility in
    polite words. Importing the package loads its own model file with joblib, that is, with pickle; nothing else is read
    so. Install it from a source that you trust.

    Args:
        threshold: the reward is 1 where the probability is at least this, else 0; None: it is the probability itself.

    Raises:
        ImportError: alt-profanity-check is not installed.

    Examples:
        >>> from torchrl_lang.envs.reddit import ProfanityReward
        >>> reward = ProfanityReward(threshold=0.5)  # doctest: +SKIP
        >>> reward(["thank you", "what a load of crap"])  # doctest: +SKIP
        tensor([0., 1.])
    """

    def __init__(self, *, threshold: float | None = None) -> None:
        super().__init__(threshold)
        with needs_extra("ProfanityReward", "reddit"):
            from profanity_check import predict_prob
        self._predict = predict_prob

    def _probabilities(self, texts: list[str]) -> Tensor:
        return torch.as_tensor(self._predict(texts), dtype=torch.float32)


class SentimentReward:
    """The compound sentiment of a text in [-1, 1], by the lexicon and rules of VADER (Hutto and Gilbert 2014).

    It measures positive and negative words, not toxicity: insults that the lexicon lacks are neutral, 0.

    Raises:
        ImportError: vaderSentiment is not installed.

    Examples:
        >>> from torchrl_lang.envs.reddit import SentimentReward
        >>> (SentimentReward()(["i love it", "it is terrible"]) > 0).tolist()  # doctest: +SKIP
        [True, False]
    """

    def __init__(self) -> None:
        with needs_extra("SentimentReward", "reddit"):
            from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
        self._analyzer = SentimentIntensityAnalyzer()

    def __call__(self, texts: list[str]) -> Tensor:
        """The sentiments of texts, float32 ``[N]``."""
        return torch.tensor([self._analyzer.polarity_scores(text)["compound"] for text in texts], dtype=torch.float32)


class ScoreReward:
    """1 for a comment whose score is above 0, else -1; comments are found by their normalized text.

    The ILQL paper's code calls it "upvotes real" (arXiv 2206.11871). Where several comments have the same text, the sum
    of their scores decides. (The paper's code takes one of them at random.)

    Args:
        data: the comments that have a reward.
        unknown: the reward of other texts; None: they are an error.

    Raises:
        ValueError: on calls, a text is not in the dataset and ``unknown`` is None.

    Examples:
        >>> from torchrl_lang.envs.reddit import RedditComments, ScoreReward
        >>> data = RedditComments(["hi"] * 3, ["well done", "so what", "so what"], [12, 4, -9])
        >>> ScoreReward(data, unknown=0.0)(["well done", "so what", "else"])
        tensor([ 1., -1.,  0.])
    """

    def __init__(self, data: RedditComments, *, unknown: float | None = None) -> None:
        self.unknown = unknown
        total = defaultdict[str, int](int)
        for text, score in zip(data.comments, data.scores, strict=True):
            total[normalized(text)] += score
        self._values = {text: 1.0 if score > 0 else -1.0 for text, score in total.items()}

    def __call__(self, texts: list[str]) -> Tensor:
        """The rewards of texts, float32 ``[N]``."""
        found = [self._values.get(normalized(text), self.unknown) for text in texts]
        if None in found:
            text = shorten(texts[found.index(None)])
            raise ValueError(f"None of the {len(self._values)} comments of the dataset is {text}: give unknown=0.0.")
        return torch.tensor(found, dtype=torch.float32)


class WorstSentence:
    """The largest value among a text's sentences, for a reward that is high for harmful texts.

    A model that averages over words finds an insult in a long text less harmful than the same insult alone.
    Sentences end with ``.``, ``!`` or ``?`` before white space.

    Args:
        reward: is called once with the sentences of all texts.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit import WorstSentence
        >>> def share_of_rude_words(texts):
        ...     return torch.tensor([text.split().count("damn") / len(text.split()) for text in texts])
        >>> texts = ["no damn way. i would try it again in winter"]
        >>> share_of_rude_words(texts), WorstSentence(share_of_rude_words)(texts)
        (tensor([0.1000]), tensor([0.3333]))
    """

    def __init__(self, reward: TextReward) -> None:
        self.reward = reward

    def __call__(self, texts: list[str]) -> Tensor:
        """The largest values, float32 ``[N]``."""
        sentences = [_SENTENCE_END.split(text) for text in texts]
        values = rewards_of(self.reward, [sentence for each in sentences for sentence in each])
        return torch.tensor([float(each.max()) for each in values.split([len(each) for each in sentences])])


class ThreeLevels:
    """The levels of the ILQL paper's toxicity filter, from a probability ``p`` (arXiv 2206.11871):

    0 (safe) if ``p < low``, 2 (toxic) if ``p >= high``, else 1 (sensitive).

    Args:
        reward: gives probabilities, such as :class:`ProfanityReward`.
        low: where level 1 begins.
        high: where level 2 begins, not below ``low``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit import ThreeLevels
        >>> ThreeLevels(lambda texts: torch.tensor([0.1, 0.25, 0.75]), low=0.25, high=0.75)(["a", "b", "c"])
        tensor([0., 1., 2.])
    """

    def __init__(self, reward: TextReward, *, low: float = 1 / 3, high: float = 2 / 3) -> None:
        check_options(high=(high, f"[{low}, inf)"))
        self.reward, self.low, self.high = reward, low, high

    def __call__(self, texts: list[str]) -> Tensor:
        """The levels of texts, float32 ``[N]``."""
        found = rewards_of(self.reward, texts)
        return (found >= self.low).float() + (found >= self.high).float()


class Noised:
    """Level 1 becomes 0 or 2, with equal probability; the expected reward stays the same.

    The same text may get different values in different calls, and twice in one call. So a cache belongs inside,
    ``Noised(CachedReward(...))``: around it, the cache would keep the first draw.

    Args:
        reward: gives levels, such as :class:`ThreeLevels`; values other than 1 stay as they are.
        seed: of the generator, which is this object's own.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit import Noised
        >>> Noised(lambda texts: torch.ones(len(texts)), seed=0)(["a"] * 6)
        tensor([0., 2., 2., 0., 2., 2.])
    """

    def __init__(self, reward: TextReward, *, seed: int = 0) -> None:
        self.reward = reward
        self._generator = torch.Generator()
        self.set_seed(seed)

    def set_seed(self, seed: int) -> None:
        """Begin the noise of a seed again."""
        self._generator.manual_seed(seed)

    def __call__(self, texts: list[str]) -> Tensor:
        """The noised levels of texts, float32 ``[N]``."""
        found = rewards_of(self.reward, texts)
        drawn = 2.0 * torch.randint(2, found.shape, generator=self._generator)
        return torch.where(found == 1, drawn, found)


class CachedReward:
    """A reward that scores each text once and stores the value in an SQLite file.

    Values are found by the model's name and the text. Several processes may share the file: what one has stored the
    others find, and if two have scored the same text, both return the value that was stored first. A part of the texts
    is stored once it is scored, so a call that was interrupted loses one part at most.

    Args:
        reward: scores the texts that are not stored. It must return the same value for the same text, so
            :class:`Noised` belongs around the cache, not inside.
        path: the file; it is created if it is missing, and its folder too.
        model: name of the reward and its options; another name has other values in the same file.
        batch_size: texts to score and store at a time.

    Raises:
        FileError: the file is no such cache, or cannot be read or written now.
        ValueError: the reward returns a number that is not finite, or another number of them.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_lang.envs.reddit import CachedReward
        >>> def lengths(texts):
        ...     print("scored", texts)
        ...     return torch.tensor([float(len(text)) for text in texts])
        >>> with tempfile.TemporaryDirectory() as home:
        ...     reward = CachedReward(lengths, home + "/rewards.sqlite", model="lengths")
        ...     reward(["a", "bcd", "a"]), reward(["bcd"])
        scored ['a', 'bcd']
        (tensor([1., 3., 1.]), tensor([3.]))
    """

    @checked
    def __init__(self, reward: TextReward, path: str | Path, *, model: str, batch_size: Count = 1024) -> None:
        self.reward, self.path, self.model, self.batch_size = reward, Path(path), model, batch_size
        self._stored([])  # so that a wrong file is an error now

    def __call__(self, texts: list[str]) -> Tensor:
        """The rewards of texts, float32 ``[N]``."""
        different = list(dict.fromkeys(texts))
        found = self._stored(different)
        missing = [text for text in different if text not in found]
        for first in range(0, len(missing), self.batch_size):
            part = missing[first : first + self.batch_size]
            found |= self._stored(part, rewards_of(self.reward, part).tolist())
        return torch.tensor([found[text] for text in texts], dtype=torch.float32)

    def _stored(self, texts: Sequence[str], values: Iterable[float] = ()) -> dict[str, float]:
        """The stored values of texts, after ``values`` were added where there were none."""
        # Blobs, because texts of an agent may hold NUL characters and lone surrogates.
        keys = [(self.model, text.encode("utf-8", "surrogatepass")) for text in texts]
        problem, remedy = "cannot be used as a cache of rewards", "try again, or give another file"
        with file_errors(self.path, problem, remedy, sqlite3.Error, OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A connection of this call alone, so that forks and copies of this object work.
            with closing(sqlite3.connect(self.path, timeout=_PATIENCE)) as file, file:
                file.execute(_TABLE)  # the file may have been deleted since the last call
                new = [(*key, value) for key, value in zip(keys, values, strict=False)]
                file.executemany("INSERT OR IGNORE INTO rewards VALUES (?, ?, ?)", new)
                find = "SELECT value FROM rewards WHERE model = ? AND text = ?"
                rows = [file.execute(find, key).fetchone() for key in keys]
        return {text: row[0] for text, row in zip(texts, rows, strict=True) if row is not None}
