"""Training steps of other implementations over ours: the same Wordle rows, sizes and terms, one core.

A training step is the losses, their backward pass, AdamW and the soft update of the targets, on batches that lie ready
as tensors; "losses" are the first two, as in the plain language-model step, which is Hugging Face's loss on the padded
rows. The implementations:

* AgileRL's ILQL, the release of :mod:`benchmarks.rival_agilerl` in a process of its own, with everything as it comes:
  three of its own GPTs (policy, values, a copy for the targets), heads with two hidden layers each, the policy's among
  them, and what its loss computes for its log. Same rows, layers, width, weights of the terms; no dropout.
* TorchRL's ``DiscreteIQLLoss``, see :mod:`benchmarks.rival_discrete_iql`, over ours without CQL.
* The paper's layout in our code: a trunk of their own for Q and V, and a copy of it for the targets.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.objectives import SoftUpdate
from transformers import PreTrainedModel

from benchmarks.common import interleaved, median, one_core, ratio, row
from benchmarks.plain import plain_step
from benchmarks.rival_agilerl import FOLDER, AgileRL, Unavailable, install, installed
from benchmarks.rival_discrete_iql import OneTrunkPass, TrunkInEach
from benchmarks.wordle_batches import MAX_LENGTH, PAD, VOCABULARY, wordle_batches
from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor, qvalue_module, value_module
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.training import adamw, total_loss

LAYERS, WIDTH, HEADS = 4, 128, 4
SIZES = {
    "vocabulary": VOCABULARY,
    "pad": PAD,
    "layers": LAYERS,
    "width": WIDTH,
    "heads": HEADS,
    "max_length": MAX_LENGTH,
}
SMOKE = {"LAYERS": 1, "WIDTH": 16, "SIZES": SIZES | {"layers": 1, "width": 16}}
MIN_OVER_AGILERL = 2.5
MAX_THREE_TRUNKS = 2.2

Batches = list[TensorDictBase]


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    batches = wordle_batches()
    repeats = 3 if quick else 15
    return [
        *agilerl_rows(batches, repeats, make=not quick),
        *discrete_iql_rows(batches, repeats),
        *three_trunk_rows(batches, repeats),
    ]


def agilerl_rows(batches: Batches, repeats: int, folder: Path = FOLDER, *, make: bool = True) -> list[dict[str, Any]]:
    """AgileRL's step, ours and the plain one; without AgileRL a note with the reason, and the other two."""
    plain, ours = Plain(make_lm(), batches), Learner(make_ilql(make_lm()), batches)
    jobs = {"plain": plain.step, "our losses": ours.losses, "our step": ours.step}
    try:
        if not make and not installed(folder):
            raise Unavailable("A quick look makes no environment for it.")
        with AgileRL(batches, SIZES, install(folder)) as rival:
            for_losses, for_step = (itertools.cycle(range(len(batches))) for _ in range(2))
            theirs = {
                "AgileRL's losses": lambda: rival.losses(next(for_losses)),
                "AgileRL's step": lambda: rival.step(next(for_step)),
            }
            times, note = interleaved(jobs | theirs, repeats), None
    except Unavailable as error:
        times, note = interleaved(jobs, repeats), f"AgileRL was not measured. {error}"
        print(f"  {note}", flush=True)
    rows = [row("plain language-model step", median(1000 * took for took in times["plain"]), "ms", note=note)]
    rows += [row(f"{name} / plain step", ratio(times, name, "plain"), "x") for name in times if name != "plain"]
    if note is None:
        over = ratio(times, "AgileRL's step", "our step")
        rows.append(row("AgileRL's ILQL step / ours", over, "x", MIN_OVER_AGILERL))
        rows.append(row("AgileRL's ILQL losses / ours", ratio(times, "AgileRL's losses", "our losses"), "x"))
    return rows


def discrete_iql_rows(batches: Batches, repeats: int) -> list[dict[str, Any]]:
    learners = {"ours": Learner(make_ilql(make_lm(), cql_weight=0.0, actor_normalizer="action"), batches)}
    for name, form in (("one trunk pass before it", OneTrunkPass), ("a trunk in each network", TrunkInEach)):
        learners[name] = Learner(form(make_lm(), QValueHead(WIDTH, VOCABULARY), ValueHead(WIDTH)), batches)
    times = interleaved({name: learner.step for name, learner in learners.items()}, repeats)
    return [
        row(f"DiscreteIQLLoss step, {name} / ours without CQL", ratio(times, name, "ours"), "x")
        for name in times
        if name != "ours"
    ]


def three_trunk_rows(batches: Batches, repeats: int) -> list[dict[str, Any]]:
    """The paper's layout over ours; beside it what its passes cost each, which is all that it adds."""
    ours, paper = Learner(make_ilql(make_lm()), batches), Learner(make_ilql(make_lm(), value_lm=make_lm()), batches)
    passes = Passes(make_lm(), batches)
    jobs = {"ours": ours.step, "paper's": paper.step, "trained": passes.trained, "frozen": passes.frozen}
    times = interleaved(jobs, repeats)
    trained, frozen = (ratio(times, name, "ours") for name in ("trained", "frozen"))
    note = (
        f"beyond our step it trains one more trunk, {trained:.2f} of the step, and runs one without gradients, "
        f"{frozen:.2f}: {1 + trained + frozen:.2f} from its passes alone"
    )
    return [
        row(
            "paper's three trunks / ours",
            ratio(times, "paper's", "ours"),
            "x",
            MAX_THREE_TRUNKS,
            at_most=True,
            note=note,
        ),
        row("a pass of the trunk, forward and backward / our step", trained, "x"),
        row("a pass of the trunk, no gradients / our step", frozen, "x"),
    ]


def make_lm() -> PreTrainedModel:
    return causal_lm(vocab_size=VOCABULARY, pad=PAD, layers=LAYERS, width=WIDTH, heads=HEADS, max_length=MAX_LENGTH)


def make_ilql(lm: PreTrainedModel, *, value_lm: PreTrainedModel | None = None, **options: Any) -> ILQLLoss:
    """Our loss; with ``value_lm`` in the paper's layout, where that is the trunk of Q and V."""
    trunk = None if value_lm is None else language_actor(value_lm)[0]
    heads = qvalue_module(QValueHead(WIDTH, VOCABULARY)), value_module(ValueHead(WIDTH))
    return ILQLLoss(language_actor(lm), *heads, value_trunk=trunk, target_trunk=trunk is not None, **options)


class Learner:
    """A loss with its optimiser and its targets; ``losses`` and ``step`` each take the next batch of their own."""

    def __init__(self, loss: nn.Module, batches: Batches) -> None:
        self.loss = loss
        self.optimizer = adamw(loss, 1e-4)
        self.targets = SoftUpdate(loss if isinstance(loss, ILQLLoss) else loss.loss, tau=0.01)
        self._turns = itertools.cycle(batches), itertools.cycle(batches)

    def losses(self) -> None:
        total_loss(self.loss(next(self._turns[0]))).backward()
        self.optimizer.zero_grad()

    def step(self) -> None:
        total_loss(self.loss(next(self._turns[1]))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.targets.step()


class Plain:
    """The plain step of a model, batch after batch."""

    def __init__(self, lm: PreTrainedModel, batches: Batches) -> None:
        self.lm = lm
        self._turn = itertools.cycle(batches)

    def step(self) -> None:
        plain_step(self.lm, next(self._turn))
        self.lm.zero_grad()


class Passes:
    """The trunk alone, as our losses run it: trained, and without gradients."""

    def __init__(self, lm: PreTrainedModel, batches: Batches) -> None:
        self.trunk = language_actor(lm)[0]
        self._turns = itertools.cycle(batches), itertools.cycle(batches)

    def trained(self) -> None:
        rows = next(self._turns[0])
        self.trunk(rows.copy())["hidden"].sum().backward()
        self.trunk.zero_grad()

    @torch.no_grad()
    def frozen(self) -> None:
        self.trunk(next(self._turns[1]).copy())
