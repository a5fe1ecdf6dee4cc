"""The Q heads that a run saves beside its language model: the trained one, and one with the target parameters."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from torchrl_lang.objectives.values import QValueLoss

__all__ = ["saved_qvalues"]

QHead = TypeVar("QHead", bound=nn.Module)


def saved_qvalues(name: str, head: QHead, other: QHead, loss: QValueLoss) -> dict[str, QHead]:
    """``head``, which a loss trains, as ``name``; and ``other``, of the same shape, as ``target_<name>``.

    ``other`` gets the loss's target parameters.
    """
    other.load_state_dict(loss.target_qvalue_network_params.get("module").to_dict())
    return {f"target_{name}": other, name: head}
