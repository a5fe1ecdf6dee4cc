"""Run the Reddit demo: generate comments, train what is missing, choose decodings, write comments, and report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase

from torchrl_lang.envs.reddit.task import RedditData, RedditTask, generate_corpus
from torchrl_lang.evaluation import GameRecords, Summary, perplexity
from torchrl_lang.modules.save import saved_actor
from torchrl_lang.recipes import compare
from torchrl_lang.recipes.datasets import generate_once, output_folder
from torchrl_lang.recipes.demo_options import METHODS, RedditDemo
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.text import to_rows

_WAYS: Mapping[str, Any] = {
    "temperatures": (0.2, 0.5, 0.8, 1.0),
    "guided_temperatures": (1.0,),
    # Close to each other: from one to the next, comments become less profane and less varied.
    "betas": (1.0, 2.0, 3.0, 4.0, 6.0, 8.0),
    # Of tokens by values: an end in the middle of a sentence avoids all harm, and no data show that it is bad.
    "min_p": 0.05,
}
LEAST_DISTINCT, MOST_PERPLEXITY = 0.8, 1.1
"""Of a decoding, relative to the data's comments."""
RULE = (
    "Each player's decoding was chosen on parents of validation comments: the highest reward without noise among the "
    "decodings whose distinct-2 is at least 80 % and whose perplexity under BC is at most 110 % of those of as many "
    "comments of the data, and of equal ones the more varied. If none keeps the limits, the one nearest to them."
)


def main(options: RedditDemo) -> Path:
    """Run the demo, or the missing part of it; returns the folder with ``report.txt`` and ``results.json``."""
    with output_folder(options.out):
        began = time.monotonic()
        if options.folder is not None:
            _data(options).task()  # a folder that cannot be read is not recorded: another one may follow
        options.record()
        data = {name: _data(options, name) for name in ("profanity", "profanity_noised")}
        folders = {name: generate_once(each) for name, each in data.items()}
        compare.train_missing([run for seed in range(options.seeds) for run in _runs(options, folders, seed)])
        rows = _rows(options, data["profanity"].task())
        report = f"Comments on test parents, reward without noise\n\n{compare.format_rows(rows)}\n\n{RULE}"
        compare.publish(options, began, report, {"players": {row.title: row.as_dict() for row in rows}})
    return options.out


def _data(options: RedditDemo, reward: Any = "profanity") -> RedditData:
    """The dataset with a reward."""
    folder = options.folder or options.out / "comments"
    if options.folder is None:
        generate_corpus(options, folder)
    shared: Any = {key: getattr(options, key) for key in ("encoding", "on_bad_rows", "index_files", "tokenizer")}
    return RedditData(out=options.out / "data" / reward, folder=folder, reward=reward, **shared)


def _runs(options: RedditDemo, folders: Mapping[str, Path], seed: int) -> list[compare.PlannedRun]:
    """The runs of a training seed on the datasets in ``folders``."""
    home, shared = options.out / f"seed-{seed}", {**options.of_training(seed), "eval-every": options.steps}
    places = {name: home / name for name in METHODS}
    runs = compare.planned_runs((*options.methods, "bc"), places, {**shared, "data": folders["profanity"]})
    if "ilql" in options.methods:
        runs.insert(0, compare.PlannedRun("ilql", home / _NOISED, {**shared, "data": folders["profanity_noised"]}))
    return runs


_NOISED = "ilql-noised"


def _rows(options: RedditDemo, task: RedditTask) -> list[compare.Row]:
    players = {name: (name, METHODS[name].title) for name in METHODS if name in (*options.methods, "bc")}
    if "ilql" in options.methods:
        players[_NOISED] = ("ilql", "ILQL, noised reward")
    sizes = {compare.CHOICE: options.choice_comments, compare.REPORT: options.comments}
    sizes = {place: min(wanted, len(task.data(place[0]))) for place, wanted in sizes.items()}
    scorers = [Scorer(task, options.out / f"seed-{seed}" / "bc", sizes) for seed in range(options.seeds)]
    rows = []
    for key, (method, title) in players.items():
        homes = [scorer.bc.with_name(key) for scorer in scorers]
        found = [CommentPlayer(home, method, home, seed, scorers[seed]) for seed, home in enumerate(homes)]
        rows.append(compare.compared(found, title))
    return [*rows, compare.Row("comments of the data", [scorer.data(compare.REPORT) for scorer in scorers])]


@dataclass(frozen=True)
class Scorer:
    """Measures the comments of one training seed by the reward without noise and BC's run.

    Args:
        task: the task.
        bc: folder of BC's run.
        sizes: number of comments on parents of each split.
    """

    task: RedditTask
    bc: Path
    sizes: Mapping[tuple[str, int], int]

    @cached_property
    def actor(self) -> TensorDictModuleBase:
        """The language model of BC's run."""
        return saved_actor(load_run(self.bc).model)

    @cached_property
    def limits(self) -> Summary:
        """Figures of the comments of the data that decodings are compared with."""
        return self.data(compare.CHOICE)

    def data(self, place: tuple[str, int]) -> Summary:
        """Figures of the first comments of a split."""
        task, comments = self.task, self.task.data(place[0]).take(range(self.sizes[place]))
        more: Any = {"scale": task.scale, "shift": task.shift, "include_parent": task.include_parent}
        rows = to_rows(comments.episodes(task.clean_reward(), **more), task.tokenizer(), task.row_length)
        records = GameRecords.from_rows(rows, task.tokenizer().control)
        return self._with_perplexity(task.summary(records, ""), records)

    def ask(self, policy: TensorDictModuleBase, place: tuple[str, int], seed: int) -> Summary:
        """Figures of a policy's comments on parents of a split."""
        split, first = place
        found = self.task.evaluate(policy, split=split, games=self.sizes[place], seed=first + seed)
        return self._with_perplexity(*found)

    def _with_perplexity(self, summary: Summary, records: GameRecords) -> Summary:
        metrics = summary.metrics | {"perplexity": perplexity(self.actor, records.rows)}
        return replace(summary, metrics=metrics, guesses={})  # every comment is one turn


@dataclass(frozen=True)
class CommentPlayer(compare.TrainedPlayer):
    """A finished run and its comments, measured by the scorer of its seed."""

    scorer: Scorer

    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run, by name; values both greedily and sampled."""
        return compare.decodings(self.finished, by_values=METHODS[self.method].by_values, **_WAYS)

    def play(self, policy: TensorDictModuleBase, place: tuple[str, int]) -> Summary:
        """Comments on parents of a split."""
        return self.scorer.ask(policy, place, self.seed)

    def choose(self, found: Mapping[str, Summary]) -> str:
        """See :data:`RULE`."""
        return choose(found, self.scorer.limits)


def excess(found: Summary, data: Summary) -> float:
    """By which factor comments miss the limits, relative to comments of the data; at most 1 if both are kept."""
    own, limits = found.metrics, data.metrics
    diversity = LEAST_DISTINCT * limits["distinct_2"] / max(own["distinct_2"], 1e-9)
    return max(diversity, own["perplexity"] / (MOST_PERPLEXITY * limits["perplexity"]))


def choose(found: Mapping[str, Summary], data: Summary) -> str:
    """The decoding that the rule chooses, of those with these figures."""
    within = {name: each for name, each in found.items() if excess(each, data) <= 1}
    if not within:
        return min(found, key=lambda name: excess(found[name], data))
    return max(within, key=lambda name: (within[name].mean_return, within[name].metrics["distinct_2"]))
