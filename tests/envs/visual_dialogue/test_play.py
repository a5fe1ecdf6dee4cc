"""Metrics of played dialogues, by hand and against the models."""

import pytest

from tests.envs.visual_dialogue.played_world import TOKENIZER
from torchrl_lang.envs.visual_dialogue import played_rounds
from torchrl_lang.envs.visual_dialogue.dialogue import Round
from torchrl_lang.envs.visual_dialogue.play import yes_no_rate
from torchrl_lang.text import Episode, Turn, to_rows


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
    [
        ("none", False, [0, 0, 0]),
        ("hard", False, [0.25, 0, 0]),
        ("soft", False, [0.5, 0, 0]),
        ("soft", True, [0.75, 0, 0]),
        ("conservative", False, [0.75, 1, 0]),
    ],
)
def test_yes_no_rates_by_hand(penalty, substrings, rates):
    rounds = [[Round("?", answer) for answer in answers] for answers in (["no", "yes.", "snow", "two"], ["maybe"], [])]
    assert yes_no_rate(rounds, penalty, substrings=substrings).tolist() == rates
