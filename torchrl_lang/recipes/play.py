"""Play a task in the terminal, or watch a policy."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from torchrl_lang.envs import LanguageEnv
from torchrl_lang.evaluation import format_transcript
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks.base import Player, PlayOptions
from torchrl_lang.schema import ACTION, DONE, REWARD, ROW_KEYS
from torchrl_lang.text.chat_tokenizer import encode_action

__all__ = ["main", "play_in_terminal"]


def main(options: PlayOptions) -> None:
    """Play a game, or watch some."""
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    if options.watch is None:
        if sys.stdin is None:
            raise ValueError("Standard input is closed: open it to play, or give --watch.")
        options.task().play(seed)
    elif Path(options.watch).is_dir():
        run = load_run(Path(options.watch), type(options.task()))
        player = Player(run.policy(options.beta if run.has_values else 0.0, method="greedy"))
        run.task.watch(player, games=options.games, seed=seed)
    else:
        task = options.task()
        task.watch(task.player(options.watch, seed), games=options.games, seed=seed)


def play_in_terminal(
    env: LanguageEnv, *, spelling: Mapping[str, str] | None = None, input_fn: Callable[[str], str] = input
) -> float | None:
    """Let a person play one game: each line typed is an action; ``q`` or the end of the input quits.

    Args:
        env: an environment of one game.
        spelling: symbols to write differently, as in :func:`~torchrl_lang.evaluation.format_transcript`.
        input_fn: asks for a line, as :func:`input` does.

    Returns:
        The return of the game, ``None`` if the person quit.

    Examples:
        >>> from torchrl_lang.envs.random_walks import RandomWalksEnv, random_graph
        >>> from torchrl_lang.recipes.play import play_in_terminal
        >>> env = RandomWalksEnv(random_graph(5, out_degree=2, seed=0), batch_size=[1], seed=1)
        >>> moves = iter("da")
        >>> play_in_terminal(env, input_fn=lambda prompt: next(moves))
        < c
        > d  (-1)
        < d
        > a  (-1)
        < a
        The game is over, return -2.
        -2.0
    """
    td, shown, total = env.reset(), 0, 0.0
    while True:
        lines = format_transcript(td[0].select(*ROW_KEYS).cpu(), env.tokenizer, spelling=spelling).splitlines()
        print("\n".join(lines[shown:]))
        shown = len(lines)
        if bool(td[DONE].all()):
            print(f"The game is over, return {total:g}.")
            return total
        tokens = _ask(env, input_fn)
        if tokens is None:
            return None
        td[ACTION] = torch.tensor([tokens], device=env.device)
        td = env.step(td)["next"]
        total += float(td[REWARD].sum())


def _ask(env: LanguageEnv, input_fn: Callable[[str], str]) -> list[int] | None:
    """The tokens of an action, padded; ``None`` to quit."""
    control = env.tokenizer.control
    while True:
        try:
            text = input_fn("> ").strip()
        except EOFError:
            return None
        if text == "q":
            return None
        try:
            tokens = [*encode_action(env.tokenizer, text), control.end_of_action]
        except ValueError as error:
            print(error)
            continue
        if len(tokens) <= env.action_length:
            return tokens + [control.pad] * (env.action_length - len(tokens))
        print(f"An action has at most {env.action_length - 1} tokens, {text!r} has {len(tokens) - 1}.")
