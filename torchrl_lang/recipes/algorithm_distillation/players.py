"""What models, their sources and simple policies earn on test tasks, episode by episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._files import read_json, write_json
from torchrl_lang.algorithm_distillation import (
    ContextPolicy,
    OptimalPolicy,
    PromptedPolicy,
    RandomPolicy,
    episode_returns,
    evaluate_in_context,
    in_context_report,
)
from torchrl_lang.algorithm_distillation.report import InContextReport
from torchrl_lang.algorithm_distillation.sources import NO_NOISE, NoisyExpert
from torchrl_lang.envs.grids import HiddenTaskEnv
from torchrl_lang.recipes.algorithm_distillation.formats import FORMATS, FormatOptions

__all__ = ["TestPlay", "reports"]

_SEED = 2_000_000
"""Seed of the episodes on test tasks; for models plus their training seed, whose errors would otherwise be related."""
_DEMONSTRATION_SEED = 3_000_000
"""Of other starts and payoffs than those of the episodes that are evaluated."""

TITLES = {"ad": "AD", "ed": "ED"}


@dataclass(frozen=True)
class TestPlay:
    """How policies are evaluated on test tasks.

    Args:
        options: of the tasks, their source algorithm and the format of the models.
        episodes: of each stream.
        streams: of each task.
    """

    __test__ = False  # not a class of tests

    options: FormatOptions
    episodes: int
    streams: int

    def env(self) -> HiddenTaskEnv:
        """The test tasks."""
        family = self.options.family()
        return family.env(family.split.test, self.streams)

    def returns(self, policy: ContextPolicy, env: HiddenTaskEnv, *, seed: int = _SEED) -> Tensor:
        """Returns of a policy, ``[tasks, streams, episodes]``."""
        return evaluate_in_context(env, policy, self.episodes, seed=seed)

    def of_model(self, run: Path, training_seed: int, *, prompted: bool = False) -> Tensor:
        """Returns of a run's model, kept in its folder; ``prompted`` with half an episode of an expert."""
        path = run / f"test{'_prompted' if prompted else ''}.json"
        if not path.exists():
            env = self.env()
            actor = FORMATS[self.options.format].load(run / "model").policy(self.options.temperature)
            policy = PromptedPolicy(actor, self._demonstration(training_seed)) if prompted else actor
            write_json(path, {"returns": self.returns(policy, env, seed=_SEED + training_seed).tolist()})
            print(f"{run.name}{', prompted' * prompted}: {self.episodes} episodes on test tasks", flush=True)
        return torch.tensor(read_json(path, remedy="delete it: the episodes are played again")["returns"])

    def _demonstration(self, training_seed: int) -> TensorDict:
        """The first half of an expert's episode, one in each stream."""
        env = self.env()
        seed = _DEMONSTRATION_SEED + training_seed
        expert = NoisyExpert(env, max(1, env.episode_length // 2), decay=NO_NOISE, seed=seed)
        return expert.history().flatten(0, 1)

    def of_source(self) -> Tensor:
        """Returns of the source algorithm on the test tasks, of the episodes that histories keep.

        Up to the end of a history they are the learners that the model was trained on; after it they continue to learn.
        """
        every = self.options.skipped()
        source = self.options.source_on(self.env(), seed=_SEED, episodes=self.episodes * every)
        return episode_returns(source.history(), self.episodes * every)[..., ::every]


def reports(play: TestPlay, runs: Mapping[str, Sequence[Path]]) -> dict[str, InContextReport]:
    """A report for each method, its source, random and optimal actions, by title.

    Args:
        play: how policies are evaluated.
        runs: the folders of each method's runs, one for each training seed from 0 on.
    """
    env = play.env()
    optimal = env.optimal_return()[:, 0]
    found: dict[str, Tensor] = {}
    for method, places in runs.items():
        seeded = list(enumerate(places))
        found[TITLES[method]] = torch.stack([play.of_model(place, seed) for seed, place in seeded])
        if method == "ad":
            prompted = [play.of_model(place, seed, prompted=True) for seed, place in seeded]
            found["AD, prompted"] = torch.stack(prompted)
    found["source"] = play.of_source()[None]
    found["random"] = play.returns(RandomPolicy(env.n_actions), env)[None]
    found["optimal"] = play.returns(OptimalPolicy(env), env)[None]
    tasks = play.options.family().split.test
    return {name: in_context_report(name, returns, optimal, tasks=tasks) for name, returns in found.items()}
