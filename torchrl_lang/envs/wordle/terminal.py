"""Wordle in a terminal: coloured tiles, a game to play, and a policy's games to watch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.tiles import letters_line, tile_line, use_colour
from torchrl_lang.envs.wordle.transcript import COLOUR_TOKENS, read_turns
from torchrl_lang.envs.wordle.user_player import ask_guess
from torchrl_lang.envs.wordle.words import WORD_LENGTH, wordle_tokenizer
from torchrl_lang.schema import ACTION, AGENT_MASK, ATTENTION_MASK, DONE, REWARD, TOKENS

__all__ = ["play_human", "render_letters", "render_row", "use_colour", "watch"]

Policy = Callable[[TensorDictBase], TensorDictBase]

_TOKENIZER = wordle_tokenizer()


def render_row(tokens: Tensor, attention_mask: Tensor, agent_mask: Tensor, *, colour: bool | None = None) -> str:
    """Format a game as lines of tiles, one line per guess.

    Args:
        tokens: integer ``[T]``.
        attention_mask: bool ``[T]``.
        agent_mask: bool ``[T]``.
        colour: coloured tiles, or plain text with ``[G]`` for green and ``(Y)`` for yellow; by default coloured if
            standard output supports it (see :func:`use_colour`).

    Examples:
        >>> from torchrl_lang.envs.wordle import RepeatPlayer, WordleEnv, render_row
        >>> env = WordleEnv(["crane", "slate"], batch_size=[1], seed=1)
        >>> td = env.rollout(1, RepeatPlayer(openers=["caper"]))[0, -1]["next"]
        >>> print(render_row(td["tokens"], td["attention_mask"], td["agent_mask"], colour=False))
         C (A) P (E) R
    """
    ansi = use_colour() if colour is None else colour
    n, control = int(attention_mask.sum()), _TOKENIZER.control
    row, agent = tokens.tolist()[:n], agent_mask.tolist()[:n]
    lines, begin = [], 1
    for end in (place for place in range(n) if row[place] == control.end_of_action):
        guess, reply = row[begin:end], slice(end + 1, end + 1 + WORD_LENGTH)
        answer = [t for t, mine in zip(row[reply], agent[reply], strict=True) if t in COLOUR_TOKENS and not mine]
        if answer:
            lines.append(tile_line(guess, [COLOUR_TOKENS.index(token) for token in answer], ansi))
        else:
            lines.append(f"{_TOKENIZER.decode(guess)!r} is not a valid guess")
        begin = end + 1 + (WORD_LENGTH + 1) * bool(answer)
    unfinished = [token for token in row[begin:] if token != control.end_of_dialogue]
    lines += [_TOKENIZER.decode(unfinished)] if unfinished else []
    return "\n".join(line.rstrip(" ") if not ansi else line for line in lines)


def render_letters(tokens: Tensor, attention_mask: Tensor, agent_mask: Tensor, *, colour: bool | None = None) -> str:
    """The alphabet in one line, each guessed letter in its best colour; arguments of :func:`render_row`.

    Without colours ``[G]`` is green, ``(Y)`` yellow, and a dot stands for a letter that the word does not have.

    Examples:
        >>> from torchrl_lang.envs.wordle import RepeatPlayer, WordleEnv, render_letters
        >>> env = WordleEnv(["crane", "slate"], batch_size=[1], seed=1)
        >>> td = env.rollout(1, RepeatPlayer(openers=["caper"]))[0, -1]["next"]
        >>> print(render_letters(td["tokens"], td["attention_mask"], td["agent_mask"], colour=False))
        (A) B  .  D (E) F  G  H  I  J  K  L  M  N  O  .  Q  .  S  T  U  V  W  X  Y  Z
    """
    ansi = use_colour() if colour is None else colour
    turns = read_turns(tokens[None], attention_mask[None], agent_mask[None])
    return letters_line(turns, ansi)


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
    _check_single(env)
    tensordict = env.reset()
    total, turn = 0.0, 1
    keys = "q quits" if hint is None else "? gives a hint, q quits"
    print_fn(f"Guess the word of five letters, out of {env.n_words:,}. You have {env.max_tries} tries; {keys}.")
    while True:
        ask_hint = None if hint is None else partial(_hint, env, hint, tensordict)
        guess = _ask(env, f"Guess {turn} of {env.max_tries}: ", ask_hint, input_fn, print_fn)
        if guess is None:
            print_fn(f"The word was {_hidden(env)}.")
            return None
        tensordict[ACTION] = _action(env, guess)
        tensordict = env.step(tensordict)["next"]
        row = _row(tensordict)
        print_fn(render_row(*row))
        total += float(tensordict[REWARD].sum())
        if bool(tensordict[DONE].all()):
            solved = total > -turn
            print_fn(f"Solved in {turn} of {env.max_tries}." if solved else f"The word was {_hidden(env)}.")
            return total
        print_fn(render_letters(*row))
        turn += 1


def watch(
    env: WordleEnv,
    policy: Policy,
    *,
    games: int = 1,
    pause: float = 0.0,
    print_fn: Callable[[str], None] = print,
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
    _check_single(env)
    totals = []
    for game in range(1, games + 1):
        tensordict = env.reset()
        print_fn(f"Game {game}, hidden: {_hidden(env)}")
        total, turns, done, shown = 0.0, 0, False, 0
        while not done:
            with torch.no_grad():
                tensordict = env.step(policy(tensordict))["next"]
            total, turns, done = total + float(tensordict[REWARD].sum()), turns + 1, bool(tensordict[DONE].all())
            lines = render_row(*_row(tensordict)).splitlines()
            for line in lines[shown:]:
                print_fn(line)
            shown = len(lines)
            time.sleep(pause)
        print_fn(f"Solved in {turns} of {env.max_tries}." if total > -turns else "Not solved.")
        totals.append(total)
    return totals


def _ask(
    env: WordleEnv,
    prompt: str,
    hint: Callable[[], str] | None,
    input_fn: Callable[[str], str],
    print_fn: Callable[[str], None],
) -> str | None:
    """A valid guess, or ``None`` to quit."""

    def is_valid(guess: str) -> bool:
        return bool(env.is_valid(torch.tensor(env.tokenizer.encode(guess), device=env.device)))

    return ask_guess(prompt, is_valid=is_valid, hint=hint, input_fn=input_fn, print_fn=print_fn)


def _hint(env: WordleEnv, policy: Policy, tensordict: TensorDictBase) -> str:
    """The policy's guess, as text."""
    with torch.no_grad():
        tokens = policy(tensordict.clone())[ACTION].flatten().tolist()
    end = env.tokenizer.control.end_of_action
    return env.tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens)


def _action(env: WordleEnv, guess: str) -> Tensor:
    control = env.tokenizer.control
    tokens = [*env.tokenizer.encode(guess), control.end_of_action]
    tokens += [control.pad] * env.action_length
    return torch.tensor(tokens[: env.action_length], device=env.device).expand(*env.batch_size, -1)


def _row(tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
    tokens, attention, agent = (tensordict[key].flatten().cpu() for key in (TOKENS, ATTENTION_MASK, AGENT_MASK))
    return tokens, attention, agent


def _hidden(env: WordleEnv) -> str:
    return env.words[env.hidden_word.flatten().tolist()[0]]


def _check_single(env: WordleEnv) -> None:
    if env.batch_size.numel() != 1:
        raise ValueError(
            f"Only one game can be shown at a time, but batch_size is {tuple(env.batch_size)}: use batch_size=[1]."
        )
