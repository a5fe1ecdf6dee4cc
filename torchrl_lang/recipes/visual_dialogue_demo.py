"""The visual dialogue demo: imitation and ILQL under three rewards, on scenes without training dialogues."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_lang.envs.visual_dialogue import prepare
from torchrl_lang.envs.visual_dialogue.data import scene_episode
from torchrl_lang.envs.visual_dialogue.env import PROGRESS
from torchrl_lang.envs.visual_dialogue.files import ROUNDS
from torchrl_lang.envs.visual_dialogue.rewards import Penalty
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask
from torchrl_lang.evaluation import GameRecords, Summary
from torchrl_lang.recipes import compare
from torchrl_lang.recipes.datasets import generate_once, output_folder
from torchrl_lang.recipes.demo_options import METHODS, VisualDialogueDemo
from torchrl_lang.recipes.tasks.visual_dialogue import PrepareVisualDialogue, VisualDialogueData
from torchrl_lang.text import to_rows

_PENALISED_ILQL: Mapping[str, Any] = {"cql-weight": 0.3}
"""Returns with a penalty spread more, and so do the errors of values: ILQL then repeats questions late in a dialogue.
The larger weight helps there, and harms without a penalty."""


def main(options: VisualDialogueDemo) -> Path:
    """Run the demo, or what is missing of it; returns the folder with ``report.txt`` and ``results.json``."""
    with output_folder(options.out):
        began = time.monotonic()
        if options.folder is None:
            folder = prepare.main(PrepareVisualDialogue(out=options.out / "prepared"))
            options = replace(options, folder=folder)
        # A folder that cannot be read is not recorded: another may follow.
        tasks: dict[Penalty, Any] = {penalty: _data(options, penalty).task() for penalty in options.rewards}
        next(iter(tasks.values())).tokenizer()
        options.record("rewards")
        shares_bc = any("bc" in (name, METHODS[name].start) for name in options.methods)  # one run for all rewards
        rewards: Any = dict.fromkeys((*options.rewards, *(["none"] if shares_bc else [])))
        data = {penalty: generate_once(_data(options, penalty)) for penalty in rewards}
        compare.train_missing([run for seed in range(options.seeds) for run in _runs(options, data, seed)])
        found = {penalty: _rows(options, task) for penalty, task in tasks.items()}
        players = {penalty: {row.title: row.as_dict() for row in rows} for penalty, rows in found.items()}
        parts = (
            f"Reward {name!r}, dialogues about test scenes\n\n{compare.format_rows(r)}" for name, r in found.items()
        )
        compare.publish(options, began, "\n\n\n".join(parts), players)
    return options.out


def _data(options: VisualDialogueDemo, penalty: Penalty) -> VisualDialogueData:
    folder: Any = options.folder
    return VisualDialogueData(folder=folder, out=options.out / "data" / penalty, penalty=penalty, image=options.image)


def _places(options: VisualDialogueDemo, seed: int, penalty: Penalty) -> dict[str, Path]:
    """The folder of each method's run."""
    home = options.out / f"seed-{seed}"
    return {name: home / (name if name == "bc" else f"{name}-{penalty}") for name in METHODS}


def _runs(options: VisualDialogueDemo, data: Mapping[Penalty, Path], seed: int) -> list[Any]:
    every = options.steps if options.eval_every is None else options.eval_every
    shared = {**options.of_training(seed), "eval-every": every, "eval-games": options.choice_games}
    runs = {}
    for penalty in dict.fromkeys(options.rewards):
        for run in compare.planned_runs(
            options.methods, _places(options, seed, penalty), {**shared, "data": data[penalty]}
        ):
            more: Any = {"data": data["none"]} if run.method == "bc" else {}
            if run.method == "ilql" and penalty != "none":
                more = _PENALISED_ILQL
            runs[run.out] = run._replace(options={**run.options, **more})
    return list(runs.values())


@dataclass(frozen=True)
class DialoguePlayer(compare.TrainedPlayer):
    """A finished run and its dialogues under one reward."""

    task: VisualDialogueTask
    options: VisualDialogueDemo

    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run."""
        return compare.decodings(self.finished, by_values=METHODS[self.method].by_values)

    def play(self, policy: TensorDictModuleBase, place: tuple[str, int]) -> Summary:
        """The first scenes of a split, each once."""
        games = self.options.eval_games if place == compare.REPORT else self.options.choice_games
        return _played(self.task, policy, games, (place[0], place[1] + self.seed))

    def choose(self, found: Mapping[str, Summary]) -> str:
        """The decoding with the highest return; of equal ones the first."""
        return max(found, key=lambda name: found[name].mean_return)


def _rows(options: VisualDialogueDemo, task: VisualDialogueTask) -> list[compare.Row]:
    """The players under the reward of a task."""
    rows = []
    for name in [name for name in METHODS if name in options.methods]:
        players = []
        for seed in range(options.seeds):
            run = _places(options, seed, task.penalty)[name]
            players.append(DialoguePlayer(run, name, run / f"figures-{task.penalty}", seed, task, options))
        rows.append(compare.compared(players))
    title, games = "random questions", options.eval_games  # of the data, none asked twice
    found = compare.kept(
        options.out / f"random-{task.penalty}.json",
        lambda: {title: _played(task, task.player("data", 0).policy, games, compare.REPORT)},
    )
    return [*rows, compare.Row("dialogues of the data", [_of_data(task, games)]), compare.Row(title, [found[title]])]


def _played(task: VisualDialogueTask, policy: Any, games: int, place: tuple[str, int]) -> Summary:
    """Play the first scenes of a split, each once; at most all."""
    split, seed = place
    games = min(games, task.number_of_games(split))
    return replace(task.evaluate(policy, split=split, games=games, seed=seed)[0], guesses={})  # of games that have some


def _of_data(task: VisualDialogueTask, games: int) -> Summary:
    """The first test dialogues of the files, cut where they end."""
    scenes, tokens = task.data("test").scenes(task.rewards)[:games], task.prepared.tokens()
    rows = to_rows([scene_episode(each, task.rewards) for each in scenes], tokens.tokenizer, tokens.row_length)
    records = GameRecords.from_rows(rows, tokens.tokenizer.control)
    progress = [each.rewards + (0.0,) * (1 + ROUNDS - len(each.rewards)) for each in scenes]
    records.kept[PROGRESS] = torch.tensor(progress)
    return replace(task.summary(records, ""), guesses={})
