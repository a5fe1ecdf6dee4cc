"""Metrics against plain loops, and a tiny model that learns to predict rewards."""

from functools import cache

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical

from tests.algorithm_distillation.language.examples import discrete_template, random_steps
from torchrl_lang.algorithm_distillation import language
from torchrl_lang.algorithm_distillation.language.template import TokenKind
from torchrl_lang.algorithm_distillation.sources import NoisyExpert
from torchrl_lang.envs.grids import DarkRoomEnv
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.objectives import BCLoss
from torchrl_lang.text import word_tokenizer
from torchrl_lang.training import adamw, train_steps


def table_actor(vocabulary, seed=0):
    """An actor whose logits are a random function of the last two tokens."""
    table = torch.randn(vocabulary, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2

    def logits(tokens):
        before = torch.cat([tokens[:, :1], tokens[:, :-1]], -1)
        return table[before, tokens]

    return ProbabilisticTensorDictSequential(
        TensorDictModule(logits, in_keys=["tokens"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["next_token"], distribution_class=Categorical),
    )


def predictions(actor, rows):
    """Probabilities of the next token, and that token, at each place of each row; in plain loops."""
    probability = actor.get_dist(rows.clone()).probs.double().numpy()
    for row in range(len(rows)):
        for place in range(1, int(rows["attention_mask"][row].sum())):
            kind = int(rows["token_kind"][row, place])
            yield probability[row, place - 1], int(rows["tokens"][row, place]), kind


@pytest.mark.parametrize("kind", ["compact", "spelled"])
def test_rewards_are_predicted_as_in_a_plain_loop(kind, generator):
    template = discrete_template(kind)
    tokenizer = language.template_tokenizer(template)
    rows = language.StepRows(template, tokenizer)(random_steps(generator, 9, 12))
    actor = table_actor(tokenizer.vocab_size)
    truth, best, mean = [], [], []
    ends = ["", "!", "/"] if kind == "compact" else [""]
    for probability, token, kind_of in predictions(actor, rows):
        if kind_of == 3:
            each = [sum(probability[tokenizer.encode(f" {r}{end}")[0]] for end in ends) for r in range(3)]
            truth.append(int(tokenizer.symbols[token].strip(" !/")))
            best.append(int(np.argmax(each)))
            mean.append(float(np.dot(each, range(3)) / sum(each)))
    assert len(truth) == 9 * 12
    expected = expected_accuracy(range(3), truth, best, mean)
    found = language.reward_accuracy(actor, rows, template, tokenizer, chunk=4)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found == pytest.approx(language.reward_accuracy(actor, rows, template, tokenizer), abs=1e-6)


def expected_accuracy(values, truth, best, mean):
    """What is reported of true rewards, of the most likely ones and of those expected."""
    truth, best, mean = map(np.array, (truth, best, mean))
    place, chosen = (np.searchsorted(values, each) for each in (truth, best))
    share = np.bincount(place, minlength=len(values)) / len(truth)
    return {
        "exact": (truth == best).mean(),
        "within_one": (abs(chosen - place) <= 1).mean(),
        "rank_correlation": np.corrcoef(ranks(mean), ranks(truth))[0, 1],
        "squared_error": ((truth - mean) ** 2).mean(),
        "constant_exact": share.max(),
        "constant_within_one": max(share[max(0, at - 1) : at + 2].sum() for at in range(len(values))),
        "constant_squared_error": truth.var(),
    }


def ranks(values):
    return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])


def test_next_tokens_are_those_of_a_plain_loop(kind, generator):
    template = discrete_template(kind)
    tokenizer = language.template_tokenizer(template)
    rows = language.StepRows(template, tokenizer)(random_steps(generator, 5, 8))
    actor = table_actor(tokenizer.vocab_size)
    found = language.next_token_metrics(actor, rows, chunk=2)
    every = list(predictions(actor, rows))
    names = {1: "observation", 2: "action", 3: "reward", 0: "format", 4: "end"}
    for number, name in [(None, ""), *names.items()]:
        own = [(p[token], int(p.argmax()) == token) for p, token, of in every if number in (None, of)]
        if not own:
            assert f"loss/{name}" not in found
            continue
        suffix = f"/{name}" * bool(name)
        assert found["loss" + suffix] == pytest.approx(-np.log([p for p, _ in own]).mean(), abs=1e-5)
        assert found["accuracy" + suffix] == pytest.approx(np.mean([hit for _, hit in own]), abs=1e-6)
    bc = BCLoss(actor, transition_weight=1)(rows)["loss_actor"]
    assert found["loss"] == pytest.approx(float(bc), abs=1e-5)


@pytest.mark.slow
def test_a_tiny_model_learns_to_predict_rewards():
    """Rooms of nine cells with hidden goals: the context shows where the reward is."""
    env = DarkRoomEnv(3, task=torch.arange(9)[:, None], batch_size=[9, 12], episode_length=6, seed=0)
    moves = language.Quantizer(range(5), ["stay", "north", "south", "west", "east"])
    template = language.StepTemplate("compact", [language.Quantizer(range(3))] * 2, moves, language.Quantizer([0, 1]))
    tokenizer = language.template_tokenizer(template)
    rows_of = language.StepRows(template, tokenizer, loss_on="all")
    steps = NoisyExpert(env, 60, seed=0).history().flatten(0, 1).unflatten(1, (3, 20)).flatten(0, 1)
    rows, draw = rows_of(steps), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    length = rows["tokens"].shape[1]
    actor = language_actor(causal_lm(vocab_size=tokenizer.vocab_size, layers=2, width=32, heads=2, max_length=length))
    loss = BCLoss(actor)

    def batch():
        return rows[torch.randint(len(rows), (24,), generator=draw)]

    for _ in train_steps(loss, batch, adamw(loss, 4e-3), steps=400, max_grad_norm=1.0):
        pass
    held_out = rows_of(NoisyExpert(env, 20, seed=1).history().flatten(0, 1))  # other histories of the same rooms
    found = language.reward_accuracy(actor, held_out, template, tokenizer)
    tokens = language.next_token_metrics(actor, held_out)
    assert found["exact"] > found["constant_exact"] + 0.1
    assert found["squared_error"] < 0.7 * found["constant_squared_error"]
    assert found["rank_correlation"] > 0.5
    assert tokens["accuracy/observation"] > 0.45  # a third without learning


VALUES = [-10.0, -1.0006, -1.0005, -1.0, 0.0, 3.0]
"""The digits of -1.0 are the first ones of others."""


@pytest.fixture
def tokenizer():
    return word_tokenizer([], symbols=language.BlockTemplate().vocabulary())


def packed(tokenizer, row_length=150):
    draw = np.random.default_rng(0)
    rewards = [*draw.choice(VALUES, 7, p=[0.1, 0.1, 0.1, 0.3, 0.3, 0.1]), 3.0]
    records = [language.TextRecord(query=f"q{at}", response="r", reward=float(each)) for at, each in enumerate(rewards)]
    return language.pack_blocks(records, language.BlockTemplate(), tokenizer, row_length).rows, np.array(rewards)


def plain_probabilities(actor, context, sequences):
    """Of each sequence of tokens after a context, if nothing but these sequences may be written; in plain loops."""

    @cache
    def odds_after(prefix):
        tokens = torch.tensor([[*context, *prefix]])
        row = {"tokens": tokens, "attention_mask": torch.ones_like(tokens, dtype=torch.bool)}
        with torch.no_grad():
            return actor.get_dist(TensorDict(row, [1])).probs[0, -1].double()

    found = np.ones(len(sequences))
    for number, sequence in enumerate(sequences):
        for place, token in enumerate(sequence):
            following = {each[place] for each in sequences if each[:place] == sequence[:place]}
            if len(following) > 1:
                odds = odds_after(sequence[:place])
                found[number] *= float(odds[token] / odds[sorted(following)].sum())
    return found


def test_rewards_in_digits_are_predicted_as_in_plain_loops(tokenizer):
    """Also where a row has no room for the longest reward in place of its last one."""
    rows, _ = packed(tokenizer)
    row_length = 1 + int((rows["attention_mask"].sum(-1) - 1).sum())
    rows, rewards = packed(tokenizer, row_length=row_length)
    assert rows["attention_mask"].all()
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 16, "heads": 2, "initializer_range": 0.5, "max_length": row_length + 8}
    actor = language_actor(causal_lm(vocab_size=tokenizer.vocab_size, **sizes))
    sequences = [tuple(tokenizer.encode(f" {value}") + tokenizer.encode("\n\n")[:1]) for value in VALUES]
    best, mean = [], []
    for row in rows:
        ids, kind = row["tokens"].tolist(), row["token_kind"].tolist()
        for place in range(1, len(ids)):
            if kind[place] == TokenKind.REWARD != kind[place - 1]:
                probability = plain_probabilities(actor, ids[:place], sequences)
                assert probability.sum() == pytest.approx(1)
                best.append(VALUES[probability.argmax()])
                mean.append(float(probability @ VALUES))
    assert len(best) == len(rewards) == 8
    expected = expected_accuracy(VALUES, rewards, best, mean)
    template = language.BlockTemplate()
    found = language.reward_accuracy(actor, rows, template, tokenizer, values=VALUES, chunk=2)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found == pytest.approx(language.reward_accuracy(actor, rows, template, tokenizer, values=VALUES), abs=1e-5)


def test_rewards_that_cannot_be_compared_raise(tokenizer, generator):
    blocks, steps = packed(tokenizer)[0], random_steps(generator, 2, 5)
    sparse, compact = discrete_template("sparse"), discrete_template("compact")
    rows = language.StepRows(compact, language.template_tokenizer(compact))(steps)
    for given, template, tokens, values, message in (
        (blocks, language.BlockTemplate(), tokenizer, None, "finitely many rewards"),
        (blocks, language.BlockTemplate(language.Quantizer.bins(0, 1, 3)), tokenizer, VALUES, "finitely many rewards"),
        (blocks, language.BlockTemplate(), tokenizer, VALUES[:-1], "give all rewards as values"),
        (blocks[:0], language.BlockTemplate(), tokenizer, VALUES, "The rows have no reward"),
        (rows, sparse, language.template_tokenizer(sparse), None, "must be one token"),
        (rows, compact, word_tokenizer([]), None, "must be one token"),
    ):
        with pytest.raises(ValueError, match=message):
            language.reward_accuracy(table_actor(9), given, template, tokens, values=values)
    with pytest.raises(KeyError, match="token_kind"):
        language.next_token_metrics(table_actor(9), rows.exclude("token_kind"))
