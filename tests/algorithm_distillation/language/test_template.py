"""Text of steps is read as the same steps: with every template, discrete and continuous, ends and numbers included."""

import pytest
import torch

from tests.algorithm_distillation.language.conftest import (
    CELLS,
    continuous_template,
    discrete_template,
    random_histories,
    random_steps,
)
from torchrl_lang.algorithm_distillation.language import (
    Quantizer,
    StepRows,
    StepTemplate,
    parse_steps,
    steps_to_text,
    template_tokenizer,
)


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


def test_discrete_histories_are_read_as_they_were(generator):
    templates = [discrete_template(kind) for kind in ("compact", "spelled", "sparse")]
    for number, steps in enumerate(random_histories(generator, 200)):
        template = templates[number % 3]
        check_equal(parse_steps(steps_to_text(steps, template), template), steps)


@pytest.mark.parametrize("numbers", ["bins", "decimals"])
def test_continuous_histories_are_read_as_they_were_quantised(numbers, generator):
    templates = [continuous_template(kind, numbers) for kind in ("compact", "spelled", "sparse")]
    for number, steps in enumerate(random_histories(generator, 100, continuous=True)):
        template = templates[number % 3]
        found = parse_steps(steps_to_text(steps, template), template)
        check_equal(found, steps if numbers == "decimals" else quantised(steps, template))
        assert steps_to_text(found, template) == steps_to_text(steps, template)


def test_the_words_of_a_step(kind, generator):
    steps = random_steps(generator, 3)
    steps["observation"] = torch.tensor([[3, 4], [3, 5], [0, 0]])
    steps["action"], steps["reward"] = torch.tensor([4, 2, 0]), torch.tensor([[0.0], [1.0], [0.0]])
    steps["done"] = torch.tensor([[False], [True], [True]])
    steps["terminated"] = torch.tensor([[False], [True], [False]])
    expected = {
        "compact": "3 4 east 0 3 5 south 1! 0 0 stay 0/",
        "spelled": "at 3 4 go east got 0 at 3 5 go south got 1 finished at 0 0 go stay got 0 stopped",
        "sparse": "3 4 east 3 5 south got 1 finished 0 0 stay stopped",
    }
    assert steps_to_text(steps, discrete_template(kind)) == expected[kind]


NUMBER, MOVE = Quantizer(range(3)), Quantizer([0], ["go"])


def test_integers_as_decimals_are_read_as_integers(kind, generator):
    template = StepTemplate(
        kind, [Quantizer.decimals(), Quantizer.decimals()], Quantizer.decimals(), Quantizer([0, 1, 2])
    )
    steps = random_steps(generator, 20)
    steps["observation"] += 2**53
    check_equal(parse_steps(steps_to_text(steps, template), template), steps)


@pytest.mark.parametrize("reward", [Quantizer.decimals(), Quantizer([-0.0, 0.5])])
def test_a_reward_of_minus_zero_keeps_its_sign(kind, reward, generator):
    """A template that leaves zero rewards out writes it."""
    steps = random_steps(generator, 2)
    steps["reward"] = torch.tensor([[-0.0], [0.5]])
    template = StepTemplate(kind, [CELLS, CELLS], Quantizer(range(5)), reward)
    text = steps_to_text(steps, template)
    assert parse_steps(text, template)["reward"].signbit().tolist() == [[True], [False]]
    if template.is_finite:
        tokenizer = template_tokenizer(template)
        (row,) = StepRows(template, tokenizer)(steps[None])
        assert tokenizer.decode(row["tokens"][row["attention_mask"]][1:].tolist()) == f" {text}"


def test_bins_without_a_zero_leave_no_reward_out(generator):
    """A reward of zero whose bin is read as another number is written."""
    template = StepTemplate(
        "sparse", [CELLS, CELLS], Quantizer(range(5)), Quantizer.bins(-1, 1, 4, prefix="r", outside="nearest")
    )
    steps = random_steps(generator, 5)
    steps["reward"] = torch.zeros(5, 1)
    assert steps_to_text(steps, template).split().count("got") == 5
    assert (parse_steps(steps_to_text(steps, template), template)["reward"] == 0.25).all()


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
        parse_steps(text, discrete_template("spelled"))


ORDER, TWICE = "A pattern has words and", "could be read in two ways"


@pytest.mark.parametrize(
    ("rest", "reward", "message"),
    [
        ("{reward}", NUMBER, ORDER),
        ("{end:a|b} {reward}", NUMBER, ORDER),
        ("{reward} {reward}{end:a|b}", NUMBER, ORDER),
        ("{rewards} {end:a|b}", NUMBER, ORDER),
        ("{reward} {end:a|}", NUMBER, ORDER),
        ("got:{reward} {end:a|b}", NUMBER, ORDER),
        ("[{reward}] {end:a|b}", NUMBER, ORDER),
        ("[got {reward}{end:a|b}]", NUMBER, ORDER),
        ("[2 {reward}] {end:a|b}", NUMBER, rf"\['2'\] {TWICE}"),
        ("{reward} {end:1|b}", NUMBER, rf"\['1'\] {TWICE}"),
        ("[a {reward}] {end:a|b}", NUMBER, rf"\['a'\] {TWICE}"),
        ("{reward}{end:0|b}", Quantizer([1, 10]), rf"\['10'\] {TWICE}"),
        ("{reward}{end:e5|!}", Quantizer.decimals(), rf"\['e5'\] {TWICE}"),
        ("{reward} {end:-1e-07|!}", Quantizer.decimals(), rf"\['-1e-07'\] {TWICE}"),
        ("[55.0 {reward}] {end:a|b}", Quantizer.decimals(), rf"\['55.0'\] {TWICE}"),
        ("{reward} {end:a|a}", NUMBER, rf"\['a'\] {TWICE}"),
    ],
)
def test_templates_that_could_not_be_read_back_raise(rest, reward, message):
    with pytest.raises(ValueError, match=message):
        StepTemplate("{observation} {action} " + rest, NUMBER, MOVE, reward)
