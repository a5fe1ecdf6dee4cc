from __future__ import annotations

import pytest
import torch

from tests.envs.wordle.helpers import play
from torchrl_lang.envs.wordle import OptimalPlayer, UserPlayer, WordIndex, WordleEnv, play_human, watch
from torchrl_lang.envs.wordle.terminal import letters_line, render_row, use_colour
from torchrl_lang.envs.wordle.transcript import turns_of_rows

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


def test_tiles():
    env = env_hiding(2, action_length=8)
    td = play(env, play(env, env.reset(), "slate"), "xx")
    assert render_row(env.reset()) == ""
    assert render_row(td[0], colour=False) == " S  L (A) T [E]\n'xx' is not a valid guess"
    coloured = render_row(td[0], colour=True).splitlines()[0]
    assert coloured.count("\x1b[0m") == 5
    assert coloured.index("43m A") < coloured.index("42m E")
    assert letters_line(turns_of_rows(td), False).replace(" ", "") == "(A)BCD[E]FGHIJK.MNOPQR..UVWXYZ"


def test_guesses_that_hold_control_tokens_are_shown():
    env = env_hiding(2)
    control = env.tokenizer.control
    guess = torch.tensor([[control.end_of_dialogue, 2, 17, control.end_of_action, control.pad, control.pad]])
    td = play(env, env.step(env.reset().set("action", guess))["next"], "abide")
    assert render_row(td[0], colour=False) == "'</eod>cr' is not a valid guess\n[A][B][I][D][E]"


def test_colour_only_where_it_can_be_seen(monkeypatch):
    for terminal, term, no_colour in ((1, "xterm", ""), (1, "xterm", "1"), (1, "dumb", ""), (0, "xterm", "")):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: bool(terminal), raising=False)
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("NO_COLOR", no_colour)
        assert use_colour() == bool(terminal and term == "xterm" and not no_colour)


def test_a_person_wins_and_what_is_no_guess_costs_nothing():
    person = Person("", "cat", "crane!", "qqqqq", "slate", " CRANE ")
    assert play_human(env_hiding(0), input_fn=person, print_fn=person.seen.append) == -1
    for shown in ("'cat' has 3", "without '!'", "'qqqqq' is not on the list", "Guess 2: ", "Solved in 2 of 6."):
        assert shown in person.text
    with pytest.raises(ValueError, match="batch_size="):
        play_human(WordleEnv(WORDS, batch_size=[2]))


def test_watching_a_player():
    shown: list[str] = []
    totals = watch(WordleEnv(WORDS, [1], seed=0), OptimalPlayer(WORDS, seed=0), games=5, print_fn=shown.append)
    assert len(totals) == sum(line.startswith("Game") for line in shown) == 5
    for total in totals:
        assert f"Solved in {int(1 - total)} of 6." in shown


@pytest.mark.parametrize("lines", [("slate", "Q"), ()])
def test_a_person_quits(lines):
    person = Person(*lines)
    assert play_human(env_hiding(0), input_fn=person, print_fn=person.seen.append) is None
    assert "The word was crane." in person.seen[-1]


def test_a_user_plays_several_games():
    person = Person("slate", "crane", "slat", "abide", "q")
    words = ["crane", "slate", "abide"]
    user = UserPlayer(words, colour=False, input_fn=person, print_fn=person.seen.append)
    env = WordleEnv(words, batch_size=[2], seed=0)
    td = user(env.reset(hidden_word=torch.tensor([0, 2])))
    assert [WordIndex.text(guess) for guess in td["action"][:, :5]] == ["slate", "crane"]
    assert person.seen == ["Game 1 of 2, guess 1: ", "Game 2 of 2, guess 1: "]
    with pytest.raises(EOFError, match="quit"):
        user(env.step(td)["next"])
    assert "Five letters, please: 'slat' has 4." in person.text
    assert " S  L [A] T [E]" in person.text
    assert " C  R (A) N [E]" in person.text


def test_hints_while_a_person_plays():
    person = Person("?", "", "", "?", "")
    env = WordleEnv(["slate"], batch_size=[1], guesses=["crane"], seed=0)
    hint = OptimalPlayer(["crane", "slate"], ties="first")
    assert play_human(env, hint=hint, input_fn=person, print_fn=person.seen.append) == -1
    assert "? gives a hint" in person.text
    assert "Five letters, please: '' has 0." in person.text  # a hint is for one guess
    assert play_human(env, input_fn=Person("?", "slate"), print_fn=person.seen.append) == 0
    assert "without '?'" in person.text
