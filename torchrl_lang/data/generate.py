"""Generate a dataset by running a policy in an environment."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from tqdm import tqdm

from torchrl_lang._checks import Count, checked
from torchrl_lang._files import folder_lock, read_json, write_json
from torchrl_lang._random_stream import seeded_generators
from torchrl_lang.data.dataset import DISK_DTYPES, MANIFEST, DatasetWriter, RowDataset, load_dataset, write_dataset
from torchrl_lang.data.replay import TrimRows
from torchrl_lang.data.rollouts import EpisodeRows, episode_numbers, rows_at
from torchrl_lang.schema import CONTINUED, DONE, RAW_REWARD, REWARD, TOKEN_REWARD, TOKENS
from torchrl_lang.text.tokenizers import Tokenizer

_NUMBER = "episode_number"
_STEPS_PER_BATCH = 8
"""Steps between checks for finished episodes; few, because steps after the last one needed are wasted."""


@checked
def generate_dataset(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase] | None,
    folder: str | Path,
    *,
    episodes: Count,
    seed: int,
    tokenizer: Tokenizer | None = None,
    source: str | None = None,
    notes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool = True,
    reward_key: NestedKey | None = REWARD,
) -> RowDataset:
    """Run ``policy`` in ``env`` for ``episodes`` episodes with a TorchRL collector and write them to disk.

    The dataset holds the first ``episodes`` episodes to *begin*, in that order. Keeping the first ones to finish would
    over-represent short episodes.

    The same environment, policy and seed give byte-identical files. The seed sets the environment and torch's global
    random generator, which sampling modules use and which is restored afterwards. A policy with its own random
    generator is not seeded here.

    Args:
        env: a batched language environment, with or without transforms. It is not closed.
        policy: reads the environment's observation and writes ``action``; None samples random tokens.
        folder: the folder to create.
        episodes: number of episodes.
        seed: seed of the environment and of sampling.
        tokenizer: default ``env.tokenizer``.
        source: a description of policy and environment for the manifest; default their class names.
        notes: further JSON content for the manifest.
        overwrite: replace an existing dataset.
        progress: show a progress bar with the mean return so far.
        reward_key: the step reward that ``token_reward`` sums to, as in
            :func:`~torchrl_lang.data.rows_from_rollout`. The default is the reward after the transforms of ``env``;
            None keeps the token rewards of the environment's rows, which transforms may have changed as well.

    Returns:
        The dataset, opened.

    Raises:
        ValueError: ``episodes`` is below 1, or a divergence penalty was subtracted from the rewards.
        FileExistsError: ``folder`` exists.
    """
    if CONTINUED in env.observation_spec.keys():
        text = f"A game that is longer than a row has several: the dataset has the first {episodes} rows that begin."
        warnings.warn(text, stacklevel=2)
    tokenizer = env.tokenizer if tokenizer is None else tokenizer
    source = f"{_name(policy)} in {_name(env)}" if source is None else source
    row_length = env.observation_spec[TOKENS].shape[-1]
    writer = DatasetWriter(folder, tokenizer, row_length, seed=seed, source=source, overwrite=overwrite)
    writer.notes = dict(notes or {})
    # Create the bar after the writer, so that the writer's errors get their own line.
    with writer, tqdm(total=episodes, unit="episode", disable=not progress) as bar, torch.random.fork_rng():
        torch.manual_seed(seed)
        env.set_seed(seed)
        written, total = 0, 0.0
        steps, rows_of = _steps(env, policy), EpisodeRows(keep=[_NUMBER], reward_key=reward_key)
        for rows in _in_order(steps, env.batch_size.numel(), episodes, rows_of):
            writer.extend(rows)
            written, total = written + rows.shape[0], total + float(rows.get(TOKEN_REWARD).sum())
            bar.set_postfix(mean_return=f"{total / written:.3f}", refresh=False)
            bar.update(rows.shape[0])
    return load_dataset(folder, tokenizer=tokenizer, verify=False)


def _steps(env: EnvBase, policy: Callable[[TensorDictBase], TensorDictBase] | None) -> Iterator[TensorDictBase]:
    """Endless iterator over batches of steps ``[N, time]``."""
    frames = env.batch_size.numel() * _STEPS_PER_BATCH
    collector = Collector(env, policy, frames_per_batch=frames, total_frames=-1, auto_register_policy_transforms=False)
    try:
        for batch in collector:
            yield batch.reshape(-1, _STEPS_PER_BATCH)
    finally:
        collector.shutdown(close_env=False)


def _in_order(steps: Iterator[TensorDictBase], n: int, episodes: int, rows_of: EpisodeRows) -> Iterator[TensorDict]:
    """The first ``episodes`` episodes to begin in ``n`` environments, in order, as blocks of rows on the CPU."""
    waiting: list[TensorDict] = []  # rows that finished before an earlier episode
    playing, begun, written = torch.arange(n), torch.tensor(n), 0
    for batch in steps:
        done = batch.get(("next", DONE)).squeeze(-1)  # [N, time]
        number, playing, begun = episode_numbers(done.T.cpu(), playing, begun)
        batch.set(("next", _NUMBER), number.T.to(done.device))
        rows: TensorDict = torch.cat([*waiting, rows_of(batch).cpu()])
        if raw := [key for key in rows.keys() if isinstance(key, str) and key.endswith(RAW_REWARD)]:
            raise ValueError(f"The rewards are less a divergence penalty, see {raw[0]!r}: penalize rows in training.")
        rows = rows[rows.get(_NUMBER) < episodes]
        rows = rows[rows.get(_NUMBER).argsort()]
        # The rows continue the written ones as far as their numbers have no gap.
        ready = int((rows.get(_NUMBER) == written + torch.arange(len(rows))).sum())
        if ready:
            yield rows[:ready].exclude(_NUMBER)
        written, waiting = written + ready, [rows[ready:]]
        if written == episodes:
            return


def _name(thing: Any) -> str:
    return "random tokens" if thing is None else type(thing).__name__


Policy = Callable[[TensorDictBase], TensorDictBase]
"""Reads a row, writes ``action``."""


def seed_of_games(seed: int, numbers: range) -> int:
    """The seed of the games ``numbers``, below ``2**32``: other games get an independent one.

    Examples:
        >>> from torchrl_lang.data.generate import seed_of_games
        >>> seed_of_games(0, range(0, 10)) == seed_of_games(0, range(10, 20))
        False
    """
    return int(np.random.SeedSequence([seed, numbers.start]).generate_state(1)[0])


@torch.no_grad()
def play_to_end(
    env: EnvBase, policy: Policy, start: TensorDictBase | None = None, *, reward_key: NestedKey | None = REWARD
) -> TensorDict:
    """Let a policy play every row of an environment to its end, without beginning other games.

    Args:
        env: a batched language environment, possibly transformed.
        policy: reads a row, writes ``action``.
        start: what a reset returned; by default the environment is reset.
        reward_key: see :func:`~torchrl_lang.data.rows_from_rollout`.

    Returns:
        Rows ``[N]`` in the order of the environment's rows.

    Examples:
        >>> from torchrl_lang.data.generate import play_to_end
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=3, batch_size=[4], seed=0)
        >>> rows = play_to_end(env, CorridorPlayer(env.tokenizer, length=3))
        >>> len(rows), bool((rows["terminated"] | rows["truncated"]).all())
        (4, True)
    """
    start = env.reset() if start is None else start
    # Each step adds a token or more, so no game has as many steps as a row has tokens.
    until: Any = {"break_when_any_done": False, "break_when_all_done": True}
    rollout = env.rollout(start.get(TOKENS).shape[-1], policy, auto_reset=False, tensordict=start, **until)
    done = rollout.get(("next", DONE)).squeeze(-1)
    return rows_at(rollout, done & (done.cumsum(-1) == 1), reward_key=reward_key)


class EpisodeSampler(ABC):
    """Makes rows of games, which are numbered from zero. Abstract: subclasses implement :meth:`__call__`.

    :func:`~torchrl_lang.data.generate_in_parts` writes a sampler's games to disk,
    :class:`~torchrl_lang.data.FreshEpisodes` draws batches of new ones without end.

    Args:
        tokenizer: the tokenizer of the rows.
        row_length: the width of the rows.
    """

    def __init__(self, tokenizer: Tokenizer, row_length: int) -> None:
        self.tokenizer, self.row_length = tokenizer, row_length

    @abstractmethod
    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """The rows ``[N]`` of the games ``numbers``, one or more for each game, on the CPU.

        The result depends on the arguments only (see :func:`seed_of_games`). Entries beside those of a row,
        ``terminated`` and ``truncated`` are stored with the rows.
        """

    def notes(self) -> dict[str, Any]:
        """Settings of the games, as JSON, for the manifest of a dataset."""
        return {"sampler": type(self).__name__}


class PolicySampler(EpisodeSampler):
    """Games of one policy.

    Games are played in waves, one on each row of the environment, and all that begin are kept, so short ones are not
    preferred. What the last wave plays too many is dropped: ask for a multiple of the number of rows.

    Args:
        env: a batched language environment, possibly transformed. It is seeded and not closed.
        policy: reads a row, writes ``action``. Generators that it or its modules hold are seeded during a call (see
            :func:`~torchrl_lang._random_stream.seeded_generators`), as are torch's own.

    Examples:
        >>> from torchrl_lang.data import PolicySampler
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=3, batch_size=[4])
        >>> games = PolicySampler(env, CorridorPlayer(env.tokenizer, length=3))
        >>> rows = games(range(6), seed=0)
        >>> len(rows), bool((rows == games(range(6), seed=0)).all())
        (6, True)
    """

    def __init__(self, env: EnvBase, policy: Policy) -> None:
        super().__init__(env.tokenizer, env.observation_spec[TOKENS].shape[-1])
        self.env, self.policy = env, policy

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See ``EpisodeSampler.__call__``."""
        seed, waves = seed_of_games(seed, numbers), []
        with seeded_generators(seed, self.policy):
            self.env.set_seed(seed)
            for _ in range(0, len(numbers), self.env.batch_size.numel()):
                waves.append(play_to_end(self.env, self.policy).cpu())
        return cat_rows(waves)[: len(numbers)]

    def notes(self) -> dict[str, Any]:
        """See ``EpisodeSampler.notes``."""
        return {**super().notes(), "policy": type(self.policy).__name__}


def cat_rows(blocks: list[TensorDict]) -> TensorDict:
    """Rows ``[N]`` of several blocks with the same entries."""
    rows: Any = torch.cat(blocks, 0)  # typed as a tensor by torch
    return rows


class FreshEpisodes:
    """Batches of rows of new games, without end: no row is sampled twice.

    It takes the place of :func:`~torchrl_lang.data.row_buffer` in a training loop: ``sample()`` returns a batch,
    trimmed to its longest row, and iteration never ends. Games are made in rounds when they are needed, and the rows of
    a round are shuffled. The state is three integers. A sampler that loads them makes the current round again and then
    returns the same batches as the original.

    Args:
        sampler: makes the games, e.g. a :class:`~torchrl_lang.data.PolicySampler`.
        batch_size: rows per batch.
        games: games per round, best a multiple of the number of rows of the sampler's environment. All rows of a round
            are in memory.
        seed: seed of the games and of their order.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> from torchrl_lang.data import FreshEpisodes, PolicySampler
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=3, batch_size=[16])
        >>> fresh = FreshEpisodes(PolicySampler(env, CorridorPlayer(env.tokenizer, length=3)), batch_size=10, games=16)
        >>> [fresh.sample().shape[0] for _ in range(3)], fresh.state_dict()
        ([10, 10, 10], {'seed': 0, 'round': 1, 'position': 14})
    """

    @checked
    def __init__(
        self, sampler: EpisodeSampler, batch_size: Count, *, games: Count = 1024, seed: Annotated[int, 0] = 0
    ) -> None:
        self.sampler, self.batch_size, self.games, self.seed = sampler, batch_size, games, seed
        self._trim = TrimRows()
        self._round, self._position = 0, 0
        self._rows: TensorDict | None = None

    def sample(self) -> TensorDictBase:
        """The next batch ``[batch_size]``."""
        blocks: list[TensorDict] = []
        wanted = self.batch_size
        while wanted:
            rows = self._current()
            blocks.append(rows[self._position : self._position + wanted])
            self._position += len(blocks[-1])
            wanted -= len(blocks[-1])
            if self._position == len(rows):
                self._round, self._position, self._rows = self._round + 1, 0, None
        return self._trim(cat_rows(blocks))

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            yield self.sample()

    def _current(self) -> TensorDict:
        """The shuffled rows of the current round."""
        if self._rows is None:
            first = self._round * self.games
            rows = self.sampler(range(first, first + self.games), self.seed)
            if not len(rows):
                raise ValueError(f"{self.games} games of {type(self.sampler).__name__} have no row: make more a round.")
            order = np.random.default_rng([self.seed, self._round]).permutation(len(rows))
            self._rows = rows[torch.from_numpy(order)]
        return self._rows

    def state_dict(self) -> dict[str, Any]:
        """Three integers that can be written as JSON."""
        return {"seed": self.seed, "round": self._round, "position": self._position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, including its seed; the sampler and ``games`` must be the same."""
        self.seed, self._round, self._position = (int(state_dict[key]) for key in ("seed", "round", "position"))
        self._rows = None


_PLAN = "plan.json"


_Part = tuple[Path, range]
"""The folder and the numbers of some games of a dataset."""


@checked
def generate_in_parts(
    sampler: EpisodeSampler,
    folder: str | Path,
    *,
    games: Count,
    seed: int = 0,
    games_per_part: Count = 4096,
    workers: Count = 1,
    source: str | None = None,
    notes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> RowDataset:
    """Make games and write them to disk, ``games_per_part`` at a time.

    Each part is written to a hidden folder beside ``folder`` as soon as it is made. If the call is interrupted or
    killed, the same call continues: it makes only the parts that are missing. In the end the parts are joined to one
    dataset and deleted. The files depend on ``sampler``, ``games``, ``games_per_part`` and ``seed`` only, not on
    ``workers`` or interruptions. Calls count as the same if these numbers, ``source`` and all notes agree: a sampler's
    options that its notes do not contain are not compared.

    Args:
        sampler: makes the games. With several workers it is sent to other processes by ``spawn``; a script needs
            ``if __name__ == "__main__":`` then.
        folder: the folder to create.
        games: number of games.
        seed: seed of the games.
        games_per_part: games that are made at once and lost by an interruption, best a multiple of the number of rows
            of the sampler's environment.
        workers: number of processes that make games; 1 makes them in this one.
        source: a description for the manifest; default the sampler's class.
        notes: further JSON content for the manifest, beside ``sampler.notes()``.
        overwrite: replace an existing dataset, and the parts of an interrupted call with other arguments.
        progress: show a progress bar.

    Returns:
        The dataset, opened.

    Raises:
        FileExistsError: ``folder`` exists, or another process is writing it.
        ValueError: a number is out of range, or an interrupted call with other arguments has left parts.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import PolicySampler, generate_in_parts
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=3, batch_size=[16])
        >>> sampler = PolicySampler(env, CorridorPlayer(env.tokenizer, length=3))
        >>> with tempfile.TemporaryDirectory() as home:
        ...     len(generate_in_parts(sampler, home + "/data", games=40, games_per_part=16, progress=False))
        40
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists: give another folder, or overwrite=True (--overwrite).")
    source = type(sampler).__name__ if source is None else source
    every = {**sampler.notes(), **(notes or {})}
    plan = {"games": games, "games_per_part": games_per_part, "seed": seed, "source": source, "notes": every}
    with folder_lock(folder.with_name(f".{folder.name}.parts"), "generates", shown=folder) as home:
        _begin_parts(home, json.loads(json.dumps(plan)), folder, overwrite=overwrite)
        starts = range(0, games, games_per_part)
        parts = [(home / f"{n:06}", range(s, min(s + games_per_part, games))) for n, s in enumerate(starts)]
        missing = [part for part in parts if not (part[0] / MANIFEST).exists()]
        with tqdm(total=games, unit="game", disable=not progress) as bar:
            bar.update(games - sum(len(numbers) for _, numbers in missing))
            for made in _made(sampler, missing, seed, min(workers, len(missing))):
                bar.update(made)
        keep = [key for key in load_dataset(parts[0][0], verify=False).rows.keys() if key not in DISK_DTYPES]
        options: dict[str, Any] = {"seed": seed, "source": source, "overwrite": overwrite, "keep": keep}
        with DatasetWriter(folder, sampler.tokenizer, sampler.row_length, **options) as writer:
            writer.notes = every
            for part, _ in parts:
                writer.extend(load_dataset(part, tokenizer=sampler.tokenizer)[:])
        shutil.rmtree(home)
    return load_dataset(folder, tokenizer=sampler.tokenizer, verify=False)


def _begin_parts(home: Path, plan: dict[str, Any], folder: Path, *, overwrite: bool) -> None:
    """Write the plan, without the parts of a call with another one; raises ValueError unless these may be deleted."""
    path = home / _PLAN
    if path.exists():
        found = read_json(path, remedy=f"delete {home}")
        if found == plan:
            return
        if not overwrite:
            other = ", ".join(sorted(key for key in plan if found.get(key) != plan[key]))
            raise ValueError(f"{home} holds parts of a call with other arguments ({other}): repeat it, or overwrite.")
        for left in home.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    write_json(path, plan)


def _made(sampler: EpisodeSampler, parts: list[_Part], seed: int, workers: int) -> Iterator[int]:
    """Make parts, in any order; yields the number of games of each when it has been written."""
    if workers < 2:
        for part in parts:
            yield _make(sampler, part, seed)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker) as pool:
        futures = [pool.submit(_make, sampler, part, seed) for part in parts]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _make(sampler: EpisodeSampler, part: _Part, seed: int) -> int:
    folder, numbers = part
    rows = sampler(numbers, seed)
    write_dataset(folder, rows, sampler.tokenizer, keep=[*rows.keys()])
    return len(numbers)


def _begin_worker() -> None:
    """One thread per process; Ctrl-C is left to the parent; and no process outlives its parent."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = cast(multiprocessing.process.BaseProcess, multiprocessing.parent_process())

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
