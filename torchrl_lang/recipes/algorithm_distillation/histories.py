"""Tasks with a hidden parameter, their split, and learning histories to train on: new ones, or those of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer

from torchrl_lang._files import file_digest, shorten
from torchrl_lang.algorithm_distillation import HistoryWindows, LearningHistory, load_history, sources, split_tasks
from torchrl_lang.algorithm_distillation.history import MANIFEST, HistoryManifest, read_manifest
from torchrl_lang.algorithm_distillation.sources import NoisyExpert, TabularSource
from torchrl_lang.envs.grids import BernoulliBanditEnv, DarkKeyDoorEnv, DarkRoomEnv, HiddenTaskEnv, random_bandits
from torchrl_lang.envs.grids.rooms import room_image
from torchrl_lang.recipes.algorithm_distillation.options import FAMILIES, FamilyOptions, HistoryOptions, SourceName
from torchrl_lang.schema import ACTION, OBSERVATION


class _SourceDefaults(NamedTuple):
    """The source algorithm of a name, and the defaults of its histories."""

    kind: type[TabularSource]
    episodes: int = 12
    skipped: int = 1
    decay: sources.LinearDecay | None = None


_SOURCES: dict[SourceName, _SourceDefaults] = {
    # A searching learner begins with random actions, too, and its noise ends early.
    "posterior": _SourceDefaults(sources.PosteriorSampling, decay=sources.LinearDecay(fraction=(0.1, 0.3))),
    "noise": _SourceDefaults(NoisyExpert, decay=sources.LinearDecay(fraction=(0.2, 0.6))),
    "q_learning": _SourceDefaults(sources.QLearning, 600, 40, sources.SLOW_DECAY),
    "ucb": _SourceDefaults(sources.UCB, 20),
    "expert": _SourceDefaults(NoisyExpert, decay=sources.NO_NOISE),
}


class TaskFamily:
    """The tasks that options define.

    Attributes:
        split: the numbers of the tasks to train on, to validate on and to report.

    Raises:
        ValueError: there are too many tasks, or a part of the split has none.

    Examples:
        >>> from torchrl_lang.recipes.algorithm_distillation.histories import FamilyOptions, TaskFamily
        >>> family = TaskFamily(FamilyOptions(size=5))
        >>> [len(part) for part in family.split], family.env(family.split.test, streams=16).batch_size
        ([18, 2, 4], torch.Size([4, 16]))
    """

    def __init__(self, options: FamilyOptions) -> None:
        self.options, given = options, options.episode_length
        self.episode_length = FAMILIES[options.env].episode_length if given is None else given
        numbers, shares = _task_numbers(options), {"validation": options.validation, "test": options.test}
        self.split = split_tasks(numbers, **shares, seed=options.split_seed)
        if not all(map(len, self.split)):
            raise ValueError(f"{len(numbers)} tasks leave none for a part: give more tasks, or larger shares.")
        is_bandit = options.env == "bandit"
        self._arms = random_bandits(len(numbers), options.arms, seed=options.split_seed) if is_bandit else None

    def env(self, tasks: Tensor, streams: int) -> HiddenTaskEnv:
        """An environment of batch size ``[tasks, streams]`` with one task in each row."""
        rows: dict[str, Any] = {"task": tasks[:, None], "batch_size": [len(tasks), streams]}
        rows["episode_length"] = self.episode_length
        if self._arms is not None:
            return BernoulliBanditEnv(self._arms, **rows)
        room = DarkRoomEnv if self.options.env == "dark_room" else DarkKeyDoorEnv
        return room(self.options.size, start=self.options.start_name(), **rows)

    def one(self) -> HiddenTaskEnv:
        """An environment of one task, for its specs."""
        return self.env(self.split.train[:1], 1)

    def describe(self) -> dict[str, Any]:
        """The family and its split as JSON."""
        return {**self.one().describe(), **{name: part.tolist() for name, part in self.split._asdict().items()}}


def _task_numbers(options: FamilyOptions) -> Tensor:
    """The numbers of the tasks, sorted."""
    if options.env == "bandit":
        return torch.arange(1000 if options.tasks is None else options.tasks)
    every = torch.arange(options.size**4 if options.env == "dark_key_door" else options.size**2)
    # A goal where each episode begins needs no search.
    if options.env == "dark_room" and options.start_name() == "centre":
        every = every[every != (options.size // 2) * (options.size + 1)]
    if options.tasks is not None and options.tasks > len(every):
        raise ValueError(f"tasks must be at most {len(every)} in a room of size={options.size}, got {options.tasks}.")
    chosen = torch.randperm(len(every), generator=torch.Generator().manual_seed(options.split_seed))
    return every[chosen[: options.tasks or (len(every) if options.env == "dark_room" else 1000)]].sort().values


# -- learning histories ------------------------------------------------------------------------------------------------


def skipped(options: HistoryOptions) -> int:
    """Which episodes are kept: every ``k``-th one."""
    return _SOURCES[options.source_name()].skipped if options.skip_episodes is None else options.skip_episodes


def source_on(options: HistoryOptions, env: HiddenTaskEnv, *, seed: int, episodes: int | None = None) -> TabularSource:
    """The source algorithm of the histories, new or recorded, on tasks.

    Args:
        options: of the histories.
        env: the tasks.
        seed: seed of the source.
        episodes: the least number of episodes; default those of a history. In a longer history the noise decays in
            as many steps as in a history, so that the learners are the same.
    """
    kind, usual, _, decay = _SOURCES[options.source_name()]
    steps = (usual if options.history_episodes is None else options.history_episodes) * env.episode_length
    settings: dict[str, Any] = {} if decay is None else {"decay": decay}
    if (recording := recording_of(options)) is not None:
        about = {"algorithm", "seed", "env"}
        steps, settings = recording.steps, {k: v for k, v in recording.source.items() if k not in about}
        if recorded := settings.get("decay"):
            settings["decay"] = sources.LinearDecay(**{**recorded, "fraction": tuple(recorded["fraction"])})
    wanted = max(steps, (episodes or 0) * env.episode_length)
    if "decay" in settings:
        settings["decay"] = settings["decay"].lengthened(wanted / steps)
    return kind(env, wanted, seed=seed, **settings)


class FreshWindows:
    """Batches of windows of histories that are replaced by new ones now and then. Resumes exactly.

    Args:
        draw: the windows with a number, the same for the same number.
        batch_size: windows per batch.
        every: batches until new histories are drawn.
    """

    def __init__(self, draw: Callable[[int], HistoryWindows], batch_size: int, *, every: int) -> None:
        self._draw, self._every, self._batch_size, self._batches = draw, every, batch_size, 0
        self._buffer: TensorDictReplayBuffer | None = None

    def sample(self) -> TensorDictBase:
        """The next batch, ``[batch_size, length]``."""
        if self._buffer is None or self._batches % self._every == 0:
            self._buffer = self._open()
        self._batches += 1
        return self._buffer.sample()

    def _open(self) -> TensorDictReplayBuffer:
        return self._draw(self._batches // self._every).buffer(self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The number of batches, and the place in the order of the present histories."""
        sampler = None if self._buffer is None else self._buffer.sampler.state_dict()
        return {"batches": self._batches, "sampler": sampler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after a state's last batch."""
        self._batches, self._buffer = state_dict["batches"], None
        if state_dict["sampler"] is not None and self._batches % self._every:
            self._buffer = self._open()
            self._buffer.sampler.load_state_dict(state_dict["sampler"])


def history_windows(options: HistoryOptions, *, length: int, batch_size: int, seed: int) -> FreshWindows:
    """Windows of histories of the tasks to train on, and of no others.

    Raises:
        ValueError: the recorded history has none of these tasks, or does not fit, see :func:`recording_of`.
    """
    family, streams = TaskFamily(options), options.streams or FAMILIES[options.env].streams
    recorded = None if options.history is None else _recorded(options, options.history)

    def draw(number: int) -> HistoryWindows:
        own = seed * 1_000_003 + number  # with the same one, the same streams and starts would be read each time
        history = recorded
        if history is None:
            source = source_on(options, family.env(family.split.train, streams), seed=own)
            history = LearningHistory(source.history(), source.tasks)
        if options.symmetries:
            history = _images(history, options.size, number)
        return HistoryWindows(history, length, skip_episodes=skipped(options), at_episode_start=True, seed=own)

    changes = recorded is None or options.symmetries
    return FreshWindows(draw, batch_size, every=options.fresh_every if changes else 1 << 62)


def _images(history: LearningHistory, size: int, number: int) -> LearningHistory:
    """A room's histories, mirrored and turned: streams in turn have each symmetry, another one with each ``number``."""
    steps = history.steps.clone(recurse=False)
    tasks, streams, _ = steps.shape
    symmetry = (torch.arange(tasks * streams).view(tasks, streams, 1) + number) % 8
    observation, action = room_image(steps[OBSERVATION], steps[ACTION], symmetry, size)
    return LearningHistory(steps.update({OBSERVATION: observation, ACTION: action}), history.tasks)


def recording_of(options: HistoryOptions) -> HistoryManifest | None:
    """The manifest of the recorded history that the options name; None if new ones are drawn.

    Raises:
        FileNotFoundError: there is none in the folder.
        FileError: its manifest is damaged.
        ValueError: its tasks are of another family, or it is of another source algorithm than that of the options.
    """
    if options.history is None:
        return None
    folder, name = options.history, options.source_name()
    manifest = read_manifest(folder)
    _refuse_other(folder, manifest.source.get("env") or {}, TaskFamily(options).one().describe())
    found, decay = manifest.source.get("algorithm"), manifest.source.get("decay") or {}
    has_noise = bool(decay.get("first") or decay.get("last"))
    if found != _SOURCES[name].kind.__name__ or (found == NoisyExpert.__name__ and has_noise == (name == "expert")):
        found = f"{found} {'with' if has_noise else 'without'} noise, but source={name}: give its --source"
        raise ValueError(f"The history in {folder} was recorded with the source algorithm {found}.")
    return manifest


def digest_of(options: HistoryOptions) -> str | None:
    """The SHA-256 of the manifest of the recorded history, in which are those of all steps."""
    recording_of(options)
    return None if options.history is None else file_digest(options.history / MANIFEST)


def _recorded(options: HistoryOptions, folder: Path) -> LearningHistory:
    """The streams of a recorded history whose tasks are to be trained on."""
    recording_of(options)
    history, family = load_history(folder), TaskFamily(options)
    env, train = family.one(), family.split.train.tolist()
    kept = [place for place, task in enumerate(history.task_numbers.tolist()) if task in train]
    if not kept:
        raise ValueError(f"The history in {folder} has none of the tasks to train on, {shorten(train)}.")
    for place in kept:  # the numbers of two families of bandits are the same, but not their arms
        task = history.tasks[place]
        _refuse_other(folder, task, env.describe_task(task["task"]))
    return LearningHistory(history.steps[kept], [history.tasks[place] for place in kept], source=history.source)


def _refuse_other(folder: Path, recorded: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ValueError if what was recorded differs from what the options give."""
    if changed := sorted(key for key in recorded | given if recorded.get(key) != given.get(key)):
        before, now = (shorten({key: each.get(key) for key in changed}) for each in (recorded, given))
        found = f"{before}, but these options give {now}: give those that it was recorded with"
        raise ValueError(f"The history in {folder} was recorded with {found}.")
