"""Rank accuracy by hand, and the exact values that tasks know."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_lang.envs.random_walks.task import RandomWalksTask
from torchrl_lang.envs.wordle import WordIndex, demo_words
from torchrl_lang.envs.wordle.optimal import ExactValues
from torchrl_lang.envs.wordle.rules import feedback
from torchrl_lang.envs.wordle.task import WordleTask
from torchrl_lang.evaluation import KnownValues, rank_accuracy
from torchrl_lang.evaluation.value_report import rank_correlation
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.text import CharTokenizer

TOKENIZER = CharTokenizer.from_alphabet("abcd")
CONTROL = TOKENIZER.control


def colours_of(guess, word):
    return tuple(feedback(*WordIndex([guess, word]).letters).tolist()) if guess != word else (2,) * 5


@pytest.mark.parametrize(
    ("learned", "exact", "expected"),
    [
        ([1.0, 2.0, 3.0], [10.0, 20.0, 90.0], 1.0),
        ([3.0, 2.0, 1.0], [10.0, 20.0, 90.0], -1.0),
        ([1.0, 3.0, 2.0], [1.0, 2.0, 3.0], 0.5),  # 1 - 6 * (0 + 1 + 1) / (3 * 8)
        ([0.0, 0.0, 1.0], [1.0, 2.0, 3.0], math.sqrt(0.75)),  # ranks 0.5, 0.5, 2: equal values share their mean
        ([3.0, 1.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0], -1 / math.sqrt(22.5)),  # ranks 2.5, 0, 2.5, 1
        ([5.0, 5.0, 5.0], [1.0, 2.0, 3.0], math.nan),
    ],
)
def test_rank_correlation_by_hand(learned, exact, expected):
    found = rank_correlation(torch.tensor(learned), torch.tensor(exact))
    assert found == pytest.approx(expected, nan_ok=True)


class LastToken(nn.Module):
    """Values of the end of the action that depend on the last token only; all others are large."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, hidden):
        table = torch.full((len(hidden), 2, TOKENIZER.vocab_size), 100.0)
        table[:, 0, CONTROL.end_of_action] = self.values[hidden[:, 0].long()]
        return table


def test_the_value_of_an_utterance_is_the_least_q_of_its_end():
    """The trunk shows tokens, so the learned value of an utterance is that of its last token."""

    class ShowTokens(nn.Module):
        def forward(self, tokens, attention_mask):
            assert torch.equal(attention_mask, tokens != CONTROL.pad)
            return tokens[..., None].float()

    lm = causal_lm(vocab_size=TOKENIZER.vocab_size, layers=1, width=8, heads=2, max_length=8)
    actor = language_actor(lm)
    actor.module[0] = TensorDictModule(ShowTokens(), in_keys=["tokens", "attention_mask"], out_keys=["hidden"])
    a, b, c, d = TOKENIZER.encode("abcd")
    values = torch.zeros(TOKENIZER.vocab_size)
    values[[a, b, c, d]] = torch.tensor([4.0, 1.0, 2.0, 3.0])
    qvalue = TensorDictModule(LastToken(values.tolist()), in_keys=["hidden"], out_keys=["action_value"])
    row = torch.tensor([CONTROL.begin_action])
    first = KnownValues(row, torch.tensor([[a, b], [a, c], [b, d]]), torch.tensor([-3.0, -2.0, -1.0]))  # learned 1 2 3
    second = KnownValues(torch.tensor([CONTROL.begin_action, a]), torch.tensor([[a], [b]]), torch.tensor([0.0, 1.0]))
    same = KnownValues(row, torch.tensor([[a], [b]]), torch.tensor([1.0, 1.0]))
    assert rank_accuracy(actor, qvalue, [first], CONTROL) == pytest.approx(1.0)
    for batch_size in (1, 4, 256):
        found = rank_accuracy(actor, qvalue, [first, second, same], CONTROL, batch_size=batch_size)
        assert found == pytest.approx(0.0)  # 1 and -1
    equal = KnownValues(row, torch.tensor([[a], [a]]), torch.tensor([0.0, 1.0]))  # learned values without an order: 0
    assert rank_accuracy(actor, qvalue, [first, equal], CONTROL) == pytest.approx(0.5)
    assert math.isnan(rank_accuracy(actor, qvalue, [same], CONTROL))


def test_exact_values_are_those_of_all_ways_to_play():
    """Every plan for a set of words is tried: a guess for each set that may be left, itself one of its words."""
    words = demo_words(12)
    exact = ExactValues(words)
    colours = {pair: colours_of(*pair) for pair in product(words, repeat=2)}

    @cache
    def total(left):  # the summed return of the best plan
        return max(after(guess, left) for guess in left)

    def after(guess, left):
        groups = {}
        for word in left:
            groups.setdefault(colours[guess, word], []).append(word)
        return sum(total(tuple(group)) - len(group) for group in groups.values() if group != [guess])

    for candidates in [(0,), (0, 1), (2, 5, 7), tuple(range(12))]:
        left = tuple(words[i] for i in candidates)
        expected = [after(guess, left) / len(left) for guess in left]
        assert exact.guesses(candidates) == pytest.approx(expected)


def test_exact_values_by_hand():
    # "crane" does not tell the other two apart: of three games one is won at once, one costs 1, one costs 2.
    assert ExactValues(["crane", "slate", "slave"]).guesses((0, 1, 2)) == pytest.approx([-1.0, -2 / 3, -2 / 3])


def test_a_graph_knows_the_values_of_the_first_moves():
    task = RandomWalksTask(nodes=8, out_degree=2, graph_seed=1, max_turns=8)
    _, records = task.evaluate(task.player("random", 0).policy, games=64, seed=0)
    known = task.known_values(records.rows)
    assert {int(state.tokens[1]) for state in known} == set(range(1, 8))
    for state in known:
        node = int(state.tokens[1])
        assert state.utterances[:, 0].tolist() == task.graph.edges[node].nonzero()[:, 0].tolist()
        assert state.values.max() == -task.graph.distance[node]


@pytest.mark.slow
def test_wordle_knows_the_values_of_second_guesses_where_several_words_are_left():
    task = WordleTask.of("50")
    _, records = task.evaluate(task.player("mediocre", 0).policy, games=200, seed=0)
    known = task.known_values(records.rows)
    assert len(known) > 3
    assert len({tuple(state.tokens.tolist()) for state in known}) == len(known)
    tokenizer = task.tokenizer()
    for state in known:
        first = tokenizer.decode(state.tokens[1:6].tolist())
        shown = tuple(map(tokenizer.encode("<b><y><g>").index, state.tokens[7:12].tolist()))
        words = [tokenizer.decode(word.tolist()) for word in state.utterances]
        assert words == [word for word in task.words if colours_of(first, word) == shown]
        assert len(words) >= 5
        assert state.values.tolist() == pytest.approx(
            ExactValues(list(task.words)).guesses(tuple(map(task.words.index, words)))
        )


def test_tasks_without_exact_values_know_none():
    from torchrl_lang.recipes.tasks.base import Task

    assert Task.known_values(WordleTask.of("5"), None) == []
