"""The second part of the demo: Wordle from games with a poor favourite first word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from torchrl_lang.data import RowDataset, best_rows
from torchrl_lang.envs.wordle import MixturePlayer, OptimalPlayer, TreePlayer, WordIndex, solve
from torchrl_lang.envs.wordle.task import WordleTask
from torchrl_lang.envs.wordle.transcript import turns_of_rows
from torchrl_lang.evaluation import GameRecords
from torchrl_lang.recipes.demo.part import PartResults
from torchrl_lang.recipes.tasks.base import Player, Task

__all__ = ["draw_tiles", "scripted_games"]

_COLOURS = ("0.45", "#c9b458", "#6aaa64")


def scripted_games(task: Task, data: RowDataset, seed: int) -> Mapping[str, Player]:
    """Perfect imitations that begin as the data does and then play on optimally; and the optimum, myopic and exact."""
    words, rules = list(cast(WordleTask, task).words), cast(WordleTask, task).rules
    first = _first_words(data[:])
    best = _first_words(best_rows(data, fraction=0.3))
    favourite = first.most_common(1)[0][0]
    players = [OptimalPlayer(words, rules=rules, openers=[word], seed=seed + i) for i, word in enumerate(best)]
    shares = [count / best.total() for count in best.values()]
    return {
        f"perfect copy, greedy: {favourite}, then optimal": Player(
            OptimalPlayer(words, rules=rules, openers=[favourite], seed=seed)
        ),
        "perfect copy of the best 30 %'s first words, then optimal": Player(
            MixturePlayer(players, shares, per="game", seed=seed)
        ),
        "optimal (myopic)": task.player("optimal", seed),
        "optimal (exact)": Player(TreePlayer(solve(words, rules=rules, progress=False))),
    }


def _first_words(rows: TensorDictBase) -> Counter[str]:
    turns = turns_of_rows(rows)
    known = turns.guess[turns.answered > 0, 0]
    words, counts = known.unique(dim=0, return_counts=True)
    return Counter({WordIndex.text(word): int(count) for word, count in zip(words, counts, strict=True)})


def draw_tiles(results: PartResults, axes: list[Any]) -> None:
    """Draw one game of each player with the same hidden word, the game whose lengths are closest to the means."""
    names = ["BC, sampled at 1", results.best("BC"), results.ilql]
    titles = ["like the data (BC, sampled at 1)", *names[1:]]
    turns = torch.stack([results.records[name].turns.double() for name in names])
    game = int((turns - turns.mean(-1, keepdim=True)).abs().sum(0).argmin())
    for name, title, panel in zip(names, titles, axes, strict=True):
        _draw_game(panel, results.records[name], game)
        panel.set_title(f"{title}: return {float(results.records[name].returns[game]):g}", fontsize="medium")


def _draw_game(panel: Any, records: GameRecords, game: int) -> None:
    rows = records.rows[game : game + 1]
    turns = turns_of_rows(rows)
    for row in range(int(turns.answered)):
        word, colours = WordIndex.text(turns.guess[0, row]).upper(), turns.colours[0, row].tolist()
        for column, (letter, colour) in enumerate(zip(word, colours, strict=True)):
            x, y = [column, column + 0.92, column + 0.92, column], [-row, -row, -row - 0.92, -row - 0.92]
            panel.fill(x, y, color=_COLOURS[colour])
            panel.text(column + 0.46, -row - 0.48, letter, color="white", ha="center", va="center", weight="bold")
    panel.set(xlim=(-0.5, 5.5), ylim=(-6.1, 0.2), aspect="equal")
    panel.set_axis_off()
