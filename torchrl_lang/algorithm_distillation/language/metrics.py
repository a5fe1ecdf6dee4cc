"""Metrics of a language model on rows of histories: how well it predicts the rewards, and all tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torch.nn import functional as F

from torchrl_lang._files import shorten
from torchrl_lang.algorithm_distillation.language.block_rows import BlockTemplate
from torchrl_lang.algorithm_distillation.language.step_rows import TOKEN_KIND
from torchrl_lang.algorithm_distillation.language.template import StepTemplate, TokenKind
from torchrl_lang.evaluation.utterance_values import rank_correlation
from torchrl_lang.functional import shift_left
from torchrl_lang.functional.decisions import shift_right
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.schema import ATTENTION_MASK, TOKENS, entry
from torchrl_lang.text import Tokenizer

Prefix = tuple[int, ...]


def reward_accuracy(
    actor: ProbabilisticTensorDictSequential,
    rows: TensorDictBase,
    template: StepTemplate | BlockTemplate,
    tokenizer: Tokenizer,
    *,
    values: Sequence[float] | None = None,
    chunk: int = 64,
) -> dict[str, float]:
    """Predict each reward of rows ``[N]`` from all tokens before it, and compare it with the reward that was earned.

    The probability of each reward is that of its tokens under the model if it may write nothing but rewards; words of a
    reward and an end count for the reward. ``exact`` is the share of rewards that are the most likely one,
    ``within_one`` the share that are it or its
    neighbour in the order of their values. ``rank_correlation`` (Spearman) and ``squared_error`` are those of the
    expected reward. Beside them is what a constant prediction reaches on these rows: ``constant_exact`` (the most
    frequent reward), ``constant_within_one`` (the best one) and ``constant_squared_error`` (the mean, which has no rank
    correlation).

    Args:
        actor: a language-model actor. Where a reward of a block may be several tokens, its context has room for a few
            tokens more than a row's.
        rows: rows of :class:`StepRows` or :func:`pack_blocks`.
        template: the template of the rows; it writes every reward. A reward is one token in a template of steps, and
            may be several in a template of blocks.
        tokenizer: the tokenizer of the rows.
        values: the rewards to choose among, where a template of blocks writes decimals.
        chunk: rows that the model reads at a time.

    Raises:
        KeyError: the rows have no ``token_kind``.
        ValueError: the template has decimals and there are no ``values``, a reward of the rows is not among them, a
            template of steps leaves rewards out or has some of several tokens, or no row has a reward.

    Examples:
        >>> from torchrl_lang.text import word_tokenizer
        >>> from torchrl_lang.algorithm_distillation.language import BlockTemplate, Quantizer, TextRecord, pack_blocks
        >>> from torchrl_lang.algorithm_distillation.language import reward_accuracy
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> template = BlockTemplate(Quantizer([0, 1]))
        >>> tokenizer = word_tokenizer([], symbols=template.vocabulary())
        >>> records = [TextRecord(query="q", response="r", reward=earned) for earned in (1, 1, 1, 0)]
        >>> rows = pack_blocks(records, template, tokenizer, 200).rows
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=208)
        >>> found = reward_accuracy(language_actor(lm), rows, template, tokenizer)
        >>> found["constant_exact"], 0 <= found["exact"] <= 1
        (0.75, True)
    """
    words, kinds = RewardWords(template, tokenizer, values), entry(rows, TOKEN_KIND)
    columns = list[tuple[Tensor, Tensor, Tensor]]()
    for first in range(0, len(rows), chunk):
        part = rows[first : first + chunk].select(TOKENS, ATTENTION_MASK)
        is_reward = (kinds[first : first + chunk] == TokenKind.REWARD) & part[ATTENTION_MASK]
        places, truth = words.read(part[TOKENS].cpu(), is_reward.cpu())
        if len(truth):
            probability = words.probabilities(len(places), partial(_logits_after, actor, part, places, chunk))
            columns.append((truth, probability.argmax(-1), probability @ words.values))
    if not columns:
        raise ValueError("The rows have no reward: make them with StepRows or pack_blocks.")
    truth, best, mean = map(torch.cat, zip(*columns, strict=True))
    return _compared(truth, best, mean, words.values)


def _compared(truth: Tensor, best: Tensor, mean: Tensor, values: Tensor) -> dict[str, float]:
    """The figures of :func:`reward_accuracy`.

    Args:
        truth: int64 ``[M]``, the number of each reward.
        best: int64 ``[M]``, the number of the most likely one.
        mean: float32 ``[M]``, the expected reward.
        values: float32 ``[R]``, the rewards.
    """
    counts = torch.bincount(truth, minlength=len(values)).float() / len(truth)
    beside = F.pad(counts, (1, 1))
    earned = values[truth]
    rank = rank_correlation(mean, earned)
    return {
        "exact": _share(best == truth),
        "within_one": _share((best - truth).abs() <= 1),
        "rank_correlation": 0.0 if math.isnan(rank) else rank,  # one of them may be constant
        "squared_error": float((mean - earned).square().mean()),
        "constant_exact": float(counts.max()),
        "constant_within_one": float((counts + beside[2:] + beside[:-2]).max()),
        "constant_squared_error": float((earned - earned.mean()).square().mean()),
    }


def next_token_metrics(
    actor: ProbabilisticTensorDictSequential, rows: TensorDictBase, *, chunk: int = 64
) -> dict[str, float]:
    """Cross-entropy in nats (``loss``) and accuracy of the next token, over all tokens of rows ``[N]`` and by kind.

    Keys are ``loss`` and ``accuracy``, and for each kind that the rows have ``loss/action``, ``accuracy/action`` and so
    on; see :class:`TokenKind`. The first token of a row is not predicted.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import Quantizer, StepRows, StepTemplate
        >>> from torchrl_lang.algorithm_distillation.language import next_token_metrics, template_tokenizer
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> steps = NoisyExpert(DarkRoomEnv(3, task=0, batch_size=[1, 4], episode_length=5), 10).history()
        >>> numbers = [Quantizer(range(3))] * 2, Quantizer(range(5), list("sNSWE")), Quantizer([0, 1])
        >>> template = StepTemplate("compact", *numbers)
        >>> tokenizer = template_tokenizer(template)
        >>> rows = StepRows(template, tokenizer)(steps[0])
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=41)
        >>> metrics = next_token_metrics(language_actor(lm), rows)
        >>> sorted(metrics)[:3], bool(metrics["loss"] > 0)
        (['accuracy', 'accuracy/action', 'accuracy/observation'], True)
        >>> accuracy = reward_accuracy(language_actor(lm), rows, template, tokenizer)
        >>> bool(accuracy["constant_exact"] >= 0.5)
        True
    """
    kinds, columns = entry(rows, TOKEN_KIND), list[tuple[Tensor, Tensor, Tensor]]()
    for first in range(0, len(rows), chunk):
        part = rows[first : first + chunk]
        has_next = shift_left(part[ATTENTION_MASK])
        logits, target = _logits(actor, part)[has_next], shift_left(part[TOKENS]).long()[has_next]
        losses = F.cross_entropy(upcast_half(logits), target, reduction="none")
        columns.append((losses, logits.argmax(-1) == target, shift_left(kinds[first : first + chunk])[has_next]))
    loss, hit, kind = map(torch.cat, zip(*columns, strict=True))
    found = dict[str, float]()
    for name, of in {"": kind >= 0, **{f"/{each.name.lower()}": kind == each for each in TokenKind}}.items():
        if of.any():
            found |= {f"loss{name}": float(loss[of].mean()), f"accuracy{name}": _share(hit[of])}
    return found


def _logits_after(
    actor: ProbabilisticTensorDictSequential, rows: TensorDictBase, places: Tensor, chunk: int, tokens: tuple[int, ...]
) -> Tensor:
    """Logits ``[M, V]`` after the tokens of rows before each of the ``places`` ``[M, 2]``, and then ``tokens``."""
    row, place = places.to(rows[TOKENS].device).unbind(-1)
    if not tokens:  # one pass serves all places of a row
        return _logits(actor, rows)[row, place - 1]
    found = list[Tensor]()
    for rows_of, first in zip(row.split(chunk), place.split(chunk), strict=True):
        part = _cut(rows[rows_of], first, tokens)
        number = torch.arange(len(first), device=first.device)
        found.append(_logits(actor, part)[number, first + len(tokens) - 1])
    return torch.cat(found)


def _cut(rows: TensorDictBase, place: Tensor, tokens: tuple[int, ...]) -> TensorDict:
    """Rows ``[M]`` up to a place of each, ``[M]``, and then ``tokens``."""
    longest = int(place.max()) + len(tokens)
    ids = F.pad(rows[TOKENS].long(), (0, len(tokens)))[:, :longest]
    at = place[:, None] + torch.arange(len(tokens), device=place.device)
    ids = ids.scatter(-1, at, torch.tensor(tokens, device=ids.device).expand(at.shape))
    real = torch.arange(longest, device=ids.device) < (place + len(tokens))[:, None]
    return TensorDict({TOKENS: ids, ATTENTION_MASK: real}, batch_size=[len(ids)])


def _logits(actor: ProbabilisticTensorDictSequential, rows: TensorDictBase) -> Tensor:
    """Logits ``[N, T, V]`` of the next token in rows ``[N, T]``."""
    with torch.no_grad(), eval_mode(actor):
        return actor.get_dist(rows.select(TOKENS, ATTENTION_MASK)).logits


def _share(hits: Tensor) -> float:
    return float(hits.float().mean())


class RewardWords:
    r"""The rewards that a template can write, or some of them, as sequences of tokens.

    The probability of a reward is that under a model which may write nothing but rewards, token by token:
    ``prod_i p(token_i | context, token_<i) / sum_c p(c | context, token_<i)``, with ``c`` over the tokens that continue
    some reward. Where only one token continues, its factor is 1 and the model is not asked.

    Args:
        template: of the rows.
        tokenizer: of the rows.
        values: rewards to choose among, for a template that writes decimals.

    Attributes:
        values: float32 ``[R]``, increasing: the rewards.
        branches: the tokens that may follow each sequence of tokens which more than one may follow.
        longest: tokens of the longest reward, with the one after a block's.

    Raises:
        ValueError: the template has infinitely many rewards and none are given, or the other way round; or it is one of
            steps that leaves some out, or whose rewards are several tokens.
    """

    def __init__(
        self, template: StepTemplate | BlockTemplate, tokenizer: Tokenizer, values: Sequence[float] | None = None
    ) -> None:
        reward = template.reward
        if reward.is_finite == (values is not None):
            raise ValueError("reward_accuracy needs finitely many rewards: values go with a template of decimals only.")
        exact = reward.levels if values is None else torch.tensor(sorted(set(values)), dtype=torch.float64)
        words, self.values = reward.words if values is None else reward.write(exact), exact.to(torch.float32)
        endings = template.reward_slot.endings if isinstance(template, StepTemplate) else ("",)
        # Without the token after a block's reward, 1.0 would be the beginning of 1.05.
        after = tuple(tokenizer.encode(template.after)[:1]) if isinstance(template, BlockTemplate) else ()
        texts = {f" {word}{ending}": number for number, word in enumerate(words) for ending in endings}
        self._number_of = {(*tokenizer.encode(text), *after): number for text, number in texts.items()}
        self._after, self.longest = len(after), max(map(len, self._number_of))
        if isinstance(template, StepTemplate) and (self.longest > 1 or template.reward_slot.optional):
            raise ValueError("Rewards of a step, zero too, must be one token: use template_tokenizer, no brackets.")
        self.branches = _branches(self._number_of)

    def read(self, ids: Tensor, is_reward: Tensor) -> tuple[Tensor, Tensor]:
        """Row and first place of each reward, int64 ``[M, 2]``, and its number, ``[M]``, in tokens ``[N, T]``.

        Raises:
            ValueError: some are none of these rewards.
        """
        places = (is_reward & ~shift_right(is_reward)).nonzero()
        ends = (is_reward & ~shift_left(is_reward)).nonzero()[:, 1] + 1 + self._after
        words = [tuple(ids[row, first:end].tolist()) for (row, first), end in zip(places, ends, strict=True)]
        if missing := [word for word in words if word not in self._number_of]:
            rewards = f"the rewards {shorten(self.values.tolist())}: give all rewards as values"
            raise ValueError(f"The rows have a reward of the tokens {list(missing[0])}, which is none of {rewards}.")
        return places, torch.tensor([self._number_of[word] for word in words], dtype=torch.int64)

    def probabilities(self, count: int, logits_after: Callable[[Prefix], Tensor]) -> Tensor:
        """The probability of each reward at ``count`` places, float32 ``[M, R]`` on the CPU.

        Args:
            count: ``M``.
            logits_after: the logits ``[M, V]`` of the token that follows the context and these tokens.
        """
        total = torch.zeros(count, len(self._number_of))
        for prefix, following in self.branches.items():
            chosen = torch.log_softmax(upcast_half(logits_after(prefix)[:, list(following)]), -1).cpu()
            size = len(prefix)
            for number, sequence in enumerate(self._number_of):
                if sequence[:size] == prefix:
                    total[:, number] += chosen[:, following.index(sequence[size])]
        owner = torch.tensor(list(self._number_of.values()))
        return torch.zeros(count, len(self.values)).index_add_(1, owner, total.exp())


def _branches(sequences: Iterable[Prefix]) -> Mapping[Prefix, tuple[int, ...]]:
    """The different tokens that follow each prefix of the sequences, where there are several."""
    following: dict[Prefix, dict[int, None]] = {}
    for sequence in sequences:
        for size, token in enumerate(sequence):
            following.setdefault(sequence[:size], {})[token] = None
    return {prefix: tuple(tokens) for prefix, tokens in following.items() if len(tokens) > 1}
