from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.envs.wordle.helpers import play
from torchrl_lang.envs.wordle import OptimalPlayer, WordleEnv, play_human, render_letters, render_row, watch
from torchrl_lang.envs.wordle.terminal import use_colour

WORDS = ["crane", "slate", "abide"]


class Person:
    """Answers with prepared lines and remembers what was shown."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.seen = list(lines), []

    def __call__(self, prompt: str) -> str:
        self.seen.append(prompt)
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    @property
    def text(self) -> str:
        return "\n".join(self.seen)


def env_hiding(word: int, **kwargs) -> WordleEnv:
    """Always hides the same word: the others are only on the list of guesses."""
    words = [WORDS[word]]
    return WordleEnv(words, batch_size=[1], seed=0, **{"guesses": [*WORDS, "zebra"]} | kwargs)


def row(td):
    return td["tokens"][0], td["attention_mask"][0], td["agent_mask"][0]


def test_tiles():
    env = env_hiding(2, action_length=8)
    td = play(env, play(env, env.reset(), "slate"), "xx")
    assert render_row(*row(td), colour=False) == " S  L (A) T [E]\n'xx' is not a valid guess"
    coloured = render_row(*row(td), colour=True).splitlines()[0]
    assert coloured.count("\x1b[0m") == 5
    assert coloured.index("43m A") < coloured.index("42m E")
    assert render_letters(*row(td), colour=False).replace(" ", "") == "(A)BCD[E]FGHIJK.MNOPQR..UVWXYZ"
    td = play(env, td, "abide")
    assert render_row(*row(td), colour=False).splitlines()[-1] == "[A][B][I][D][E]"


def test_guesses_that_hold_control_tokens_are_shown():
    env = env_hiding(2)
    control = env.tokenizer.control
    guess = torch.tensor([[control.end_of_dialogue, 2, 17, control.end_of_action, control.pad, control.pad]])
    td = play(env, env.step(env.reset().set("action", guess))["next"], "abide")
    assert render_row(*row(td), colour=False) == "'</eod>cr' is not a valid guess\n[A][B][I][D][E]"


def test_a_fresh_row_has_no_tiles_and_letters_keep_their_best_colour():
    env = env_hiding(2)
    td = env.reset()
    assert render_row(*row(td)) == ""
    td = play(env, td, "slate")
    td = play(env, td, "crane")
    assert "(A)" in render_letters(*row(td), colour=False)


def test_colour_only_where_it_can_be_seen(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert use_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not use_colour()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert not use_colour()


def test_a_person_wins():
    person = Person("slate", " CRANE ")
    assert play_human(env_hiding(0), input_fn=person, print_fn=person.seen.append) == -1
    assert "Guess 2 of 6" in person.text
    assert "Solved in 2 of 6." in person.text


def test_a_person_loses():
    person = Person("slate", "abide")
    assert play_human(env_hiding(0, max_tries=2), input_fn=person, print_fn=person.seen.append) == -2
    assert person.seen[-1] == "The word was crane."


def test_what_is_no_guess_costs_nothing():
    person = Person("", "cat", "crane!", "qqqqq", "crane")
    assert play_human(env_hiding(0), input_fn=person, print_fn=person.seen.append) == 0
    assert "'cat' has 3" in person.text
    assert "without '!'" in person.text
    assert "'qqqqq' is not on the list" in person.text
    assert "Solved in 1 of 6." in person.text


@pytest.mark.parametrize("lines", [("q",), ("slate", "Q"), ()])
def test_a_person_quits(lines):
    person = Person(*lines)
    assert play_human(env_hiding(0), input_fn=person, print_fn=person.seen.append) is None
    assert "The word was crane." in person.seen[-1]


def test_watching_a_player():
    shown: list[str] = []
    env = WordleEnv(WORDS, batch_size=[1], seed=0)
    totals = watch(env, OptimalPlayer(WORDS, seed=0), games=5, print_fn=shown.append)
    assert len(totals) == 5
    assert sum(line.startswith("Game") for line in shown) == 5
    for total in totals:
        assert f"Solved in {int(1 - total)} of 6." in shown
    assert sum("no valid" in line for line in shown) == 0


def test_watching_a_hopeless_player():
    def silent(td: TensorDict) -> TensorDict:
        return td.set("action", torch.full((1, 6), 30))

    shown: list[str] = []
    assert watch(WordleEnv(WORDS, batch_size=[1], max_tries=2), silent, print_fn=shown.append) == [-2.0]
    assert shown[1:] == ["'' is not a valid guess", "'' is not a valid guess", "Not solved."]


def test_one_game_at_a_time():
    for show in (play_human, lambda env: watch(env, OptimalPlayer(WORDS))):
        with pytest.raises(ValueError, match="batch_size="):
            show(WordleEnv(WORDS, batch_size=[2]))
