"""Run the distillation demo: train what is missing, evaluate on tasks that no history holds, and report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._files import read_json, write_json
from torchrl_lang.algorithm_distillation import episode_returns, evaluate_in_context
from torchrl_lang.algorithm_distillation.policies import ContextPolicy, OptimalPolicy, PromptedPolicy, RandomPolicy
from torchrl_lang.algorithm_distillation.report import InContextReport, in_context_report
from torchrl_lang.algorithm_distillation.sources import NO_NOISE, NoisyExpert
from torchrl_lang.envs.grids import HiddenTaskEnv
from torchrl_lang.evaluation.plots import new_figure, save_figure, tidy
from torchrl_lang.evaluation.tables import cell, format_columns
from torchrl_lang.recipes.algorithm_distillation.formats import FORMATS
from torchrl_lang.recipes.algorithm_distillation.histories import TaskFamily, digest_of, skipped, source_on
from torchrl_lang.recipes.algorithm_distillation.options import Distill, FormatOptions
from torchrl_lang.recipes.compare import publish, run_in_parallel
from torchrl_lang.recipes.datasets import output_folder
from torchrl_lang.recipes.options import dashed
from torchrl_lang.recipes.records import keep_record

_SEED = 2_000_000
"""Seed of the episodes on test tasks; for models plus their training seed, whose errors would otherwise be related."""
_DEMONSTRATION_SEED = 3_000_000
"""Of other starts and payoffs than those of the episodes that are evaluated."""

TITLES = {"ad": "AD", "ed": "ED"}
_HEAD = ("policy", "episode 1", "last {last}", "of optimal", "regret", "worst task", "never found", "late > early")


def main(options: Distill) -> Path:
    """Run it, or what is missing; returns the folder with ``report.txt``, ``results.json`` and ``curves.png``."""
    began, digest = time.monotonic(), digest_of(options)
    with output_folder(options.out):
        keep_record(options.out, options, free=("out", "quick", "methods", "seeds", "history"), history_digest=digest)
        runs: dict[str, list[Path]] = {
            method: [options.out / f"{method}-{seed}" for seed in range(options.seeds)] for method in options.methods
        }
        commands = {
            place.name: _command(options, method, seed, place)
            for method, places in runs.items()
            for seed, place in enumerate(places)
            if not (place / "model").exists()
        }
        run_in_parallel(commands)
        play = TestPlay(options, options.episodes, options.test_streams)
        found = reports(play, runs)
        draw_curves(options.out / "curves.png", found)
        figures = {name: report.as_dict() for name, report in found.items()}
        publish(options, began, format_report(found), figures, files="report, curves and all figures")
    return options.out


def _command(options: Distill, method: str, seed: int, out: Path) -> list[str]:
    """The command that trains a run."""
    changed = replace(options, source="expert", history=None) if method == "ed" else options
    names = [*(field.name for field in fields(FormatOptions)), "steps"]
    given = {name: value for name in names if (value := getattr(changed, name)) is not None}
    evaluation = {"eval_every": max(1, options.steps // 4), "seed": seed, "out": out}
    words = ["train", "ad"]
    for name, value in (given | evaluation).items():
        if value is not False:
            words += [f"--{dashed(name)}", *([] if value is True else [str(value)])]
    return words


# -- policies on test tasks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TestPlay:
    """How policies are evaluated on test tasks.

    Args:
        options: of the tasks, their source algorithm and the format of the models.
        episodes: of each stream.
        streams: of each task.
    """

    __test__ = False  # not a class of tests

    options: FormatOptions
    episodes: int
    streams: int

    def env(self) -> HiddenTaskEnv:
        """The test tasks."""
        family = TaskFamily(self.options)
        return family.env(family.split.test, self.streams)

    def returns(self, policy: ContextPolicy, env: HiddenTaskEnv, *, seed: int = _SEED) -> Tensor:
        """Returns of a policy, ``[tasks, streams, episodes]``."""
        return evaluate_in_context(env, policy, self.episodes, seed=seed)

    def of_model(self, run: Path, training_seed: int, *, prompted: bool = False) -> Tensor:
        """Returns of a run's model, kept in its folder; ``prompted`` with half an episode of an expert."""
        path = run / f"test{'_prompted' if prompted else ''}.json"
        if not path.exists():
            env = self.env()
            actor = FORMATS[self.options.format].load(run / "model").policy(self.options.temperature)
            policy = PromptedPolicy(actor, self._demonstration(training_seed)) if prompted else actor
            write_json(path, {"returns": self.returns(policy, env, seed=_SEED + training_seed).tolist()})
            print(f"{run.name}{', prompted' * prompted}: {self.episodes} episodes on test tasks", flush=True)
        return torch.tensor(read_json(path, remedy="delete it: the episodes are played again")["returns"])

    def _demonstration(self, training_seed: int) -> TensorDict:
        """The first half of an expert's episode, one in each stream."""
        env = self.env()
        seed = _DEMONSTRATION_SEED + training_seed
        expert = NoisyExpert(env, max(1, env.episode_length // 2), decay=NO_NOISE, seed=seed)
        return expert.history().flatten(0, 1)

    def of_source(self) -> Tensor:
        """Returns of the source algorithm on the test tasks, of the episodes that histories keep.

        Up to the end of a history they are the learners that the model was trained on; after it they continue to learn.
        """
        every = skipped(self.options)
        source = source_on(self.options, self.env(), seed=_SEED, episodes=self.episodes * every)
        return episode_returns(source.history(), self.episodes * every)[..., ::every]


def reports(play: TestPlay, runs: Mapping[str, Sequence[Path]]) -> dict[str, InContextReport]:
    """A report for each method, its source, random and optimal actions, by title.

    Args:
        play: how policies are evaluated.
        runs: the folders of each method's runs, one for each training seed from 0 on.
    """
    env = play.env()
    optimal = env.optimal_return()[:, 0]
    found: dict[str, Tensor] = {}
    for method, places in runs.items():
        seeded = list(enumerate(places))
        found[TITLES[method]] = torch.stack([play.of_model(place, seed) for seed, place in seeded])
        if method == "ad":
            prompted = [play.of_model(place, seed, prompted=True) for seed, place in seeded]
            found["AD, prompted"] = torch.stack(prompted)
    found["source"] = play.of_source()[None]
    found["random"] = play.returns(RandomPolicy(env.n_actions), env)[None]
    found["optimal"] = play.returns(OptimalPolicy(env), env)[None]
    tasks = TaskFamily(play.options).split.test
    return {name: in_context_report(name, returns, optimal, tasks=tasks) for name, returns in found.items()}


# -- the report --------------------------------------------------------------------------------------------------------


def format_report(found: Mapping[str, InContextReport]) -> str:
    """A table with one line per policy, and how AD does on each task."""
    first = next(iter(found.values()))
    lines = [[title.format(last=first.last) for title in _HEAD]]
    lines += [[name, *_cells(report)] for name, report in found.items()]
    episodes, tasks = len(first.mean), len(first.tasks)
    parts = [
        f"{tasks} tasks that no history holds, {episodes} episodes without a change of weights; mean return, standard "
        "errors over training seeds; regret: what the optimum earns more in all episodes.",
        format_columns(lines, "<" + ">" * (len(_HEAD) - 1)),
    ]
    if "AD" in found:
        parts.append(_by_task(found["AD"]))
    return "\n\n".join(parts)


def _cells(report: InContextReport) -> list[str]:
    share, worst = report.share_of_optimal, report.worst_task.share
    return [
        f"{report.mean[0]:.2f}",
        f"{sum(report.mean[-report.last :]) / report.last:.2f}",
        "-" if share is None else cell(share.mean, share.error, digits=1, scale=100, unit=" %"),
        cell(report.total_regret.mean, report.total_regret.error, digits=1),
        cell(worst, digits=0, scale=100, unit=" %"),
        f"{100 * report.never_found:.1f} %",
        f"p = {report.late_beats_early.p_value:.2g}",
    ]


def _by_task(report: InContextReport) -> str:
    lines = [["task", "episode 1", f"last {report.last}", "optimal", "never found"]]
    for task in report.tasks:
        figures = (task.first, task.last, task.optimal)
        lines.append([str(task.task), *(f"{value:.2f}" for value in figures), f"{100 * task.never_found:.1f} %"])
    return f"{report.name} by task:\n" + format_columns(lines, ">" * len(lines[0]))


def draw_curves(path: Path, found: Mapping[str, InContextReport]) -> Path:
    """Draw the mean return by episode, with 95 % bands over tasks and seeds."""
    figure = new_figure(width=7.0, height=4.2)
    axes = figure.subplots()
    for name, report in found.items():
        episodes = range(1, len(report.mean) + 1)
        style = "-" if name.startswith(("AD", "ED")) else "--"
        (line,) = axes.plot(episodes, report.mean, style, linewidth=1.5, label=name)
        if style == "-":
            axes.fill_between(episodes, report.low, report.high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set(xlabel="episode", ylabel="return")
    tidy(axes)
    return save_figure(figure, path, "Unseen tasks, fixed weights")
