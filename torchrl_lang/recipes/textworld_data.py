"""Make a data set of TextWorld games: experts of mixed care in a TorchRL collector, on the games to learn from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchrl_lang.data import generate_dataset
from torchrl_lang.envs.textworld import ExpertPlayer
from torchrl_lang.recipes.options import Options, option, required
from torchrl_lang.recipes.tasks import check_place
from torchrl_lang.recipes.textworld_task import TextWorldTask

__all__ = ["TextWorldData", "main", "task_of"]


@dataclass(frozen=True)
class TextWorldData(Options):
    """A data set of TextWorld games, played by experts of which some err."""

    out: Path = required("folder of the data set")
    kind: Literal["coin_collector", "simple", "treasure_hunter", "cooking", "custom"] = option(
        "coin_collector", "the engine's kind of game"
    )
    level: int | None = option(None, "level of coin_collector and treasure_hunter; none takes 5", at_least=1)
    episodes: int = option(2000, "episodes that are played", at_least=1)
    epsilon: tuple[float, ...] = option(
        (0.0, 0.1, 0.2),
        "shares of random commands: as many experts, who play an equal number of rows each",
        at_least=0,
        at_most=1,
    )
    foreign: float = option(
        0.0,
        "share of the random commands that another game admits, most often impossible in this",
        at_least=0,
        at_most=1,
    )
    games: int = option(400, "games that are built, 1 to 3 seconds each and core, once for all", at_least=1)
    first_game: int = option(
        0, "seed of the first game that is built, the others follow; it also deals out the sets", at_least=0
    )
    valid: int = option(32, "of these, at least so many are for watching the learning", at_least=1)
    test: int = option(48, "and so many for the final table", at_least=1)
    apart: Literal["solutions", "games"] = option(
        "solutions", "what the sets do not share: the commands that win, or merely the game with all its words"
    )
    template: str | None = option(None, "how the games are told; none takes what fits the kind")
    row_length: int | None = option(None, "tokens of a row; none takes what fits the kind", at_least=1)
    action_length: int | None = option(
        None, "tokens of a command, its end included; none takes what fits the kind", at_least=1
    )
    max_turns: int | None = option(None, "turns of an episode; none takes what fits the kind", at_least=1)
    batch: int = option(96, "games played side by side", at_least=1)
    seed: int = option(0, "seed of episodes and players", at_least=0)
    overwrite: bool = option(False, "replace a data set that is there")

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = {"coin_collector": 300, "treasure_hunter": 30}
        if self.level is not None and not self.level <= levels.get(self.kind, 0):
            known = " and ".join(f"1 to {most} for {kind}" for kind, most in levels.items())
            raise ValueError(f"There is no level {self.level} of {self.kind}: levels are {known}.")


def task_of(options: TextWorldData) -> TextWorldTask:
    """The task that the options describe."""
    chosen = {name: getattr(options, name) for name in ("template", "row_length", "action_length", "max_turns")}
    return TextWorldTask.of(
        options.kind,
        options={} if options.level is None else {"level": options.level},
        games=options.games,
        seed=options.first_game,
        valid=options.valid,
        test=options.test,
        apart=options.apart,
        **{name: value for name, value in chosen.items() if value is not None},
    )


def main(options: TextWorldData) -> Path:
    """Build, play and write; returns the folder."""
    check_place(options.out, new=True)
    task = task_of(options)
    experts = ExpertPlayer(epsilon=options.epsilon, foreign=options.foreign, seed=options.seed)
    print(f"building what is missing of {task.games} games", flush=True)
    sets = task.sets()
    env = task.env(min(options.batch, options.episodes), offers=("expert", "admissible"))
    try:
        dataset = generate_dataset(
            env,
            experts,
            options.out,
            episodes=options.episodes,
            seed=options.seed,
            source=f"experts with epsilon {options.epsilon} on {len(sets.train)} {options.kind} games",
            notes={
                **task.notes(),
                "epsilon": list(options.epsilon),
                "foreign": options.foreign,
                "batch": options.batch,
                "seed_of_play": options.seed,
            },
            overwrite=options.overwrite,
        )
    finally:
        env.close()
    figures = dataset.manifest
    print(
        f"{len(dataset)} episodes on {len(sets.train)} games, mean return {figures['mean_return']:.2f}, "
        f"{figures['tokens']} tokens: {options.out}; {len(sets.valid)} games to watch, {len(sets.test)} to judge"
    )
    return options.out
