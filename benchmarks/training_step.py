"""An ILQL training step beside the plain language-model step of the same model on the same rows, one core."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.objectives import SoftUpdate

from benchmarks.common import device, interleaved, median, one_core, ratio, row
from benchmarks.packing import pack, packed_states
from benchmarks.plain import plain_step
from benchmarks.wordle_batches import MAX_LENGTH, PAD, VOCABULARY, wordle_batches
from torchrl_lang.envs.wordle import wordle_tokenizer
from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor, qvalue_module, value_module
from torchrl_lang.modules.row_groups import length_groups
from torchrl_lang.objectives import BCLoss, ILQLLoss
from torchrl_lang.recipes.algorithms import ILQL
from torchrl_lang.recipes.token_values import build_loss
from torchrl_lang.training import total_loss

ON_CUDA = True
# The demo's model, and one twice as wide and a layer deeper: what an ILQL step may cost beside the plain one.
SIZES = {"demo model": (3, 64, 1.15), "4 layers, 128 wide": (4, 128, 0.75)}
LINE = 2 * MAX_LENGTH  # width of packed lines; half of it and twice as much were slower


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    batches = [batch.to(device()) for batch in wordle_batches()]
    rows = []
    for name, (layers, width, limit) in SIZES.items():
        rows += _compare(name, layers, width, limit, batches, repeats=5 if quick else 25)
    return [*rows, *_packing(batches[0], repeats=5 if quick else 25)]


def _compare(
    name: str, layers: int, width: int, limit: float, batches: list[TensorDictBase], repeats: int
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    shape = {"layers": layers, "width": width, "heads": 4, "max_length": MAX_LENGTH}
    lm = causal_lm(vocab_size=VOCABULARY, pad=PAD, **shape).to(device())
    other = causal_lm(vocab_size=VOCABULARY, pad=PAD, **shape).to(device())

    def recipe() -> ILQLLoss:
        """The very loss of the demo: lambda-returns, and the environment's words learned as well."""
        loss, _, _ = build_loss(
            ILQL(data=Path(), out=Path()), lm, language_actor(lm), wordle_tokenizer().control.end_of_action
        )
        SoftUpdate(loss, tau=0.01)
        return loss

    def ilql(groups: int | Literal["auto"] = "auto", own_trunk: bool = False) -> ILQLLoss:
        actor = language_actor(lm, length_groups=groups)
        trunk = language_actor(other, length_groups=groups)[0] if own_trunk else None
        heads = QValueHead(width, VOCABULARY).to(device()), ValueHead(width).to(device())
        loss = ILQLLoss(actor, qvalue_module(heads[0]), value_module(heads[1]), value_trunk=trunk)
        SoftUpdate(loss, tau=0.01)
        return loss

    losses = {
        "ILQL as in the recipe": recipe(),
        "ILQL": ilql(),
        "ILQL, batch not split by length": ilql(1),
        "ILQL, batch split into 4 equal groups": ilql(4),
        "ILQL, a value trunk of its own": ilql(own_trunk=True),
        "BC": BCLoss(language_actor(lm)),
    }
    turn = itertools.count()

    def batch() -> TensorDictBase:
        """The same batch for every job of a round."""
        return batches[next(turn) // (len(losses) + 1) % len(batches)]

    def plain() -> None:
        plain_step(lm, batch())
        lm.zero_grad()

    def step(loss: torch.nn.Module) -> Callable[[], None]:
        def job() -> None:
            total_loss(loss(batch())).backward()
            loss.zero_grad()

        return job

    times = interleaved({"plain": plain} | {label: step(loss) for label, loss in losses.items()}, repeats)
    targets = {"ILQL as in the recipe": 1.15, "ILQL": limit}
    return [
        *(
            row(f"{name}: {label} / plain step", ratio(times, label, "plain"), "x", targets.get(label), at_most=True)
            for label in losses
        ),
        row(f"{name}: plain language-model step", median(1000 * t for t in times["plain"]), "ms"),
    ]


def _packing(batch: TensorDictBase, repeats: int) -> list[dict[str, Any]]:
    """The trunk alone, forward and backward, on lines of several rows beside groups of rows of similar length."""
    shape = {"layers": 4, "width": 128, "heads": 4, "max_length": MAX_LENGTH}
    lm = causal_lm(vocab_size=VOCABULARY, pad=PAD, **shape).to(device())
    trunk, length = language_actor(lm)[0].module, batch["attention_mask"].sum(-1)

    def grouped() -> None:
        states = trunk(batch["tokens"], batch["attention_mask"])
        states[batch["attention_mask"]].sum().backward()

    def packed() -> None:
        packed_states(lm.base_model, lines).sum().backward()

    lines = pack(batch["tokens"], length, LINE)
    times = interleaved({"packed": packed, "grouped": grouped}, repeats)
    share = float(length.sum()) / lines.tokens.numel()
    groups = len(length_groups(length))
    note = f"lines of {LINE} tokens, {share:.0%} of them real, kept apart by a mask; beside {groups} groups of rows."
    return [row("trunk: rows packed into lines / groups by length", ratio(times, "packed", "grouped"), "x", note=note)]
