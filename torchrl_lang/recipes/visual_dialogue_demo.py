"""The visual dialogue demo: imitation and ILQL under three rewards, on scenes without training dialogues."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang._files import Record, folder_lock, read_json, remove_leftovers, write_file, write_json
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.visual_dialogue import DialogueRewards, prepare
from torchrl_lang.envs.visual_dialogue.dialogue import Round
from torchrl_lang.envs.visual_dialogue.env import PROGRESS
from torchrl_lang.envs.visual_dialogue.files import ROUNDS
from torchrl_lang.envs.visual_dialogue.rewards import PENALTIES, Penalty, is_yes_no
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask, rounds_of
from torchrl_lang.evaluation import GameRecords, Summary, format_seed_table, format_table, over_seeds, text_advantages
from torchrl_lang.evaluation.plots import new_figure, save_figure, tidy
from torchrl_lang.evaluation.tables import format_columns
from torchrl_lang.modules.save import saved_actor
from torchrl_lang.recipes.compare import CHOICE, REPORT, TrainedPlayer, decodings, planned_runs, train_missing
from torchrl_lang.recipes.datasets import check_place, generate_once
from torchrl_lang.recipes.demo_options import METHODS, VisualDialogueDemo
from torchrl_lang.recipes.offline import held_out_rows
from torchrl_lang.recipes.tasks.visual_dialogue import PrepareVisualDialogue, VisualDialogueData

__all__ = ["main"]

UNGUIDED = "greedy, beta 0"
"""The decoding of a run with values that leaves them out: a row of its own, never chosen."""
_ILQL, _BC = METHODS["ilql"].title, METHODS["bc"].title
_PENALISED_ILQL: Mapping[str, Any] = {"cql-weight": 0.3}
"""Returns with a penalty spread more, and so do the errors of values: ILQL then repeats questions late in a dialogue.
The larger weight helps there, and harms without a penalty."""
_HELD_OUT, _SHOWN, _SCENES = 500, 10, 5
"""Rows whose advantages are shown, questions of the highest and of the lowest, and scenes in a transcript."""


# -- dialogues and players ---------------------------------------------------------------------------------------------


class PlayedDialogues(Record):
    """Dialogues of one player in mode "env_stops": the penalty changes what they earn, but not when they end.

    So the returns under all rewards come from the same dialogues.
    """

    rounds: tuple[tuple[Round, ...], ...]
    progress: tuple[tuple[float, ...], ...]
    """``[N, 11]``: the percentile after the caption, and its change in each round, then zeros."""
    terminated: tuple[bool, ...]
    """Whether a dialogue ended, as against a row that was too short for it."""

    @classmethod
    def of_dataset(cls, task: VisualDialogueTask, split: str, games: int) -> Self:
        """The first dialogues of a split's files, cut where they end."""
        scenes = task.data(split).scenes(task.rewards)[:games]
        progress = tuple(scene.rewards + (0.0,) * (1 + ROUNDS - len(scene.rewards)) for scene in scenes)
        rounds = tuple(scene.dialogue.rounds for scene in scenes)
        return cls(rounds=rounds, progress=progress, terminated=(True,) * len(scenes))

    @classmethod
    def join(cls, parts: Sequence[PlayedDialogues]) -> Self:
        """The dialogues of several plays, one after the other."""
        return cls(**{name: tuple(chain(*(getattr(part, name) for part in parts))) for name in cls.model_fields})

    @property
    def percentiles(self) -> Tensor:
        """After the caption and each round, float64 ``[N, 11]``; a dialogue that has ended keeps its last."""
        return torch.tensor(self.progress).double().cumsum(-1)

    def question_rewards(self, penalty: Penalty) -> list[list[float]]:
        """The reward of each question of each dialogue."""
        rewards = DialogueRewards(penalty=penalty)
        return [
            [
                rewards.question(0.0, each.answer, last=ended and place == len(rounds))
                for place, each in enumerate(rounds, start=1)
            ]
            for rounds, ended in zip(self.rounds, self.terminated, strict=True)
        ]

    def returns(self, penalty: Penalty) -> Tensor:
        """The return of each dialogue, float32 ``[N]``."""
        return torch.tensor([sum(rewards) for rewards in self.question_rewards(penalty)])

    def summary(self, name: str, task: VisualDialogueTask, penalty: Penalty) -> Summary:
        """Figures of :meth:`VisualDialogueTask.summary`, with the return under a penalty."""
        ended, turns = torch.tensor(self.terminated), torch.tensor([len(rounds) for rounds in self.rounds])
        none = torch.zeros_like(turns)
        kept, rows = TensorDict({PROGRESS: torch.tensor(self.progress)}), TensorDict(batch_size=[len(turns)])
        records = GameRecords(rows, self.returns(penalty), turns, ended, ~ended, none.float(), none, kept=kept)
        return replace(task.summary_of(records, self.rounds, name), guesses={})  # of games that have guesses


def play(task: VisualDialogueTask, policy: Any, games: int, seed: int, on: tuple[str, int] = REPORT) -> PlayedDialogues:
    """Play the first scenes of a split, each once; at most all."""
    split, first = on
    games = min(games, task.number_of_games(split))
    _, records = task.evaluate(policy, split=split, games=games, seed=first + seed)
    rounds, ended = rounds_of(records, task.tokenizer()), records.terminated.tolist()
    progress = map(tuple, records.kept[PROGRESS].tolist())
    return PlayedDialogues(rounds=tuple(map(tuple, rounds)), progress=tuple(progress), terminated=tuple(ended))


@dataclass(frozen=True)
class DialoguePlayer(TrainedPlayer[PlayedDialogues]):
    """A finished run and its dialogues about the test scenes."""

    games = PlayedDialogues
    remedy = "delete it: the scenes are played again"

    seed: int
    options: VisualDialogueDemo

    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run, by name; where values guide it, also without them."""
        finished, by_values = self.finished, METHODS[self.method].by_values
        if by_values and finished.has_values and finished.decoding.include_logits:
            yield UNGUIDED, finished.policy(method="greedy")
        yield from decodings(finished, by_values=by_values)

    def measure(self, policy: TensorDictModuleBase) -> dict[str, float]:
        """The mean return on validation scenes, by penalty."""
        played = play(self._task, policy, self.options.choice_games, self.seed, CHOICE)
        return {penalty: float(played.returns(penalty).double().mean()) for penalty in PENALTIES}

    def play(self, policy: TensorDictModuleBase) -> PlayedDialogues:
        """The dialogues about the test scenes."""
        return play(self._task, policy, self.options.eval_games, self.seed)

    @property
    def _task(self) -> Any:
        return self.finished.task

    def best(self, penalty: Penalty) -> str:
        """The decoding with the highest return on validation scenes; of equal ones the first."""
        return max((name for name in self.measured if name != UNGUIDED), key=lambda name: self.measured[name][penalty])


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A player of a table: its dialogues about the test scenes, one play for each training seed."""

    title: str
    plays: Sequence[PlayedDialogues]
    decodings: Sequence[str] = ()
    """Of each training seed, as chosen on validation scenes; none for a player that was not trained."""
    imitates: bool = False
    """Whether it imitates the data."""

    @property
    def name(self) -> str:
        """The title, with the decoding if all seeds have the same."""
        return f"{self.title}, {self.decodings[0]}" if len(set(self.decodings)) == 1 else self.title

    @cached_property
    def pooled(self) -> PlayedDialogues:
        """The dialogues of all seeds."""
        return PlayedDialogues.join(self.plays)

    def over_seeds(self, penalty: Penalty) -> Any:
        """The mean return under a penalty of each seed."""
        return over_seeds(self.name, [float(play.returns(penalty).double().mean()) for play in self.plays])

    def summary(self, task: VisualDialogueTask, penalty: Penalty) -> Summary:
        """Of the dialogues of all seeds; with several seeds the return's standard error is that over seeds."""
        summary, error = self.pooled.summary(self.name, task, penalty), self.over_seeds(penalty).error
        return summary if error is None else replace(summary, return_error=error)

    def as_dict(self, task: VisualDialogueTask, penalty: Penalty) -> dict[str, Any]:
        """All figures, for JSON."""
        seeds = self.over_seeds(penalty)
        return {
            **self.summary(task, penalty).as_dict(),
            "decodings": list(self.decodings),
            "returns_of_seeds": list(seeds.values),
            "interval_over_seeds": None if seeds.interval is None else list(seeds.interval),
            "percentile_by_round": self.pooled.percentiles.mean(0).tolist(),
        }


class Comparison(NamedTuple):
    """Results under one reward: its players, and the returns from which decodings were chosen."""

    penalty: Penalty
    rows: Mapping[str, Row]
    """Players by title."""
    curves: Mapping[str, Mapping[str, Sequence[float]]]
    """For each method with weights of its values, the mean return on validation scenes by weight and seed."""


def cross_rewards(
    comparisons: Sequence[Comparison], task: VisualDialogueTask, title: str
) -> dict[str, dict[str, tuple[float, float | None]]]:
    """A method trained (or only decoded) for one reward, evaluated under all: mean return and standard error.

    Returns:
        By the reward of training, then by that of the evaluation.
    """
    found = {}
    for trained in comparisons:
        summaries = {each.penalty: trained.rows[title].summary(task, each.penalty) for each in comparisons}
        found[str(trained.penalty)] = {str(on): (one.mean_return, one.return_error) for on, one in summaries.items()}
    return found


def beside_imitations(comparison: Comparison, task: VisualDialogueTask) -> tuple[dict[str, Any], str] | None:
    """ILQL beside the imitation that it beats by the fewest standard errors: figures, and a text about them."""
    penalty, rows, _ = comparison
    if _ILQL not in rows:
        return None
    own = rows[_ILQL].summary(task, penalty)
    others = [row.summary(task, penalty) for row in rows.values() if row.imitates]

    def two_errors(other: Summary) -> float:
        return 2 * math.hypot(own.return_error or 0.0, other.return_error or 0.0)

    nearest = min(others, key=lambda other: own.mean_return - other.mean_return - two_errors(other))
    two, beats = two_errors(nearest), own.mean_return - nearest.mean_return > two_errors(nearest)
    figures: dict[str, Any] = {"penalty": penalty, "mean_return": own.mean_return, "error": own.return_error}
    figures |= {"imitation": nearest.name, "imitation_return": nearest.mean_return}
    figures |= {"imitation_error": nearest.return_error, "beats": beats, "two_errors": two}
    text = (
        f"{penalty}: ILQL's return of {_shown(own)} {'beats' if beats else 'does not beat'} every imitation by two "
        f"standard errors of the difference ({two:.2f}). The nearest is {nearest.name}: {_shown(nearest)}."
    )
    if penalty == "none" or _BC not in rows:
        return figures, text
    asked, of_bc = (
        fmean(sum(is_yes_no(each.answer, penalty) for each in rounds) for rounds in rows[title].pooled.rounds)
        for title in (_ILQL, _BC)
    )
    last, last_of_bc = (rows[title].pooled.percentiles[:, -1] for title in (_ILQL, _BC))
    gain, ratio = float(last.mean() - last_of_bc.mean()), asked / of_bc if of_bc else None
    error = math.hypot(*(float(each.std() / math.sqrt(len(each))) for each in (last, last_of_bc)))
    figures |= {"yes_no": asked, "yes_no_of_bc": of_bc, "yes_no_ratio": ratio}
    figures |= {"percentile_gain": gain, "percentile_error": error}
    text += (
        f"\n{penalty}: ILQL asks {asked:.3f} yes-or-no questions in a dialogue, BC {of_bc:.3f}"
        f"{'' if ratio is None else f', a ratio of {ratio:.2f}'}. Its final percentile minus BC's is {gain:+.3f} ± "
        f"{error:.3f}."
    )
    return figures, text


def _shown(summary: Summary) -> str:
    error = "" if summary.return_error is None else f" ± {summary.return_error:.2f}"
    return f"{summary.mean_return:.2f}{error}"


def advantages(player: DialoguePlayer, data: Path) -> Mapping[str, Any]:
    """The held-out questions of the highest and of the lowest learned advantage, kept in the folder of an ILQL run."""
    path = player.folder / "advantages.json"
    if not path.exists():
        model, rows = player.finished.model, held_out_rows(load_dataset(data), _HELD_OUT)
        heads: Any = model.heads
        scored = (saved_actor(model), heads["target_qvalue"], heads["value"], rows)
        found = text_advantages(*scored, player.finished.tokenizer, min_count=max(1, len(rows) // 100))
        parts = {"highest": found[:_SHOWN], "lowest": found[::-1][:_SHOWN]}
        write_json(path, {name: [asdict(one) for one in part] for name, part in parts.items()})
    return read_json(path, remedy="delete it: it is computed again")


# -- the report --------------------------------------------------------------------------------------------------------


def format_comparison(comparison: Comparison, task: VisualDialogueTask) -> str:
    """The table of one reward; with several seeds also the returns of each; and the returns by weight of the values."""
    penalty, rows, curves = comparison
    summaries = [row.summary(task, penalty) for row in rows.values()]
    parts = [f"Reward {penalty!r}, {summaries[0].games} dialogues about test scenes", format_table(summaries)]
    trained = [row for row in rows.values() if row.decodings]
    if any(len(row.plays) > 1 for row in trained):
        parts.append(format_seed_table([row.over_seeds(penalty) for row in trained], title=f"return, {penalty}"))
    for title, curve in curves.items():
        means = ", ".join(f"{beta}: {fmean(found):.2f}" for beta, found in curve.items())
        parts.append(f"{title}, return by beta on validation scenes: {means}")
    return "\n\n".join(parts)


def format_cross_rewards(comparisons: Sequence[Comparison], task: VisualDialogueTask) -> str:
    """For each trained player a line for each reward of training (of BC: of the choice of its decoding)."""
    names = [each.penalty for each in comparisons]
    lines = [["player", "trained on", *(f"return, {name}" for name in names)]]
    for title in [row.title for row in comparisons[0].rows.values() if row.decodings]:
        for trained in comparisons:
            shown = [_shown(trained.rows[title].summary(task, name)) for name in names]
            lines.append([title, trained.penalty, *shown])
    return f"All rewards of the same dialogues\n{format_columns(lines, '<' * len(lines[0]))}"


def format_dialogues(comparison: Comparison, captions: Sequence[str]) -> str:
    """The dialogues of the trained players about the first test scenes, with rewards, captions and percentiles."""
    blocks = []
    for scene, caption in enumerate(captions):
        blocks.append(f"scene {scene}: {caption}")
        for row in [row for row in comparison.rows.values() if row.decodings and not row.title.endswith("beta 0")]:
            played = row.plays[0]
            rewards, percentiles = (
                played.question_rewards(comparison.penalty)[scene],
                played.percentiles[scene].tolist(),
            )
            lines = [f"{row.name}: return {sum(rewards):g}, percentile {percentiles[0]:.3f} after the caption"]
            for each, reward, percentile in zip(played.rounds[scene], rewards, percentiles[1:], strict=False):
                lines += [f"> {each.question or '(nothing)'}  ({reward:g})", f"< {each.answer}  [{percentile:.3f}]"]
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def draw_page(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Draw one column for each reward: above the percentile by round, below the return by beta on validation scenes."""
    curves = any(comparison.curves for comparison in comparisons)
    figure = new_figure(width=5.0 * len(comparisons), height=7.4 if curves else 3.8)
    panels = figure.subplots(1 + curves, len(comparisons), squeeze=False)
    for column, (penalty, rows, betas) in enumerate(comparisons):
        axes = panels[0][column]
        for row in rows.values():
            style = "-" if row.decodings else "--"
            axes.plot(row.pooled.percentiles.mean(0), style, linewidth=1.5, label=row.name)
        axes.set(xlabel="round", title=f"percentile by round, reward {penalty!r}")
        tidy(axes)
        if curves:
            axes = panels[1][column]
            for title, curve in betas.items():  # betas are categories, in order
                weights = sorted(curve, key=float)
                axes.plot(weights, [fmean(curve[beta]) for beta in weights], marker="o", label=title)
            axes.set(xlabel="beta, the weight of the values", title=f"return under {penalty!r}, validation scenes")
            tidy(axes)
    save_figure(figure, path, "Visual dialogue: test scenes")


# -- the command -------------------------------------------------------------------------------------------------------


def main(options: VisualDialogueDemo) -> Path:
    """Run the demo, or what is missing of it; returns the folder with ``report.txt`` and ``results.json``."""
    check_place(options.out)
    with folder_lock(options.out, "runs this demo"):
        remove_leftovers(options.out)
        began = time.monotonic()
        if options.folder is None:
            folder = prepare.main(PrepareVisualDialogue(out=options.out / "prepared"))
            options = replace(options, folder=folder)
        task: Any = _data(options, "none").task()
        task.tokenizer()  # a folder that cannot be read is not recorded: another may follow
        options.record("rewards")
        shares_bc = any("bc" in (name, METHODS[name].start) for name in options.methods)  # one run for all rewards
        rewards: Any = dict.fromkeys((*options.rewards, *(["none"] if shares_bc else [])))
        data = {penalty: generate_once(_data(options, penalty)) for penalty in rewards}
        train_missing([run for seed in range(options.seeds) for run in _runs(options, data, seed)])
        comparisons = [_compare(options, task, penalty) for penalty in dict.fromkeys(options.rewards)]
        minutes = (time.monotonic() - began) / 60
        print(f"\n{_write(options, task, comparisons, data, minutes)}\n")
        print(f"report, pictures, transcripts and all figures: {options.out}; {minutes:.1f} minutes", flush=True)
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
        for run in planned_runs(options.methods, _places(options, seed, penalty), {**shared, "data": data[penalty]}):
            more: Any = {"data": data["none"]} if run.method == "bc" else {}
            if run.method == "ilql" and penalty != "none":
                more = _PENALISED_ILQL
            runs[run.out] = run._replace(options={**run.options, **more})
    return list(runs.values())


def _players(options: VisualDialogueDemo, method: str, penalty: Penalty) -> list[DialoguePlayer]:
    places = [_places(options, seed, penalty)[method] for seed in range(options.seeds)]
    return [DialoguePlayer(place, method, seed, options) for seed, place in enumerate(places)]


def _compare(options: VisualDialogueDemo, task: VisualDialogueTask, penalty: Penalty) -> Comparison:
    rows, curves = list[Row](), {}
    for name, (title, train, *_) in METHODS.items():
        if name not in options.methods:
            continue
        players = _players(options, name, penalty)
        best = [player.best(penalty) for player in players]
        plays = [player.test(decoding) for player, decoding in zip(players, best, strict=True)]
        rows.append(Row(title, plays, best, imitates=train[0] == "bc"))
        if UNGUIDED in players[0].measured:
            rows.append(Row(f"{title} beta 0", [player.test(UNGUIDED) for player in players], ["greedy"] * len(plays)))
            curves[title] = {
                decoding.removeprefix("greedy, beta "): [player.measured[decoding][penalty] for player in players]
                for decoding in players[0].measured
            }
    path = options.out / "random_questions.json"  # of the data, none asked twice
    if not path.exists():
        play(task, task.player("data", 0).policy, options.eval_games, 0).write(path)
    data = PlayedDialogues.of_dataset(task, "test", options.eval_games)
    rows.append(Row("dialogues of the data", [data], imitates=True))
    rows.append(Row("random questions", [PlayedDialogues.read(path, remedy=DialoguePlayer.remedy)], imitates=True))
    return Comparison(penalty, {row.title: row for row in rows}, curves)


def _write(
    options: VisualDialogueDemo,
    task: VisualDialogueTask,
    comparisons: Sequence[Comparison],
    data: Mapping[Penalty, Path],
    minutes: float,
) -> str:
    """Write all files, before anything is printed, so that a closed output loses nothing; returns the report."""
    titles = [method.title for name, method in METHODS.items() if name in options.methods]
    checks = [found for each in comparisons if (found := beside_imitations(each, task)) is not None]
    content: dict[str, Any] = {
        **options.as_json(minutes),
        "checks": [figures for figures, _ in checks],
        "cross_rewards": {title: cross_rewards(comparisons, task, title) for title in titles},
    }
    parts = [*(format_comparison(each, task) for each in comparisons), format_cross_rewards(comparisons, task)]
    for each in comparisons:
        content[each.penalty] = {
            "players": {title: row.as_dict(task, each.penalty) for title, row in each.rows.items()},
            "return_by_beta_on_validation_scenes": each.curves,
            "advantages": None,
        }
        if "ilql" in options.methods:
            questions = advantages(_players(options, "ilql", each.penalty)[0], data[each.penalty])
            content[each.penalty]["advantages"] = questions
            lines = [f"Advantages of questions that ILQL learned under {each.penalty!r}"]
            for name, part in questions.items():
                lines += [name, *(f"  {one['advantage']:+.2f}  {one['text']}  ({one['count']} times)" for one in part)]
            parts.append("\n".join(lines))
        captions = [dialogue.caption for dialogue in task.data("test").dialogues[: min(_SCENES, options.eval_games)]]
        write_file(options.out / "transcripts" / f"{each.penalty}.txt", format_dialogues(each, captions))
    write_json(options.out / "results.json", content)
    text = "\n\n\n".join([*parts, "\n".join(text for _, text in checks)]).rstrip()
    write_file(options.out / "report.txt", text + "\n")
    draw_page(options.out / "pictures.png", comparisons)
    return text
