import pytest
import torch

from tests.envs.wordle.helpers import play
from torchrl_lang.envs.wordle import OptimalPlayer, UserPlayer, WordIndex, WordleEnv, play_human
from torchrl_lang.envs.wordle.terminal import letters_line, tile_lines, use_colour
from torchrl_lang.envs.wordle.transcript import turns_of_rows

WORDS = ["crane", "slate", "abide"]


def types(*lines: str):
    """A person's prepared lines, and then the end of the input."""
    left = iter(lines)

    def read(prompt: str) -> str:
        print(prompt)
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    return read


def env_hiding(word: str, **kwargs) -> WordleEnv:
    """Always hides the same word: the others are only on the list of guesses."""
    return WordleEnv([word], batch_size=[1], seed=0, **{"guesses": [*WORDS, "zebra"]} | kwargs)


def test_tiles():
    env = env_hiding("abide", action_length=8)
    turns = turns_of_rows(play(env, play(env, env.reset(), "slate"), "xx"))
    assert tile_lines(turns_of_rows(env.reset()), False) == []
    assert tile_lines(turns, False) == [" S  L (A) T [E]"]
    (coloured,) = tile_lines(turns, True)
    assert coloured.count("\x1b[0m") == 5
    assert coloured.index("43m A") < coloured.index("42m E")
    assert letters_line(turns, False).replace(" ", "") == "(A)BCD[E]FGHIJK.MNOPQR..UVWXYZ"


def test_colour_only_where_it_can_be_seen(monkeypatch):
    for terminal, term, no_colour in ((1, "xterm", ""), (1, "xterm", "1"), (1, "dumb", ""), (0, "xterm", "")):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: bool(terminal), raising=False)
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("NO_COLOR", no_colour)
        assert use_colour() == bool(terminal and term == "xterm" and not no_colour)


def test_a_person_wins_and_what_is_no_guess_costs_nothing(capsys):
    lines = types("", "cat", "crane!", "qqqqq", "slate", " CRANE ")
    assert play_human(env_hiding("crane"), input_fn=lines) == -1
    shown = capsys.readouterr().out
    for part in ("'cat' has 3", "without '!'", "'qqqqq' is not on the list", "Guess 2: ", "Solved in 2 of 6."):
        assert part in shown
    with pytest.raises(ValueError, match="batch_size="):
        play_human(WordleEnv(WORDS, batch_size=[2]))


@pytest.mark.parametrize("lines", [("slate", "Q"), (), ("slate",) * 6])
def test_a_person_quits_or_loses(capsys, lines):
    total = play_human(env_hiding("crane"), input_fn=types(*lines))
    assert total == (-6 if len(lines) == 6 else None)
    assert capsys.readouterr().out.endswith("The word was crane.\n")


def test_a_user_plays_several_games(capsys):
    user = UserPlayer(WORDS, colour=False, input_fn=types("slate", "crane", "slat", "abide", "q"))
    env = WordleEnv(WORDS, batch_size=[2], seed=0)
    td = user(env.reset(hidden_word=torch.tensor([0, 2])))
    assert [WordIndex.text(guess) for guess in td["action"][:, :5]] == ["slate", "crane"]
    assert capsys.readouterr().out == "Game 1 of 2, guess 1: \nGame 2 of 2, guess 1: \n"
    with pytest.raises(EOFError, match="quit"):
        user(env.step(td)["next"])
    shown = capsys.readouterr().out
    for part in ("Five letters, please: 'slat' has 4.", " S  L [A] T [E]", " C  R (A) N [E]"):
        assert part in shown


def test_hints_while_a_person_plays(capsys):
    env = WordleEnv(["slate"], batch_size=[1], guesses=["crane"], seed=0)
    hint = OptimalPlayer(["crane", "slate"], ties="first")
    assert play_human(env, hint=hint, input_fn=types("?", "", "", "?", "")) == -1
    shown = capsys.readouterr().out
    assert "? gives a hint" in shown
    assert "Five letters, please: '' has 0." in shown  # a hint is for one guess
    assert play_human(env, input_fn=types("?", "slate")) == 0
    assert "without '?'" in capsys.readouterr().out
