"""AgileRL's ILQL as a process that computes each term of its loss, and tries each of its options.

It runs in AgileRL's own virtual environment. It answers lines of JSON: ``{"export": folder}`` writes the agent,
``{"terms": batch, "options": {...}, "gradients": folder}`` computes the terms of a batch with options of the
constructor and writes the gradients of all weights, as an agent that has them for weights, and
``{"probe": name}`` runs a method of ``Probes``.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from agilerl.algorithms.ilql import ILQL
from torch import Tensor

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "torchrl_lang" / "modules" / "agilerl")]  # last: they replace no package

from export import export  # noqa: E402
from rival_agilerl_worker import Batch, serve  # noqa: E402

WEIGHTS = {"awac_weight": 1.0, "v_loss_weight": 1.0, "q_loss_weight": 1.0, "cql_loss_weight": 0.3}
WEIGHTS["dm_loss_weight"] = 0.2
TERMS = {"v": "v_loss", "q": "q_loss", "cql": "cql_loss", "dm": "dm_loss", "awac": "token_loss"}


class Probes:
    """What options and methods do: each probe answers with a number, or raises as AgileRL does."""

    def __init__(self, ilql: ILQL, batch: Batch) -> None:
        self.ilql, self.batch = ilql, batch
        width = ilql.net_config["n_embd"]
        self.prefix = torch.randn(len(batch["tokens"]), 3, width)

    def forward(self, attn_mask: Tensor | None = None, **options: Any) -> dict[str, Any]:
        batch = self.batch
        mask = batch["attn_mask"] if attn_mask is None else attn_mask
        with torch.no_grad():
            return self.ilql(batch["tokens"], batch["state_idxs"], batch["action_idxs"], mask, **options)

    def loss(self, ilql: ILQL | None = None) -> float:
        return (ilql or self.ilql).get_loss(self.batch, **WEIGHTS)[0].item()

    def change(self, name: str, value: Any) -> float:
        """Difference that another value of an option makes to the loss."""
        other = self.ilql.clone()
        setattr(other, name, value)
        return abs(self.loss(other) - self.loss())

    def per_token(self) -> float:
        return self.change("per_token", False)

    def batch_size(self) -> float:
        return self.change("batch_size", 1)

    def index(self) -> float:
        return self.change("index", 7)

    def mutation(self) -> float:
        return self.change("mut", "param")

    def attn_mask(self) -> float:
        """Difference of V with a mask that hides half of the tokens."""
        mask = self.batch["attn_mask"].clone()
        mask[:, ::2] = 0
        return float((self.forward(mask)["vs"] - self.forward()["vs"]).abs().max())

    def prefix_embs(self) -> int:
        """Positions of the logits beyond the row's."""
        return self.forward(prefix_embs=self.prefix)["logits"].shape[1] - self.batch["tokens"].shape[1]

    def prefix_attn_mask(self) -> None:
        self.forward(prefix_embs=self.prefix, prefix_attn_mask=torch.ones(self.prefix.shape[:2]))

    def remove_prefix_position_embs(self) -> None:
        self.forward(prefix_embs=self.prefix, remove_prefix_position_embs=True)

    def qv_kwargs_output_attentions(self) -> None:
        self.forward(qv_kwargs={"output_attentions": True})

    def qv_kwargs_is_causal(self) -> float:
        """Difference of V where the transformer reads what comes after, as ``ILQL_Policy`` lets it read prompts."""
        return float((self.forward(qv_kwargs={"is_causal": False})["vs"] - self.forward()["vs"]).abs().max())

    def get_qvs_qv_kwargs(self) -> float:
        """Difference of V with options that ``forward`` refuses: ``get_qvs`` drops them."""
        one = self.ilql.get_qvs(self.batch, qv_kwargs={"no such option": True})["vs"]
        return float((one - self.ilql.get_qvs(self.batch)["vs"]).abs().max())

    def skip_policy_on_train(self) -> float:
        """The policy's term in the log where its weight is zero; its logits are all zero."""
        return float(self.ilql.get_loss(self.batch, v_loss_weight=1.0)[1]["token_loss"][0])

    def detach_full_policy(self) -> int:
        """Networks of the policy that get a gradient."""
        batch = self.batch
        out = self.ilql(batch["tokens"], batch["state_idxs"], batch["action_idxs"], detach_full_policy=True)
        return int(out["logits"].requires_grad)

    def clone(self) -> float:
        """Difference of the loss of a clone."""
        return abs(self.loss(self.ilql.clone()) - self.loss())

    def saved(self) -> io.BytesIO:
        file = io.BytesIO()
        self.ilql.save_checkpoint(file)
        file.seek(0)
        return file

    def saved_q2(self) -> float:
        """Difference of the second Q head after it was saved and loaded."""
        other = self.ilql.clone()
        other.load_checkpoint(self.saved())
        pairs = zip(self.ilql.q2.parameters(), other.q2.parameters(), strict=True)
        return max(float((one - two).abs().max()) for one, two in pairs)

    def training_after_load(self) -> int:
        """Parameters that a training step changes after a checkpoint was loaded."""
        other = self.ilql.clone()
        other.load_checkpoint(self.saved())
        before = [parameter.clone() for parameter in other.parameters()]
        other.get_loss(self.batch, **WEIGHTS)[0].backward()
        other.optimizer.step()
        return sum(not torch.equal(one, two) for one, two in zip(before, other.parameters(), strict=True))

    def optimizer_of_a_clone(self) -> int:
        """Entries of the state of a clone's optimizer, after one step of the original."""
        self.loss_backward()
        self.ilql.optimizer.step()
        self.ilql.optimizer.zero_grad()
        return len(self.ilql.clone().optimizer.state)

    def loss_backward(self) -> None:
        self.ilql.get_loss(self.batch, **WEIGHTS)[0].backward()

    def test(self) -> None:
        self.ilql.test()

    def learn(self) -> None:
        self.ilql.learn(self.batch)

    def evolvable_attributes(self) -> None:
        self.ilql.evolvable_attributes()


def prepare(ilql: ILQL, batches: list[Batch]) -> Callable[[str], dict[str, Any]]:
    """Give every network weights of its own, so that none can stand for another, and return what answers."""
    with torch.no_grad():
        for parameter in ilql.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))

    def reply(line: str) -> dict[str, Any]:
        asked = json.loads(line)
        if "export" in asked:
            return {"folder": str(export(ilql, asked["export"]))}
        if "checkpoint" in asked:
            ilql.save_checkpoint(asked["checkpoint"])
            return {}
        if "logits" in asked:
            return logits(ilql, batches[asked["logits"]])
        if "terms" in asked:
            return terms(ilql, batches[asked["terms"]], asked["options"], asked["mc_returns"], asked["gradients"])
        return probe(ilql.clone(), batches[0], asked["probe"])

    return reply


def logits(ilql: ILQL, batch: Batch) -> dict[str, Any]:
    """The policy's logits of a batch, ``[B, T, V]``."""
    with torch.no_grad():
        out = ilql(batch["tokens"], batch["state_idxs"], batch["action_idxs"])
    return {"logits": out["logits"].tolist()}


def terms(ilql: ILQL, batch: Batch, options: dict[str, Any], mc_returns: bool, folder: str) -> dict[str, Any]:
    """The terms of a batch, unweighted; their weighted sum, whose gradients are written to the folder."""
    before = {name: getattr(ilql, name) for name in options}
    for name, value in options.items():
        setattr(ilql, name, value)
    ilql.zero_grad()
    loss, logs, _ = ilql.get_loss(batch, **WEIGHTS, mc_returns=mc_returns)
    loss.backward()
    export(Gradients(ilql), folder)
    for name, value in before.items():
        setattr(ilql, name, value)
    return {name: logs[key][0] for name, key in TERMS.items()} | {"total": loss.item()}


class Gradients:
    """An agent with its gradients for weights."""

    def __init__(self, ilql: ILQL) -> None:
        self.ilql = ilql

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ilql, name)

    def state_dict(self) -> dict[str, Tensor]:
        found = {name: torch.zeros_like(value) for name, value in self.ilql.state_dict().items()}
        named = self.ilql.named_parameters(remove_duplicate=False)
        return found | {name: weight.grad for name, weight in named if weight.grad is not None}


def probe(ilql: ILQL, batch: Batch, name: str) -> dict[str, Any]:
    """What a probe found: a number, or what was raised."""
    try:
        return {"number": getattr(Probes(ilql.train(), batch), name)()}
    except (RuntimeError, TypeError, AssertionError, AttributeError, ValueError) as error:
        return {"raised": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


if __name__ == "__main__":
    serve(Path(sys.argv[1]), prepare)
