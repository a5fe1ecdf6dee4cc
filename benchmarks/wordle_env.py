"""Wordle on one core: turns a second with random guesses, the expert's first move, a hundred thousand expert games."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import row as _row
from torchrl_lang.envs.wordle import OptimalPlayer, WordIndex, WordleEnv, common_words, guess_words
from torchrl_lang.schema import ACTION, DONE

N_WORDS, BATCH = 2300, 4096
MIN_TURNS_PER_SECOND, MAX_FIRST_MOVE_MS, MAX_EXPERT_SECONDS = 500_000, 10.0, 60.0


def run(quick: bool = False) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(repeats=3 if quick else 9, games=10_000 if quick else 100_000)
    finally:
        torch.set_num_threads(threads)


def _run(repeats: int, games: int) -> list[dict[str, Any]]:
    words = _words()
    rows = []
    for consistent in (False, True):
        env = WordleEnv(words, batch_size=[BATCH], consistent=consistent, seed=0)
        actions = _random_actions(words)
        with_sets = ", with the sets of consistent words" if consistent else ""
        target = None if consistent else MIN_TURNS_PER_SECOND
        rate = len(actions) * BATCH / _median(lambda env=env, actions=actions: _play(env, actions), repeats)
        rows.append(_row(f"env.step, a reset a game{with_sets}", rate, "turns/s", target))
        rate = len(actions) * BATCH / _median(lambda env=env, actions=actions: _play_on(env, actions), repeats)
        rows.append(_row(f"env.step_and_maybe_reset{with_sets}", rate, "turns/s", None))
    rows += _expert(words, repeats, games)
    return [{**entry, "name": f"wordle: {entry['name']}"} for entry in rows]


def _words() -> list[str]:
    """The common words and as many others as make 2,300."""
    common = common_words()
    others = sorted(set(guess_words()) - set(common))
    missing = N_WORDS - len(common)
    return common + others[:: len(others) // missing][:missing]


def _random_actions(words: list[str], turns: int = 6) -> list[Tensor]:
    letters = WordIndex(words).letters
    drawn = torch.randint(len(words), (turns, BATCH), generator=torch.Generator().manual_seed(0))
    end = torch.full((BATCH, 1), WordleEnv(["crane"]).tokenizer.control.end_of_action)
    return [torch.cat([letters[guess], end], -1) for guess in drawn]


def _play(env: WordleEnv, actions: list[Tensor]) -> None:
    """A game of six turns, a whole TensorDict each."""
    tensordict = env.reset()
    for action in actions:
        tensordict = env.step(tensordict.set(ACTION, action))["next"]


def _play_on(env: WordleEnv, actions: list[Tensor]) -> None:
    """Six turns as a collector plays them: games that end, which is some every turn, begin anew."""
    tensordict = env.reset()
    for action in actions:
        _, tensordict = env.step_and_maybe_reset(tensordict.set(ACTION, action))


def _expert(words: list[str], repeats: int, games: int) -> list[dict[str, Any]]:
    start = time.perf_counter()
    player = OptimalPlayer(words, seed=0)
    built = time.perf_counter() - start
    fresh = WordleEnv(words, batch_size=[1], seed=0).reset()

    def first_move() -> None:
        player.forget()
        player(fresh)

    milliseconds = 1e3 * _median(first_move, repeats)
    player.forget()
    start = time.perf_counter()
    total = _expert_games(player, words, games)
    seconds = time.perf_counter() - start
    return [
        _row("expert, building its table", built, "s", None),
        _row("expert, first move of a game, nothing remembered", milliseconds, "ms", MAX_FIRST_MOVE_MS, at_most=True),
        _row(f"expert, {games:,} games", seconds, "s", MAX_EXPERT_SECONDS * games / 100_000, at_most=True),
        _row(f"expert, mean return of {games:,} games", total / games, "", None),
    ]


def _expert_games(player: OptimalPlayer, words: list[str], games: int, batch: int = 4000) -> float:
    """The sum of returns of games played in batches; rows that are done wait for the others."""
    total, played = 0.0, 0
    while played < games:
        size = min(batch, games - played)
        env = WordleEnv(words, batch_size=[size], seed=played)
        tensordict, done = env.reset(), False
        while not done:
            tensordict = env.step(player(tensordict))["next"]
            done = bool(tensordict[DONE].all())
        total, played = total + float(tensordict["token_reward"].sum()), played + size
    return total


def _median(job: Callable[[], None], repeats: int) -> float:
    """Median seconds of a job, after one run to warm up."""
    job()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
