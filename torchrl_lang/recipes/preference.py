"""Algorithms that learn which dialogues are better: DPO and IPO from pairs, KTO from labels."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from torchrl_lang.data import preference_pairs, row_returns
from torchrl_lang.objectives import DPOLoss, IPOLoss, KTOLoss
from torchrl_lang.objectives.preference import PairLoss
from torchrl_lang.recipes.algorithms import DPO, IPO, KTO
from torchrl_lang.recipes.models import begin, loss_options


def train_dpo(options: DPO) -> float:
    """Direct preference optimisation; see :func:`train_offline`."""
    return _train_pairs(options, DPOLoss)


def train_ipo(options: IPO) -> float:
    """Identity preference optimisation; see :func:`train_offline`."""
    return _train_pairs(options, IPOLoss)


def _train_pairs(options: DPO | IPO, kind: type[PairLoss]) -> float:
    """Train on pairs of rows that begin alike, of the same group where rows have one."""
    start = begin(options, unchanged=True)
    terms = loss_options(options, kind, beta=options.reward_scale)
    loss = kind(start.policy(), start.reference(), **terms)

    def prepare(rows: TensorDictBase) -> TensorDictBase:
        pairs = preference_pairs(rows, options.pairs)
        if not len(pairs):
            raise ValueError(f"{options.data} has no two episodes that begin alike and have different returns.")
        print(f"{options.out.name}: {len(pairs)} pairs of {len(rows)} episodes", flush=True)
        return pairs

    @torch.no_grad()
    def held_out(rows: TensorDictBase) -> dict[str, float]:
        pairs = preference_pairs(rows, options.pairs)
        out = loss(pairs)
        found = {"held_out_loss": float(out["loss_actor"]), "held_out_accuracy": float(out["accuracy"])}
        return found if len(pairs) else {}

    return start.train(options, loss, start.policy(method="greedy"), start.save, held_out, prepare=prepare)


def train_kto(options: KTO) -> float:
    """Kahneman-Tversky optimisation; see :func:`train_offline`."""
    start = begin(options, unchanged=True)
    terms = loss_options(options, KTOLoss, beta=options.reward_scale)
    loss = KTOLoss(start.policy(), start.reference(), **terms)
    mean = start.data.dataset.manifest["mean_return"]
    threshold = mean if options.threshold is None else options.threshold

    def labelled(rows: TensorDictBase) -> TensorDictBase:
        return rows.copy().set("desirable", (row_returns(rows) > threshold)[:, None])

    def prepare(rows: TensorDictBase) -> TensorDictBase:
        rows = labelled(rows)
        number = int(rows["desirable"].sum())
        if number in (0, len(rows)):
            found = f"{number} of {len(rows)} episodes of {options.data} have a return above {threshold:g}"
            raise ValueError(f"{found}: give a --threshold between those of good and bad ones.")
        print(f"{options.out.name}: {number} of {len(rows)} episodes are desirable, above {threshold:.3g}", flush=True)
        return rows

    @torch.no_grad()
    def held_out(rows: TensorDictBase) -> dict[str, float]:
        out = loss(labelled(rows))
        return {"held_out_loss": float(out["loss_actor"]), "held_out_margin": float(out["margin"])}

    return start.train(options, loss, start.policy(method="greedy"), start.save, held_out, prepare=prepare)
