"""Rows of windows: the masks of a row worked out by hand, the fast path equal to the text, and losses on them."""

import pytest
import torch

from tests.algorithm_distillation.language.conftest import continuous_template, discrete_template, random_steps
from torchrl_lang.algorithm_distillation.language import (
    Quantizer,
    StepRows,
    StepTemplate,
    parse_steps,
    steps_to_text,
    template_tokenizer,
)
from torchrl_lang.algorithm_distillation.language.template import TokenKind
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.objectives import BCLoss
from torchrl_lang.schema import check_row
from torchrl_lang.text import word_tokenizer


def tokenizer_of(template, spelled):
    """With one token for each word, or one for each character but letters."""
    return word_tokenizer(["go"]) if spelled else template_tokenizer(template)


def test_a_row_worked_out_by_hand(generator):
    template = StepTemplate("spelled", [Quantizer(range(3))], Quantizer([0, 1], ["west", "east"]), Quantizer([0, 2]))
    tokenizer = template_tokenizer(template)
    steps = random_steps(generator, 1, 2, components=1)
    steps["observation"], steps["action"] = torch.tensor([[[2], [1]]]), torch.tensor([[1, 0]])
    steps["reward"] = torch.tensor([[[2.0], [0.0]]])
    steps["done"], steps["terminated"] = torch.tensor([[[True], [False]]]), torch.tensor([[[False], [False]]])
    row = StepRows(template, tokenizer)(steps, row_length=16)[0]
    words = [tokenizer.symbols[id] for id in row["tokens"]]
    expected = ["<s>", " at", " 2", " go", " east", " got", " 2", " stopped", " at", " 1", " go", " west", " got", " 0"]
    assert words == [*expected, "<|pad|>", "<|pad|>"]
    assert row["attention_mask"].tolist() == [True] * 14 + [False] * 2
    assert row["agent_mask"].nonzero().flatten().tolist() == [4, 11]
    assert row["token_reward"].nonzero().flatten().tolist() == [4]
    assert row["token_reward"][4] == 2
    assert row["token_kind"].tolist() == [0, 0, 1, 0, 2, 0, 3, 4, 0, 1, 0, 2, 0, 3, 0, 0]


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("loss_on", ["actions", "all"])
def test_the_fast_path_equals_the_text(kind, spelled, loss_on, generator):
    template = discrete_template(kind)
    tokenizer = tokenizer_of(template, spelled)
    windows = random_steps(generator, 20, 15)
    rows_of = StepRows(template, tokenizer, loss_on=loss_on)
    rows = rows_of(windows)
    for row, steps in zip(rows, windows, strict=True):
        text = [id for word in steps_to_text(steps, template).split() for id in tokenizer.encode(f" {word}")]
        assert row["tokens"][row["attention_mask"]].tolist() == [tokenizer.control.begin_state, *text]
    check_row(rows, vocab_size=tokenizer.vocab_size)


@pytest.mark.parametrize("numbers", ["discrete", "bins", "decimals"])
def test_rows_are_read_as_their_steps(kind, numbers, generator):
    is_discrete = numbers == "discrete"
    template = discrete_template(kind) if is_discrete else continuous_template(kind, numbers)
    tokenizer = template_tokenizer(template)
    windows = random_steps(generator, 6, 12, continuous=not is_discrete)
    rows = StepRows(template, tokenizer)(windows)
    check_row(rows, vocab_size=tokenizer.vocab_size)
    for row, steps in zip(rows, windows, strict=True):
        text = tokenizer.decode(row["tokens"][row["attention_mask"]][1:].tolist())
        found = parse_steps(text, template)
        for key in ("done", "terminated", "episode", "episode_step"):
            assert torch.equal(found[key], steps[key])
        if numbers != "bins":
            assert torch.equal(found["observation"], steps["observation"])
        own = row["agent_mask"] & (row["token_kind"] == TokenKind.ACTION)
        assert torch.equal(own, row["agent_mask"])
        assert row["token_reward"].sum() == pytest.approx(float(steps["reward"].sum()), abs=1e-5)


@pytest.mark.slow
def test_bc_trains_on_actions_or_on_all_tokens(generator):
    template = discrete_template("sparse")
    tokenizer = template_tokenizer(template)
    windows = random_steps(generator, 8, 10)
    actions, every = (StepRows(template, tokenizer, loss_on=on)(windows) for on in ("actions", "all"))
    torch.manual_seed(0)
    width = actions["tokens"].shape[-1]
    actor = language_actor(causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=width))
    both = BCLoss(actor, transition_weight=1)(actions)["loss_actor"]
    torch.testing.assert_close(BCLoss(actor)(every)["loss_actor"], both)
    logits = actor.get_dist(actions.clone()).logits.log_softmax(-1)
    total, count = 0.0, 0  # a plain loop
    for row in range(8):
        for place in range(1, int(actions["attention_mask"][row].sum())):
            if actions["agent_mask"][row, place]:
                total -= float(logits[row, place - 1, actions["tokens"][row, place]].detach())
                count += 1
    assert count == 80
    torch.testing.assert_close(
        BCLoss(actor, actor_normalizer="action")(actions)["loss_actor"], torch.tensor(total / count)
    )
