"""Run the Reddit demo: generate comments, train what is missing, choose decodings, write comments, and report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_lang._files import Record, folder_lock, remove_leftovers, write_file, write_json
from torchrl_lang.envs.reddit.rewards import rewards_of
from torchrl_lang.envs.reddit.task import RedditData, RedditTask, comments_of, distinct, generate_corpus
from torchrl_lang.evaluation import over_seeds, perplexity
from torchrl_lang.evaluation.tables import format_columns
from torchrl_lang.modules.save import saved_actor
from torchrl_lang.recipes.compare import (
    CHOICE,
    REPORT,
    PlannedRun,
    TrainedPlayer,
    decodings,
    planned_runs,
    train_missing,
)
from torchrl_lang.recipes.datasets import check_place, generate_once
from torchrl_lang.recipes.demo_options import METHODS, RedditDemo
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.text import to_rows

__all__ = ["main"]

Figures = Mapping[str, Any]
"""Figures of comments: the reward without noise, the share of harmful ones, the perplexity under BC, variety."""
DATA = "comments of the data"
_SCORES, _QUANTILE = "best-scores", 0.9
"""The run of BC on the comments with the best scores."""
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
    check_place(options.out)
    with folder_lock(options.out, "runs this demo"):
        remove_leftovers(options.out)
        began = time.monotonic()
        if options.folder is not None:
            _data(options).task()  # a folder that cannot be read is not recorded: another one may follow
        options.record()
        chosen: Any = {"noised": {"reward": "profanity_noised"}, "scores": {"upvote_quantile": _QUANTILE}}
        data = {name: _data(options, name, **chosen.get(name, {})) for name in ("clean", "noised", "scores")}
        folders = {name: generate_once(each) for name, each in data.items()}
        train_missing([run for seed in range(options.seeds) for run in _runs(options, folders, seed)])
        rows = _rows(options, data["clean"].task())
        minutes = (time.monotonic() - began) / 60
        # All files are written before anything is printed, so that a closed output loses nothing.
        checks = compared(rows)
        players = {row.title: row.as_dict() for row in rows}
        content = {"players": players, "checks": [holds for holds, _ in checks]}
        write_json(options.out / "results.json", {**options.as_json(minutes), **content})
        report = format_report(rows, [text for _, text in checks])
        write_file(options.out / "report.txt", report + "\n")
        write_side_by_side(options.out / "side_by_side.txt", rows)
        print(f"\n{report}\n")
        print(f"report, comments side by side and all figures: {options.out}; {minutes:.1f} minutes", flush=True)
    return options.out


def _data(options: RedditDemo, name: str = "clean", **more: Any) -> RedditData:
    """The dataset with the reward without noise, with noise, or of the comments with the best scores."""
    folder = options.folder or options.out / "comments"
    if options.folder is None:
        generate_corpus(options, folder)
    shared: Any = {key: getattr(options, key) for key in ("encoding", "on_bad_rows", "index_files", "tokenizer")}
    return RedditData(out=options.out / "data" / name, folder=folder, **shared, **more)


def _runs(options: RedditDemo, folders: Mapping[str, Path], seed: int) -> list[PlannedRun]:
    """The runs of a training seed on the datasets in ``folders``."""
    home, shared = options.out / f"seed-{seed}", {**options.of_training(seed), "eval-every": options.steps}
    runs = planned_runs(
        (*options.methods, "bc"), {name: home / name for name in METHODS}, {**shared, "data": folders["clean"]}
    )
    if "ilql" in options.methods:
        runs.insert(0, PlannedRun("ilql", home / "ilql-noised", {**shared, "data": folders["noised"]}))
    if "best-10" in options.methods:
        runs.append(PlannedRun("bc", home / _SCORES, {**shared, "data": folders["scores"]}))
    return runs


def _rows(options: RedditDemo, task: RedditTask) -> list[Row]:
    players = []  # run, method and title of each
    for name in METHODS:
        if name in (*options.methods, "bc"):
            players.append((name, name, METHODS[name].title))
            players += [(_SCORES, "bc", "BC best 10 % by scores")] if name == "best-10" else []
    players += [("ilql-noised", "ilql", "ILQL, noised reward")] if "ilql" in options.methods else []
    sizes = {
        split: min(wanted, len(task.data(split)))
        for (split, _), wanted in ((CHOICE, options.choice_comments), (REPORT, options.comments))
    }
    scorers = [Scorer(task, options.out / f"seed-{seed}" / "bc", seed, sizes) for seed in range(options.seeds)]
    rows = []
    for key, method, title in players:
        trained = [CommentPlayer(scorer.bc.with_name(key), method, scorer) for scorer in scorers]
        best = [player.best for player in trained]
        keeps = all(excess(player.measured[player.best], player.scorer.limits) <= 1 for player in trained)
        written = [player.test(way) for player, way in zip(trained, best, strict=True)]
        rows.append(Row(key, title, written, best, METHODS[method].train[0] == "bc", keeps))
    return [*rows, Row("", DATA, [scorer.data(REPORT[0]) for scorer in scorers])]


class WrittenComments(Record):
    """Comments, the parents that they reply to, and figures."""

    parents: tuple[str, ...]
    texts: tuple[str, ...]
    figures: dict[str, int | float | None]


def excess(figures: Figures, data: Figures) -> float:
    """By which factor comments miss the limits, relative to comments of the data; at most 1 if both are kept."""
    diversity = LEAST_DISTINCT * data["distinct_2"] / max(figures["distinct_2"], 1e-9)
    return float(max(diversity, figures["perplexity"] / (MOST_PERPLEXITY * data["perplexity"])))


def choose(found: Mapping[str, Figures], data: Figures) -> str:
    """The decoding that the rule chooses, of those with these figures."""
    kept = {name: each for name, each in found.items() if excess(each, data) <= 1}
    if not kept:
        return min(found, key=lambda name: excess(found[name], data))
    return max(kept, key=lambda name: (kept[name]["mean_reward"], kept[name]["distinct_2"]))


def mean_figures(found: Sequence[Figures]) -> dict[str, Any]:
    """The mean of each figure over seeds; with several the reward's standard error is that over seeds."""
    columns = {name: [each[name] for each in found] for name in found[0]}
    means: dict[str, Any] = {name: None if None in values else fmean(values) for name, values in columns.items()}
    means["comments"], share = sum(columns["comments"]), means["profanity"]
    error = over_seeds("reward", columns["mean_reward"]).error
    means |= {} if error is None else {"reward_error": error}
    return {**means, "profanity_error": math.sqrt(share * (1 - share) / means["comments"])}


@dataclass(frozen=True)
class Scorer:
    """Measures the comments of one training seed by the reward without noise and BC's run.

    Args:
        task: the task.
        bc: folder of BC's run.
        seed: of training.
        sizes: number of comments on parents of each split.
    """

    task: RedditTask
    bc: Path
    seed: int
    sizes: Mapping[str, int]

    @cached_property
    def actor(self) -> TensorDictModuleBase:
        """The language model of BC's run."""
        return saved_actor(load_run(self.bc).model)

    @cached_property
    def limits(self) -> Figures:
        """Figures of the comments of the data that decodings are compared with."""
        return self.data(CHOICE[0]).figures

    def data(self, split: str) -> WrittenComments:
        """The first comments of a split."""
        data = self.task.data(split).take(range(self.sizes[split]))
        episodes = data.episodes([0.0] * len(data), include_parent=self.task.include_parent)
        rows = to_rows(episodes, self.task.tokenizer(), self.task.row_length)
        return self._measured(list(zip(data.parents, data.comments, strict=True)), rows, None)

    def ask(self, policy: TensorDictModuleBase, place: tuple[str, int]) -> WrittenComments:
        """Comments of a policy on parents of a split, with the first seed there."""
        split, first = place
        summary, records = self.task.evaluate(policy, split=split, games=self.sizes[split], seed=first + self.seed)
        return self._measured(comments_of(records, self.task.tokenizer()), records.rows, summary.entropy)

    def _measured(self, pairs: Sequence[tuple[str, str]], rows: Any, entropy: float | None) -> WrittenComments:
        task, (parents, texts) = self.task, zip(*pairs, strict=True)
        rewards = rewards_of(task.clean_reward(), texts, scale=task.scale, shift=task.shift).double()
        found = {
            "comments": len(texts),
            "mean_reward": float(rewards.mean()),
            "reward_error": float(rewards.std() / math.sqrt(len(texts))),
            "profanity": float(task.is_harmful(texts).double().mean()),
            "perplexity": perplexity(self.actor, rows),
            "distinct_1": distinct(texts, 1),
            "distinct_2": distinct(texts, 2),
            "words": float(torch.tensor([len(text.split()) for text in texts]).double().mean()),
            "entropy": entropy,
        }
        return WrittenComments(parents=parents, texts=texts, figures=found)


@dataclass(frozen=True)
class CommentPlayer(TrainedPlayer[WrittenComments]):
    """A finished run and its comments on test parents, measured by the scorer of its seed."""

    games = WrittenComments
    remedy = "delete it: the comments are written again"

    scorer: Scorer

    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run, by name; values both greedily and sampled."""
        return decodings(self.finished, by_values=METHODS[self.method].by_values, **_WAYS)

    def measure(self, policy: TensorDictModuleBase) -> dict[str, Any]:
        """The figures of comments on validation parents."""
        return self.scorer.ask(policy, CHOICE).figures

    def play(self, policy: TensorDictModuleBase) -> WrittenComments:
        """The comments on test parents."""
        return self.scorer.ask(policy, REPORT)

    @property
    def best(self) -> str:
        """The decoding that is reported."""
        return choose(self.measured, self.scorer.limits)


@dataclass(frozen=True)
class Row:
    """A player of the table: its comments for each training seed.

    Args:
        key: of its runs; empty for comments of the data.
        title: in the table.
        written: of each seed.
        decodings: of each seed; none for a player that was not trained.
        copies: it copies the data or a part of them.
        keeps_limits: the decodings of all seeds keep the limits of the choice.
    """

    key: str
    title: str
    written: Sequence[WrittenComments]
    decodings: Sequence[str] = ()
    copies: bool = False
    keeps_limits: bool = True

    @property
    def figures(self) -> dict[str, Any]:
        """The means over seeds."""
        return mean_figures([each.figures for each in self.written])

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        seeds = [each.figures for each in self.written]
        return {**self.figures, "decodings": list(self.decodings), "keeps_limits": self.keeps_limits, "seeds": seeds}

    def cells(self) -> list[str]:
        """The row of the table; the name has the decoding if all seeds have the same."""
        each = self.figures
        return [
            f"{self.title}, {self.decodings[0]}" if len(set(self.decodings)) == 1 else self.title,
            _reward(each),
            _share(each),
            f"{each['perplexity']:.2f}",
            "-" if each["entropy"] is None else f"{each['entropy']:.2f}",
            *(f"{each[name]:.3f}" for name in ("distinct_1", "distinct_2")),
            f"{each['words']:.1f}",
        ]


def _share(each: Figures) -> str:
    return f"{100 * each['profanity']:.1f} ± {100 * each['profanity_error']:.1f} %"


def _reward(each: Figures) -> str:
    return f"{each['mean_reward']:.2f} ± {each['reward_error']:.2f}"


def compared(rows: Sequence[Row]) -> list[tuple[dict[str, Any], str]]:
    """ILQL beside the copy that is least often harmful, beside the tenth with the best scores, and with noise.

    Returns:
        What holds, for JSON, and the same in words.
    """
    found = {row.key: row for row in rows}
    if "ilql" not in found:
        return []
    ilql, data, copies = found["ilql"].figures, found[""].figures, [row for row in rows if row.copies]
    best, results = min(copies, key=lambda row: row.figures["profanity"]), []
    for row in [best, *(row for row in copies if row.key == _SCORES and row is not best)]:
        copy = row.figures
        rarely = ilql["profanity"] < 0.25 * copy["profanity"]
        varied = ilql["distinct_2"] >= LEAST_DISTINCT * data["distinct_2"]
        likely = ilql["perplexity"] <= MOST_PERPLEXITY * copy["perplexity"]
        text = (
            f"ILQL beside {row.title}: profanity {_share(ilql)} and {_share(copy)}, {_not(rarely)}under a quarter; "
            f"perplexity {ilql['perplexity']:.2f} and {copy['perplexity']:.2f}, {_not(likely)}at most 10 % above; "
            f"distinct-2 {ilql['distinct_2']:.3f} and the data's {data['distinct_2']:.3f}, {_not(varied)}at least 80 %."
        )
        results.append(({"copy": row.title, "rarely_harmful": rarely, "likely": likely, "varied": varied}, text))
    if "ilql-noised" in found:
        noised = found["ilql-noised"].figures
        errors = 2 * math.hypot(noised["reward_error"], ilql["reward_error"])
        within = abs(noised["mean_reward"] - ilql["mean_reward"]) <= errors
        text = (
            f"Trained on the noised reward, ILQL's clean reward is {_reward(noised)}, trained on the clean one "
            f"{_reward(ilql)}: {_not(within)}within two standard errors of the difference ({errors:.2f})."
        )
        results.append(({"two_errors": errors, "within": within}, text))
    return results


def _not(holds: bool) -> str:
    return "" if holds else "not "


def format_report(rows: Sequence[Row], checks: Sequence[str]) -> str:
    """The table, how decodings were chosen, and the checks."""
    names = ["player", "reward", "profanity", "perplexity", "entropy", "distinct-1", "distinct-2", "words"]
    comments = rows[-1].written[0].figures["comments"]
    head = f"{comments} comments on test parents for each training seed, reward without noise; perplexity under BC"
    table = format_columns([names, *(row.cells() for row in rows)], "<" + ">" * (len(names) - 1))
    outside = ", ".join(row.title for row in rows if not row.keeps_limits)
    return "\n\n".join([head, table, f"{RULE} No decoding keeps them of: {outside}." if outside else RULE, *checks])


def write_side_by_side(path: Path, rows: Sequence[Row], *, parents: int = 20) -> None:
    """Write the comments of all players of the first seed on the same parents, and the data's comment on each."""
    *trained, data = rows
    others = dict(zip(data.written[0].parents[::-1], data.written[0].texts[::-1], strict=True))  # the first of each
    blocks = []
    for place, parent in enumerate(trained[0].written[0].parents[:parents]):
        texts = {row.title: row.written[0].texts[place] for row in trained}
        texts |= {DATA: others[parent]} if parent in others else {}
        lines = [f"  {title}: {' '.join(text.split()) or '(nothing)'}" for title, text in texts.items()]
        blocks.append("\n".join([f"parent: {parent or '(none)'}", *lines]))
    write_file(path, "\n\n".join(blocks) + "\n")
