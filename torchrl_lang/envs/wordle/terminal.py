"""Wordle in a terminal: coloured tiles, a game to play, and a policy's games to watch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.players import Player
from torchrl_lang.envs.wordle.rules import BLACK, GREEN, YELLOW
from torchrl_lang.envs.wordle.transcript import Turns, rows_of_turns
from torchrl_lang.envs.wordle.words import (
    LETTERS,
    TRIES,
    WORD_LENGTH,
    WordIndex,
    WordList,
    load_words,
    wordle_tokenizer,
)
from torchrl_lang.schema import ACTION, DONE, REWARD, ROW_KEYS
from torchrl_lang.text.rows import read_control_turns

__all__ = ["UserPlayer", "letters_line", "play_human", "render_row", "use_colour", "watch"]

Policy = Callable[[TensorDictBase], TensorDictBase]

_TOKENIZER = wordle_tokenizer()
_ANSI = {BLACK: "\x1b[97;100m", YELLOW: "\x1b[30;43m", GREEN: "\x1b[30;42m"}
_PLAIN = {BLACK: " {} ", YELLOW: "({})", GREEN: "[{}]"}


# -- tiles -------------------------------------------------------------------------------------------------------------


def use_colour() -> bool:
    """Whether to print colours: standard output is a terminal, not a dumb one, and ``NO_COLOR`` is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def render_row(row: TensorDictBase, *, colour: bool | None = None) -> str:
    """Format a game, the entries of one row, as lines of tiles, one line per guess.

    With ``colour`` tiles are coloured, otherwise text with ``[G]`` for green and ``(Y)`` for yellow; by default they
    are coloured if standard output supports it.

    Examples:
        >>> from torchrl_lang.envs.wordle import RepeatPlayer, WordleEnv
        >>> from torchrl_lang.envs.wordle.terminal import render_row
        >>> env = WordleEnv(["crane", "slate"], batch_size=[1], seed=1)
        >>> print(render_row(env.rollout(1, RepeatPlayer(openers=["caper"]))[0, -1]["next"], colour=False))
         C (A) P (E) R
    """
    ansi = use_colour() if colour is None else colour
    tokens, real, agent, reward = (row.get(key).flatten().tolist() for key in ROW_KEYS)
    n, lines, guess = sum(real), [], ""
    turns, cut, _ = read_control_turns(tokens[:n], agent[:n], reward[:n], _TOKENIZER)
    for turn in turns:
        if turn.by_agent:
            guess = turn.text
            lines.append(f"{guess!r} is not a valid guess")
        else:  # colours such as <b><y>
            letters = [LETTERS.index(letter) for letter in guess]
            lines[-1] = _tile_line(letters, ["byg".index(colour) for colour in turn.text[1::3]], ansi)
    if cut:
        lines[-1] = guess
    return "\n".join(line.rstrip(" ") for line in lines)


def letters_line(turns: Turns, ansi: bool) -> str:
    """The alphabet in one line, each letter that the game of one row has tried in its best colour."""
    shown = [f" {letter} " for letter in LETTERS.upper()]
    black = "\x1b[2m {} \x1b[0m" if ansi else " . "
    tried = [pair for letters, colours in _moves(turns) for pair in zip(colours, letters, strict=True)]
    for colour, number in sorted(tried):  # the best colour last
        letter = LETTERS[number].upper()
        shown[number] = black.format(letter) if colour == BLACK else _tile(letter, colour, ansi)
    return "".join(shown)


def _moves(turns: Turns) -> zip[tuple[list[int], list[int]]]:
    """The letters and the colours of each guess of one row."""
    n = int(turns.answered)
    return zip(turns.guess[0, :n].tolist(), turns.colours[0, :n].tolist(), strict=True)


def _tile_line(letters: Sequence[int], colours: Sequence[int], ansi: bool) -> str:
    return "".join(_tile(LETTERS[letter], colour, ansi) for letter, colour in zip(letters, colours, strict=True))


def _tile(letter: str, colour: int, ansi: bool) -> str:
    return f"{_ANSI[colour]} {letter.upper()} \x1b[0m" if ansi else _PLAIN[colour].format(letter.upper())


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
        print_fn: prints a line.
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
        print_fn: Callable[[str], None] = print,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        valid = None if guesses is None else frozenset(load_words(guesses))
        self.is_valid: Callable[[str], bool] = lambda guess: valid is None or guess in valid
        self.hint, self.colour = hint, colour
        self.input_fn, self.print_fn = input_fn, print_fn

    def choose(self, turns: Turns) -> Tensor:
        """The user's guess for each game, one after the other, int64 letters ``[N, 5]``."""
        n = turns.tries.shape[0]
        ansi = use_colour() if self.colour is None else self.colour
        guesses = []
        for row in range(n):
            game, number = turns.rows(torch.tensor([row])), int(turns.tries[row]) + 1
            lines = [_tile_line(letters, colours, ansi) for letters, colours in _moves(game)]
            for line in [*lines, letters_line(game, ansi)] if lines else []:
                self.print_fn(line.rstrip(" "))
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
                hinted = _TOKENIZER.decode(row[ACTION].flatten().tolist()).partition("</a>")[0]
                self.print_fn(f"Hint: {hinted}. Enter plays it.")
            elif foreign:
                self.print_fn(f"Only the letters a-z, please, without {' '.join(map(repr, foreign))}.")
            elif len(guess) != WORD_LENGTH:
                self.print_fn(f"Five letters, please: {guess!r} has {len(guess)}.")
            elif not self.is_valid(guess):
                self.print_fn(f"{guess!r} is not on the list of guesses.")
            else:
                return guess


def play_human(
    env: WordleEnv,
    *,
    hint: Policy | None = None,
    input_fn: Callable[[str], str] = input,
    print_fn: Callable[[str], None] = print,
) -> float | None:
    """Let the user play one game.

    Input that is not a valid guess is explained and costs nothing; ``q`` or the end of the input quits.

    Args:
        env: an environment with one row.
        hint: a policy whose guess ``?`` shows; an empty line then plays it.
        input_fn: reads a line, like :func:`input`.
        print_fn: prints a line.

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
    tensordict = _begin(env)
    user = UserPlayer(hint=hint, input_fn=input_fn, print_fn=print_fn, action_length=env.action_length)
    user.is_valid = lambda guess: bool(env.is_valid(torch.tensor(env.tokenizer.encode(guess), device=env.device)))
    keys = "q quits" if hint is None else "? gives a hint, q quits"
    print_fn(f"Guess the word of five letters, out of {env.n_words:,}. You have {env.max_tries} tries; {keys}.")
    try:
        *_, (last, total, turns) = _turns(env, user, tensordict)
    except EOFError:
        print_fn(f"The word was {_hidden(env)}.")
        return None
    print_fn(render_row(last))
    print_fn(f"Solved in {turns} of {env.max_tries}." if total > -turns else f"The word was {_hidden(env)}.")
    return total


def watch(
    env: WordleEnv, policy: Policy, *, games: int = 1, pause: float = 0.0, print_fn: Callable[[str], None] = print
) -> list[float]:
    """Show a policy's games, guess by guess.

    Args:
        env: an environment with one row.
        policy: writes ``action`` into its tensordict, such as a player or an actor.
        games: number of games.
        pause: seconds to wait after each guess.
        print_fn: prints a line.

    Returns:
        The return of each game.

    Raises:
        ValueError: the environment has more than one row.

    Examples:
        >>> from torchrl_lang.envs.wordle import OptimalPlayer, WordleEnv, watch
        >>> env = WordleEnv(["crane"], batch_size=[1], seed=0)
        >>> _ = watch(env, OptimalPlayer(["crane"]))
        Game 1, hidden: crane
        [C][R][A][N][E]
        Solved in 1 of 6.
    """
    totals = []
    for game in range(1, games + 1):
        tensordict, shown, total, turns = _begin(env), 0, 0.0, 0
        print_fn(f"Game {game}, hidden: {_hidden(env)}")
        for row, total, turns in _turns(env, policy, tensordict):  # noqa: B007
            lines = render_row(row).splitlines()
            for line in lines[shown:]:
                print_fn(line)
            shown = len(lines)
            time.sleep(pause)
        print_fn(f"Solved in {turns} of {env.max_tries}." if total > -turns else "Not solved.")
        totals.append(total)
    return totals


def _begin(env: WordleEnv) -> TensorDictBase:
    if env.batch_size.numel() != 1:
        raise ValueError(f"One game is shown at a time, but batch_size is {list(env.batch_size)}: use batch_size=[1].")
    return env.reset()


def _turns(env: WordleEnv, policy: Policy, tensordict: TensorDictBase) -> Iterator[tuple[TensorDictBase, float, int]]:
    """Each turn of a game: the row after it, the rewards so far, and the number of turns."""
    total, turns = 0.0, 0
    while turns == 0 or not tensordict[DONE].all():
        with torch.no_grad():
            tensordict = env.step(policy(tensordict))["next"]
        total, turns = total + float(tensordict[REWARD].sum()), turns + 1
        yield tensordict, total, turns


def _hidden(env: WordleEnv) -> str:
    return env.words[int(env.hidden_word)]
