"""TextArena's games as text games."""

import random

import numpy as np
import pytest

from tests.envs.helpers import check_game
from torchrl_lang.envs import TextArenaGame

pytest.importorskip("textarena")


def random_square(text):
    return f"[{random.choice([square for square in range(9) if f' {square} ' in text[-250:]])}]"


def test_the_rules_of_language_environments():
    def make():
        return TextArenaGame("TicTacToe-v0", opponent=random_square, seat=1, observe=lambda text: text[-80:])

    check_game(make, "4", "[0]", "x", row_length=600)


def test_replies_are_only_what_is_new_and_the_end_is_rewarded():
    game = TextArenaGame("GuessTheNumber-v0")
    opening = game.reset(3)
    assert opening.startswith("\n[GAME] You are Player 0. You are playing Guess The Number.")
    assert game.step("10") == ("\n[GAME] The target number is lower.", 0.0, False)
    assert game.step("I try [9]")[0].endswith("\n[GAME] The target number is lower.")
    assert game.reset(3) == opening  # the log of the last game is gone
    for guess in range(1, 9):
        reply, reward, over = game.step(str(guess))
        assert reward == float(over)
        if over:
            break
    assert "Congratulations" in reply


def test_opponents_play_within_a_turn():
    seen = []

    def third_row(text):
        seen.append(text)
        return next(square for square in ("[6]", "[7]", "[8]") if f"'{square}'" in text[-60:])

    game = TextArenaGame("TicTacToe-v0", opponent=third_row)
    game.reset(0)
    reply, reward, over = game.step("[0]")
    assert "Player 0 placed their symbol (O) in cell 0." in reply
    assert "[Player 1] [6]" in reply
    assert "[Player 0] [0]" not in reply
    assert "You are Player 0 in Tic Tac Toe" not in reply
    assert (reward, over) == (0.0, False)
    game.step("[1]")
    reply, reward, over = game.step("[2]")
    assert (reward, over) == (1, True)
    assert "Player 0 has won!" in reply
    assert len(seen) == 2
    assert seen[1].startswith(seen[0])  # an opponent reads all that its seat has observed
    game.reset(0)
    assert [game.step(square)[1:] for square in ("[0]", "[4]", "[1]")] == [(0.0, False)] * 2 + [(-1, True)]


def test_games_have_random_streams_of_their_own():
    """2048 draws tiles from the global streams as long as it is played."""

    def play(game, seed, actions):
        return [game.reset(seed), *(game.step(action)[0] for action in actions)]

    moves = ["[up]", "[left]", "[down]", "[right]"] * 3
    one, other = TextArenaGame("2048-v0"), TextArenaGame("2048-v0")
    expected = play(one, 5, moves)
    assert play(one, 6, moves) != expected
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    replies = [one.reset(5)]
    other.reset(9)
    for move in moves:  # turn by turn beside another game, in other states of the global streams
        replies.append(one.step(move)[0])
        other.step(move)
    assert replies == expected
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy  # noqa: NPY002
    assert play(TextArenaGame("2048-v0", opponent=()), 5, moves) == expected


def test_games_that_cannot_be_made_are_named_with_the_remedy(monkeypatch):
    import nltk

    downloads = []
    monkeypatch.setattr(nltk, "download", lambda *names, **options: downloads.append(names))
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(RuntimeError, match=r"cannot begin Hangman-v0 .*word lists of NLTK .*nltk.downloader words"):
        TextArenaGame("Hangman-v0")
    assert not downloads
    with pytest.raises(RuntimeError, match=r"cannot begin TicTacToe-v0 .*number of players has to be 2"):
        TextArenaGame("TicTacToe-v0")
    with pytest.raises(TypeError, match="without '-raw'"):
        TextArenaGame("TicTacToe-v0-raw", opponent=random_square)
