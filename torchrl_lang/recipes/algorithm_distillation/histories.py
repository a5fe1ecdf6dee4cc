"""Learning histories to train on: new ones all the time, or those of a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer

from torchrl_lang._files import file_digest, shorten
from torchrl_lang.algorithm_distillation import HistoryWindows, LearningHistory, load_history
from torchrl_lang.algorithm_distillation.history import MANIFEST, read_manifest
from torchrl_lang.algorithm_distillation.sources import (
    NO_NOISE,
    SLOW_DECAY,
    UCB,
    LinearDecay,
    NoisyExpert,
    PosteriorSampling,
    QLearning,
    TabularSource,
)
from torchrl_lang.envs.grids import HiddenTaskEnv
from torchrl_lang.recipes.algorithm_distillation.families import FamilyName, FamilyOptions
from torchrl_lang.recipes.options import option

__all__ = ["FreshWindows", "HistoryOptions", "Recording", "SourceName", "history_windows", "recording_of"]

SourceName = Literal["posterior", "noise", "q_learning", "ucb", "expert"]

_SOURCES: dict[FamilyName, SourceName] = {"dark_room": "posterior", "dark_key_door": "q_learning", "bandit": "ucb"}
_CLASSES: dict[SourceName, type[TabularSource]] = {
    "posterior": PosteriorSampling,
    "noise": NoisyExpert,
    "q_learning": QLearning,
    "ucb": UCB,
    "expert": NoisyExpert,
}
_EPISODES: dict[SourceName, int] = {"posterior": 12, "noise": 12, "q_learning": 600, "ucb": 20, "expert": 12}
_SKIPPED: dict[SourceName, int] = {"q_learning": 40}
_NOISE = LinearDecay(fraction=(0.2, 0.6))
_SEARCH = LinearDecay(fraction=(0.1, 0.3))
"""A searching learner begins with random actions, too, and its noise ends early."""
_DECAYS: dict[SourceName, LinearDecay] = {
    "posterior": _SEARCH,
    "noise": _NOISE,
    "q_learning": SLOW_DECAY,
    "expert": NO_NOISE,
}


@dataclass(frozen=True, kw_only=True)
class HistoryOptions(FamilyOptions):
    """Options of the histories."""

    source: SourceName | None = option(
        None, "source algorithm; none: posterior in dark_room, q_learning in dark_key_door, ucb of a bandit"
    )
    history_episodes: int | None = option(
        None, "episodes of a history; none: 600 of q_learning, 20 of ucb, 12 of others", at_least=1
    )
    skip_episodes: int | None = option(
        None, "keep every k-th episode of a history; none: 40 of q_learning, 1 of others", at_least=1
    )
    streams: int = option(100, "histories of each task at a time", at_least=1)
    fresh_every: int = option(50, "training steps until they are replaced by new ones", at_least=1)
    history: Path | None = option(None, "folder of a recorded history of these tasks, instead of new ones")

    def source_name(self) -> SourceName:
        """The source algorithm."""
        return _SOURCES[self.env] if self.source is None else self.source

    def skipped(self) -> int:
        """Which episodes are kept: every ``k``-th one."""
        return _SKIPPED.get(self.source_name(), 1) if self.skip_episodes is None else self.skip_episodes

    def source_on(self, env: HiddenTaskEnv, *, seed: int, episodes: int | None = None) -> TabularSource:
        """The source algorithm of the histories, new or recorded, on tasks.

        Args:
            env: the tasks.
            seed: seed of the source.
            episodes: the least number of episodes; default those of a history. In a longer history the noise decays in
                as many steps as in a history, so that the learners are the same.
        """
        name = self.source_name()
        steps, settings = self._recorded_settings() if self.history else self._settings(name, env.episode_length)
        wanted = max(steps, (episodes or 0) * env.episode_length)
        if "decay" in settings:
            settings["decay"] = settings["decay"].lengthened(wanted / steps)
        return _CLASSES[name](env, wanted, seed=seed, **settings)

    def _settings(self, name: SourceName, episode_length: int) -> tuple[int, dict[str, Any]]:
        """The steps of a new history, and the settings of its source algorithm."""
        episodes = _EPISODES[name] if self.history_episodes is None else self.history_episodes
        return episodes * episode_length, {"decay": _DECAYS[name]} if name in _DECAYS else {}

    def _recorded_settings(self) -> tuple[int, dict[str, Any]]:
        """The steps of the recorded history, and the settings of its source algorithm."""
        recording = recording_of(self)
        assert recording is not None
        about = {"algorithm", "seed", "env"}
        settings = {key: value for key, value in recording.source.items() if key not in about}
        if "decay" in settings:
            decay = settings["decay"]
            settings["decay"] = LinearDecay(**{**decay, "fraction": tuple(decay["fraction"])})
        return recording.steps, settings


class FreshWindows:
    """Batches of windows of histories that are replaced by new ones now and then. Resumes exactly.

    Args:
        draw: the histories with a number, the same for the same number.
        length: steps of a window, which begins with an episode.
        batch_size: windows per batch.
        every: batches until new histories are drawn.
        skip_episodes: see :class:`~torchrl_lang.algorithm_distillation.HistoryWindows`.
        seed: seed of the orders, which differ between the histories.
    """

    def __init__(
        self,
        draw: Callable[[int], LearningHistory],
        length: int,
        batch_size: int,
        *,
        every: int,
        skip_episodes: int = 1,
        seed: int = 0,
    ) -> None:
        self._draw, self._every, self._batch_size = draw, every, batch_size
        self._options: dict[str, Any] = {"at_episode_start": True, "skip_episodes": skip_episodes}
        self._length, self._seed, self._batches = length, seed, 0
        self._buffer: TensorDictReplayBuffer | None = None

    def sample(self) -> TensorDictBase:
        """The next batch, ``[batch_size, length]``."""
        if self._buffer is None or self._batches % self._every == 0:
            self._buffer = self._open()
        self._batches += 1
        return self._buffer.sample()

    def _open(self) -> TensorDictReplayBuffer:
        number = self._batches // self._every
        seed = _seed_of(self._seed, number)  # with the same one, the same streams and starts would be read each time
        windows = HistoryWindows(self._draw(number), self._length, seed=seed, **self._options)
        return windows.buffer(self._batch_size)

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


def _seed_of(seed: int, number: int) -> int:
    """The seed of the histories with a number, and of the order of their windows."""
    return seed * 1_000_003 + number


def history_windows(options: HistoryOptions, *, length: int, batch_size: int, seed: int) -> FreshWindows:
    """Windows of histories of the tasks to train on, and of no others.

    Raises:
        ValueError: the recorded history has none of these tasks, or does not fit, see :func:`recording_of`.
    """
    family = options.family()
    windows: dict[str, Any] = {"skip_episodes": options.skipped(), "seed": seed}
    if options.history is not None:
        recorded = _recorded(options, options.history)
        return FreshWindows(lambda number: recorded, length, batch_size, every=1 << 62, **windows)

    def draw(number: int) -> LearningHistory:
        env = family.env(family.split.train, options.streams)
        source = options.source_on(env, seed=_seed_of(seed, number))
        return LearningHistory(source.history(), source.tasks)

    return FreshWindows(draw, length, batch_size, every=options.fresh_every, **windows)


class Recording(NamedTuple):
    """What defines a recorded history."""

    source: dict[str, Any]
    """The description of its learners."""
    digest: str
    """The SHA-256 of its manifest, in which are those of all steps."""
    steps: int
    """The planned steps of a stream, over which its noise decays."""


def recording_of(options: HistoryOptions) -> Recording | None:
    """The recorded history that the options name; None if new ones are drawn.

    Raises:
        FileNotFoundError: there is none in the folder.
        FileError: its manifest is damaged.
        ValueError: its tasks are of another family, or it is of another source algorithm than that of the options.
    """
    if options.history is None:
        return None
    folder, family, name = options.history, options.family(), options.source_name()
    manifest = read_manifest(folder)
    source = manifest.source
    _check_same(folder, source.get("env") or {}, family.env(family.split.train[:1], 1).describe())
    _check_source(folder, source, name)
    return Recording(source, file_digest(folder / MANIFEST), manifest.shape[-1])


def _check_source(folder: Path, source: dict[str, Any], name: SourceName) -> None:
    """Raise ValueError unless the history in a folder is of the source algorithm with this name."""
    fitting = [each for each in _CLASSES if _is_of(source, each)]
    if name not in fitting:
        advice = f"--source {' or '.join(fitting)}" if fitting else f"a history of one of {', '.join(_CLASSES)}"
        raise ValueError(
            f"The history in {folder} was recorded with the source algorithm {_title(source)}, but source={name} is "
            f"{_title({'algorithm': _CLASSES[name].__name__, 'decay': asdict(_DECAYS.get(name, NO_NOISE))})}: give "
            f"{advice}."
        )


def _is_of(source: dict[str, Any], name: SourceName) -> bool:
    """Whether a description is of the source algorithm with this name; an expert is one without noise."""
    is_same = source.get("algorithm") == _CLASSES[name].__name__
    return is_same and (_CLASSES[name] is not NoisyExpert or _has_noise(source) == (name != "expert"))


def _has_noise(source: dict[str, Any]) -> bool:
    decay = source.get("decay") or {}
    return bool(decay.get("first") or decay.get("last"))


def _title(source: dict[str, Any]) -> str:
    """The algorithm of a description, and of an expert whether it has noise."""
    name = source.get("algorithm")
    if name != NoisyExpert.__name__:
        return str(name)
    return f"{name} {'with' if _has_noise(source) else 'without'} noise"


def _recorded(options: HistoryOptions, folder: Path) -> LearningHistory:
    """The streams of a recorded history whose tasks are to be trained on."""
    recording_of(options)
    history, family = load_history(folder), options.family()
    env, train = family.env(family.split.train[:1], 1), family.split.train.tolist()
    kept = [place for place, task in enumerate(history.task_numbers.tolist()) if task in train]
    if not kept:
        raise ValueError(f"The history in {folder} has none of the tasks to train on, {shorten(train)}.")
    for place in kept:  # the numbers of two families of bandits are the same, but not their arms
        task = history.tasks[place]
        _check_same(folder, task, env.describe_task(task["task"]))
    return LearningHistory(history.steps[kept], [history.tasks[place] for place in kept], source=history.source)


def _check_same(folder: Path, recorded: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ValueError if what was recorded differs from what the options give."""
    if changed := sorted(key for key in recorded | given if recorded.get(key) != given.get(key)):
        before, now = (shorten({key: each.get(key) for key in changed}) for each in (recorded, given))
        raise ValueError(
            f"The history in {folder} was recorded with {before}, but these options give {now}: give the options that "
            f"it was recorded with."
        )
