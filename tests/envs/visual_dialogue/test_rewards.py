"""Ends, rewards and metrics of dialogues, by hand."""

import pytest

from tests.envs.visual_dialogue.word_overlap import TOKENIZER
from torchrl_lang.envs.visual_dialogue import DialogueRewards, played_rounds
from torchrl_lang.envs.visual_dialogue.dialogue import Round
from torchrl_lang.envs.visual_dialogue.play import yes_no_rate
from torchrl_lang.envs.visual_dialogue.rewards import is_yes_no
from torchrl_lang.text import Episode, Turn, to_rows

ANSWERS = {  # which of "soft", "soft" with substrings, "hard" and "conservative" count them
    "1111": ("yes", "No"),
    "1101": ("no.", "yes, it is"),
    "0101": ("i don't know", "snow", "it's not", "eyes"),
    "0001": (
        *("i don\N{RIGHT SINGLE QUOTATION MARK}t think", "I can't see", "can\N{RIGHT SINGLE QUOTATION MARK}t see"),
        *("fairly big", "it could be", "I think so", "okay", "maybe", "it LOOKS old", "appears so", "hard to tell"),
        "mostly just grass",
    ),
    "0000": ("mostly grass", "two", ""),
}


@pytest.mark.parametrize(("counts", "answer"), [(key, text) for key, texts in ANSWERS.items() for text in texts])
def test_yes_no_answers(counts, answer):
    soft, substrings = is_yes_no(answer, "soft"), is_yes_no(answer, "soft", substrings=True)
    found = (soft, substrings, is_yes_no(answer, "hard"), is_yes_no(answer, "conservative"))
    assert found == tuple(each == "1" for each in counts)
    assert not is_yes_no(answer, "none")


@pytest.mark.parametrize(
    ("options", "initial", "progress", "stops"),
    [
        ({}, 0.5, [0.125, 0.125], True),  # 0.25 / 0.5 = 0.5
        ({}, 0.5, [0.125, 0.124], False),
        ({}, 0.5, [0.5, -0.375], False),
        ({}, 1.0, [-0.5], True),  # nothing is left
        ({"goal": 0.875, "fraction": 0.75}, 0.375, [0.375], True),
        ({"goal": 0.875, "fraction": 0.76}, 0.375, [0.375], False),
        ({"goal": 0.9}, 0.95, [-0.2], True),
        ({}, 1.0, [], False),
        *(({"mode": mode}, 0.5, [0.0] * 10, True) for mode in ("env_stops", "agent_stops", "10_stop")),
        *(({"mode": mode}, 0.5, [0.5] * 9, False) for mode in ("agent_stops", "10_stop")),
    ],
)
def test_the_percentile_that_ends_a_dialogue(options, initial, progress, stops):
    assert DialogueRewards(**options).is_last(initial, progress) is stops


@pytest.mark.parametrize(
    ("options", "answer", "last", "expected"),
    [
        ({}, "no", False, -1.0),
        ({}, "no", True, 0.0),
        ({"penalty": "hard"}, "no", False, -3.0),
        ({"penalty": "hard"}, "no", True, -2.0),
        ({"penalty": "hard"}, "no, two", False, -1.0),
        ({"penalty": "conservative", "penalty_value": -0.5}, "maybe", False, -1.5),
        ({"penalty": "soft"}, "snow", False, -1.0),
        ({"penalty": "soft", "soft_substrings": True}, "snow", False, -3.0),
        ({"penalty": "hard", "scale": 0.5, "shift": 1.0}, "no", False, -0.5),
        ({"mode": "10_stop"}, "no", False, 0.25),
        ({"mode": "10_stop", "scale": 10.0, "shift": -1.0}, "no", True, 1.5),
        ({"mode": "agent_stops", "scale": 10.0}, "no", False, 2.5),
    ],
)
def test_reward_of_a_question_in_an_environment(options, answer, last, expected):
    assert DialogueRewards(**options).question(0.25, answer, last=last) == expected


def test_scale_and_shift_in_environment_and_dataset():
    rewards = DialogueRewards("agent_stops", scale=2.0, shift=0.5)
    assert rewards.stop == 0.5
    assert rewards.of_dataset.question(0.25, "no", last=False) == 1.0
    cut = DialogueRewards(penalty="hard", scale=2.0, shift=0.5)
    assert cut.question(0.25, "no", last=False) == -5.5
    assert cut.of_dataset.question(0.25, "no", last=False) == -3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "stops"}, "mode"),
        ({"mode": "10_stop", "penalty": "hard"}, "options of mode 'env_stops'"),
        ({"mode": "agent_stops", "cutoff": lambda initial, progress: True}, "options of mode 'env_stops'"),
        ({"penalty": "hard", "soft_substrings": True}, "needs penalty='soft'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        DialogueRewards(**options)


def test_rounds_of_rows():
    def rounds(*turns, **ended):
        episode = Episode([Turn("a dog"), *turns], **(ended or {"terminated": True}))
        return played_rounds(to_rows([episode], TOKENIZER, 60), TOKENIZER)[0]

    asked = Turn("red?", -1.0), Turn("no")
    assert rounds() == []
    assert rounds(*asked) == [Round("red?", "no")]
    assert rounds(*asked, Turn("ok <stop>", 0.0)) == [Round("red?", "no")]
    assert rounds(Turn("<stop>?", 0.0), Turn("yes"), *asked) == [Round("<stop>?", "yes"), Round("red?", "no")]
    assert rounds(Turn("red?", 0.0), Turn("wet?", 0.0), Turn("no")) == [Round("red?", ""), Round("wet?", "no")]
    assert rounds(*asked, Turn("", -1.0), terminated=False, truncated=True) == [Round("red?", "no"), Round("", "")]


@pytest.mark.parametrize(
    ("penalty", "substrings", "rates"),
    [("none", False, [0, 0, 0]), ("hard", False, [0.25, 0, 0]), ("soft", False, [0.5, 0, 0])]
    + [("soft", True, [0.75, 0, 0]), ("conservative", False, [0.75, 1, 0])],
)
def test_yes_no_rates_by_hand(penalty, substrings, rates):
    rounds = [[Round("?", answer) for answer in answers] for answers in (["no", "yes.", "snow", "two"], ["maybe"], [])]
    assert yes_no_rate(rounds, penalty, substrings=substrings).tolist() == rates
