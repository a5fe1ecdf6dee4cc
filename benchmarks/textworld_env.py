"""TextWorld games side by side: a second engine process beside the first, and the engine without an environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from benchmarks.common import interleaved, median, one_core, ratio, row
from torchrl_lang.envs.textworld import RandomAdmissiblePlayer, TextWorldEnv, TextWorldSpec, build_games
from torchrl_lang.envs.textworld.engine import EnginePool
from torchrl_lang.envs.textworld.games import game_texts
from torchrl_lang.text import word_tokenizer

GAMES, ROWS, TURNS, WORKERS, MIN_SPEED_UP = 4, 32, 20, 2, 1.5
SMOKE = {"GAMES": 1, "ROWS": 1, "TURNS": 2, "WORKERS": 1}


@one_core()  # one for the environment's tensors; engine processes are apart
def run(quick: bool = False) -> list[dict[str, Any]]:
    try:
        games = build_games([TextWorldSpec("coin_collector", seed, level=10) for seed in range(GAMES)])
    except ImportError as error:
        print(f"  nothing measured: {error}")
        return []
    return _measure(games, repeats=2 if quick else 7)


def _measure(games: list[Path], repeats: int) -> list[dict[str, Any]]:
    tokenizer = word_tokenizer(game_texts(games))
    envs = {
        workers: TextWorldEnv(
            games, tokenizer, row_length=4096, action_length=8, batch_size=[ROWS], seed=0, workers=workers,
            offers="admissible", template="short",
        )
        for workers in {1, WORKERS}
    }  # fmt: skip
    pool = EnginePool(1, ["admissible_commands"])
    steps = ROWS * TURNS
    try:
        jobs: dict[str, Callable[[], Any]] = {f"{n} processes": _playing(env) for n, env in envs.items()}
        times = interleaved({**jobs, "engine": lambda: _bare(pool, games)}, repeats)
    finally:
        pool.close()
        for env in envs.values():
            env.close()
    several = f"{WORKERS} processes"
    what = f"TextWorldEnv, {ROWS} games, admissible commands offered:"
    return [
        row(f"{what} two processes over one, speed", ratio(times, "1 processes", several), "x", MIN_SPEED_UP),
        row(f"{what} over one bare engine, speed", ratio(times, "engine", several), "x"),
        row(f"{what} two processes", median(steps / seconds for seconds in times[several]), "steps/s"),
    ]


def _playing(env: TextWorldEnv) -> Callable[[], None]:
    """Twenty turns of each game by a random player, from the games' beginnings."""
    player = RandomAdmissiblePlayer(seed=0)

    def play() -> None:
        td: TensorDictBase = env.reset()
        for _ in range(TURNS):
            td = env.step_and_maybe_reset(player(td))[1]

    return play


def _bare(pool: EnginePool, games: list[Path]) -> float:
    """The same with one engine alone: the first admissible commands in turn, nothing made of the answers."""
    began = time.perf_counter()
    answers = pool.begin({number: str(games[number % GAMES]) for number in range(ROWS)})
    for turn in range(TURNS):
        commands = {}
        for number, state in answers.items():
            admissible = state["admissible_commands"] if isinstance(state, dict) else []
            commands[number] = admissible[turn % len(admissible)] if admissible else "look"
        answers = pool.step(commands)
    return time.perf_counter() - began
