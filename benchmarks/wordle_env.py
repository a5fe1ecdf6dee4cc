"""Wordle: turns a second with random guesses, on one core and two; the expert's first move, its games."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from benchmarks.common import one_core, row, smoking
from benchmarks.scaling_envs import play_game, random_guesses
from torchrl_lang.envs import CompiledRollout
from torchrl_lang.envs.wordle import OptimalPlayer, WordIndex, WordleEnv, guess_words, wordle_tokenizer
from torchrl_lang.envs.wordle.words import common_words
from torchrl_lang.schema import ACTION, DONE

N_WORDS, BATCH = 2300, 4096
MIN_TURNS_PER_SECOND = {False: 1_000_000, True: 300_000, "packed": 300_000}
MIN_COMPILED_ON_TWO_CORES = 2_000_000
MAX_FIRST_MOVE_MS, MAX_EXPERT_SECONDS = 10.0, 60.0
ROLLOUT_STEPS = 60
QUICK_GAMES, GAMES = 10_000, 100_000
SMOKE = {"N_WORDS": 50, "BATCH": 16, "ROLLOUT_STEPS": 2, "QUICK_GAMES": 10}
SETS = {False: "", True: ", with the sets of consistent words", "packed": ", with these sets packed"}


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    return _run(repeats=3 if quick else 9, games=QUICK_GAMES if quick else GAMES)


def _run(repeats: int, games: int) -> list[dict[str, Any]]:
    words = _words()
    rows = []
    for consistent, with_sets in SETS.items():
        env = WordleEnv(words, batch_size=[BATCH], consistent=consistent, seed=0)
        actions = random_guesses(words, BATCH)
        target = MIN_TURNS_PER_SECOND[consistent]
        rate = len(actions) * BATCH / _median(lambda env=env, actions=actions: play_game(env, actions), repeats)
        rows.append(row(f"env.step, a reset a game{with_sets}", rate, "turns/s", target))
        rate = len(actions) * BATCH / _median(lambda env=env, actions=actions: _play_on(env, actions), repeats)
        rows.append(row(f"env.step_and_maybe_reset{with_sets}", rate, "turns/s", None))
    rows += _compiled(words, repeats)
    rows += _expert(words, repeats, games)
    return [{**entry, "name": f"wordle: {entry['name']}"} for entry in rows]


def _words() -> list[str]:
    """The common words and as many others as make 2,300; in a smoke run a few."""
    common = common_words()
    others = sorted(set(guess_words()) - set(common))
    missing = max(N_WORDS - len(common), 1)
    return (common + others[:: len(others) // missing][:missing])[:N_WORDS]


def _play_on(env: WordleEnv, actions: list[Tensor]) -> None:
    """Six turns as a collector plays them: games that end, some in every turn, are reset."""
    tensordict = env.reset()
    for action in actions:
        _, tensordict = env.step_and_maybe_reset(tensordict.set(ACTION, action))


class _RandomGuesses(TensorDictModuleBase):
    """Any word of the list; it reads nothing."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [], [ACTION]
        letters = WordIndex(words).letters
        end = torch.full((len(words), 1), wordle_tokenizer().control.end_of_action)
        self.actions = torch.cat([letters, end], -1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        drawn = torch.randint(self.actions.shape[0], tensordict.batch_size)
        return tensordict.set(ACTION, self.actions.index_select(0, drawn))


def _compiled(words: list[str], repeats: int) -> list[dict[str, Any]]:
    """Rollouts whose turn is compiled, against TorchRL's own with the same policy."""
    rows = []
    for keep, steps in (("turns", ROLLOUT_STEPS), ("rows", ROLLOUT_STEPS), ("steps", 12)):
        rate = steps * BATCH / _median(_rollout(words, keep, steps), repeats)
        rows.append(row(f"compiled rollout, keep='{keep}', one core", rate, "turns/s"))
    env, policy = WordleEnv(words, batch_size=[BATCH], seed=0), _RandomGuesses(words)
    rate = 12 * BATCH / _median(lambda: env.rollout(12, policy, break_when_any_done=False), repeats)
    rows.append(row("env.rollout, one core", rate, "turns/s"))
    targets = {"turns": MIN_COMPILED_ON_TWO_CORES, "rows": None}
    rates = _two_processes(words, [*targets], repeats)
    for keep, target in targets.items():
        rows.append(row(f"compiled rollout, keep='{keep}', two processes of one core", rates[keep], "turns/s", target))
    return rows


def _rollout(words: list[str], keep: Any, steps: int) -> CompiledRollout:
    env = WordleEnv(words, batch_size=[BATCH], seed=0)
    return CompiledRollout(env, _RandomGuesses(words), steps, keep=keep)


def _two_processes(words: list[str], keeps: list[str], repeats: int) -> dict[str, float]:
    """The sums of their rates, measured at the same time."""
    context = torch.multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    stance = "force_eager" if smoking() else "default"  # a new process compiles
    workers = [context.Process(target=_work, args=(words, keeps, repeats, stance, barrier, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    rates = [queue.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    return {keep: sum(each[keep] for each in rates) for keep in keeps}


def _work(words: list[str], keeps: list[str], repeats: int, stance: str, barrier: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance(stance)
    rates = {}
    for keep in keeps:
        play = _rollout(words, keep, ROLLOUT_STEPS)
        play()
        barrier.wait(timeout=300)
        # One round: two that are best at different times would not be two cores.
        rates[keep] = ROLLOUT_STEPS * BATCH / _median(play, 3 * repeats, rounds=1)
        barrier.wait(timeout=300)  # both live until both have measured
    queue.put(rates)


def _expert(words: list[str], repeats: int, games: int) -> list[dict[str, Any]]:
    start = time.perf_counter()
    player = OptimalPlayer(words, seed=0)
    built = time.perf_counter() - start
    fresh = WordleEnv(words, batch_size=[1], seed=0).reset()

    def first_move() -> None:
        player._best.clear()
        player(fresh)

    milliseconds = 1e3 * _median(first_move, repeats)
    player._best.clear()
    start = time.perf_counter()
    total = _expert_games(player, words, games)
    seconds = time.perf_counter() - start
    return [
        row("expert, building its table", built, "s", None),
        row("expert, first move of a game, empty cache", milliseconds, "ms", MAX_FIRST_MOVE_MS, at_most=True),
        row(f"expert, {games:,} games", seconds, "s", MAX_EXPERT_SECONDS * games / 100_000, at_most=True),
        row(f"expert, mean return of {games:,} games", total / games, "", None),
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


def _median(job: Callable[[], Any], repeats: int, rounds: int = 3) -> float:
    """Median seconds of a job, after one run to warm up: the best of some rounds, for other programs come and go."""
    if smoking():
        repeats = rounds = 1
    job()
    medians = []
    for _ in range(rounds):
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            job()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return min(medians)
