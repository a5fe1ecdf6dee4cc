"""Generate a dataset by running a policy in an environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from tqdm import tqdm

from torchrl_lang._checks import at_least_one
from torchrl_lang.data.dataset_writer import DatasetWriter
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.episode_rows import EpisodeRows
from torchrl_lang.data.rollouts import episode_numbers
from torchrl_lang.schema import DONE, RAW_REWARD, REWARD, TOKEN_REWARD, TOKENS
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["generate_dataset"]

_NUMBER = "episode_number"
_STEPS_PER_BATCH = 8
"""Steps between checks for finished episodes; few, because steps after the last one needed are wasted."""


def generate_dataset(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase] | None,
    folder: str | os.PathLike[str],
    *,
    episodes: int,
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
            None keeps the environment's own token rewards.

    Returns:
        The dataset, opened.

    Raises:
        ValueError: ``episodes`` is below 1, or a divergence penalty was subtracted from the rewards.
        FileExistsError: ``folder`` exists.
    """
    at_least_one("episodes", episodes)
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
        for rows in _episodes_in_order(steps, env.batch_size.numel(), episodes, rows_of):
            writer.extend(rows)
            written, total = written + rows.shape[0], total + float(rows.get(TOKEN_REWARD).sum())
            bar.set_postfix(mean_return=f"{total / written:.3f}", refresh=False)
            bar.update(rows.shape[0])
    return load_dataset(folder, tokenizer=tokenizer, verify=False)


def _steps(env: EnvBase, policy: Callable[[TensorDictBase], TensorDictBase] | None) -> Iterator[TensorDictBase]:
    """Endless iterator over batches of steps ``[N, time]``."""
    rows = env.batch_size.numel()
    collector = Collector(
        env,
        policy,
        frames_per_batch=rows * _STEPS_PER_BATCH,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    try:
        for batch in collector:
            yield batch.reshape(rows, _STEPS_PER_BATCH)
    finally:
        collector.shutdown(close_env=False)


def _episodes_in_order(
    steps: Iterator[TensorDictBase], n: int, episodes: int, rows_of: EpisodeRows
) -> Iterator[TensorDict]:
    """The first ``episodes`` episodes to begin in ``n`` environments, in order, as blocks of rows on the CPU."""
    waiting: list[TensorDict] = []  # rows that finished before an earlier episode
    playing, begun, written = torch.arange(n), torch.tensor(n), 0
    for batch in steps:
        done = batch.get(("next", DONE)).squeeze(-1)  # [N, time]
        number, playing, begun = episode_numbers(done.T.cpu(), playing, begun)
        batch.set(("next", _NUMBER), number.T.to(done.device))
        rows: TensorDict = torch.cat([*waiting, rows_of(batch).cpu()])
        _refuse_penalty(rows)
        rows = rows[rows.get(_NUMBER) < episodes]
        rows = rows[rows.get(_NUMBER).argsort()]
        # The rows continue the written ones as far as their numbers have no gap.
        ready = int((rows.get(_NUMBER) == written + torch.arange(len(rows))).sum())
        if ready:
            yield rows[:ready].exclude(_NUMBER)
        written, waiting = written + ready, [rows[ready:]]
        if written == episodes:
            return


def _refuse_penalty(rows: TensorDictBase) -> None:
    """Reject penalized rewards: without a mark in the dataset, the same penalty could be subtracted again."""
    raw = [key for key in rows.keys() if isinstance(key, str) and key.endswith(RAW_REWARD)]
    if raw:
        raise ValueError(
            f"A divergence penalty was subtracted from the environment's rewards ({raw[0]!r} holds the original ones), "
            "which a dataset does not record: remove the transform of the penalty, and penalize the rows in training."
        )


def _name(thing: Any) -> str:
    return "random tokens" if thing is None else type(thing).__name__
