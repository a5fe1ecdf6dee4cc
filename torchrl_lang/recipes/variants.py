"""Variants of behaviour cloning and ILQL that have names of their own: the same recipes with other options."""

from __future__ import annotations

from typing import ClassVar

from torchrl_lang.recipes.bc import BC
from torchrl_lang.recipes.ilql import ILQL
from torchrl_lang.recipes.options import with_defaults

__all__ = ["AWAC", "MonteCarlo", "PaperILQL", "PercentBC", "SingleStep"]


@with_defaults(fraction=0.1)
class PercentBC(BC):
    """Behaviour cloning on the best tenth of the episodes (%BC)."""

    defining: ClassVar[tuple[str, ...]] = ("fraction",)


@with_defaults(expectile=0.5)
class SingleStep(ILQL):
    """Single-step RL: values of the policy that made the data (SARSA), which is ILQL with the mean of Q as V.

    All else is as in ilql, its CQL term included: --cql-weight 0 leaves it out.
    """

    defining: ClassVar[tuple[str, ...]] = ("expectile",)


@with_defaults(expectile=0.5, target="mc", qvalue_lmbda=1.0)
class MonteCarlo(ILQL):
    """Monte-Carlo returns: Q and V regress on the rewards to go instead of on learned values.

    Q of a truncated episode bootstraps from V of its last state; V takes the rewards that the episode holds. All
    else is as in ilql, its CQL term included: --cql-weight 0 leaves it out.
    """

    defining: ClassVar[tuple[str, ...]] = ("expectile", "target", "qvalue_lmbda")


@with_defaults(beta=0.0, advantage_temperature=4.0, weight_clip=20.0)
class AWAC(ILQL):
    """Advantage-weighted actor-critic (arXiv 2006.09359): values weigh the policy's loss, and do not guide decoding.

    The values are those of ilql, its CQL term included: --cql-weight 0 leaves it out.
    """

    defining: ClassVar[tuple[str, ...]] = ("beta", "advantage_temperature", "weight_clip")


@with_defaults(
    optimizer="adamw",
    lr=1e-5,
    warmup=0,
    final_lr=1.0,
    weight_decay=0.0,
    max_grad_norm=None,
    batch_size=1024,
    layers=12,
    width=768,
    heads=12,
    gamma=0.99,
    turn_gamma=0.99,
    expectile=0.7,
    value_weight=1.0,
    qvalue_weight=1.0,
    cql_weight=1e-4,
    target="td",
    qvalue_lmbda=0.0,
    tau=0.005,
    transition_weight=0.0,
    actor_normalizer="all",
    beta=16.0,
    guidance_clip=0.0,
)
class PaperILQL(ILQL):
    """ILQL with the paper's settings for Wordle (arXiv 2206.11871): GPT-2's size, small steps; meant for a GPU.

    The settings are those of the paper's code. Unlike there, policy, values and target values share one trunk in place
    of three, models from scratch have no dropout, and the checkpoint is chosen by its games rather than its loss.
    """

    preset: ClassVar[str] = "paper-ilql"
