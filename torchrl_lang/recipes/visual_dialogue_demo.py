"""The visual dialogue demo: imitation and ILQL under three rewards, on scenes without training dialogues."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang._files import Record, folder_lock, read_json, remove_leftovers, write_file, write_json
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.visual_dialogue import DialogueRewards, Round
from torchrl_lang.envs.visual_dialogue import prepare as prepare_visual_dialogue
from torchrl_lang.envs.visual_dialogue.env import PROGRESS
from torchrl_lang.envs.visual_dialogue.files import ROUNDS
from torchrl_lang.envs.visual_dialogue.prepare import PrepareVisualDialogue
from torchrl_lang.envs.visual_dialogue.rewards import PENALTIES, Penalty, is_yes_no
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueData, VisualDialogueTask, rounds_of
from torchrl_lang.evaluation import (
    GameRecords,
    SeedSummary,
    Summary,
    format_seed_table,
    format_table,
    over_seeds,
    text_advantages,
)
from torchrl_lang.evaluation.plots import new_figure, save_figure, tidy
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
from torchrl_lang.recipes.demo_options import METHODS, VisualDialogueDemo
from torchrl_lang.recipes.offline import held_out_rows
from torchrl_lang.text import Tokenizer

__all__ = ["main"]


class _Played(Record):
    """Played dialogues in a file."""

    rounds: tuple[tuple[tuple[str, str], ...], ...]
    progress: tuple[tuple[float, ...], ...]
    terminated: tuple[bool, ...]


@dataclass(frozen=True)
class PlayedDialogues:
    """Dialogues of one player in mode "env_stops": the penalty changes what they earn, but not when they end.

    So the returns under all rewards come from the same dialogues.
    """

    rounds: Sequence[Sequence[Round]]
    """Questions and replies of each dialogue."""
    progress: Tensor
    """float32 ``[N, 11]``: the percentile after the caption, and its change in each round, then zeros."""
    terminated: Sequence[bool]
    """Whether a dialogue ended, as against a row that was too short for it."""

    def __len__(self) -> int:
        return len(self.rounds)

    @classmethod
    def from_records(cls, records: GameRecords, tokenizer: Tokenizer) -> PlayedDialogues:
        """Those that :meth:`VisualDialogueTask.evaluate` played."""
        return cls(rounds_of(records, tokenizer), records.kept[PROGRESS], records.terminated.tolist())

    @classmethod
    def of_dataset(cls, task: VisualDialogueTask, split: str, games: int) -> PlayedDialogues:
        """The first dialogues of a split's files, cut where they end."""
        scenes = task.data(split).scenes(task.rewards)[:games]
        progress = torch.zeros(len(scenes), 1 + ROUNDS)
        for place, scene in enumerate(scenes):
            values = (scene.initial, *scene.progress)
            progress[place, : len(values)] = torch.tensor(values)
        return cls([scene.dialogue.rounds for scene in scenes], progress, [True] * len(scenes))

    @classmethod
    def load(cls, path: Path) -> PlayedDialogues:
        """Read what :meth:`save` wrote.

        Raises:
            FileError: the file is damaged.
        """
        found = _Played.read(path, remedy="delete it: the dialogues are played again")
        rounds = [[Round(*each) for each in dialogue] for dialogue in found.rounds]
        return cls(rounds, torch.tensor(found.progress), found.terminated)

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        rounds = tuple(tuple((each.question, each.answer) for each in dialogue) for dialogue in self.rounds)
        progress = tuple(map(tuple, self.progress.tolist()))
        _Played(rounds=rounds, progress=progress, terminated=tuple(self.terminated)).write(path)

    @staticmethod
    def join(parts: Sequence[PlayedDialogues]) -> PlayedDialogues:
        """The dialogues of several plays, one after the other."""
        rounds = [dialogue for part in parts for dialogue in part.rounds]
        ended = [dialogue for part in parts for dialogue in part.terminated]
        return PlayedDialogues(rounds, torch.cat([part.progress for part in parts]), ended)

    def question_rewards(self, penalty: Penalty) -> list[list[float]]:
        """The reward of each question of each dialogue."""
        rewards = DialogueRewards(penalty=penalty)
        found = []
        for dialogue, changes, ended in zip(self.rounds, self.progress[:, 1:].tolist(), self.terminated, strict=True):
            places = range(1, len(dialogue) + 1)
            found.append(
                [
                    rewards.question(change, each.answer, last=ended and place == len(dialogue))
                    for place, each, change in zip(places, dialogue, changes, strict=False)
                ]
            )
        return found

    def returns(self, penalty: Penalty) -> Tensor:
        """The return of each dialogue, float32 ``[N]``."""
        return torch.tensor([sum(rewards) for rewards in self.question_rewards(penalty)])

    def mean_return(self, penalty: Penalty) -> float:
        """Mean over the dialogues."""
        return float(self.returns(penalty).double().mean())

    def summary(self, name: str, task: VisualDialogueTask, penalty: Penalty) -> Summary:
        """Figures of :meth:`VisualDialogueTask.summary`, with the return under a penalty."""
        each = self.question_rewards(penalty)
        ended, turns = torch.tensor(self.terminated), torch.tensor([len(rewards) for rewards in each])
        records = GameRecords(
            rows=TensorDict(batch_size=[len(self)]),
            returns=self.returns(penalty),
            turns=turns,
            terminated=ended,
            truncated=~ended,
            last_reward=torch.tensor([rewards[-1] if rewards else 0.0 for rewards in each]),
            agent_tokens=torch.zeros_like(turns),
            kept=TensorDict({PROGRESS: self.progress}, batch_size=[len(self)]),
        )
        return replace(task.summary_of(records, self.rounds, name), guesses={})  # of games that have guesses


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

    @property
    def pooled(self) -> PlayedDialogues:
        """The dialogues of all seeds."""
        return PlayedDialogues.join(self.plays)

    def over_seeds(self, penalty: Penalty) -> SeedSummary:
        """The mean return under a penalty of each seed."""
        return over_seeds(self.name, [play.mean_return(penalty) for play in self.plays])

    def summary(self, task: VisualDialogueTask, penalty: Penalty) -> Summary:
        """Of the dialogues of all seeds; with several seeds the return's standard error is that over seeds."""
        summary, error = self.pooled.summary(self.name, task, penalty), self.over_seeds(penalty).error
        return summary if error is None else replace(summary, return_error=error)

    def asked_yes_no(self, penalty: Penalty) -> float:
        """Questions in a dialogue that were answered by yes or no, on average."""
        rounds = self.pooled.rounds
        return sum(is_yes_no(each.answer, penalty) for dialogue in rounds for each in dialogue) / len(rounds)

    def percentiles(self) -> list[float]:
        """Mean percentile after the caption and each round; a dialogue that has ended keeps its last."""
        return self.pooled.progress.double().cumsum(-1).mean(0).tolist()

    def final_percentile(self) -> tuple[float, float]:
        """Mean at the end of a dialogue, and its standard error."""
        last = self.pooled.progress.double().sum(-1)
        return float(last.mean()), float(last.std() / math.sqrt(len(last)))


@dataclass(frozen=True)
class Comparison:
    """Results under one reward: its players, and the returns from which decodings were chosen."""

    penalty: Penalty
    rows: Sequence[Row]
    curves: Mapping[str, Mapping[str, Sequence[float]]]
    """For each method with weights of its values, the mean return on validation scenes by weight and seed."""

    def row(self, title: str) -> Row | None:
        """A player by its title."""
        return next((row for row in self.rows if row.title == title), None)

    def as_dict(self, task: VisualDialogueTask) -> dict[str, Any]:
        """All figures, for JSON."""
        players = {}
        for row in self.rows:
            seeds = row.over_seeds(self.penalty)
            players[row.title] = {
                **row.summary(task, self.penalty).as_dict(),
                "decodings": list(row.decodings),
                "returns_of_seeds": list(seeds.values),
                "interval_over_seeds": None if seeds.interval is None else list(seeds.interval),
                "percentile_by_round": row.percentiles(),
            }
        return {"players": players, "return_by_beta_on_validation_scenes": self.curves}


def cross_rewards(
    comparisons: Sequence[Comparison], task: VisualDialogueTask, title: str
) -> dict[str, dict[str, tuple[float, float | None]]]:
    """A method trained (or only decoded) for one reward, evaluated under all: mean return and standard error.

    Returns:
        By the reward of training, then by that of the evaluation.
    """
    found: dict[str, dict[str, tuple[float, float | None]]] = {}
    for trained in comparisons:
        row = trained.row(title)
        if row is not None:
            summaries = {str(each.penalty): row.summary(task, each.penalty) for each in comparisons}
            found[str(trained.penalty)] = {name: (one.mean_return, one.return_error) for name, one in summaries.items()}
    return found


_ILQL, _BC = METHODS["ilql"].title, METHODS["bc"].title


@dataclass(frozen=True)
class Check:
    """ILQL beside the imitations under one reward."""

    penalty: str
    mean_return: float
    error: float
    imitation: str
    """The imitation that it beats by the fewest standard errors."""
    imitation_return: float
    imitation_error: float
    yes_no: float | None = None
    """Questions in a dialogue that were answered by yes or no, under a penalty and where BC is among the players."""
    yes_no_of_bc: float | None = None
    percentile_gain: float | None = None
    """Final percentile minus that of BC."""
    percentile_error: float | None = None

    @property
    def two_errors(self) -> float:
        """Two standard errors of the difference of the returns."""
        return 2 * math.hypot(self.error, self.imitation_error)

    @property
    def beats(self) -> bool:
        """Whether it beats every imitation by two standard errors."""
        return self.mean_return - self.imitation_return > self.two_errors

    @property
    def yes_no_ratio(self) -> float | None:
        """To BC's yes-or-no questions; None where BC asked none."""
        return self.yes_no / self.yes_no_of_bc if self.yes_no is not None and self.yes_no_of_bc else None

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {**asdict(self), "beats": self.beats, "two_errors": self.two_errors, "yes_no_ratio": self.yes_no_ratio}

    def __str__(self) -> str:
        verb = "beats" if self.beats else "does not beat"
        text = (
            f"{self.penalty}: ILQL's return of {self.mean_return:.2f} ± {self.error:.2f} {verb} every imitation by two "
            f"standard errors of the difference ({self.two_errors:.2f}). The nearest is {self.imitation}: "
            f"{self.imitation_return:.2f} ± {self.imitation_error:.2f}."
        )
        if self.yes_no is not None:
            ratio = "" if self.yes_no_ratio is None else f", a ratio of {self.yes_no_ratio:.2f}"
            text += (
                f"\n{self.penalty}: ILQL asks {self.yes_no:.3f} yes-or-no questions in a dialogue, BC "
                f"{self.yes_no_of_bc:.3f}{ratio}. Its final percentile minus BC's is {self.percentile_gain:+.3f} ± "
                f"{self.percentile_error:.3f}."
            )
        return text


def check(comparison: Comparison, task: VisualDialogueTask) -> Check | None:
    """The figures for one reward; None without ILQL or without standard errors."""
    ilql, penalty = comparison.row(_ILQL), comparison.penalty
    found = {row.name: row.summary(task, penalty) for row in comparison.rows if row.imitates}
    if ilql is None:
        return None
    own = ilql.summary(task, penalty)
    if own.return_error is None:
        return None
    checks = [
        Check(penalty, own.mean_return, own.return_error, name, one.mean_return, one.return_error or 0.0)
        for name, one in found.items()
    ]
    nearest = min(checks, key=lambda one: one.mean_return - one.imitation_return - one.two_errors)
    bc = comparison.row(_BC)
    return nearest if bc is None or penalty == "none" else _with_questions(nearest, ilql, bc, comparison)


def _with_questions(found: Check, ilql: Row, bc: Row, comparison: Comparison) -> Check:
    (own, error), (other, other_error) = ilql.final_percentile(), bc.final_percentile()
    return replace(
        found,
        yes_no=ilql.asked_yes_no(comparison.penalty),
        yes_no_of_bc=bc.asked_yes_no(comparison.penalty),
        percentile_gain=own - other,
        percentile_error=math.hypot(error, other_error),
    )


UNGUIDED = "greedy, beta 0"
"""The decoding of a run with values that leaves them out: a row of its own, never chosen."""


def play(
    task: VisualDialogueTask, policy: Any, games: int, seed: int, *, on: tuple[str, int] = REPORT
) -> PlayedDialogues:
    """Play the first scenes of a split, each once; at most all."""
    split, first = on
    games = min(games, task.number_of_games(split))
    _, records = task.evaluate(policy, split=split, games=games, seed=first + seed)
    return PlayedDialogues.from_records(records, task.tokenizer())


@dataclass(frozen=True)
class DialoguePlayer(TrainedPlayer[PlayedDialogues]):
    """A finished run and its dialogues about the test scenes.

    Args:
        folder, method: as in :class:`TrainedPlayer`.
        seed: of its training.
        choice_games: validation scenes on which the decoding is chosen.
        eval_games: test scenes.
    """

    remedy = "delete it: the validation scenes are played again"

    seed: int
    choice_games: int
    eval_games: int

    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run, by name; where values guide it, also without them."""
        finished, by_values = self.finished, METHODS[self.method].by_values
        if by_values and finished.has_values and finished.decoding.include_logits:
            yield UNGUIDED, finished.policy(method="greedy")
        yield from decodings(finished, by_values=by_values)

    def measure(self, policy: TensorDictModuleBase) -> dict[str, float]:
        """The mean return on validation scenes, by penalty."""
        played = play(self._task, policy, self.choice_games, self.seed, on=CHOICE)
        return {penalty: played.mean_return(penalty) for penalty in PENALTIES}

    def play(self, policy: TensorDictModuleBase) -> PlayedDialogues:
        """The dialogues about the test scenes."""
        return play(self._task, policy, self.eval_games, self.seed)

    def load(self, path: Path) -> PlayedDialogues:
        """Read dialogues."""
        return PlayedDialogues.load(path)

    def announce(self, decoding: str, games: PlayedDialogues) -> None:
        """Print how many scenes were played."""
        print(f"played {self.folder.name} {decoding}: {len(games)} test scenes", flush=True)

    @property
    def _task(self) -> VisualDialogueTask:
        return cast(VisualDialogueTask, self.finished.task)

    @property
    def decodings(self) -> list[str]:
        """All that may be chosen."""
        return [name for name in self.measured if name != UNGUIDED]

    def best(self, penalty: Penalty) -> str:
        """The decoding with the highest return on validation scenes; of equal ones the first."""
        return max(self.decodings, key=lambda name: self.measured[name][penalty])


def draw_page(path: Path, comparisons: Sequence[Comparison]) -> Path:
    """Draw one column for each reward: above the percentile by round, below the return by beta on validation scenes."""
    curves = any(comparison.curves for comparison in comparisons)
    figure = new_figure(width=5.0 * len(comparisons), height=7.4 if curves else 3.8)
    panels = figure.subplots(1 + curves, len(comparisons), squeeze=False)
    for column, comparison in enumerate(comparisons):
        _draw_percentiles(panels[0][column], comparison)
        if curves:
            _draw_betas(panels[1][column], comparison)
    return save_figure(figure, path, "Visual dialogue: test scenes")


def _draw_percentiles(axes: Any, comparison: Comparison) -> None:
    for row in comparison.rows:
        values = row.percentiles()
        style = "-" if row.decodings else "--"
        axes.plot(range(len(values)), values, style, linewidth=1.5, label=row.name)
    axes.set(xlabel="round", title=f"percentile by round, reward {comparison.penalty!r}")
    tidy(axes)


def _draw_betas(axes: Any, comparison: Comparison) -> None:
    betas = sorted({beta for curve in comparison.curves.values() for beta in curve}, key=float)
    for title, curve in comparison.curves.items():
        shown = [place for place, beta in enumerate(betas) if beta in curve]
        axes.plot(shown, [statistics.fmean(curve[betas[place]]) for place in shown], marker="o", label=title)
    axes.set_xticks(range(len(betas)), betas)
    axes.set(xlabel="beta, the weight of the values", title=f"return under {comparison.penalty!r}, validation scenes")
    tidy(axes)


_HELD_OUT = 500
_SHOWN = 10
"""Questions of the highest and of the lowest advantage."""


def format_comparison(comparison: Comparison, task: VisualDialogueTask) -> str:
    """The table of one reward; with several seeds also the returns of each; and the returns by weight of the values."""
    penalty = comparison.penalty
    summaries = [row.summary(task, penalty) for row in comparison.rows]
    parts = [f"Reward {penalty!r}, {summaries[0].games} dialogues about test scenes", format_table(summaries)]
    trained = [row for row in comparison.rows if row.decodings]
    if any(len(row.plays) > 1 for row in trained):
        seeds = [row.over_seeds(penalty) for row in trained]
        parts.append(format_seed_table(seeds, title=f"return, {penalty}"))
    for title, curve in comparison.curves.items():
        means = ", ".join(f"{beta}: {sum(found) / len(found):.2f}" for beta, found in curve.items())
        parts.append(f"{title}, return by beta on validation scenes: {means}")
    return "\n\n".join(parts)


def format_cross_rewards(comparisons: Sequence[Comparison], task: VisualDialogueTask) -> str:
    """For each trained player a line for each reward of training (of BC: of the choice of its decoding)."""
    titles = dict.fromkeys(row.title for each in comparisons for row in each.rows if row.decodings)
    names = [str(each.penalty) for each in comparisons]
    lines = [["player", "trained on", *(f"return, {name}" for name in names)]]
    for title in titles:
        for trained, returns in cross_rewards(comparisons, task, title).items():
            cells = [returns[name] for name in names]
            shown = [f"{mean:.2f}" + ("" if error is None else f" ± {error:.2f}") for mean, error in cells]
            lines.append([title, trained, *shown])
    return f"All rewards of the same dialogues\n{format_columns(lines, '<' * len(lines[0]))}"


def write_dialogues(
    path: Path, comparison: Comparison, task: VisualDialogueTask, titles: Sequence[str], *, scenes: int = 5
) -> None:
    """Write the dialogues of some players about the first test scenes, with rewards, captions and percentiles."""
    rows = [row for title in titles if (row := comparison.row(title)) is not None]
    captions = [dialogue.caption for dialogue in task.data("test").dialogues[:scenes]]
    blocks = []
    for scene, caption in enumerate(captions[: len(comparison.rows[0].plays[0])]):
        blocks.append(f"scene {scene}: {caption}")
        blocks += [_dialogue(row, scene, comparison) for row in rows]
    write_file(path, "\n\n".join(blocks) + "\n")


def _dialogue(row: Row, scene: int, comparison: Comparison) -> str:
    play = row.plays[0]
    rewards, percentiles = play.question_rewards(comparison.penalty)[scene], play.progress[scene].cumsum(-1).tolist()
    lines = [f"{row.name}: return {sum(rewards):g}, percentile {percentiles[0]:.3f} after the caption"]
    for each, reward, percentile in zip(play.rounds[scene], rewards, percentiles[1:], strict=False):
        lines += [f"> {each.question or '(nothing)'}  ({reward:g})", f"< {each.answer}  [{percentile:.3f}]"]
    return "\n".join(lines)


def advantages(player: DialoguePlayer, data: Path) -> Mapping[str, Any]:
    """The held-out questions of the highest and of the lowest learned advantage, kept in the folder of an ILQL run."""
    path = player.folder / "advantages.json"
    if not path.exists():
        model, tokenizer = player.finished.model, player.finished.tokenizer
        rows = held_out_rows(load_dataset(data), _HELD_OUT)
        heads: Any = model.heads
        scored = (saved_actor(model), heads["target_qvalue"], heads["value"], rows)
        found = text_advantages(*scored, tokenizer, min_count=max(1, len(rows) // 100))
        parts = {"highest": found[:_SHOWN], "lowest": found[::-1][:_SHOWN]}
        write_json(path, {name: [asdict(one) for one in part] for name, part in parts.items()})
    return read_json(path, remedy="delete it: it is computed again")


def format_advantages(penalty: str, found: Mapping[str, Any]) -> str:
    """The questions as text."""
    lines = [f"Advantages of questions that ILQL learned under {penalty!r}"]
    for name, part in found.items():
        lines.append(name)
        lines += [f"  {one['advantage']:+.2f}  {one['text']}  ({one['count']} times)" for one in part]
    return "\n".join(lines)


_PENALISED_ILQL: Mapping[str, Any] = {"cql-weight": 0.3}
"""Returns with a penalty spread more, and so do the errors of values: ILQL then repeats questions late in a dialogue.
The larger weight helps there, and harms without a penalty."""

_IMITATIONS = [name for name, method in METHODS.items() if method.train[0] == "bc"]
"""Methods that copy the data, or its best part."""


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
