"""Wordle in a terminal: coloured tiles, and games of a person."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.players import Player
from torchrl_lang.envs.wordle.rules import BLACK, GREEN, YELLOW
from torchrl_lang.envs.wordle.transcript import Turns, rows_of_turns, turns_of_rows
from torchrl_lang.envs.wordle.words import LETTERS, TRIES, WORD_LENGTH, WordIndex, WordList, load_words
from torchrl_lang.schema import ACTION, DONE, REWARD

Policy = Callable[[TensorDictBase], TensorDictBase]

_ANSI = {BLACK: "\x1b[97;100m {} \x1b[0m", YELLOW: "\x1b[30;43m {} \x1b[0m", GREEN: "\x1b[30;42m {} \x1b[0m"}
_PLAIN = {BLACK: " {} ", YELLOW: "({})", GREEN: "[{}]"}


# -- tiles -------------------------------------------------------------------------------------------------------------


def use_colour() -> bool:
    """Whether to print colours: standard output is a terminal, not a dumb one, and ``NO_COLOR`` is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def tile_lines(turns: Turns, ansi: bool) -> list[str]:
    """The guesses of the game of one row as tiles, one line per guess: ``[G]`` is green and ``(Y)`` yellow."""
    return ["".join(_tile(*each, ansi) for each in guess).rstrip(" ") for guess in _moves(turns)]


def letters_line(turns: Turns, ansi: bool) -> str:
    """The alphabet in one line, each letter that the game of one row has tried in its best colour."""
    shown = [f" {letter} " for letter in LETTERS.upper()]
    black = "\x1b[2m {} \x1b[0m" if ansi else " . "
    tried = [(colour, letter) for guess in _moves(turns) for letter, colour in guess]
    for colour, letter in sorted(tried):  # the best colour last
        shown[letter] = black.format(LETTERS[letter].upper()) if colour == BLACK else _tile(letter, colour, ansi)
    return "".join(shown).rstrip(" ")


def _moves(turns: Turns) -> Iterable[list[tuple[int, int]]]:
    """The letters of each guess of one row with their colours."""
    n = int(turns.answered)
    return torch.stack([turns.guess[0, :n], turns.colours[0, :n]], -1).tolist()


def _tile(letter: int, colour: int, ansi: bool) -> str:
    return (_ANSI if ansi else _PLAIN)[colour].format(LETTERS[letter].upper())


# -- games of a person -------------------------------------------------------------------------------------------------


class UserPlayer(Player):
    """Asks the user for the next guess of each game, in a terminal.

    The guesses so far are shown as coloured tiles. Input that is not a valid guess is explained and asked for again.
    With ``hint``, ``?`` shows the guess of a policy and an empty line then plays it.

    :func:`play_human` plays a whole game; this player can be used where a policy is expected, alone or in a
    :class:`MixturePlayer`.

    Args:
        guesses: the valid guesses, a list or path; any five letters by default.
        hint: the policy that gives hints, such as a player or an actor.
        colour: coloured tiles or plain text; by default coloured if standard output supports it.
        input_fn: reads a line, like :func:`input`.
        **kwargs: see :class:`Player`.

    Raises:
        EOFError: while playing: the user quit with ``q`` or by ending the input.

    Examples:
        >>> from torchrl_lang.envs.wordle import OptimalPlayer, UserPlayer, WordleEnv
        >>> words, lines = ["crane", "slate"], iter(["slat", "slate", "?", ""])
        >>> hint = OptimalPlayer(words, seed=0)
        >>> user = UserPlayer(words, hint=hint, colour=False, input_fn=lambda prompt: next(lines))
        >>> env = WordleEnv(words, batch_size=[1], seed=0)
        >>> td = env.reset(hidden_word=[0])
        >>> for _ in range(2):
        ...     td = env.step(user(td))["next"]
        Five letters, please: 'slat' has 4.
         S  L [A] T [E]
        [A] B  C  D [E] F  G  H  I  J  K  .  M  N  O  P  Q  R  .  .  U  V  W  X  Y  Z
        Hint: crane. Enter plays it.
    """

    def __init__(
        self,
        guesses: WordList | None = None,
        *,
        hint: Policy | None = None,
        colour: bool | None = None,
        input_fn: Callable[[str], str] = input,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        valid = None if guesses is None else frozenset(load_words(guesses))
        self.is_valid: Callable[[str], bool] = lambda guess: valid is None or guess in valid
        self.hint, self.input_fn = hint, input_fn
        self.colour = use_colour() if colour is None else colour

    def choose(self, turns: Turns) -> Tensor:
        """The user's guess for each game, one after the other, int64 letters ``[N, 5]``."""
        n, guesses = turns.tries.shape[0], []
        for row in range(n):
            game, number = turns.rows(torch.tensor([row])), int(turns.tries[row]) + 1
            if game.answered:
                print(*tile_lines(game, self.colour), letters_line(game, self.colour), sep="\n")
            prompt = f"Game {row + 1} of {n}, guess {number}: " if n > 1 else f"Guess {number}: "
            guesses.append(self._ask(prompt, game))
        return WordIndex(guesses).letters.to(turns.tries.device)

    def _ask(self, prompt: str, game: Turns) -> str:
        """A valid guess typed by the user."""
        hinted = ""
        while True:
            guess = self.input_fn(prompt).strip().lower() or hinted
            foreign = sorted(set(guess) - set(LETTERS))
            if guess == "q":
                raise EOFError("The user quit the game.")
            if guess == "?" and self.hint is not None:
                room = max(TRIES, game.guess.shape[1])
                with torch.no_grad():
                    row = self.hint(rows_of_turns(game.guess, game.colours, game.answered, max_tries=room))
                hinted = self._tokenizer.decode(row[ACTION].flatten().tolist()).partition("</a>")[0]
                print(f"Hint: {hinted}. Enter plays it.")
            elif foreign:
                print(f"Only the letters a-z, please, without {' '.join(map(repr, foreign))}.")
            elif len(guess) != WORD_LENGTH:
                print(f"Five letters, please: {guess!r} has {len(guess)}.")
            elif not self.is_valid(guess):
                print(f"{guess!r} is not on the list of guesses.")
            else:
                return guess


def play_human(env: WordleEnv, *, hint: Policy | None = None, input_fn: Callable[[str], str] = input) -> float | None:
    """Let the user play one game.

    Input that is not a valid guess is explained and costs nothing; ``q`` or the end of the input quits.

    Args:
        env: an environment with one row.
        hint: a policy whose guess ``?`` shows; an empty line then plays it.
        input_fn: reads a line, like :func:`input`.

    Returns:
        The return of the game, ``None`` if the user quit.

    Raises:
        ValueError: the environment has more than one row.

    Examples:
        >>> from torchrl_lang.envs.wordle import WordleEnv, play_human
        >>> lines = iter(["slat", "slate", "crane"])  # what the user types
        >>> play_human(WordleEnv(["crane"], batch_size=[1], seed=0), input_fn=lambda prompt: next(lines))
        Guess the word of five letters, out of 1. You have 6 tries; q quits.
        Five letters, please: 'slat' has 4.
         S  L [A] T [E]
        [A] B  C  D [E] F  G  H  I  J  K  .  M  N  O  P  Q  R  .  .  U  V  W  X  Y  Z
         S  L [A] T [E]
        [C][R][A][N][E]
        Solved in 2 of 6.
        -1.0
    """
    if env.batch_size.numel() != 1:
        raise ValueError(f"A person plays one game at a time, use batch_size=[1], got {list(env.batch_size)}.")
    user = UserPlayer(hint=hint, input_fn=input_fn, action_length=env.action_length)
    user.is_valid = lambda guess: bool(env.is_valid(torch.tensor(env.tokenizer.encode(guess), device=env.device)))
    tensordict, total, turns = env.reset(), 0.0, 0
    hidden = env.words[int(env.hidden_word)]
    keys = "q quits" if hint is None else "? gives a hint, q quits"
    print(f"Guess the word of five letters, out of {env.n_words:,}. You have {env.max_tries} tries; {keys}.")
    while turns == 0 or not tensordict[DONE].all():
        try:
            tensordict = env.step(user(tensordict))["next"]
        except EOFError:
            print(f"The word was {hidden}.")
            return None
        total, turns = total + float(tensordict[REWARD].sum()), turns + 1
    print(*tile_lines(turns_of_rows(tensordict.reshape(1)), user.colour), sep="\n")
    print(f"Solved in {turns} of {env.max_tries}." if total > -turns else f"The word was {hidden}.")
    return total
