"""Turns of Wordle a second and memory against the number of environments, with guesses drawn beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from benchmarks.common import Median, along, device, median, ratio, row, smoking
from benchmarks.figures import described
from benchmarks.memory import peak_bytes
from torchrl_lang.envs import CompiledRollout
from torchrl_lang.envs.wordle import WordIndex, WordleEnv, guess_words, wordle_tokenizer
from torchrl_lang.schema import ACTION

Consistent = Literal[False, "packed"]
ENVS, QUICK_ENVS = (64, 256, 1024, 4096, 16_384, 65_536), (64, 4096)
N_WORDS, TURNS = 2300, 6
FORMS: dict[str, Consistent] = {"env.step": False, "env.step, packed sets": "packed"}
COMPILED = "compiled rollout"


def measure_envs(quick: bool, rounds: int, budget: float) -> list[dict[str, Any]]:
    """Whole TensorDicts every turn, without and with the sets of consistent words; a compiled rollout keeps less."""
    count, places = (20, (2, 4)) if smoking() else (N_WORDS, QUICK_ENVS if quick else ENVS)
    words = guess_words()[:: len(guess_words()) // count][:count]
    guesses = {n: random_guesses(words, n) for n in places}
    times = along({n: _games(words, actions) for n, actions in guesses.items()}, rounds, budget=budget)
    rates = {form: {n: _rate(n, times[n][form]) for n in places} for form in (*FORMS, COMPILED)}
    peaks = {form: {n: _peak(words, actions, form) for n, actions in guesses.items()} for form in FORMS}
    rows = []
    for n in (places[0], places[-1]):
        over = ratio(times[n], "env.step", COMPILED)
        rows.append(row(f"{n:,} envs: env.step", rates["env.step"][n], "turns/s"))
        rows.append(row(f"{n:,} envs: {COMPILED} / env.step, turns/s", over, "x"))
    for form, points in peaks.items():
        (near, low), (far, high) = list(points.items())[-2:]
        size = (high - low) * 2**20 / (far - near)
        rows.append(row(f"{near:,} to {far:,} envs: memory that each takes in a game, {form}", size, "bytes"))
    title = f"Wordle against the number of environments ({N_WORDS:,} words, games of {TURNS} random guesses)"
    panels = {"turns a second": rates, "MB at the worst moment of a game, words included": peaks}
    rows[-1]["figure"] = described("scaling_envs", title, "environments", panels)
    return rows


def _rate(n: int, taken: list[float]) -> Median:
    return median(TURNS * n / took for took in taken)


def _peak(words: list[str], actions: list[Tensor], form: str) -> float:
    """MB of a new env and a game in it."""
    n = actions[0].shape[0]
    return peak_bytes(lambda: play_game(_env(words, n, FORMS[form]), actions), device()) / 2**20


def random_guesses(words: list[str], n: int) -> list[Tensor]:
    """Actions of ``n`` games, turn by turn."""
    letters = WordIndex(words).letters
    drawn = torch.randint(len(words), (TURNS, n), generator=torch.Generator().manual_seed(0))
    end = torch.full((n, 1), wordle_tokenizer().control.end_of_action)
    return [torch.cat([letters[guess], end], -1).to(device()) for guess in drawn]


def _env(words: list[str], n: int, consistent: Consistent = False) -> WordleEnv:
    return WordleEnv(words, batch_size=[n], consistent=consistent, seed=0, device=device())


def _games(words: list[str], actions: list[Tensor]) -> dict[str, Callable[[], Any]]:
    n = actions[0].shape[0]
    games: dict[str, Callable[[], Any]] = {
        form: partial(play_game, _env(words, n, consistent), actions) for form, consistent in FORMS.items()
    }
    return games | {COMPILED: CompiledRollout(_env(words, n), _Drawn(actions), TURNS, keep="turns")}


def play_game(env: WordleEnv, actions: list[Tensor]) -> None:
    """A game, a whole TensorDict each turn."""
    tensordict = env.reset()
    for action in actions:
        tensordict = env.step(tensordict.set(ACTION, action))["next"]


class _Drawn(TensorDictModuleBase):
    """Replays actions that were drawn beforehand, turn by turn, without reading the rows."""

    def __init__(self, actions: list[Tensor]) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [], [ACTION]
        self.turns = itertools.cycle(actions)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set(ACTION, next(self.turns))
