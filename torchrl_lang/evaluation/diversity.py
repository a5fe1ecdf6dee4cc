"""How varied texts are, and how likely a language model finds them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_lang._checks import at_least_one
from torchrl_lang.evaluation.imitation import imitation_loss

__all__ = ["distinct_n", "ngram_entropy", "perplexity"]


def distinct_n(texts: Iterable[str], n: int = 2) -> float:
    """Number of different n-grams of words divided by the number of all n-grams (Li et al. 2016, arXiv 1510.03055).

    It falls as the number of texts grows: compare the same number of texts. Words are what white space separates.

    Args:
        texts: at least one of them with ``n`` words; n-grams do not reach over the end of a text.
        n: words of an n-gram.

    Raises:
        ValueError: no text has ``n`` words, or ``n`` is below 1.

    Examples:
        >>> from torchrl_lang.evaluation import distinct_n
        >>> distinct_n(["a b a b", "a b"], 2)  # a b, b a, a b; a b
        0.5
    """
    counts = _ngrams(texts, n)
    return len(counts) / sum(counts.values())


def ngram_entropy(texts: Iterable[str], n: int = 2) -> float:
    """Entropy of the distribution of n-grams of words, in nats: ``- sum_g p(g) log p(g)``.

    It is 0 if all texts repeat one n-gram, and at most the logarithm of the number of n-grams. The entropy of a policy
    itself is :attr:`Summary.entropy`.

    Args:
        texts: see :func:`distinct_n`.
        n: words of an n-gram.

    Raises:
        ValueError: no text has ``n`` words, or ``n`` is below 1.

    Examples:
        >>> from torchrl_lang.evaluation import ngram_entropy
        >>> round(ngram_entropy(["a b", "a b", "b a", "b a"], 2), 4)  # log 2
        0.6931
    """
    counts = _ngrams(texts, n)
    total = sum(counts.values())
    return math.log(total) - sum(count * math.log(count) for count in counts.values()) / total


def perplexity(actor: TensorDictModuleBase, rows: TensorDictBase, *, batch_size: int = 256) -> float:
    """The exponential of :func:`imitation_loss`: perplexity of the agent's tokens under a language actor.

    Under an imitation of the data, the rows of a policy's games show whether it writes what the data might contain.

    Args:
        actor: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor`.
        rows: entries of a row, ``[N, T]``, such as ``records.rows`` of :func:`play_games`.
        batch_size: rows at a time.

    Returns:
        At least 1; infinity if a token is impossible, NaN if the actor's logits are.

    Raises:
        ValueError: the rows have no token of the agent.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.evaluation import perplexity
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn(word, reward=0.0)], True) for word in ("ab", "c")], tokenizer, 6)
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=6)
        >>> perplexity(language_actor(lm), rows) > 1
        True
    """
    loss = imitation_loss(actor, rows, batch_size=batch_size)
    return torch.tensor(loss, dtype=torch.float64).exp().item()


def _ngrams(texts: Iterable[str], n: int) -> Counter[tuple[str, ...]]:
    at_least_one("n", n)
    words = [text.split() for text in texts]
    counts = Counter(ngram for each in words for ngram in zip(*(each[start:] for start in range(n)), strict=False))
    if not counts:
        raise ValueError(f"None of {len(words)} texts has {n} words.")
    return counts
