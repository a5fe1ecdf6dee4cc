"""Decision trees of Wordle: a guess for each state of the game, what they cost, and their files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._files import Record
from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.optimal import OptimalPlayer
from torchrl_lang.envs.wordle.players import Player
from torchrl_lang.envs.wordle.rules import CODE_OF_LETTERS, SOLVED, Rules, feedback_code, feedback_table
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.envs.wordle.words import WORD_LENGTH, WordIndex, WordList, load_words
from torchrl_lang.schema import ACTION, DONE, REWARD, TOKENS


class DecisionTree(Record):
    """The guess after each sequence of colours, until the hidden word is found.

    Node 0 is the first guess. :func:`solve` makes the tree with the fewest guesses, and
    :class:`~torchrl_lang.envs.wordle.TreePlayer` plays it.

    Args:
        words: the words that may be hidden.
        guesses: the guess at each node.
        replies: for each node, the next node after colours such as ``bybbg``; parents come before their children.
        rules: the rules of the colours.
        max_tries: the guesses of a game; a word that is not found then is lost and counts as ``max_tries + 1`` guesses.
            By default every word must be found.

    Raises:
        ValueError: the tree does not find a word, or its nodes are malformed.

    Examples:
        >>> from torchrl_lang.envs.wordle import solve
        >>> tree = solve(["baker", "maker", "taker", "timed"])
        >>> tree.total, tree.expected_guesses, tree.histogram
        (7, 1.75, {1: 1, 2: 3})
        >>> tree.path("baker")
        ['timed', 'baker']
    """

    FORMAT: ClassVar[str] = "wordle decision tree"
    VERSION: ClassVar[int] = 2
    rules: Rules = "official"
    max_tries: Annotated[int, Field(ge=1)] | None = None
    words: tuple[str, ...]
    guesses: Annotated[tuple[str, ...], Field(min_length=1)]
    replies: tuple[dict[Annotated[str, Field(pattern="^[byg]{5}$")], int], ...]

    @model_validator(mode="after")
    def _finds_all_words(self) -> Self:
        load_words(self.words)
        load_words(list(dict.fromkeys(self.guesses)))
        n, children = len(self.guesses), [(node, child) for node, _, child in self._edges()]
        # Later nodes only, so that following the tree ends.
        if len(self.replies) != n or not all(node < child < n for node, child in children):
            raise ValueError(f"{n} guesses need as many replies, whose nodes come after their parent and exist")
        _ = self.n_guesses
        return self

    def _edges(self) -> Iterator[tuple[int, int, int]]:
        """The number of a node, a code of colours and the next node, for each reply."""
        for node, reply in enumerate(self.replies):
            for colours, child in reply.items():
                yield node, CODE_OF_LETTERS[colours], child

    @cached_property
    def next_node(self) -> Tensor:
        """Node after each code at each node, int64 ``[nodes, 243]``; -1 for codes that cannot come."""
        table = torch.full((len(self.guesses), SOLVED + 1), -1)
        for node, code, child in self._edges():
            table[node, code] = child
        return table

    @cached_property
    def n_guesses(self) -> Tensor:
        """Number of guesses for each word, int64 ``[W]``."""
        table = feedback_table(WordIndex(self.guesses).letters, WordIndex(self.words).letters, self.rules).long()
        word = torch.arange(len(self.words))
        count, node = torch.zeros_like(word), torch.zeros_like(word)
        while len(word):
            count[word] += 1
            code = table[node[word], word]
            node[word] = self.next_node[node[word], code]
            word = word[code != SOLVED]
            if len(word) and int(count[word[0]]) == self.max_tries:
                count[word] += 1
                return count
            if (node[word] < 0).any():
                raise ValueError(f"the tree has no guess that finds {self.words[int(word[node[word] < 0][0])]!r}")
        return count

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
            raise ValueError(f"{word!r} is not one of the tree's {len(self.words)} words.")
        hidden, node, guesses = WordIndex([word]).letters, 0, list[str]()
        while node >= 0:
            guesses.append(self.guesses[node])
            code = int(feedback_table(WordIndex(guesses[-1:]).letters, hidden, self.rules))
            node = int(self.next_node[node, code])
        return guesses

    def save(self, path: str | Path) -> None:
        """Write the tree as JSON, atomically and with a digest.

        Examples:
            >>> import tempfile
            >>> from torchrl_lang.envs.wordle import solve
            >>> from torchrl_lang.envs.wordle.tree import DecisionTree
            >>> with tempfile.TemporaryDirectory() as home:
            ...     solve(["crane", "slate"]).save(f"{home}/tree.json")
            ...     DecisionTree.load(f"{home}/tree.json").total
            3
        """
        self.write(os.fspath(path))

    @classmethod
    def load(cls, path: str | Path) -> DecisionTree:
        """Read a tree that :meth:`save` wrote; every word is looked up in it once.

        Raises:
            FileError: the file is missing, damaged, has a later version, or does not hold a tree that finds its words.
        """
        return cls.read(os.fspath(path), remedy="save the tree again")


class TreePlayer(Player):
    """Follows a :class:`DecisionTree`, such as the one of :func:`solve`.

    A game whose guesses so far are not the tree's, because it was continued from other rows or another policy plays in
    turn, has no node. Another player chooses the guess there.

    Args:
        tree: the tree, or the path of its file.
        otherwise: plays the games that have left the tree; by default :class:`OptimalPlayer` with the tree's words.
        **kwargs: see :class:`Player`.

    Examples:
        >>> from torchrl_lang.envs.wordle import TreePlayer, WordleEnv, demo_words, expected_return, solve
        >>> words = demo_words(50)
        >>> player = TreePlayer(solve(words))
        >>> games = WordleEnv(words, batch_size=[8], seed=0).rollout(4, player, break_when_any_done=False)
        >>> bool(games["next", "terminated"].any(1).all())
        True
        >>> expected_return(player, words).mean
        -1.34
    """

    next_node: Tensor
    letters: Tensor

    def __init__(self, tree: DecisionTree | str | Path, *, otherwise: Player | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tree = tree if isinstance(tree, DecisionTree) else DecisionTree.load(tree)
        self.otherwise = otherwise or OptimalPlayer(self.tree.words, rules=self.tree.rules, **kwargs)
        next_node = self.tree.next_node.clone()
        next_node[:, SOLVED] = 0  # a solved game ends, so what is played there does not matter
        self.register_buffer("next_node", next_node, persistent=False)
        self.register_buffer("letters", WordIndex(self.tree.guesses).letters, persistent=False)

    def choose(self, turns: Turns) -> Tensor:
        """The guess of each game's node, int64 letters ``[N, 5]``."""
        node = self.node(turns)
        letters = self.letters[node.clamp_min(0)]
        left = node < 0
        if left.any():
            letters[left] = self.otherwise.choose(turns.rows(left))
        return letters

    def node(self, turns: Turns) -> Tensor:
        """The node of each game, -1 for games that have left the tree; int64 ``[N]``. Invalid guesses do not count."""
        node = torch.zeros_like(turns.tries)
        code = feedback_code(turns.colours)
        for turn in range(turns.guess.shape[1]):
            heard = turn < turns.answered
            if not heard.any():
                break
            at = node.clamp_min(0)
            same = (turns.guess[:, turn] == self.letters[at]).all(-1) & (node >= 0)
            node = torch.where(heard, torch.where(same, self.next_node[at, code[:, turn]], -1), node)
        return node


class WordReturns(NamedTuple):
    """The return of each hidden word, as :func:`expected_return` computes it."""

    returns: Tensor
    """float64 ``[W]``: ``-(k - 1)`` for a word that took ``k`` guesses, ``-max_tries`` for a lost one."""
    max_tries: int

    @property
    def mean(self) -> float:
        """The expected return if each word is hidden with the same probability."""
        return float(self.returns.mean())

    @property
    def histogram(self) -> dict[int, int]:
        """How many words took each number of guesses, lost words under ``max_tries + 1``."""
        count = (1 - self.returns).long().bincount(minlength=self.max_tries + 2).tolist()
        return {guesses: words for guesses, words in enumerate(count) if guesses}


def expected_return(
    player: Callable[[TensorDictBase], TensorDictBase],
    words: WordList | None = None,
    *,
    rules: Rules = "official",
    max_tries: int = 6,
    guesses: WordList | None = None,
) -> WordReturns:
    """Play one game for each hidden word, in one batch.

    The mean is exact, since a deterministic policy plays each word in one way:
    :class:`~torchrl_lang.envs.wordle.TreePlayer`, ``OptimalPlayer(ties="first")``, or a model with greedy decoding. A
    policy that draws its guesses could be lucky with each word, even above the optimum: estimate its return with
    :func:`~torchrl_lang.evaluation.play_games`. It is refused where it shows, by different guesses in two games of the
    same guesses and colours so far; one that draws only where no two words are left together does not show.

    Args:
        player: writes ``action`` into its tensordict, such as a player or an actor, with actions of any width.
        words: the words that may be hidden, a list or path; default the shipped common words.
        rules: the rules of the colours.
        max_tries: number of guesses in a game.
        guesses: the valid guesses, see :class:`~torchrl_lang.envs.wordle.WordleEnv`.

    Raises:
        ValueError: the policy played different guesses in games with the same guesses and colours so far.

    Examples:
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer, expected_return
        >>> result = expected_return(RandomWordPlayer(["crane"]), ["crane", "slate", "point"])
        >>> result.returns, result.mean
        (tensor([ 0., -6., -6.], dtype=torch.float64), -4.0)
        >>> result.histogram
        {1: 1, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 2}
    """
    word_list = load_words(words)
    n, width = len(word_list), getattr(player, "action_length", WORD_LENGTH + 1)
    env = WordleEnv(word_list, [n], rules=rules, max_tries=max_tries, guesses=guesses, action_length=width)
    tensordict, returns = env.reset(hidden_word=torch.arange(n)), torch.zeros(n, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(max_tries):
            tensordict = player(tensordict)
            live = tensordict[~tensordict[DONE].flatten()]
            states, plays = live[TOKENS], torch.cat([live[TOKENS], live[ACTION]], -1)
            if len(live) and len(states.unique(dim=0)) != len(plays.unique(dim=0)):
                remedy = "make it deterministic, such as OptimalPlayer(ties='first'), or use play_games"
                raise ValueError(f"The policy draws its guesses, it played different ones in one state: {remedy}.")
            tensordict = env.step(tensordict)["next"]
            returns += tensordict[REWARD].flatten()
    return WordReturns(returns, max_tries)
