"""Run the visual dialogue demo: prepare, train what is missing, play, and report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrl_lang._files import folder_lock, remove_leftovers, write_file, write_json
from torchrl_lang.envs.visual_dialogue import prepare as prepare_visual_dialogue
from torchrl_lang.envs.visual_dialogue.prepare import PrepareVisualDialogue
from torchrl_lang.envs.visual_dialogue.rewards import Penalty
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueData, VisualDialogueTask
from torchrl_lang.recipes.compare import METHODS, ComparisonOptions, PlannedRun, planned_runs, train_missing
from torchrl_lang.recipes.datasets import check_place, generate_once
from torchrl_lang.recipes.options import option, with_defaults
from torchrl_lang.recipes.visual_dialogue_demo.checks import check
from torchrl_lang.recipes.visual_dialogue_demo.comparison import Comparison, Row, cross_rewards
from torchrl_lang.recipes.visual_dialogue_demo.pictures import draw_page
from torchrl_lang.recipes.visual_dialogue_demo.played import PlayedDialogues
from torchrl_lang.recipes.visual_dialogue_demo.players import UNGUIDED, DialoguePlayer, play
from torchrl_lang.recipes.visual_dialogue_demo.report import (
    advantages,
    format_advantages,
    format_comparison,
    format_cross_rewards,
    write_dialogues,
)

__all__ = ["VisualDialogueDemo", "main"]

_PENALISED_ILQL: Mapping[str, Any] = {"cql-weight": 0.3}
"""Returns with a penalty spread more, and so do the errors of values: ILQL then repeats questions late in a dialogue.
The larger weight helps there, and harms without a penalty."""

_IMITATIONS = [name for name, method in METHODS.items() if method.train[0] == "bc"]
"""Methods that copy the data, or its best part."""


@with_defaults(out=Path("runs/visual_dialogue"), steps=VisualDialogueTask.presets["bc"]["steps"])
class VisualDialogueDemo(ComparisonOptions):
    """Visual dialogue: BC and ILQL under three rewards, a table on test scenes for each, in half an hour."""

    folder: Path | None = option(None, "folder that `prepare visual_dialogue` filled; none: prepare one in --out")
    rewards: tuple[Penalty, ...] = option(("none", "hard", "conservative"), "rewards to train and to evaluate on")
    eval_every: int | None = option(
        None, "steps between checkpoints, the best of which plays; none: one after the last step", at_least=1
    )
    eval_games: int = option(1000, "test scenes that each player plays once, at most all", at_least=2)
    choice_games: int = option(250, "validation scenes on which decodings are chosen, at most all", at_least=1)
    image: bool = option(True, "the agent sees the image")


def main(options: VisualDialogueDemo) -> Path:
    """Run the demo, or what is missing of it; returns the folder with ``report.txt`` and ``results.json``."""
    check_place(options.out)
    with folder_lock(options.out, "runs this demo"):
        remove_leftovers(options.out)
        began = time.monotonic()
        if options.folder is None:
            folder = prepare_visual_dialogue.main(PrepareVisualDialogue(out=options.out / "prepared"))
            options = replace(options, folder=folder)
        _data(options, "none").task().tokenizer()  # a folder that cannot be read is not recorded: another may follow
        options.record("rewards")
        rewards: Any = [*dict.fromkeys((*options.rewards, *(["none"] if _shared(options) else [])))]
        data = {penalty: generate_once(_data(options, penalty)) for penalty in rewards}
        train_missing([run for seed in range(options.seeds) for run in _runs(options, data, seed)])
        task: Any = _data(options, "none").task()
        comparisons = [_compare(options, task, penalty) for penalty in dict.fromkeys(options.rewards)]
        questions = _advantages(options, comparisons, data)
        minutes = (time.monotonic() - began) / 60
        print(f"\n{_write(options, task, comparisons, questions, minutes)}\n")
        print(f"report, pictures, transcripts and all figures: {options.out}; {minutes:.1f} minutes", flush=True)
    return options.out


def _shared(options: VisualDialogueDemo) -> bool:
    """Whether BC is trained, for which all rewards are the same: one run serves them all."""
    return any("bc" in (name, METHODS[name].start) for name in options.methods)


def _data(options: VisualDialogueDemo, penalty: Penalty) -> VisualDialogueData:
    assert options.folder is not None
    out = options.out / "data" / penalty
    return VisualDialogueData(folder=options.folder, out=out, penalty=penalty, image=options.image)


def _place(options: VisualDialogueDemo, seed: int, penalty: Penalty) -> dict[str, Path]:
    """The folder of each method's run."""
    home = options.out / f"seed-{seed}"
    return {name: home / (name if name == "bc" else f"{name}-{penalty}") for name in METHODS}


def _runs(options: VisualDialogueDemo, data: Mapping[Penalty, Path], seed: int) -> list[PlannedRun]:
    every = options.steps if options.eval_every is None else options.eval_every
    shared = {**options.of_training(seed), "eval-every": every, "eval-games": options.choice_games}
    runs = {}
    for penalty in dict.fromkeys(options.rewards):
        places = _place(options, seed, penalty)
        for run in planned_runs(options.methods, places, {**shared, "data": data[penalty]}):
            if run.method == "bc":
                run = run._replace(options={**shared, "data": data["none"]})
            elif run.method == "ilql" and penalty != "none":
                run = run._replace(options={**run.options, **_PENALISED_ILQL})
            runs[run.out] = run
    return list(runs.values())


def _compare(options: VisualDialogueDemo, task: VisualDialogueTask, penalty: Penalty) -> Comparison:
    rows, curves = [], {}
    for name in [name for name in METHODS if name in options.methods]:
        title = METHODS[name].title
        players = _players(options, name, penalty)
        best = [player.best(penalty) for player in players]
        plays = [player.test(decoding) for player, decoding in zip(players, best, strict=True)]
        rows.append(Row(title, plays, best, imitates=name in _IMITATIONS))
        if UNGUIDED in players[0].measured:
            plays = [player.test(UNGUIDED) for player in players]
            rows.append(Row(f"{title} beta 0", plays, ["greedy"] * len(plays)))
            curves[title] = {
                decoding.removeprefix("greedy, beta "): [player.measured[decoding][penalty] for player in players]
                for decoding in players[0].measured
            }
    data = PlayedDialogues.of_dataset(task, "test", options.eval_games)
    rows.append(Row("dialogues of the data", [data], imitates=True))
    rows.append(Row("random questions", [_random_questions(options, task)], imitates=True))
    return Comparison(penalty, rows, curves)


def _players(options: VisualDialogueDemo, method: str, penalty: Penalty) -> list[DialoguePlayer]:
    games = {"choice_games": options.choice_games, "eval_games": options.eval_games}
    places = [_place(options, seed, penalty)[method] for seed in range(options.seeds)]
    return [DialoguePlayer(place, method, seed, **games) for seed, place in enumerate(places)]


def _random_questions(options: VisualDialogueDemo, task: VisualDialogueTask) -> PlayedDialogues:
    """Those of a player that draws questions of the data and asks none twice."""
    path = options.out / "random_questions.json"
    if not path.exists():
        play(task, task.player("data", 0).policy, options.eval_games, 0).save(path)
    return PlayedDialogues.load(path)


def _advantages(
    options: VisualDialogueDemo, comparisons: Sequence[Comparison], data: Mapping[Penalty, Path]
) -> dict[str, Any]:
    """The best and worst questions by the values of the first seed's ILQL, by reward."""
    if "ilql" not in options.methods:
        return {}
    penalties = [comparison.penalty for comparison in comparisons]
    return {each: advantages(_players(options, "ilql", each)[0], data[each]) for each in penalties}


def _write(
    options: VisualDialogueDemo,
    task: VisualDialogueTask,
    comparisons: Sequence[Comparison],
    questions: Mapping[str, Any],
    minutes: float,
) -> str:
    """Write all files, before anything is printed, so that a closed output loses nothing; returns the report."""
    titles = [METHODS[name].title for name in METHODS if name in options.methods]
    checks = [one for each in comparisons if (one := check(each, task)) is not None]
    content: dict[str, Any] = {
        **options.as_json(minutes),
        "checks": [one.as_dict() for one in checks],
        "cross_rewards": {title: cross_rewards(comparisons, task, title) for title in titles},
        **{each.penalty: {**each.as_dict(task), "advantages": questions.get(each.penalty)} for each in comparisons},
    }
    write_json(options.out / "results.json", content)
    parts = [format_comparison(each, task) for each in comparisons]
    parts.append(format_cross_rewards(comparisons, task))
    parts += [format_advantages(penalty, found) for penalty, found in questions.items()]
    text = "\n\n\n".join([*parts, "\n".join(map(str, checks))]).rstrip()
    write_file(options.out / "report.txt", text + "\n")
    for each in comparisons:
        write_dialogues(options.out / "transcripts" / f"{each.penalty}.txt", each, task, titles)
    draw_page(options.out / "pictures.png", comparisons)
    return text
