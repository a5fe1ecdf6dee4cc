"""Metrics against plain loops, and a tiny model that learns to predict rewards."""

import numpy as np
import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical

from tests.algorithm_distillation.language.conftest import continuous_template, discrete_template, random_steps
from torchrl_lang.algorithm_distillation import LearningHistory
from torchrl_lang.algorithm_distillation.language import (
    Bins,
    BlockTemplate,
    HistoryDataset,
    Levels,
    StepRows,
    StepTemplate,
    TextHistory,
    next_token_metrics,
    pack_blocks,
    rank_correlation,
    reward_accuracy,
    template_tokenizer,
)
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
    tokenizer = template_tokenizer(template)
    rows = StepRows(template, tokenizer)(random_steps(generator, 9, 12))
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
    truth, best, mean = np.array(truth), np.array(best), np.array(mean)
    share = np.bincount(truth) / len(truth)
    expected = {
        "exact": (truth == best).mean(),
        "within_one": (abs(truth - best) <= 1).mean(),
        "rank_correlation": np.corrcoef(ranks(mean), ranks(truth))[0, 1],
        "squared_error": ((truth - mean) ** 2).mean(),
        "constant_exact": share.max(),
        "constant_within_one": 1.0,  # the middle one of three
        "constant_squared_error": truth.var(),
    }
    found = reward_accuracy(actor, rows, template, tokenizer, chunk=4)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found == pytest.approx(reward_accuracy(actor, rows, template, tokenizer), abs=1e-6)


def ranks(values):
    return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])


def test_rank_correlation_with_ties():
    first, second = torch.tensor([1.0, 1.0, 2.0, 5.0]), torch.tensor([3.0, 0.0, 0.0, 9.0])
    assert rank_correlation(first, second) == pytest.approx(
        np.corrcoef(ranks(first.numpy()), ranks(second.numpy()))[0, 1]
    )
    assert rank_correlation(first, torch.zeros(4)) == 0
    assert rank_correlation(first, -first) == pytest.approx(-1)


def test_next_tokens_are_those_of_a_plain_loop(kind, generator):
    template = discrete_template(kind)
    tokenizer = template_tokenizer(template)
    rows = StepRows(template, tokenizer)(random_steps(generator, 5, 8))
    actor = table_actor(tokenizer.vocab_size)
    found = next_token_metrics(actor, rows, chunk=2)
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


def test_rewards_of_text_tasks():
    template = BlockTemplate(Bins(0, 1, 5))
    tokenizer = word_tokenizer([], symbols=template.vocabulary())
    draw = torch.rand(20, generator=torch.Generator().manual_seed(0)).tolist()
    records = [TextHistory(query="q", response="r", rewards=(reward,)) for reward in draw]
    rows = pack_blocks(records, template, tokenizer, 128).rows
    found = reward_accuracy(table_actor(tokenizer.vocab_size), rows, template, tokenizer)
    bins = np.minimum(np.array(draw) * 5, 4).astype(int)
    assert found["constant_exact"] == pytest.approx(np.bincount(bins).max() / 20)
    near = max(np.mean(abs(bins - number) <= 1) for number in range(5))
    assert found["constant_within_one"] == pytest.approx(near)


def test_templates_without_a_token_for_each_reward_raise(generator):
    steps = random_steps(generator, 2, 5, continuous=True)
    template = continuous_template("compact", "decimals")
    tokenizer = template_tokenizer(template)
    actor = table_actor(tokenizer.vocab_size)
    with pytest.raises(ValueError, match="finitely many rewards: give the template Bins or Levels"):
        reward_accuracy(actor, StepRows(template, tokenizer)(steps), template, tokenizer)
    template, steps = discrete_template("sparse"), random_steps(generator, 2, 5)
    tokenizer = template_tokenizer(template)
    with pytest.raises(ValueError, match="leaves zeros out"):
        reward_accuracy(actor, StepRows(template, tokenizer)(steps), template, tokenizer)
    template, tokenizer = discrete_template("compact"), word_tokenizer([])
    with pytest.raises(ValueError, match="A reward is several tokens"):
        reward_accuracy(actor, StepRows(template, tokenizer)(steps), template, tokenizer)
    rows = StepRows(template, template_tokenizer(template))(steps)
    with pytest.raises(KeyError, match="token_kind"):
        next_token_metrics(actor, rows.exclude("token_kind"))


@pytest.mark.slow
def test_a_tiny_model_learns_to_predict_rewards():
    """Rooms of nine cells with hidden goals: the context shows where the reward is."""
    env = DarkRoomEnv(3, task=torch.arange(9)[:, None], batch_size=[9, 12], episode_length=6, seed=0)
    source = NoisyExpert(env, 60, seed=0)
    history = LearningHistory(source.history(), source.tasks)
    moves = Levels(range(5), ["stay", "north", "south", "west", "east"])
    template = StepTemplate.compact([Levels(range(3))] * 2, moves, Levels([0, 1]))
    tokenizer = template_tokenizer(template)
    options = {"template": template, "tokenizer": tokenizer, "at_episode_start": True}
    rows = HistoryDataset(history, "language", 30, loss_on="all", **options)
    torch.manual_seed(0)
    actor = language_actor(causal_lm(vocab_size=tokenizer.vocab_size, layers=2, width=32, heads=2, max_length=121))
    loss, draw = BCLoss(actor), torch.Generator().manual_seed(0)

    def batch():
        return rows[torch.randint(len(rows), (32,), generator=draw).tolist()]

    for _ in train_steps(loss, batch, adamw(loss, 5e-3), steps=STEPS, max_grad_norm=1.0):
        pass
    fresh = NoisyExpert(env, 30, seed=1)  # other histories of the same rooms
    held_out = StepRows(template, tokenizer)(fresh.history().flatten(0, 1))
    found = reward_accuracy(actor, held_out, template, tokenizer)
    assert found["exact"] > found["constant_exact"] + 0.1
    assert found["squared_error"] < 0.7 * found["constant_squared_error"]
    assert found["rank_correlation"] > 0.5
    tokens = next_token_metrics(actor, held_out)
    assert tokens["accuracy/observation"] > 0.8


STEPS = 150
