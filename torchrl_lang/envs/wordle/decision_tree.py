"""Decision trees of Wordle: a guess for each state of the game, what they cost, and their files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang._files import Fields, FileError, read_manifest, shorten, write_manifest
from torchrl_lang.envs.wordle.colour_text import CODE_OF_LETTERS, LETTERS_OF_CODE
from torchrl_lang.envs.wordle.rules import SOLVED, Rules, check_rules, feedback_table
from torchrl_lang.envs.wordle.words import WordIndex, load_words

__all__ = ["DecisionTree"]

_KIND, _VERSION = "wordle decision tree", 1
_REMEDY = "save the tree again"


class DecisionTree:
    """What to guess after each sequence of colours, until the hidden word is found.

    Node 0 is the first guess. :func:`solve` makes the tree with the fewest guesses, and
    :class:`~torchrl_lang.envs.wordle.TreePlayer` plays it.

    Args:
        words: the words that may be hidden.
        guesses: the guess at each node.
        replies: for each node, the next node after each code of colours (see
            :func:`~torchrl_lang.envs.wordle.feedback_code`); parents come before their children.
        rules: the rules of the colours.
        max_tries: the guesses of a game; a word that is not found then is lost and counts as ``max_tries + 1`` guesses.
            By default every word must be found.

    Raises:
        ValueError: the tree does not find a word, or its nodes are malformed.

    Examples:
        >>> from torchrl_lang.envs.wordle import DecisionTree, solve
        >>> tree = solve(["baker", "maker", "taker", "timed"])
        >>> tree.total, tree.expected_guesses, tree.histogram
        (7, 1.75, {1: 1, 2: 3})
        >>> tree.path("baker")
        ['timed', 'baker']
    """

    def __init__(
        self,
        words: Sequence[str],
        guesses: Sequence[str],
        replies: Sequence[Mapping[int, int]],
        *,
        rules: Rules = "official",
        max_tries: int | None = None,
    ) -> None:
        check_rules(rules)
        if max_tries is not None:
            at_least_one("max_tries", max_tries)
        self.words, self.guesses = tuple(load_words(words)), tuple(guesses)
        load_words(list(dict.fromkeys(self.guesses)))
        self.replies = tuple(dict(reply) for reply in replies)
        self.rules: Rules = rules
        self.max_tries = max_tries
        self.next_node = _next_nodes(self.replies, len(self.guesses))
        """Node after each code at each node, int64 ``[nodes, 243]``; -1 for codes that cannot come."""
        self.n_guesses = self._count()
        """Number of guesses for each word, int64 ``[W]``."""

    @property
    def total(self) -> int:
        """Number of guesses for all words together."""
        return int(self.n_guesses.sum())

    @property
    def expected_guesses(self) -> float:
        """Mean number of guesses if each word is hidden with the same probability."""
        return self.total / len(self.words)

    @property
    def expected_return(self) -> float:
        """Mean return in a :class:`~torchrl_lang.envs.wordle.WordleEnv` whose games are not shorter than the tree."""
        return 1 - self.expected_guesses

    @property
    def deepest(self) -> int:
        """The largest number of guesses that a word takes."""
        return int(self.n_guesses.amax())

    @property
    def histogram(self) -> dict[int, int]:
        """How many words take each number of guesses; lost words under ``max_tries + 1``."""
        return dict(sorted(Counter(self.n_guesses.tolist()).items()))

    def path(self, word: str) -> list[str]:
        """The guesses if ``word`` is hidden.

        Raises:
            ValueError: the word is not on the list.
        """
        if word not in self.words:
            raise ValueError(f"{shorten(word)} is not one of the tree's {len(self.words)} words.")
        letters, node, guesses = WordIndex([word]).letters, 0, []
        while node >= 0:
            guesses.append(self.guesses[node])
            code = int(feedback_table(WordIndex(guesses[-1:]).letters, letters, self.rules))
            node = self.replies[node].get(code, -1)
        return guesses

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tree as JSON, atomically and with a digest.

        Examples:
            >>> import tempfile
            >>> from torchrl_lang.envs.wordle import DecisionTree, solve
            >>> with tempfile.TemporaryDirectory() as home:
            ...     solve(["crane", "slate"]).save(f"{home}/tree.json")
            ...     DecisionTree.load(f"{home}/tree.json").total
            3
        """
        replies = [{LETTERS_OF_CODE[code]: node for code, node in sorted(reply.items())} for reply in self.replies]
        content = {"kind": _KIND, "version": _VERSION, "rules": self.rules, "max_tries": self.max_tries}
        content |= {"total": self.total, "words": self.words, "guesses": self.guesses, "replies": replies}
        write_manifest(os.fspath(path), content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DecisionTree:
        """Read a tree that :meth:`save` wrote; every word is looked up in it once.

        Raises:
            FileError: the file is missing, damaged, has a later version, or does not hold a tree that finds its words.
        """
        fields = read_manifest(os.fspath(path), remedy=_REMEDY, version=_VERSION)
        if fields.take("kind", str) != _KIND:
            raise fields.error(f'has {shorten(fields.content["kind"])} as "kind", expected {_KIND!r}')
        max_tries = None if fields.content.get("max_tries") is None else fields.at_least("max_tries", 1)
        try:
            tree = cls(
                fields.list_of("words", str),
                fields.list_of("guesses", str),
                [_read_reply(fields, reply) for reply in fields.list_of("replies", dict)],
                rules=cast(Rules, fields.take("rules", str)),
                max_tries=max_tries,
            )
        except FileError:
            raise
        except ValueError as error:
            raise fields.error(f"does not hold a tree ({error})") from error
        if tree.total != fields.take("total", int):
            raise fields.error(f'has {fields.content["total"]} as "total", but its tree takes {tree.total} guesses')
        return tree

    def _count(self) -> Tensor:
        """Follow all words through the tree."""
        table = feedback_table(WordIndex(self.guesses).letters, WordIndex(self.words).letters, self.rules).long()
        word = torch.arange(len(self.words))
        count, node = torch.zeros_like(word), torch.zeros_like(word)
        tries = 0
        while len(word):
            tries += 1
            count[word] = tries
            code = table[node[word], word]
            node[word] = self.next_node[node[word], code]
            open_, missing = code != SOLVED, node[word] < 0
            if tries == self.max_tries:
                count[word[open_]] = tries + 1
                return count
            if (open_ & missing).any():
                lost = self.words[int(word[open_ & missing][0])]
                raise ValueError(f"The tree has no guess that finds {lost!r} after {tries} guesses.")
            word = word[open_]
        return count


def _next_nodes(replies: Sequence[Mapping[int, int]], n_nodes: int) -> Tensor:
    if len(replies) != n_nodes or not n_nodes:
        raise ValueError(f"A tree needs as many replies as guesses, at least one, got {len(replies)} and {n_nodes}.")
    next_node = torch.full((n_nodes, SOLVED + 1), -1)
    for node, reply in enumerate(replies):
        for code, child in reply.items():
            # Later nodes only, so that following the tree ends.
            if not 0 <= code < SOLVED or not node < child < n_nodes:
                raise ValueError(
                    f"Node {node} leads to node {child} after code {code}: codes are 0 to {SOLVED - 1}, and children "
                    f"come after their parent, up to {n_nodes - 1}."
                )
            next_node[node, code] = child
    return next_node


def _read_reply(fields: Fields, reply: Mapping[str, object]) -> dict[int, int]:
    unknown = [colours for colours in reply if colours not in CODE_OF_LETTERS]
    if unknown:
        raise fields.error(f"has {shorten(unknown[0])} as colours, expected five of b, y and g")
    entries = Fields(reply, fields.path, fields.remedy, "replies")
    return {CODE_OF_LETTERS[colours]: entries.take(colours, int) for colours in reply}
