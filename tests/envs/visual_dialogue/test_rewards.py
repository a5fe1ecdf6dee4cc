"""Ends and rewards of dialogues, by hand."""

import pytest

from torchrl_lang.envs.visual_dialogue import DialogueRewards, PercentileCutoff
from torchrl_lang.envs.visual_dialogue.rewards import is_yes_no

ANSWERS = {  # soft, soft with substrings, hard, conservative
    "yes": (1, 1, 1, 1),
    "No": (1, 1, 1, 1),
    "no.": (1, 1, 0, 1),
    "yes, it is": (1, 1, 0, 1),
    "i don't know": (0, 1, 0, 1),
    "i don\N{RIGHT SINGLE QUOTATION MARK}t think": (0, 0, 0, 1),
    "snow": (0, 1, 0, 1),
    "it's not": (0, 1, 0, 1),
    "eyes": (0, 1, 0, 1),
    "I can't see": (0, 0, 0, 1),
    "can\N{RIGHT SINGLE QUOTATION MARK}t see": (0, 0, 0, 1),
    "fairly big": (0, 0, 0, 1),
    "it could be": (0, 0, 0, 1),
    "I think so": (0, 0, 0, 1),
    "okay": (0, 0, 0, 1),
    "maybe": (0, 0, 0, 1),
    "it LOOKS old": (0, 0, 0, 1),
    "appears so": (0, 0, 0, 1),
    "hard to tell": (0, 0, 0, 1),
    "mostly just grass": (0, 0, 0, 1),
    "mostly grass": (0, 0, 0, 0),
    "two": (0, 0, 0, 0),
    "": (0, 0, 0, 0),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_yes_no_answers(answer):
    found = (
        is_yes_no(answer, "soft"),
        is_yes_no(answer, "soft", substrings=True),
        is_yes_no(answer, "hard"),
        is_yes_no(answer, "conservative"),
    )
    assert found == tuple(map(bool, ANSWERS[answer]))
    assert not is_yes_no(answer, "none")


@pytest.mark.parametrize(
    ("initial", "progress", "stops"),
    [
        (0.5, [0.125, 0.125], True),  # 0.25 / 0.5 = 0.5
        (0.5, [0.125, 0.124], False),
        (0.5, [0.5, -0.375], False),
        (0.75, [0.125], True),
        (1.0, [0.0], True),  # nothing is left
        (1.0, [-0.5], True),
    ],
)
def test_percentile_cutoff(initial, progress, stops):
    assert PercentileCutoff()(initial, progress) is stops
    assert DialogueRewards().is_last(initial, progress) is stops


def test_cutoff_with_another_goal_and_fraction():
    assert PercentileCutoff(goal=0.875, fraction=0.75)(0.375, [0.375])
    assert not PercentileCutoff(goal=0.875, fraction=0.76)(0.375, [0.375])
    assert PercentileCutoff(goal=0.9)(0.95, [-0.2])


def test_dialogues_end_after_ten_rounds_at_the_latest():
    assert not DialogueRewards().is_last(0.5, [0.0] * 9)
    assert DialogueRewards().is_last(0.5, [0.0] * 10)
    for mode in ("agent_stops", "10_stop"):
        assert not DialogueRewards(mode).is_last(0.5, [0.5] * 9)
        assert DialogueRewards(mode).is_last(0.5, [0.0] * 10)
    assert not DialogueRewards().is_last(1.0, [])


def test_a_rule_of_the_user():
    rewards = DialogueRewards(cutoff=lambda initial, progress: initial + sum(progress) > 0.9)
    assert rewards.is_last(0.5, [0.41])
    assert not rewards.is_last(0.5, [0.3])


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
        ({"penalty": "strict"}, "penalty"),
        ({"scale": float("nan")}, "scale"),
        ({"mode": "10_stop", "penalty": "hard"}, "options of mode 'env_stops'"),
        ({"mode": "agent_stops", "cutoff": PercentileCutoff()}, "options of mode 'env_stops'"),
        ({"penalty": "hard", "soft_substrings": True}, "needs penalty='soft'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        DialogueRewards(**options)


def test_values_that_are_not_finite():
    with pytest.raises(ValueError, match="must be finite, got nan"):
        DialogueRewards("10_stop").question(float("nan"), "no", last=False)
    with pytest.raises(ValueError, match="goal"):
        PercentileCutoff(goal=float("inf"))
