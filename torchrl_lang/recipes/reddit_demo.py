"""Run the Reddit demo: generate comments, train what is missing, choose decodings, write comments, and report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
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
            _data(options, "clean").task()  # a folder that cannot be read is not recorded: another one may follow
        options.record()
        data = {name: _data(options, name) for name in ("clean", "noised", "scores")}
        folders = {name: generate_once(each) for name, each in data.items()}
        train_missing([run for seed in range(options.seeds) for run in _runs(options, folders, seed)])
        rows = _rows(options, data["clean"].task())
        minutes = (time.monotonic() - began) / 60
        # All files are written before anything is printed, so that a closed output loses nothing.
        write_json(options.out / "results.json", {**options.as_json(minutes), **as_dict(rows)})
        report = format_report(rows, comments=rows[-1].written[0].figures.comments)
        write_file(options.out / "report.txt", report + "\n")
        write_side_by_side(options.out / "side_by_side.txt", rows)
        print(f"\n{report}\n")
        print(f"report, comments side by side and all figures: {options.out}; {minutes:.1f} minutes", flush=True)
    return options.out


def _data(options: RedditDemo, name: str) -> RedditData:
    """The dataset with the reward without noise, with noise, or of the comments with the best scores."""
    folder = options.folder
    if folder is None:
        folder = options.out / "comments"
        generate_corpus(options, folder)
    more: Any = {"noised": {"reward": "profanity_noised"}, "scores": {"upvote_quantile": _QUANTILE}}.get(name, {})
    shared: Any = {key: getattr(options, key) for key in ("encoding", "on_bad_rows", "index_files", "tokenizer")}
    return RedditData(out=options.out / "data" / name, folder=folder, **shared, **more)


def _runs(options: RedditDemo, folders: Mapping[str, Path], seed: int) -> list[PlannedRun]:
    """The runs of a training seed on the datasets in ``folders``."""
    home = options.out / f"seed-{seed}"
    shared = {**options.of_training(seed), "eval-every": options.steps}
    places = {name: home / name for name in METHODS}
    runs = planned_runs((*options.methods, "bc"), places, {**shared, "data": folders["clean"]})
    if "ilql" in options.methods:
        noised = {"ilql": home / "ilql-noised"}
        runs = [*planned_runs(("ilql",), noised, {**shared, "data": folders["noised"]}), *runs]
    if "best-10" in options.methods:
        runs.append(PlannedRun("bc", home / _SCORES, {**shared, "data": folders["scores"]}))
    return runs


def _players(options: RedditDemo) -> list[tuple[str, str, str]]:
    """Folder of the run, method and title of each trained player."""
    found = [(name, name, METHODS[name].title) for name in METHODS if name in (*options.methods, "bc")]
    if "best-10" in options.methods:
        place = 1 + [key for key, *_ in found].index("best-10")
        found.insert(place, (_SCORES, "bc", "BC best 10 % by scores"))
    if "ilql" in options.methods:
        found.append(("ilql-noised", "ilql", "ILQL, noised reward"))
    return found


def _rows(options: RedditDemo, task: RedditTask) -> list[Row]:
    games = min(options.choice_comments, len(task.data(CHOICE[0]))), min(options.comments, len(task.data(REPORT[0])))
    scorers = [Scorer(task, options.out / f"seed-{seed}" / "bc", seed, *games) for seed in range(options.seeds)]
    rows = []
    for key, method, title in _players(options):
        players = [CommentPlayer(scorer.bc.with_name(key), method, scorer) for scorer in scorers]
        best = [player.best for player in players]
        written = [player.test(decoding) for player, decoding in zip(players, best, strict=True)]
        copies = METHODS[method].train[0] == "bc"
        rows.append(Row(key, title, written, best, copies, all(player.keeps_limits for player in players)))
    return [*rows, Row("", DATA, [scorer.data(*REPORT[:1], scorer.comments) for scorer in scorers])]


# -- comments and figures ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """The figures of comments; the perplexity is that of their tokens under the BC model of the same seed."""

    comments: int
    mean_reward: float
    """Of the reward without noise."""
    reward_error: float
    profanity: float
    """Share of harmful comments."""
    perplexity: float
    distinct_1: float
    distinct_2: float
    words: float
    entropy: float | None = None
    """Of the player per token; None where there is no player."""

    @property
    def profanity_error(self) -> float:
        """Standard error of the share."""
        return math.sqrt(self.profanity * (1 - self.profanity) / self.comments)

    def excess(self, data: Figures) -> float:
        """By which factor the limits are missed, relative to comments of the data; at most 1 if both are kept."""
        diversity = LEAST_DISTINCT * data.distinct_2 / max(self.distinct_2, 1e-9)
        return max(diversity, self.perplexity / (MOST_PERPLEXITY * data.perplexity))


def choose(found: Mapping[str, Figures], data: Figures) -> str:
    """The decoding that the rule chooses, of those with these figures."""
    kept = {name: each for name, each in found.items() if each.excess(data) <= 1}
    if not kept:
        return min(found, key=lambda name: found[name].excess(data))
    return max(kept, key=lambda name: (kept[name].mean_reward, kept[name].distinct_2))


def mean_figures(found: Sequence[Figures]) -> Figures:
    """The mean of each figure over seeds; with several the reward's standard error is that over seeds."""
    columns = {one.name: [getattr(each, one.name) for each in found] for one in fields(Figures)}
    means = {name: None if None in values else fmean(values) for name, values in columns.items()}
    error = over_seeds("reward", columns["mean_reward"]).error
    means |= {"comments": sum(columns["comments"])} | ({} if error is None else {"reward_error": error})
    return Figures(**means)  # type: ignore[arg-type]


class WrittenComments(Record):
    """Comments, the parents that they reply to, and figures."""

    parents: tuple[str, ...]
    texts: tuple[str, ...]
    figures: Figures

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        self.write(path)


@dataclass(frozen=True)
class Scorer:
    """Measures the comments of one training seed by the reward without noise and BC's run.

    Args:
        task: the task.
        bc: folder of BC's run.
        seed: of training.
        choice_comments: comments on validation parents for each decoding.
        comments: on test parents.
    """

    task: RedditTask
    bc: Path
    seed: int
    choice_comments: int
    comments: int

    @cached_property
    def actor(self) -> TensorDictModuleBase:
        """The language model of BC's run."""
        return saved_actor(load_run(self.bc).model)

    @cached_property
    def limits(self) -> Figures:
        """The comments of the data that decodings are compared with."""
        return self.data(CHOICE[0], self.choice_comments).figures

    def data(self, split: str, games: int) -> WrittenComments:
        """The first comments of a split."""
        data = self.task.data(split).take(range(games))
        episodes = data.episodes([0.0] * games, include_parent=self.task.include_parent)
        rows = to_rows(episodes, self.task.tokenizer(), self.task.row_length)
        return self._measured(list(zip(data.parents, data.comments, strict=True)), rows, None)

    def ask(self, policy: TensorDictModuleBase, *, report: bool) -> WrittenComments:
        """Comments of a policy: for the report, or for the choice of its decoding."""
        (split, first), games = (REPORT, self.comments) if report else (CHOICE, self.choice_comments)
        summary, records = self.task.evaluate(policy, split=split, games=games, seed=first + self.seed)
        return self._measured(comments_of(records, self.task.tokenizer()), records.rows, summary.entropy)

    def _measured(
        self, pairs: Sequence[tuple[str, str]], rows: TensorDictBase, entropy: float | None
    ) -> WrittenComments:
        task, texts = self.task, [text for _, text in pairs]
        rewards = rewards_of(task.clean_reward(), texts, scale=task.scale, shift=task.shift).double()
        found = Figures(
            comments=len(texts),
            mean_reward=float(rewards.mean()),
            reward_error=float(rewards.std() / math.sqrt(len(texts))),
            profanity=float(task.is_harmful(texts).double().mean()),
            perplexity=perplexity(self.actor, rows),
            distinct_1=distinct(texts, 1),
            distinct_2=distinct(texts, 2),
            words=float(torch.tensor([len(text.split()) for text in texts]).double().mean()),
            entropy=entropy,
        )
        parents = tuple(parent for parent, _ in pairs)
        return WrittenComments(parents=parents, texts=tuple(texts), figures=found)


@dataclass(frozen=True)
class CommentPlayer(TrainedPlayer[WrittenComments]):
    """A finished run and its comments on test parents, measured by the scorer of its seed."""

    remedy = "delete it: the validation comments are written again"

    scorer: Scorer

    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run, by name; values both greedily and sampled."""
        return decodings(self.finished, by_values=METHODS[self.method].by_values, **_WAYS)

    def measure(self, policy: TensorDictModuleBase) -> dict[str, Any]:
        """The figures of comments on validation parents."""
        return asdict(self.scorer.ask(policy, report=False).figures)

    def play(self, policy: TensorDictModuleBase) -> WrittenComments:
        """The comments on test parents."""
        return self.scorer.ask(policy, report=True)

    def load(self, path: Path) -> WrittenComments:
        """Read comments."""
        return WrittenComments.read(path, remedy="delete it: the comments are written again")

    def announce(self, decoding: str, games: WrittenComments) -> None:
        """Print how many comments were written."""
        print(f"{self.folder.name}, {decoding}: {len(games.texts)} comments on test parents", flush=True)

    @cached_property
    def choice(self) -> Mapping[str, Figures]:
        """The figures of each decoding on validation parents."""
        return {name: Figures(**each) for name, each in self.measured.items()}

    @property
    def best(self) -> str:
        """The decoding that is reported."""
        return choose(self.choice, self.scorer.limits)

    @property
    def keeps_limits(self) -> bool:
        """Whether that decoding keeps the limits."""
        return self.choice[self.best].excess(self.scorer.limits) <= 1


# -- the report -------------------------------------------------------------------------------------------------------


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
    def figures(self) -> Figures:
        """The means over seeds."""
        return mean_figures([each.figures for each in self.written])

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        seeds = [asdict(each.figures) for each in self.written]
        own = asdict(self.figures) | {"profanity_error": self.figures.profanity_error}
        return {**own, "decodings": list(self.decodings), "keeps_limits": self.keeps_limits, "seeds": seeds}

    def cells(self) -> list[str]:
        """The row of the table; the name has the decoding if all seeds have the same."""
        each = self.figures
        return [
            f"{self.title}, {self.decodings[0]}" if len(set(self.decodings)) == 1 else self.title,
            f"{each.mean_reward:.2f} ± {each.reward_error:.2f}",
            f"{100 * each.profanity:.1f} ± {100 * each.profanity_error:.1f} %",
            f"{each.perplexity:.2f}",
            "-" if each.entropy is None else f"{each.entropy:.2f}",
            *(f"{value:.3f}" for value in (each.distinct_1, each.distinct_2)),
            f"{each.words:.1f}",
        ]


class Check(NamedTuple):
    """A comparison that the demo is about: its figures for JSON, and in words."""

    figures: dict[str, Any]
    text: str


def beside_copy(ilql: Figures, title: str, copy: Figures, data: Figures) -> Check:
    """Compares ILQL with a copy of the data, by its title, and with the data."""
    rarely, likely = ilql.profanity < 0.25 * copy.profanity, ilql.perplexity <= MOST_PERPLEXITY * copy.perplexity
    varied = ilql.distinct_2 >= LEAST_DISTINCT * data.distinct_2
    copied = {f"{name}_of_copy": getattr(copy, name) for name in ("profanity", "profanity_error", "perplexity")}
    of_data = {f"{name}_of_data": getattr(data, name) for name in ("perplexity", "distinct_2")}
    own = {name: getattr(ilql, name) for name in ("profanity", "profanity_error", "perplexity", "distinct_2")}
    holds = {"rarely_harmful": rarely, "likely": likely, "varied": varied}
    shares = [f"{100 * each.profanity:.1f} ± {100 * each.profanity_error:.1f} %" for each in (ilql, copy)]
    beside = [100 * (ilql.perplexity / each.perplexity - 1) for each in (copy, data)]
    beside_copy, beside_data = (f"{abs(each):.0f} % {'above' if each > 0 else 'below'}" for each in beside)
    text = (
        f"Profanity: {shares[0]} of ILQL's comments, {shares[1]} of those of {title}: {_not(rarely)}under a "
        f"quarter of it.\nPerplexity under BC: {ilql.perplexity:.2f}, {beside_copy} that of {title} "
        f"({copy.perplexity:.2f}) and {beside_data} that of the data ({data.perplexity:.2f}): "
        f"{_not(likely)}at most 10 % above the copy's.\nDistinct-2: {ilql.distinct_2:.3f}, "
        f"{100 * ilql.distinct_2 / data.distinct_2:.0f} % of the data's ({data.distinct_2:.3f}): "
        f"{_not(varied)}at least 80 %."
    )
    return Check({"copy": title, **own, **copied, **of_data, **holds}, text)


def beside_clean(noised: Figures, clean: Figures) -> Check:
    """Compares ILQL that was trained on the noised reward with the one trained on the clean reward."""
    two_errors = 2 * math.hypot(noised.reward_error, clean.reward_error)
    within = abs(noised.mean_reward - clean.mean_reward) <= two_errors
    text = (
        f"Trained on the noised reward, ILQL's clean reward is {noised.mean_reward:.2f} ± {noised.reward_error:.2f}, "
        f"trained on the clean one {clean.mean_reward:.2f} ± {clean.reward_error:.2f}: {_not(within)}within two "
        f"standard errors of the difference ({two_errors:.2f})."
    )
    figures = {"noised": noised.mean_reward, "noised_error": noised.reward_error, "clean": clean.mean_reward}
    return Check({**figures, "clean_error": clean.reward_error, "two_errors": two_errors, "within": within}, text)


def _not(holds: bool) -> str:
    return "" if holds else "not "


def checks(rows: Sequence[Row]) -> list[Check]:
    """ILQL beside the copy that is least often harmful, beside the tenth with the best scores, and with noise."""
    found = {row.key: row for row in rows}
    if "ilql" not in found:
        return []
    ilql, data, copies = found["ilql"].figures, found[""].figures, [row for row in rows if row.copies]
    best = sorted(copies, key=lambda row: row.figures.profanity)[:1]
    chosen = {row.key: row for row in (*best, *(row for row in copies if row.key == _SCORES))}
    beside = [beside_copy(ilql, row.title, row.figures, data) for row in chosen.values()]
    return beside + ([beside_clean(found["ilql-noised"].figures, ilql)] if "ilql-noised" in found else [])


def as_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """All figures, for JSON."""
    return {"players": {row.title: row.as_dict() for row in rows}, "checks": [each.figures for each in checks(rows)]}


def format_report(rows: Sequence[Row], *, comments: int) -> str:
    """The table, how decodings were chosen, and the checks."""
    names = ["player", "reward", "profanity", "perplexity", "entropy", "distinct-1", "distinct-2", "words"]
    head = f"{comments} comments on test parents for each training seed, reward without noise; perplexity under BC"
    table = format_columns([names, *(row.cells() for row in rows)], "<" + ">" * (len(names) - 1))
    outside = ", ".join(row.title for row in rows if not row.keeps_limits)
    rule = f"{RULE} No decoding keeps them of: {outside}." if outside else RULE
    return "\n\n".join([head, table, rule, *(each.text for each in checks(rows))])


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
