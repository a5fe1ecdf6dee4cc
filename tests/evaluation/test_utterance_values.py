"""Preference rates, rank accuracy and advantages of texts by hand, and the exact values that tasks know."""

import math
import statistics
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
from torchrl_lang.evaluation import Comparison, KnownValues, preference_rates, rank_accuracy, text_advantages
from torchrl_lang.evaluation.utterance_values import rank_correlation, row_advantages
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows

TOKENIZER = CharTokenizer.from_alphabet("abcd")
CONTROL = TOKENIZER.control
A, B, C, D = TOKENIZER.encode("abcd")


class ShowTokens(nn.Module):
    """A trunk whose state is the last token and the number of tokens read."""

    def forward(self, tokens, attention_mask):
        return torch.stack([tokens, attention_mask.cumsum(-1)], -1).float()


class Table(nn.Module):
    """Two heads: the first is ``10 * last token + next token``, the second larger."""

    def forward(self, hidden):
        first = 10 * hidden[:, :1] + torch.arange(TOKENIZER.vocab_size)
        return torch.stack([first, first + 1], 1)


class Count(nn.Module):
    """The number of tokens read."""

    def forward(self, hidden):
        return hidden[:, 1:]


NETS = {"action_value": Table(), "state_value": Count()}
HEADS = [TensorDictModule(net, in_keys=["hidden"], out_keys=[key]) for key, net in NETS.items()]


@pytest.fixture
def actor():
    actor = language_actor(causal_lm(vocab_size=TOKENIZER.vocab_size, layers=1, width=8, heads=2, max_length=16))
    actor.module[0] = TensorDictModule(ShowTokens(), in_keys=["tokens", "attention_mask"], out_keys=["hidden"])
    return actor


def test_preference_rates_by_hand(actor):
    short, long = torch.tensor([CONTROL.begin_action]), torch.tensor([CONTROL.begin_action, D, C])
    pairs = [
        Comparison(short, torch.tensor([B, A]), torch.tensor([A, D])),  # b > a; 10b + a > 10a + d; end after a, d
        Comparison(long, torch.tensor([C, C]), torch.tensor([C, B])),  # equal; c > b; end after c > b
    ]
    for batch_size in (1, 256):
        rates = preference_rates(actor, HEADS[0], pairs, CONTROL, batch_size=batch_size)
        assert rates.tolist() == [0.75, 1.0, 0.5]
    for wrong in ([], [Comparison(short, torch.tensor([A]), torch.tensor([A, B]))]):
        with pytest.raises(ValueError, match=f"{len(wrong)} pairs"):
            preference_rates(actor, HEADS[0], wrong, CONTROL)


def expected(tokens, place):
    """Least Q minus V of a token."""
    return 10 * tokens[place - 1] + tokens[place] - place


def test_advantages_of_rows_and_texts_by_hand(actor):
    turns = [Turn("ab", 0.0), Turn("c"), Turn("ab", 0.0)]
    data = to_rows([Episode(turns, True), Episode([Turn("d", 1.0)], True)], TOKENIZER, 16)
    tokens = data["tokens"].tolist()
    for row, mask, ids in zip(row_advantages(actor, *HEADS, data), data["agent_mask"], tokens, strict=True):
        assert row.tolist() == [expected(ids, place) if mask[place] else 0 for place in range(len(row))]
    # The means of sums without ends.
    found = {one.text: one for one in text_advantages(actor, *HEADS, data, TOKENIZER, batch_size=1)}
    sums = [expected(tokens[0], i) + expected(tokens[0], i + 1) for i, token in enumerate(tokens[0]) if token == A]
    assert found["ab"].advantage == pytest.approx(statistics.mean(sums))
    assert (found["ab"].count, found["d"].count, len(found)) == (2, 1, 2)
    single = text_advantages(actor, *HEADS, data, TOKENIZER, ngram=1)
    assert {one.text: one.count for one in single} == {"a": 2, "b": 2, "d": 1}
    assert [one.advantage for one in single] == sorted((one.advantage for one in single), reverse=True)
    assert [one.text for one in text_advantages(actor, *HEADS, data, TOKENIZER, ngram=2, min_count=2)] == ["ab"]
    assert text_advantages(actor, *HEADS, data, TOKENIZER, ngram=3) == []
    with pytest.raises(ValueError, match="ngram"):
        text_advantages(actor, *HEADS, data, TOKENIZER, ngram=0)


@pytest.mark.parametrize(
    ("learned", "exact", "correlation"),
    [
        ([1.0, 2.0, 3.0], [10.0, 20.0, 90.0], 1.0),
        ([1.0, 3.0, 2.0], [1.0, 2.0, 3.0], 0.5),  # 1 - 6 * (0 + 1 + 1) / (3 * 8)
        ([0.0, 0.0, 1.0], [1.0, 2.0, 3.0], math.sqrt(0.75)),  # ranks 0.5, 0.5, 2: equal values share their mean
        ([3.0, 1.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0], -1 / math.sqrt(22.5)),  # ranks 2.5, 0, 2.5, 1
        ([5.0, 5.0, 5.0], [1.0, 2.0, 3.0], math.nan),
    ],
)
def test_rank_correlation_by_hand(learned, exact, correlation):
    assert rank_correlation(torch.tensor(learned), torch.tensor(exact)) == pytest.approx(correlation, nan_ok=True)


def test_rank_accuracy_by_hand(actor):
    """The learned value of an utterance is the least Q of its end, here ten times its last token."""
    row = torch.tensor([CONTROL.begin_action])
    first = KnownValues(row, torch.tensor([[D, B], [A, C], [B, D]]), torch.tensor([-3.0, -2.0, -1.0]))
    second = KnownValues(torch.tensor([CONTROL.begin_action, A]), torch.tensor([[B], [A]]), torch.tensor([0.0, 1.0]))
    same = KnownValues(row, torch.tensor([[A], [B]]), torch.tensor([1.0, 1.0]))
    assert rank_accuracy(actor, HEADS[0], [first], CONTROL) == pytest.approx(1.0)
    for batch_size in (1, 4, 256):
        found = rank_accuracy(actor, HEADS[0], [first, second, same], CONTROL, batch_size=batch_size)
        assert found == pytest.approx(0.0)  # 1 and -1
    equal = KnownValues(row, torch.tensor([[A], [A]]), torch.tensor([0.0, 1.0]))  # learned values without an order: 0
    assert rank_accuracy(actor, HEADS[0], [first, equal], CONTROL) == pytest.approx(0.5)
    assert math.isnan(rank_accuracy(actor, HEADS[0], [same], CONTROL))


# -- exact values ------------------------------------------------------------------------------------------------------


def colours_of(guess, word):
    return tuple(feedback(*WordIndex([guess, word]).letters).tolist()) if guess != word else (2,) * 5


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
        assert exact.guesses(candidates) == pytest.approx([after(guess, left) / len(left) for guess in left])


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
    task = WordleTask.of("40")
    _, records = task.evaluate(task.player("mediocre", 0).policy, games=100, seed=0)
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
        places = tuple(map(task.words.index, words))
        assert state.values.tolist() == pytest.approx(ExactValues(list(task.words)).guesses(places))
