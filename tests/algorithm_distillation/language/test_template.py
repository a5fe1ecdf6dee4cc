"""Text of steps is read as the same steps, and rows of windows are that text: with every template, ends included."""

import pytest
import torch

from tests.algorithm_distillation.language import examples
from torchrl_lang.algorithm_distillation.language import (
    Quantizer,
    StepRows,
    StepTemplate,
    steps_to_text,
    template_tokenizer,
)
from torchrl_lang.algorithm_distillation.language.step_rows import StepTokens
from torchrl_lang.algorithm_distillation.language.template import TokenKind, parse_steps
from torchrl_lang.schema import check_row
from torchrl_lang.text import word_tokenizer


def check_equal(found, expected):
    assert set(found.keys()) == set(expected.keys())
    for key in expected.keys():
        assert found[key].dtype == expected[key].dtype, key
        assert torch.equal(found[key], expected[key]), key


def quantised(steps, template):
    """The steps as the template's quantizers read them."""
    steps = steps.clone()
    steps["reward"] = template.reward.quantise(steps["reward"])
    for key, numbers in (("observation", template.observation), ("action", template.action)):
        columns = [each.quantise(steps[key][:, place]) for place, each in enumerate(numbers)]
        steps[key] = torch.stack(columns, -1)
    return steps


@pytest.mark.parametrize("numbers", ["discrete", "bins", "decimals"])
def test_histories_are_read_as_they_were_quantised(kind, numbers, generator):
    is_discrete = numbers == "discrete"
    template = examples.discrete_template(kind) if is_discrete else examples.continuous_template(kind, numbers)
    for steps in examples.random_histories(generator, 50, continuous=not is_discrete):
        found = parse_steps(steps_to_text(steps, template), template)
        check_equal(found, quantised(steps, template) if numbers == "bins" else steps)
        assert steps_to_text(found, template) == steps_to_text(steps, template)


def test_the_words_of_a_step(kind, generator):
    steps = examples.random_steps(generator, 3)
    steps["observation"] = torch.tensor([[3, 4], [3, 5], [0, 0]])
    steps["action"], steps["reward"] = torch.tensor([4, 2, 0]), torch.tensor([[0.0], [1.0], [0.0]])
    steps["done"] = torch.tensor([[False], [True], [True]])
    steps["terminated"] = torch.tensor([[False], [True], [False]])
    expected = {
        "compact": "3 4 east 0 3 5 south 1! 0 0 stay 0/",
        "spelled": "at 3 4 go east got 0 at 3 5 go south got 1 finished at 0 0 go stay got 0 stopped",
        "sparse": "3 4 east 3 5 south got 1 finished 0 0 stay stopped",
    }
    assert steps_to_text(steps, examples.discrete_template(kind)) == expected[kind]


def test_integers_as_decimals_are_read_as_integers(kind, generator):
    digits = Quantizer.decimals()
    template = StepTemplate(kind, [digits, digits], digits, Quantizer([0, 1, 2]))
    steps = examples.random_steps(generator, 20)
    steps["observation"] += 2**53
    check_equal(parse_steps(steps_to_text(steps, template), template), steps)


@pytest.mark.parametrize("reward", [Quantizer.decimals(), Quantizer([-0.0, 0.5])])
def test_a_reward_of_minus_zero_keeps_its_sign(kind, reward, generator):
    """A template that leaves zero rewards out writes it."""
    steps = examples.random_steps(generator, 2)
    steps["reward"] = torch.tensor([[-0.0], [0.5]])
    template = StepTemplate(kind, [examples.CELLS, examples.CELLS], Quantizer(range(5)), reward)
    text = steps_to_text(steps, template)
    assert parse_steps(text, template)["reward"].signbit().tolist() == [[True], [False]]
    if template.is_finite:
        tokenizer = template_tokenizer(template)
        (row,) = StepRows(template, tokenizer)(steps[None])
        assert tokenizer.decode(row["tokens"][row["attention_mask"]][1:].tolist()) == f" {text}"


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("at 3 4 go east", 1),
        ("at 3 4 went east got 0", 1),
        ("at 3 4 go up got 0", 1),
        ("at 3 4 go east got 0 3", 2),
        ("at 3 4 go east got 0 finished at 3 4 go east got 0? stopped", 2),
    ],
)
def test_a_wrong_step_is_named(text, step):
    with pytest.raises(ValueError, match=f"Step {step} of the text"):
        parse_steps(text, examples.discrete_template("spelled"))


NUMBER, MOVE = Quantizer(range(3)), Quantizer([0], ["go"])
ORDER, TWICE = "A pattern has words and", "could be read in two ways"


@pytest.mark.parametrize(
    ("rest", "reward", "message"),
    [
        ("{reward}", NUMBER, ORDER),
        ("{reward} {reward}{end:a|b}", NUMBER, ORDER),
        ("{rewards} {end:a|b}", NUMBER, ORDER),
        ("{reward} {end:a|}", NUMBER, ORDER),
        ("[{reward}] {end:a|b}", NUMBER, ORDER),
        ("[got {reward}{end:a|b}]", NUMBER, ORDER),
        ("[2 {reward}] {end:a|b}", NUMBER, rf"\['2'\] {TWICE}"),
        ("{reward} {end:1|b}", NUMBER, rf"\['1'\] {TWICE}"),
        ("{reward}{end:0|b}", Quantizer([1, 10]), rf"\['10'\] {TWICE}"),
        ("{reward}{end:e5|!}", Quantizer.decimals(), rf"\['e5'\] {TWICE}"),
        ("[55.0 {reward}] {end:a|b}", Quantizer.decimals(), rf"\['55.0'\] {TWICE}"),
        ("{reward} {end:a|a}", NUMBER, rf"\['a'\] {TWICE}"),
    ],
)
def test_templates_that_could_not_be_read_back_raise(rest, reward, message):
    with pytest.raises(ValueError, match=message):
        StepTemplate("{observation} {action} " + rest, NUMBER, MOVE, reward)


def test_an_action_of_several_tokens_is_refused():
    template = StepTemplate("spelled", [Quantizer(range(3))], Quantizer([0, 1], ["go", "stay"]), Quantizer([0]))
    assert len(StepTokens(template, word_tokenizer(["to go", "to stay"])).action_words()[0]) == 2
    with pytest.raises(ValueError, match="A word of the action is several tokens"):
        StepTokens(template, word_tokenizer(["to go"])).action_words()


def test_a_row_worked_out_by_hand(generator):
    template = StepTemplate("spelled", [Quantizer(range(3))], Quantizer([0, 1], ["west", "east"]), Quantizer([0, 2]))
    tokenizer = template_tokenizer(template)
    steps = examples.random_steps(generator, 1, 2, components=1)
    steps["observation"], steps["action"] = torch.tensor([[[2], [1]]]), torch.tensor([[1, 0]])
    steps["reward"] = torch.tensor([[[2.0], [0.0]]])
    steps["done"], steps["terminated"] = torch.tensor([[[True], [False]]]), torch.tensor([[[False], [False]]])
    row = StepRows(template, tokenizer)(steps)[0]
    words = [tokenizer.symbols[id] for id in row["tokens"]]
    expected = ["<s>", " at", " 2", " go", " east", " got", " 2", " stopped", " at", " 1", " go", " west", " got", " 0"]
    assert words == [*expected, "<|pad|>"]
    assert row["attention_mask"].tolist() == [True] * 14 + [False]
    assert row["agent_mask"].nonzero().flatten().tolist() == [4, 11]
    assert row["token_reward"].nonzero().flatten().tolist() == [4]
    assert row["token_reward"][4] == 2
    assert row["token_kind"].tolist() == [0, 0, 1, 0, 2, 0, 3, 4, 0, 1, 0, 2, 0, 3, 0]


@pytest.mark.parametrize("numbers", ["discrete", "spelled", "bins", "decimals"])
def test_rows_are_the_text_of_their_steps(kind, numbers, generator):
    is_discrete = numbers in ("discrete", "spelled")
    template = examples.discrete_template(kind) if is_discrete else examples.continuous_template(kind, numbers)
    tokenizer = word_tokenizer(["go"]) if numbers == "spelled" else template_tokenizer(template)
    windows = examples.random_steps(generator, 20, 15, continuous=not is_discrete)
    rows, every = (StepRows(template, tokenizer, loss_on=on)(windows) for on in ("actions", "all"))
    assert torch.equal(every["tokens"], rows["tokens"])
    assert torch.equal(every["agent_mask"][:, 1:], rows["attention_mask"][:, 1:])
    assert not every["agent_mask"][:, 0].any()
    check_row(rows, vocab_size=tokenizer.vocab_size)
    for row, steps in zip(rows, windows, strict=True):
        text = [id for word in steps_to_text(steps, template).split() for id in tokenizer.encode(f" {word}")]
        assert row["tokens"][row["attention_mask"]].tolist() == [tokenizer.control.begin_state, *text]
        assert torch.equal(row["agent_mask"], row["token_kind"] == TokenKind.ACTION)
        assert row["token_reward"].sum() == pytest.approx(float(steps["reward"].sum()), abs=1e-5)
