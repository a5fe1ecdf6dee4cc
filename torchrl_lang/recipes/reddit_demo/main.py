"""Run the Reddit demo: generate, train what is missing, write comments, and report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_lang._files import folder_lock, remove_leftovers, write_file, write_json
from torchrl_lang.envs.reddit.task import CorpusOptions, RedditData, RedditTask, generate_corpus
from torchrl_lang.recipes.compare import (
    CHOICE,
    METHODS,
    REPORT,
    ComparisonOptions,
    PlannedRun,
    planned_runs,
    train_missing,
)
from torchrl_lang.recipes.datasets import check_place, generate_once
from torchrl_lang.recipes.options import option, with_defaults
from torchrl_lang.recipes.reddit_demo.comparison import DATA, Row, as_dict, format_report, write_side_by_side
from torchrl_lang.recipes.reddit_demo.players import CommentPlayer, Scorer

__all__ = ["RedditDemo", "main"]

_SCORES = "best-scores"
"""The run of BC on the comments with the best scores."""
_QUANTILE = 0.9


@with_defaults(
    out=Path("runs/reddit"), steps=3000, pairs=40_000, sentences=4, rude_when_calm=0.7, rude_when_provoked=0.9
)
class RedditDemo(ComparisonOptions, CorpusOptions):
    """Reddit comments: BC on all and on the best, and ILQL with and without noise, in a quarter of an hour.

    The generated comments have several sentences, most of them rude, so that few comments are polite throughout. A copy
    of the best tenth then copies rude ones, too; values of tokens choose each sentence by itself.
    """

    tokenizer: str = option("words", "words: those of the training texts; or name or folder of a Hugging Face one")
    comments: int = option(1000, "comments on test parents of each player, at most the test comments", at_least=2)
    choice_comments: int = option(
        1000,
        "comments on validation parents for each decoding, at most all; distinct-2 depends on their number",
        at_least=2,
    )


def main(options: RedditDemo) -> Path:
    """Run the demo, or what is missing of it; returns the folder with ``report.txt`` and ``results.json``."""
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
        print(f"\n{_write(options, rows, minutes)}\n")
        print(f"report, comments side by side and all figures: {options.out}; {minutes:.1f} minutes", flush=True)
    return options.out


def _comments(options: RedditDemo) -> Path:
    """The folder of the comments, which are generated unless they are given or there."""
    if options.folder is not None:
        return options.folder
    generate_corpus(options, options.out / "comments")
    return options.out / "comments"


def _data(options: RedditDemo, name: str) -> RedditData:
    """The dataset with the reward without noise, with noise, or of the comments with the best scores."""
    more: Any = {"noised": {"reward": "profanity_noised"}, "scores": {"upvote_quantile": _QUANTILE}}.get(name, {})
    return RedditData(
        out=options.out / "data" / name,
        folder=_comments(options),
        encoding=options.encoding,
        on_bad_rows=options.on_bad_rows,
        index_files=options.index_files,
        tokenizer=options.tokenizer,
        **more,
    )


def _places(options: RedditDemo, seed: int, suffix: str = "") -> dict[str, Path]:
    """The folder of each method's run."""
    return {name: options.out / f"seed-{seed}" / f"{name}{suffix}" for name in METHODS}


def _runs(options: RedditDemo, folders: Mapping[str, Path], seed: int) -> list[PlannedRun]:
    shared = {**options.of_training(seed), "eval-every": options.steps}
    places = _places(options, seed)
    runs = planned_runs((*options.methods, "bc"), places, {**shared, "data": folders["clean"]})
    if "ilql" in options.methods:
        noised = planned_runs(("ilql",), _places(options, seed, "-noised"), {**shared, "data": folders["noised"]})
        runs = [*noised, *runs]
    if "best-10" in options.methods:
        place = options.out / f"seed-{seed}" / _SCORES
        runs.append(PlannedRun("bc", place, {**shared, "data": folders["scores"]}))
    return runs


def _rows(options: RedditDemo, task: RedditTask) -> list[Row]:
    scorers = [
        Scorer(
            task,
            _places(options, seed)["bc"],
            seed,
            min(options.choice_comments, len(task.data(CHOICE[0]))),
            min(options.comments, len(task.data(REPORT[0]))),
        )
        for seed in range(options.seeds)
    ]
    rows = []
    for key, method, title in _players(options):
        players = [CommentPlayer(options.out / f"seed-{scorer.seed}" / key, method, scorer) for scorer in scorers]
        best = [player.best for player in players]
        written = [player.test(decoding) for player, decoding in zip(players, best, strict=True)]
        copies, kept = METHODS[method].train[0] == "bc", all(player.keeps_limits for player in players)
        rows.append(Row(key, title, written, best, copies=copies, keeps_limits=kept))
    return [*rows, Row("", DATA, [scorer.data() for scorer in scorers])]


def _players(options: RedditDemo) -> list[tuple[str, str, str]]:
    """Folder of the run, method and title of each trained player."""
    found = [(name, name, METHODS[name].title) for name in METHODS if name in (*options.methods, "bc")]
    if "best-10" in options.methods:
        place = 1 + [key for key, *_ in found].index("best-10")
        found.insert(place, (_SCORES, "bc", "BC best 10 % by scores"))
    if "ilql" in options.methods:
        found.append(("ilql-noised", "ilql", "ILQL, noised reward"))
    return found


def _write(options: RedditDemo, rows: list[Row], minutes: float) -> str:
    """Write all files, before anything is printed, so that a closed output loses nothing; returns the report."""
    write_json(options.out / "results.json", {**options.as_json(minutes), **as_dict(rows)})
    text = format_report(rows, comments=rows[-1].written[0].figures.comments)
    write_file(options.out / "report.txt", text + "\n")
    write_side_by_side(options.out / "side_by_side.txt", rows)
    return text
