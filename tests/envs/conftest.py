"""The environments that every contract test runs on."""

import random
import tempfile
from functools import cache, partial
from pathlib import Path

import pytest

from tests.envs.visual_dialogue.word_overlap import make_env as dialogue_env
from tests.envs.visual_dialogue.word_overlap import write_world
from torchrl_lang.envs import TextGameEnv, TokenEnv, WordleEnv
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.envs.maze.env import MOVES, MazeEnv
from torchrl_lang.envs.random_walks import RandomWalksEnv, random_graph
from torchrl_lang.envs.visual_dialogue import VisualDialogueEnv
from torchrl_lang.text import CharTokenizer


class GuessNumber:
    """Guess a number from 1 to 7: "higher", "lower", "?" if it is no number, or "yes"."""

    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randint(1, 7)
        return "1-7"

    def step(self, text: str) -> tuple[str, float, bool]:
        if not text.isdecimal():
            return "?", -1.0, False
        guess = int(text)
        if guess == self.number:
            return "yes", 0.0, True
        return "higher" if guess < self.number else "lower", -1.0, False


def guess_number_env(**options) -> TextGameEnv:
    """The game in a row of just the room that it needs."""
    tokenizer = CharTokenizer.from_alphabet([*"0123456789", "-", "?", "higher", "lower", "yes"])
    return TextGameEnv(GuessNumber, tokenizer, row_length=37, action_length=2, max_turns=6, **options)


class Countdown:
    """The player speaks first, the game answers nothing until the text has been said three times: then it ends."""

    def reset(self, seed: int) -> str:
        self.left = 3
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        self.left -= text == "go"
        return "", 0.25 * len(text), self.left == 0


def countdown_env(**kwargs) -> TextGameEnv:
    return TextGameEnv(Countdown, CharTokenizer.from_alphabet("go"), row_length=24, action_length=4, **kwargs)


class Parrot:
    """Says back what it hears, control tokens by name, three times over where it hears ``b``."""

    def reset(self, seed: int) -> tuple[str, dict]:
        return "ab", {"seed": seed}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        return text * (3 if "b" in text else 1), float(len(text)), text == "a", text == "b", {}


def parrot_env(**kwargs) -> TextGameEnv:
    return TextGameEnv(Parrot, CharTokenizer.from_alphabet("ab"), row_length=30, action_length=4, **kwargs)


class Picture:
    """Shows a number of vectors, and rewards the letter of the first one's largest number."""

    def reset(self, seed: int) -> str:
        self.answer, self.tries = "abc"[seed % 3], 0
        shown = [[float(letter == self.answer) for letter in "abc"], [0.5, 0.25, float(seed % 7)]]
        self.features = shown[: seed % 2 + 1]
        return "?"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.tries += 1
        right = text == self.answer
        return "" if right else "no", float(right), right or self.tries == 3


def picture_env(game=Picture, **kwargs) -> TextGameEnv:
    options = {"row_length": 24, "action_length": 3, "features": (2, 3)}
    return TextGameEnv(game, CharTokenizer.from_alphabet("abcno?"), **options, **kwargs)


WORDS = ["crane", "slate", "geese", "eerie", "abide", "speed", "erase"]


def wordle_env(**kwargs) -> WordleEnv:
    return WordleEnv(WORDS, **kwargs)


def random_walks_env(**kwargs) -> RandomWalksEnv:
    return RandomWalksEnv(random_graph(7, out_degree=2, goal=6, seed=0), max_turns=6, **kwargs)


def maze_env(**kwargs) -> MazeEnv:
    return MazeEnv(max_moves=6, **kwargs)


@cache
def world():
    """Files of seven visual dialogues, deleted at the end of the process."""
    home = tempfile.TemporaryDirectory()
    return home, write_world(Path(home.name), 7)


def visual_dialogue_env(**kwargs) -> VisualDialogueEnv:
    return dialogue_env(world()[1], row_length=100, action_length=8, **kwargs)


def token_env(make, **kwargs) -> TokenEnv:
    return TokenEnv(make(**kwargs))


# name: (factory taking batch_size and seed, utterances that mean something, whether the step is tensors only)
ENVS = {
    "corridor": (CorridorEnv, ("l", "r"), True),
    "guess_number": (guess_number_env, tuple("1234567"), False),
    "countdown": (countdown_env, ("go",), False),
    "parrot": (parrot_env, ("a", "b", "ab", "ba"), False),
    "picture": (picture_env, ("a", "b", "c"), False),
    "maze": (maze_env, tuple(MOVES), True),
    "random_walks": (random_walks_env, tuple("abcdefg"), True),
    "visual_dialogue": (visual_dialogue_env, ("red?", "is it", "wet dry", "?"), False),
    "wordle": (wordle_env, (*WORDS, "zzzzz"), True),
    "corridor_by_token": (partial(token_env, CorridorEnv), ("l", "r"), True),
    "countdown_by_token": (partial(token_env, countdown_env), ("go",), False),
    "picture_by_token": (partial(token_env, picture_env), ("a", "b", "c"), False),
    "wordle_by_token": (partial(token_env, wordle_env), (*WORDS, "zzzzz"), True),
}


@pytest.fixture(params=ENVS)
def registered(request):
    """A registered environment: (factory, utterances, whether its step is tensors only)."""
    return ENVS[request.param]


@pytest.fixture
def make_env(registered):
    return registered[0]
