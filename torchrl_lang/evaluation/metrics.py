"""Metrics of games, with standard errors, and of texts: imitation loss, perplexity, diversity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.evaluation.play import GameRecords
from torchrl_lang.functional import shift_left
from torchrl_lang.modules import row_log_prob
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS, ControlTokens, entry


def lmrl_gym_score(mean_return: float, *, worst: float, data: float, best: float) -> float:
    """The score of LMRL-Gym (arXiv 2311.18232): 0 for the worst return, 50 for that of the data, 100 for the best.

    Linear between them, and above the best.

    Examples:
        >>> from torchrl_lang.evaluation.metrics import lmrl_gym_score
        >>> [lmrl_gym_score(value, worst=-6.0, data=-3.0, best=-1.0) for value in (-6, -3, -2, -1)]
        [0.0, 50.0, 75.0, 100.0]
    """
    if mean_return < data:
        return 50 * (mean_return - worst) / (data - worst)
    return 50 + 50 * (mean_return - data) / (best - data)


@dataclass(frozen=True)
class Summary:
    """Statistics of a policy's games. A statistic that was not measured is ``None``."""

    name: str
    games: int
    mean_return: float
    return_error: float | None
    """Standard error of the mean; ``None`` for a single game."""
    win_rate: float
    win_error: float | None
    """Standard error of the win rate."""
    mean_turns: float
    guesses: dict[int, int] = field(default_factory=dict)
    """Maps a number of turns to the number of games won in that many turns."""
    lost: int = 0
    truncated_rate: float = 0.0
    invalid_rate: float | None = None
    """Fraction of turns that were invalid."""
    kl_per_token: float | None = None
    """Mean over the agent's tokens of ``log pi - log behaviour``: an unbiased KL estimate if the policy sampled."""
    kl_per_game: float | None = None
    entropy: float | None = None
    """Mean over the agent's tokens of the policy's entropy."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Mean of each metric of the task, such as ``{"optimality": 0.98}``."""

    def as_dict(self) -> dict[str, Any]:
        """All statistics, ready for JSON (in which the keys of ``guesses`` are strings)."""
        return asdict(self) | {"guesses": {str(turns): count for turns, count in self.guesses.items()}}

    def scalars(self) -> dict[str, float]:
        """The statistics to log during training, by short names.

        ``return`` and ``return_error`` are among them; the best checkpoint is the one with the highest ``return``.
        """
        short = {"mean_return": "return", "mean_turns": "turns"}
        left_out = ("name", "games", "guesses", "lost", "metrics")
        measured = {name: value for name, value in vars(self).items() if name not in left_out and value is not None}
        return {short.get(name, name): value for name, value in measured.items()} | self.metrics


def summarize(
    records: GameRecords,
    *,
    name: str = "",
    won: Callable[[GameRecords], Tensor] | None = None,
    invalid: Callable[[GameRecords], Tensor] | None = None,
    metrics: Mapping[str, Callable[[GameRecords], Tensor]] | None = None,
) -> Summary:
    """Compute summary statistics of games.

    Args:
        records: the result of :func:`~torchrl_lang.evaluation.play_games`.
        name: name of the policy in tables.
        won: maps records to bool ``[N]``, True for games won; default :func:`solved`.
        invalid: maps records to int ``[N]``, the number of invalid turns of each game, such as :func:`unanswered`;
            without it the rate of invalid turns is not measured.
        metrics: further metrics by name; each maps records to ``[N]``, and its mean is recorded.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.evaluation import GameRecords, summarize
        >>> ended = torch.tensor([True, True, False, True])
        >>> records = GameRecords(
        ...     rows=TensorDict(batch_size=[4]), returns=torch.tensor([0.0, -1.0, -6.0, -1.0]),
        ...     turns=torch.tensor([1, 2, 6, 2]), terminated=ended, truncated=~ended,
        ...     last_reward=torch.tensor([0.0, 0.0, -1.0, 0.0]), agent_tokens=torch.tensor([6, 12, 36, 12]))
        >>> summary = summarize(records)
        >>> summary.mean_return, summary.win_rate, summary.guesses, summary.lost
        (-2.0, 0.75, {1: 1, 2: 2}, 1)
    """
    n = len(records)
    if n == 0:
        raise ValueError("There are no games to summarize.")
    is_won = solved(records) if won is None else won(records)
    counts = torch.bincount(records.turns[is_won]).tolist()
    win_rate = float(is_won.double().mean())
    tokens = max(int(records.agent_tokens.sum()), 1)
    log_ratio, entropy = records.log_ratio, records.entropy
    return Summary(
        name=name,
        games=n,
        mean_return=float(records.returns.double().mean()),
        return_error=float(records.returns.double().std() / math.sqrt(n)) if n > 1 else None,
        win_rate=win_rate,
        win_error=math.sqrt(win_rate * (1 - win_rate) / n) if n > 1 else None,
        mean_turns=float(records.turns.double().mean()),
        guesses={turns: count for turns, count in enumerate(counts) if count},
        lost=n - int(is_won.sum()),
        truncated_rate=float(records.truncated.double().mean()),
        invalid_rate=None if invalid is None else int(invalid(records).sum()) / max(int(records.turns.sum()), 1),
        kl_per_token=None if log_ratio is None else float(log_ratio.double().sum()) / tokens,
        kl_per_game=None if log_ratio is None else float(log_ratio.double().mean()),
        entropy=None if entropy is None else float(entropy.double().sum()) / tokens,
        metrics={key: float(metric(records).double().mean()) for key, metric in (metrics or {}).items()},
    )


def solved(records: GameRecords) -> Tensor:
    """Games that terminated without a penalty in the last turn, as in Wordle, bool ``[N]``."""
    return records.terminated & (records.last_reward >= 0)


def unanswered(rows: TensorDictBase, control: ControlTokens) -> Tensor:
    """Number of utterances of each row to which the environment did not reply, int64 ``[N]``.

    In Wordle these are the invalid guesses, so ``invalid=lambda records: unanswered(records.rows, control)`` gives
    :func:`summarize` the rate of invalid guesses.

    Args:
        rows: the entries of a row, ``[N, T]``.
        control: the control tokens of the rows.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.evaluation.metrics import unanswered
        >>> tokenizer = CharTokenizer.from_alphabet("ab")
        >>> turns = [Turn("a", reward=0.0), Turn("b"), Turn("a", reward=0.0)]  # the second "a" was not answered
        >>> unanswered(to_rows([Episode(turns, True)], tokenizer, 9), tokenizer.control)
        tensor([1])
    """
    if not control.marks_turns:
        raise ValueError("In rows of a chat template every utterance is followed by a message: none is unanswered.")
    tokens, real, agent = (rows.get(key) for key in (TOKENS, ATTENTION_MASK, AGENT_MASK))
    end = real & (tokens == control.end_of_action)
    speaks = real & ~agent & (tokens != control.end_of_dialogue)
    return (end & ~shift_left(speaks)).sum(-1)


@torch.no_grad()
def imitation_loss(actor: TensorDictModuleBase, rows: TensorDictBase, *, batch_size: int = 256) -> float:
    """Mean negative log-probability of the agent's tokens, in nats per token.

    It is at least the entropy per token of the policy that made the data, and equals it where the imitation is perfect.

    Args:
        actor: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor`.
        rows: entries of a row, ``[N, T]``.
        batch_size: rows at a time.

    Raises:
        ValueError: the rows have no token of the agent.

    Examples:
        >>> import torch
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.evaluation import imitation_loss
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn(word, reward=0.0)], True) for word in ("ab", "c")], tokenizer, 6)
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=6)
        >>> imitation_loss(language_actor(lm), rows) > 0
        True
    """
    tokens = int(entry(rows, AGENT_MASK).sum())
    if not tokens:
        raise ValueError(f"The {len(rows)} rows have no token of the agent to predict.")
    with eval_mode(actor):
        total = sum(float(row_log_prob(actor, part).double().sum()) for part in rows.split(batch_size))
    return -total / tokens


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
    return torch.tensor(imitation_loss(actor, rows, batch_size=batch_size), dtype=torch.float64).exp().item()


def _ngrams(texts: Iterable[str], n: int) -> Counter[tuple[str, ...]]:
    words = [text.split() for text in texts]
    counts = Counter(ngram for each in words for ngram in zip(*(each[start:] for start in range(n)), strict=False))
    if not counts:
        raise ValueError(f"None of {len(words)} texts has {n} words.")
    return counts
