"""Scripted players from texts to a text, in games of characters and of chats."""

import pytest
import torch

from tests.data.chat_templates import EXACT, chat_tokenizer
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import TextGameEnv, TextPlayer
from torchrl_lang.text import CharTokenizer, from_row

LETTERS = CharTokenizer.from_alphabet("abcdefgh")


class Echo:
    """Repeats what it hears; its third reply ends the game."""

    def reset(self, seed):
        self.heard = 0
        return "ab"[seed % 2]

    def step(self, text):
        self.heard += 1
        return text, 1.0, self.heard == 3


def spell(texts, rng):
    """A letter for the number of texts, and one by chance."""
    assert all(mine == its for mine, its in zip(texts[1::2], texts[2::2], strict=True))
    return "abcdefgh"[len(texts)] + rng.choice("abcd")


def play(tokenizer, function=spell, n=6, game=Echo, **options):
    env = TextGameEnv(game, tokenizer, row_length=160, action_length=9, batch_size=n, seed=0)
    player = TextPlayer(function, tokenizer, 9, **options)
    rows = rows_from_rollout(env.rollout(3, player, break_when_any_done=False), unfinished="truncate")
    return [[turn.text for turn in from_row(row, tokenizer).turns] for row in rows]


@pytest.mark.parametrize("make", [lambda: LETTERS, lambda: chat_tokenizer(EXACT["chatml"])], ids=["letters", "chat"])
def test_it_reads_the_texts_of_a_game_and_writes_the_next(make):
    games = play(make(), seed=3)
    assert [[text[0] for text in game[1::2]] for game in games] == [["b", "d", "f"]] * 6
    assert games == play(make(), seed=3) != play(make(), seed=4)
    assert len({game[1] for game in games}) > 1  # each game has a chance of its own


class Silent(Echo):
    def reset(self, seed):
        super().reset(seed)
        return ""

    def step(self, text):
        return "", *super().step(text)[1:]


@pytest.mark.parametrize("make", [lambda: LETTERS, lambda: chat_tokenizer(EXACT["chatml"])], ids=["letters", "chat"])
def test_an_environment_that_writes_nothing_has_empty_texts(make):
    heard = []
    play(make(), lambda texts, rng: heard.append(texts) or "abc"[len(texts) // 2], n=1, game=Silent)
    assert heard == [[""], ["", "a", ""], ["", "a", "", "b", ""]]


def test_rows_that_are_done_are_not_played():
    env = TextGameEnv(Echo, LETTERS, row_length=60, action_length=9, batch_size=2, seed=0)
    rows = env.reset()
    rows["done"][0] = True
    calls = []
    action = TextPlayer(lambda texts, rng: calls.append(texts) or "ab", LETTERS, 9)(rows)["action"]
    end, pad = LETTERS.control.end_of_action, LETTERS.control.pad
    assert action.tolist() == [[end] + [pad] * 8, [*LETTERS.encode("ab"), end] + [pad] * 6]
    assert len(calls) == 1
    assert TextPlayer(spell, LETTERS, 9)(rows.reshape(1, 2))["action"].dtype == torch.int64


def test_texts_that_are_no_utterance():
    for answer, error, message in (
        ("abcdefghabc", ValueError, r"returned 'abcdefghabc' of 11 tokens, and at most 8 fit beside its end"),
        ("x", ValueError, "'x'"),
        (7, TypeError, r"must return a text, got 7"),
    ):
        with pytest.raises(error, match=message):
            play(LETTERS, lambda texts, rng, answer=answer: answer)
