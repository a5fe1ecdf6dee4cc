from __future__ import annotations

import string

import pytest
import torch

from torchrl_lang.envs.language_env import LanguageEnv, Reply
from torchrl_lang.functional.random import random_index
from torchrl_lang.text import CharTokenizer


class Talk(LanguageEnv):
    """Every draw hangs on the episode's number: opening or none, patience, and what is answered to each utterance."""

    def __init__(self, *, patience=4, max_opening=3, max_reply=4, row_length=32, action_length=4, **kwargs):
        self.patience, self.max_opening, self.max_reply = patience, max_opening, max_reply
        tokenizer = CharTokenizer.from_alphabet(["a", "b", "ab", "c"])
        super().__init__(tokenizer, row_length=row_length, action_length=action_length, **kwargs)

    def lengths(self, episode):
        """Turns that the episode with this number takes."""
        return 1 + random_index(self._key, episode, self.patience)

    def _words(self, key, width):
        return random_index(key[:, None], torch.arange(width), 4)

    def _open(self, episode, fresh, options):
        length = random_index(self._key + 1, episode, self.max_opening + 1)
        task = {"left": self.lengths(episode), "number": episode}
        return self._words(episode, self.max_opening), length, task

    def _reply(self, utterance, task, live):
        left, number = task["left"] - 1, task["number"]
        length = random_index(left, number, self.max_reply + 1)
        reward = (utterance.length % 3).float() - 0.5
        return Reply(self._words(number + left, self.max_reply), length, reward, left <= 0), {**task, "left": left}


@pytest.fixture(scope="session")
def talk():
    """A small language environment; keywords as of LanguageEnv."""
    return Talk


@pytest.fixture(scope="session")
def letters():
    return CharTokenizer.from_alphabet(string.ascii_lowercase + " ?<>/|")


@pytest.fixture(scope="session")
def wordle_symbols():
    """The 35 symbols of the ILQL paper's Wordle, by id."""
    tail = ["<g>", "<b>", "<y>", "<|pad|>", "</a>", "</s>", "<s>", "<a>", "</eod>"]
    return CharTokenizer([*string.ascii_lowercase, *tail])


def speak(td):
    """Says the letters 0, 1, 2, ... from its place in the row on, each with its own place as its figure."""
    written = td["attention_mask"].sum(-1, keepdim=True)
    place = written + torch.arange(4)
    return td.set("action", place % 4).set("figure", place.float() + 0.5).set("turn", written)
