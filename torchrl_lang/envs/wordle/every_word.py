"""The exact expected return of a deterministic policy: every hidden word is played once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.rules import Rules
from torchrl_lang.envs.wordle.words import WordList, common_words, load_words
from torchrl_lang.schema import ACTION, DONE, REWARD, TOKENS

__all__ = ["WordReturns", "expected_return"]


class WordReturns(NamedTuple):
    """The return of each hidden word, as :func:`expected_return` computes it.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.wordle import WordReturns
        >>> found = WordReturns(torch.tensor([0.0, -1.0, -1.0, -2.0]), max_tries=2)
        >>> found.mean, found.histogram  # one word took one guess, two took two, one was not found
        (-1.0, {1: 1, 2: 2, 3: 1})
    """

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
    word_list = common_words() if words is None else load_words(words)
    width = getattr(player, "action_length", None)
    env = WordleEnv(
        word_list,
        [len(word_list)],
        rules=rules,
        max_tries=max_tries,
        guesses=guesses,
        **({} if width is None else {"action_length": width}),
    )
    tensordict = env.reset(hidden_word=torch.arange(len(word_list)))
    returns = torch.zeros(len(word_list), dtype=torch.float64)
    with torch.no_grad():
        for _ in range(max_tries):
            tensordict = player(tensordict)
            _check_deterministic(tensordict)
            tensordict = env.step(tensordict)["next"]
            returns += tensordict[REWARD].flatten()
    return WordReturns(returns, max_tries)


def _check_deterministic(tensordict: TensorDictBase) -> None:
    """Raise ValueError if two unfinished games in the same state have different actions."""
    live = tensordict[tensordict[DONE].flatten().logical_not()]
    if len(live) == 0:
        return
    states, state = live[TOKENS].unique(dim=0, return_inverse=True)
    actions = live[ACTION]
    one_of_each = actions.new_zeros((len(states), actions.shape[-1])).index_copy(0, state, actions)
    if not torch.equal(one_of_each[state], actions):
        raise ValueError(
            "The policy draws its guesses: it played different ones in games with the same guesses and colours so far. "
            'Make it deterministic, such as OptimalPlayer(ties="first") or an actor that decodes greedily, or estimate '
            "its return with play_games."
        )
