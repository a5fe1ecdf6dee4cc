"""A folder of Reddit comments: its splits, tokenizer and rewards, each made once in a process and shared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchrl_lang._checks import one_of
from torchrl_lang._files import FileError
from torchrl_lang.envs.reddit import RedditComments, TextReward
from torchrl_lang.envs.reddit.reward_options import RedditReward
from torchrl_lang.text import HFTokenizer, Tokenizer, word_tokenizer
from torchrl_lang.text.word_tokenizer import PLAIN

__all__ = ["SPLITS", "WORDS", "CommentFolder", "Lengths"]

SPLITS = ("test", "val", "train")
WORDS = "words"
"""The tokenizer of the words of the training comments and of what they reply to."""
_INDEX_FILES = {"test": "test_idxs.json", "val": "eval_idxs.json", "train": "train_idxs.json"}
_SHARE = 0.1
"""Of the comments, for ``test`` and for ``val``."""


class Lengths(NamedTuple):
    """The lengths that every comment fits."""

    row_length: int
    action_length: int


@dataclass(frozen=True)
class CommentFolder:
    """The comments of a folder. Files are read once: they are not changed while they are used.

    The splits are made by the comments' texts, and none is in two of them; or by the folder's index files, and no row
    is in two of them. A parent may be in several.

    Args:
        folder: has the two CSV files, see :meth:`RedditComments.read`.
        encoding: of the files.
        on_bad_rows: whether malformed rows are an error.
        seed: of the splits by texts.
        index_files: the splits are the rows of ``train_idxs.json``, ``eval_idxs.json`` and ``test_idxs.json``.

    Raises:
        FileError: on reading, a file is missing or damaged, or a row is in two index files.
        ValueError: on reading, a split has no comment.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs.reddit import generate_reddit_comments
        >>> from torchrl_lang.envs.reddit.folder import CommentFolder
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_reddit_comments(home, 200)
        ...     comments = CommentFolder(home)
        ...     [len(comments.split(name)) for name in ("train", "val", "test")]
        [165, 16, 19]
    """

    folder: str
    encoding: str = "utf-8"
    on_bad_rows: Literal["raise", "report"] = "raise"
    seed: int = 0
    index_files: bool = False

    def split(self, name: str) -> RedditComments:
        """The comments of a split."""
        one_of("split", name, SPLITS)
        return self._splits()[name]

    def of_all_splits(self) -> RedditComments:
        """The comments of all splits."""
        parts = [self.split(name) for name in SPLITS]
        columns: Any = (chain(*(getattr(part, key) for part in parts)) for key in ("parents", "comments", "scores"))
        return RedditComments(*columns)

    @lru_cache(maxsize=4)  # noqa: B019  # equal folders have the same content
    def _splits(self) -> dict[str, RedditComments]:
        options: dict[str, Any] = {"encoding": self.encoding, "on_bad_rows": self.on_bad_rows}
        if self.index_files:
            files = [Path(self.folder) / file for file in _INDEX_FILES.values()]
            parts = RedditComments.read_parts(self.folder, files, **options)
            found = dict(zip(_INDEX_FILES, parts, strict=True))
        else:
            rest, test = RedditComments.read(self.folder, **options).split(_SHARE, seed=self.seed)
            train, val = rest.split(_SHARE / (1 - _SHARE), seed=self.seed + 1)
            found = {"test": test, "val": val, "train": train}
        for name, part in found.items():
            if not len(part):
                total = sum(map(len, found.values()))
                raise ValueError(f"None of the {total} comments of {self.folder} is in the split {name}: add some.")
        return found

    @lru_cache(maxsize=8)  # noqa: B019
    def tokenizer(self, name: str) -> Tokenizer:
        """That of the training texts' words, or a Hugging Face tokenizer by its name or folder.

        If a split has more than printable ASCII, that of words has an unknown symbol.
        """
        if name != WORDS:
            return HFTokenizer(name)
        train, every = self.split("train"), self.of_all_splits()
        unknown = not set(chain.from_iterable((*every.parents, *every.comments))) <= set(PLAIN)
        return word_tokenizer((*train.parents, *train.comments), unknown=unknown)

    @lru_cache(maxsize=8)  # noqa: B019
    def lengths(self, tokenizer: str, *, include_parent: bool) -> Lengths:
        """The lengths of the longest texts of all splits: ``2 + parent + 1 + comment + 1``.

        Raises:
            FileError: the tokenizer cannot encode a text.
        """
        encode = self.tokenizer(tokenizer).encode

        @cache
        def length(text: str) -> int:
            return len(encode(text))

        def longest(what: str) -> int:
            found = 0
            for part in map(self.split, SPLITS):
                for number, text in enumerate(getattr(part, f"{what}s")):
                    try:
                        found = max(found, length(text))
                    except ValueError as error:
                        problem = f"line {part.lines[number]} has a {what} that cannot be encoded ({error})"
                        remedy = "give a tokenizer that can, as `--tokenizer NAME`"
                        raise FileError(Path(self.folder) / part.files[number], problem, remedy) from error
            return found

        action_length = 1 + longest("comment")
        parent = longest("parent") if include_parent else 0
        return Lengths(3 + parent + action_length, action_length)

    @lru_cache(maxsize=8)  # noqa: B019
    def reward(self, chosen: RedditReward) -> TextReward:
        """A reward without noise."""
        return chosen.clean(self.folder, self.split("train"), self.of_all_splits())
