"""The words of rewards as tokens, and how probable a model finds each of them where a reward is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torchrl_lang._files import shorten
from torchrl_lang.algorithm_distillation.language.block_template import BlockTemplate
from torchrl_lang.algorithm_distillation.language.quantizers import FiniteQuantizer
from torchrl_lang.algorithm_distillation.language.step_template import StepTemplate, TokenKind
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.text import Tokenizer

__all__ = ["RewardWords"]

Prefix = tuple[int, ...]


class RewardWords:
    r"""The rewards that a template can write, or some of them, as sequences of tokens.

    The probability of a reward is that under a model which may write nothing but rewards, token by token:
    ``prod_i p(token_i | context, token_<i) / sum_c p(c | context, token_<i)``, with ``c`` over the tokens that continue
    some reward. Where only one token continues, its factor is 1 and the model is not asked.

    Args:
        template: of the rows.
        tokenizer: of the rows.
        values: rewards to choose among, for a template that writes decimals; increasing.

    Attributes:
        values: float32 ``[R]``, increasing: the rewards.
        branches: the tokens that may follow each sequence of tokens which more than one may follow.
        longest: tokens of the longest reward, with the one after a block's.

    Raises:
        ValueError: the template has infinitely many rewards and none are given, or the other way round; or it leaves
            some out, or is one of steps whose rewards are several tokens.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.algorithm_distillation.language import BlockTemplate
        >>> from torchrl_lang.algorithm_distillation.language.reward_words import RewardWords
        >>> tokenizer = CharTokenizer.from_alphabet("\n -.0123456789")
        >>> words = RewardWords(BlockTemplate(), tokenizer, [-2.0, -1.0, 0.0])
        >>> {tokenizer.decode(prefix): tokenizer.decode(next) for prefix, next in words.branches.items()}
        {' ': '-0', ' -': '21'}
    """

    def __init__(
        self, template: StepTemplate | BlockTemplate, tokenizer: Tokenizer, values: Sequence[float] | None = None
    ) -> None:
        words, self.values = _words(template, values)
        self._sequences, owners = list[Prefix](), list[int]()
        for number, endings in enumerate(words):
            for text in endings:
                self._sequences.append(tuple(tokenizer.encode(text)))
                owners.append(number)
        if isinstance(template, BlockTemplate):  # without it, 1.0 would be the beginning of 1.05
            after = tuple(tokenizer.encode("\n\n"))[:1]
            self._sequences = [sequence + after for sequence in self._sequences]
        elif any(len(sequence) != 1 for sequence in self._sequences):
            raise ValueError("A reward is several tokens: use a tokenizer that has the words of rewards as symbols.")
        self._owner = torch.tensor(owners)
        self._number_of = dict(zip(self._sequences, owners, strict=True))
        self._ends = isinstance(template, BlockTemplate)
        self.branches = _branches(self._sequences)
        self.longest = max(map(len, self._sequences))

    def read(self, words: Sequence[Prefix]) -> Tensor:
        """The numbers of rewards, int64 ``[M]``, from the tokens of each, the one after a block's among them.

        Raises:
            ValueError: some are no rewards of these.
        """
        if missing := [word for word in words if word not in self._number_of]:
            raise ValueError(
                f"A reward of the rows has the tokens {list(missing[0])}, which none of the rewards "
                f"{shorten(self.values.tolist())} has: give all rewards as values, and the tokenizer of the rows."
            )
        return torch.tensor([self._number_of[word] for word in words], dtype=torch.int64)

    def spans(self, ids: Tensor, kind: Tensor, attention: Tensor) -> tuple[Tensor, list[Prefix]]:
        """The row and first place of each reward, int64 ``[M, 2]``, and its tokens, in rows ``[N, T]`` on the CPU."""
        is_reward = (kind == TokenKind.REWARD) & attention
        begins, found = is_reward.clone(), list[Prefix]()
        if self._ends:  # else each reward is one token, and neighbours are two rewards
            begins[:, 1:] &= ~is_reward[:, :-1]
        places, tokens, of_reward = begins.nonzero(), ids.tolist(), is_reward.tolist()
        for row, first in places.tolist():
            end = first + 1
            while self._ends and end < len(tokens[row]) and of_reward[row][end]:
                end += 1
            found.append(tuple(tokens[row][first : end + self._ends]))
        return places, found

    def probabilities(self, count: int, logits_after: Callable[[Prefix], Tensor]) -> Tensor:
        """The probability of each reward at ``count`` places, float32 ``[M, R]`` on the CPU.

        Args:
            count: ``M``.
            logits_after: the logits ``[M, V]`` of the token that follows the context and these tokens.
        """
        total = torch.zeros(count, len(self._sequences))
        for prefix, following in self.branches.items():
            chosen = torch.log_softmax(upcast_half(logits_after(prefix)[:, list(following)]), -1).cpu()
            size = len(prefix)
            for number, sequence in enumerate(self._sequences):
                if sequence[:size] == prefix:
                    total[:, number] += chosen[:, following.index(sequence[size])]
        return torch.zeros(count, len(self.values)).index_add_(1, self._owner, total.exp())


def _words(template: StepTemplate | BlockTemplate, values: Sequence[float] | None) -> tuple[list[list[str]], Tensor]:
    """The texts of each reward, several where an episode's end is written with it, and the rewards, float32 ``[R]``."""
    reward = template.reward
    if isinstance(reward, FiniteQuantizer):
        if values is not None:
            raise ValueError("The template has finitely many rewards already: leave values out.")
        words, levels = list(reward.words), reward.levels.to(torch.float32)
    elif values is None:
        raise ValueError(
            "reward_accuracy compares finitely many rewards: give the template Bins or Levels, or the rewards to "
            "choose among as values."
        )
    else:
        exact = torch.tensor(sorted(set(values)), dtype=torch.float64)
        words, levels = reward.write(exact), exact.to(torch.float32)
    ends: tuple[str, ...] = ("",)
    if isinstance(template, StepTemplate):
        if not template.writes_every_reward:
            raise ValueError("reward_accuracy needs a word for every reward, but this template leaves zeros out.")
        ends = next(slot.words for slot in template.slots if slot.kind == TokenKind.REWARD)
    return [[f" {word}{end}" for end in ends] for word in words], levels


def _branches(sequences: Sequence[Prefix]) -> Mapping[Prefix, tuple[int, ...]]:
    """The different tokens that follow each prefix of the sequences, where there are several."""
    following: dict[Prefix, dict[int, None]] = {}
    for sequence in sequences:
        for size, token in enumerate(sequence):
            following.setdefault(sequence[:size], {})[token] = None
    return {prefix: tuple(tokens) for prefix, tokens in following.items() if len(tokens) > 1}
