"""AgileRL's ILQL and ours with the same weights on the same rows: every term of the loss, option by option.

AgileRL computes the terms in its own process, see :mod:`benchmarks.rival_agilerl`; its weights come over by
:mod:`torchrl_lang.modules.agilerl.export`. A row of the table is the largest relative difference among the terms
(values, action values, CQL, margin, policy, their sum, and the sum's gradients in every weight of the values' and the
policy's networks). Further rows describe what AgileRL's options and methods do when they are called.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from benchmarks.agilerl_findings import FINDINGS
from benchmarks.common import align, one_core, row, short
from benchmarks.rival_agilerl import AgileRL, Unavailable, install, installed
from benchmarks.wordle_batches import MAX_LENGTH, PAD, VOCABULARY, wordle_batches
from torchrl_lang.modules import read_agilerl
from torchrl_lang.modules.agilerl.checkpoint import AgileRLAgent, renamed
from torchrl_lang.objectives import agilerl_loss

WORKER = Path(__file__).with_name("agilerl_terms_worker.py")
# Room for the prefix that a probe gives.
SIZES = {"vocabulary": VOCABULARY, "pad": PAD, "layers": 2, "width": 32, "heads": 4, "max_length": MAX_LENGTH + 6}
MAX_DIFFERENCE = 1e-4
TERMS = {"v": "value", "q": "qvalue", "cql": "cql", "dm": "margin", "awac": "actor"}
WEIGHTS = {"actor_weight": 1.0, "value_weight": 1.0, "qvalue_weight": 1.0, "cql_weight": 0.3, "margin_weight": 0.2}
GRADIENTS = {"grad values": ("values", "qvalue", "value"), "grad policy": ("policy",)}
COLUMNS = (*TERMS, "total", *GRADIENTS)

Found = dict[str, float]


@dataclass(frozen=True)
class Case:
    """Options of AgileRL's constructor and the batch that they are tried on."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 0
    mc_returns: bool = False
    reason: str = ""
    """Why the definitions differ; empty where they agree."""


GAMES, CUT_ALIKE, CUT_UNLIKE = range(3)
PADDED = (
    "each unfinished row with fewer agent tokens than the row with most counts one padded action more there: the token "
    "at position 1 with reward 0, as if the game ended after it"
)
CASES = (
    Case("defaults"),
    Case("tau=0.9", {"tau": 0.9}),
    Case("tau=0.5", {"tau": 0.5}),
    Case("gamma=0.5", {"gamma": 0.5}),
    Case("gamma=1", {"gamma": 1.0}),
    Case("beta=2", {"beta": 2.0}),
    Case("beta=2, clip_weight=1.1", {"beta": 2.0, "clip_weight": 1.1}),
    Case("beta=0.8, exp_weights=False", {"beta": 0.8, "exp_weights": False}),
    Case("transition_weight=0.3", {"transition_weight": 0.3}),
    Case("transition_weight=3, clip_weight=1.5", {"transition_weight": 3.0, "clip_weight": 1.5}),
    Case("value_min=-0.2, value_max=0.1, beta=1", {"value_min": -0.2, "value_max": 0.1, "beta": 1.0}),
    Case("value_max=0", {"value_max": 0.0}),
    Case("dm_margin=0.5", {"dm_margin": 0.5}),
    Case("cql_temp=0.3", {"cql_temp": 0.3}),
    Case("cql_temp=4", {"cql_temp": 4.0}),
    Case("double_q=False", {"double_q": False}),
    Case("double_q=False, beta=2, dm_margin=0.5", {"double_q": False, "beta": 2.0, "dm_margin": 0.5}),
    Case("detach_v=True", {"detach_v": True}),
    Case("detach_q=True", {"detach_q": True}),
    Case("detach_pi=True", {"detach_pi": True}),
    Case("detach_v, detach_q, detach_pi", {"detach_v": True, "detach_q": True, "detach_pi": True}),
    Case("get_loss(mc_returns=True)", mc_returns=True),
    Case("per_token=False, beside our loss per token", {"per_token": False}),
    Case("unfinished rows of one length, beta=1", {"beta": 1.0}, CUT_ALIKE),
    Case("unfinished rows of several lengths, beta=1", {"beta": 1.0}, CUT_UNLIKE, reason=PADDED),
)


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    try:
        if quick and not installed():
            raise Unavailable("A quick look makes no environment for it.")
        python = install()
        batches = make_batches(16 if quick else 64)
        with AgileRL(batches, SIZES, python, WORKER) as rival:
            return rows_of(rival, batches, CASES[::3] if quick else CASES)
    except Unavailable as error:
        return [row("terms that were compared", 0, "", note=f"AgileRL was not started. {error}")]


def make_batches(rows: int) -> list[TensorDictBase]:
    """Finished games; the same cut off at one length; and cut off at several lengths."""
    games = wordle_batches(1, rows=rows)[0]
    length = games["attention_mask"].sum(-1)
    long = games[length > 24]
    several = 12 + torch.arange(len(long)) % 12
    return [games, cut(long, torch.full((len(long),), 24)), cut(long, several)]


def cut(games: TensorDictBase, length: Tensor) -> TensorDictBase:
    """The first ``length`` ``[B]`` tokens of each row, as games that were not finished."""
    width = int(length.max())
    real = torch.arange(width) < length[:, None]
    batch = games.clone()
    batch["tokens"] = torch.where(real, games["tokens"][:, :width], PAD)
    batch["attention_mask"] = real
    batch["agent_mask"] = games["agent_mask"][:, :width] & real
    batch["token_reward"] = torch.where(real, games["token_reward"][:, :width], 0.0)
    batch["terminated"] = torch.zeros_like(games["terminated"])
    return batch


def rows_of(rival: AgileRL, batches: list[TensorDictBase], cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Compare the cases and run the findings."""
    with tempfile.TemporaryDirectory() as folder:
        agent = read_agilerl(rival.ask(json.dumps({"export": folder}))["folder"])
    lines, rows = [("options", *COLUMNS)], []
    for case in cases:
        found = difference(rival, agent, batches[case.batch], case)
        lines.append((case.name, *(short(found[name]) for name in COLUMNS)))
        target = None if case.reason else MAX_DIFFERENCE
        rows.append(row(case.name, max(found.values()), "rel.", target, at_most=True, note=case.reason or None))
        rows[-1]["terms"] = found
    print("\n".join(f"  {line}" for line in align(lines)), flush=True)
    for finding in FINDINGS:
        answer = rival.ask(json.dumps({"probe": finding.probe}))
        rows.append(row(f"{finding.name}: as described", float(finding.holds(answer)), "yes", 1, note=finding.text))
    return rows


def difference(rival: AgileRL, agent: AgileRLAgent, batch: TensorDictBase, case: Case) -> Found:
    """Relative difference of each term, and of each weight's gradient relative to its largest number."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"terms": case.batch, "options": case.options, "mc_returns": case.mc_returns, "gradients": folder}
        theirs = rival.ask(json.dumps(asked))
        their_gradients = read_agilerl(folder)
    ours, gradients = our_terms(agent, batch, case)
    found = {name: abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-8) for name in ours}
    for column, networks in GRADIENTS.items():
        wanted = weights_of(their_gradients, networks)
        largest = max(value.abs().max() for value in wanted.values())
        found[column] = max(
            float((gradients[name] - value).abs().max() / value.abs().max().clamp_min(1e-3 * largest + 1e-8))
            for name, value in wanted.items()
        )
    return found


def weights_of(agent: AgileRLAgent, networks: Sequence[str]) -> dict[str, Tensor]:
    """All weights of some networks of an agent, by name."""
    named = {network: getattr(agent, network).named_parameters() for network in networks}
    return {f"{network}.{name}": weight.detach() for network, pairs in named.items() for name, weight in pairs}


def our_terms(agent: AgileRLAgent, batch: TensorDictBase, case: Case) -> tuple[Found, dict[str, Tensor]]:
    """Our terms, unweighted, their weighted sum as ``total``, and its gradients by name of the weight."""
    agent = agent if case.options.get("double_q", True) else one_head(agent)
    options = renamed(case.options)
    loss, _ = agilerl_loss(agent, **WEIGHTS, **options, target="mc" if case.mc_returns else "td")
    loss.zero_grad()
    out = loss(batch)
    total = sum(value for key, value in out.items() if key.startswith("loss_"))
    total.backward()
    found = {name: float(out[f"loss_{ours}"].detach()) / WEIGHTS[f"{ours}_weight"] for name, ours in TERMS.items()}
    gradients = {
        f"{network}.{name}": torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for network in chain(*GRADIENTS.values())
        for name, weight in getattr(agent, network).named_parameters()
    }
    return found | {"total": float(total.detach())}, gradients


def one_head(agent: AgileRLAgent) -> AgileRLAgent:
    """The agent with the first Q head alone."""
    heads = {}
    for name in ("qvalue", "target_qvalue"):
        head = getattr(agent, name)
        single = type(head)(head.width, head.vocab_size, n_heads=1, kind="deep")
        single.load_state_dict({key: value[:1] for key, value in head.state_dict().items()})
        heads[name] = single
    return agent._replace(**heads)
