"""One part of the demo: a dataset, imitation and ILQL trained on it, and all their players on the same games."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_lang.data import RowDataset
from torchrl_lang.evaluation import GameRecords, Summary, imitation_loss, write_transcripts
from torchrl_lang.modules.save import saved_actor
from torchrl_lang.recipes.datasets import generate_once, open_dataset
from torchrl_lang.recipes.demo.parallel import run_in_parallel
from torchrl_lang.recipes.load_run import FinishedRun, load_run
from torchrl_lang.recipes.offline import held_out_rows
from torchrl_lang.recipes.tasks.base import DataOptions, Player, Task
from torchrl_lang.schema import AGENT_MASK

__all__ = ["IMITATIONS", "Part", "PartResults", "run_part"]

IMITATIONS = {"bc": ("BC", 1.0), "bc_best_30": ("BC best 30 %", 0.3), "bc_best_10": ("BC best 10 %", 0.1)}
"""Runs that imitate: the player's name, and the share of the episodes, those with the best returns."""

_TEMPERATURES = (0.2, 0.5, 1.0)
_HELD_OUT = 500


@dataclass(frozen=True)
class Part:
    """What a part of the demo trains and compares."""

    title: str
    data: DataOptions
    steps: int
    """Training steps of each run."""
    scripted: Callable[[Task, RowDataset, int], Mapping[str, Player]]
    """``(task, data, seed)`` to players that learned nothing: perfect imitations of the data, and the optimum last."""
    illustrate: Callable[[PartResults, list[Any]], None]
    """Draws one game of each of three players into three axes."""
    eval_games: int
    betas: tuple[float, ...]
    seed: int


@dataclass
class PartResults:
    """What a part found."""

    part: Part
    folder: Path
    task: Task
    summaries: dict[str, Summary] = field(default_factory=dict)
    records: dict[str, GameRecords] = field(default_factory=dict)
    chosen_beta: float = 0.0
    held_out_loss: float = 0.0
    """Of BC, nats per token."""
    data_entropy: float = 0.0
    """Of the players that made the data on the same episodes, nats per token: no imitation has a lower loss."""
    values_note: str = ""
    minutes: float = 0.0

    @property
    def optimum(self) -> str:
        """Name of the optimal player."""
        return list(self.summaries)[-1]

    def best(self, prefix: str) -> str:
        """Name of the best player whose name begins with ``prefix``."""
        names = [name for name in self.summaries if name.startswith(prefix)]
        return max(names, key=lambda name: self.summaries[name].mean_return)

    @property
    def ilql(self) -> str:
        """Name of the ILQL player with the chosen beta."""
        return _ilql(self.chosen_beta)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "title": self.part.title,
            "steps": self.part.steps,
            "eval_games": self.part.eval_games,
            "minutes_of_this_call": round(self.minutes, 2),
            "chosen_beta": self.chosen_beta,
            "bc_held_out_loss": self.held_out_loss,
            "data_entropy": self.data_entropy,
            "values": self.values_note,
            "players": {name: summary.as_dict() for name, summary in self.summaries.items()},
        }


def run_part(part: Part, folder: Path) -> PartResults:
    """Generate, train and play. What an interrupted call left is continued."""
    began = time.monotonic()
    data = generate_once(part.data)
    _train(part, data, folder)
    dataset, task = open_dataset(data)
    results = PartResults(part, folder, task)
    runs = {name: load_run(folder / name) for name in (*IMITATIONS, "ilql")}
    _check_imitation(results, runs["bc"], dataset)
    results.values_note = runs["ilql"].values_note
    games = max(part.eval_games // 4, 1)
    results.chosen_beta = next(iter(runs["ilql"].choose_beta(seed=part.seed + 2000, games=games, betas=part.betas)))
    control = dataset.tokenizer.control
    results.summaries["data"] = task.summary(GameRecords.from_rows(dataset[:], control), "data")
    for name, player in _players(part, runs, task, dataset).items():
        _play(results, name, player, dataset)
    results.minutes = (time.monotonic() - began) / 60
    return results


def _train(part: Part, data: Path, folder: Path) -> None:
    """Run all trainings, each with the same number of steps; ILQL first, because it takes longest."""
    options = {"data": data, "steps": part.steps, "seed": part.seed, "eval-every": -(-part.steps // 8)}
    options["held-out"] = _HELD_OUT
    shared = [word for name, value in options.items() for word in (f"--{name}", value)]
    commands: dict[str, Sequence[Any]] = {"ilql": ["train", "ilql", "--out", folder / "ilql", *shared]}
    for name, (_, fraction) in IMITATIONS.items():
        commands[name] = ["train", "bc", "--out", folder / name, "--fraction", fraction, *shared]
    run_in_parallel({name: [str(word) for word in words] for name, words in commands.items()})


def _check_imitation(results: PartResults, bc: FinishedRun, dataset: RowDataset) -> None:
    """BC's loss on episodes that were not trained on, beside the entropy of the players that made them."""
    part = results.part
    rows = held_out_rows(dataset, _HELD_OUT)
    results.held_out_loss = imitation_loss(saved_actor(bc.model), rows)
    behavior: Any = part.data.behavior_policy(results.task).policy
    results.data_entropy = -float(behavior.log_prob(rows).sum()) / int(rows.get(AGENT_MASK).sum())


def _players(part: Part, runs: Mapping[str, FinishedRun], task: Task, dataset: RowDataset) -> dict[str, Player]:
    """All players of the table; a name contains the way of decoding."""
    players: dict[str, Player] = {}
    seed = part.seed + 1000
    for run, (name, _) in IMITATIONS.items():
        players[f"{name}, greedy"] = Player(runs[run].policy(method="greedy"))
        for temperature in _TEMPERATURES:
            policy = runs[run].policy(seed=seed, temperature=temperature)
            players[f"{name}, sampled at {temperature:g}"] = Player(policy)
    players |= {_ilql(beta): Player(runs["ilql"].policy(beta, method="greedy")) for beta in (0.0, *part.betas)}
    return players | dict(part.scripted(task, dataset, seed))


def _ilql(beta: float) -> str:
    return f"ILQL beta {beta:g}, greedy"


def _play(results: PartResults, name: str, player: Player, dataset: RowDataset) -> None:
    part = results.part
    summary, records = results.task.evaluate(
        player.policy, games=part.eval_games, seed=part.seed + 1000, name=name, **player.env_options
    )
    results.summaries[name], results.records[name] = summary, records
    print(f"{name}: mean return {summary.mean_return:.2f}", flush=True)
    path = results.folder / "transcripts" / f"{name.replace(' ', '_').replace(',', '').replace('%', 'percent')}.txt"
    write_transcripts(path, records, dataset.tokenizer, games=10, title=name, spelling=results.task.spelling)
