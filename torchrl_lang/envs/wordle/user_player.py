"""A policy for Wordle whose guesses a user types, and the question for a guess."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_lang.envs.wordle.scripted_players import Player
from torchrl_lang.envs.wordle.tiles import letters_line, tile_line, use_colour
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.envs.wordle.words import LETTERS, WORD_LENGTH, WordIndex, WordList, load_words

__all__ = ["UserPlayer", "ask_guess"]


class UserPlayer(Player):
    """Asks the user for the next guess of each game, in a terminal.

    The guesses so far are shown as coloured tiles. Input that is not a valid guess is explained and asked for again.
    With ``hint``, ``?`` shows the guess of another player and an empty line then plays it.

    :func:`play_human` plays a whole game; this player can be used where a policy is expected, alone or in a
    :class:`MixturePlayer`.

    Args:
        guesses: the valid guesses, a list or path; any five letters by default.
        hint: the player that gives hints.
        colour: coloured tiles or plain text, see :func:`render_row`.
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
        hint: Player | None = None,
        colour: bool | None = None,
        input_fn: Callable[[str], str] = input,
        print_fn: Callable[[str], None] = print,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.valid = None if guesses is None else frozenset(load_words(guesses))
        self.hint, self.colour = hint, colour
        self.input_fn, self.print_fn = input_fn, print_fn

    def choose(self, turns: Turns) -> Tensor:
        """The user's guess for each game, one after the other, int64 letters ``[N, 5]``."""
        n = turns.tries.shape[0]
        guesses = [self._ask(turns.rows(torch.tensor([row])), row, n) for row in range(n)]
        return WordIndex(guesses).letters.to(turns.tries.device)

    def _ask(self, turns: Turns, row: int, n: int) -> str:
        ansi = use_colour() if self.colour is None else self.colour
        answered = int(turns.answered)
        moves = zip(turns.guess[0, :answered].tolist(), turns.colours[0, :answered].tolist(), strict=True)
        lines = [tile_line(letters, colours, ansi) for letters, colours in moves]
        for line in [*lines, letters_line(turns, ansi)] if lines else []:
            self.print_fn(line.rstrip(" "))
        game = f"Game {row + 1} of {n}, guess" if n > 1 else "Guess"
        guess = ask_guess(
            f"{game} {int(turns.tries) + 1}: ",
            is_valid=lambda word: self.valid is None or word in self.valid,
            hint=None if self.hint is None else partial(_hint, self.hint, turns),
            input_fn=self.input_fn,
            print_fn=self.print_fn,
        )
        if guess is None:
            raise EOFError("The user quit the game.")
        return guess


def _hint(player: Player, turns: Turns) -> str:
    return WordIndex.text(player.choose(turns)[0])


def ask_guess(
    prompt: str,
    *,
    is_valid: Callable[[str], bool],
    hint: Callable[[], str] | None,
    input_fn: Callable[[str], str],
    print_fn: Callable[[str], None],
) -> str | None:
    """A valid guess typed by the user, or ``None`` to quit."""
    hinted = ""
    while True:
        try:
            guess = input_fn(prompt).strip().lower() or hinted
        except EOFError:
            return None
        if guess == "q":
            return None
        if guess == "?" and hint is not None:
            hinted = hint()
            print_fn(f"Hint: {hinted}. Enter plays it.")
            continue
        foreign = sorted(set(guess) - set(LETTERS))
        if foreign:
            print_fn(f"Only the letters a-z, please, without {' '.join(map(repr, foreign))}.")
        elif len(guess) != WORD_LENGTH:
            print_fn(f"Five letters, please: {guess!r} has {len(guess)}.")
        elif not is_valid(guess):
            print_fn(f"{guess!r} is not on the list of guesses.")
        else:
            return guess
