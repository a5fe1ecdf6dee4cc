"""Make a data set by letting a policy play an environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from tqdm import tqdm

from torchrl_lang.data.dataset_writer import DatasetWriter
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.episode_rows import EpisodeRows
from torchrl_lang.data.rollouts import episode_numbers
from torchrl_lang.data.tokenizers import Tokenizer
from torchrl_lang.schema import DONE, RAW_REWARD, REWARD, TOKEN_REWARD, TOKENS

__all__ = ["generate_dataset"]

_NUMBER = "episode_number"
_STEPS_PER_BATCH = 8
"""Steps between two looks at what has finished: few, because all but the first play on in vain at the end."""


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
    """Let ``policy`` play the first ``episodes`` episodes of ``env`` in a TorchRL collector and write them to disk.

    The data set holds the episodes that *begin* first, in that order, and waits for each of them. Keeping those that
    finish first instead would favour short episodes: a slow one would still be playing when the quota is full.

    The same environment, policy and seed give the same files, byte by byte. The seed is given to the environment and,
    for as long as this takes, to torch's global stream, which sampling modules draw from and which is put back as it
    was. A policy with a random stream of its own is seeded by whoever made it.

    Args:
        env: a batched language environment, transformed or not. It is left open.
        policy: reads the environment's observation and writes ``action``; None plays random tokens.
        folder: where the data set shall stand.
        episodes: how many.
        seed: seed of the environment and of sampling.
        tokenizer: default ``env.tokenizer``.
        source: who plays what, in words, for the manifest; default the names of the classes.
        notes: anything more to keep in the manifest, as JSON.
        overwrite: replace the data set that stands there.
        progress: show a progress bar with the mean return so far.
        reward_key: the steps' reward that ``token_reward`` adds up to, as in
            :func:`~torchrl_lang.data.rows_from_rollout`: by default as the transforms of ``env`` left it; None keeps
            the environment's own token rewards.

    Returns:
        The data set, opened.

    Raises:
        ValueError: no episode is asked for, or a penalty for the divergence from a reference was taken off the rewards.
        FileExistsError: there is something in ``folder`` already.
    """
    if episodes < 1:
        raise ValueError(f"A data set holds at least one episode, episodes={episodes} came.")
    tokenizer = env.tokenizer if tokenizer is None else tokenizer
    source = f"{_name(policy)} in {_name(env)}" if source is None else source
    row_length = env.observation_spec[TOKENS].shape[-1]
    writer = DatasetWriter(folder, tokenizer, row_length, seed=seed, source=source, overwrite=overwrite)
    writer.notes = dict(notes or {})
    # The bar comes after the writer: what the writer refuses has a line of its own.
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
    """Batches of steps ``[N, time]``, without end."""
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
    waiting: list[TensorDict] = []  # rows that finished before their turn
    playing, begun, written = torch.arange(n), torch.tensor(n), 0
    for batch in steps:
        done = batch.get(("next", DONE)).squeeze(-1)  # [N, time]
        number, playing, begun = episode_numbers(done.T.cpu(), playing, begun)
        batch.set(("next", _NUMBER), number.T.to(done.device))
        rows: TensorDict = torch.cat([*waiting, rows_of(batch).cpu()])
        _refuse_penalty(rows)
        rows = rows[rows.get(_NUMBER) < episodes]
        rows = rows[rows.get(_NUMBER).argsort()]
        ready = int(_is_next(rows.get(_NUMBER), written).sum())
        if ready:
            yield rows[:ready].exclude(_NUMBER)
        written, waiting = written + ready, [rows[ready:]]
        if written == episodes:
            return


def _refuse_penalty(rows: TensorDictBase) -> None:
    """Refuse rewards less a penalty: that of the same rows could be taken off again once the mark is gone."""
    raw = [key for key in rows.keys() if isinstance(key, str) and key.endswith(RAW_REWARD)]
    if raw:
        raise ValueError(
            f"A penalty was taken off the environment's rewards ({raw[0]!r} has them without it), and a data set keeps "
            "no record of that: leave the transform of the penalty out, and take it off the rows when training."
        )


def _is_next(number: Tensor, written: int) -> Tensor:
    """True on those of ascending numbers that follow on what was written, without a gap."""
    return number == written + torch.arange(number.shape[0])


def _name(thing: Any) -> str:
    return "random tokens" if thing is None else type(thing).__name__
