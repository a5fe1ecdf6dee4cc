"""An ILQL training step beside the plain language-model step of the same model on the same rows, one core."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.objectives import SoftUpdate

from benchmarks.common import interleaved, one_core, ratio, row
from benchmarks.wordle_batches import MAX_LENGTH, PAD, VOCABULARY, wordle_batches
from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor, qvalue_module, value_module
from torchrl_lang.objectives import BCLoss, ILQLLoss
from torchrl_lang.recipes.wordle_ilql import WordleILQL, build_loss
from torchrl_lang.training import total_loss

MAX_RATIO = 1.15
# The demo's model, and one twice as wide and a layer deeper.
SIZES = {"demo model": (3, 64), "4 layers, 128 wide": (4, 128)}


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    batches = wordle_batches()
    rows = []
    for name, (layers, width) in SIZES.items():
        rows += _compare(name, layers, width, batches, repeats=5 if quick else 25)
    return rows


def _compare(name: str, layers: int, width: int, batches: list[TensorDictBase], repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    shape = {"layers": layers, "width": width, "heads": 4, "max_length": MAX_LENGTH}
    lm = causal_lm(vocab_size=VOCABULARY, pad=PAD, **shape)
    other = causal_lm(vocab_size=VOCABULARY, pad=PAD, **shape)

    def recipe() -> ILQLLoss:
        """The very loss of the demo: lambda-returns, and the environment's words learned as well."""
        loss, _, _ = build_loss(WordleILQL(data=Path(), out=Path()), lm, VOCABULARY)
        SoftUpdate(loss, tau=0.01)
        return loss

    def ilql(groups: int, own_trunk: bool = False) -> ILQLLoss:
        actor = language_actor(lm, length_groups=groups)
        trunk = language_actor(other, length_groups=groups)[0] if own_trunk else None
        heads = qvalue_module(QValueHead(width, VOCABULARY)), value_module(ValueHead(width))
        loss = ILQLLoss(actor, *heads, value_trunk=trunk)
        SoftUpdate(loss, tau=0.01)
        return loss

    losses = {
        "ILQL as in the recipe": recipe(),
        "ILQL": ilql(4),
        "ILQL, batch not split by length": ilql(1),
        "ILQL, a value trunk of its own": ilql(4, own_trunk=True),
        "BC": BCLoss(language_actor(lm, length_groups=4)),
    }
    turn = itertools.count()

    def batch() -> TensorDictBase:
        """The same batch for every job of a round."""
        return batches[next(turn) // (len(losses) + 1) % len(batches)]

    def plain() -> None:
        """Hugging Face's loss on the padded rows, forward and backward."""
        rows = batch()
        labels = torch.where(rows["attention_mask"], rows["tokens"], -100)
        mask = rows["attention_mask"].long()
        lm(input_ids=rows["tokens"], attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        lm.zero_grad()

    def step(loss: torch.nn.Module) -> Callable[[], None]:
        def job() -> None:
            total_loss(loss(batch())).backward()
            loss.zero_grad()

        return job

    times = interleaved({"plain": plain} | {label: step(loss) for label, loss in losses.items()}, repeats)
    targets = {"ILQL as in the recipe": MAX_RATIO, "ILQL": MAX_RATIO}
    return [
        *(
            row(f"{name}: {label} / plain step", ratio(times, label, "plain"), "x", targets.get(label), at_most=True)
            for label in losses
        ),
        row(f"{name}: plain language-model step", statistics.median(times["plain"]) * 1000, "ms"),
    ]
