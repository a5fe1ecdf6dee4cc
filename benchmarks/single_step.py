"""Single-step against multi-step RL on adversarial Wordle data: ``python -m benchmarks.single_step``.

Section 5 of the ILQL paper (arXiv 2206.11871): after an expert's first guesses most games of the data are lost, because
an adversary takes over. An average over the data prefers the first guesses of a suboptimal player; a method that plans
over several steps prefers the expert's.

The paper's suboptimal player guesses consistent words half of the time. So its games contain continuations that are
nearly as good as the expert's, and the exact optimum within the data hardly prefers the expert's first guess. Here the
suboptimal player wastes some guesses and then plays like the expert: no continuation of its games is good.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.objectives import SoftUpdate

from benchmarks.common import RESULTS, machine
from benchmarks.seed_figure import draw_curves
from torchrl_lang.data import row_buffer
from torchrl_lang.envs.wordle import OptimalPlayer, Player, WordleEnv, WrongPlayer, demo_words, wordle_tokenizer
from torchrl_lang.envs.wordle.samplers import AdversarialGames, guess_pairs
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.evaluation import Comparison, SeedSummary, format_seed_table, over_seeds, preference_rates
from torchrl_lang.modules import (
    QValueHead,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    row_log_prob,
    value_module,
)
from torchrl_lang.objectives import BCLoss, ILQLLoss
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS
from torchrl_lang.training import muon_adamw, train_steps, warmup_cosine

WASTED = 4
"""Number of guesses that the suboptimal player wastes."""

METHODS = {"ILQL": 0.99, "single-step": 0.5, "BC": None}
"""Names and the expectile of V; BC compares log-probabilities instead of values."""

KINDS = {"first guess": 2, "third guess": 1}
"""Where the expert's guess is compared, and with the guess of which kind of games."""


class Setting(NamedTuple):
    """What all runs share."""

    words: int = 50
    experts: int = 3000
    steps: int = 1600
    measurements: int = 10
    compared: int = 100


QUICK = Setting(words=10, experts=100, steps=20, measurements=2, compared=40)


class SlowPlayer(Player):
    """Plays words that the colours exclude for some guesses, then the word with the largest information gain."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.wrong, self.optimal = WrongPlayer(words), OptimalPlayer(words)

    def choose(self, turns: Turns) -> Tensor:
        """See :class:`~torchrl_lang.envs.wordle.Player`."""
        is_late = turns.tries >= WASTED
        return torch.where(is_late[:, None], self.optimal.choose(turns), self.wrong.choose(turns))


def run(setting: Setting, method: str, seed: int) -> list[dict[str, float]]:
    """Train one method: how often it prefers the expert's guess, by training step."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    words = demo_words(setting.words)
    maker = AdversarialGames(WordleEnv(words, [512]), suboptimal=SlowPlayer(words))
    rows = maker(range(setting.experts), seed)
    others = maker(range(setting.experts, setting.experts + setting.compared), seed)
    pairs = {name: [Comparison(*pair) for pair in guess_pairs(others, kind)] for name, kind in KINDS.items()}
    expectile = METHODS[method]
    actor, size = _actor(maker.row_length), wordle_tokenizer().vocab_size
    loss: Any = BCLoss(actor) if expectile is None else _ilql(actor, size, expectile)
    optimizer = muon_adamw(loss, 2e-3)
    steps = train_steps(
        loss,
        row_buffer(rows, 64, seed=seed).sample,
        optimizer,
        steps=setting.steps,
        scheduler=warmup_cosine(optimizer, setting.steps, final=0.05),
        target_updater=None if expectile is None else SoftUpdate(loss, tau=0.02),
        max_grad_norm=1.0,
    )
    every = setting.steps // setting.measurements
    found = [{"step": step, **rates(loss, actor, pairs)} for step, _ in steps if step % every == 0]
    print(f"{method}, seed {seed}: {', '.join(f'{name} {found[-1][name]:.2f}' for name in pairs)}", flush=True)
    return found


def _actor(row_length: int) -> Any:
    size = wordle_tokenizer().vocab_size
    lm = causal_lm(vocab_size=size, layers=2, width=64, heads=4, max_length=row_length, initializer_range=64**-0.5)
    return language_actor(lm)


def _ilql(actor: Any, vocabulary: int, expectile: float) -> ILQLLoss:
    """Single-step RL is ILQL with the mean instead of a higher expectile."""
    return ILQLLoss(
        actor,
        qvalue_module(QValueHead(64, vocabulary)),
        value_module(ValueHead(64)),
        expectile=expectile,
        gamma=1.0,
        turn_gamma=0.99,
        target="lambda",
        lmbda=1.0,
        turn_lmbda=0.0,
        value_weight=0.5,
        qvalue_weight=0.5,
        cql_weight=0.01,
        end_of_action=wordle_tokenizer().control.end_of_action,
    )


def rates(loss: Any, actor: Any, pairs: Mapping[str, Sequence[Comparison]]) -> dict[str, float]:
    """The share of states in which the expert's guess is preferred, by the target Q or by BC's probability."""
    if isinstance(loss, ILQLLoss):
        target, control = loss.target_qvalue_network(), wordle_tokenizer().control
        return {name: float(preference_rates(actor, target, chosen, control)[-1]) for name, chosen in pairs.items()}
    found = {}
    for name, chosen in pairs.items():
        better, worse = (_log_prob(actor, chosen, which) for which in ("better", "worse"))
        found[name] = float(((better > worse).double() + (better >= worse).double()).mean() / 2)
    return found


@torch.no_grad()
def _log_prob(actor: Any, comparisons: Sequence[Comparison], which: str) -> Tensor:
    """Log-probability of an utterance of each comparison, ``[N]``."""
    tokens = [torch.cat([one.tokens, getattr(one, which)]) for one in comparisons]
    length = torch.tensor([[len(one.tokens), len(row)] for one, row in zip(comparisons, tokens, strict=True)])
    padded = pad_sequence(tokens, batch_first=True)
    place = torch.arange(padded.shape[1])
    real = place < length[:, 1:]
    rows = TensorDict(
        {TOKENS: padded, ATTENTION_MASK: real, AGENT_MASK: real & (place >= length[:, :1])}, [len(tokens)]
    )
    return row_log_prob(actor, rows).sum(-1)


def run_all(setting: Setting, seeds: int, workers: int) -> dict[str, list[list[dict[str, float]]]]:
    """The curves of every method, one for each seed."""
    jobs = list(product(METHODS, range(seeds)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        curves = list(pool.map(run, [setting] * len(jobs), *zip(*jobs, strict=True)))
    return {method: [curves[jobs.index((method, seed))] for seed in range(seeds)] for method in METHODS}


def over_time(curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> dict[str, dict[str, list[SeedSummary]]]:
    """For each place of comparison and each method, a summary over seeds at every measured step."""
    return {
        place: {
            method: [over_seeds(method, [point[place] for point in points]) for points in zip(*seeds, strict=True)]
            for method, seeds in curves.items()
        }
        for place in KINDS
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.single_step", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="training seeds, each with its own data")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="a few seconds; nothing is recorded")
    options = parser.parse_args(arguments)
    setting, began = QUICK if options.quick else Setting(), time.perf_counter()
    curves = run_all(setting, options.seeds, options.workers)
    minutes = (time.perf_counter() - began) / 60
    summaries = over_time(curves)
    for place, methods in summaries.items():
        print(f"\n{format_seed_table([points[-1] for points in methods.values()], title=f'expert preferred, {place}')}")
    print(f"\n{minutes:.1f} minutes")
    if options.quick:
        return
    results = {"machine": machine(), "setting": setting._asdict(), "minutes": round(minutes, 1), "curves": curves}
    (RESULTS / "single_step.json").write_text(json.dumps(results, indent=1) + "\n")
    steps = [int(point["step"]) for point in curves["ILQL"][0]]
    draw_curves(Path(RESULTS / "single_step.png"), "How often the expert's guess is preferred", steps, summaries)


if __name__ == "__main__":
    main()
