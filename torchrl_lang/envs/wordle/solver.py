"""An exact solver of Wordle: the decision tree with the fewest guesses for a list of words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from torchrl_lang._checks import Count, checked
from torchrl_lang._files import shorten
from torchrl_lang.envs.wordle.rules import LETTERS_OF_CODE, SOLVED, Rules, feedback_table
from torchrl_lang.envs.wordle.tree import DecisionTree
from torchrl_lang.envs.wordle.words import WordIndex, WordList, load_words, words_and_guesses

Words = NDArray[np.int32]
"""Numbers of the words that may still be hidden, in ascending order."""

_COMPARED = 24
"""Codes of up to this many words are compared in pairs, of more words counted in bins: each is faster there."""

_BINS = SOLVED + 1

_NEVER = 2**40
"""Bound of guesses that leave all words."""


@checked
def solve(
    words: WordList | None = None,
    *,
    guesses: WordList | None = None,
    rules: Rules = "official",
    opener: str | None = None,
    max_tries: Count | None = None,
    progress: bool = True,
) -> DecisionTree:
    """The decision tree that finds the words with the least expected number of guesses.

    Each word is hidden with the same probability. By default games are as long as they need to be. With ``max_tries`` a
    game ends after that many guesses and a lost one counts as ``max_tries + 1``, so that the tree has the largest
    expected return in a :class:`~torchrl_lang.envs.wordle.WordleEnv` with these tries. A tree of the first kind whose
    ``deepest`` is at most ``max_tries`` loses no game, and almost always has this return too.

    The result is proven, not estimated: a branch-and-bound search leaves out a guess only if a lower bound shows that
    it cannot be better. A guess that splits ``n`` words into ``k`` groups needs at least ``3 n - k`` guesses in total,
    one fewer if it is one of the words, since a group of ``c`` words needs at least ``2 c - 1``. This bound is computed
    for a set of words and all guesses at once, and stored.

    On one core, 400 of the shipped words as their own guesses take half a second, 1,000 take five seconds and all 2,250
    six minutes; 400 with all 6,706 shipped guesses take 15 seconds. The newspaper's 2,315 words with 12,972 guesses and
    a given opener take 10 seconds.

    Args:
        words: the words that may be hidden, a list or the path of a file; default the shipped common words, which take
            six minutes.
        guesses: more words that may be guessed, a list or path; default the words alone, which are always valid.
        rules: the rules of the colours.
        opener: the first guess, one of the valid guesses; the best one by default. Solving is faster with it.
        max_tries: number of guesses in a game.
        progress: show a progress bar on standard error if solving takes longer than a second.

    Raises:
        ValueError: ``opener`` is not a valid guess, or an option or a word list is invalid.

    Examples:
        >>> from torchrl_lang.envs.wordle import demo_words, solve
        >>> tree = solve(demo_words(100))
        >>> tree.total, tree.guesses[0], tree.histogram
        (251, 'learn', {1: 1, 2: 47, 3: 52})
        >>> solve(demo_words(100), opener="fuzzy", guesses=["fuzzy"]).expected_guesses
        3.19
    """
    word_list = load_words(words)
    guess_list = words_and_guesses(word_list, guesses)
    if opener is not None and opener not in guess_list:
        raise ValueError(f"opener={shorten(opener)} is not one of the {len(guess_list)} valid guesses.")
    table = feedback_table(WordIndex(guess_list).letters, WordIndex(word_list).letters, rules)
    with tqdm(unit="guess", disable=not progress, delay=1, miniters=0, mininterval=0.5) as bar:
        search = _Search(np.ascontiguousarray(table.numpy().T), bar)
        everything = np.arange(len(word_list), dtype=np.int32)
        # Never more than one guess for each word, after an opener that may not help.
        left = len(word_list) + 1 if max_tries is None else max_tries
        first = None if opener is None else guess_list.index(opener)
        total = search.best(everything, left) if first is None else search.after(first, everything, left)
        nodes = search.nodes(everything, left, first)
    found = tuple(guess_list[guess] for guess, _ in nodes)
    replies = tuple({LETTERS_OF_CODE[code]: node for code, node in sorted(reply.items())} for _, reply in nodes)
    tree = DecisionTree(words=tuple(word_list), guesses=found, replies=replies, rules=rules, max_tries=max_tries)
    assert tree.total == total, (tree.total, total)
    return tree


@dataclass(slots=True)
class _Bound:
    """Proven bounds of the total number of guesses for a set of words."""

    least: int
    """No guess needs fewer."""
    exact: bool
    """``guess`` needs ``least``."""
    guess: int


class _Search:
    """Branch and bound over sets of words, with a table of what is proven about each.

    ``left`` is the number of guesses that the game still has.

    Args:
        codes: code of each guess for each word, uint8 ``[W, G]``; the words are the first guesses.
        bar: shows the first guesses examined and the number of sets.
    """

    def __init__(self, codes: NDArray[np.uint8], bar: tqdm) -> None:
        self.codes, self.bar = codes, bar
        self.known: dict[tuple[int, bytes], _Bound] = {}

    def bound(self, words: Words, left: int) -> _Bound:
        """The proven bound of a set, at first the one that the numbers of groups give."""
        n = len(words)
        if n <= 2 or left == 1:  # one word is guessed, the others need another guess or are lost
            return _Bound(2 * n - 1, True, int(words[0]))
        # No guess that splits the words in two or more is wasted, so the optimum for n words never needs more than n.
        key = min(left, n), words.tobytes()
        if key not in self.known:
            self.known[key] = self._first_bound(words)
            self.bar.update(0)  # so that it shows the time also while one guess is examined
        return self.known[key]

    def _first_bound(self, words: Words) -> _Bound:
        n, n_guesses = len(words), self.codes.shape[1]
        if 4 * n < n_guesses:  # often one of the words separates all others, and then no other guess is better
            groups = _n_groups(self.codes[words[:, None], words])
            if groups.max() == n:
                return _Bound(2 * n - 1, True, int(words[groups.argmax()]))
        least = self._least(words)
        guess = int(least.argmin())
        # 2 n: a word that leaves one pair, or another guess that separates all words.
        return _Bound(int(least[guess]), bool(least[guess] <= 2 * n), guess)

    def _least(self, words: Words) -> NDArray[np.int64]:
        """Lower bound for each guess: ``2 c - 1`` for each group of ``c`` words, and one less for a solved group."""
        groups = _n_groups(self.codes[words])
        least = 3 * len(words) - groups
        least[words] -= 1
        least[groups == 1] = _NEVER
        return least

    def best(self, words: Words, left: int, below: float = math.inf) -> int:
        """The least total, if it is less than ``below``; otherwise a lower bound of at least ``below``."""
        bound = self.bound(words, left)
        if bound.exact or bound.least >= below:
            return bound.least
        least = self._least(words)
        order = least.argsort(kind="stable").tolist()
        best, is_whole_list = below, len(words) == len(self.codes)
        if is_whole_list:
            self.bar.total = len(order)
        for guess in order:
            if least[guess] >= best or best == bound.least:
                break
            total = self.after(guess, words, left, best)
            if total < best:
                best, bound.guess = total, guess
            if is_whole_list:
                self.bar.set_postfix(guesses=f"{best / len(words):.4f}", sets=len(self.known), refresh=False)
                self.bar.update()
        bound.least, bound.exact = int(best), best < below
        return bound.least

    def after(self, guess: int, words: Words, left: int, below: float = math.inf) -> int:
        """The same as :meth:`best` if ``guess`` comes next."""
        groups = [group for code, group in self.split(guess, words) if code != SOLVED]
        total = len(words) + sum(2 * len(group) - 1 for group in groups)
        unsolved = []
        # Large groups first: their bounds add most.
        for group in sorted((group for group in groups if len(group) > 2), key=len, reverse=True):
            bound = self.bound(group, left - 1)
            total += bound.least - (2 * len(group) - 1)
            if total >= below:
                return total
            if not bound.exact:
                unsolved.append((bound.least, group))
        # Small groups first: they are solved sooner.
        for least, group in reversed(unsolved):
            total += self.best(group, left - 1, below - total + least) - least
            if total >= below:
                break
        return total

    def split(self, guess: int, words: Words) -> list[tuple[int, Words]]:
        """The codes that ``guess`` can get, and the words of each."""
        codes = self.codes[words, guess]
        order = codes.argsort(kind="stable")
        sorted_codes = codes[order]
        first = np.flatnonzero(np.diff(sorted_codes, prepend=SOLVED + 1))
        return list(zip(sorted_codes[first].tolist(), np.split(words[order], first[1:]), strict=True))

    def nodes(self, words: Words, left: int, guess: int | None = None) -> list[tuple[int, dict[int, int]]]:
        """The tree below a solved set, parents first: the guess of each node, and the next node after each code."""
        nodes: list[tuple[int, dict[int, int]]] = []

        def grow(words: Words, left: int, guess: int) -> int:
            node = len(nodes)
            replies: dict[int, int] = {}
            nodes.append((guess, replies))
            for code, group in self.split(guess, words) if left > 1 else ():
                if code != SOLVED:
                    replies[code] = grow(group, left - 1, self.bound(group, left - 1).guess)
            return node

        grow(words, left, self.bound(words, left).guess if guess is None else guess)
        return nodes


def _n_groups(codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The number of different codes in each column, ``[n, G]`` to ``[G]``."""
    n, n_guesses = codes.shape
    if n <= _COMPARED:
        groups = np.ones(n_guesses, dtype=np.int64)
        for i in range(1, n):
            groups += (codes[:i] != codes[i]).all(0)
        return groups
    seen = np.zeros(n_guesses * _BINS, dtype=bool)
    first_bin = np.arange(0, n_guesses * _BINS, _BINS)
    for row in codes:
        seen[first_bin + row] = True
    return seen.reshape(n_guesses, _BINS).sum(-1)
